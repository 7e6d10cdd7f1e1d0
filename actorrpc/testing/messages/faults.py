"""Faults: which messages of this worker are lost or held up on their way out.

    with testing.drop("call", function="step", times=1) as lost:
        ...                                   # the first try of each call of step() is lost
    assert lost.count == 3

A fault is in force from :meth:`Fault.start` (or the beginning of its block) to :meth:`Fault.stop` (the end of it), or to
the end of the agent. Where several would take a message, the one that was started first has it.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from actorrpc.errors import ConfigError, WrongTypeError
from actorrpc.testing.messages import active as active_module
from actorrpc.testing.messages.active import functions_named, is_meant, number, workers_named
from actorrpc.testing.messages.types import ANSWER, CONTROL, Message, names_of, types_named

__all__ = ["Fault", "delay", "drop"]

_KEYS: Final = 10_000  # of so many messages that have been hit is it known how often


class Fault:
    """One kind of fault of one worker, made by :func:`drop` or :func:`delay`. Thread-safe.

    Counters stay after the end. It can be started again; and it can be pickled, without its counters, to be given to a
    process that is started.

    Attributes:
        action: ``"drop"`` or ``"delay"``.
        types: the types of messages that it takes.
        seconds: how long it holds them up.
        at_once: who waits for a message that it drops hears of it at once.
        bounded: calls that it holds up bring their deadlines along.
    """

    def __init__(
        self,
        action: Literal["drop", "delay"],
        types: Iterable[str],
        *,
        seconds: float = 0.0,
        at_once: bool = False,
        times: int | None = None,
        total: int | None = None,
        to: Any = None,
        function: Any = None,
        probability: float = 1.0,
        seed: int = 0,
        on: str | None = None,
        when: Callable[[Message], bool] | None = None,
        bounded: bool = True,
    ) -> None:
        self.action = action
        self.types = types_named(types)
        self.seconds = number("seconds", seconds)
        self.at_once = at_once
        self.bounded = bounded
        self._times = _count("times", times)
        self._total = _count("total", total)
        self._to = None if to is None else workers_named(to)
        self._function = None if function is None else functions_named(function)
        self._probability = number("probability", probability, 1.0)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise WrongTypeError(f"seed must be an int, not {seed!r}")
        if on is not None and not isinstance(on, str):
            raise WrongTypeError(f"on is the name of a worker, or a pattern, not {on!r}")
        self._on = on
        self._when = when
        self._given = {
            "seconds": seconds,
            "at_once": at_once,
            "times": times,
            "total": total,
            "to": to,
            "function": function,
            "probability": probability,
            "seed": seed,
            "on": on,
            "when": when,
            "bounded": bounded,
        }
        # Guards all below; a leaf.
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._hits: OrderedDict[bytes, int] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._held = 0
        self._started = False

    # -- its life ----------------------------------------------------------------------------------

    def start(self) -> Fault:
        """Bring it into force on this worker; before ``init_rpc``, it is in force as soon as the worker has joined.

        Raises:
            RuntimeError: it is in force already.
        """
        with self._lock:
            if self._started:
                raise RuntimeError(f"{self!r} has been started already")
            self._started = True
        active_module.enforce(self)
        return self

    def stop(self) -> None:
        """Take it out of force. Messages that it holds up leave now, in order. Idempotent."""
        active_module.lift(self)
        self.ended()

    def __enter__(self) -> Fault:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def active(self) -> bool:
        """Whether it has been started, and neither stopped nor ended with its agent."""
        return self._started

    # -- what it has done --------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many messages it has dropped or held up."""
        with self._lock:
            return self._counts.total()

    @property
    def counts(self) -> Counter[str]:
        """How many messages it has dropped or held up, by type (a copy)."""
        with self._lock:
            return Counter(self._counts)

    @property
    def held(self) -> int:
        """How many messages it holds up at present."""
        with self._lock:
            return self._held

    # -- for the gate ------------------------------------------------------------------------------

    @property
    def takes_answers(self) -> bool:
        """Whether it has to know which question an answer is the answer of."""
        return ANSWER in self.types or CONTROL in self.types

    def is_for(self, worker: str) -> bool:
        """Say whether it has any effect on this worker."""
        return self._on is None or fnmatchcase(worker, self._on)

    def takes(self, message: Message) -> bool:
        """Say whether it takes a message, and count it if so."""
        if message.type not in self.types:
            return False
        if self._to is not None and not is_meant(message, self._to):
            return False
        if self._function is not None:
            names = names_of(message.called)
            if not any(fnmatchcase(name, pattern) for pattern in self._function for name in names):
                return False
        if self._when is not None and not self._when(message):
            return False
        key = b"" if self._times is None else message.key()
        with self._lock:
            if self._total is not None and self._counts.total() >= self._total:
                return False
            if self._probability < 1.0 and self._random.random() >= self._probability:
                return False
            if self._times is not None and not self._again(key, self._times):
                return False
            self._counts[message.type] += 1
            return True

    def _again(self, key: bytes, times: int) -> bool:
        """Count a try of a message; False if it is to get through: then the next one like it is another message."""
        tries = self._hits.pop(key, 0) + 1
        if tries > times:
            return False
        self._hits[key] = tries
        if len(self._hits) > _KEYS:
            self._hits.popitem(last=False)
        return True

    def hold(self, change: int) -> None:
        """Count messages that it begins (1) or ceases (-1) to hold up."""
        with self._lock:
            self._held += change

    def ended(self) -> None:
        """Note that it is in force no more."""
        with self._lock:
            self._started = False
            self._hits.clear()

    # -- Python ------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.action, sorted(self.types), self._given)

    def __repr__(self) -> str:
        default = {"seconds": 0.0, "at_once": False, "probability": 1.0, "seed": 0, "bounded": True}
        given = [f"{name}={value!r}" for name, value in self._given.items() if value != default.get(name)]
        types = [repr(name) for name in sorted(self.types)]
        return f"{self.action}({', '.join(types + given)})"


