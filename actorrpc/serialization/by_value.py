"""Functions and classes by value: what the other side cannot import travels as a definition.

A definition is the cloudpickle of one function or class, named by its hash: a peer is sent it once and reads
the hash from then on. Classes keep their identity: the same local class sent twice arrives as one class,
and it comes home as the class that it was. A function whose captured state could change (a list in its
closure, a tensor, an RRef) is no definition: it travels whole in each message, as its state is at the time.
A class is read again when it is sent after one of its attributes, or an attribute of a base class that goes by value, was
assigned or deleted. It is also read again after each call of :func:`look_again`, which the creation of an actor makes: other
changes, as of a global that its methods mention, are not looked for when a message is sent. If the class has changed, its
definition has another hash and is sent once more; a process that already has the class keeps it as it was received first.

Functions and classes of some modules go by value although they could be imported: those of the main module (to workers that run
another script), and those of modules registered with ``cloudpickle.register_pickle_by_value(module)`` and of their submodules.
Most messages contain none of these, and the fast pickler encodes such messages. While modules are registered, the fast pickler
calls :func:`stop` for each function, class and bound method. At the first that goes by value, :func:`stop` raises
GoesByValueError, and :class:`ByValuePickler` encodes the message anew. As in cloudpickle, the module of an object decides.

Workers that run the same script send the functions and classes of the main module by name. A function or class that the script
defines after it has joined its group is *late*: other workers may not have reached its definition yet, or may never reach it
(``if rank == 0:``). A late object is sent as a name and a definition. The receiver uses its own object of that name, so that its
class is the one that the receiver's script knows. If the receiver's script is about to assign the name, threads other than the
main thread wait for that, for at most 5 s. Otherwise the receiver loads the definition, and sends the object on in the same way.

The thread that encodes or decodes a message runs this code; other threads may register modules meanwhile. An object is judged by
the modules that are registered when the pickler reaches it. Nothing here does I/O, loads or pickles under a lock.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import io
import pickle
import re
import sys
import threading
import time
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeVar

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

from actorrpc import _stacks
from actorrpc.errors import ProtocolError
from actorrpc.serialization.class_cache import ClassCache
from actorrpc.serialization.reducers import (
    REDUCERS,
    complete_model,
    reduce_cached_property,
    reduce_function,
    reduce_module,
)
from actorrpc.serialization.tensors import message

__all__ = [
    "MAIN",
    "ByValuePickler",
    "DefinedClass",
    "DefinitionStore",
    "GoesByValueError",
    "UnknownDefinitionError",
    "captured",
    "find_main",
    "goes_by_value",
    "has_late",
    "hash_of",
    "in_main",
    "is_by_value",
    "load_here",
    "loads_here",
    "look_again",
    "modules",
    "names_main",
    "note_main",
    "reduce_method",
    "refuse",
    "runs_one_script",
    "stop",
]

# cloudpickle's own, of names. What adds to it takes out what it has added.
modules: Final[set[str]] = _cloudpickle._PICKLE_BY_VALUE_MODULES
find_main: Final = re.compile(b"__(?:mp_)?main__").search
_LONG: Final = 64 << 10  # from here on the C pickler hands bytes and texts over as they are
_STARTS: Final = (0x80, 0x95)  # protocol, frame
_MAX_NAMES: Final = 4096
_NAMED: Final = (type, ModuleType)

_lineages: dict[str, tuple[str, ...]] = {}  # "a.b.c" -> "a", "a.b", "a.b.c"


class GoesByValueError(pickle.PicklingError):
    """Raised out of the fast pickler: it has come upon something that goes by value."""


def is_by_value(name: str) -> bool:
    """Say whether a module of this name goes by value: it is registered, or a package that it is in. Thread-safe."""
    lineage = _lineages.get(name)
    if lineage is None:
        parts = name.split(".")
        lineage = tuple([".".join(parts[: at + 1]) for at in range(len(parts))])
        if len(_lineages) >= _MAX_NAMES:
            _lineages.clear()
        _lineages[name] = lineage
    return not modules.isdisjoint(lineage)


def goes_by_value(obj: Any) -> bool:
    """Say whether a function, a class or a type variable is of such a module, or perhaps of none that is known.

    What counts is the name that the module has now, not the one under which the object looks for it. Where an object
    is not found under its name at all the fast pickler finds out by itself.
    """
    module = sys.modules.get(obj.__module__)
    return module is None or is_by_value(module.__name__)


def names_main(chunks: Iterable[Any]) -> bool:
    """Say whether a pickle, as the C pickler wrote it in pieces, may name the main module.

    Long bytes, texts and buffers are pieces of their own, and are not searched. The pickler's own pieces are bytes; those
    as long start with a frame, the first with the protocol before it.
    """
    for chunk in chunks:
        if (
            type(chunk) is bytes
            and (len(chunk) < _LONG or chunk[0] in _STARTS)
            and find_main(chunk) is not None
        ):
            return True
    return False


def stop(pickler: Any, obj: Any) -> Any:
    """Be the ``reducer_override`` of a pickler that writes by reference only.

    When nothing is registered any more it has the pickler ask no more, by its ``unwatch``.

    Raises:
        GoesByValueError: the object goes by value.
    """
    if not modules:
        pickler.unwatch()
        return NotImplemented
    kind = type(obj)
    # A method would go as its object and a name, under which its class need not have this very function.
    if kind is FunctionType or issubclass(kind, _NAMED) or kind is TypeVar:
        if goes_by_value(obj):
            raise GoesByValueError
    elif kind is MethodType and goes_by_value(obj.__func__):
        raise GoesByValueError
    return NotImplemented


MAIN: Final = ("__main__", "__mp_main__")  # multiprocessing's children call their main module the latter
_MAX_CACHED: Final = 1024
_LARGE: Final = 512 << 10  # a larger definition travels in each message that needs it, and no peer keeps it


class UnknownDefinitionError(ProtocolError):
    """A message names definitions that this side does not have (any more).

    Raised before anything of the message is unpickled, so decoding may simply be tried again.
    """

    def __init__(self, hashes: Iterable[bytes]) -> None:
        self.hashes = tuple(hashes)
        super().__init__(f"unknown definition {', '.join(each.hex() for each in self.hashes)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (UnknownDefinitionError, (self.hashes,))


def hash_of(data: bytes) -> bytes:
    """Return the name of a definition: 16 bytes of BLAKE2b."""
    return hashlib.blake2b(data, digest_size=16).digest()


# -- loading ------------------------------------------------------------------------------------


class _MainUnpickler(pickle.Unpickler):
    """Finds in the main module what a child of multiprocessing calls ``__mp_main__``."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "__mp_main__":
            module = "__main__"
        return super().find_class(module, name)


