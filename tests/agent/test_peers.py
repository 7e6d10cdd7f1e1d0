"""The peer table: it finds peers by name, rank and record, and keeps a bounded number of ended peers."""

from __future__ import annotations

import gc
import weakref

import pytest

from actorrpc.agent.peers import KEPT, Peer, PeerTable
from actorrpc.errors import PeerDiedError, UnknownWorkerError, WrongTypeError
from actorrpc.wire.identity import WorkerRecord, new_incarnation


def _record(rank: int, name: str = "") -> WorkerRecord:
    return WorkerRecord(name=name or f"w{rank}", rank=rank, incarnation=new_incarnation(), host="here")


class _World:
    """A group that workers may join and leave at any time, and the peer table of one worker."""

    def __init__(self) -> None:
        self.registered: dict[str | int, WorkerRecord] = {}
        self.replaced: list[Peer] = []
        self.peer_table = PeerTable(
            _record(0, "me"),
            window=1 << 20,
            resolve=self.registered.get,
            members=lambda: list(self.registered.values()),
            replaced=self._replaced,
        )

    def _replaced(self, peer: Peer) -> None:
        self.replaced.append(peer)
        self.peer_table.record_end(peer, "dead", "replaced")

    def join(self, rank: int, name: str = "") -> Peer:
        record = _record(rank, name)
        self.registered[record.name] = self.registered[record.rank] = record
        return self.peer_table.peer(record.name)

    def end_peer(self, peer: Peer, state: str = "dead", cause: str = "killed") -> None:
        self.registered.pop(peer.name)
        self.registered.pop(peer.record.rank)
        assert self.peer_table.record_end(peer, state, cause)


def test_only_the_most_recently_ended_peers_are_kept() -> None:
    world = _World()
    traces = []
    for rank in range(1, 3 * KEPT + 1):
        peer = world.join(rank)
        assert world.peer_table.peer(rank) is world.peer_table.peer(peer.record.info) is peer
        traces.append(weakref.ref(peer))
        world.end_peer(peer, cause=f"killed by {rank}")
        del peer
    gc.collect()
    assert len(world.peer_table.peers()) == KEPT
    assert sum(trace() is not None for trace in traces) == KEPT
    # Recently ended peers are kept whole; of older ones, only the state and the cause.
    assert world.peer_table.peer(f"w{3 * KEPT}").state == "dead"
    for to in ("w1", 1):
        with pytest.raises(PeerDiedError, match=r"'w1' died long ago: killed by 1;") as caught:
            world.peer_table.peer(to)
        assert caught.value.maybe_executed is False
        assert caught.value.worker == "w1"
    with pytest.raises(UnknownWorkerError):
        world.peer_table.peer("never there")
    with pytest.raises(WrongTypeError):
        world.peer_table.peer(1.0)


def test_a_forgotten_dead_peer_stays_dead_until_a_new_incarnation_joins() -> None:
    world = _World()
    first = world.join(1)
    record = first.record
    world.end_peer(first)
    for rank in range(2, KEPT + 5):
        world.end_peer(world.join(rank))
    assert first not in world.peer_table.peers()
    world.registered["w1"] = world.registered[1] = (
        record  # from the table of a fixed group, or from the peer itself
    )
    for _ in range(2):
        for again in (world.peer_table.adopt(record), world.peer_table.peer("w1"), world.peer_table.peer(1)):
            assert (again.state, again.cause, again.announced) == ("dead", "killed", "dead")
    assert not any(peer.name == "w1" for peer in world.peer_table.peers())
    second = world.join(1)
    assert second.state == "alive"
    assert world.peer_table.peer("w1") is world.peer_table.peer(1) is second


def test_a_new_incarnation_marks_the_old_one_dead() -> None:
    world = _World()
    old = world.join(1)
    new = world.peer_table.adopt(_record(1))
    assert world.replaced == [old]
    assert old.state == "dead"
    assert new.state == "alive"
    assert world.peer_table.peer("w1") is new
    assert not world.peer_table.record_end(old, "left", "")
