"""Functions and classes by value: a function or class that the receiver cannot import is sent as a definition.

A definition is the cloudpickle of one function or class. Its name is its hash. A worker sends a definition to each peer once (and
again after many others, before the peer evicts it); later messages contain only the hash. Classes keep their identity: the same
local class sent twice is one class at the receiver, and if the receiver sends it back, the sender gets its own class. A function
whose captured state could change (a list in its closure, a tensor, an RRef) has no definition: each message contains the function
with its state at that time.

The sender keeps the definition of a class. It pickles the class again if an attribute of the class, or of a base class that is
sent by value, was assigned or deleted, and after each call of :func:`look_again`, which the creation of an actor makes. Other
changes, for example of a global that a method reads, are not detected when a message is sent. If the class has changed, its new
definition has another hash and is sent to each peer; a process that has the class already keeps the class as received first.

Functions and classes of two kinds of modules are sent by value although receivers could import them: the main module (to workers
that run another script), and modules registered with ``cloudpickle.register_pickle_by_value(module)``, with their submodules.
Most messages contain no such function or class, and the fast pickler encodes these messages. While modules are registered, the
fast pickler calls :func:`stop` for each function, class and bound method. If an object must be sent by value, :func:`stop` raises
GoesByValueError, and :class:`ByValuePickler` encodes the message anew. As in cloudpickle, the module of an object decides.

Workers that run the same script send the functions and classes of the main module by name. A function or class that the script
defines after it has joined its group is *late*: other workers may not have reached its definition yet, or may never reach it
(``if rank == 0:``). A late object is sent as a name and a definition. If the receiver's main module has an object of that name,
the receiver uses this object, so that ``isinstance`` works in the receiver's script. If the script will assign the name further
down, a thread that decodes the message waits for the assignment, for at most 5 s, unless it is the main thread. Otherwise the
receiver loads the definition, and sends the object on in the same way.

The thread that encodes or decodes a message runs this code; other threads may register modules meanwhile. The modules that are
registered when the pickler reaches an object decide about the object. No I/O, loading or pickling happens under a lock.
"""

from __future__ import annotations

import dis
import hashlib
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
from functools import lru_cache
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeVar

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

