"""Exceptions on the wire: what a called function raised, packed there and raised again here.

:func:`dump` runs on the thread that executed the call, :func:`load` on the one that takes its result. An
exception travels as its class, its ``args``, its C-level fields and slots and its ``__dict__``, and is
rebuilt without calling its constructor, so that the constructor's signature does not matter; a class that
says itself how to be pickled (``__reduce__``) is obeyed. What is raised at the caller is of a class made from
the user's class and :class:`RemoteError`, with the remote traceback as ``__cause__``.

Neither function ever raises, whatever the user's class does. No lock is held, so user code may run anywhere.
Nothing is read from anywhere but the traceback's source lines, through ``linecache``.
"""

from __future__ import annotations

import abc
import builtins
import copy
import copyreg
import enum
import itertools
import linecache
import traceback as tracebacks
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgpack

from actorrpc.errors import RemoteError, RemoteTraceback, RpcError

__all__ = ["MAX_PICKLE", "MAX_TEXT", "dump", "load", "original", "reduce"]

MAX_TEXT = 64 << 10  # characters of formatted traceback; the middle of a longer one is cut
MAX_PICKLE = 16 << 20  # bytes of the pickled exception; what makes it larger is left behind
_MAX_MESSAGE = 8 << 10
_MAX_MEMBER_TEXT = 4 << 10
_MAX_FRAMES = 200
_MAX_MEMBERS = 200  # of a group, printed as Python does
_MAX_CHAIN = 64
_MAX_NOTES = 100
_MAX_CACHE = 256
_MAX_SCAN = 1000

_V = TypeVar("_V")
_State = tuple[tuple[Any, ...] | None, dict[str, Any], dict[str, Any]]  # args, fields, __dict__

# Read and written through BaseException's own descriptors: a user's class may define properties of these
# names, a __getattr__ that raises, or refuse every assignment (a frozen dataclass does).
_ARGS: Any = BaseException.__dict__["args"]
_CAUSE: Any = BaseException.__dict__["__cause__"]
_CONTEXT: Any = BaseException.__dict__["__context__"]
_SUPPRESS: Any = BaseException.__dict__["__suppress_context__"]
_TRACEBACK: Any = BaseException.__dict__["__traceback__"]
_MESSAGE: Any = BaseExceptionGroup.__dict__["message"]
_MEMBERS: Any = BaseExceptionGroup.__dict__["exceptions"]
_dict_of: Callable[[BaseException], dict[str, Any]] = BaseException.__dict__["__dict__"].__get__
_names_of: Callable[[type], dict[str, Any]] = type.__dict__["__dict__"].__get__

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: clear on classes that were made in C
_ATOMS = frozenset({str, int, float, bool, bytes, type(None), complex})
_BUILTIN = {id(object), *(id(c) for c in vars(builtins).values() if isinstance(c, type))}


# -- what an exception's class looks like ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to take an exception of one class apart and to make one without its constructor."""

    cls: type[BaseException]
    fields: dict[str, tuple[Any, bool]]  # descriptor, made in C: then None means "not set"
    custom: bool  # says itself how to be pickled
    native: Any  # the class in C whose __new__ makes it; None: only its own __new__ can
    group: bool


_plans: dict[int, _Plan] = {}
_raised_classes: dict[int, tuple[type[BaseException], type[BaseException] | None]] = {}


def _remember(cache: dict[int, _V], key: int, value: _V) -> _V:
    # Keyed by id (a metaclass may define __eq__ or forbid hashing); the value holds the class, so that the id
    # stays its own. Bounded, as classes sent by value come and go. Each step is one atomic operation.
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
            continue  # args, __cause__ and the members of a group go their own ways
        for name, descriptor in tuple(_names_of(owner).items()):
            if owner is AttributeError and name == "obj":
                continue  # whatever the attribute was looked up on, perhaps a whole model
            written = name == "characters_written" and owner is OSError and issubclass(cls, BlockingIOError)
            if written or type(descriptor) is types.MemberDescriptorType:
                name = f"{owner.__qualname__}.{name}" if name in fields else name
                fields[name] = (descriptor, not owner.__flags__ & _HEAP_TYPE)
    native = _native(cls)
    group = issubclass(cls, BaseExceptionGroup)
    try:
        if not group and type(native.__new__(cls)) is not cls:
            native = None
    except BaseException:
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