def loads_here(data: Any, buffers: Iterable[Any] = ()) -> Any:
    """Unpickle; ``__main__`` and ``__mp_main__`` are the main module that this process has.

    The C unpickler finds classes by itself, which is why a subclass is used only where the name occurs.
    """
    if _find_mp_main(data) is None or sys.modules.get("__mp_main__") is sys.modules["__main__"]:
        return pickle.loads(data, buffers=buffers)
    return _MainUnpickler(io.BytesIO(data), buffers=buffers).load()


def load_here(stream: Any, buffers: Iterable[Any] = ()) -> Any:
    """Unpickle from a file, as :func:`loads_here` does from bytes."""
    return _MainUnpickler(stream, buffers=buffers).load()


_find_mp_main: Final = re.compile(b"__mp_main__").search  # takes any buffer; `in` takes five times as long
_UNLOADED: Final = object()


class DefinitionStore:
    """The definitions that peers sent to this process: hash -> object, loaded when first used.

    Keeps the most recently used ones within its bounds. Thread-safe. Its lock guards the table, nothing
    is loaded or destroyed under it, and no other lock is taken under it; it is reentrant because the garbage
    collector may run a finalizer, which may decode a message, at any allocation.
    """

    def __init__(self, *, max_definitions: int = 4096, max_bytes: int = 256 << 20) -> None:
        self._max_definitions = max_definitions
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._entries: OrderedDict[bytes, list[Any]] = OrderedDict()  # hash -> [bytes, object]
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def add(self, key: bytes, data: bytes) -> None:
        """Keep a definition that came from a peer.

        Raises:
            ProtocolError: ``data`` is not what ``key`` names.
        """
        if hash_of(data) != key:
            raise ProtocolError(f"a definition does not have the hash {key.hex()} under which it came")
        dropped = []
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return
            self._entries[key] = [data, _UNLOADED]
            self._bytes += len(data)
            while len(self._entries) > 1 and (
                len(self._entries) > self._max_definitions or self._bytes > self._max_bytes
            ):
                _, entry = self._entries.popitem(last=False)
                self._bytes -= len(entry[0])
                dropped.append(entry)
        # Objects die here, outside of the lock: a class may have weak references with callbacks.
        del dropped

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return those of ``keys`` that are not here."""
        return [key for key in keys if key not in self._entries]

    def data(self, key: bytes) -> bytes | None:
        """Return a definition as it came, or ``None``: to pass it on."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def get(self, key: bytes) -> Any:
        """Return the function or class, loading it if this is its first use.

        Two threads may load the same definition at once; both get the object of whichever ends first.

        Raises:
            UnknownDefinitionError: it is not here.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
        if entry is None:
            raise UnknownDefinitionError((key,))
        if entry[1] is _UNLOADED:
            data = entry[0]
            loaded = _load(key, data)
            with self._lock:
                if entry[1] is _UNLOADED:
                    entry[1] = loaded
        return entry[1]


def _load(key: bytes, data: bytes) -> Any:
    loaded = loads_here(data)
    if isinstance(loaded, type):
        _remember(loaded, key, data)
    return loaded


# -- classes, and where they are known ------------------------------------------------------------

# Classes whose definition is complete here, and whether this process received it: False says that the class was made here.
# cloudpickle gives a class that comes home its own self, but would also write all its attributes again.
_complete: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()

# Both tables hold definitions by whether these may name the main module.
# The definitions of classes as this process read them.
_read: Final[dict[bool, ClassCache[tuple[bytes, bytes]]]] = {True: ClassCache(), False: ClassCache()}
# The definitions of classes as they were received.
_received: Final[dict[bool, weakref.WeakKeyDictionary[type, tuple[bytes, bytes]]]] = {
    True: weakref.WeakKeyDictionary(),
    False: weakref.WeakKeyDictionary(),
}

# The definitions of functions that were made here; bounded. Each operation on it is one step under the interpreter's
# lock: keys may hold classes, whose metaclass may say how they compare, and that may not happen under ours.
_functions: dict[Any, tuple[bytes, bytes]] = {}


def _remember(cls: type, key: bytes, data: bytes) -> None:
    """Send a received class on, or back, under the same name. A class that was made here may have changed since it was sent."""
    if not _complete.get(cls):
        return
    _received[True].setdefault(cls, (key, data))
    if not any(name.encode() in data for name in MAIN):
        _received[False].setdefault(cls, (key, data))


def look_again() -> None:
    """Have each class read again when it is sent next, in case it has changed."""
    for remote_main in (True, False):
        _read[remote_main].clear()
        _received[remote_main].clear()


class DefinedClass:
    """A class of the main module, and its definition at the moment at which this object was made.

    Receivers that do not have the class under its name get that definition, even if the class has changed when it is sent.

    Args:
        definition: hash and bytes; None has the class read when it is sent.
    """

    __slots__ = ("cls", "definition")

    def __init__(self, cls: type, definition: tuple[bytes, bytes] | None) -> None:
        self.cls = cls
        self.definition = definition

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.cls,)


def _same(obj: Any) -> Any:
    return obj


def fill_class(cls: type, state: Any) -> Any:
    """Give a class made here its attributes, once (wire format)."""
    if cls not in _complete:
        _cloudpickle._class_setstate(cls, state)
        _complete[cls] = True
    return cls


# -- what a script defines after it has joined its group ----------------------------------------------

_KINDS: Final = (type, FunctionType)
_before: frozenset[str] | None = None  # the names that the main module had when the process joined its group
#: what :func:`has_late` says as long as the main module's names are these, and so many
late_seen: tuple[dict[str, Any], int, bool] = ({}, 0, False)
_PATIENCE_S: Final = 5.0
_stalled = -1  # where the script was when it did not come to a name in time: nobody waits for it there again
_adopted: weakref.WeakSet[Any] = weakref.WeakSet()  # late ones of others, which our main module does not have


def note_main(one_script: bool = True) -> None:
    """Note what the main module has now, as all others that run the same script have it: what comes later is late.

    Args:
        one_script: False says that the processes of the group do not all run the same script: nothing is late.
    """
    global _before, late_seen, _stalled
    space = vars(sys.modules["__main__"])
    _before, late_seen, _stalled = frozenset(space) if one_script else None, (space, -1, False), -1


def runs_one_script() -> bool:
    """Say whether all processes of the group run the same script."""
    return _before is not None


def has_late() -> bool:
    """Say whether anything in the main module is late."""
    global late_seen
    if _before is None:
        return False
    space = vars(sys.modules["__main__"])
    count = len(space)
    if late_seen[0] is not space or late_seen[1] != count:
        found = any(
            name not in _before and isinstance(each, _KINDS) and getattr(each, "__module__", None) in MAIN
            for name, each in space.copy().items()
        )
        late_seen = space, count, found
    return late_seen[2]


def _is_late(name: str) -> bool:
    return _before is not None and name.partition(".")[0] not in _before


def _found_in(module: Any, name: str) -> Any:
    """Return what a module has under a qualified name, or None."""
    found = module
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        return None
    return found


def _own(name: str) -> Any:
    """Return what our main module has under a name, where that is a function or a class of its own."""
    found = _found_in(sys.modules["__main__"], name)
    return found if isinstance(found, _KINDS) and getattr(found, "__module__", None) in MAIN else None


def _ahead(name: str) -> int | None:
    """Return where the script is, on the main thread, if it assigns a name further down; else None."""
    frame = _stacks.top_frame(threading.main_thread().ident)
    space = vars(sys.modules["__main__"])
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is space):
        frame = frame.f_back
    if frame is None:
        return None
    at = frame.f_lasti
    further = (each for each in dis.get_instructions(frame.f_code) if each.offset > at)
    return at if any(each.opname == "STORE_NAME" and each.argval == name for each in further) else None


def _own_soon(name: str) -> Any:
    """As :func:`_own`; wait for the script where it is about to come to the name. Bounded, and once for each place."""
    global _stalled
    until = time.monotonic() + _PATIENCE_S
    top = name.partition(".")[0]
    while (found := _own(name)) is None and threading.current_thread() is not threading.main_thread():
        at = _ahead(top)
        if at is None or at == _stalled:
            return _own(name)  # it may have come to it between the two looks
        if time.monotonic() > until:
            _stalled = at
            return None
        time.sleep(0.005)
    return found


def late(_main: str, name: str, key: bytes) -> Any:
    """Return our own function or class of this name, or else what the definition says (wire format)."""
    found = _own_soon(name)
    if found is None:
        found = definition(key)
        _adopted.add(found)
    return found


def begin_late(_main: str, name: str, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """As :func:`late`, of one that stands where it is used; it is filled next (wire format)."""
    found = _own_soon(name)
    if found is None:
        found = make(*args)
        _adopted.add(found)
    return found


def fill_late(found: Any, state: Any) -> Any:
    """Fill what :func:`begin_late` has made, where it is not our own (wire format)."""
    if in_main(found):
        return found
    if isinstance(found, type):
        return fill_class(found, state)
    return _cloudpickle._function_setstate(found, state)


# -- functions: can what they capture change? -------------------------------------------------------

_ATOMS: Final = frozenset({type(None), bool, int, str, bytes, complex, type(Ellipsis), range})


class _MutableError(Exception):
    """A function's captured state may change between two messages."""


