"""Faults in groups of real processes: calls, RRefs, autograd, actors; set by the environment and by options."""

from __future__ import annotations

import operator
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import autograd, rpc, testing
from actorrpc.errors import ConfigError, RpcTimeoutError
from actorrpc.rpc import api
from actorrpc.testing import leaks, processes
from tests.actors.e2e.kit import until
from tests.forks import exit_code, fork
from tests.ranks import rpc_group, run_group

DAY = 86_400.0


class Counter:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def add(self, number: int) -> list[int]:
        """Append a number; return all numbers."""
        self.seen.append(number)
        return self.seen


def _forks() -> int:
    return int(api.references().table.debug_info()["num_forks"])


# -- calls and RRefs -------------------------------------------------------------------------------


def calls(rank: int, world_size: int) -> None:
    if rank:
        return
    for to in ("worker1", "worker0"):
        assert (
            rpc.rpc_sync(to, operator.mul, (1, 1)) == 1
        )  # opens the connection, because the next calls have short time-outs
        with testing.drop("call", function=operator.add, total=2) as lost:
            with pytest.raises(RpcTimeoutError) as caught:
                rpc.rpc_sync(to, operator.add, (1, 2), timeout=0.03)
            assert caught.value.maybe_executed
            future = rpc.rpc_async(to, operator.add, (1, 2), timeout=0.03)
            assert rpc.rpc_sync(to, operator.mul, (1, 2)) == 2
            with pytest.raises(RpcTimeoutError):
                future.wait()
            assert rpc.rpc_sync(to, operator.add, (1, 2)) == 3
        assert lost.counts == {"call": 2}
    assert rpc.rpc_sync("worker1", operator.add, (1, 2)) == 3
    assert not api.group().agent.hooks.active


def rrefs(rank: int, world_size: int) -> None:
    if rank:
        return
    for to in ("worker1", "worker0"):
        with testing.drop("remote", function="add", at_once=True) as lost:
            rref = rpc.remote(to, operator.add, (1, 2))
            with pytest.raises(RpcTimeoutError, match="lost on the way"):
                rref.to_here()
        assert lost.count == 1
        rref = rpc.remote(to, Counter)
        with testing.drop(
            "call", function="Counter.add", at_once=True
        ) as wrong:  # of a call through a proxy, only the name of the method is known
            assert rref.rpc_sync().add(1) == [1]
        with testing.drop("call", function="add", at_once=True) as lost, pytest.raises(RpcTimeoutError):
            rref.rpc_sync().add(2)
        assert (wrong.count, lost.count) == (0, 1)
        with testing.drop("to_here", at_once=True) as lost:
            if to == "worker1":
                with pytest.raises(RpcTimeoutError, match="to_here"):
                    rref.to_here()
            else:
                rref.to_here()  # the value is local, so no message is sent
        assert lost.count == (to == "worker1")
        assert rref.to_here().seen == [1]


def deletes(rank: int, world_size: int) -> None:
    """A lost message of the RRef protocol is sent again: by the protocol, or when the fault ends."""
    if rank:
        return
    with testing.drop("rref_delete", times=1) as once:
        rref = rpc.remote("worker1", Counter)
        rref.to_here()
        del rref
        until(lambda: once.count == 1)
        until(lambda: not rpc.rpc_sync("worker1", _forks))
    with testing.drop("rref_delete") as always:
        rref = rpc.remote("worker1", Counter)
        rref.to_here()
        del rref
        until(lambda: always.count)
        assert rpc.rpc_sync("worker1", _forks) == 1
    until(lambda: not rpc.rpc_sync("worker1", _forks))
    with testing.delay("rref_*", seconds=DAY) as late:
        rref = rpc.remote("worker1", Counter)
        rref.to_here()
        del rref
        until(lambda: late.held)
        assert rpc.rpc_sync("worker1", _forks) == 1
    until(lambda: not rpc.rpc_sync("worker1", _forks))


def keep(rref: rpc.RRef[Any]) -> Any:
    return rref.to_here()


