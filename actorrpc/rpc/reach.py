"""Reach: which members of the group this worker can reach, where it has to wait for them.

To be told of a worker's end, a connection to it is needed: :meth:`Reach.connect_all` makes those that are missing, on pool
threads, all at once. A member is *out of reach* while it is suspect, or while connections to it do not come about although
nothing says that it is dead. Whoever is that for ``PATIENCE_S`` is given up by those who wait for it at shutdown: what a
worker does that cannot be asked is no reason to wait for ever. It is taken back when it comes back.

The dicts are used by single, atomic steps; nothing is locked, and nothing here waits but what runs on the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from actorrpc import moments
from actorrpc.core.agent import Agent
from actorrpc.core.changes import state_of
from actorrpc.core.peer import Peer
from actorrpc.errors import RpcError

__all__ = ["DIAL_S", "PATIENCE_S", "Reach"]

DIAL_S: Final = 2.0
"""How long one attempt to connect may take, in seconds: as long as a shutdown by force may."""

PATIENCE_S: Final = 10.0
"""How long somebody may be out of reach, in seconds, before others cease to wait for it."""


class Reach:
    """What is known of the ways to the members. Thread-safe."""

    def __init__(self, agent: Agent, now: Callable[[], float] = time.monotonic) -> None:
        self._agent = agent
        self._now = now
        self._failed: dict[str, str] = {}
        self._since: dict[str, float] = {}
        self._dialling: dict[str, None] = {}

    def failed(self, peer: Peer, error: RpcError) -> None:
        """Take note that no connection to a peer came about."""
        if peer.state == "alive":
            self._failed[peer.name] = str(error)

    def forget(self, peer: Peer) -> None:
        """Let go of what is kept about a peer that has ended."""
        self._failed.pop(peer.name, None)
        self._since.pop(peer.name, None)

    def connect_all(self, peers: Iterable[Peer]) -> None:
        """Have connections made to those of these peers that have none. Returns at once."""
        for peer in peers:
            self._connect(peer)

    def _connect(self, peer: Peer) -> None:
        conn = peer.conn
        if peer.is_self or peer.state != "alive" or (conn is not None and not conn.broken):
            return
        if peer.name not in self._dialling:
            self._dialling[peer.name] = None
            self._agent.submit(partial(self._dial, peer))

    def _dial(self, peer: Peer) -> None:
        try:
            self._agent.links.connect(peer, moments.now() + DIAL_S, "to watch it")
        except (RpcError, OSError) as error:
            self.failed(peer, error if isinstance(error, RpcError) else RpcError(str(error)))
        finally:
            self._dialling.pop(peer.name, None)

    def is_given_up(self, peer: Peer) -> bool:
        """Say whether a peer has been out of reach for so long that nobody need wait for it; keep trying to reach it.

        To be called again and again while one waits: the time runs from the first call that finds it out of reach.
        """
        conn = peer.conn
        if conn is not None and not conn.broken:
            self._failed.pop(peer.name, None)
        if peer.is_self or not (peer.name in self._failed or state_of(peer) == "suspect"):
            self._since.pop(peer.name, None)
            return False
        self._connect(peer)
        now = self._now()
        return now - self._since.setdefault(peer.name, now) >= PATIENCE_S

    def why(self, peer: Peer) -> str:
        """Say in words what is wrong with a peer that is out of reach."""
        return self._failed.get(peer.name) or f"it is {state_of(peer)}"
