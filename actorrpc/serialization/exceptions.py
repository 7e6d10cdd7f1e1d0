"""Send the exception that a called function raised, and raise it again at the caller.

:func:`dump` runs on the thread that executed the call, :func:`load` on the thread that receives the result. An exception is sent
as its class, its ``args``, its C-level fields and slots and its ``__dict__``. It is rebuilt without calling its constructor, so
the constructor's signature does not matter. If the class defines its own pickling (``__reduce__``), that is used instead. At the
caller, :func:`load` makes two exceptions: the *original*, of the user's class, and the exception that is raised. The latter has a
*raised class*, which is made from the user's class and :class:`RemoteError`; its ``__cause__`` is the remote traceback.

Neither function raises, whatever the user's class does. Neither holds a lock, because both run user code.
"""

from __future__ import annotations

import abc
import builtins
import copy
import copyreg
import enum
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgpack

from actorrpc._exceptions import ARGS as _ARGS
from actorrpc._exceptions import CAUSE as _CAUSE
from actorrpc._exceptions import (
    MAX_NOTES,
    cut,
    format_error,
    is_of_handler,
    line_of,
    notes_of,
    say,
    shown,
    type_name,
)
from actorrpc._exceptions import MEMBERS as _MEMBERS
from actorrpc._exceptions import MESSAGE as _MESSAGE
from actorrpc._exceptions import dict_of as _dict_of
from actorrpc._exceptions import names_of as _names_of
from actorrpc.errors import RemoteError, RemoteTraceback, RpcError, SerializationError

__all__ = [
    "MAX_PICKLE",
    "MAX_TEXT",
    "Travel",
    "assemble",
    "dump",
    "load",
    "original",
    "parts",
    "raised_as",
    "traceback_of",
]

MAX_TEXT = 64 << 10  # characters of a formatted traceback; the middle of a longer traceback is cut
MAX_PICKLE = 16 << 20  # bytes of the pickled exception; values that make it larger are left out
_MAX_MESSAGE = 8 << 10
_MAX_MEMBER_TEXT = 4 << 10
_MAX_CACHE = 256
_MAX_SCAN = 1000

_V = TypeVar("_V")
_State = tuple[tuple[Any, ...] | None, dict[str, Any], dict[str, Any]]  # args, fields, __dict__

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: not set for static classes of C, such as the built-in exceptions
_ATOMS = frozenset({str, int, float, bool, bytes, type(None), complex})
_BUILTIN = {id(object), *(id(c) for c in vars(builtins).values() if isinstance(c, type))}


# -- the plan of an exception's class --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to read the contents of exceptions of one class, and how to make such an exception without its constructor."""

    cls: type[BaseException]
    # Name -> descriptor, and whether the descriptor's class is a static class of C: then None means "not set".
    fields: dict[str, tuple[Any, bool]]
    custom: bool  # the class defines its own pickling
    native: Any  # the base class in C whose __new__ makes instances; None: only the class's own can
    group: bool


_plans: dict[int, _Plan] = {}
# id() of a user's class -> the class, and its raised class; None if Python cannot make such a class.
_raised_classes: dict[int, tuple[type[BaseException], type[BaseException] | None]] = {}
# One more base, such as RayTaskError -> a cache as _raised_classes, of raised classes with this base. See :func:`raised_as`.
_raised_classes_as: dict[type[RemoteError], dict[int, tuple[type[BaseException], type[BaseException] | None]]]
_raised_classes_as = {}


def _remember(cache: dict[int, _V], key: int, value: _V) -> _V:
    # The key is the class's id, because a metaclass may define __eq__ or forbid hashing. The value refers to the class, so that
    # no other class gets the same id. The cache is bounded, because classes sent by value come and go. Each step is atomic.
    if len(cache) >= _MAX_CACHE:
        cache.clear()
    return cache.setdefault(key, value)