def _take(error: BaseException, plan: _Plan) -> _State:
    args = _ARGS.__get__(error)
    fields = {}
    for name, (descriptor, in_c) in plan.fields.items():
        try:
            value = descriptor.__get__(error)
        except AttributeError:
            continue  # a slot never set
        # C shows a field that is not set as None. OSError(None, None) has two that are set to it.
        if value is not None or not in_c or (name in ("errno", "strerror") and len(args) == 2):
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
                pass  # read-only, or not the same in this version of the class
    if attributes:
        _dict_of(error).update(attributes)


def _twin(error: BaseException, plan: _Plan, cls: Any) -> Any:
    """Make an exception of ``cls`` (the plan's class or the one raised for it) with the same contents."""
    state = _take(error, plan)
    if plan.group:
        made = plan.native.__new__(cls, _MESSAGE.__get__(error), _MEMBERS.__get__(error))
    elif plan.native is None:
        made = cls.__new__(cls, *(state[0] or ()))
    else:
        made = _native(cls).__new__(cls)
    if isinstance(state[2].get("__notes__"), list):
        state[2]["__notes__"] = list(state[2]["__notes__"])  # a note added to the one is not on the other
    _restore(made, state)
    return made


# -- taking an exception apart ---------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Travel:
    """Stands for an exception inside a pickle, and unpickles as it; one for each, so that cycles stay."""

    error: BaseException  # keeps the id that it is known by
    reduced: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


class _Packer:
    """Takes one exception apart, and with ``nested`` also those that its values refer to.

    ``fits`` says of a value whether it can travel; one that cannot is left behind.
    """

    def __init__(self, fits: Callable[[object], bool] | None = None, *, nested: bool = True) -> None:
        self._fits = fits
        self._nested = nested
        self._travels: dict[int, _Travel] = {}
        self.dropped: list[str] = []

    def travel(self, error: BaseException, *, obey: bool = True) -> _Travel:
        found = self._travels.get(id(error))
        if found is not None:
            return found
        cls = _class_of(error)
        plan = _plan(cls)
        travel = self._travels[id(error)] = _Travel(error, (_create, (cls,)))
        remote = _remote_of(error)
        if (
            remote is not None and cls is not RemoteError
        ):  # what refers to either refers to the one that travels
            self._travels[id(remote.cause)] = travel
        if issubclass(cls, enum.Enum):
            travel.reduced = (getattr, (cls, cast(Any, error)._name_))
            return travel
        if obey and (plan.custom or _registered(cls)):
            reduced = self._custom(error, plan)
            if reduced is not None:
                travel.reduced = reduced
                return travel
        seed: tuple[Any, ...] = ()
        if plan.group:
            seed = (_MESSAGE.__get__(error), [self.travel(member) for member in _MEMBERS.__get__(error)])
        elif plan.native is None:
            seed = self._wrap(_ARGS.__get__(error))
        travel.reduced = (_create, (cls, seed), self.state(error, plan), None, None, _restore)
        return travel

    def state(self, error: BaseException, plan: _Plan) -> _State:
        args, fields, attributes = _take(error, plan)
        if args:
            wrapped = tuple(self._wrap(value) for value in args)
            if self._fits is not None:
                pairs = zip(args, wrapped, strict=True)
                wrapped = tuple(new if self._fits(new) else _say(old, repr) for old, new in pairs)
            args = wrapped
        return args, self._keep(fields), self._keep(attributes)

    def _keep(self, values: dict[str, Any]) -> dict[str, Any]:
        kept = {}
        for name, value in values.items():
            value = self._wrap(value)
            if self._fits is None or self._fits(value):
                kept[name] = value
            else:
                self.dropped.append(_cut(str(name), 100))
        return kept

    def _custom(self, error: BaseException, plan: _Plan) -> tuple[Any, ...] | None:
        """Return what the class's own reduction gives, tried out first, or None where it does not work."""
        cls: Any = plan.cls
        try:
            if type(error) is not cls:
                error = _twin(error, plan, cls)  # it must not see the raised class
            reducer = _registered(cls)
            reduced = cls.__reduce_ex__(error, 4) if reducer is None else reducer(error)
            function, args, state, *rest = (*reduced, None)[: max(3, len(reduced))]
            if any(part is not None for part in rest):
                return None
            trial = function(*args)  # to pickle well and then fail to unpickle is what is common here
            if type(trial) is not cls:
                return None
            if state is not None:
                trial.__setstate__(state)
            reduced = (function, self._wrap(args), self._wrap(state))
            return reduced if self._fits is None or self._fits(reduced) else None
        except BaseException:
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
    except BaseException:  # a metaclass that forbids hashing
        return None