def captured(function: types.FunctionType) -> Iterable[tuple[str, Any]]:
    """Yield what a function carries along: closure, defaults, globals of its code, attributes."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"captured variable '{name}'", cell.cell_contents
        except ValueError:  # an empty cell
            continue
    yield from ((f"default {at}", value) for at, value in enumerate(function.__defaults__ or ()))
    yield from ((f"default '{name}'", value) for name, value in (function.__kwdefaults__ or {}).items())
    space = function.__globals__
    for name in {**_cloudpickle._extract_code_globals(code), **dict.fromkeys(_names_in_classes(code))}:
        if name in space:
            yield f"global '{name}'", space[name]
    yield from ((f"attribute '{name}'", value) for name, value in function.__dict__.items())


@lru_cache(maxsize=_MAX_CACHED)
def _names_in_classes(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that the bodies of classes in a function may take from its globals.

    Such a body looks a name up among the class's attributes first, by instructions that cloudpickle does not look at. A name that
    the body has assigned before is the class's own.
    """
    found: dict[str, None] = {}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            assigned = {"__name__"}  # which each function's globals have
            if not inner.co_flags & inspect.CO_OPTIMIZED:
                for each in dis.get_instructions(inner):
                    if each.opname == "STORE_NAME":
                        assigned.add(each.argval)
                    elif each.opname in _LOADS_OF_CLASSES and each.argval not in assigned:
                        found[each.argval] = None
            found.update(dict.fromkeys(_names_in_classes(inner)))
    return tuple(found)