def _plan(cls: type[BaseException]) -> _Plan:
    plan = _plans.get(id(cls))
    if plan is not None:
        return plan
    mro = type.__dict__["__mro__"].__get__(cls)
    fields: dict[str, tuple[Any, bool]] = {}
    for owner in mro:
        if owner is BaseException or owner is BaseExceptionGroup:
            continue  # args, __cause__ and the members of a group are handled elsewhere
        for name, descriptor in tuple(_names_of(owner).items()):
            if owner is AttributeError and name == "obj":
                continue  # AttributeError.obj may be a whole model, and is not sent
            written = name == "characters_written" and owner is OSError and issubclass(cls, BlockingIOError)
            if written or type(descriptor) is types.MemberDescriptorType:
                name = f"{owner.__qualname__}.{name}" if name in fields else name
                fields[name] = (descriptor, not owner.__flags__ & _HEAP_TYPE)
    native = _native(cls)
    group = issubclass(cls, BaseExceptionGroup)
    try:
        if not group and type(native.__new__(cls)) is not cls:
            native = None
    except Exception:
        native = None
    custom = any(
        id(next(owner for owner in mro if owner is object or name in _names_of(owner))) not in _BUILTIN
        for name in ("__reduce_ex__", "__reduce__", "__setstate__")
    )
    return _remember(_plans, id(cls), _Plan(cls, fields, custom, native, group))


def _native(cls: Any) -> Any:
    while cls.__flags__ & _HEAP_TYPE:
        cls = cls.__base__
    return cls


def _create(cls: Any, seed: tuple[Any, ...] = ()) -> Any:
    """Make an empty exception of this class without running its ``__init__``."""
    return (_plan(cls).native or cls).__new__(cls, *seed)


def _capture(error: BaseException, plan: _Plan) -> _State:
    args = _ARGS.__get__(error)
    fields = {}
    for name, (descriptor, in_c) in plan.fields.items():
        try:
            value = descriptor.__get__(error)
        except AttributeError:
            continue  # a slot never set
        # A C field that is not set reads as None. An OSError of 2 to 5 arguments has set errno and strerror, perhaps to None.
        if value is not None or not in_c or (name in ("errno", "strerror") and 2 <= len(args) <= 5):
            fields[name] = value
    return (None if plan.group else args), fields, dict(_dict_of(error))


def _restore(error: BaseException, state: _State) -> None:
    args, fields, attributes = state
    if args is not None:
        _ARGS.__set__(error, args)
    if fields:
        known = _plan(_class_of(error)).fields
        for name, value in fields.items():
            try:
                known[name][0].__set__(error, value)
            except (AttributeError, KeyError, TypeError, ValueError):
                pass  # the field is read-only, or this process has another version of the class
    if attributes:
        _dict_of(error).update(attributes)


def _twin(error: BaseException, plan: _Plan, cls: Any) -> Any:
    """Return a copy of ``error`` as an instance of ``cls``: the plan's class, or the raised class made from the plan's class."""
    state = _capture(error, plan)
    if plan.group:
        made = plan.native.__new__(cls, _MESSAGE.__get__(error), _MEMBERS.__get__(error))
    elif plan.native is None:
        made = cls.__new__(cls, *(state[0] or ()))
    else:
        made = _native(cls).__new__(cls)
    if isinstance(state[2].get("__notes__"), list):
        state[2]["__notes__"] = list(state[2]["__notes__"])  # not shared, as add_note() changes the list
    _restore(made, state)
    return made


# -- reading the contents of an exception ----------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Travel:
    """Stands for an exception in a pickle, and unpickles as that exception.

    A packer makes one Travel for each exception, so that exceptions may refer to each other in a circle.
    """

    error: BaseException  # keeps the exception alive, so that no other exception gets its id
    reduced: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


