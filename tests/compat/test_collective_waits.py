"""Waits for other ranks end at their time-out, or if a rank waits in another round; a graceful shutdown has no time-out."""

from __future__ import annotations

import os
import re
import signal
import threading

import pytest

import actorrpc
from actorrpc.compat import rpc
from actorrpc.errors import PeerDiedError, RpcTimeoutError
from actorrpc.wire import keys
from tests.actors.e2e.kit import until
from tests.ranks import GroupError, run_group, unused_path

_gate = threading.Event()


def _open_gate() -> None:
    _gate.set()


def _join(rank: int, world_size: int, store: str, rpc_timeout: float) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", rpc_timeout=rpc_timeout)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)


def _barrier(world_size: int) -> None:
    """Wait for all ranks as torch's own code does: torch has no public barrier of RPC."""
    rpc.api._barrier([f"worker{rank}" for rank in range(world_size)])


def _all_gather(value: int, timeout: float | None = None) -> dict[str, int]:
    """Return the values of all ranks, as torch's own code does."""
    given = {} if timeout is None else {"timeout": timeout}
    found: dict[str, int] = rpc.api._all_gather(value, **given)
    return found


def _raise_before_a_barrier(rank: int, world_size: int, store: str) -> None:
    _join(rank, world_size, store, 4.0)
    try:
        if rank == 0:
            raise KeyError("the original exception")
        _barrier(world_size)
    finally:
        rpc.shutdown()
        print("left together")


def test_a_rank_that_raises_before_a_barrier_ends_the_group_with_a_deadlock_error() -> None:
    with pytest.raises(GroupError) as caught:
        run_group(_raise_before_a_barrier, 2, unused_path("barrier"))
    first, second = caught.value.failures[0], caught.value.failures[1]
    # The exception kept its traceback, and was also logged while worker0 waited.
    assert re.match(r"Traceback.*in _raise_before_a_barrier.*KeyError: 'the original exception'", first, re.S)
    assert re.search(r"'worker0' waits for other workers in .*\(shutdown\).*Traceback.*KeyError", first, re.S)
    assert re.search(
        r"DeadlockError: worker 'worker1' has waited in _barrier .* for worker 'worker0'", second
    )
    assert re.search(r"'worker0' has waited in \S+ \(shutdown\) .* for 'worker1'", second)
    assert "left together" in first
    assert "left together" in second


def _waits_in(round: str, names: set[str]) -> bool:
    """Return whether exactly these workers have a thread that waits in the round."""
    found = {
        worker.name
        for worker in actorrpc.state(30, stacks=True).workers
        for thread in worker.threads
        if any(round in each for each in thread.waits_for)
    }
    return found == names


def _die_before_a_barrier(rank: int, world_size: int, store: str) -> None:
    _join(rank, world_size, store, 30.0)
    if rank == 2:
        until(lambda: _waits_in("_barrier of all 3 workers (round 1)", {"worker0", "worker1"}))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDiedError, match=r"_barrier of all 3 workers \(round 1\) .*worker2 died before"):
        _barrier(world_size)
    rpc.shutdown(graceful=False)


def test_a_barrier_error_names_the_dead_rank_and_stacks_name_the_barrier() -> None:
    run_group(_die_before_a_barrier, 3, unused_path("dies"), may_die=[2])
    keys.sweep()  # the files of the process that died


def _give_up(rank: int, world_size: int, store: str) -> None:
    _join(rank, world_size, store, 30.0)
    if rank == 0:
        with pytest.raises(RpcTimeoutError, match=r"\['worker1'\] timed out .*'worker0' has waited for them"):
            _all_gather(0, timeout=0.2)
        rpc.rpc_sync("worker1", _open_gate)
    else:
        _gate.wait()
        with pytest.raises(RpcTimeoutError, match=r"the others had given up _all_gather of all 2 workers"):
            _all_gather(1)
    assert _all_gather(rank) == {"worker0": 0, "worker1": 1}
    rpc.shutdown()


def test_an_all_gather_that_times_out_does_not_disturb_the_next_one() -> None:
    run_group(_give_up, 2, unused_path("gather"))


def _work_longer_than_the_time_out(rank: int, world_size: int, store: str) -> None:
    _join(rank, world_size, store, 0.5)
    if rank == 0:
        threading.Event().wait(1.5)
        assert rpc.rpc_sync("worker1", max, (1, 2)) == 2
    rpc.shutdown()


def test_a_graceful_shutdown_waits_longer_than_the_rpc_timeout() -> None:
    run_group(_work_longer_than_the_time_out, 2, unused_path("passive"))


def _wait_without_a_bound(rank: int, world_size: int, store: str) -> None:
    _join(rank, world_size, store, 1.0)
    try:
        if rank == 0:
            _all_gather(0, timeout=0)
    finally:
        rpc.shutdown()


@pytest.mark.slow
def test_endless_waits_of_two_ranks_for_each_other_raise_deadlock_error() -> None:
    # The rank that finds the cycle names both waits.
    both = (
        r"DeadlockError(?=.* has waited in _all_gather of all 2 workers)(?=.* has waited in \S+ \(shutdown\))"
    )
    with pytest.raises(GroupError, match=both):
        run_group(_wait_without_a_bound, 2, unused_path("unbound"))
