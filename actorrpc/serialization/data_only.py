"""The data-only mode: messages that contain only data, and cannot make the receiver run code.

A message is a sequence of msgpack values. None, booleans, numbers, texts and bytes are written directly. Every other value is a
header, which has the value's kind and the number of its parts, followed by the parts. A table maps each kind to a maker, which
checks the parts and makes a value of them. A function or class is sent as a text; the receiver looks the text up in its table of
exposed functions or of allowed classes. Reading a message imports no module, reads no attribute by a name from the message, and
calls only makers and allowed classes; the worker later calls the function that a request names. All other values are refused with
:class:`~actorrpc.errors.RefusedError`. Memory is not allocated from a length that a message announces. An object that occurs
several times in a message arrives as several objects.

The tables are filled at import (:func:`exposed`, :func:`allow`), and read by threads that write or read messages. Each step is
one atomic operation of a dict. No I/O, no locks.
"""

from __future__ import annotations

import builtins
import copyreg
import datetime
import decimal
import enum
import inspect
import operator
import re
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any, Final, NoReturn, TypeVar, overload

import msgpack
import torch

from actorrpc import errors
from actorrpc._exceptions import is_of_handler
from actorrpc.errors import ConfigError, ProtocolError, RefusedError, RpcError, WrongTypeError
from actorrpc.serialization import exceptions, tensors
from actorrpc.serialization.tensors import INLINE_BYTES
from actorrpc.wire.identity import WorkerInfo

__all__ = [
    "MAX_DEPTH",
    "MAX_SAME_HASH",
    "Named",
    "allow",
    "dumps",
    "exposed",
    "find_named",
    "loads",
    "permit_maker",
]

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

MAX_DEPTH: Final = 100
"""How deeply values of a message may be nested."""

MAX_SAME_HASH: Final = 1000
"""How many keys of a dict, or members of a set, may have the same hash: Python compares each with the others. A sender can
choose the hashes of numbers and tuples, but not of texts."""

_SALTED: Final = frozenset({str, bytes})
_AT_ONCE: Final = 256  # keys hashed in one call of C code; other threads may run between two calls

_functions: Final[dict[str, Callable[..., Any]]] = {}
_allowed: Final[dict[str, type]] = {}
_errors: Final[dict[str, type[BaseException]]] = {}
# _makers: kind -> maker.
# _takers: type, or function that a reducer returns -> kind, and the function that returns a value's parts.
_makers: Final[dict[bytes, Callable[..., Any]]] = {}
_takers: Final[dict[Any, tuple[bytes, Callable[[Any], Sequence[Any]]]]] = {}


# -- for users -----------------------------------------------------------------------------


@overload
def exposed(function: F) -> F: ...
@overload
def exposed(*, name: str) -> Callable[[F], F]: ...
def exposed(function: Any = None, *, name: str | None = None) -> Any:
    """Let peers call a function of this worker in the data-only mode. A decorator; does not change the function.

    Callers import the function, or use the name that was given to the decorator::

        @exposed
        def score(batch): ...

        @exposed(name="score/2")
        def other(batch): ...

        rpc_sync("service", Named("score/2"), (batch,))

    The function has to check its arguments: they are data, but peers choose them.

    Args:
        name: the name for :class:`Named`; by default the module and the qualified name.

    Raises:
        WrongTypeError: ``function`` is not a function, or ``name`` is not a str.
        ConfigError: another function has this name, or the function cannot be imported by its own name and ``name`` is not given.
    """
    return partial(_expose, name=name) if function is None else _expose(function, name)


def _expose(function: Any, name: str | None) -> Any:
    if not inspect.isroutine(function):
        raise WrongTypeError(f"exposed() marks functions, not {function!r}; types of data are for allow()")
    own = _title(function)
    title = own if name is None else name
    if not isinstance(title, str) or not title:
        raise WrongTypeError(f"the name of an exposed function is a str, not {name!r}")
    if "<" in title and name is None:
        raise ConfigError(f"{function!r} cannot be named by peers: give it a name, exposed(name=...)")
    known = _functions.get(title, function)
    if known is not function and _title(known) != own:  # a module may be loaded again
        raise ConfigError(f"{known!r} is exposed under the name {title!r} already")
    _functions[title] = _functions[own] = function
    return function