class _Packer:
    """Reads the contents of an exception.

    Args:
        fits: returns whether a value can be sent. Other values are left out, and ``dropped`` has the names of these values.
        nested: whether exceptions to which the values refer are packed in the same way.
    """

    def __init__(self, fits: Callable[[object], bool] | None = None, *, nested: bool = True) -> None:
        self._fits = fits
        self._nested = nested
        self._travels: dict[int, Travel] = {}
        self.dropped: list[str] = []

    def travel(self, error: BaseException, *, obey: bool = True) -> Travel:
        found = self._travels.get(id(error))
        if found is not None:
            return found
        cls = _class_of(error)
        plan = _plan(cls)
        travel = self._travels[id(error)] = Travel(error, (_create, (cls,)))
        remote = _remote_of(error)
        if remote is not None and cls is not RemoteError:
            # In the pickle, a reference to the original also becomes a reference to this Travel.
            self._travels[id(remote.cause)] = travel
        if issubclass(cls, enum.Enum):
            travel.reduced = (getattr, (cls, cast(Any, error)._name_))
            return travel
        if obey and (plan.custom or _registered(cls)):
            reduced = self._custom(error, plan)
            if reduced is not None:
                travel.reduced = reduced
                return travel
        state = self.state(error, plan)
        seed: tuple[Any, ...] = ()
        if plan.group:
            seed = (_MESSAGE.__get__(error), [self.travel(member) for member in _MEMBERS.__get__(error)])
        elif plan.native is None:
            seed = state[0] or ()
        travel.reduced = (_create, (cls, seed), state, None, None, _restore)
        return travel

    def state(self, error: BaseException, plan: _Plan) -> _State:
        args, fields, attributes = _capture(error, plan)
        if args:
            wrapped = [self._wrap(value) for value in args]
            args = tuple(
                new if self.fits(new, f"args[{at}]") else say(old, repr)
                for at, (old, new) in enumerate(zip(args, wrapped, strict=True))
            )
        return args, self._keep(fields), self._keep(attributes)

    def _keep(self, values: dict[str, Any]) -> dict[str, Any]:
        kept = {}
        for name, value in values.items():
            value = self._wrap(value)
            # Notes do not count as dropped: shortened copies of them are sent outside of the pickle, too.
            if self.fits(value, "" if name == "__notes__" else cut(str(name), 100)):
                kept[name] = value
        return kept

    def fits(self, value: object, name: str) -> bool:
        """Return whether a value can be sent; if it cannot, add ``name`` to ``dropped``."""
        if self._fits is None or self._fits(value):
            return True
        if name:
            self.dropped.append(name)
        return False

    def _custom(self, error: BaseException, plan: _Plan) -> tuple[Any, ...] | None:
        """Return the reduction that the class itself defines, after a trial of unpickling it; None if the trial fails."""
        cls: Any = plan.cls
        try:
            if type(error) is not cls:
                error = _twin(error, plan, cls)  # the user's method expects an instance of the user's class
            reducer = _registered(cls)
            reduced = cls.__reduce_ex__(error, 4) if reducer is None else reducer(error)
            function, args, state, *rest = (*reduced, None)[: max(3, len(reduced))]
            if any(part is not None for part in rest):
                return None
            trial = function(*args)  # many classes define a pickling that cannot be unpickled
            if type(trial) is not cls:
                return None
            if state is not None:
                trial.__setstate__(state)
            reduced = (function, self._wrap(args), self._wrap(state))
            return reduced if self._fits is None or self._fits(reduced) else None
        except BaseException as failure:
            if is_of_handler(failure):
                raise
            return None

    def _wrap(self, value: Any, depth: int = 3) -> Any:
        kind = type(value)
        if kind in _ATOMS or not self._nested:
            return value
        if issubclass(kind, BaseException):
            return self.travel(value)
        if depth and kind in (list, tuple, dict) and len(value) <= _MAX_SCAN:
            before = list(value.values() if kind is dict else value)
            after = [self._wrap(item, depth - 1) for item in before]
            if any(one is not other for one, other in zip(before, after, strict=True)):
                return dict(zip(value, after, strict=True)) if kind is dict else kind(after)
        return value


def _registered(cls: type) -> Any:
    try:
        return copyreg.dispatch_table.get(cls)
    except Exception:  # raised by a metaclass that forbids hashing
        return None


def _is_small(value: object) -> bool:
    return type(value) in _ATOMS and (not isinstance(value, str | bytes) or len(value) <= _MAX_MESSAGE)


def parts(error: BaseException | Travel) -> tuple[type[BaseException], tuple[Any, ...], _State]:
    """Return the arguments of :func:`assemble`: the exception's class, the arguments of its ``__new__``, and its state.

    Exceptions to which the state refers are returned as they are. Exceptions that the user's class raises are not caught.
    """
    if not isinstance(error, Travel):
        error = _Packer(nested=False).travel(error, obey=False)
    elif error.reduced[0] is not _create:
        return parts(error.error)
    if error.reduced[0] is not _create:
        raise SerializationError(f"{type_name(type(error.error))} is an enum: such exceptions cannot be sent")
    (cls, seed), state = error.reduced[1:3]
    return cls, seed, state


