"""Disturbances: what a :class:`FaultProxy` does to the bytes that pass it, and where in each stream.

A connection has two streams: ``"to"`` the worker behind the proxy, and ``"from"`` it. Where in a stream something happens is
counted in bytes from the stream's beginning (or from the moment when the disturbance was added to a live one), and drawn
from random numbers that depend on the seed, the connection's number, the direction and the disturbance alone: however the
kernel cuts the stream into pieces, the same seed disturbs the same bytes.
"""

from __future__ import annotations

import math
import numbers
import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal

from actorrpc.errors import ConfigError, WrongTypeError

__all__ = ["Disturbance", "bit_flips", "cut", "half_close", "latency", "reset", "stall", "throttle"]

Action = Literal["latency", "throttle", "bit_flips", "stall", "half_close", "reset", "cut"]
_DIRECTIONS: Final = ("to", "from", "both")
STRIKING: Final = frozenset({"stall", "half_close", "reset", "cut"})


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
    seconds: float = 0.0
    jitter: float = 0.0
    rate: float = 0.0
    every: int = 0
    after: tuple[int, int] = (0, 0)
    part: float = 0.0
    direction: str = "both"
    connections: frozenset[int] | None = None
    probability: float = 1.0
    times: int | None = None

    def concerns(self, connection: int, direction: str, dice: random.Random) -> bool:
        """Say whether it concerns a stream; draws one number."""
        lucky = dice.random() < self.probability
        here = self.direction in ("both", direction)
        return lucky and here and (self.connections is None or connection in self.connections)

    def draw(self, dice: random.Random) -> int:
        """Return after how many bytes it strikes a stream."""
        return dice.randint(*self.after)


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
    return Disturbance(
        "latency",
        seconds=_number("seconds", seconds),
        jitter=_number("jitter", jitter),
        **_which(direction, connections, probability, None),
    )


def throttle(
    rate: float,
    *,
    direction: str = "both",
    connections: Collection[int] | None = None,
    probability: float = 1.0,
) -> Disturbance:
    """Let at most ``rate`` bytes per second pass in each stream. The other arguments: :func:`latency`."""
    if _number("rate", rate) == 0.0:
        raise ConfigError("rate must be more than 0 bytes per second; to let nothing pass, use stall()")
    return Disturbance("throttle", rate=float(rate), **_which(direction, connections, probability, None))


def bit_flips(
    every: int,
    *,
    direction: str = "both",
    connections: Collection[int] | None = None,
    probability: float = 1.0,
    after: int | tuple[int, int] = 0,
) -> Disturbance:
    """Flip one bit in every so many bytes, on average, once ``after`` bytes have passed. The others: :func:`latency`."""
    if isinstance(every, bool) or not isinstance(every, int):
        raise WrongTypeError(f"every must be an int, not {every!r}")
    if every < 1:
        raise ConfigError(f"every must be at least 1 byte, not {every!r}")
    which = _which(direction, connections, probability, None)
    return Disturbance("bit_flips", every=every, after=_after(after), **which)


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
    which = _which(direction, connections, probability, times)
    return Disturbance("stall", seconds=_stalled(seconds), after=_after(after), part=_part(part), **which)


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
    which = _which(direction, connections, probability, times)
    return Disturbance("half_close", after=_after(after), part=_part(part), **which)


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
    which = _which(direction, connections, probability, times)
    return Disturbance("reset", after=_after(after), part=_part(part), **which)


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
    which = _which(direction, connections, probability, times)
    return Disturbance("cut", after=_after(after), part=_part(part), **which)


# -- arguments ---------------------------------------------------------------------------------------


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise WrongTypeError(f"{name} must be a number, not {value!r}")
    if not 0.0 <= float(value) < math.inf:
        raise ConfigError(f"{name} must be at least 0 and finite, not {value!r}")
    return float(value)


def _stalled(seconds: Any) -> float:
    return math.inf if seconds == math.inf else _number("seconds", seconds)


def _part(value: Any) -> float:
    part = _number("part", value)
    if part > 1.0:
        raise ConfigError(f"part must be from 0 to 1, not {value!r}")
    return part


def _after(value: Any) -> tuple[int, int]:
    low, high = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
    if any(isinstance(each, bool) or not isinstance(each, int) for each in (low, high)):
        raise WrongTypeError(f"after must be a number of bytes, or the least and the most, not {value!r}")
    if not 0 <= low <= high:
        raise ConfigError(f"after must be a number of bytes from 0, or the least and the most, not {value!r}")
    return low, high


def _which(direction: Any, connections: Any, probability: Any, times: Any) -> dict[str, Any]:
    if direction not in _DIRECTIONS:
        raise ConfigError(f"direction must be one of {', '.join(map(repr, _DIRECTIONS))}, not {direction!r}")
    if connections is not None:
        try:
            connections = frozenset(connections)
        except TypeError:
            raise WrongTypeError(f"connections are numbers, from 0, or None, not {connections!r}") from None
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in connections):
            raise WrongTypeError(f"connections are numbers, from 0, not {sorted(connections, key=repr)}")
    if _number("probability", probability) > 1.0:
        raise ConfigError(f"probability must be from 0 to 1, not {probability!r}")
    if times is not None and (isinstance(times, bool) or not isinstance(times, int)):
        raise WrongTypeError(f"times must be an int or None, not {times!r}")
    if times is not None and times < 0:
        raise ConfigError(f"times must be at least 0, not {times!r}")
    return {
        "direction": direction,
        "connections": connections,
        "probability": float(probability),
        "times": times,
    }