def allow(cls: C) -> C:
    """Let objects of a user's class be received in the data-only mode: a dataclass, named tuple, enum or exception. A decorator.

    Peers choose the arguments of the constructor and the attributes of instances, so the class must only store them.
    To allow a class does not allow its subclasses.

    Raises:
        WrongTypeError: ``cls`` is not a class, or its instances do more than store data (callables, functions, modules).
    """
    if not isinstance(cls, type):
        raise WrongTypeError(f"allow() marks classes, not {cls!r}; functions are for exposed()")
    if issubclass(cls, (type, FunctionType, types.CodeType, types.ModuleType)) or "__call__" in dir(cls):
        raise WrongTypeError(f"{cls.__qualname__} does more than hold data: its instances can be called")
    table: dict[str, Any] = _errors if issubclass(cls, BaseException) else _allowed
    table[_title(cls)] = cls
    return cls


class Named:
    """Stands for a function of another worker, by the name under which that worker exposes it.

    For callers that cannot import the function. Works for all workers, whether in the data-only mode or not.

    Raises (at the called worker):
        RefusedError: no function is exposed under this name.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise WrongTypeError(f"an exposed function is named by a str, not {name!r}")
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that this process exposes under the name."""
        return find_named(self.name)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return find_named, (self.name,)

    def __repr__(self) -> str:
        return f"Named({self.name!r})"


def find_named(name: str) -> Callable[..., Any]:
    """Return the function that this process exposes under a name (wire format).

    Raises:
        RefusedError: no function is exposed under this name.
    """
    return _found(_functions, name)  # type: ignore[no-any-return]


# -- for this package ----------------------------------------------------------------------


def permit_maker(function: Callable[..., Any]) -> None:
    """Make a function of this package a maker: :func:`loads` calls the function with arguments that the peer chose. Only needed
    for functions of modules that this module must not import."""
    _kind(_name_of(function), function, function)


def _kind(name: str, make: Callable[..., Any], what: Any = None, take: Callable[[Any], Any] = tuple) -> None:
    _makers[name.encode()] = make
    if what is not None:
        _takers[what] = name.encode(), take


def _title(thing: Any) -> str:
    """Return module and name of a function or class. A title with ``<`` cannot be imported."""
    return f"{getattr(thing, '__module__', None) or '<none>'}.{getattr(thing, '__qualname__', '<none>')}"


def _name_of(function: Any) -> str:
    title = _title(function)
    if "<" in title or not isinstance(getattr(function, "__self__", None), types.ModuleType | None):
        _refuse(title)
    return title


def _refuse(what: str) -> NoReturn:
    raise RefusedError(f"{what[:200]} cannot be sent to a worker that takes data only (see SECURITY.md)")


# -- makers: each checks its arguments ---------------------------------------------------------------


def _wrong(what: str) -> NoReturn:
    raise ProtocolError(f"a message cannot be opened: {what}")


def _found(table: Mapping[str, Any], name: Any) -> Any:
    if type(name) is not str or name not in table:
        shown = name[:200] if type(name) is str else f"a {type(name).__name__} for a name"
        raise RefusedError(
            f"{shown} is refused: this worker does not accept the name. A worker marks functions that peers may call with "
            f"exposed(), and classes of data with allow()"
        )
    return table[name]


def _of(make: Callable[..., Any], *kinds: type) -> Callable[..., Any]:
    """Return a function that checks that its arguments, and the members of tuples, have these types, and then calls ``make``."""

    def checked(*values: Any) -> Any:
        for value in values:
            for each in value if type(value) is tuple else (value,):
                if type(each) not in kinds:
                    _wrong(f"a part of a value has the wrong type {type(each).__name__}")
        return make(*values)

    return checked


def _check_hashes(keys: Sequence[Any]) -> None:
    """Raise ProtocolError if too many keys have the same hash. The time does not depend on the hashes."""
    if set(map(type, keys)) <= _SALTED:
        return
    different: set[int] = set()
    for start in range(0, len(keys), _AT_ONCE):
        different.update(map(hash, keys[start : start + _AT_ONCE]))
    if len(keys) - len(different) >= MAX_SAME_HASH:
        hashes = sorted(map(hash, keys))
        if any(map(operator.eq, hashes, hashes[MAX_SAME_HASH:])):
            _wrong(f"more than {MAX_SAME_HASH} keys, or members of a set, have the same hash")