def assemble(cls: type[BaseException], seed: tuple[Any, ...], state: _State) -> BaseException:
    """Make an exception from the result of :func:`parts`, without its constructor."""
    made: BaseException = _create(cls, seed)
    _restore(made, state)
    return made


# -- packing ---------------------------------------------------------------------------------------------


def dump(
    error: BaseException,
    *,
    worker: str,
    dumps: Callable[[object], bytes],
    limit: int = MAX_PICKLE,
    executed: bool = True,
    where: str = "",
) -> bytes:
    """Pack an exception for the caller; never raises, and may be called on any thread.

    Args:
        worker: the name of this worker, for the traceback's text.
        dumps: pickles an object; it may raise.
        limit: the most bytes of the pickled exception. Values that make it larger are left out, and a note names these values.
            0: only the exception's class and the beginning of its text are sent.
        executed: False if the called function was certainly not started.
        where: the place that the traceback's text names; by default the worker.
    """
    try:
        return _dump(error, worker, dumps, limit, executed, where=where or worker)
    except BaseException:  # raised by the user's class; the caller must get a reply nevertheless
        name, message = type_name(type(error)), say(error)
        text = f"On worker {worker}:\n{shown(name)}: {message}\n"
        return _pack(name, message, text, worker, executed, None, None, None, [])


def _dump(
    error: BaseException,
    worker: str,
    dumps: Any,
    limit: int,
    executed: bool,
    *,
    inside: bool = False,
    where: str = "",
) -> bytes:
    message, text = say(error), ""
    if not inside or not _plan(_class_of(error)).group:  # an outer group's text contains an inner group's
        text = format_error(error, message, where or worker, _remote_of)
        text = cut(text, _MAX_MEMBER_TEXT if inside or not limit else MAX_TEXT)
    name, origin, subject = type_name(type(error)), worker, cast(BaseException | None, error)
    remote = _remote_of(error)
    if remote is not None:  # the exception came from another worker: send the original, not wrapped again
        name, origin = remote.type_name, remote.worker or worker
        if type(error) is RemoteError:
            subject, message = remote.cause, message.removeprefix(f"{shown(name)}: ")
    notes = notes_of(error) if limit else []
    whole = lean = members = None
    if subject is not None:
        try:
            whole, lean, members = _pickle(subject, message, worker, dumps, limit, notes)
        except Exception:
            pass
    return _pack(name, message, text, origin, executed, whole, lean, members, notes)


def _pickle(
    error: BaseException,
    message: str,
    worker: str,
    dumps: Callable[[object], bytes],
    limit: int,
    notes: list[str],
) -> tuple[bytes | None, bytes | None, list[bytes] | None]:
    plan = _plan(_class_of(error))
    members = None
    if plan.group:  # members are pickled one by one, so that the caller can rebuild the others if one fails
        members, remaining = [], limit
        inside = _MEMBERS.__get__(error)
        for number, member in enumerate(inside):
            # Members beyond the limit get _MAX_MEMBER_TEXT bytes each; beyond twice the limit, members are left out.
            if remaining <= -limit:
                left_out = RuntimeError(
                    f"{len(inside) - number} more exceptions of this group are too large to be sent"
                )
                members.append(_dump(left_out, worker, dumps, _MAX_MEMBER_TEXT, True, inside=True))
                break
            room = max(remaining, _MAX_MEMBER_TEXT)
            members.append(_dump(member, worker, dumps, room, True, inside=True))
            remaining -= len(members[-1])

    def attempt(make: Callable[[], object], most: int = limit) -> bytes | None:
        try:
            data = dumps(make())
            return bytes(data) if len(data) <= most else None
        except BaseException:
            return None

    def taken_apart(packer: _Packer, obey: bool = True) -> object:
        if not plan.group:
            return packer.travel(error, obey=obey)
        title = _MESSAGE.__get__(error)
        return plan.cls, title if packer.fits(title, "message") else say(title), packer.state(error, plan)

    def shortest() -> object:
        if plan.group:
            return plan.cls, message, (None, {}, {})
        seed = (message,) if plan.native is None else ()
        return Travel(error, (_create, (plan.cls, seed), ((message,), {}, {}), None, None, _restore))

    def fits(value: object) -> bool:
        try:  # the packer has checked the values of a Travel already
            return type(value) is Travel or len(dumps(value)) <= limit // 4
        except BaseException:
            return False

    packer = _Packer()
    whole, lean = attempt(lambda: taken_apart(packer)), None
    if whole is None:
        packer = _Packer(fits)
        whole = attempt(lambda: taken_apart(packer))
    args, fields, attributes = _capture(error, plan)
    values = (*(args or ()), *fields.values(), *attributes.values())
    if whole is None or plan.custom or not all(type(value) in _ATOMS for value in values):
        # The caller may be unable to load some value. Then it rebuilds the class and the plain values from ``lean``.
        plain = _Packer(_is_small, nested=False)
        lean = attempt(lambda: taken_apart(plain, obey=False))
        if whole is None:
            packer = plain
            if lean is None:
                lean = attempt(shortest, max(limit, 4 * _MAX_MESSAGE))
                packer.dropped = ["all but its class and the beginning of its text"]
    if packer.dropped:
        left = cut(", ".join(dict.fromkeys(packer.dropped)), 1000)
        notes.append(f"worker {worker} cut parts of this error, as it cannot be sent whole: {left}")
    return whole, lean, members


