"""The data-only mode: what peers send is opened by a machine that can make data and nothing else.

A table has the names that a message may contain: values (dtypes, exposed functions), and makers, each of which checks
its arguments before it makes one kind of data. Nothing is imported, no attribute of anything is looked up, and a function that
is named is never called while a message is opened: only the worker calls it, as the function of a request. Any other name is
refused with :class:`~actorrpc.errors.RefusedError` before anything is done with it.

The machine reads the part of pickle's protocol 5 that the codec writes. Python's own unpickler is not used. Lengths are compared
with what is there before anything is made of them.

The tables are filled when modules are imported (:func:`exposed`, :func:`allow`) and read by the threads that open messages, each
of which has a machine of its own; each step is one atomic operation of a dictionary. No I/O, no locks.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import inspect
import math
import re
import struct
import sys
import types
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NoReturn, TypeVar, overload

import torch

from actorrpc import errors
from actorrpc.errors import ConfigError, ProtocolError, RefusedError, RpcError, WrongTypeError
from actorrpc.serialization import exceptions, tensors
from actorrpc.wire.identity import WorkerInfo

__all__ = [
    "MAX_DEPTH",
    "MAX_KEY",
    "Maker",
    "Named",
    "allow",
    "attributes_of",
    "exposed",
    "find_named",
    "is_allowed",
    "loads",
    "permit_function",
    "permit_maker",
    "resolve",
    "set_state",
    "wrong",
]

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
_Name = tuple[str, str]


class Maker:
    """A name of the table that is no value: it may stand in front of its arguments, and nowhere else.

    ``cls``: the class that it stands for, where instances may be made without its constructor and be given state.
    ``argument``: it may itself be an argument of a maker that ``takes`` classes, as those of exceptions are.
    """

    __slots__ = ("argument", "cls", "make", "name", "takes")

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        cls: type | None = None,
        argument: bool = False,
        takes: bool = False,
    ) -> None:
        self.name = name
        self.make = make
        self.cls = cls
        self.argument = argument
        self.takes = takes


_values: Final[dict[_Name, Any]] = {}
_makers: Final[dict[_Name, Maker]] = {}
_named: Final[dict[str, Callable[..., Any]]] = {}
_allowed: Final[dict[type, bool]] = {}
_ABSENT: Final = object()


# -- what users say -----------------------------------------------------------------------------


@overload
def exposed(function: F) -> F: ...
@overload
def exposed(*, name: str) -> Callable[[F], F]: ...
def exposed(function: Any = None, *, name: str | None = None) -> Any:
    """Let peers call a function of this worker in the data-only mode. A decorator; changes nothing else.

    Callers name it as always, by importing it, or by the name given here::

        @exposed
        def score(batch): ...

        @exposed(name="score/2")
        def other(batch): ...

        rpc_sync("service", Named("score/2"), (batch,))

    What an exposed function does with its arguments is its own affair: they are data, but any data.

    Args:
        name: for :class:`Named`; the module and the qualified name by default.

    Raises:
        WrongTypeError: it is no function.
        ConfigError: another function has this name, or it has none that could be sent and none is given.
    """
    return partial(_expose, name=name) if function is None else _expose(function, name)


def _expose(function: Any, name: str | None) -> Any:
    if not inspect.isroutine(function):
        raise WrongTypeError(f"exposed() marks functions, not {function!r}; types of data are for allow()")
    module = getattr(function, "__module__", None) or ""
    qualname = getattr(function, "__qualname__", None) or ""
    importable = bool(module and qualname and "<" not in qualname)
    if not importable and name is None:
        raise ConfigError(f"{function!r} cannot be named by peers: give it a name, exposed(name=...)")
    title = f"{module}.{qualname}" if name is None else name
    if not isinstance(title, str) or not title:
        raise WrongTypeError(f"the name of an exposed function is a str, not {name!r}")
    known = _named.setdefault(title, function)
    if known is not function and not _same(known, function):
        raise ConfigError(f"{known!r} is exposed under the name {title!r} already")
    _named[title] = function
    if importable:
        _values[module, qualname] = function
    return function


def _same(one: Any, other: Any) -> bool:
    """Whether a function is the other one, from its module being loaded again."""
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def allow(cls: C) -> C:
    """Let objects of a class of yours arrive in the data-only mode: a dataclass, a named tuple, an enum. A decorator.

    Peers choose the arguments of its constructor and the attributes of its instances, so it must do nothing with
    either but keep them. Subclasses have to be allowed themselves.

    Raises:
        WrongTypeError: it is no class, or one that could do more than hold data (callable, a function, a module).
    """
    if not isinstance(cls, type):
        raise WrongTypeError(f"allow() marks classes, not {cls!r}; functions are for exposed()")
    if issubclass(cls, (type, types.FunctionType, types.CodeType, types.ModuleType)) or "__call__" in dir(
        cls
    ):
        raise WrongTypeError(f"{cls.__qualname__} does more than hold data: its instances can be called")
    _allowed[cls] = True
    argument = issubclass(cls, BaseException)
    _makers[cls.__module__, cls.__qualname__] = Maker(_title(cls), cls, cls, argument)
    return cls


class Named:
    """Stand for a function of another worker, by the name under which it is exposed there.

    For callers that cannot import it. Any worker finds what it has exposed, in the data-only mode or not.

    Raises (where it is called):
        RefusedError: nothing is exposed under that name.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise WrongTypeError(f"an exposed function is named by a str, not {name!r}")
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that has this name here."""
        return find_named(self.name)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return find_named, (self.name,)

    def __repr__(self) -> str:
        return f"Named({self.name!r})"


def find_named(name: str) -> Callable[..., Any]:
    """Return the function that is exposed here under a name (wire format).

    Raises:
        RefusedError: there is none.
    """
    function = _named.get(name) if isinstance(name, str) else None
    if function is None:
        raise RefusedError(f"no function is exposed here under the name {str(name)[:100]!r}")
    return function


# -- what the package says ----------------------------------------------------------------------


def permit_function(function: Callable[..., Any]) -> None:
    """Let peers call a function of this package. For the floors above."""
    _values[function.__module__, function.__qualname__] = function


def permit_maker(function: Callable[..., Any]) -> None:
    """Let messages contain what a function of this package makes. It is called while a message is opened, with any data
    for arguments. For the floors above."""
    _makers[function.__module__, function.__qualname__] = Maker(
        f"{function.__module__}.{function.__qualname__}", function
    )


def _title(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# -- makers: each believes nothing ---------------------------------------------------------------


def wrong(what: str) -> NoReturn:
    """Raise ProtocolError."""
    raise ProtocolError(f"a message cannot be opened: {what}")


def _whole(values: Iterable[Any]) -> None:
    for value in values:
        if type(value) is not int and type(value) is not bool:
            wrong(f"a {type(value).__name__} where a number must be")


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple:
        wrong(f"a {type(value).__name__} for a shape")
    _whole(value)
    if any(size < 0 for size in value):
        wrong(f"a shape of {value}")
    return tuple(value)


def _with_whole(make: Callable[..., Any], storage: int = 0) -> Callable[..., Any]:
    """Return ``make`` for whole numbers, also in tuples.

    Where the number of a storage stands, first in tuples or at the position ``storage``, there may be a device's name.
    """

    def checked(*args: Any) -> Any:
        for position, each in enumerate(args):
            values = each if type(each) is tuple else (each,)
            if values and type(values[0]) is str and (values is each or position == storage):
                values = values[1:]
            _whole(values)
        return make(*args)

    return checked


def _empty(cls: type) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        if args:
            wrong(f"arguments for an empty {cls.__name__}")
        return cls()

    return make


def _deque(items: Any = (), maxlen: Any = None) -> Any:
    if items != () or (maxlen is not None and type(maxlen) is not int):
        wrong("a deque that is not empty at first")
    return collections.deque(maxlen=maxlen)


def _number(cls: type) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        for each in args:
            if type(each) not in (
                int,
                float,
                str,
                bytes,
                bool,
                type(None),
                datetime.timedelta,
                datetime.timezone,
            ):
                wrong(f"a {type(each).__name__} in a {cls.__name__}")
        return cls(*args)

    return make


def _size(shape: Any = ()) -> torch.Size:
    return torch.Size(_shape(shape))


def _exception(cls: type[BaseException]) -> Callable[..., Any]:
    return lambda *args: cls(*args)


def _create(cls: Any, seed: Any = ()) -> Any:
    if not isinstance(cls, type) or not issubclass(cls, BaseException) or type(seed) is not tuple:
        wrong("an exception of no class")
    return exceptions._create(cls, seed)


def _restore(error: Any, state: Any) -> None:
    if not isinstance(error, BaseException) or type(state) is not tuple or len(state) != 3:
        wrong("the state of an exception")
    args, fields, attributes = state
    if args is not None and type(args) is not tuple:
        wrong("the arguments of an exception")
    for each in (fields, attributes):
        attributes_of(each)
    exceptions._restore(error, state)


def _ended(cls: Any, message: Any, maybe_executed: Any, worker: Any) -> Any:
    if not isinstance(cls, type) or not issubclass(cls, errors.RpcError):
        wrong("an error of no class")
    return errors._rebuild_ended(cls, message, maybe_executed, worker)  # type: ignore[arg-type]


def attributes_of(state: Any) -> dict[str, Any]:
    """Return a state that is a dict of plain attributes; others are an error."""
    if type(state) is not dict:
        wrong(f"a {type(state).__name__} for attributes")
    for name in state:
        if type(name) is not str or (name.startswith("__") and name != "__notes__"):
            wrong(f"an attribute {str(name)[:100]!r}")
    return dict(state)


# numpy is there where torch has found it; nothing is imported for a message.

_DTYPE: Final = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f(?:2|4|8|16)|c(?:8|16|32)|[SU]\d{1,6})", re.ASCII)


def _numpy() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        raise RefusedError("a message contains numpy's arrays, and this worker has no numpy")
    return numpy


def _np_dtype(text: Any, align: Any = False, _copy: Any = False) -> Any:
    if type(text) is not str or _DTYPE.fullmatch(text) is None or align is not False:
        raise RefusedError(
            f"a numpy dtype {str(text)[:100]!r} is not accepted: only plain numbers and texts are"
        )
    return _numpy().dtype(text, copy=True)


def _plain_dtype(dtype: Any) -> Any:
    if not isinstance(dtype, _numpy().dtype) or dtype.kind not in "biufcSU" or not dtype.itemsize:
        wrong("an array without a dtype")
    return dtype


def _np_frombuffer(buffer: Any, dtype: Any, shape: Any, order: Any) -> Any:
    if type(buffer) not in (bytes, bytearray, memoryview) or order not in ("C", "F"):
        wrong("an array of no memory")
    size = memoryview(buffer).nbytes
    if size != math.prod(_shape(shape)) * _plain_dtype(dtype).itemsize:
        wrong(f"{size} bytes for an array of {shape}")
    return _numpy().frombuffer(buffer, dtype=dtype).reshape(shape, order=order)


def _np_scalar(dtype: Any, data: Any) -> Any:
    if type(data) is not bytes or len(data) != _plain_dtype(dtype).itemsize:
        wrong("a number of the wrong size")
    return _numpy().frombuffer(data, dtype=dtype)[0]


def _np_reconstruct(cls: Any, shape: Any, kind: Any) -> Any:
    if cls is not _makers["numpy", "ndarray"] or shape != (0,) or kind != b"b":
        wrong("an array of another class")
    return _numpy().ndarray((0,), "b")


def _set_dtype(dtype: Any, state: Any) -> None:
    # All but the byte order has to be what it is: among the rest are flags that numpy believes.
    known = dtype.__reduce__()[2]
    if type(state) is not tuple or len(state) != len(known) or state[2:] != known[2:] or state[0] != known[0]:
        raise RefusedError("a numpy dtype with fields is not accepted: only plain numbers and texts are")
    if state[1] != known[1] and (known[1] == "|" or state[1] not in ("<", ">")):
        wrong("the byte order of a dtype")
    dtype.__setstate__(state)


def _set_array(array: Any, state: Any) -> None:
    if (
        type(state) is not tuple
        or len(state) != 5
        or state[0] != 1
        or type(state[4]) is not bytes
        or array.size
    ):
        wrong("the state of an array")
    _, shape, dtype, _fortran, data = state
    if len(data) != math.prod(_shape(shape)) * _plain_dtype(dtype).itemsize:
        wrong(f"{len(data)} bytes for an array of {shape}")
    array.__setstate__((1, shape, dtype, bool(_fortran), data))


def _fill_tables() -> None:
    def maker(module: str, name: str, make: Callable[..., Any], **more: Any) -> None:
        _makers[module, name] = Maker(f"{module}.{name}", make, **more)

    for number in (complex, range, slice):
        maker("builtins", number.__name__, _number(number))
    maker("builtins", "set", _empty(set))
    maker("collections", "OrderedDict", _empty(collections.OrderedDict))
    maker("collections", "deque", _deque)
    maker("decimal", "Decimal", _number(decimal.Decimal))
    for moment in ("date", "datetime", "time", "timedelta", "timezone"):
        maker("datetime", moment, _number(getattr(datetime, moment)))
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype):
            _values["torch", name] = value
    maker("torch", "Size", _size)
    maker("torch", "device", _number(torch.device))
    for build in (tensors.tensor, tensors.untyped_storage, tensors.typed_storage):
        maker(build.__module__, build.__qualname__, _with_whole(build))
    maker(tensors.parameter.__module__, "parameter", _with_whole(tensors.parameter, 1))
    for sparse in (tensors.sparse_coo, tensors.sparse_compressed):
        maker(sparse.__module__, sparse.__qualname__, _with_whole(sparse))
    for core in ("numpy._core", "numpy.core"):
        maker(f"{core}.numeric", "_frombuffer", _np_frombuffer)
        maker(f"{core}.multiarray", "scalar", _np_scalar)
        maker(f"{core}.multiarray", "_reconstruct", _np_reconstruct, takes=True)
    maker("numpy", "dtype", _np_dtype)
    maker("numpy", "ndarray", _never, argument=True)
    for cls in (*vars(builtins).values(), *(getattr(errors, name) for name in errors.__all__)):
        if (
            isinstance(cls, type)
            and issubclass(cls, BaseException)
            and not issubclass(cls, BaseExceptionGroup)
        ):
            maker(cls.__module__, cls.__qualname__, _exception(cls), cls=cls, argument=True)
    maker(exceptions.__name__, "_create", _create, takes=True)
    maker(exceptions.__name__, "_restore", _restore)
    maker(errors.__name__, "_rebuild_ended", _ended, takes=True)
    maker(__name__, "find_named", find_named)
    allow(WorkerInfo)


def _never(*_: Any) -> NoReturn:
    wrong("an array without memory")


_fill_tables()


def resolve(module: Any, name: Any) -> Any:
    """Return what a name of a message stands for; the names that are not in the tables are refused."""
    if type(module) is not str or type(name) is not str:
        wrong("a name that is no text")
    value = _values.get((module, name), _ABSENT)
    if value is not _ABSENT:
        return value
    maker = _makers.get((module, name))
    if maker is not None:
        return maker
    raise RefusedError(
        f"{module[:100]}.{name[:100]} is refused: this worker takes data only. Functions that may be called are marked "
        f"with exposed() there, classes of data with allow()"
    )


def is_allowed(cls: type | None) -> bool:
    """Whether instances of a class may be made without its constructor and be given state."""
    return cls is not None and cls in _allowed


def set_state(target: Any, state: Any) -> None:
    """Give an object that a message has made its state, if it is of a kind that has one.

    Raises:
        RefusedError: it is not.
        ProtocolError: it cannot have this state.
    """
    kind, numpy = type(target), sys.modules.get("numpy")
    if kind in _allowed:
        own = getattr(kind, "__setstate__", None)
        if own is not None:
            own(target, state)
            return
        plain, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
        for name, value in {**attributes_of(plain or {}), **attributes_of(slots or {})}.items():
            object.__setattr__(target, name, value)
    elif isinstance(target, BaseException):
        BaseException.__setstate__(target, attributes_of(state))
    elif numpy is not None and isinstance(target, numpy.dtype):
        _set_dtype(target, state)
    elif numpy is not None and kind is numpy.ndarray:
        _set_array(target, state)
    else:
        raise RefusedError(f"the state of a {kind.__qualname__} is refused: this worker takes data only")


MAX_DEPTH: Final = 100
"""How deep tuples, lists, dicts and sets may be nested."""
MAX_KEY: Final = 1 << 20
"""How many elements a tuple may have, all told, to be the key of a dict or the member of a set: it is hashed."""

_I4: Final = struct.Struct("<i").unpack_from
_F8: Final = struct.Struct(">d").unpack_from
_MARK: Final = object()
_LINE: Final = 1000
_PAIRED: Final = (dict, collections.OrderedDict)


class _Machine:
    """Opens one message. Reads no byte twice, makes nothing larger than what the bytes contain."""

    __slots__ = ("_at", "_buffers", "_data", "_depths", "_laden", "_memo", "_sizes", "_stack")

    def __init__(self, data: Any, buffers: Iterable[Any]) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._buffers = iter(buffers)
        self._stack: list[Any] = []
        self._memo: list[Any] = []
        # By id, of objects in the memo: how deep a container is, and how many elements a tuple has, all told.
        self._depths: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._laden: dict[int, Any] = {}  # tuples with a maker in them, which are arguments and nothing else

    def run(self) -> Any:
        data, table = self._data, _TABLE
        try:
            while True:
                code = data[self._at]
                self._at += 1
                if code == 0x2E:  # STOP
                    break
                step = table.get(code)
                if step is None:
                    raise RefusedError(
                        f"a message with the pickle opcode {code:#04x} is refused: this worker takes data only"
                    )
                step(self)
            (found,) = self._stack
            self._data_only((found,))
            return found
        except RpcError:
            raise
        except Exception as error:
            raise ProtocolError(
                f"a message cannot be opened: {type(error).__name__}: {str(error)[:200]}"
            ) from error

    # -- reading

    def _take(self, size: int) -> memoryview:
        start = self._at
        found = self._data[start : start + size]
        if len(found) != size:
            wrong(f"{size} bytes announced, {len(found)} there")
        self._at = start + size
        return found

    def _sized(self, width: int) -> memoryview:
        return self._take(int.from_bytes(self._take(width), "little"))

    # -- the stack

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            wrong("a mark where a value must be")
        return value

    def _pop_mark(self) -> list[Any]:
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:  # below the bottom is an IndexError, and so an error in the message
            at -= 1
            if at < 0:
                wrong("no mark")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def _data_only(self, items: Iterable[Any]) -> int:
        """Refuse makers among what goes into a container; return how deep the container is then."""
        depths, deepest, laden = self._depths, 0, self._laden
        for item in items:
            if type(item) is Maker:
                raise RefusedError(f"{item.name} as a value is refused: this worker takes data only")
            if laden and id(item) in laden:
                raise RefusedError("a class as a value is refused: this worker takes data only")
            depth = depths.get(id(item), 0)
            if depth > deepest:
                deepest = depth
        if deepest >= MAX_DEPTH:
            wrong(f"nested deeper than {MAX_DEPTH}")
        return deepest + 1

    def _grown(self, container: Any, items: Iterable[Any]) -> None:
        depth = self._data_only(items)
        if depth > self._depths.get(id(container), 0):
            self._depths[id(container)] = depth

    def _hashed(self, keys: Iterable[Any]) -> None:
        for key in keys:
            if isinstance(key, tuple) and self._sizes.get(id(key), 0) > MAX_KEY:
                wrong("a key that is too large to be hashed")

    def _tuple(self, items: tuple[Any, ...]) -> None:
        self._stack.append(items)
        if any(type(item) is Maker and item.argument for item in items):
            self._data_only([item for item in items if type(item) is not Maker or not item.argument])
            self._laden[id(items)] = items
            return
        self._depths[id(items)] = self._data_only(items)
        sizes = self._sizes
        sizes[id(items)] = len(items) + sum(
            [sizes.get(id(item), 0) for item in items if isinstance(item, tuple)]
        )

    # -- the opcodes that the codec writes

    def _proto(self) -> None:
        if self._at != 1 or self._take(1)[0] > 5:
            wrong("a pickle of another protocol")

    def _frame(self) -> None:
        if int.from_bytes(self._take(8), "little") > len(self._data) - self._at:
            wrong("a frame that is larger than the message")

    def _text(self, width: int) -> None:
        self._stack.append(str(self._sized(width), "utf-8", "surrogatepass"))

    def _bytes(self, width: int) -> None:
        self._stack.append(bytes(self._sized(width)))

    def _integer(self, width: int) -> None:
        self._stack.append(int.from_bytes(self._take(width), "little"))

    def _long(self, width: int) -> None:
        self._stack.append(int.from_bytes(self._sized(width), "little", signed=True))

    def _last(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._tuple(tuple(items[::-1]))

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list and type(target) is not collections.deque:
            wrong(f"items for a {type(target).__name__}")
        self._grown(target, items)
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in _PAIRED or len(items) % 2:
            wrong(f"items for a {type(target).__name__}")
        keys = items[::2]
        self._grown(target, items)
        self._hashed(keys)
        for key, value in zip(keys, items[1::2], strict=True):
            target[key] = value

    def _add_items(self) -> None:
        items = self._pop_mark()
        target = self._stack[-1]
        if type(target) is not set:
            wrong(f"items for a {type(target).__name__}")
        self._grown(target, items)
        self._hashed(items)
        target.update(items)

    def _frozenset(self) -> None:
        items = self._pop_mark()
        self._hashed(items)
        depth = self._data_only(items)
        made = frozenset(items)
        self._depths[id(made)] = depth
        self._stack.append(made)

    def _drop(self, items: list[Any]) -> None:
        pass

    def _recall(self, width: int) -> None:
        self._stack.append(self._memo[int.from_bytes(self._take(width), "little")])

    def _buffer(self) -> None:
        self._stack.append(memoryview(next(self._buffers)))

    def _readonly(self) -> None:
        view = self._pop()
        if type(view) is not memoryview:
            wrong(f"a {type(view).__name__} for a buffer")
        self._stack.append(view.toreadonly())

    def _global(self) -> None:
        name, module = self._pop(), self._pop()
        self._stack.append(resolve(module, name))

    def _line(self) -> str:
        end = bytes(self._data[self._at : self._at + _LINE]).find(b"\n")
        return str(self._take(end + 1), "utf-8", "replace").strip() if end >= 0 else "?"

    def _old_global(self) -> None:
        """Refuse the opcodes of old protocols that name something; the codec does not write them."""
        module, name = self._line(), self._line()
        raise RefusedError(f"{module}.{name} by an old opcode is refused: this worker takes data only")

    def _arguments(self, maker: Any, args: Any) -> tuple[Any, ...]:
        if type(maker) is not Maker:
            shown = maker.__qualname__ if inspect.isroutine(maker) else type(maker).__qualname__
            raise RefusedError(f"a call of {shown} within a message is refused: this worker takes data only")
        if type(args) is not tuple:
            wrong("a maker without arguments")
        if id(args) not in self._laden:
            return args
        if not maker.takes:
            raise RefusedError(f"a class for {maker.name} is refused: this worker takes data only")
        return tuple([each.cls or each if type(each) is Maker else each for each in args])

    def _reduce(self) -> None:
        args, maker = self._pop(), self._pop()
        arguments = self._arguments(maker, args)
        self._made(args, maker.make(*arguments))

    def _new(self, kwargs: Any) -> None:
        args, maker = self._pop(), self._pop()
        arguments = self._arguments(maker, args)
        cls = maker.cls
        if not is_allowed(cls):
            raise RefusedError(
                f"{maker.name} without its constructor is refused: this worker takes data only"
            )
        self._data_only((kwargs,))
        self._made(args, cls.__new__(cls, *arguments, **attributes_of(kwargs)))

    def _made(self, args: tuple[Any, ...], made: Any) -> None:
        """Push what was made; it may be a tuple, too, and is as deep and as large as its arguments."""
        self._depths[id(made)] = self._depths.get(id(args), 0)
        if isinstance(made, tuple):
            self._sizes[id(made)] = self._sizes.get(id(args), 0)
        self._stack.append(made)

    def _build(self) -> None:
        state = self._pop()
        self._data_only((state,))
        set_state(self._stack[-1], state)


def loads(data: Any, buffers: Iterable[Any] = ()) -> Any:
    """Open what the codec has pickled, if it is data.

    Arguments:
        data: the pickle; bytes or anything like them.
        buffers: the memory beside it, in order.

    Raises:
        RefusedError: it names something that is not in the tables; nothing of it was run.
        ProtocolError: it makes no sense.
    """
    return _Machine(data, buffers).run()


def _push(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine._stack.append(value)


def _fresh(cls: type) -> Callable[[_Machine], None]:
    return lambda machine: machine._stack.append(cls())


_TABLE: Final[dict[int, Callable[[_Machine], None]]] = {
    0x80: _Machine._proto,
    0x95: _Machine._frame,
    ord("N"): _push(None),
    0x88: _push(True),
    0x89: _push(False),
    ord("J"): lambda machine: machine._stack.append(_I4(machine._take(4))[0]),
    ord("K"): lambda machine: machine._integer(1),
    ord("M"): lambda machine: machine._integer(2),
    0x8A: lambda machine: machine._long(1),
    0x8B: lambda machine: machine._long(4),
    ord("G"): lambda machine: machine._stack.append(_F8(machine._take(8))[0]),
    0x8C: lambda machine: machine._text(1),
    ord("X"): lambda machine: machine._text(4),
    0x8D: lambda machine: machine._text(8),
    ord("C"): lambda machine: machine._bytes(1),
    ord("B"): lambda machine: machine._bytes(4),
    0x8E: lambda machine: machine._bytes(8),
    0x96: lambda machine: machine._stack.append(bytearray(machine._sized(8))),
    0x97: _Machine._buffer,
    0x98: _Machine._readonly,
    ord("("): _push(_MARK),
    ord(")"): _push(()),
    0x85: lambda machine: machine._last(1),
    0x86: lambda machine: machine._last(2),
    0x87: lambda machine: machine._last(3),
    ord("t"): lambda machine: machine._tuple(tuple(machine._pop_mark())),
    ord("]"): _fresh(list),
    ord("a"): lambda machine: machine._append([machine._pop()]),
    ord("e"): lambda machine: machine._append(machine._pop_mark()),
    ord("}"): _fresh(dict),
    ord("s"): lambda machine: machine._set_items([machine._pop(), machine._pop()][::-1]),
    ord("u"): lambda machine: machine._set_items(machine._pop_mark()),
    0x8F: _fresh(set),
    0x90: _Machine._add_items,
    0x91: _Machine._frozenset,
    0x94: lambda machine: machine._memo.append(machine._stack[-1]),
    ord("h"): lambda machine: machine._recall(1),
    ord("j"): lambda machine: machine._recall(4),
    ord("0"): lambda machine: machine._drop([machine._pop()]),
    ord("1"): lambda machine: machine._drop(machine._pop_mark()),
    0x93: _Machine._global,
    ord("c"): _Machine._old_global,
    ord("i"): _Machine._old_global,
    ord("R"): _Machine._reduce,
    0x81: lambda machine: machine._new({}),
    0x92: lambda machine: machine._new(machine._pop()),
    ord("b"): _Machine._build,
}
