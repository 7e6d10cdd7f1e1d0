"""One generation of a collective, at the worker that made it.

Members come here to tell each other their addresses, and torch's backends to exchange what they need to connect. A meeting
also hears of the end of a member, from the member's process or from the end of that process, and breaks then: the member that
waits here gets an error, and every other member is told to cut what it is doing. A meeting that has broken stays
broken; members meet again in another one, with another number, so that two generations have nothing in common.

Nothing here waits: answers are futures. The functions at the end are called by RPC. ``_lock`` guards the table and all
meetings in it; futures are completed, and others told, after it has been left. It is re-entrant, as the collector may run there.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from actorrpc.actors.client.supervisor_client import call_quietly, peer_of
from actorrpc.actors.context import runtime
from actorrpc.agent.executor import Deferred
from actorrpc.errors import CollectiveError
from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerKey

if TYPE_CHECKING:
    from actorrpc.agent.agent import Agent
    from actorrpc.agent.peers import Peer

__all__ = ["Generation", "Generations", "MemberSlot", "ask", "gone"]

_GONE: Final = "it has been destroyed, or rebuilt"
_NEWS_S: Final = 0.5  # by when the end of a member is known here after others have noticed it
_TELL_S: Final = 10.0  # how long a worker may take to hear that a meeting is broken


class MemberSlot(NamedTuple):
    """Where a member is: the incarnation of an actor, and that of its worker."""

    worker: WorkerKey
    instance_id: int


@dataclass(slots=True, eq=False)
class Generation:
    """One generation of a collective. The table's lock guards it; :attr:`why` may be read without.

    Attributes:
        key: names the meeting; no other has it.
        slots: the members that have come, by rank.
        why: why it is broken; empty while it is not.
        known: whether that is the end of a member, or the will of its maker; otherwise there may be news of it.
        asking: those whose operation has failed, and who want to know why.
    """

    key: int
    title: str
    size: int
    slots: dict[int, MemberSlot]
    values: dict[str, bytes]
    told: dict[int, Any]
    waiting: list[tuple[Sequence[str], Future[list[bytes]]]]
    gathered: list[Future[list[Any]]]
    asking: list[Future[str]]
    why: str = ""
    known: bool = False

    def error(self) -> CollectiveError:
        """Return what those get who come too late."""
        return CollectiveError(f"{self.title} is broken: {self.why}", actor=self.title)


class Generations:
    """The meetings of one process. Thread-safe.

    Args:
        cut: ``cut(key, rank, why)``, called by RPC on a member's worker.
    """

    def __init__(self, agent: Agent, cut: Callable[[int, int, str], None]) -> None:
        self._agent = agent
        self._cut = cut
        self._lock = threading.RLock()
        self._table: dict[int, Generation] = {}
        self._agent.on_peer_end.append(self._peer_ended)

    def open(self, title: str, size: int) -> Generation:
        """Begin a meeting."""
        meeting = Generation(secrets.randbits(63), title, size, {}, {}, {}, [], [], [])
        with self._lock:
            self._table[meeting.key] = meeting
        return meeting

    def close(self, meeting: Generation, why: str = _GONE) -> None:
        """End a meeting for good: it breaks if it has not, and is forgotten."""
        self.break_up(meeting, why)
        with self._lock:
            self._table.pop(meeting.key, None)

    def end(self) -> None:
        """Break all meetings: this process leaves the group."""
        for meeting in list(self._table.values()):
            self.close(meeting, "the worker that made it has left")

    def break_up(self, meeting: Generation, why: str, *, but: int = -1, known: bool = True) -> None:
        """Break a meeting, once: fail the members that wait, and tell the members, except rank ``but``, which knows."""
        with self._lock:
            first = not meeting.why
            if first or (known and not meeting.known):
                meeting.why, meeting.known = why, known
            asking: list[Future[str]] = []
            if meeting.known:
                asking, meeting.asking = meeting.asking, []
        for each in asking:
            each.try_complete(meeting.why)
        if not first:
            return
        with self._lock:
            waiting: list[Future[Any]] = [future for _, future in meeting.waiting]
            waiting += meeting.gathered
            meeting.waiting, meeting.gathered = [], []
            slots = dict(meeting.slots)
        for future in waiting:
            future.try_fail(meeting.error())
        for rank, slot in slots.items():
            if rank != but:
                self._agent.submit(partial(self._tell, meeting, rank, slot))

    def _tell(self, meeting: Generation, rank: int, slot: MemberSlot) -> None:
        agent = self._agent
        _ = call_quietly(
            agent,
            partial(peer_of, agent, slot.worker),
            self._cut,
            (meeting.key, rank, meeting.why),
            _TELL_S,
            "cut",
        )

    def _peer_ended(self, peer: Peer) -> None:
        key = peer.key
        with self._lock:
            lost = [
                (meeting, rank)
                for meeting in self._table.values()
                for rank, slot in meeting.slots.items()
                if slot.worker == key
            ]
        for meeting, rank in lost:
            self._lost(meeting, rank, f"its worker {peer.name!r} ended ({peer.cause or peer.state})")

    def _lost(self, meeting: Generation, rank: int, why: str) -> None:
        self.break_up(meeting, f"rank {rank} is gone: {why}", but=rank)
        with self._lock:
            meeting.slots.pop(rank, None)
            if not meeting.slots:  # the last one: nobody can come back to it
                self._table.pop(meeting.key, None)

    # -- for members ---------------------------------------------------------------------------------

    def _of(self, key: int) -> Generation:
        meeting = self._table.get(key)
        if meeting is None:
            raise CollectiveError(f"the collective is broken: {_GONE}")
        if meeting.why:
            raise meeting.error()
        return meeting

    def gather(self, key: int, rank: int, slot: MemberSlot, value: Any) -> Future[list[Any]]:
        """Take a member's slot and what it says of itself; the future completes with what all of them say, by rank."""
        future: Future[list[Any]] = Future()
        done: list[Future[list[Any]]] = []
        with self._lock:
            meeting = self._of(key)
            meeting.slots[rank] = slot
            meeting.told[rank] = value
            meeting.gathered.append(future)
            if len(meeting.told) == meeting.size:
                done, meeting.gathered = meeting.gathered, []
        for each in done:
            each.set_result([meeting.told[rank] for rank in range(meeting.size)])
        return future

    def take(self, key: int, names: Sequence[str]) -> Future[list[bytes]]:
        """Return a future of values; it completes when all of them are there."""
        future: Future[list[bytes]] = Future()
        with self._lock:
            meeting = self._of(key)
            found = [meeting.values.get(name) for name in names]
            if None in found:
                meeting.waiting.append((names, future))
                return future
        future.set_result(found)  # type: ignore[arg-type]
        return future

    def change(self, key: int, what: str, *args: Any) -> Any:
        """Do what changes, or looks at, the values without waiting: see :class:`~collective_groups.CallStore`."""
        ready: list[tuple[Sequence[str], Future[list[bytes]]]] = []
        with self._lock:
            meeting = self._of(key)
            values = meeting.values
            answer = _CHANGES[what](values, *args)
            ready = [each for each in meeting.waiting if all(name in values for name in each[0])]
            if ready:
                meeting.waiting = [each for each in meeting.waiting if each not in ready]
            found = [[values[name] for name in names] for names, _ in ready]
        for (_, future), those in zip(ready, found, strict=True):
            future.try_complete(those)
        return answer

    def gone(self, key: int, rank: int, why: str, left: bool) -> Future[str]:
        """Hear that a member has ended (``left``), or that an operation of it failed.

        Returns:
            A future of why the meeting is broken: the end of another member, if that is heard of within half a second.
        """
        future: Future[str] = Future()
        meeting = self._table.get(key)
        if meeting is None:
            future.set_result(_GONE)
            return future
        if left:
            self._lost(meeting, rank, why)
        else:
            self.break_up(meeting, why, but=rank, known=False)
        with self._lock:
            if not meeting.known:
                meeting.asking.append(future)
                self._agent.clock.after(
                    _NEWS_S, lambda: self._agent.submit(partial(self._no_news, meeting, future))
                )
                return future
        future.set_result(meeting.why)
        return future

    def _no_news(self, meeting: Generation, future: Future[str]) -> None:
        with self._lock:
            if future in meeting.asking:
                meeting.asking.remove(future)
        future.try_complete(meeting.why)