def _is_small(value: object) -> bool:
    return type(value) in _ATOMS and (not isinstance(value, str | bytes) or len(value) <= _MAX_MESSAGE)


def reduce(error: BaseException) -> tuple[Any, ...]:
    """Return how to pickle an exception that is a value: for a pickler's ``reducer_override``.

    Other exceptions that it refers to are left to the same pickler. May raise what the user's class raises.
    """
    return _Packer(nested=False).travel(error).reduced


# -- packing ---------------------------------------------------------------------------------------------


def dump(
    error: BaseException,
    *,
    worker: str,
    dumps: Callable[[object], bytes],
    limit: int = MAX_PICKLE,
    executed: bool = True,
) -> bytes:
    """Pack an exception for the caller; never raises, and may be called on any thread.

    Args:
        worker: the name of this worker, for the traceback's text.
        dumps: pickles an object; it may raise.
        limit: the most bytes of pickled exception; what makes it larger is left behind, and a note says so.
        executed: False where the called function was certainly not started.
    """
    try:
        return _dump(error, worker, dumps, limit, executed)
    except BaseException:  # whatever a user's class did: the caller must still get an answer
        name, message = _type_name(type(error)), _say(error)
        text = f"On worker {worker}:\n{_shown(name)}: {message}\n"
        return _pack(name, message, text, worker, executed, None, None, None, [])


def _dump(
    error: BaseException, worker: str, dumps: Any, limit: int, executed: bool, *, inside: bool = False
) -> bytes:
    message, text = _say(error), ""
    if not inside or not _plan(_class_of(error)).group:  # a group's text has that of the groups inside
        text = _format(error, message, worker, _remote_of)
        text = _cut(text, _MAX_MEMBER_TEXT if inside else MAX_TEXT)
    name, origin, subject = _type_name(type(error)), worker, cast(BaseException | None, error)
    remote = _remote_of(error)
    if remote is not None:  # it came from another worker and goes on: the original, once
        name, origin = remote.type_name, remote.worker or worker
        if type(error) is RemoteError:
            subject, message = remote.cause, message.removeprefix(f"{_shown(name)}: ")
    notes = _notes(error)
    whole = lean = members = None
    if subject is not None:
        try:
            whole, lean, members = _pickle(subject, worker, dumps, limit, notes)
        except BaseException:
            pass
    return _pack(name, message, text, origin, executed, whole, lean, members, notes)