def _distinct(make: Callable[..., Any], pairs: bool = False) -> Callable[..., Any]:
    def checked(*values: Any) -> Any:
        keys = values[::2] if pairs else values
        members = tuple(zip(keys, values[1::2], strict=True)) if pairs else values
        if len(keys) <= MAX_SAME_HASH:
            made = make(members)
        else:
            _check_hashes(keys)
            growing: Any = make() if pairs else set()
            for start in range(0, len(members), _AT_ONCE):
                growing.update(members[start : start + _AT_ONCE])
            made = growing if pairs or make is set else make(growing)
        if len(made) != len(members):
            _wrong("a key of a dict, or a member of a set, occurs twice")
        return made

    return checked


def _attributes(state: Any) -> dict[str, Any]:
    """Return ``state`` if it is a dict whose keys are names of attributes that a peer may set, else raise ProtocolError."""
    if type(state) is not dict:
        _wrong(f"the attributes of an object are a {type(state).__name__}, not a dict")
    for name in state:
        if type(name) is not str or (name.startswith("__") and name != "__notes__"):
            _wrong(f"an attribute has the name {str(name)[:100]!r}, which is refused")
    return state


def _exception(name: Any, seed: Any, args: Any, fields: Any, attributes: Any) -> BaseException:
    cls = _found(_errors, name)
    if type(seed) is not tuple or type(args) not in (tuple, NoneType):
        _wrong("the arguments of an exception are not a tuple")
    return exceptions.assemble(cls, seed, (args, _attributes(fields), _attributes(attributes)))


def _object(name: Any, new: Any, args: Any, state: Any) -> Any:
    cls = _found(_allowed, name)
    made = cls.__new__(cls, *args) if new else cls(*args)
    if state is not None and hasattr(cls, "__setstate__"):
        made.__setstate__(state)
    elif state is not None:
        for part in state if type(state) is tuple and len(state) == 2 else (state,):
            for attribute, value in _attributes({} if part is None else part).items():
                object.__setattr__(made, attribute, value)
    return made


_DTYPE: Final = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f(?:2|4|8|16)|c(?:8|16|32)|[SU][1-9]\d{0,5})", re.ASCII)


# A scalar numpy.str_ or numpy.bytes_ is made without numpy.ndarray, which cannot make a text that is empty or ends in zeros.
_TEXT: Final = re.compile(r"([<>|=]?)([SU])(\d{1,6})", re.ASCII)


def _numpy_text(numpy: Any, order: str, kind: str, length: str, memory: Any) -> Any:
    if type(memory) is not bytes or len(memory) != int(length) * (4 if kind == "U" else 1):
        _wrong(f"a numpy text does not have {length[:100]} characters")
    if kind == "S":
        return numpy.bytes_(memory)
    return numpy.str_(memory.decode("utf-32-be" if order == ">" else "utf-32-le", "surrogatepass"))