def _pack(*parts: object) -> bytes:
    # surrogatepass: names of files that are not UTF-8 contain lone surrogates
    return cast(bytes, msgpack.packb(parts, unicode_errors="surrogatepass"))


# -- raising an exception again --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RemoteCause:
    cause: BaseException | None
    type_name: str
    traceback: str
    worker: str | None
    maybe_executed: bool = True


class _Field:
    """An attribute of a raised exception that is read from its ``_RemoteCause``.

    The descriptor has no ``__set__``. Therefore an entry of the same name in the exception's ``__dict__`` comes first.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, error: BaseException | None, owner: object) -> Any:
        remote = None if error is None else _remote_of(error)
        return RemoteError.__dict__.get(self._name) if remote is None else getattr(remote, self._name)


class _Raised(RemoteError):
    """The last base of each raised class: the interface of RemoteError. Attributes of the user's class come first."""

    cause = cast(Any, _Field("cause"))
    type_name = cast(Any, _Field("type_name"))
    traceback = cast(Any, _Field("traceback"))
    worker = cast(Any, _Field("worker"))
    maybe_executed = cast(Any, _Field("maybe_executed"))

    def __copy__(self) -> BaseException:
        cls = _class_of(self)
        return cast(BaseException, _twin(self, _plan(cls), cls))

    def __deepcopy__(self, memo: dict[int, Any]) -> BaseException:
        made = memo[id(self)] = memo[id(original(self))] = self.__copy__()
        _restore(made, copy.deepcopy(_capture(self, _plan(type(made))), memo))
        return made


class _Shim:
    """The first base of each raised class: overrides what a raised class must not inherit from the user's class."""

    __slots__ = ()

    def __init_subclass__(cls, **_: object) -> None:
        """Do nothing: the user's ``__init_subclass__`` must not run, as it may add the raised class to a registry."""

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _itself, (_Packer().travel(cast(BaseException, self)),)


class _RpcShim(_Shim):
    """The first base of a raised class if the called function raised an RpcError, such as the PeerDiedError of a nested call.

    Such an error has a ``maybe_executed`` that is about the nested call; ``.cause`` still has it. ``maybe_executed`` of the
    raised exception is about the caller's own call.
    """

    __slots__ = ()

    @property
    def maybe_executed(self) -> bool:
        remote = _remote_of(cast(BaseException, self))
        return remote is None or remote.maybe_executed


def _itself(error: _V) -> _V:
    return error


# The attributes of every exception that the interpreter, asyncio and this package read or set.
_COMMON = ("__cause__", "__class__", "__context__", "__dict__", "__suppress_context__", "__traceback__")


