"""Large objects of another host are fetched once per host and then shared.

Most tests use processes of one host that believe to be on two; the last use network namespaces.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import rpc
from actorrpc.actors.refs import host_copies
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.rpc import rref as rrefs
from tests.actors.two_hosts import run
from tests.fake_devices import FakeMemory
from tests.faults.hosts import Network, host_group, needs_hosts

_LARGE = 1 << 17  # floats: 512 KiB

_LOST = r"the value of put\(Tensor\) is lost: its source, worker 'worker1', has ended"

_kept: list[Any] = []
_answers: Counter[str] = Counter()


def _count() -> None:
    """Count the kinds of answers that the owner of objects sends, in this process."""
    answer = host_copies._answer

    def counted(*args: Any) -> Any:
        found = answer(*args)
        _answers[type(found).__name__] += 1
        return found

    host_copies._answer = counted


def _run(work: Callable[[], Any], world_size: int, *, here: int = 1, may_die: tuple[int, ...] = ()) -> None:
    run(work, world_size, here=here, prepare=_count, finish=_drop_kept, may_die=may_die)


def _read(box: list[ObjectRef[Any]]) -> tuple[float, bool]:
    """Read a value, change the read copy, and return the value's sum and whether its memory is shared on this host."""
    (ref,) = box
    value = actorrpc.get(ref)
    total = float(value.sum())
    value += 1
    _kept.append(ref)
    snapshot = ref._settled().value_or_none
    return total, snapshot.stored is not None


def _read_into(box: list[ObjectRef[Any]]) -> float:
    return float(box[0].read_into(torch.empty(_LARGE)).sum())


def _put(number: float) -> ObjectRef[torch.Tensor]:
    return actorrpc.put(torch.full((_LARGE,), number))


def _drop_kept() -> None:
    _kept.clear()


def _check_one_copy_is_shared() -> None:
    ref = actorrpc.put(torch.ones(_LARGE))
    first = rpc.rpc_sync("worker1", _read, args=([ref],))
    assert first == (_LARGE, False)
    for worker in ("worker2", "worker3", "worker1", "worker2"):
        total, shared = rpc.rpc_sync(worker, _read, args=([ref],))
        assert total == _LARGE
        assert shared or worker == "worker1", worker
    assert rpc.rpc_sync("worker3", _read_into, args=([ref],)) == _LARGE
    # The bytes were sent once, to worker 1. The other workers were told that worker 1 has a copy.
    assert _answers["Snapshot"] == 1, _answers
    assert _answers["CopyOnHost"] == 2, _answers
    rpc.rpc_sync("worker1", _drop_kept)
    # Worker 1 has no copy any longer. Worker 2, which knows of it, asks there in vain and gets the bytes from the
    # owner.
    rpc.rpc_sync("worker2", _drop_kept)
    assert rpc.rpc_sync("worker2", _read, args=([ref],))[0] == _LARGE
    assert _answers["Snapshot"] == 2, _answers


def test_readers_on_a_host_share_the_copy_that_the_first_one_fetched() -> None:
    _run(_check_one_copy_is_shared, 4)


@actorrpc.remote
class Maker:
    def total(self, value: torch.Tensor) -> float:
        return float(value.sum())


@actorrpc.remote(concurrency_groups={"control": 1})
class Gate:
    def __init__(self) -> None:
        self.opened = threading.Event()

    def make(self) -> torch.Tensor:
        assert self.opened.wait(30.0)
        return torch.ones(_LARGE)

    @actorrpc.method(concurrency_group="control")
    def open(self) -> None:
        self.opened.set()


def _check_pending_readers_share() -> None:
    gate = Gate.options(worker="worker0").remote()
    ref = gate.make.remote()
    found = [rpc.rpc_async(f"worker{rank}", _read, args=([ref],)) for rank in (1, 2, 3)]
    actorrpc.get(gate.open.remote())
    assert [each.wait()[0] for each in found] == [_LARGE] * 3
    assert _answers["Snapshot"] == 1, _answers
    assert _answers["CopyOnHost"] == 2, _answers


@pytest.mark.slow
def test_readers_that_ask_before_the_value_exists_share_one_copy() -> None:
    _run(_check_pending_readers_share, 4)


