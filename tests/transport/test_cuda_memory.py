"""Tensors of a GPU from device to device between two workers: values, and memory after deaths and without memory.

``test_device_memory.py`` has the same promises for a fake device, at each step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import rpc
from actorrpc.agent.context import current_worker
from actorrpc.errors import LimitError, PeerDiedError
from tests.actors.e2e.kit import until
from tests.ranks import Died, rpc_group, rpc_main, run_group

pytestmark = [pytest.mark.gpu, pytest.mark.limit(120)]
KIB, MIB = 1 << 10, 1 << 20
LARGE = 256 * MIB
ENV = {"ACTORRPC_DEVICE_LANE_BYTES": str(1 << 30)}
MAPS = {"device_maps": {"worker1": {"cuda:0": "cuda:0"}}}


def _run(program: Callable[[], Any], env: dict[str, str] | None = None, **options: Any) -> list[Any]:
    return rpc_group(_on_rank_0, 2, program, timeout=110.0, options=MAPS, env=ENV | (env or {}), **options)


def _on_rank_0(rank: int, world_size: int, program: Callable[[], Any]) -> Any:
    return program() if rank == 0 else None


def _echo(value: torch.Tensor) -> torch.Tensor:
    return value


def _bytes(size: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, device="cuda:0")


def _connection() -> actorrpc.observe.ObservedConnection:
    (seen,) = [each for each in actorrpc.state(30).workers if each.name == "worker0"]
    return seen.connections[0]


def _until_used() -> None:
    """Call until both workers send through device memory: each lists its devices after its first message."""
    rpc.rpc_sync("worker1", _echo, (_bytes(MIB),))
    while not (_connection().device_placed and _connection().device_taken):
        rpc.rpc_sync("worker1", _echo, (_bytes(MIB),))


def _left() -> tuple[int, int]:
    """Return the bytes that torch has allocated in this process, and that the device has left."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]


# -- values ----------------------------------------------------------------------------------------------


def _values() -> None:
    _until_used()
    for size in (64 * KIB, MIB, 16 * MIB):
        sent, before = _bytes(size), _connection()
        back = rpc.rpc_sync("worker1", _echo, (sent,))
        assert back.device == sent.device
        assert torch.equal(back, sent)
        after = _connection()
        assert after.device_placed - before.device_placed >= size
        assert after.device_taken - before.device_taken >= size


def test_tensors_are_sent_through_device_memory_in_both_directions() -> None:
    _run(_values)


def _renumbered(rank: int, world_size: int, store: str, uuids: list[str]) -> Any:
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuids if rank == 0 else reversed(uuids))
    maps = {"device_maps": {"worker1": {"cuda:0": f"cuda:{len(uuids) - 1}"}}}
    return rpc_main(rank, world_size, _on_rank_0, (_values,), f"file://{store}", maps)


def test_tensors_stay_on_their_gpu_if_the_workers_number_the_gpus_differently(tmp_path: Path) -> None:
    """With one GPU, only the name of the GPU differs from that in other tests."""
    count = torch.cuda.device_count()
    found = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    uuids = [f"GPU-{each.removeprefix('GPU-')}" for each in found]
    # Without a check for leaks, which would count the devices, and so open CUDA, before the ranks set their orders.
    run_group(_renumbered, 2, str(tmp_path / "store"), uuids, timeout=110.0, env=ENV, leak_wait=None)


def _without_export() -> bool:
    ones = _bytes(MIB)
    if not any(each["is_expandable"] for each in torch.cuda.memory_snapshot()):
        return False
    for _ in range(5):
        assert torch.equal(rpc.rpc_sync("worker1", _echo, (ones,)), ones)
    assert (_connection().device_placed, _connection().device_taken) == (0, 0)
    return True


def test_expandable_segments_are_sent_through_host_memory() -> None:
    is_expandable, _ = _run(_without_export, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    if not is_expandable:
        pytest.skip("this system or torch has no expandable segments")


# -- memory ----------------------------------------------------------------------------------------------


def _kill_receiver(value: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_sender(value: torch.Tensor) -> torch.Tensor:
    """Kill this process as soon as the block of the answer was filled: the answer is not sent."""
    worker = current_worker()
    assert worker is not None
    memory: Any = worker.agent.device_memory
    memory.fill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return value


def _survive(rank: int, world_size: int, kill: Callable[[torch.Tensor], Any]) -> None:
    if rank:
        return
    torch.equal(_bytes(MIB), _bytes(MIB))  # load the kernels, which use memory of the device
    allocated, free = _left()
    _until_used()
    large = _bytes(LARGE)
    back = rpc.rpc_sync("worker1", _echo, (large,))
    with pytest.raises(PeerDiedError) as caught:
        rpc.rpc_sync("worker1", kill, (large,))
    assert caught.value.maybe_executed is True
    assert torch.equal(back, large)
    del back, large, caught

    def is_back() -> bool:
        now = _left()
        return now[0] <= allocated and now[1] >= free - LARGE // 4

    until(is_back)


@pytest.mark.parametrize("kill", [_kill_receiver, _kill_sender])
def test_memory_comes_back_after_a_process_that_sends_or_receives_was_killed(
    kill: Callable[..., Any],
) -> None:
    results = rpc_group(_survive, 2, kill, timeout=110.0, options=MAPS, env=ENV, may_die={1})
    assert results == [None, Died(-signal.SIGKILL)]


def _leave(nbytes: int) -> None:
    """Let torch allocate at most ``nbytes`` more bytes on this process's device; -1: all of the device."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    part = 1.0 if nbytes < 0 else min(1.0, (torch.cuda.memory_reserved() + nbytes) / total)
    torch.cuda.set_per_process_memory_fraction(part)


def _without_memory() -> None:
    _until_used()
    large = _bytes(64 * MIB)
    assert torch.equal(rpc.rpc_sync("worker1", _echo, (large,)), large)
    rpc.rpc_sync("worker1", _leave, (MIB,))
    with pytest.raises(LimitError, match=rf"no memory on cuda:0 for tensors of {64 * MIB} bytes") as caught:
        rpc.rpc_sync("worker1", _echo, (large,))
    assert caught.value.maybe_executed is False
    rpc.rpc_sync("worker1", _leave, (-1,))
    assert torch.equal(rpc.rpc_sync("worker1", _echo, (large,)), large)
    until(lambda: _connection().device_lent == 0)


def test_without_memory_at_the_receiver_a_limit_error_names_device_and_size() -> None:
    _run(_without_memory)