def _put(values: dict[str, bytes], name: str, value: bytes) -> None:
    values[name] = value


def _add(values: dict[str, bytes], name: str, number: int) -> int:
    total = int(values.get(name, b"0")) + number
    values[name] = str(total).encode()
    return total


def _swap(values: dict[str, bytes], name: str, old: bytes, new: bytes) -> bytes:
    if values.get(name, b"") == old:
        values[name] = new
    return values.get(name, old)


_CHANGES: Final[dict[str, Callable[..., Any]]] = {
    "put": _put,
    "add": _add,
    "swap": _swap,
    "has": lambda values, names: all(name in values for name in names),
    "drop": lambda values, name: values.pop(name, None) is not None,
}


# -- called by RPC on the worker that made the collective -----------------------------------------------


def ask(key: int, what: str, *args: Any) -> Any:
    """Answer a member: ``"gather"``, ``"take"``, or one of the changes."""
    meetings: Generations = runtime().meetings
    if what == "gather":
        return Deferred(meetings.gather(key, *args))
    if what == "take":
        return Deferred(meetings.take(key, *args))
    return meetings.change(key, what, *args)


def gone(key: int, rank: int, why: str, left: bool) -> Any:
    """See :meth:`Generations.gone`."""
    meetings: Generations = runtime().meetings
    return Deferred(meetings.gone(key, rank, why, left))