_LOADS_OF_CLASSES: Final = ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_rebinding: dict[types.CodeType, bool] = {}


def _rebinds(code: types.CodeType) -> bool:
    """Say whether code assigns to globals or to variables of an enclosing function, as counters do."""
    found = _rebinding.get(code)
    if found is None:
        found = any(
            each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
            or (each.opname in ("STORE_DEREF", "DELETE_DEREF") and each.argval in code.co_freevars)
            for each in dis.get_instructions(code)
        ) or any(_rebinds(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))
        if len(_rebinding) >= _MAX_CACHED:
            _rebinding.clear()
        _rebinding[code] = found
    return found


def _state_key(value: Any, seen: dict[int, Any], pure: list[bool]) -> Any:
    """Return a hashable that tells an immutable value from all others; ``pure`` is cleared where it cannot.

    Raises:
        _MutableError: the value may change.
    """
    kind = type(value)
    if kind in _ATOMS:
        return kind, value
    if kind is float:
        return kind, value.hex()
    if kind is tuple or kind is frozenset:
        return kind, tuple([_state_key(each, seen, pure) for each in value])
    if kind is types.BuiltinFunctionType or isinstance(value, ModuleType):
        return kind, value
    if kind is types.FunctionType:
        if _cloudpickle._should_pickle_by_reference(value):
            return kind, value
        pure[0] = False
        if id(value) not in seen:
            seen[id(value)] = value
            if _rebinds(value.__code__):
                raise _MutableError
            for _, each in captured(value):
                _state_key(each, seen, pure)
        return None
    if isinstance(value, type):
        # Held by the key's cache, a local class would live for ever.
        if not _cloudpickle._should_pickle_by_reference(value):
            pure[0] = False
        return type, value
    raise _MutableError