def forks(rank: int, world_size: int) -> None:
    """RRefs in lost calls and lost answers are released."""
    if rank:
        return
    mine = rpc.RRef(7)
    with testing.drop("call", function=keep, at_once=True), pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("worker1", keep, (mine,))
    assert _forks() == 0
    theirs = rpc.remote("worker2", operator.add, (1, 2))
    with testing.drop("call", function=keep, at_once=True), pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("worker1", keep, (theirs,))
    with testing.delay("call", "answer", "rref_*", seconds=0.001):
        assert rpc.rpc_sync("worker1", keep, (theirs,)) == 3
        assert rpc.rpc_sync("worker1", keep, (mine,)) == 7
    until(lambda: not _forks())


_lost_answers = testing.drop("answer", function=keep)


def _start_losing_answers() -> None:
    _lost_answers.start()


def _stop_losing_answers() -> int:
    _lost_answers.stop()
    return _lost_answers.count


def receipts(rank: int, world_size: int) -> None:
    """Confirmations that are attached to an answer are not lost with it."""
    if rank:
        return
    theirs = rpc.remote("worker1", operator.add, (1, 2))  # the owner's confirmation is attached to the answer
    assert theirs.to_here() == 3
    rpc.rpc_sync("worker1", _start_losing_answers)
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("worker1", keep, (theirs,), timeout=0.5)
    until(lambda: not int(api.references().table.debug_info()["num_pending_children"]))
    assert rpc.rpc_sync("worker1", _stop_losing_answers) == 1


# -- autograd and actors ---------------------------------------------------------------------------


def _square(t: torch.Tensor) -> torch.Tensor:
    return t * t


def gradients(rank: int, world_size: int) -> None:
    if rank:
        return
    leaf = torch.ones(3, requires_grad=True)

    def run() -> torch.Tensor:
        with autograd.context() as id:
            loss = rpc.rpc_sync("worker1", _square, (rpc.rpc_sync("worker2", _square, (leaf,)),)).sum()
            autograd.backward(id, [loss])
            return autograd.get_gradients(id)[leaf]

    with testing.drop("autograd_*", at_once=True) as lost, pytest.raises(RuntimeError):
        run()
    assert lost.count
    with testing.delay("autograd_*", seconds=0.001) as late:
        assert torch.equal(run(), torch.full((3,), 4.0))
    assert late.counts["autograd_gradient"]
    assert late.counts["autograd_release"]
    assert torch.equal(run(), torch.full((3,), 4.0))


def actors(rank: int, world_size: int) -> None:
    if rank:
        return
    for worker in ("worker1", "worker0"):
        counter: Any = actorrpc.remote(Counter).options(worker=worker).remote()
        assert actorrpc.get(counter.add.remote(0)) == [0]
        with (
            testing.drop("actor_call", function=Counter.add, at_once=True) as lost,
            pytest.raises(RpcTimeoutError),
        ):
            actorrpc.get(counter.add.remote(1))
        assert lost.counts == {"actor_call": 1}
        # The first call is delayed, and the calls behind it wait, because calls of an actor keep their order.
        with testing.delay("actor_call", function="add", total=1, seconds=DAY) as late:
            refs = [counter.add.remote(number) for number in range(2, 6)]
            assert late.count == 1
            assert late.held == 4
        assert actorrpc.get(refs[-1]) == [0, 2, 3, 4, 5]
        assert actorrpc.get(refs[0])[:2] == [0, 2]
        actorrpc.kill(counter)


def everything(rank: int, world_size: int) -> None:
    for part in (calls, rrefs, deletes, forks, receipts, gradients, actors):
        part(rank, world_size)


def test_faults_drop_and_delay_messages_of_calls_rrefs_autograd_and_actors() -> None:
    rpc_group(everything, 3)


# -- of whole workers ------------------------------------------------------------------------------


_counted = 0


def counted() -> int:
    global _counted
    _counted += 1
    return _counted


def lossy(rank: int, world_size: int) -> None:
    if rank == 0:
        while True:  # a call that times out before it is executed has no answer to be lost
            try:
                number = rpc.rpc_sync("worker1", counted, timeout=0.03)
                break
            except RpcTimeoutError:
                assert rpc.rpc_sync("worker1", operator.mul, (1, 2)) == 2
        assert number > 2


def test_actorrpc_fault_sets_faults_of_workers() -> None:
    rpc_group(lossy, 2, env={"ACTORRPC_FAULT": "drop answer function=counted total=2 on=worker1"})


