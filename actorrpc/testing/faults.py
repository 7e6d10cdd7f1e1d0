"""Faults: drop or delay messages that this worker sends.

    with testing.drop("call", function="step", times=1) as lost:
        ...                                   # the first attempt of each call of step() is lost
    assert lost.count == 3

A fault is in force from :meth:`Fault.start` (or the beginning of its block) to :meth:`Fault.stop` (the end of its block), or to
the end of the worker. Faults that the variable ``ACTORRPC_FAULT`` or :class:`FaultyRpcBackendOptions` give are in force from the
worker's start. If several faults select a message, the fault that was started first acts on it.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, Literal, Self

from actorrpc.agent.context import Worker, here, workers_here
from actorrpc.errors import ConfigError, WrongTypeError
from actorrpc.rpc.options import TensorPipeRpcBackendOptions
from actorrpc.testing.message_types import Message, names_of, types_named
from actorrpc.validation import check_fields, flag, integer, number, option, read, text
from actorrpc.wire.identity import WorkerInfo

__all__ = [
    "VARIABLE",
    "Fault",
    "FaultOptions",
    "FaultyRpcBackendOptions",
    "Filter",
    "apply_to",
    "delay",
    "drop",
    "faults_of",
    "from_environment",
]

VARIABLE: Final = "ACTORRPC_FAULT"
_KEYS: Final = 10_000  # the most messages whose attempts a fault counts; beyond, it forgets the oldest


def _count(name: str, value: Any) -> Any:
    count = integer(name, value, least=-1, none=True, right="a number of messages, -1 or None (all)")
    return None if count == -1 else count


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple, set, frozenset)) else [given]


def _workers(_name: str, given: Any) -> list[str] | None:
    """Check the names, patterns and ranks of workers; return them as strings."""
    if given is None:
        return None
    found = []
    for each in _several(given):
        name = each.name if isinstance(each, WorkerInfo) else each
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            raise WrongTypeError(f"a worker is named by a str, an int rank or a WorkerInfo, not by {each!r}")
        found.append(str(name))
    return found


def _functions(_name: str, given: Any) -> list[str] | None:
    """Check the names and patterns of functions, and functions themselves; return them as patterns."""
    if given is None:
        return None
    found = []
    for each in _several(given):
        names = names_of(each)
        if not names:
            raise WrongTypeError(f"a function is named by itself or by a str, not by {each!r}")
        # A call of an actor contains only the method's name, so a function is also matched by its name without its module.
        found += [each] if isinstance(each, str) else [names[-1], f":{names[0]}"]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions:
    """Options of faults: see :func:`drop` and :func:`delay`."""

    to: Any = option(None, _workers)
    function: Any = option(None, _functions)
    on: str | None = option(None, partial(text, none=True, right="the name of a worker, or a pattern"))
    seconds: float = option(0.0, partial(number, unit="seconds"))
    at_once: bool = option(False, flag)
    times: int | None = option(None, _count)
    total: int | None = option(None, _count)
    probability: float = option(1.0, partial(number, most=1.0))
    seed: int = option(0, integer)
    when: Callable[[Message], bool] | None = None
    bounded: bool = True

    def __post_init__(self) -> None:
        check_fields(self)

    def select(self, message: Message) -> bool:
        """Return whether ``to``, ``function`` and ``when`` select this message."""
        peer = message.peer
        if self.to is not None and not any(
            worker == str(peer.record.rank) or fnmatchcase(peer.name, worker) for worker in self.to
        ):
            return False
        if self.function is not None and not any(
            fnmatchcase(name, pattern) for pattern in self.function for name in names_of(message.called)
        ):
            return False
        return self.when is None or self.when(message)


class Fault:
    """A fault of one worker, made by :func:`drop` or :func:`delay`. Thread-safe.

    The counters can be read after the fault has ended, and the fault can be started again. It can be pickled, without its
    counters, to be sent to a new process.

    Args:
        given: fields of :class:`FaultOptions`.

    Attributes:
        action: ``"drop"`` or ``"delay"``.
        types: the types of messages that the fault selects.
        seconds: how long the fault delays messages.
        at_once: whether a call whose message is dropped fails at once, not at its deadline.
        bounded: whether a delayed call is sent with the time-out that it had left when it was made; otherwise, without.
    """

    def __init__(self, action: Literal["drop", "delay"], types: Iterable[str], **given: Any) -> None:
        self.action = action
        self.types = types_named(types)
        self._options = options = FaultOptions(**given)
        default = {each.name: each.default for each in fields(options)}
        self._given = {name: value for name, value in given.items() if value != default[name]}
        self.seconds = options.seconds
        self.at_once = options.at_once
        self.bounded = options.bounded
        # Guards the attributes below; a leaf.
        self._lock = threading.Lock()
        self._random = random.Random(options.seed)
        self._hits: OrderedDict[bytes, int] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._held = 0

    def start(self) -> Self:
        """Bring the fault into force on this worker. Before ``init_rpc``, it takes effect when the worker has joined.

        Raises:
            RuntimeError: the fault is in force already, or this process runs an in-process cluster.
        """
        if here.worker is None and workers_here():
            raise RuntimeError(
                f"{self!r} needs a worker with its own process: this one is an InProcessCluster, which has cut(), reset(), "
                "stop() and kill() of its own"
            )
        with _lock:
            if self in _in_force:
                raise RuntimeError(f"{self!r} has been started already")
            with self._lock:
                self._hits.clear()
            _enforce(_filter, (*_in_force, self))
        return self

    def stop(self) -> None:
        """End the fault. Its delayed messages are sent now, in order. Idempotent."""
        with _lock:
            _enforce(_filter, tuple(each for each in _in_force if each is not self))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def active(self) -> bool:
        """Whether the fault was started, and has ended neither by :meth:`stop` nor with its worker."""
        return self in _in_force

    # -- counters --------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many messages the fault has dropped or delayed."""
        with self._lock:
            return self._counts.total()

    @property
    def counts(self) -> Counter[str]:
        """How many messages the fault has dropped or delayed, by type (a copy)."""
        with self._lock:
            return Counter(self._counts)

    @property
    def held(self) -> int:
        """How many messages the fault delays now."""
        with self._lock:
            return self._held

    # -- for the FaultFilter -------------------------------------------------------------------------------

    def is_for(self, worker: str) -> bool:
        """Return whether the fault applies to the worker of this name."""
        return self._options.on is None or fnmatchcase(worker, self._options.on)

    def takes(self, message: Message) -> bool:
        """Return whether the fault selects a message, and count the message if so."""
        options = self._options
        if message.type not in self.types or not options.select(message):
            return False
        key = b"" if options.times is None else message.key()
        with self._lock:
            if options.total is not None and self._counts.total() >= options.total:
                return False
            if options.probability < 1.0 and self._random.random() >= options.probability:
                return False
            if options.times is not None and not self._again(key, options.times):
                return False
            self._counts[message.type] += 1
            return True

    def _again(self, key: bytes, times: int) -> bool:
        """Count an attempt to send a message; return whether the fault acts on it. If not, an equal message counts anew."""
        tries = self._hits.pop(key, 0) + 1
        if tries > times:
            return False
        self._hits[key] = tries
        if len(self._hits) > _KEYS:
            self._hits.popitem(last=False)
        return True

    def hold(self, change: int) -> None:
        """Change the number of delayed messages by 1 or -1."""
        with self._lock:
            self._held += change

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self.action, sorted(self.types), **self._given), ()

    def __repr__(self) -> str:
        given = [f"{key}={value!r}" for key, value in self._given.items()]
        return f"{self.action}({', '.join([*map(repr, sorted(self.types)), *given])})"


