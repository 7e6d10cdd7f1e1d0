"""Tensors from device to device: values arrive whole, and all memory and loans come back, whoever dies or runs out of memory."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actorrpc import rpc
from actorrpc.agent.agent import Agent
from actorrpc.errors import LimitError, PeerDiedError, ProtocolError
from actorrpc.futures import Future
from actorrpc.serialization.tensors import PlacedSpan
from actorrpc.testing import VirtualTime
from actorrpc.transport.shared_memory import Lane
from actorrpc.wire.frames import LANE_DEVICES, LANE_FREE, LANE_RETIRE, PREFIX
from tests import certificates
from tests.actors.e2e.kit import until
from tests.agent.agents import agents
from tests.fake_devices import FakeMemory, memory_here, share_memory
from tests.forks import exit_code, fork
from tests.ranks import Died, rpc_group

MIB = 1 << 20
LIMIT = 8 * MIB


class Ends:
    """Both ends of a lane in one process: one end sends tensors, and the other end receives them."""

    def __init__(self, folder: Path, ours: str = "GPU-0", theirs: str = "GPU-0") -> None:
        self.ours, self.theirs = (FakeMemory(folder, *gpus.split()) for gpus in (ours, theirs))
        self.sender, self.receiver = Lane(), Lane()

    def list_devices(self) -> None:
        self._deliver(self.receiver, self.sender, True)

    def settle(self) -> None:
        """Exchange the frames about freed and retired memory."""
        self._deliver(self.receiver, self.sender)
        for lender in self.sender.lenders():
            lender.trim()
        self._deliver(self.sender, self.receiver)
        self._deliver(self.receiver, self.sender)

    def _deliver(self, source: Lane, target: Lane, lists: bool = False) -> None:
        outbox: deque[bytes] = deque()
        if lists:
            source.list_devices(self.theirs, lambda: None, outbox)
        source.hand_back(outbox)
        for frame in outbox:
            extra, kind = PREFIX.unpack_from(frame)[1:3]
            heard = {
                LANE_DEVICES: target.heard_devices,
                LANE_FREE: target.heard_freed,
                LANE_RETIRE: lambda body: target.heard_retired(body, lambda task: task()),
            }
            heard[kind](frame[PREFIX.size + extra :])

    def place(self, *tensors: torch.Tensor, target: str = "cpu:0") -> list[list[Any]]:
        spans = [(at, PlacedSpan(t.view(torch.uint8), target)) for at, t in enumerate(tensors)]
        return self.sender.devices.place(self.ours, spans, LIMIT, 1000)[0]

    def read(self, rows: Any, buffers: Any = ()) -> list[Any]:
        return self.receiver.devices.read(rows, buffers)

    def lent(self) -> int:
        return sum(lender.stats().lent_bytes for lender in self.sender.devices.lenders())

    def close(self) -> None:
        for lane in (self.sender, self.receiver):
            lane.close()
            lane.devices.release()
        assert not self.ours.blocks
        assert not self.theirs.blocks


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    ends = Ends(tmp_path)
    ends.list_devices()
    yield ends
    ends.close()
    assert not list(tmp_path.iterdir())


def test_tensors_arrive_as_copies_and_their_block_is_lent_again(ends: Ends) -> None:
    source = torch.arange(5000.0)
    for _ in range(3):
        rows = ends.place(source, torch.ones(10_000))
        first, host, second = ends.read([[*rows[0][:4], [0, 2], *rows[0][5:]]], [b"x"])
        assert host == b"x"
        source += 1
        assert torch.equal(first.view(torch.float32), source - 1)
        assert torch.equal(second.view(torch.float32), torch.ones(10_000))
        assert ends.lent()
        ends.settle()
        assert not ends.lent()
    assert len(ends.ours.blocks) == len(ends.theirs.blocks) == 1


def _no_room(ends: Ends) -> None:
    ends.ours.room = 0


def _all_lent(ends: Ends) -> None:
    while ends.place(torch.ones(MIB // 4)):
        pass


@pytest.mark.parametrize(
    "limit",
    [_no_room, _all_lent, lambda ends: ends.sender.heard_devices(b"")],
    ids=["no memory", "all memory lent", "list withdrawn"],
)
def test_tensors_are_left_to_host_memory_if_their_device_cannot_lend(
    ends: Ends, limit: Callable[[Ends], None]
) -> None:
    limit(ends)
    assert ends.place(torch.ones(10_000)) == []


def test_tensors_are_left_to_host_memory_if_the_peer_does_not_see_their_gpu(tmp_path: Path) -> None:
    ends = Ends(tmp_path, theirs="GPU-1")
    assert ends.place(torch.ones(10_000)) == []  # not listed yet
    ends.list_devices()
    assert ends.place(torch.ones(10_000)) == []
    assert ends.place(torch.ones(LIMIT)) == ends.place(torch.ones(10)) == []
    assert ends.place(torch.ones(10_000), target="cuda:0") == []
    ends.close()


def test_the_block_is_on_the_target_gpu_if_the_receiver_sees_only_that_gpu(tmp_path: Path) -> None:
    ends = Ends(tmp_path, ours="GPU-0 GPU-1", theirs="GPU-2 GPU-1")
    ends.list_devices()
    assert ends.place(torch.ones(10_000), target="cpu:0") == []
    rows = ends.place(torch.ones(10_000), target="cpu:1")
    assert rows[0][0] == "GPU-1"
    (found,) = ends.read(rows)
    assert torch.equal(found.view(torch.float32), torch.ones(10_000))
    ends.close()


def test_without_memory_at_the_receiver_the_message_is_refused_and_its_loan_freed(ends: Ends) -> None:
    ends.theirs.spare = 0
    rows = ends.place(torch.ones(10_000))
    with pytest.raises(LimitError, match=r"no memory on cpu:0 for tensors of 40000 bytes"):
        ends.read(rows)
    ends.settle()
    assert not ends.lent()
    ends.theirs.spare = MIB
    assert ends.read(ends.place(torch.ones(10_000)))[0].nbytes == 40_000


def test_after_a_block_could_not_be_opened_tensors_are_left_to_host_memory(
    ends: Ends, tmp_path: Path
) -> None:
    rows = ends.place(torch.ones(10_000))
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(LimitError, match=r"40000 bytes for cpu:0 cannot be read.*device_lane_bytes=0"):
        ends.read(rows)
    ends.settle()
    assert not ends.lent()
    assert ends.place(torch.ones(10_000)) == []


def test_after_the_end_of_the_connection_only_blocks_that_may_be_read_are_kept(ends: Ends) -> None:
    ends.receiver.devices.refuse(ends.place(torch.ones(1_500_000)))
    ends.settle()
    rows, unread = ends.place(torch.ones(10_000)), ends.place(torch.ones(800_000))
    ends.sender.close()
    assert len(ends.ours.blocks) == 2
    assert ends.place(torch.ones(10_000)) == []
    ends.theirs.during_read = ends.receiver.close
    (complete,) = ends.read(rows)
    assert torch.equal(complete.view(torch.float32), torch.ones(10_000))
    assert not ends.theirs.blocks
    with pytest.raises(PeerDiedError, match="3200000 bytes for cpu:0") as caught:
        ends.read(unread)
    assert caught.value.maybe_executed is True


def test_a_forked_child_closes_no_block_of_its_parent(ends: Ends) -> None:
    ends.read(ends.place(torch.ones(10_000)))

    def use() -> None:
        for lane in (ends.sender, ends.receiver):
            lane.abandon()
        ends.sender = ends.receiver = Lane()
        gc.collect()
        assert ends.ours.blocks
        assert ends.theirs.blocks

    assert exit_code(fork(use)) == 0


def test_memory_of_a_retired_block_is_released_after_the_peer_has_closed_it(ends: Ends) -> None:
    ends.receiver.devices.refuse(ends.place(torch.ones(1_500_000)))
    ends.read(ends.place(torch.ones(500_000)))
    ends.settle()
    (lender,) = ends.sender.devices.lenders()
    assert lender.stats().segments == 2
    assert ends.place(torch.ones(1_900_000))  # there is room for this block only without the other blocks
    assert lender.stats().segments == 1
    assert len(ends.ours.blocks) == 3
    ends.settle()
    assert len(ends.ours.blocks) == 1
    assert not ends.theirs.blocks


@pytest.mark.parametrize(
    "change",
    [
        lambda row: [row[0], -1, *row[2:]],
        lambda row: [*row[:2], 0, *row[3:]],
        lambda row: [*row[:4], [7], *row[5:]],
        lambda row: [*row[:5], [1 << 30], row[6]],
        lambda row: [*row[:5], [40_000, 40_000], row[6]],
        lambda row: row[:6],
        lambda row: 7,
    ],
    ids=["number", "loan", "position", "size", "sizes", "short", "no row"],
)
def test_invalid_rows_are_refused(ends: Ends, change: Callable[[Any], Any]) -> None:
    (row,) = ends.place(torch.ones(10_000))
    with pytest.raises(ProtocolError):
        ends.read([change(row)])
    ends.settle()


# -- between agents --------------------------------------------------------------------------------------


def _echo(value: Any) -> Any:
    return value


@pytest.mark.skipif(certificates.OVER_TLS, reason="device memory is not shared over TLS")
def test_calls_and_answers_between_agents_use_device_memory_from_the_second_call_on(tmp_path: Path) -> None:
    with agents(2, device_lane_bytes=LIMIT) as (one, other):
        to, back = one.peer("a1"), other.peer("a0")
        memories = share_memory(tmp_path, one), share_memory(tmp_path, other)
        large = torch.arange(50_000.0)
        sent = {"large": large, "same": large[7:], "bytes": bytes(300_000), "part": torch.ones(99, 99)[:, 1]}
        for _ in range(3):
            got = one.call_sync(to, _echo, (sent,), {}, 20.0)
            assert all(torch.equal(got[name], sent[name]) for name in ("large", "same", "part"))
            assert got["bytes"] == sent["bytes"]
            got["large"][7] = -1.0
            assert got["same"][0].item() == -1.0
        assert all(memory.reads > 0 for memory in memories)
        lanes = to.conn.lane, back.conn.lane
        until(lambda: not any(lane.devices.is_lending for lane in lanes))

        memories[1].spare = 0
        with pytest.raises(LimitError, match=r"no memory on cpu:0") as caught:
            one.call_sync(to, _echo, (large,), {}, 20.0)
        assert caught.value.maybe_executed is False
        memories[1].spare, memories[0].spare = MIB, 0
        with pytest.raises(LimitError, match=r"no memory on cpu:0") as caught:
            one.call_sync(to, _echo, (large,), {}, 20.0)
        assert caught.value.maybe_executed is True
        memories[0].spare = MIB
        assert torch.equal(one.call_sync(to, _echo, (large,), {}, 20.0), large)
        until(lambda: not any(lane.devices.is_lending for lane in lanes))
        del caught
    assert not any(memory.blocks for memory in memories)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def clock() -> Iterator[VirtualTime]:
    with VirtualTime() as clock:
        yield clock


@pytest.fixture
def reading(tmp_path: Path) -> Iterator[tuple[Agent, list[FakeMemory], threading.Event]]:
    """An agent that has sent a tensor, both memories, and an event: until it is set, the other agent reads the tensor."""
    begun, go_on = threading.Event(), threading.Event()
    with agents(2, device_lane_bytes=LIMIT) as (one, other):
        to, _ = one.peer("a1"), other.peer("a0")
        memories = [share_memory(tmp_path, each) for each in (one, other)]
        while not memories[1].reads:
            one.call_sync(to, _echo, (torch.ones(50_000),), {}, 20.0)
        memories[1].during_read = lambda: (begun.set(), go_on.wait(30.0))
        future: Future[Any] = Future()
        future.add_done_callback(Future.acknowledge)
        one.call(to, len, (torch.ones(50_000),), {}, 20.0, future=future)
        one.flush()
        assert begun.wait(30.0)
        yield one, memories, go_on
        go_on.set()


@pytest.mark.skipif(certificates.OVER_TLS, reason="device memory is not shared over TLS")
def test_a_block_is_kept_for_30_s_if_the_connection_ends_while_it_is_read(
    clock: VirtualTime, reading: tuple[Agent, list[FakeMemory], threading.Event]
) -> None:
    one, memories, go_on = reading
    one.peer("a1").conn.close()
    clock.advance(25.0)
    assert all(memory.blocks for memory in memories)
    go_on.set()
    until(lambda: not memories[1].blocks)
    clock.advance(10.0)
    assert not memories[0].blocks


@pytest.mark.skipif(certificates.OVER_TLS, reason="device memory is not shared over TLS")
def test_shutdown_releases_memory_that_the_peer_does_not_read(
    reading: tuple[Agent, list[FakeMemory], threading.Event],
) -> None:
    one, memories, _ = reading
    one.close()
    assert not memories[0].blocks


@rpc.exposed
def _twice(value: torch.Tensor) -> torch.Tensor:
    return value * 2


@pytest.mark.skipif(certificates.OVER_TLS, reason="device memory is not shared over TLS")
def test_workers_that_take_data_only_send_through_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = FakeMemory(tmp_path)
    monkeypatch.setattr("actorrpc.agent.agent.cuda_memory", lambda: memory)
    with agents(2, device_lane_bytes=LIMIT, data_only=True) as (one, other):
        to = one.peer("a1")
        to.device_map = to.answer_map = other.peer("a0").answer_map = {"cpu": "cpu:0"}
        large = torch.arange(50_000.0)
        for _ in range(3):
            assert torch.equal(one.call_sync(to, _twice, (large,), {}, 20.0), large * 2)
        assert memory.reads == 0
        assert to.conn.lane.lender.placed_bytes > 0


def _share_memory(folder: Path) -> None:
    share_memory(folder)


def _reads() -> int:
    return memory_here().reads


def _made_and_killed(size: int) -> torch.Tensor:
    """Return a tensor, and kill this process as soon as its block was filled: the answer is not sent."""
    memory: Any = memory_here()
    memory.fill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return torch.ones(size)


def _received_and_killed(value: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _survive(rank: int, world_size: int, folder: Path, kill: Callable[..., Any]) -> Any:
    ones = torch.ones(50_000)
    if rank:
        return None
    rpc.rpc_sync("worker1", _share_memory, (folder,))
    memory = share_memory(folder)
    while not (_reads() and rpc.rpc_sync("worker1", _reads)):
        got = rpc.rpc_sync("worker1", _echo, (ones,))
    assert memory.blocks
    with pytest.raises(PeerDiedError) as caught:
        rpc.rpc_sync("worker1", kill, (50_000 if kill is _made_and_killed else ones,))
    assert caught.value.maybe_executed is True
    assert torch.equal(got, ones)
    return os.getpid()


@pytest.mark.parametrize("kill", [_made_and_killed, _received_and_killed])
@pytest.mark.skipif(certificates.OVER_TLS, reason="device memory is not shared over TLS")
def test_blocks_come_back_after_a_process_that_sends_or_has_received_tensors_is_killed(
    kill: Callable[..., Any], tmp_path: Path
) -> None:
    survivor, killed = rpc_group(
        _survive, 2, tmp_path, kill, may_die={1}, env={"ACTORRPC_DEVICE_LANE_BYTES": str(LIMIT)}
    )
    assert killed == Died(-signal.SIGKILL)
    assert not list(tmp_path.glob(f"{survivor}.*"))
