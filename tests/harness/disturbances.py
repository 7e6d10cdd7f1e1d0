"""Disturbances: how a ``FaultProxy`` disturbs the bytes that pass it, and at which position in each stream.

A connection has two streams: ``"to"`` the worker behind the proxy, and ``"from"`` it. A position is counted in bytes from the
stream's beginning (or from where the stream was when the disturbance was added). It is drawn from random numbers that depend
only on the seed, the connection's number, the direction and the disturbance: the same seed disturbs the same bytes, however
the kernel splits the stream.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = ["STRIKING", "Action", "Disturbance"]

Action = Literal["latency", "throttle", "bit_flips", "stall", "half_close", "reset", "cut"]
STRIKING: Final = frozenset({"stall", "half_close", "reset", "cut"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """One way in which a proxy disturbs streams.

    Attributes:
        action: ``"latency"`` delivers all bytes ``seconds`` later, plus up to ``jitter`` seconds, in order; ``"throttle"`` passes
            at most ``rate`` bytes per second in each stream; ``"bit_flips"`` flips one bit in ``every`` bytes on average;
            ``"stall"`` holds back all bytes for ``seconds``; ``"half_close"`` ends one stream of a connection and keeps the
            other; ``"reset"`` aborts a connection with a RST to both ends; ``"cut"`` closes it at both ends.
        after: the number of bytes after which it strikes, or the least and the greatest: then a number is drawn for each stream.
        part: when it strikes, this fraction of the next read still passes: with 0.5 and small messages, it strikes in the middle
            of a frame.
        direction: the streams that it applies to.
        connections: the numbers of the connections that it applies to, in the order in which they are made, from 0; None: all.
        probability: the probability that it applies to a stream.
        times: the greatest number of streams that it strikes; None: all.
    """

    action: Action = field(kw_only=False)
    seconds: float = 0.0
    jitter: float = 0.0
    rate: float = 0.0
    every: int = 0
    after: int | tuple[int, int] = 0
    part: float = 0.0
    direction: Literal["to", "from", "both"] = "both"
    connections: Collection[int] | None = None
    probability: float = 1.0
    times: int | None = None

    def concerns(self, connection: int, direction: str, rng: random.Random) -> bool:
        """Say whether it applies to a stream; draws one number."""
        lucky = rng.random() < self.probability
        here = self.direction in ("both", direction)
        return lucky and here and (self.connections is None or connection in self.connections)

    def draw(self, rng: random.Random) -> int:
        """Return the number of bytes of a stream after which it strikes."""
        least, most = self.after if isinstance(self.after, tuple) else (self.after, self.after)
        return rng.randint(least, most)