def _function_key(function: types.FunctionType, remote_main: bool) -> Any:
    """Return a key under which the function's definition may be found again, or ``None``.

    Raises:
        _MutableError: the function's captured state may change.
    """
    pure = [True]
    if _rebinds(function.__code__):
        raise _MutableError
    state = [_state_key(value, {id(function): function}, pure) for _, value in captured(function)]
    if not pure[0] or function.__annotations__ or function.__doc__ is not None or function.__dict__:
        return None
    names = (function.__module__, function.__name__, function.__qualname__)
    return (remote_main, function.__code__, function.__code__.co_filename, names, tuple(state))


# -- pickling -----------------------------------------------------------------------------------


def reduce_method(method: types.MethodType) -> tuple[Any, ...]:
    """Reduce a bound method to its object and its name, for the fast pickler.

    Raises:
        PicklingError: the object does not have the method under this name (it was bound by hand, or its decorator kept
            the name of a function of its own): it goes the slow way, as object and function.
    """
    name, owner = method.__func__.__name__, method.__self__
    if method != getattr(owner, name, None):
        raise pickle.PicklingError(f"an object of {type(owner).__qualname__} has no such method {name}")
    return getattr, (owner, name)


def definition(key: bytes, _main: str = "") -> Any:
    """Look a definition up while a message is decoded (wire format); ``key`` may be a large definition itself."""
    if len(key) > _LARGE:
        return _load(hash_of(key), key)
    decoding = message.decoding
    if decoding is None:
        raise ProtocolError(f"definition {key.hex()} outside of a message")
    return decoding.definitions.get(key)


