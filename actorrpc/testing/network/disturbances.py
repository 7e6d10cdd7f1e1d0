"""Disturbances: what a :class:`FaultProxy` does to the bytes that pass it, and where in each stream.

A connection has two streams: ``"to"`` the worker behind the proxy, and ``"from"`` it. Where in a stream something happens is
counted in bytes from the stream's beginning (or from the moment when the disturbance was added to a live one), and drawn
from random numbers that depend on the seed, the connection's number, the direction and the disturbance alone: however the
kernel cuts the stream into pieces, the same seed disturbs the same bytes.
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
    """One thing that a proxy does to streams; made by the functions of this module. Immutable.

    Attributes:
        action: which.
        seconds, jitter: of a latency; ``seconds`` of a stall (infinite: for good).
        rate: of a throttle, in bytes per second.
        every: of bit flips: one in so many bytes on average.
        after: the least and the most number of bytes that pass before it strikes.
        part: of what is read next when it strikes, so much still passes.
        direction: which streams it concerns.
        connections: the numbers of the connections that it concerns, from 0; None: all.
        probability: how likely it is to concern a stream.
        times: how many streams it strikes at most; None: all.
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
        """Say whether it concerns a stream; draws one number."""
        lucky = rng.random() < self.probability
        here = self.direction in ("both", direction)
        return lucky and here and (self.connections is None or connection in self.connections)

    def draw(self, rng: random.Random) -> int:
        """Return after how many bytes it strikes a stream."""
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
    """Let all bytes arrive ``seconds`` later, and up to ``jitter`` seconds more; their order stays.

    Args:
        direction: ``"to"`` the worker behind the proxy, ``"from"`` it, or ``"both"``.
        connections: the numbers of the connections concerned, in the order in which they come, from 0; None: all.
        probability: how likely a stream is to be concerned.

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
    """Let at most ``rate`` bytes per second pass in each stream. The other arguments: :func:`latency`."""
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
    """Flip one bit in every so many bytes, on average, once ``after`` bytes have passed. The others: :func:`latency`."""
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
    """Let nothing pass for ``seconds``, once ``after`` bytes have passed. Nothing is closed and nothing gets lost.

    Args:
        after: a number of bytes, or the least and the most: then it is drawn for each stream.
        part: so much (0 to 1) of what the proxy reads next still passes: with 0.5 and small messages, it strikes in the
            middle of a frame.
        times: how many streams are struck at most; None: all.

    The others: :func:`latency`.
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
    """End a stream, but not the other one of its connection: what is sent into it gets lost. Arguments: :func:`stall`."""
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
    """Abort a connection: both ends get a RST (a Unix socket just closes). Arguments: :func:`stall`."""
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
    """Close a connection at both ends, as when a process ends. Arguments: :func:`stall`."""
    return _made("cut", direction, connections, probability, times, after=after, part=part)
