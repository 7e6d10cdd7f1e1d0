"""Disturbances: how a :class:`FaultProxy` disturbs the bytes that pass it, and at which position in each stream.

A connection has two streams: ``"to"`` the worker behind the proxy, and ``"from"`` it. A position is counted in bytes from the
stream's beginning (or from where the stream was when the disturbance was added). It is drawn from random numbers that depend
only on the seed, the connection's number, the direction and the disturbance: the same seed disturbs the same bytes, however
the kernel splits the stream.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from actorrpc.errors import WrongTypeError
from actorrpc.validation import check_fields, choice, integer, number, option, wrong

__all__ = ["Disturbance", "bit_flips", "cut", "half_close", "latency", "reset", "stall", "throttle"]

Action = Literal["latency", "throttle", "bit_flips", "stall", "half_close", "reset", "cut"]
STRIKING: Final = frozenset({"stall", "half_close", "reset", "cut"})


def _after(name: str, value: Any) -> tuple[int, int]:
    low, high = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
    right = "a number of bytes from 0, or the least and the most"
    for each, least in ((low, 0), (high, low)):
        integer(f"{name}={value!r}", each, least=least, right=right)
    return low, high


def _connections(name: str, value: Any) -> frozenset[int] | None:
    if value is None:
        return None
    try:
        return frozenset(integer(name, each) for each in value)
    except TypeError:
        raise wrong(name, value, "numbers, from 0, or None", WrongTypeError) from None


_number = partial(number, unit="seconds")
_share = partial(number, most=1.0)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One way in which a proxy disturbs streams; made by the functions of this module. Immutable.

    Attributes:
        action: the kind of disturbance.
        seconds, jitter: of a latency; ``seconds`` also of a stall (infinite: it never ends).
        rate: of a throttle, in bytes per second.
        every: of bit flips: one bit in so many bytes on average.
        after: the least and the greatest number of bytes that pass before it strikes.
        part: when it strikes, this fraction of the next read still passes.
        direction: the streams that it applies to.
        connections: the numbers of the connections that it applies to, from 0; None: all.
        probability: the probability that it applies to a stream.
        times: the greatest number of streams that it strikes; None: all.
    """

    action: Action
    seconds: float = option(0.0, partial(_number, most=math.inf))
    jitter: float = option(0.0, _number)
    rate: float = 0.0
    every: int = 0
    after: tuple[int, int] = option((0, 0), _after)
    part: float = option(0.0, _share)
    direction: str = option("both", partial(choice, of=("to", "from", "both")))
    connections: frozenset[int] | None = option(None, _connections)
    probability: float = option(1.0, _share)
    times: int | None = option(None, partial(integer, least=0, none=True))

    def __post_init__(self) -> None:
        check_fields(self)

    def concerns(self, connection: int, direction: str, rng: random.Random) -> bool:
        """Say whether it applies to a stream; draws one number."""
        lucky = rng.random() < self.probability
        here = self.direction in ("both", direction)
        return lucky and here and (self.connections is None or connection in self.connections)

    def draw(self, rng: random.Random) -> int:
        """Return the number of bytes of a stream after which it strikes."""
        return rng.randint(*self.after)


def _made(
    action: Action, direction: Any, connections: Any, probability: Any, times: Any = None, **given: Any
) -> Disturbance:
    which = {"direction": direction, "connections": connections, "probability": probability, "times": times}
    return Disturbance(action, **which, **given)


def latency(
    seconds: float,
    *,
    jitter: float = 0.0,
    direction: str = "both",
    connections: Collection[int] | None = None,
    probability: float = 1.0,
) -> Disturbance:
    """Deliver all bytes ``seconds`` later, plus up to ``jitter`` seconds. Their order is kept.

    Args:
        direction: ``"to"`` the worker behind the proxy, ``"from"`` it, or ``"both"``.
        connections: the numbers of the connections that it applies to, in the order in which they are made, from 0; None: all.
        probability: the probability that it applies to a stream.

    Raises:
        ConfigError: an argument cannot be used.
    """
    seconds = _number("seconds", seconds)
    return _made("latency", direction, connections, probability, seconds=seconds, jitter=jitter)


def throttle(
    rate: float,
    *,
    direction: str = "both",
    connections: Collection[int] | None = None,
    probability: float = 1.0,
) -> Disturbance:
    """Pass at most ``rate`` bytes per second in each stream. For the other arguments, see :func:`latency`."""
    rate = number(
        "rate", rate, above=True, right="more than 0 bytes per second; to let nothing pass, use stall()"
    )
    return _made("throttle", direction, connections, probability, rate=rate)


def bit_flips(
    every: int,
    *,
    direction: str = "both",
    connections: Collection[int] | None = None,
    probability: float = 1.0,
    after: int | tuple[int, int] = 0,
) -> Disturbance:
    """Flip one bit in ``every`` bytes on average, after the first ``after`` bytes. The other arguments: :func:`latency`."""
    every = integer("every", every, least=1)
    return _made("bit_flips", direction, connections, probability, every=every, after=after)


def stall(
    seconds: float = math.inf,
    *,
    after: int | tuple[int, int] = 0,
    part: float = 0.0,
    direction: str = "both",
    connections: Collection[int] | None = None,
    probability: float = 1.0,
    times: int | None = None,
) -> Disturbance:
    """Hold back all bytes for ``seconds``, after the first ``after`` bytes. Nothing is closed or lost.

    Args:
        after: a number of bytes, or the least and the greatest: then a number is drawn for each stream.
        part: this fraction (0 to 1) of the proxy's next read still passes: with 0.5 and small messages, it strikes in the
            middle of a frame.
        times: the greatest number of streams that it strikes; None: all.

    For the other arguments, see :func:`latency`.
    """
    return _made("stall", direction, connections, probability, times, after=after, part=part, seconds=seconds)


def half_close(
    *,
    after: int | tuple[int, int] = 0,
    part: float = 0.0,
    direction: str = "both",
    connections: Collection[int] | None = None,
    probability: float = 1.0,
    times: int | None = None,
) -> Disturbance:
    """End one stream of a connection, and keep the other: later bytes of the stream are lost. Arguments: :func:`stall`."""
    return _made("half_close", direction, connections, probability, times, after=after, part=part)


def reset(
    *,
    after: int | tuple[int, int] = 0,
    part: float = 0.0,
    direction: str = "both",
    connections: Collection[int] | None = None,
    probability: float = 1.0,
    times: int | None = None,
) -> Disturbance:
    """Abort a connection with a RST to both ends (a Unix socket is closed). Arguments: :func:`stall`."""
    return _made("reset", direction, connections, probability, times, after=after, part=part)


def cut(
    *,
    after: int | tuple[int, int] = 0,
    part: float = 0.0,
    direction: str = "both",
    connections: Collection[int] | None = None,
    probability: float = 1.0,
    times: int | None = None,
) -> Disturbance:
    """Close a connection at both ends, as the end of a process does. Arguments: :func:`stall`."""
    return _made("cut", direction, connections, probability, times, after=after, part=part)