#: :meth:`FaultFilter.apply` of an agent: it applies these faults from now on; faults that are not in the sequence have ended.
Filter = Callable[[Sequence[Fault]], None]

# Guards ``_filter`` and ``_in_force``. The filter's lock is taken while this lock is held.
_lock = threading.Lock()
_filter: Filter | None = None  # of this process's agent
_in_force: tuple[
    Fault, ...
] = ()  # started faults that have not ended, in order; without a filter, they wait for a worker


def apply_to(filter: Filter | None) -> None:
    """Set the filter that applies the faults of this process. None: the worker has ended, and all faults end with it."""
    with _lock:
        _enforce(filter, _in_force if filter is not None else ())


def _enforce(filter: Filter | None, faults: tuple[Fault, ...]) -> None:
    """Change the filter and the faults in force, under the lock."""
    global _filter, _in_force
    _filter, _in_force = filter, faults
    if filter is not None:
        filter(faults)


def _after_fork() -> None:
    """Discard the parent's faults in a forked child, and the parent's lock, which another thread may have held."""
    global _filter, _in_force, _lock
    _lock, _filter, _in_force = threading.Lock(), None, ()


os.register_at_fork(after_in_child=_after_fork)


def drop(
    *types: str,
    times: int | None = None,
    total: int | None = None,
    to: Any = None,
    function: Any = None,
    probability: float = 1.0,
    seed: int = 0,
    at_once: bool = False,
    on: str | None = None,
) -> Fault:
    """Return a fault that drops messages of this worker.

    A call whose request or answer is dropped fails with RpcTimeoutError at its deadline; if it has no deadline, it fails at
    once, because nothing else would end it. Messages without an answer, which are the notices of RRefs and of autograd, are sent
    again by their protocols, first after 1 s and then at growing intervals, and at once when the fault ends. A backward pass
    whose gradients are dropped fails at once.

    Args:
        types: names from :data:`MESSAGES`, or patterns (``"rref_*"``).
        times: drop only the first so many attempts to send each message; -1 or None: all. A message with equal contents to the
            same worker counts as another attempt, until one attempt has passed; then an equal message counts as a new message.
        total: drop at most so many messages in all; -1 or None: any number.
        to: only messages to these workers: a name, a pattern (``"trainer*"``), a rank or a WorkerInfo, or a list of them.
        function: only calls of these functions and their answers: the function, its name (with or without class or
            module), or a pattern, or a list of them. For an actor's method: ``"Class.method"`` or ``"method"``.
        probability: the probability with which each message is dropped; 1 drops all.
        seed: the seed of the random numbers for ``probability``.
        at_once: the call fails with RpcTimeoutError at once, instead of at its deadline.
        on: only on workers with this name or pattern; for a fault that the programs of several workers start.

    Raises:
        ConfigError: an argument cannot be used; for an unknown type, the message lists all types.
    """
    return Fault(
        "drop",
        types,
        times=times,
        total=total,
        to=to,
        function=function,
        probability=probability,
        seed=seed,
        at_once=at_once,
        on=on,
    )


