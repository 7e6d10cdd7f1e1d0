"""The generations of collectives, at the worker that made the collectives.

The members of a generation meet on this worker: they exchange addresses, and torch's backends exchange the data that they need to
connect. If a member ends, its process reports this, or this worker notices that the process has ended. The generation then
breaks: members that wait for others get an error, and every other member is told to end its operations. A broken generation stays
broken. The members then join another generation, which has another key, so that two generations share nothing.

No function of this module blocks: answers are futures. The functions at the end are called by RPC. ``_lock`` guards the table and
all generations in it. Futures are completed, and members notified, after it was released. It is re-entrant, because the garbage
collector may run while it is held.
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

__all__ = ["Generation", "Generations", "MemberSlot", "report_loss", "serve"]

_GONE: Final = "it has been destroyed, or rebuilt"
# For so many seconds, the report of a failed operation waits for the news that a member has ended, which is then the reason.
_REASON_S: Final = 0.5
_CUT_S: Final = 10.0  # the time-out of the call that ends a member's operations


class MemberSlot(NamedTuple):
    """Identifies the incarnation of a member's actor, and of its worker."""

    worker: WorkerKey
    instance_id: int


@dataclass(slots=True, eq=False)
class Generation:
    """One generation of a collective. ``Generations._lock`` guards it; :attr:`why` may be read without the lock.

    Attributes:
        key: the unique number of the generation.
        slots: the members that have joined, by rank.
        why: the reason why it is broken; empty if it is not.
        known: whether ``why`` is final (a member or the generation has ended); until then, a better reason may be reported.
        asking: the futures of members whose operation has failed, which wait for the reason.
    """

    key: int
    title: str
    size: int
    slots: dict[int, MemberSlot]
    values: dict[str, bytes]
    reports: dict[int, Any]
    waiting: list[tuple[Sequence[str], Future[list[bytes]]]]
    gathered: list[Future[list[Any]]]
    asking: list[Future[str]]
    why: str = ""
    known: bool = False

    def error(self) -> CollectiveError:
        """Return the error for members that wait in this broken generation, or join it."""
        return CollectiveError(f"{self.title} is broken: {self.why}", actor=self.title)