def _manners(cls: type[BaseException]) -> dict[str, Any]:
    """Return methods for a raised class that read and set the attributes in ``_COMMON`` as BaseException does.

    They are needed if the user's class overrides one of these attributes, ``__getattribute__`` or ``__setattr__``. All other
    attributes are read and set as the user's class defines.
    """
    found: dict[str, Any] = {}
    for owner in type.__dict__["__mro__"].__get__(cls):
        if id(owner) not in _BUILTIN:
            found = {**_names_of(owner), **found}
    common = {**_names_of(object), **_names_of(BaseException)}
    space: dict[str, Any] = {name: common[name] for name in _COMMON if name in found}
    read, write = found.get("__getattribute__"), found.get("__setattr__")
    if read is not None:

        def get(self: Any, name: str) -> Any:
            return (object.__getattribute__ if name in _COMMON else read)(self, name)

        space["__getattribute__"] = get
    if write is not None:

        def put(self: Any, name: str, value: Any) -> None:
            (object.__setattr__ if name in _COMMON else write)(self, name, value)

        space["__setattr__"] = put
    return space


def _raised_class(
    cls: type[BaseException], base: type[RemoteError] | None = None
) -> type[BaseException] | None:
    """Return a subclass of ``cls``, RemoteError and ``base``; None if Python cannot make such a class."""
    classes = _raised_classes if base is None else _raised_classes_as.setdefault(base, {})
    known = classes.get(id(cls))
    if known is not None:
        return known[1]
    made: type[BaseException] | None = None
    # SystemExit and its like must not end the caller. An enum cannot have instances other than its members.
    if issubclass(cls, Exception) and not issubclass(cls, enum.Enum):
        shim = _RpcShim if issubclass(cls, RpcError) else _Shim
        own = () if issubclass(_Raised, cls) else (cls,)
        bases = (shim, *own, _Raised) if base is None else (shim, *own, base, _Raised)
        # The metaclass's own __new__ and __init__ do not run, because they may add the raised class to a registry.
        make: Any = abc.ABCMeta.__new__ if issubclass(type(cls), abc.ABCMeta) else type.__new__
        try:
            space = {
                **_manners(cls),
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
                "__slots__": ("_actorrpc_remote",),  # not in the user's __dict__
                "_actorrpc_original": cls,
            }
            name = cls.__name__
            if base is not None:
                name = space["__qualname__"] = f"{base.__name__}({name})"
                space["__module__"] = base.__module__
            made = make(type(cls), name, bases, space)
        except Exception:  # incompatible layouts, a final class in C, or an error in a metaclass's mro()
            pass
    return _remember(classes, id(cls), (cls, made))[1]


def _class_of(error: BaseException) -> type[BaseException]:
    return cast(type[BaseException], _names_of(type(error)).get("_actorrpc_original", type(error)))


def _remote_of(error: BaseException) -> _RemoteCause | None:
    if type(error) is RemoteError:
        if "type_name" not in _dict_of(error):
            return None  # raised by hand
        return _RemoteCause(error.cause, error.type_name, error.traceback, error.worker)
    slot = _names_of(type(error)).get("_actorrpc_remote")
    try:
        return cast(_RemoteCause, slot.__get__(error)) if type(slot) is types.MemberDescriptorType else None
    except AttributeError:
        return None  # the slot is not set: user code made this instance of a raised class


def original(error: BaseException) -> BaseException:
    """Return the original, if :func:`load` made ``error`` and could rebuild the original; otherwise ``error``.

    Reads ``_RemoteCause``, because the user's class may have another attribute of the name ``cause``.
    """
    remote = _remote_of(error)
    return error if remote is None or remote.cause is None else remote.cause


def raised_as(error: BaseException, base: type[RemoteError]) -> BaseException:
    """Return a copy of an exception that :func:`load` made, which is also an instance of ``base``.

    ``base`` follows the user's class in the MRO. It is the class in which another interface raises errors of called functions,
    such as RayTaskError. If the copy is sent to another worker, the user's exception is sent in its place, as for ``error``.
    Returns ``error`` itself if it is a plain RemoteError, was not made by :func:`load`, or if Python cannot combine the classes.
    """
    remote = _remote_of(error)
    if remote is None or remote.cause is None or type(error) is RemoteError:
        return error
    made = _combine(remote.cause, remote, base)
    return error if made is None else made


def traceback_of(error: BaseException) -> str:
    """Return the remote traceback if :func:`load` made ``error``; otherwise an empty text.

    Reads ``_RemoteCause``, because the user's class may have another attribute of the name ``traceback``.
    """
    remote = _remote_of(error)
    return "" if remote is None else remote.traceback