def _array(dtype: str, shape: Any, memory: Any) -> Any:
    """Make a numpy array, or a numpy scalar if ``shape`` is None. Imports nothing: torch has imported numpy, if it exists."""
    numpy = sys.modules.get("numpy")
    text = _TEXT.fullmatch(dtype) if shape is None else None
    if numpy is None or (text is None and _DTYPE.fullmatch(dtype) is None):
        raise RefusedError(
            f"a numpy array of {dtype[:100]!r} is refused: only plain numbers and texts are taken"
        )
    if text is not None:
        return _numpy_text(numpy, text[1], text[2], text[3], memory)
    data = bytearray(memory) if type(memory) is bytes else memory.cpu().numpy()
    found = numpy.ndarray(shape or (), dtype, data)  # raises if there are too few bytes; does not copy them
    if found.shape != (shape or ()) or found.nbytes != memoryview(data).nbytes:
        _wrong(f"an array of shape {shape} cannot have {memoryview(data).nbytes} bytes")
    if found.dtype.kind == "U":
        points = numpy.ndarray(found.nbytes // 4, f"{dtype[0]}u4", data)
        if points.max(initial=0) > sys.maxunicode:
            _wrong("an array of texts has an invalid character")
    return found[()] if shape is None else found


# -- taking apart --------------------------------------------------------------------------------


def _array_parts(value: Any, single: bool) -> tuple[Any, ...]:
    if (_DTYPE.fullmatch(value.dtype.str) or (single and _TEXT.fullmatch(value.dtype.str))) is None:
        _refuse(f"a numpy array of {value.dtype}, whose elements are not plain numbers or texts,")
    if single and value.dtype.kind in "US":
        whole = value.encode("utf-32-le", "surrogatepass") if value.dtype.kind == "U" else bytes(value)
        return f"<{value.dtype.kind}{len(value)}", None, whole
    memory: Any = value.tobytes() if single or value.nbytes <= INLINE_BYTES else None
    if memory is None:
        whole = value if value.flags.c_contiguous and value.flags.writeable else value.copy()
        memory = torch.frombuffer(whole, dtype=torch.uint8)
    return value.dtype.str, None if single else value.shape, memory


def _slice_parts(plain: tuple[type, ...], value: slice[Any, Any, Any]) -> tuple[Any, ...]:
    parts = value.start, value.stop, value.step
    for part in parts:
        if type(part) not in plain and not (
            type(part) is tuple and all(type(each) in plain for each in part)
        ):
            _refuse(f"a slice with a {type(part).__qualname__}, which is not a plain value,")
    return parts


def _error_parts(error: Any) -> tuple[Any, ...]:
    cls, seed, state = exceptions.parts(error)
    return _title(cls), seed, *state


def _object_parts(value: Any) -> tuple[Any, ...]:
    """Return the parts of an object as pickle would. The receiver checks whether the class is allowed."""
    cls: Any = type(value)
    if isinstance(value, enum.Enum):  # early releases of Python 3.11 pickle members as attributes
        return _title(cls), False, (value._value_,), None
    reduced = None if isinstance(value, type | types.ModuleType) else cls.__reduce_ex__(value, 4)
    if type(reduced) is not tuple or any(part is not None for part in reduced[3:]):
        _refuse(_title(value if isinstance(value, type) else cls))
    function, args, state = (*reduced, None)[:3]
    new = function is copyreg.__newobj__  # type: ignore[attr-defined]
    if not new and function is not cls:
        _refuse(_title(cls))
    return _title(cls), new, tuple(args[new:]), state


def _apart(value: Any, kind: type, reducers: Mapping[Any, Any]) -> tuple[bytes, Sequence[Any]]:
    """Return a value's kind and parts."""
    taker = _takers.get(exceptions.Travel if isinstance(value, BaseException) else kind)
    if taker is not None:
        return taker[0], taker[1](value)
    reducer = reducers.get(kind)
    if reducer is not None:
        function, args, *more = reducer(value)
        taker = _takers.get(function)
        if taker is None:
            _refuse(_title(kind))
        if any(part is not None for part in more):
            _refuse(f"{_title(kind)} with added attributes ({', '.join(map(str, more[0] or ()))})")
        return taker[0], args
    numpy = sys.modules.get("numpy")
    if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        return b"array", _array_parts(value, kind is not numpy.ndarray)
    return b"object", _object_parts(value)


def _fill_tables() -> None:
    _kind("list", lambda *values: list(values), list)
    _kind("tuple", lambda *values: values, tuple)
    for pairs in (dict, OrderedDict):
        _kind(pairs.__name__, _distinct(pairs, pairs=True), pairs, lambda each: [*chain(*list(each.items()))])
    for members in (set, frozenset):
        _kind(members.__name__, _distinct(members), members)
    _kind("deque", lambda most, *values: deque(values, most), deque, lambda value: (value.maxlen, *value))
    big: Any = partial(int.from_bytes, byteorder="little", signed=True)
    _kind("int", _of(big, bytes), int, lambda n: [n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)])
    _kind("bytearray", _of(bytearray, bytes), bytearray, lambda value: (bytes(value),))
    plain = int, float, bool, str, bytes, NoneType, datetime.timedelta, datetime.timezone
    moments = datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone
    _kind("slice", _of(slice, *plain), slice, partial(_slice_parts, plain))
    for cls in (range, decimal.Decimal, *moments, torch.device):
        _kind(cls.__name__, _of(cls, *plain), cls, lambda value: value.__reduce_ex__(4)[1])
    _kind("complex", _of(complex, float), complex, lambda value: (value.real, value.imag))
    dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    _kind("dtype", dtypes.__getitem__, torch.dtype, lambda value: (str(value).removeprefix("torch."),))
    _kind("Size", _of(lambda *sizes: torch.Size(sizes), int), torch.Size)
    built = "tensor", "parameter", "untyped_storage", "typed_storage", "sparse_coo", "sparse_compressed"
    for name in built:
        _kind(name, _of(getattr(tensors, name), int, bool, str), getattr(tensors, name))
    _kind("array", _of(_array, str, int, NoneType, bytes, torch.Tensor))
    for kind in (FunctionType, BuiltinFunctionType):
        _kind("function", find_named, kind, lambda function: (_name_of(function),))
    _kind("function", find_named, Named, lambda named: (named.name,))
    for known in (*vars(builtins).values(), *(getattr(errors, name) for name in errors.__all__)):
        if isinstance(known, type) and issubclass(known, BaseException):
            _errors[_title(known)] = known
    _kind("exception", _exception, exceptions.Travel, _error_parts)
    _kind("object", _object)
    allow(WorkerInfo)