def _rebuild(action: Literal["drop", "delay"], types: list[str], given: dict[str, Any]) -> Fault:
    return Fault(action, types, **given)


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
    """Return a fault that loses messages of this worker.

    A call whose request or answer is lost ends at its deadline, with RpcTimeoutError, as one that is lost on the way; without
    a deadline it ends so at once, as nothing else would end it. Messages without an answer, those of RRefs and the notices
    of autograd, are sent again by their protocols, after 1 s and longer and longer times; and at once when the fault
    ends. The gradients of a backward pass are missed at once: it fails.

    Args:
        types: names from :data:`MESSAGES`, or patterns (``"rref_*"``).
        times: only the first so many tries of each message; -1 or None: all of them. A message that is sent again is one to
            the same worker with the same contents; once it has got through, the next one like it is another one.
        total: at most so many messages in all; -1 or None: any number.
        to: only messages to these workers: a name, a pattern (``"trainer*"``), a rank or a WorkerInfo, or several.
        function: only calls of these functions, and answers of them: the function, its name (with or without class or
            module), or a pattern, or several. Of an actor's method: ``"Class.method"`` or ``"method"``.
        probability: how likely a message is to be taken, in the order in which they come; 1 takes all.
        seed: of the random numbers for that.
        at_once: who waits hears of the loss at once, with RpcTimeoutError, instead of at the deadline.
        on: only on workers of this name, or pattern: for faults that several workers are given alike.

    Raises:
        ConfigError: an argument cannot be used; for a type that there is not, it lists those that there are.
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
    """Return a fault that holds messages of this worker up, before they leave.

    The thread that sends goes on at once. Messages that are not held up overtake those that are; those that are held up for
    equally long keep their order, and calls of actors keep theirs to each worker in any case. What is sent is what it was
    when the call was made. A call that has timed out or was cancelled meanwhile is sent all the same, with the time that it
    had left when it was made, as one that was late on the way.

    Args:
        seconds: how long each message is held up.

    The other arguments, and what is raised, are those of :func:`drop`.
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


# -- arguments ---------------------------------------------------------------------------------------


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongTypeError(f"{name} must be an int or None, not {value!r}")
    if value < -1:
        raise ConfigError(f"{name} must be a number of messages, or -1 for all, not {value!r}")
    return None if value == -1 else value