class Generations:
    """The generations of the collectives that this process made. Thread-safe.

    Args:
        cut: ``member.cut``, which is called by RPC on a member's worker and ends the member's operations.
    """

    def __init__(self, agent: Agent, cut: Callable[[int, int, str], None]) -> None:
        self._agent = agent
        self._cut = cut
        self._lock = threading.RLock()
        self._table: dict[int, Generation] = {}
        self._agent.on_peer_end.append(self._peer_ended)

    def open(self, title: str, size: int) -> Generation:
        """Start a generation."""
        generation = Generation(secrets.randbits(63), title, size, {}, {}, {}, [], [], [])
        with self._lock:
            self._table[generation.key] = generation
        return generation

    def close(self, generation: Generation, why: str = _GONE) -> None:
        """Break a generation, and remove it."""
        self.break_up(generation, why)
        with self._lock:
            self._table.pop(generation.key, None)

    def close_all(self) -> None:
        """Break all generations, because this process leaves the group."""
        for generation in list(self._table.values()):
            self.close(generation, "the worker that made it has left")

    def break_up(self, generation: Generation, why: str, *, but: int = -1, known: bool = True) -> None:
        """Break a generation, once: fail waiting members, and tell all members but rank ``but``. ``known``: see Generation."""
        with self._lock:
            first = not generation.why
            if first or (known and not generation.known):
                generation.why, generation.known = why, known
            asking: list[Future[str]] = []
            if generation.known:
                asking, generation.asking = generation.asking, []
        for each in asking:
            each.try_complete(generation.why)
        if not first:
            return
        with self._lock:
            waiting: list[Future[Any]] = [future for _, future in generation.waiting]
            waiting += generation.gathered
            generation.waiting, generation.gathered = [], []
            slots = dict(generation.slots)
        for future in waiting:
            future.try_fail(generation.error())
        for rank, slot in slots.items():
            if rank != but:
                self._agent.submit(partial(self._send_cut, generation, rank, slot))

    def _send_cut(self, generation: Generation, rank: int, slot: MemberSlot) -> None:
        agent = self._agent
        _ = call_quietly(
            agent,
            partial(peer_of, agent, slot.worker),
            self._cut,
            (generation.key, rank, generation.why),
            _CUT_S,
            "cut",
        )

    def _peer_ended(self, peer: Peer) -> None:
        key = peer.key
        with self._lock:
            lost = [
                (generation, rank)
                for generation in self._table.values()
                for rank, slot in generation.slots.items()
                if slot.worker == key
            ]
        for generation, rank in lost:
            self._lost(generation, rank, f"its worker {peer.name!r} ended ({peer.cause or peer.state})")

    def _lost(self, generation: Generation, rank: int, why: str) -> None:
        self.break_up(generation, f"rank {rank} was lost: {why}", but=rank)
        with self._lock:
            generation.slots.pop(rank, None)
            if not generation.slots:  # the last member has ended, so no member will use the generation again
                self._table.pop(generation.key, None)

    # -- for members ---------------------------------------------------------------------------------

    def _of(self, key: int) -> Generation:
        generation = self._table.get(key)
        if generation is None:
            raise CollectiveError(f"the collective is broken: {_GONE}")
        if generation.why:
            raise generation.error()
        return generation

    def gather(self, key: int, rank: int, slot: MemberSlot, value: Any) -> Future[list[Any]]:
        """Record a member's slot and value; the returned future completes with the values of all members, by rank."""
        future: Future[list[Any]] = Future()
        done: list[Future[list[Any]]] = []
        with self._lock:
            generation = self._of(key)
            generation.slots[rank] = slot
            generation.reports[rank] = value
            generation.gathered.append(future)
            if len(generation.reports) == generation.size:
                done, generation.gathered = generation.gathered, []
        for each in done:
            each.set_result([generation.reports[rank] for rank in range(generation.size)])
        return future

    def get(self, key: int, names: Sequence[str]) -> Future[list[bytes]]:
        """Return a future of the values of keys, which completes when all keys have values."""
        future: Future[list[bytes]] = Future()
        with self._lock:
            generation = self._of(key)
            found = [generation.values.get(name) for name in names]
            if None in found:
                generation.waiting.append((names, future))
                return future
        future.set_result(found)  # type: ignore[arg-type]
        return future

    def change(self, key: int, what: str, *args: Any) -> Any:
        """Change or read the store's values without waiting: see :class:`~.process_group.CallStore`."""
        ready: list[tuple[Sequence[str], Future[list[bytes]]]] = []
        with self._lock:
            generation = self._of(key)
            values = generation.values
            answer = _CHANGES[what](values, *args)
            ready = [each for each in generation.waiting if all(name in values for name in each[0])]
            if ready:
                generation.waiting = [each for each in generation.waiting if each not in ready]
            found = [[values[name] for name in names] for names, _ in ready]
        for (_, future), those in zip(ready, found, strict=True):
            future.try_complete(those)
        return answer

    def report_loss(self, key: int, rank: int, why: str, ended: bool) -> Future[str]:
        """Process the message that a member has ended (``ended``), or that one of its operations failed.

        Returns:
            A future of the reason why the generation is broken: the end of another member, if that is known within ``_REASON_S``.
        """
        future: Future[str] = Future()
        generation = self._table.get(key)
        if generation is None:
            future.set_result(_GONE)
            return future
        if ended:
            self._lost(generation, rank, why)
        else:
            self.break_up(generation, why, but=rank, known=False)
        with self._lock:
            if not generation.known:
                generation.asking.append(future)
                self._agent.clock.after(
                    _REASON_S, lambda: self._agent.submit(partial(self._answer_late, generation, future))
                )
                return future
        future.set_result(generation.why)
        return future

    def _answer_late(self, generation: Generation, future: Future[str]) -> None:
        with self._lock:
            if future in generation.asking:
                generation.asking.remove(future)
        future.try_complete(generation.why)


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


def serve(key: int, what: str, *args: Any) -> Any:
    """Answer the request ``what`` of a member: ``"gather"``, ``"get"``, or a key of ``_CHANGES``."""
    generations: Generations = runtime().generations
    if what == "gather":
        return Deferred(generations.gather(key, *args))
    if what == "get":
        return Deferred(generations.get(key, *args))
    return generations.change(key, what, *args)


def report_loss(key: int, rank: int, why: str, ended: bool) -> Any:
    """See :meth:`Generations.report_loss`."""
    generations: Generations = runtime().generations
    return Deferred(generations.report_loss(key, rank, why, ended))