def _pickle(
    error: BaseException, worker: str, dumps: Callable[[object], bytes], limit: int, notes: list[str]
) -> tuple[bytes | None, bytes | None, list[bytes] | None]:
    plan = _plan(_class_of(error))
    members = None
    if plan.group:  # each member on its own: one that cannot be rebuilt costs nothing but itself
        inside = _MEMBERS.__get__(error)
        share = max(limit // len(inside), _MAX_MEMBER_TEXT)
        members = [_dump(member, worker, dumps, share, True, inside=True) for member in inside]

    def attempt(packer: _Packer, *, obey: bool = True) -> bytes | None:
        try:
            if plan.group:
                data = dumps((plan.cls, _MESSAGE.__get__(error), packer.state(error, plan)))
            else:
                data = dumps(packer.travel(error, obey=obey))
            return bytes(data) if len(data) <= limit else None
        except BaseException:
            return None

    def fits(value: object) -> bool:
        try:  # an exception was taken apart just as carefully
            return type(value) is _Travel or len(dumps(value)) <= limit // 4
        except BaseException:
            return False

    whole = attempt(_Packer())
    if whole is None:
        packer = _Packer(fits)
        whole = attempt(packer)
        if packer.dropped:
            left = _cut(", ".join(dict.fromkeys(packer.dropped)), 1000)
            notes.append(f"left behind on worker {worker}, as it cannot be sent: {left}")
    args, fields, attributes = _take(error, plan)
    values = (*(args or ()), *fields.values(), *attributes.values())
    if whole is not None and not plan.custom and all(type(value) in _ATOMS for value in values):
        return whole, None, members
    # Something in it may be unknown to the caller, who then still has the class and the plain values.
    return whole, attempt(_Packer(_is_small, nested=False), obey=False), members


def _pack(*parts: object) -> bytes:
    # surrogatepass: names of files that are not UTF-8 have lone surrogates in them
    return cast(bytes, msgpack.packb(parts, unicode_errors="surrogatepass"))


# -- raising it again ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Remote:
    cause: BaseException | None
    type_name: str
    traceback: str
    worker: str | None
    maybe_executed: bool = True


class _Field:
    """An attribute read from the record of where the exception came from.

    It has no ``__set__``, so what the user's exception keeps under the same name is what is read.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, error: BaseException | None, owner: object) -> Any:
        remote = None if error is None else _remote_of(error)
        return RemoteError.__dict__.get(self._name) if remote is None else getattr(remote, self._name)


class _Raised(RemoteError):
    """What a raised class has from RemoteError; behind the user's class, whose own attributes win."""

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
        _restore(made, copy.deepcopy(_take(self, _plan(type(made))), memo))
        return made


class _Shim:
    """Comes before the user's class: what a raised class must not inherit from it."""

    __slots__ = ()

    def __init_subclass__(cls, **_: object) -> None:
        """Keep the user's own from running: its register of subclasses must not list a raised class."""

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _itself, (_Packer().travel(cast(BaseException, self)),)


class _RpcShim(_Shim):
    """The same before an error of ours, which has its own idea of whether *its* call was executed.

    That idea is about a call that the called function made; it stays readable on ``.cause``.
    """

    __slots__ = ()

    @property
    def maybe_executed(self) -> bool:
        remote = _remote_of(cast(BaseException, self))
        return remote is None or remote.maybe_executed


def _itself(error: _V) -> _V:
    return error


def _raised_class(cls: type[BaseException]) -> type[BaseException] | None:
    """Return the class that is both this one and RemoteError, or None where there can be none."""
    known = _raised_classes.get(id(cls))
    if known is not None:
        return known[1]
    made: type[BaseException] | None = None
    # SystemExit and the like must not end the caller; an enum has its members and no other instances.
    if issubclass(cls, Exception) and not issubclass(cls, enum.Enum):
        shim = _RpcShim if issubclass(cls, RpcError) else _Shim
        bases = (shim, _Raised) if issubclass(_Raised, cls) else (shim, cls, _Raised)
        # Made without the metaclass's own __new__ and __init__, for the same reason as in _Shim.
        make: Any = abc.ABCMeta.__new__ if issubclass(type(cls), abc.ABCMeta) else type.__new__
        try:
            space = {
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
                "__slots__": ("_actorrpc_remote",),  # not in the user's __dict__
                "_actorrpc_original": cls,
            }
            made = make(type(cls), cls.__name__, bases, space)
        except BaseException:  # layouts that do not mix, a class that C made final, a metaclass's mro()
            pass
    return _remember(_raised_classes, id(cls), (cls, made))[1]


def _class_of(error: BaseException) -> type[BaseException]:
    return cast(type[BaseException], _names_of(type(error)).get("_actorrpc_original", type(error)))


def _remote_of(error: BaseException) -> _Remote | None:
    if type(error) is RemoteError:
        if "type_name" not in _dict_of(error):
            return None  # raised by hand
        return _Remote(error.cause, error.type_name, error.traceback, error.worker)
    slot = _names_of(type(error)).get("_actorrpc_remote")
    try:
        return cast(_Remote, slot.__get__(error)) if type(slot) is types.MemberDescriptorType else None
    except AttributeError:
        return None  # a copy that the user's class made of itself


def original(error: BaseException) -> BaseException:
    """Return ``error.cause``, whatever else the user's class calls so; where there is none, ``error``."""
    remote = _remote_of(error)
    return error if remote is None or remote.cause is None else remote.cause


def load(data: bytes | memoryview, *, loads: Callable[[bytes], object]) -> BaseException:
    """Return the exception to raise at the caller; never raises, and may be called on any thread.

    It is always an ``Exception`` and a ``RemoteError``. Where the original derives from ``Exception`` and the
    two classes mix, it is an instance of both. ``SystemExit``, ``KeyboardInterrupt``, ``GeneratorExit``,
    ``asyncio.CancelledError`` and their like do not reach the caller as themselves, as they would end or
    cancel it: they arrive as a plain ``RemoteError`` whose ``cause`` is the original.

    An error of ours that the called function ran into (the ``PeerDiedError`` of a nested call) is an instance
    of its class too. Its ``maybe_executed`` speaks of the caller's call, which did run; its other
    fields (``worker``: who died) are the original's, and ``.cause`` has all of them as they were.
    """
    try:
        name, message, text, worker, executed, *contents = _unpack(data)
        cause, notes = _rebuild(loads, *contents)
        remote = _Remote(cause, name, text, worker, executed)
        if cause is None:
            return _plain(remote, message, notes)
        raised = _combine(cause, remote)
        return _plain(remote, message, []) if raised is None else raised
    except BaseException as failure:
        return _plain(_Remote(None, "", "", None), f"an exception that cannot be read: {_line(failure)}", [])


def _unpack(data: bytes | memoryview) -> tuple[Any, ...]:
    name, message, text, worker, executed, *contents = msgpack.unpackb(data, unicode_errors="surrogatepass")
    return str(name), str(message), str(text), str(worker), bool(executed), *contents


def _rebuild(
    loads: Callable[[bytes], Any], whole: Any, lean: Any, members: Any, notes: list[str]
) -> tuple[BaseException | None, list[str]]:
    """Return the original, or None where it cannot be rebuilt, and its notes."""
    failed = ""
    for form in (whole, lean):
        if form is None:
            continue
        try:
            made = loads(form)
            if members is not None:
                cls, message, state = made
                made = _create(cls, (message, [_member(member, loads) for member in members]))
                _restore(made, state)
            if not issubclass(type(made), BaseException):
                raise TypeError(f"{_type_name(type(made))} is not an exception")
            if failed:
                notes = [*notes, f"only its plain values were rebuilt here: {failed}"]
            if notes:
                _dict_of(made)["__notes__"] = list(notes)
            return made, notes
        except BaseException as failure:
            failed = failed or _line(failure)
    return None, [*notes, f"it cannot be rebuilt here: {failed}"] if failed else notes


def _member(data: bytes, loads: Callable[[bytes], Any]) -> BaseException:
    name, message, text, worker, _, *contents = _unpack(data)
    made, notes = _rebuild(loads, *contents)
    return _plain(_Remote(None, name, text, worker), message, notes) if made is None else made


def _combine(cause: BaseException, remote: _Remote) -> BaseException | None:
    raised_class = _raised_class(type(cause))
    if raised_class is None:
        return None
    try:
        raised = cast(BaseException, _twin(cause, _plan(type(cause)), raised_class))
        raised_class.__dict__["_actorrpc_remote"].__set__(raised, remote)
        _CAUSE.__set__(raised, RemoteTraceback(remote.traceback))
        return raised
    except BaseException:  # the class's own __new__, where there is no other
        return None


def _plain(remote: _Remote, message: str, notes: list[str]) -> RemoteError:
    shown = _shown(remote.type_name)
    raised = RemoteError(f"{shown}: {message}" if shown and message else shown or message)
    raised.cause, raised.type_name = remote.cause, remote.type_name
    raised.traceback, raised.worker = remote.traceback, remote.worker
    if not remote.maybe_executed:
        raised.maybe_executed = False
    raised.__cause__ = RemoteTraceback(remote.traceback)
    for note in notes:
        raised.add_note(str(note))
    return raised


# -- text ------------------------------------------------------------------------------------------------


def _is_group(error: BaseException) -> bool:
    return issubclass(type(error), BaseExceptionGroup)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2 - 20
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def _say(value: object, how: Callable[[object], str] = str) -> str:
    """Return ``str`` or ``repr`` of a user's object, whatever it does, and not too much of it."""
    try:
        text = how(value)
        return _cut(text if type(text) is str else str.__str__(text), _MAX_MESSAGE)
    except BaseException:
        return f"<{_type_name(type(value))} whose {how.__name__}() failed>"


def _type_name(cls: type) -> str:
    cls = _names_of(cls).get("_actorrpc_original", cls)
    try:
        return f"{cls.__module__}.{cls.__qualname__}"
    except BaseException:
        return str(type.__dict__["__name__"].__get__(cls))


def _shown(name: str) -> str:
    return name.removeprefix("builtins.").removeprefix("__main__.")


def _line(error: BaseException) -> str:
    return _cut(f"{_shown(_type_name(type(error)))}: {_say(error)}", 1000)


def _notes(error: BaseException) -> list[str]:
    notes: Any = _dict_of(error).get("__notes__")
    if type(notes) not in (list, tuple):
        return [] if notes is None else [_say(notes, repr)]
    return [_say(note) for note in notes[:_MAX_NOTES]]


def _format(
    error: BaseException, message: str, worker: str, remote_of: Callable[[BaseException], Any]
) -> str:
    """Format an exception and its chain as Python does, each worker's part under its heading.

    Written anew because the standard one takes longer than all the rest of a failing call.
    """
    heading = f"On worker {worker}:\n"
    because = "\nThe above exception was the direct cause of the following exception:\n\n"
    blocks: list[str] = []  # the last first
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None:
        seen.add(id(link))
        block = _format_one(link, message if link is error else _say(link))
        cause: Any = _CAUSE.__get__(link)
        context, remote = _CONTEXT.__get__(link), remote_of(link)
        is_text = type(cause) is RemoteTraceback
        text = cause.text if is_text else None if remote is None else remote.traceback
        blocks += (block,) if text is None else (heading + block, because, text)  # has its own headings
        if cause is not None and not is_text:
            link, joint = cause, because
        elif cause is None and context is not None and not _SUPPRESS.__get__(link):
            link, joint = context, "\nDuring handling of the above exception, another exception occurred:\n\n"
        else:
            break
        if id(link) in seen:
            break
        blocks.append(joint)
        if len(seen) == _MAX_CHAIN:
            blocks.append("... earlier exceptions left out ...\n")
            break
    first = blocks.pop()
    return "".join([first if first.startswith("On worker ") else heading + first, *reversed(blocks)])


def _format_one(error: BaseException, message: str) -> str:
    if issubclass(type(error), SyntaxError) or (
        _is_group(error) and len(_MEMBERS.__get__(error)) < _MAX_MEMBERS
    ):
        try:
            formatter = tracebacks.TracebackException.from_exception(error, compact=True)
            return "".join(formatter.format(chain=False))
        except BaseException:
            pass
    shown = _shown(_type_name(type(error)))
    last = f"{shown}: {message}\n" if message else f"{shown}\n"
    return "".join([*_format_frames(_TRACEBACK.__get__(error)), last, *(f"{n}\n" for n in _notes(error))])


def _format_frames(tb: types.TracebackType | None) -> Iterator[str]:
    links: list[types.TracebackType] = []
    while tb is not None:
        links.append(tb)
        tb = tb.tb_next
    if links:
        yield "Traceback (most recent call last):\n"
    checked: set[str] = set()
    runs = itertools.groupby(links, lambda link: (id(link.tb_frame.f_code), link.tb_lineno))
    for shown, (_, run) in enumerate(runs):
        same = list(run)
        if shown == _MAX_FRAMES:
            yield "  ... frames left out ...\n"
        if shown < _MAX_FRAMES or same[0] is links[-1]:
            for link in same[:3]:
                yield _format_frame(link, checked)
            if len(same) > 3:
                yield f"  [Previous line repeated {len(same) - 3} more times]\n"


def _format_frame(link: types.TracebackType, checked: set[str]) -> str:
    code, number = link.tb_frame.f_code, link.tb_lineno
    text = f'  File "{code.co_filename}", line {number}, in {code.co_name}\n'
    try:
        if code.co_filename not in checked:
            checked.add(code.co_filename)
            linecache.checkcache(code.co_filename)
        source = linecache.getline(code.co_filename, number, link.tb_frame.f_globals).rstrip()
        stripped = source.lstrip()
        if not stripped:
            return text
        text += f"    {stripped}\n"
        index = link.tb_lasti // 2
        if index > _MAX_SCAN:
            return text  # found by counting, which takes as long as the function is
        _, end, *columns = next(itertools.islice(code.co_positions(), index, None))
        if end == number and None not in columns:
            start, stop = (len(source.encode()[:at].decode(errors="replace")) for at in columns)
            if 0 < stop - start < len(stripped):
                text += " " * (4 + start - (len(source) - len(stripped))) + "^" * (stop - start) + "\n"
    except Exception:  # a loader that cannot give its source
        pass
    return text