_fill_tables()

# -- messages ------------------------------------------------------------------------------------

_HEADER: Final = 1  # msgpack's code for our headers: 4 bytes with the number of parts, then the kind
_ATOMS: Final = frozenset({NoneType, bool, int, float, str, bytes})


def _write(value: Any, row: list[Any], reducers: Mapping[Any, Any], depth: int = 0) -> None:
    kind = type(value)
    if kind in _ATOMS and (kind is not int or -(1 << 63) <= value < 1 << 64):
        row.append(value)
        return
    if depth >= MAX_DEPTH:
        _refuse(f"a {kind.__qualname__} that is nested deeper than {MAX_DEPTH}, or part of itself,")
    name, parts = _apart(value, kind, reducers)
    row.append(msgpack.ExtType(_HEADER, len(parts).to_bytes(4, "big") + name))
    for part in parts:
        _write(part, row, reducers, depth + 1)


def dumps(obj: Any, reducers: Mapping[Any, Any]) -> bytes:
    """Return an object as the bytes of a message.

    Args:
        reducers: type -> reducer, as for pickle. The function in a reducer's result determines the kind.

    Raises:
        RefusedError: a part of the message is not data.
        SerializationError: an object cannot be reduced.
    """
    row: list[Any] = []
    try:
        _write(obj, row, reducers)
        return b"".join(map(msgpack.Packer(unicode_errors="surrogatepass").pack, row))
    except RpcError:
        raise
    except Exception as error:
        if is_of_handler(error):
            raise
        raise errors.SerializationError(
            f"a message cannot be sent: {type(error).__name__}: {error}"
        ) from error


def _header(code: int, data: bytes) -> tuple[Callable[..., Any], int]:
    make = _makers.get(data[4:])
    if code != _HEADER or make is None:
        raise RefusedError(f"a value of the kind {data[4:104]!r} is refused: this worker takes data only")
    return make, int.from_bytes(data[:4], "big")


def _read(values: Iterator[Any], depth: int = 0) -> Any:
    value = next(values)
    if type(value) is tuple:
        if depth >= MAX_DEPTH:
            _wrong(f"nested deeper than {MAX_DEPTH}")
        make, count = value
        return make(*[_read(values, depth + 1) for _ in range(count)])
    if type(value) not in _ATOMS:
        _wrong(f"a value has the msgpack type {type(value).__name__}, which data-only messages never contain")
    return value


def loads(data: Any) -> Any:
    """Return the object that :func:`dumps` was given.

    Raises:
        RefusedError: the message names a kind, function or class that is not in the tables.
        ProtocolError: the message is not valid.
    """
    values = msgpack.Unpacker(
        ext_hook=_header,
        unicode_errors="surrogatepass",
        max_buffer_size=len(data),
        max_array_len=0,
        max_map_len=0,
    )
    try:
        values.feed(data)
        found = _read(values)
        if values.tell() != len(data):
            _wrong("there are bytes after the end of its value")
        return found
    except RpcError:
        raise
    except StopIteration:
        _wrong("it ends too early")
    except Exception as error:
        if is_of_handler(error):
            raise
        raise ProtocolError(
            f"a message cannot be opened: {type(error).__name__}: {str(error)[:200]}"
        ) from error
