"""InProcessCluster: several workers in one process, with virtual time."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import _time, autograd, errors, rpc, testing
from actorrpc.testing import InProcessCluster
from tests.forks import exit_code, fork

pytestmark = pytest.mark.limit(60)

_ROUNDED = 1e-6  # seconds: the rounding error of sums of monotonic times
_gates: dict[str, threading.Event] = {}
_acting: dict[str, Callable[[], AbstractContextManager[object]]] = {}


def worker_name() -> str:
    return rpc.get_worker_info().name


def worker_name_on_a_thread() -> str:
    found: list[str] = []

    def run() -> None:
        with _acting["way"]():
            found.append(worker_name())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def names_of_self_and(other: str) -> tuple[str, str]:
    return worker_name(), rpc.rpc_sync(other, worker_name)


def add(a: Any, b: Any) -> Any:
    return a + b


def hold(name: str) -> str:
    """Block until the test opens the gate, without a wait of actorrpc."""
    _gates[name].wait(30.0)
    return name


@actorrpc.remote
class Actor:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> tuple[int, str]:
        self.count += 1
        return self.count, worker_name()

    async def name(self) -> str:
        return worker_name()


@pytest.fixture
def fault_filter() -> Iterator[str]:
    name = f"gate{random.random()}"
    _gates[name] = threading.Event()
    yield name
    _gates.pop(name).set()


# -- workers -------------------------------------------------------------------------------------------


def test_each_worker_calls_executes_and_runs_actors_under_its_own_name() -> None:
    with InProcessCluster(["a", "b", "c"]) as cluster:
        assert [worker.name for worker in cluster] == ["a", "b", "c"]
        assert len(cluster) == 3
        for one in cluster:
            assert one.run(worker_name) == one.name
            for other in cluster:
                assert one.rpc_sync(other.name, worker_name) == other.name
                assert one.rpc_async(other.rank, worker_name).wait() == other.name
        assert cluster["a"].rpc_sync("b", names_of_self_and, ("c",)) == ("b", "c")
        ways = {"a": contextlib.nullcontext, "c": lambda: cluster["c"]}
        for name, way in ways.items():
            _acting["way"] = way
            assert cluster["a"].rpc_sync("b", worker_name_on_a_thread) == name
        assert cluster["c"].rpc_sync("a", add, (torch.ones(3), 1)).tolist() == [2.0, 2.0, 2.0]
        actor = Actor.options(worker="c").remote()  # type: ignore[attr-defined]
        assert actorrpc.get(actor.add.remote()) == (1, "c")
        assert actorrpc.get(actor.name.remote()) == "c"
        with cluster["b"]:
            assert actorrpc.get(actor.add.remote()) == (2, "c")


def test_calls_of_the_test_come_from_the_first_worker_or_the_one_of_a_with_block() -> None:
    with InProcessCluster() as cluster:
        assert rpc.is_initialized()
        assert worker_name() == "worker0"
        with cluster["worker1"]:
            assert worker_name() == "worker1"
            with cluster["worker0"]:
                assert worker_name() == "worker0"
            assert rpc.rpc_sync("worker0", names_of_self_and, ("worker1",)) == ("worker0", "worker1")
        assert worker_name() == "worker0"
        assert [info.name for info in rpc.get_worker_infos()] == ["worker0", "worker1"]
    assert not rpc.is_initialized()


# -- time ------------------------------------------------------------------------------------------------


class Layer:
    def __init__(self, weight: float) -> None:
        self.weight = torch.full((3,), weight, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * self.weight)

    def gradient(self, context: int) -> torch.Tensor:
        return autograd.get_gradients(context)[self.weight]


def test_distributed_autograd_works_among_the_workers() -> None:
    """The gradients equal those of local autograd."""
    x = torch.linspace(0.1, 0.7, 3, requires_grad=True)
    with InProcessCluster(3):
        layers = [rpc.remote(to, Layer, (weight,)) for to, weight in (("worker1", 0.5), ("worker2", 1.5))]
        with autograd.context() as context:
            y = layers[0].rpc_sync().forward(x)
            autograd.backward(context, [layers[1].rpc_sync().forward(y).sum()])
            found = [
                autograd.get_gradients(context)[x],
                *(each.rpc_sync().gradient(context) for each in layers),
            ]
        del layers
    weights = [torch.full((3,), weight, requires_grad=True) for weight in (0.5, 1.5)]
    want = torch.autograd.grad(torch.sin(torch.sin(x * weights[0]) * weights[1]).sum(), (x, *weights))
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other)


def test_each_worker_can_be_shut_down_separately_on_the_real_clock() -> None:
    with InProcessCluster(3, clock="real") as cluster:
        with pytest.raises(RuntimeError, match="real time"):
            cluster.clock.advance(1.0)
        assert [each.name for each in cluster["worker1"].workers()] == ["worker0", "worker1", "worker2"]
        cluster["worker1"].run(rpc.shutdown, graceful=False)
        with pytest.raises(errors.NotInitializedError):
            cluster["worker1"].rpc_sync("worker0", worker_name)
        assert cluster["worker0"].rpc_sync("worker2", worker_name) == "worker2"
        left = threading.Thread(target=cluster["worker2"].run, args=(rpc.shutdown,))
        left.start()
        cluster["worker0"].run(rpc.shutdown)  # the two remaining workers wait for each other
        left.join()
        assert not rpc.is_initialized()
        with pytest.raises(errors.NotInitializedError):
            rpc.rpc_sync("worker2", worker_name)


def test_timeouts_expire_exactly_when_virtual_time_reaches_them_or_jumps_to_them(fault_filter: str) -> None:
    with InProcessCluster() as cluster:
        early = cluster["worker0"].rpc_async("worker1", hold, (fault_filter,), timeout=60.0)
        late = cluster["worker0"].rpc_async("worker1", hold, (fault_filter,), timeout=90.0)
        cluster.clock.advance(59.0)
        assert not early.done()
        cluster.clock.advance(1.0)
        assert early.done()
        assert not late.done()
        with pytest.raises(errors.RpcTimeoutError):
            early.wait()
        _gates[fault_filter].set()
        assert late.wait() == fault_filter
        assert cluster.clock.elapsed == pytest.approx(60.0, abs=1.0)
    with InProcessCluster(autojump=True) as cluster:
        _gates[fault_filter].clear()
        with pytest.raises(errors.RpcTimeoutError, match="60000 ms"):
            cluster["worker0"].rpc_sync("worker1", hold, (fault_filter,), timeout=60.0)
        assert 60.0 - _ROUNDED <= cluster.clock.elapsed < 61.0
        _gates[fault_filter].set()


def test_a_stopped_worker_is_suspect_and_then_dead_after_ten_virtual_seconds() -> None:
    with InProcessCluster(3) as cluster:
        seen: list[tuple[str, str, str]] = []
        one = cluster["worker0"]
        one.on_member_change(lambda worker, old, new, why: seen.append((worker.name, old, new)))
        assert [one.rpc_sync(name, worker_name) for name in ("worker1", "worker2")] == ["worker1", "worker2"]
        cluster.stop("worker1")
        call = one.rpc_async("worker1", worker_name, timeout=0)
        cluster.clock.advance(3.0)
        assert not seen
        cluster.clock.advance(2.0)
        assert seen == [("worker1", "alive", "suspect")]
        cluster.clock.advance(5.0)
        assert seen[1:] == [("worker1", "suspect", "dead")]
        with pytest.raises(errors.PeerDiedError, match="silent"):
            call.wait()
        assert one.rpc_sync("worker2", worker_name) == "worker2"


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_broken_session_may_resume_within_ten_virtual_seconds(comes_back: bool) -> None:
    with InProcessCluster() as cluster:
        one = cluster["worker0"]
        one.rpc_sync("worker1", worker_name)
        cluster.cut("worker0", "worker1")
        call = one.rpc_async("worker1", worker_name, timeout=60.0)
        assert cluster.reset("worker0", "worker1") == 1
        if comes_back:
            cluster.clock.advance(5.0)
            assert not call.done()
            cluster.heal("worker0", "worker1")
            cluster.clock.advance(5.0)
            assert call.wait() == "worker1"
        else:
            cluster.clock.advance(12.0)
            assert call.done()
            with pytest.raises(errors.PeerDiedError):
                call.wait()


def test_a_killed_worker_is_dead_at_once_for_all_others() -> None:
    with InProcessCluster(3) as cluster:
        one = cluster["worker0"]
        assert cluster["worker1"].rpc_sync("worker0", names_of_self_and, ("worker2",)) == (
            "worker0",
            "worker2",
        )
        cluster.kill("worker1")
        cluster.clock.advance(1.0)
        with pytest.raises(errors.PeerDiedError):
            one.rpc_sync("worker1", worker_name)
        with pytest.raises(errors.PeerDiedError):
            cluster["worker2"].rpc_sync("worker1", worker_name)
        with pytest.raises(errors.ShutdownError):
            cluster["worker1"].rpc_sync("worker0", worker_name)
        assert one.rpc_sync("worker2", worker_name) == "worker2"


# -- closing the cluster -----------------------------------------------------------------------------------


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_closing_the_cluster_after_an_error_leaves_no_threads_descriptors_or_patches(
    fault_filter: str,
) -> None:
    with InProcessCluster() as cluster:  # creates objects that exist once per process
        cluster["worker0"].rpc_sync("worker1", add, (torch.ones(1 << 16), 1))
    gc.collect()
    threads, files = _threads(), _files()
    for _ in range(3):
        with contextlib.suppress(ZeroDivisionError), InProcessCluster(3, autojump=True) as cluster:
            cluster["worker0"].rpc_sync("worker1", add, (torch.ones(1 << 16), 1))
            cluster["worker1"].remote("worker2", add, (1, 2)).to_here()
            cluster.kill("worker2")
            cluster.clock.sleep(20.0)
            call = cluster["worker0"].rpc_async("worker1", hold, (fault_filter,), timeout=0)
            _gates[fault_filter].set()
            raise ZeroDivisionError
        assert call.done()
        assert not rpc.is_initialized()
        gc.collect()
        assert _threads() == threads
        assert _files() == files
        assert _time.now is time.monotonic
        assert _time.sleep is time.sleep
        assert threading.Thread.start.__module__ == "threading"


# -- wrong use -----------------------------------------------------------------------------------------------


def test_wrong_use_raises_errors_that_say_why() -> None:
    cluster = InProcessCluster()
    with pytest.raises(RuntimeError, match="is new"):
        cluster["worker0"].rpc_sync("worker1", worker_name)
    with cluster:
        with pytest.raises(errors.UnknownWorkerError, match="worker0, worker1"):
            cluster["worker2"]
        with pytest.raises(errors.UnknownWorkerError):
            cluster.cut("worker0", "worker9")
        with pytest.raises(errors.ConfigError, match="two different workers"):
            cluster.cut("worker0", "worker0")
        for wrong in (-1.0, float("inf"), float("nan")):
            with pytest.raises(errors.ConfigError, match="never runs backwards"):
                cluster.clock.advance(wrong)
        for wrong in ("1", None, True):
            with pytest.raises(errors.WrongTypeError):
                cluster.clock.advance(wrong)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="another virtual clock"):
            testing.VirtualTime().start()
        with pytest.raises(RuntimeError, match="in-process cluster"):
            InProcessCluster().__enter__()
        with pytest.raises(RuntimeError, match="once"):
            cluster.__enter__()
        with pytest.raises(
            RuntimeError, match=r"drop\('answer'\) needs a worker.*InProcessCluster, which has cut\(\)"
        ):
            testing.drop("answer").start()  # faults of messages apply to a whole process
        with pytest.raises(RuntimeError, match="already initialized"):
            rpc.init_rpc("other", rank=0, world_size=1)
        assert cluster["worker0"].rpc_sync("worker1", worker_name) == "worker1"  # the cluster still works
    with pytest.raises(RuntimeError, match="is closed"):
        cluster["worker0"].rpc_sync("worker1", worker_name)
    with pytest.raises(RuntimeError, match="is closed"):
        cluster.cut("worker0", "worker1")
    with pytest.raises(RuntimeError, match="not in force"):
        cluster.clock.advance(1.0)
    cluster.close()


@pytest.mark.parametrize(
    ("workers", "options", "error"),
    [
        *[(workers, {}, "1 to 64 workers, not") for workers in (0, 65, [])],
        (["a", "a"], {}, "must have different names, not a, a"),
        *[(workers, {}, "must be a number, or a list of names") for workers in (True, "abc", None)],
        (2, {"clock": "real", "autojump": True}, "real time does not jump"),
        (2, {"transport": "unix"}, "decides on transport itself"),
        (2, {"heart": 1}, "unknown options among heart"),
    ],
)
def test_wrong_arguments_of_a_cluster_are_refused(workers: Any, options: Any, error: str) -> None:
    with pytest.raises((errors.ConfigError, errors.WrongTypeError), match=error):
        InProcessCluster(workers, **options)


def test_a_thread_that_keeps_running_is_named_if_virtual_time_cannot_pass() -> None:
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            pass

    with testing.VirtualTime(patience=0.1) as clock:
        thread = threading.Thread(target=spin, name="spinner")
        thread.start()
        try:
            with pytest.raises(RuntimeError, match="spinner in "):
                clock.advance(1.0)
        finally:
            over.set()
            thread.join()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_uses_the_real_time_and_is_no_worker() -> None:
    with InProcessCluster(2) as cluster, cluster["worker1"]:

        def check_child() -> None:
            assert _time.now is time.monotonic
            assert not rpc.is_initialized()
            with pytest.raises(RuntimeError, match="closed"):
                cluster["worker0"].run(worker_name)

        assert exit_code(fork(check_child)) == 0
        assert rpc.rpc_sync("worker0", worker_name) == "worker0"