def load(data: bytes | memoryview, *, loads: Callable[[bytes], object]) -> BaseException:
    """Return the exception to raise at the caller; never raises, and may be called on any thread.

    The result is always a ``RemoteError``. If the original is an ``Exception``, and Python can combine the two classes, the
    result is also an instance of the original's class. ``SystemExit``, ``KeyboardInterrupt``, ``GeneratorExit``,
    ``asyncio.CancelledError`` and their like would end or cancel the caller. Therefore the caller gets a plain ``RemoteError``
    whose ``cause`` is the original.

    If the called function raised an ``RpcError`` (the ``PeerDiedError`` of a nested call), the result is an instance of that
    class, too. Its ``maybe_executed`` is about the caller's call. Its other fields (``worker``: the worker that
    died) are copied from the original, and ``.cause`` is the original.
    """
    try:
        name, message, text, worker, executed, *contents = _unpack(data)
        cause, notes = _rebuild(loads, *contents)
        remote = _RemoteCause(cause, name, text, worker, executed)
        if cause is None:
            return _plain(remote, message, notes)
        raised = _combine(cause, remote)
        return _plain(remote, message, []) if raised is None else raised
    except BaseException as failure:
        return _plain(
            _RemoteCause(None, "", "", None), f"an exception that cannot be read: {line_of(failure)}", []
        )


def _unpack(data: bytes | memoryview) -> tuple[Any, ...]:
    name, message, text, worker, executed, *contents = msgpack.unpackb(data, unicode_errors="surrogatepass")
    return str(name), str(message), str(text), str(worker), bool(executed), *contents


def _rebuild(
    loads: Callable[[bytes], Any], whole: Any, lean: Any, members: Any, notes: list[str]
) -> tuple[BaseException | None, list[str]]:
    """Return the original, or None if it cannot be rebuilt; and the notes for the RemoteError that then replaces it."""
    failed = ""
    for form in (whole, lean):
        if form is None:
            continue
        try:
            made = loads(form)
            if members is not None:
                cls, message, state = made
                made = assemble(cls, (message, [_member(member, loads) for member in members]), state)
            if not issubclass(type(made), BaseException):
                raise TypeError(f"{type_name(type(made))} is not an exception")
            if failed:
                notes = [*notes, f"only plain values of the exception were rebuilt here: {failed}"]
            own = _dict_of(made).get("__notes__")
            if type(own) is list:
                # ``own`` has all notes of the original; ``notes`` begins with shortened copies of the first MAX_NOTES of them.
                own += notes[min(len(own), MAX_NOTES) :]
            elif notes:
                _dict_of(made)["__notes__"] = list(notes)
            return made, notes
        except BaseException as failure:
            failed = failed or line_of(failure)
    return None, [*notes, f"the exception cannot be rebuilt here: {failed}"] if failed else notes


def _member(data: bytes, loads: Callable[[bytes], Any]) -> BaseException:
    name, message, text, worker, _, *contents = _unpack(data)
    made, notes = _rebuild(loads, *contents)
    return _plain(_RemoteCause(None, name, text, worker), message, notes) if made is None else made


def _combine(
    cause: BaseException, remote: _RemoteCause, base: type[RemoteError] | None = None
) -> BaseException | None:
    raised_class = _raised_class(type(cause), base)
    if raised_class is None:
        return None
    try:
        raised = cast(BaseException, _twin(cause, _plan(type(cause)), raised_class))
        raised_class.__dict__["_actorrpc_remote"].__set__(raised, remote)
        _CAUSE.__set__(raised, RemoteTraceback(remote.traceback))
        return raised
    except BaseException:  # raised by the user's __new__, if no base class in C can make the exception
        return None


def _plain(remote: _RemoteCause, message: str, notes: list[str]) -> RemoteError:
    label = shown(remote.type_name)
    raised = RemoteError(f"{label}: {message}" if label and message else label or message)
    raised.cause, raised.type_name = remote.cause, remote.type_name
    raised.traceback, raised.worker = remote.traceback, remote.worker
    if not remote.maybe_executed:
        raised.maybe_executed = False
    raised.__cause__ = RemoteTraceback(remote.traceback)
    for note in notes:
        raised.add_note(str(note))
    return raised
