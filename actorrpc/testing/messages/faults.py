"""Faults: which messages of this worker are lost or held up on their way out.

    with testing.drop("call", function="step", times=1) as lost:
        ...                                   # the first try of each call of step() is lost
    assert lost.count == 3

A fault is in force from :meth:`Fault.start` (or the beginning of its block) to :meth:`Fault.stop` (the end of it), or to
the end of the agent. Where several would take a message, the one that was started first has it.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from actorrpc.testing.messages.active import Injection, InjectionOptions
from actorrpc.testing.messages.types import Message, types_named
from actorrpc.validation import flag, integer, number, option

__all__ = ["Fault", "delay", "drop"]

_KEYS: Final = 10_000  # of so many messages that have been hit is it known how often


def _count(name: str, value: Any) -> Any:
    count = integer(name, value, least=-1, none=True, right="a number of messages, -1 or None (all)")
    return None if count == -1 else count


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions(InjectionOptions):
    """What may be said of faults: see :func:`drop` and :func:`delay`."""

    seconds: float = option(0.0, partial(number, unit="seconds"))
    at_once: bool = option(False, flag)
    times: int | None = option(None, _count)
    total: int | None = option(None, _count)
    probability: float = option(1.0, partial(number, most=1.0))
    seed: int = option(0, integer)
    when: Callable[[Message], bool] | None = None
    bounded: bool = True


class Fault(Injection):
    """One kind of fault of one worker, made by :func:`drop` or :func:`delay`. Thread-safe; counters stay after the end.

    Args:
        given: fields of :class:`FaultOptions`.

    Attributes:
        action: ``"drop"`` or ``"delay"``.
        types: the types of messages that it takes.
        seconds: how long it holds them up.
        at_once: the caller that waits for a message that it drops hears of it at once.
        bounded: calls that it holds up bring their deadlines along.
    """

    def __init__(self, action: Literal["drop", "delay"], types: Iterable[str], **given: Any) -> None:
        self.action = action
        self.types = types_named(types)
        self._options = options = FaultOptions(**given)
        super().__init__((action, *sorted(self.types)), given, options)
        self.seconds = options.seconds
        self.at_once = options.at_once
        self.bounded = options.bounded
        self._random = random.Random(options.seed)
        self._hits: OrderedDict[bytes, int] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._held = 0

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

    # -- for the fault_filter ------------------------------------------------------------------------------

    def takes(self, message: Message) -> bool:
        """Say whether it takes a message, and count it if so."""
        if message.type not in self.types:
            return False
        options = self._options
        if not options.mean(message) or (options.when is not None and not options.when(message)):
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
        super().ended()
        with self._lock:
            self._hits.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self.action, sorted(self.types), **self._given), ()


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
        at_once: the caller that waits hears of the loss at once, with RpcTimeoutError, instead of at the deadline.
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