class _NotADefinitionError(Exception):
    """What was to become a definition holds something that belongs to the message (a tensor, an RRef)."""


def refuse(obj: Any) -> Any:
    """Stand, in a definition's dispatch table, for the reducer of a type that belongs to the message."""
    raise _NotADefinitionError(type(obj).__name__)


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """The slow path: importable things by reference, other functions and classes by value.

    With ``named`` a dictionary, functions and classes become definitions, gathered there; without one they
    are written where they stand.
    """

    def __init__(
        self,
        sink: Any,
        table: Any,
        *,
        remote_main: bool,
        named: dict[bytes, bytes] | None = None,
        refusing: Any = None,
        buffer_callback: Callable[[Any], Any] | None = None,
    ) -> None:
        self.dispatch_table = table
        super().__init__(sink, protocol=5, buffer_callback=buffer_callback)
        self._remote_main = remote_main
        self._named = named
        self._refusing = refusing  # the dispatch table for definitions

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType):
            if self._by_reference(obj):
                return NotImplemented
            decorated = reduce_function(obj)
            if decorated is not None:
                return decorated
            if self._named is not None:
                try:
                    return self._name(obj, *self._define_function(obj))
                except (_MutableError, _NotADefinitionError):
                    pass
            return self._inline(obj, self._dynamic_function_reduce(obj))
        if isinstance(obj, type):
            main = self._remote_main
            known = self._named is not None
            found = (_read[main].get(obj) or _received[main].get(obj)) if known else None
            if found is not None and not self._by_reference(obj):
                return self._name(obj, *found)
            if self._by_reference(obj):
                return NotImplemented
            # type(None), the type of code: no module has them by their name.
            if getattr(obj, "__module__", None) == "builtins":
                return _cloudpickle._class_reduce(obj)
            return self._reduce_class(obj)
        if type(obj) is DefinedClass:
            if self._named is None or self._remote_main or obj.definition is None:
                return NotImplemented
            return self._name(obj.cls, *obj.definition)
        reduce = REDUCERS.get(type(obj))
        if reduce is not None:
            return NotImplemented if self._has_name(obj) else reduce(obj)
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
            return reduce_module(obj, _is_main_or_by_value)
        if isinstance(obj, cached_property):
            return reduce_cached_property(obj)
        return NotImplemented

    def _dynamic_function_reduce(self, func: FunctionType) -> tuple[Any, ...]:
        reduced: tuple[Any, ...] = super()._dynamic_function_reduce(func)
        space, captured_globals = func.__globals__, reduced[2][1]["__globals__"]
        for name in _names_in_classes(func.__code__):
            if name in space:
                captured_globals[name] = space[name]
        return reduced

    def _has_name(self, obj: Any) -> bool:
        """Say whether the receiver finds an object under its module and name; the object's own reducer writes these then."""
        module = getattr(obj, "__module__", None)
        name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
        if not isinstance(module, str) or not isinstance(name, str):
            return False
        if module in MAIN:
            found = self._remote_main and not _is_late(name)
            return found and _found_in(sys.modules["__main__"], name) is obj
        return not is_by_value(module) and _found_in(sys.modules.get(module), name) is obj

    def _by_reference(self, obj: Any) -> bool:
        if getattr(obj, "__module__", None) in MAIN:
            return self._remote_main and in_main(obj) and not _is_late(obj.__qualname__)
        return bool(_cloudpickle._should_pickle_by_reference(obj))

    def _reduce_class(self, cls: type) -> Any:
        complete_model(cls)
        _complete.setdefault(cls, False)
        if self._named is not None:
            found = self.define_class(cls)
            if found is not None:
                return self._name(cls, *found)
        reduced = _cloudpickle._dynamic_class_reduce(cls)
        return self._inline(cls, (*reduced[:5], fill_class))

    def define_class(self, cls: type) -> tuple[bytes, bytes] | None:
        """Return hash and definition of a class as it is now; None if it refers to an object that belongs to the message."""
        bases = tuple([each for each in cls.__mro__ if not self._by_reference(each)])
        try:
            return _read[self._remote_main].make(cls, bases, self._define)
        except _NotADefinitionError:
            return None

    def _prefers_own(self, obj: Any) -> bool:
        """Say whether the peer may have this by its name, and is to take that."""
        ours = self._remote_main and getattr(obj, "__module__", None) in MAIN
        return ours and (obj in _adopted or in_main(obj))

    def _inline(self, obj: Any, reduced: tuple[Any, ...]) -> Any:
        if not self._prefers_own(obj):
            return reduced
        return begin_late, (MAIN[0], obj.__qualname__, *reduced[:2]), *reduced[2:5], fill_late

    def _name(self, obj: Any, key: bytes, data: bytes) -> Any:
        assert self._named is not None
        if len(data) > _LARGE:
            key = data  # it would not fit into a frame of its own; as a part of the message it is sent in chunks
        else:
            self._named[key] = data
        if self._prefers_own(obj):
            return late, (MAIN[0], obj.__qualname__, key)
        # The name of the main module is written outside of the long bytes, where snapshots do not look for it.
        return definition, (key, MAIN[0]) if key is data else (key,)

    def _define_function(self, function: types.FunctionType) -> tuple[bytes, bytes]:
        cache_key = _function_key(function, self._remote_main)
        if cache_key is not None:
            found = _functions.get(cache_key)
            if found is not None:
                return found
        found = self._define(function)
        if cache_key is not None:
            if len(_functions) >= _MAX_CACHED:
                _functions.clear()
            _functions[cache_key] = found
        return found

    def _define(self, obj: Any) -> tuple[bytes, bytes]:
        sink = io.BytesIO()
        encoding = message.encoding
        context = None if encoding is None else encoding.context
        try:
            if encoding is not None:
                encoding.context = None  # other messages use the definition as well
            ByValuePickler(sink, self._refusing, remote_main=self._remote_main).dump(obj)
        finally:
            if encoding is not None:
                encoding.context = context
        data = sink.getvalue()
        return hash_of(data), data


def _is_main_or_by_value(name: str) -> bool:
    return name in MAIN or is_by_value(name)


def in_main(obj: Any) -> bool:
    """Say whether something is a function or a class that the main module has, of its own, under its name."""
    return isinstance(obj, _KINDS) and _own(obj.__qualname__) is obj