def delay(
    *types: str,
    seconds: float,
    times: int | None = None,
    total: int | None = None,
    to: Any = None,
    function: Any = None,
    probability: float = 1.0,
    seed: int = 0,
    on: str | None = None,
) -> Fault:
    """Return a fault that holds messages of this worker back before they are sent.

    The sending thread continues at once. Other messages overtake a delayed message. Messages that are delayed equally long keep
    their order, and calls of actors always keep their order to each worker. A delayed message has the contents that it
    had when it was made. A call that has timed out or was cancelled meanwhile is nevertheless sent, with the time that it had
    left when it was made, as if the network had delayed it.

    Args:
        seconds: how long each message is delayed.

    For the other arguments and the exceptions, see :func:`drop`.
    """
    return Fault(
        "delay",
        types,
        seconds=seconds,
        times=times,
        total=total,
        to=to,
        function=function,
        probability=probability,
        seed=seed,
        on=on,
    )


# -- from a worker's start -------------------------------------------------------------------------------


class FaultyRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Options for ``init_rpc`` with faults that are in force from the first message to the end of the worker.

    Args:
        faults: faults made by :func:`drop` and :func:`delay`, not started.

    For the other keywords, see :class:`~actorrpc.TensorPipeRpcBackendOptions`.

    Raises:
        ConfigError: a value cannot be used.
    """

    def __init__(self, *, faults: Sequence[Fault] = (), **given: Any) -> None:
        super().__init__(**given)
        if not all(isinstance(fault, Fault) for fault in faults):
            raise WrongTypeError(f"faults are made with drop() and delay(), not {faults!r}")
        self.faults = tuple(faults)

    def ready(self, worker: Worker) -> None:
        """Start the faults."""
        for fault in self.faults:
            fault.start()


def faults_of(text: str) -> list[Fault]:
    """Return the faults that a text describes, not started.

    Example: ``drop call,remote times=2 to=worker1; delay answer seconds=0.5 function=step``. ``;`` separates faults. A fault
    consists of the action, the types, and the arguments of :func:`~actorrpc.testing.drop` or
    :func:`~actorrpc.testing.delay`; commas separate the items of a list.

    Raises:
        ConfigError: the text cannot be parsed; the message names the part.
    """
    return [_fault(part.split(), part.strip()) for part in text.split(";") if part.strip()]


def _fault(words: list[str], part: str) -> Fault:
    try:
        action, types, *arguments = words
    except ValueError:
        raise ConfigError(f"{part!r} is no fault: say drop or delay, then types of messages") from None
    if action not in ("drop", "delay"):
        raise ConfigError(f"{part!r} is no fault: it begins with drop or delay, not with {action!r}")
    known = {each.name: str(each.type) for each in fields(FaultOptions) if each.metadata}
    given: dict[str, Any] = {}
    for field in arguments:
        name, sign, value = field.partition("=")
        if name not in known or not sign or (name == "at_once" and action == "delay"):
            raise ConfigError(
                f"{field!r} in {part!r} is not an argument; the arguments are: {', '.join(known)}"
            )
        try:
            given[name] = read(known[name], value)
        except ValueError:
            raise ConfigError(f"{field!r} in {part!r} has a value that cannot be used") from None
    if ("seconds" in given) != (action == "delay"):
        raise ConfigError(f"{part!r} is no fault: a delay has seconds=, and a drop has none")
    return Fault("drop" if action == "drop" else "delay", types.split(","), **given)


def from_environment() -> list[Fault]:
    """Return the faults that ``ACTORRPC_FAULT`` describes.

    Raises:
        ConfigError: the variable cannot be parsed.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        return faults_of(text)
    except ConfigError as error:
        raise ConfigError(f"{VARIABLE}={text!r} cannot be used: {error}") from error