def _exit() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _check_death_of_holder() -> None:
    ref = actorrpc.put(torch.ones(_LARGE))
    assert rpc.rpc_sync("worker1", _read, args=([ref],))[0] == _LARGE
    left = rpc.rpc_sync("worker1", _put, args=(2.0,))
    with pytest.raises(actorrpc.PeerDiedError):
        rpc.rpc_sync("worker1", _exit)
    assert rpc.rpc_sync("worker2", _read, args=([ref],))[0] == _LARGE
    assert _answers["Snapshot"] == 2, _answers
    with pytest.raises(actorrpc.PeerDiedError, match=_LOST):
        actorrpc.get(left)
    with pytest.raises(actorrpc.PeerDiedError, match=_LOST):
        rpc.rpc_sync("worker2", _read, args=([left],))


@pytest.mark.slow
def test_a_value_is_fetched_again_if_the_worker_with_the_copy_dies() -> None:
    _run(_check_death_of_holder, 4, may_die=(1,))


def _check_death_of_first_reader() -> None:
    asked = threading.Semaphore(0)
    fetch = rrefs._fetch

    def counted(value: Any) -> Any:
        found = fetch(value)
        asked.release()
        return found

    rrefs._fetch = counted
    gate = Gate.options(worker="worker0").remote()
    ref = gate.make.remote()
    dies = rpc.rpc_async("worker1", _read, args=([ref],))
    assert asked.acquire(timeout=30)
    others = [rpc.rpc_async(f"worker{rank}", _read, args=([ref],)) for rank in (2, 3)]
    for _ in others:
        assert asked.acquire(timeout=30)
    with pytest.raises(actorrpc.PeerDiedError):
        rpc.rpc_sync("worker1", _exit)
    with pytest.raises(actorrpc.PeerDiedError):
        dies.wait()
    actorrpc.get(gate.open.remote())
    assert [each.wait()[0] for each in others] == [_LARGE] * 2


@pytest.mark.slow
def test_other_readers_get_the_value_if_the_first_one_dies_while_fetching() -> None:
    _run(_check_death_of_first_reader, 4, may_die=(1,))


def _pass_on(box: list[ObjectRef[Any]], *workers: str) -> list[float]:
    """Pass a reference on to other workers, from one to the next; the last one returns the first element of the value."""
    if workers:
        found: list[float] = rpc.rpc_sync(workers[0], _pass_on, args=(box, *workers[1:]))
        return found
    return [float(actorrpc.get(box[0])[0])]


def _read_first(box: list[ObjectRef[Any]]) -> float:
    return float(box[0].read_into(torch.empty(_LARGE))[0])


def _use_fake_devices(folder: Path) -> None:
    rrefs.runtime().agent.device_memory = FakeMemory(folder)


def _check_shared_tensor(folder: Path | None = None) -> None:
    for worker in ("worker0", "worker1", "worker2") if folder is not None else ():
        rpc.rpc_sync(worker, _use_fake_devices, args=(folder,))
    tensor = torch.ones(_LARGE)
    ref = actorrpc.share(tensor)
    for _ in range(2):
        with pytest.raises(
            actorrpc.errors.SerializationError,
            match=r"a shared tensor on cpu, of 524288 bytes, of worker 'worker0' on host .* cannot be mapped: "
            r"worker 'worker2' on host .* (shares no memory|is on another host).*put\(tensor\)",
        ):
            _pass_on([ref], "worker2")
        assert rpc.rpc_sync("worker2", _read_first, args=([ref],)) == 1
        assert _pass_on([ref], "worker2", "worker1") == [1]
    assert _pass_on([ref], "worker1", "worker2", "worker1") == [1]


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "fake"])
def test_a_shared_tensor_cannot_be_mapped_on_another_host_but_read_and_passed_on_there(
    on_device: bool, tmp_path: Path
) -> None:
    _run(partial(_check_shared_tensor, tmp_path if on_device else None), 3, here=2)


# -- separate hosts: network namespaces ------------------------------------------------------------------------------


def _check_two_hosts(rank: int, world_size: int) -> None:
    _count()
    if rank:
        return
    _check_one_copy_is_shared()
    workers = [f"worker{each}" for each in range(1, world_size)]
    _answers.clear()
    readers = [Maker.options(worker=each).remote() for each in workers]
    near = actorrpc.broadcast(actorrpc.put(torch.ones(_LARGE)), readers)
    found = actorrpc.get([each.total.remote(ref) for each, ref in zip(readers, near, strict=True)])
    assert found == [_LARGE] * len(workers)
    assert _answers["Snapshot"] <= 1, _answers
    for each in workers:
        rpc.rpc_sync(each, _drop_kept)


@needs_hosts
@pytest.mark.slow
@pytest.mark.limit(90)
def test_a_large_object_is_sent_once_to_another_host() -> None:
    with Network("a", "b") as network:
        host_group(_check_two_hosts, network, ["a", "b", "b", "b"])