from actorrpc import _stacks
from actorrpc._python import annotations_of
from actorrpc.errors import ProtocolError
from actorrpc.serialization.class_cache import ClassCache
from actorrpc.serialization.reducers import (
    DESCRIPTORS,
    REDUCERS,
    complete_model,
    reduce_descriptor,
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

# cloudpickle's own set of the names of registered modules. Code of this package that adds a name removes it later.
modules: Final[set[str]] = _cloudpickle._PICKLE_BY_VALUE_MODULES
find_main: Final = re.compile(b"__(?:mp_)?main__").search
_LONG: Final = 64 << 10  # the C pickler calls write() separately for bytes and texts of at least this length
_STARTS: Final = (0x80, 0x95)  # protocol, frame
_MAX_NAMES: Final = 4096
_NAMED: Final = (type, ModuleType)

_lineages: dict[str, tuple[str, ...]] = {}  # "a.b.c" -> "a", "a.b", "a.b.c"


class GoesByValueError(pickle.PicklingError):
    """Raised by :func:`stop`, through the fast pickler: the message contains an object that must be sent by value."""


def is_by_value(name: str) -> bool:
    """Return whether the module of this name, or a package that contains it, is registered. Thread-safe."""
    lineage = _lineages.get(name)
    if lineage is None:
        parts = name.split(".")
        lineage = tuple([".".join(parts[: at + 1]) for at in range(len(parts))])
        if len(_lineages) >= _MAX_NAMES:
            _lineages.clear()
        _lineages[name] = lineage
    return not modules.isdisjoint(lineage)


def goes_by_value(obj: Any) -> bool:
    """Return whether a function, a class or a type variable is of a registered module, or of a module not in ``sys.modules``.

    The module's present ``__name__`` decides, which may differ from the object's ``__module__``. If the module does not have the
    object, the fast pickler raises an error later.
    """
    module = sys.modules.get(obj.__module__)
    return module is None or is_by_value(module.__name__)


def names_main(chunks: Iterable[Any]) -> bool:
    """Return whether a pickle may contain the main module's name. ``chunks``: the arguments of the C pickler's calls of write().

    A long value of the message (bytes, text or buffer) is a chunk of its own and is not searched. The pickler's other chunks are
    bytes; if such a chunk is long, it begins with the opcode FRAME, or with PROTO if it is the first.
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
    """The ``reducer_override`` of the fast pickler, which writes functions and classes by reference only.

    If no module is registered, this function removes itself from the pickler, by the pickler's ``unwatch()``.

    Raises:
        GoesByValueError: the object must be sent by value.
    """
    if not modules:
        pickler.unwatch()
        return NotImplemented
    kind = type(obj)
    # Of a bound method, check the function: pickled as object and name, the method could be another function at the receiver.
    if kind is FunctionType or issubclass(kind, _NAMED) or kind is TypeVar:
        if goes_by_value(obj):
            raise GoesByValueError
    elif kind is MethodType and goes_by_value(obj.__func__):
        raise GoesByValueError
    return NotImplemented


MAIN: Final = ("__main__", "__mp_main__")  # children of multiprocessing use the second name
_MAX_CACHED: Final = 1024
_LARGE: Final = 512 << 10  # bytes; each message that needs a larger definition contains it


class UnknownDefinitionError(ProtocolError):
    """A message names definitions that this process does not have, or has evicted from its store.

    Raised before any part of the message is unpickled (unless a definition is evicted meanwhile), so it can be decoded later.
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
    """Reads ``__mp_main__``, the main module's name in multiprocessing's children, as ``__main__``."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "__mp_main__":
            module = "__main__"
        return super().find_class(module, name)


def loads_here(data: Any, buffers: Iterable[Any] = ()) -> Any:
    """Unpickle bytes. Both ``__main__`` and ``__mp_main__`` mean the main module of this process.

    Only a pickle that contains ``__mp_main__`` is read by :class:`_MainUnpickler`, which is slower than Python's unpickler.
    """
    if _find_mp_main(data) is None or sys.modules.get("__mp_main__") is sys.modules["__main__"]:
        return pickle.loads(data, buffers=buffers)
    return _MainUnpickler(io.BytesIO(data), buffers=buffers).load()


def load_here(stream: Any, buffers: Iterable[Any] = ()) -> Any:
    """Unpickle from a file, as :func:`loads_here` does from bytes."""
    return _MainUnpickler(stream, buffers=buffers).load()


_find_mp_main: Final = re.compile(b"__mp_main__").search  # takes any buffer; five times as fast as `in`
_UNLOADED: Final = object()


class DefinitionStore:
    """The definitions that peers sent to this process, by hash. A definition is loaded when it is first used.

    Above its bounds, the store evicts the least recently used definitions. Thread-safe. The lock guards the table; no object is
    loaded or destroyed under it, and no other lock is taken under it. It is re-entrant because the garbage collector may run a
    finalizer at any allocation, and the finalizer may decode a message.
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
        """Keep a definition that a peer has sent.

        Raises:
            ProtocolError: ``key`` is not the hash of ``data``.
        """
        if hash_of(data) != key:
            raise ProtocolError(f"a definition does not have the hash {key.hex()} with which it was sent")
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
        # Evicted objects are destroyed here, outside of the lock: a class may have weak references with callbacks.
        del dropped

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys that are not in the store."""
        return [key for key in keys if key not in self._entries]

    def data(self, key: bytes) -> bytes | None:
        """Return the bytes of a definition, to send them on; None if the store does not have it."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def get(self, key: bytes) -> Any:
        """Return the function or class, loading it if this is its first use.

        If two threads load the same definition at once, both get the object of the thread that finishes first.

        Raises:
            UnknownDefinitionError: the store does not have the definition.
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


# -- classes that are sent by value ---------------------------------------------------------------

# Classes that already have their attributes -> True if this process received the class, False if it made the class. If a peer
# sends such a class, cloudpickle finds the existing class; :func:`fill_class` then does not set the attributes again.
_complete: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()

# _read has the definitions of classes as this process pickled them, _received as this process received them. The first key of
# both tables: whether the definition may contain the name of the main module.
_read: Final[dict[bool, ClassCache[tuple[bytes, bytes]]]] = {True: ClassCache(), False: ClassCache()}
_received: Final[dict[bool, weakref.WeakKeyDictionary[type, tuple[bytes, bytes]]]] = {
    True: weakref.WeakKeyDictionary(),
    False: weakref.WeakKeyDictionary(),
}

# The definitions of functions that this process pickled; bounded. The table has no lock of its own, because comparing keys may
# run the ``__eq__`` of a user's metaclass. Each operation on it is one step under the interpreter's lock.
_functions: dict[Any, tuple[bytes, bytes]] = {}


def _remember(cls: type, key: bytes, data: bytes) -> None:
    """Keep the definition of a received class, so that this process sends the class on, or back, under the same hash.

    A class that was made in this process is pickled anew, because it may have changed since it was sent.
    """
    if not _complete.get(cls):
        return
    _received[True].setdefault(cls, (key, data))
    if not any(name.encode() in data for name in MAIN):
        _received[False].setdefault(cls, (key, data))


def look_again() -> None:
    """Discard the kept definitions of all classes, so that each class is pickled again when it is sent next."""
    for remote_main in (True, False):
        _read[remote_main].clear()
        _received[remote_main].clear()


class DefinedClass:
    """Stands in a message for a class of the main module, with the class's definition at the time when this object was made.

    Receivers that do not have the class under its name get this definition, even if the class has changed since.

    Args:
        definition: hash and bytes; None if the class has to be pickled when the message is encoded.
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
    """Set the attributes of a class that was made from a definition, unless the class is complete (wire format)."""
    if cls not in _complete:
        _cloudpickle._class_setstate(cls, state)
        _complete[cls] = True
    return cls


# -- late functions and classes, which the script defines after its worker has joined a group ----------

_KINDS: Final = (type, FunctionType)
# The names that the main module had when the process joined its group; None if no object can be late.
_before: frozenset[str] | None = None
#: The namespace of the main module, the number of its names, and whether :func:`has_late` found a late object among them. The
#: last value is valid while the main module has the same namespace with the same number of names.
late_seen: tuple[dict[str, Any], int, bool] = ({}, 0, False)
_PATIENCE_S: Final = 5.0
# The script's position when a wait for a name timed out; while the script is at this position, no thread waits again.
_stalled = -1
#: late functions and classes of other workers, loaded from messages
_adopted: weakref.WeakSet[Any] = weakref.WeakSet()


def note_main(one_script: bool = True) -> None:
    """Record the names that the main module has now. Functions and classes with other names are late.

    Args:
        one_script: False if the processes of the group run different scripts; then no object is late.
    """
    global _before, late_seen, _stalled
    space = vars(sys.modules["__main__"])
    _before, late_seen, _stalled = frozenset(space) if one_script else None, (space, -1, False), -1


def runs_one_script() -> bool:
    """Return whether all processes of the group run the same script."""
    return _before is not None


def has_late() -> bool:
    """Return whether the main module has a late function or class."""
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
    """Return the object that a module has under a qualified name, or None."""
    found = module
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        return None
    return found


def _own(name: str) -> Any:
    """Return the function or class that the main module defines under a name; None if there is none."""
    found = _found_in(sys.modules["__main__"], name)
    return found if isinstance(found, _KINDS) and getattr(found, "__module__", None) in MAIN else None


def _ahead(name: str) -> int | None:
    """Return the main thread's position in the script if the script assigns the name further down; else None."""
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
    """As :func:`_own`, but if the script assigns the name further down, wait for the assignment, for at most ``_PATIENCE_S``.

    The main thread does not wait. After a wait has timed out, threads do not wait again until the script has moved on.
    """
    global _stalled
    until = time.monotonic() + _PATIENCE_S
    top = name.partition(".")[0]
    while (found := _own(name)) is None and threading.current_thread() is not threading.main_thread():
        at = _ahead(top)
        if at is None or at == _stalled:
            # Look again: the script may have assigned the name between _own() and _ahead() above.
            return _own(name)
        if time.monotonic() > until:
            _stalled = at
            return None
        time.sleep(0.005)
    return found


def late(_main: str, name: str, key: bytes) -> Any:
    """Return the main module's function or class of this name; if there is none, load the definition (wire format)."""
    return begin_late(_main, name, definition, (key,))


def begin_late(_main: str, name: str, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """As :func:`late`, for an object without a definition: make an empty object, which :func:`fill_late` fills (wire format)."""
    # ``_main`` puts the main module's name into the pickle, because snapshots search pickles for this name.
    found = _own_soon(name)
    if found is None:
        found = make(*args)
        _adopted.add(found)
    return found


def fill_late(found: Any, state: Any) -> Any:
    """Set the state of the object that :func:`begin_late` returned, unless the main module defines the object (wire format)."""
    if in_main(found):
        return found
    if isinstance(found, type):
        return fill_class(found, state)
    return _cloudpickle._function_setstate(found, state)


# -- the captured state of functions ----------------------------------------------------------------

_ATOMS: Final = frozenset({type(None), bool, int, str, bytes, complex, type(Ellipsis), range})


class _MutableError(Exception):
    """A function's captured state may change between two messages."""


def captured(function: types.FunctionType) -> Iterable[tuple[str, Any]]:
    """Yield name and value of each object that is sent with a function: closure, defaults, globals, attributes."""
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
    """Return the names that the bodies of classes in a function, and their annotations, may read from the function's globals.

    A class body reads a name with instructions of its own (``_LOADS_OF_CLASSES``), which search the class's attributes first.
    cloudpickle does not examine these instructions. Names that the body has assigned before are left out.
    """
    found: dict[str, None] = {}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            assigned = {"__name__"}  # read by every class body, and sent with every function
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
    """Return whether code assigns to globals or to variables of an enclosing function, as counters do."""
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
    """Return a hashable key that no other immutable value has. If there is no such key, set ``pure[0]`` to False.

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
        # A key with a local class would keep the class alive, so the definition of a function with such a class is not kept.
        if not _cloudpickle._should_pickle_by_reference(value):
            pure[0] = False
        return type, value
    raise _MutableError


def _function_key(function: types.FunctionType, remote_main: bool) -> Any:
    """Return the key of a function's definition in ``_functions``; None if the definition is not kept there.

    Raises:
        _MutableError: the function's captured state may change.
    """
    pure = [True]
    if _rebinds(function.__code__):
        raise _MutableError
    state = [_state_key(value, {id(function): function}, pure) for _, value in captured(function)]
    if not pure[0] or annotations_of(function) or function.__doc__ is not None or function.__dict__:
        return None
    names = (function.__module__, function.__name__, function.__qualname__)
    return (remote_main, function.__code__, function.__code__.co_filename, names, tuple(state))


# -- pickling -----------------------------------------------------------------------------------


def reduce_method(method: types.MethodType) -> tuple[Any, ...]:
    """Reduce a bound method to its object and its name, for the fast pickler.

    Raises:
        PicklingError: the object does not have the method under this name (the method was bound by hand, or a decorator
            returned a function with another name). :class:`ByValuePickler` then encodes the message, and pickles the method as
            object and function.
    """
    name, owner = method.__func__.__name__, method.__self__
    if method != getattr(owner, name, None):
        raise pickle.PicklingError(f"an object of {type(owner).__qualname__} has no such method {name}")
    return getattr, (owner, name)


def definition(key: bytes, _main: str = "") -> Any:
    """Return the function or class of a definition while a message is decoded (wire format).

    Args:
        key: the hash of the definition; or the definition itself, if it is larger than ``_LARGE``.
    """
    if len(key) > _LARGE:
        return _load(hash_of(key), key)
    decoding = message.decoding
    if decoding is None:
        raise ProtocolError(f"definition {key.hex()} is used outside of a message")
    return decoding.definitions.get(key)


class _NotADefinitionError(Exception):
    """A function or class cannot become a definition: it refers to an object that belongs to the message (a tensor, an RRef)."""


def refuse(obj: Any) -> Any:
    """Raise an error: this is the reducer of tensors, RRefs and other objects of a message while a definition is pickled."""
    raise _NotADefinitionError(type(obj).__name__)


def _evaluated(function: FunctionType) -> FunctionType:
    """Return the function; if its annotations cannot be evaluated, a copy whose annotations are strings."""
    try:
        _ = function.__annotations__
    except Exception:
        parts = (function.__name__, function.__defaults__, function.__closure__)
        copy = FunctionType(function.__code__, function.__globals__, *parts)
        for name in ("__dict__", "__doc__", "__kwdefaults__", "__module__", "__qualname__"):
            setattr(copy, name, getattr(function, name))
        copy.__annotations__ = annotations_of(function)
        return copy
    return function


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """The slow path: pickles importable functions and classes by reference, and all others by value.

    Args:
        named: a dictionary that receives the definitions of functions and classes, by hash. None: functions and classes are
            written into the pickle at the place of their first use.
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
            # For example type(None), or the type of code objects: ``builtins`` has no names for these classes.
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
            return reduce_module(obj, lambda name: name in MAIN or is_by_value(name))
        if isinstance(obj, DESCRIPTORS):
            return reduce_descriptor(obj)
        return NotImplemented

    def _dynamic_function_reduce(self, func: FunctionType) -> tuple[Any, ...]:
        reduced: tuple[Any, ...] = super()._dynamic_function_reduce(_evaluated(func))
        space, captured_globals = func.__globals__, reduced[2][1]["__globals__"]
        for name in _names_in_classes(func.__code__):
            if name in space:
                captured_globals[name] = space[name]
        return reduced

    def _has_name(self, obj: Any) -> bool:
        """Return whether the receiver finds the object under its module and name, so that pickle may write only these names."""
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
        if sys.version_info >= (3, 14):  # cloudpickle sends only annotations that were evaluated
            reduced[2][0].pop("__annotations_cache__", None)
            if annotations := annotations_of(cls):
                reduced[2][0]["__annotations__"] = annotations
        return self._inline(cls, (*reduced[:5], fill_class))

    def define_class(self, cls: type) -> tuple[bytes, bytes] | None:
        """Return hash and definition of the class in its present state; None if the class refers to an object of the message."""
        bases = tuple([each for each in cls.__mro__ if not self._by_reference(each)])
        try:
            return _read[self._remote_main].make(cls, bases, self._define)
        except _NotADefinitionError:
            return None

    def _prefers_own(self, obj: Any) -> bool:
        """Return whether the object is late, so that the receiver must prefer the object that its main module has."""
        ours = self._remote_main and getattr(obj, "__module__", None) in MAIN
        return ours and (obj in _adopted or in_main(obj))

    def _inline(self, obj: Any, reduced: tuple[Any, ...]) -> Any:
        if not self._prefers_own(obj):
            return reduced
        return begin_late, (MAIN[0], obj.__qualname__, *reduced[:2]), *reduced[2:5], fill_late

    def _name(self, obj: Any, key: bytes, data: bytes) -> Any:
        assert self._named is not None
        if len(data) > _LARGE:
            key = data  # too large for a frame of its own; as a part of the message it is sent in chunks
        else:
            self._named[key] = data
        if self._prefers_own(obj):
            return late, (MAIN[0], obj.__qualname__, key)
        # Snapshots search a message's body for the name of the main module (refs/snapshot.py). The long bytes of this definition
        # are not in the body, so the name is written here, too.
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
                encoding.context = None  # a definition must not depend on the context of a message
            ByValuePickler(sink, self._refusing, remote_main=self._remote_main).dump(obj)
        finally:
            if encoding is not None:
                encoding.context = context
        data = sink.getvalue()
        return hash_of(data), data


def in_main(obj: Any) -> bool:
    """Return whether an object is a function or class that the main module defines, under its own name."""
    return isinstance(obj, _KINDS) and _own(obj.__qualname__) is obj