def test_an_invalid_actorrpc_fault_makes_init_rpc_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTORRPC_FAULT", "drop everything")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    with pytest.raises(ConfigError, match=r"ACTORRPC_FAULT=.*there are: call, remote"):
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)


def optional(rank: int, world_size: int, store: str) -> None:
    fault = testing.drop("call", function="add", total=2, at_once=True, on="worker0")
    early = testing.delay("call", function="mul", seconds=0.001)
    options = testing.FaultyRpcBackendOptions(init_method=store, faults=[fault])
    with early:
        assert early.active
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
        assert fault.active
        other = f"worker{1 - rank}"
        assert rpc.rpc_sync(other, operator.mul, (1, 2)) == 2
        for _ in range(2 - 2 * rank):
            with pytest.raises(RpcTimeoutError):
                rpc.rpc_sync(other, operator.add, (1, 2))
        assert rpc.rpc_sync(other, operator.add, (1, 2)) == 3
        rpc.shutdown()
        # The faults end with the agent.
        assert not fault.active
        assert not early.active
    assert (fault.count, early.count) == (2 - 2 * rank, 1)


def test_faults_from_options_or_started_before_init_rpc_end_at_shutdown() -> None:
    run_group(optional, 2, f"file://{tempfile.mkdtemp(dir=processes.scratch())}/store")


def embedded(rank: int, world_size: int) -> None:
    os.environ["ACTORRPC_FAULT"] = "drop answer function=Counter.add total=1 at_once=1"
    actorrpc.init()
    try:
        counter: Any = actorrpc.remote(Counter).remote()
        with pytest.raises(RpcTimeoutError, match="answer of a call was lost"):
            actorrpc.get(counter.add.remote(1))
        assert actorrpc.get(counter.add.remote(2)) == [1, 2]
    finally:
        actorrpc.shutdown()


@pytest.mark.slow
def test_processes_of_the_embedded_cluster_use_the_faults_of_the_environment() -> None:
    run_group(embedded, 1)


def ended(rank: int, world_size: int) -> None:
    """Delayed messages do not delay a graceful shutdown; they are sent before it."""
    if rank == 0:
        fault = testing.delay("call", "answer", seconds=DAY).start()
        futures = [rpc.rpc_async(to, operator.add, (1, 2)) for to in ("worker1", "worker0") for _ in range(3)]
        assert fault.held == 6
        rpc.shutdown()
        assert fault.held == 0
        assert not fault.active
        assert all(future.done() for future in futures)
    else:
        rpc.shutdown()


def forked(rank: int, world_size: int) -> None:
    """A forked child has no faults, and can start new ones."""
    with testing.drop("call", at_once=True) as lost:

        def drop_none() -> None:
            with testing.drop("call"):
                pass

        assert exit_code(fork(drop_none)) == 0
        assert lost.active


@pytest.mark.parametrize(("program", "workers"), [(ended, 2), (forked, 1)])
def test_faults_end_at_shutdown_and_in_forked_children(program: Callable[..., None], workers: int) -> None:
    rpc_group(program, workers)


# -- leaks -------------------------------------------------------------------------------------------


_kept: list[Any] = []


def _keep(rref: Any) -> None:
    _kept.append(rref)


def _forget() -> None:
    _kept.clear()


def held_rrefs(rank: int, world_size: int) -> None:
    if rank:
        return
    assert rpc.rpc_sync("worker1", operator.add, (1, 2)) == 3
    before = leaks.LeakSnapshot.capture(whole_session=False)
    rref = rpc.remote("worker1", operator.add, (1, 2))
    assert rref.to_here() == 3
    rpc.rpc_sync("worker1", _keep, (rpc.RRef(7),))
    found = leaks.find_leaks(before)
    rrefs = [each for each in found.others if "RRef" in each]
    assert rrefs == [
        "RRef of a value of another worker (1 of them)",
        "value of this worker that other workers have an RRef to (1 of them)",
    ]
    assert "RRef of a value" in str(found)
    del rref
    rpc.rpc_sync("worker1", _forget)
    assert not any("RRef" in each for each in leaks.settle(before, 2.0).others)


@pytest.mark.slow
def test_held_rrefs_are_reported_until_they_are_released() -> None:
    rpc_group(held_rrefs, 2)
