"""Faults: drop or delay messages that this worker sends.

    with testing.drop("call", function="step", times=1) as lost:
        ...                                   # the first attempt of each call of step() is lost
    assert lost.count == 3

A fault is in force from :meth:`Fault.start` (or the beginning of its block) to :meth:`Fault.stop` (the end of its block), or to
the end of the agent. If several faults select a message, the fault that was started first gets it.
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

_KEYS: Final = 10_000  # a fault remembers how often it has hit each of the last so many messages


def _count(name: str, value: Any) -> Any:
    count = integer(name, value, least=-1, none=True, right="a number of messages, -1 or None (all)")
    return None if count == -1 else count


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions(InjectionOptions):
    """Options of faults: see :func:`drop` and :func:`delay`."""

    seconds: float = option(0.0, partial(number, unit="seconds"))
    at_once: bool = option(False, flag)
    times: int | None = option(None, _count)
    total: int | None = option(None, _count)
    probability: float = option(1.0, partial(number, most=1.0))
    seed: int = option(0, integer)
    when: Callable[[Message], bool] | None = None
    bounded: bool = True


class Fault(Injection):
    """A fault of one worker, made by :func:`drop` or :func:`delay`. Thread-safe. Its counters can be read after its end.

    Args:
        given: fields of :class:`FaultOptions`.

    Attributes:
        action: ``"drop"`` or ``"delay"``.
        types: the types of messages that it selects.
        seconds: how long it delays messages.
        at_once: a call whose message is dropped fails at once, not at its deadline.
        bounded: a delayed call is sent with the time that it had left when it was made.
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

    # -- counters --------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many messages it has dropped or delayed."""
        with self._lock:
            return self._counts.total()

    @property
    def counts(self) -> Counter[str]:
        """How many messages it has dropped or delayed, by type (a copy)."""
        with self._lock:
            return Counter(self._counts)

    @property
    def held(self) -> int:
        """How many messages it delays now."""
        with self._lock:
            return self._held

    # -- for the fault_filter ------------------------------------------------------------------------------

    def takes(self, message: Message) -> bool:
        """Say whether it selects a message, and count the message if so."""
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
        """Count an attempt to send a message. False: the message passes, and the next equal message counts anew."""
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

    def ended(self) -> None:
        """Note that it has ended."""
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
    """Return a fault that drops messages of this worker.

    A call whose request or answer is dropped fails with RpcTimeoutError at its deadline; if it has no deadline, it fails at
    once, because nothing else would end it. Messages without an answer, those of RRefs and the notices of autograd, are sent
    again by their protocols, first after 1 s and then at growing intervals, and at once when the fault ends. A backward pass
    whose gradients are dropped fails at once.

    Args:
        types: names from :data:`MESSAGES`, or patterns (``"rref_*"``).
        times: drop only the first so many attempts of each message; -1 or None: all. A message with the same contents to the
            same worker counts as another attempt, until one has passed; after that, an equal message counts as a new message.
        total: drop at most so many messages in all; -1 or None: any number.
        to: only messages to these workers: a name, a pattern (``"trainer*"``), a rank or a WorkerInfo, or a list of them.
        function: only calls of these functions and their answers: the function, its name (with or without class or
            module), or a pattern, or a list of them. For an actor's method: ``"Class.method"`` or ``"method"``.
        probability: the probability with which each message is dropped; 1 drops all.
        seed: the seed of the random numbers for ``probability``.
        at_once: the call fails with RpcTimeoutError at once, instead of at its deadline.
        on: only on workers with this name or pattern, for faults that several workers start alike.

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
    their order, and calls of actors always keep their order to each worker. The contents are as they were at the moment of the
    call. A call that has timed out or was cancelled meanwhile is nevertheless sent, with the time that it had left when it was
    made, like a call that was late on the way.

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
