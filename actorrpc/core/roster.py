"""The roster: which peer a name, a rank or a WorkerInfo means, and who has ended.

Whoever has ended stays for a while: calls to it fail and say why, and what it sent last can still be opened. The last
``KEPT`` of them are kept, without what only a living peer needs once ``_SETTLED_S`` have passed. Of the last
``_REMEMBERED`` it is known that they have ended, and why: no record of them, however it comes, makes them live again.

Any thread may ask. ``_lock`` guards the tables and the end of a peer; nothing is called under it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from actorrpc import moments
from actorrpc.core import codec
from actorrpc.core.identity import WorkerInfo, WorkerRecord
from actorrpc.core.peer import Peer
from actorrpc.errors import PeerDiedError, UnknownWorkerError, WrongTypeError

__all__ = ["KEPT", "Roster"]

KEPT: Final = 128
"""How many of those that have ended are still found by name and listed."""

_REMEMBERED: Final = 4096
_SETTLED_S: Final = 30.0  # what a peer sent last is opened long before
_NOT_RANKS: Final = frozenset({bool, float, complex})


class _End(NamedTuple):
    """What is remembered of a peer that is forgotten otherwise."""

    name: str
    rank: int
    state: str
    cause: str


class Roster:
    """The peers of one agent. Thread-safe.

    Args:
        own: the record of this worker.
        window: bytes that may be unread at each peer.
        resolve: gives the record of a worker by name or rank, or None.
        members: gives all records that are known.
        replaced: told of a peer whose place a new incarnation has taken; on the thread that finds out, with no lock held.
    """

    def __init__(
        self,
        own: WorkerRecord,
        *,
        window: int,
        resolve: Callable[[str | int], WorkerRecord | None],
        members: Callable[[], list[WorkerRecord]],
        replaced: Callable[[Peer], None],
    ) -> None:
        self._own = own
        self._window = window
        self._resolve = resolve
        self._members = members
        self._replaced = replaced
        self._lock = threading.RLock()  # re-entrant: a signal handler may ask while the main thread has it
        self._peers: dict[Any, Peer] = {}
        self._ended: deque[tuple[float, Peer]] = deque()
        self._settled = (
            0  # how many of them, from the oldest on, have been relieved of what they need no more
        )
        self._ends: dict[str, _End] = {}
        self.own = self._new(own)

    def _new(self, record: WorkerRecord) -> Peer:
        return Peer(record, own=self._own, window=self._window, definitions=codec.DefinitionStore())

    # -- who is there ----------------------------------------------------------------------------------

    def peer(self, to: Any) -> Peer:
        """Return the peer of a name, rank or WorkerInfo.

        Raises:
            UnknownWorkerError: there is none.
            PeerDiedError: there was one, which ended long ago.
            WrongTypeError: workers are not named like that.
        """
        try:
            peer = self._peers.get(to)
        except TypeError:  # not hashable, so not a worker either
            peer = None
        # 1.0 and True are found like rank 1, but nobody means them.
        if peer is None or peer.state != "alive" or type(to) in _NOT_RANKS:
            peer = self._find(to, peer)
        return peer

    def _find(self, to: Any, known: Peer | None) -> Peer:
        wanted = to.name if isinstance(to, WorkerInfo) else to
        if isinstance(wanted, bool) or not isinstance(wanted, (str, int)):
            name = getattr(to, "name", None)
            if not isinstance(name, str):
                raise WrongTypeError(
                    f"a worker is named by a str, an int rank or a WorkerInfo, not by {type(to).__name__} {to!r}"
                )
            wanted = name
        record = self._resolve(wanted)
        if record is None:
            if known is not None:
                return known
            with self._lock:
                ends = [end for end in self._ends.values() if wanted in (end.name, end.rank)]
            if ends:
                end = ends[-1]
                why = f": {end.cause}" if end.cause else ""
                raise PeerDiedError(
                    f"worker {end.name!r} {'has left the group' if end.state == 'left' else 'died'} long ago{why}; the call "
                    f"was not executed",
                    maybe_executed=False,
                    worker=end.name,
                )
            names = ", ".join(sorted(r.name for r in self._members())[:20])
            raise UnknownWorkerError(f"there is no worker {wanted!r} in the group; there are: {names}")
        if known is not None and known.record.incarnation == record.incarnation:
            return known
        peer = self.adopt(record)
        if peer.state == "alive":
            with self._lock:
                self._peers[to] = peer
        return peer

    def adopt(self, record: WorkerRecord) -> Peer:
        """Return the peer for a record, making it if it is new. A new incarnation ends the old one."""
        with self._lock:
            peer = self._peers.get(record.name)
            if peer is not None and peer.record.incarnation == record.incarnation:
                return peer
        made = self.own if record.incarnation == self._own.incarnation else self._new(record)
        with self._lock:
            old = self._peers.get(record.name)
            if old is not None and old.record.incarnation == record.incarnation:
                return old
            end = self._ends.get(record.incarnation)
            if end is not None:
                made.state = made.ending = end.state
                made.cause = end.cause
                return made
            self._peers[record.name] = made
            self._peers[record.rank] = made
            self._peers[made.info] = made
        if old is not None:
            self._replaced(old)
        return made

    def peers(self) -> list[Peer]:
        """Return every peer that there has been contact with, but for those forgotten. Takes no lock: fork hooks use it."""
        return list({id(peer): peer for peer in list(self._peers.values())}.values())

    # -- the end of one --------------------------------------------------------------------------------

    def end(self, peer: Peer, state: str, cause: str) -> bool:
        """Take note that a peer has ended, once; say whether that is news."""
        now = moments.now()
        with self._lock:
            if peer.state != "alive":
                return False
            peer.state = state
            peer.cause = cause
            if peer is not self.own:
                self._ends[peer.record.incarnation] = _End(peer.name, peer.rank, state, cause)
                self._ended.append((now, peer))
            forgotten, settled = self._age(now)
        for each in settled:
            each.relieve()
        del forgotten  # what dies with them, dies outside of the lock
        return True

    def forget(self, peer: Peer) -> None:
        """Let go of a peer that has ended, and of all that is remembered of it: it was a visitor. Idempotent."""
        with self._lock:
            for known in (peer.name, peer.rank, peer.info):
                if self._peers.get(known) is peer:
                    del self._peers[known]
            self._ends.pop(peer.record.incarnation, None)
            for place, (_, each) in enumerate(self._ended):
                if each is peer:
                    del self._ended[place]
                    self._settled -= place < self._settled
                    break

    def _age(self, now: float) -> tuple[list[Peer], list[Peer]]:
        """Take those out that ended long before others; return them, and those that are to be relieved. Under the lock."""
        forgotten: list[Peer] = []
        while len(self._ended) > KEPT:
            _, peer = self._ended.popleft()
            self._settled = max(0, self._settled - 1)
            forgotten.append(peer)
        if forgotten:
            gone = {id(peer) for peer in forgotten}
            for key in [key for key, peer in self._peers.items() if id(peer) in gone]:
                del self._peers[key]
        while len(self._ends) > _REMEMBERED:
            del self._ends[next(iter(self._ends))]
        settled: list[Peer] = []
        while self._settled < len(self._ended) and now - self._ended[self._settled][0] >= _SETTLED_S:
            settled.append(self._ended[self._settled][1])
            self._settled += 1
        return forgotten, settled
