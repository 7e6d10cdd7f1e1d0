"""torch's profiles under the drop-in contain the events that other workers recorded for the profiled calls."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.distributed.rpc
from torch.autograd import profiler_legacy
from torch.profiler import record_function

from actorrpc import _torch, compat
from actorrpc.compat.translate import Future
from actorrpc.rpc import profiling
from actorrpc.rpc.functions import async_execution
from tests.announced import PROFILER
from tests.ranks import run_group

pytestmark = pytest.mark.prints(PROFILER)

KINDS = ["old", "autograd", "modern"]
_REMOTE = "#remote_op: "

_gate = threading.Event()


@contextlib.contextmanager
def joined(rank: int, size: int, path: str) -> Iterator[Any]:
    """Join a group under the drop-in; yield the module torch.distributed.rpc."""
    compat.install()
    rpc = torch.distributed.rpc
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    yield rpc
    rpc.shutdown()
    compat.uninstall()


def profile(kind: str, **how: Any) -> Any:
    if kind == "old":
        return profiler_legacy.profile(**how)
    return torch.autograd.profiler.profile(**how) if kind == "autograd" else torch.profiler.profile(**how)


def events_of(found: Any) -> list[Any]:
    return list(found.events() if isinstance(found, torch.profiler.profile) else found.function_events)


def one(found: Any, name: str) -> Any:
    [event] = [event for event in events_of(found) if event.name == name]
    return event


# -- functions called on workers --------------------------------------------------------------------------


def step(x: torch.Tensor) -> torch.Tensor:
    with record_function("##step##"):
        return torch.mul(torch.add(x, 1), 2)


def two_deep(to: str, x: torch.Tensor) -> Any:
    return torch.distributed.rpc.rpc_sync(to, step, (torch.neg(x),))


@async_execution
def elsewhere(to: str, x: torch.Tensor) -> Any:
    return torch.distributed.rpc.rpc_async(to, step, (torch.neg(x),)).then(lambda done: done.wait())


@async_execution
def not_waiting(to: str, x: torch.Tensor) -> Any:
    torch.distributed.rpc.rpc_async(to, wait_at_gate, (x,))
    return torch.distributed.rpc.rpc_async(to, step, (x,))


def leaving_one_behind(to: str, x: torch.Tensor) -> None:
    torch.distributed.rpc.rpc_async(to, wait_at_gate, (x,))
    raise LookupError("no")


@async_execution
def no_future(x: torch.Tensor) -> Any:
    return x


@async_execution
def failing_later() -> Any:
    future: Future[Any] = Future()
    future.set_exception(LookupError("later"))
    return future


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.add(x, 1)


def fail(x: torch.Tensor) -> None:
    torch.neg(x)
    raise LookupError("no")


def wait_at_gate(x: torch.Tensor) -> torch.Tensor:
    assert _gate.wait(30)
    return torch.neg(x)


def open_gate() -> None:
    _gate.set()


def close_gate() -> None:
    _gate.clear()


def with_its_own(x: torch.Tensor) -> list[str]:
    torch.abs(x)
    with profiler_legacy.profile() as found:
        torch.neg(x)
    assert found.function_events is not None
    return [event.name for event in found.function_events]


def many(x: torch.Tensor) -> int:
    for _ in range(4000):
        x = x.add_(1)
    return int(x[0])


def summed_up() -> torch.Tensor:
    """Run an operation whose range gloo ends on another thread, and a pass of DDP."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    x = torch.ones(2)
    torch.distributed.all_reduce(x)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(x).sum().backward()
    # DDP must not be the last user of the group: it would free the group with the GIL, for which gloo's thread may wait.
    del model
    torch.distributed.destroy_process_group()
    return x


def break_the_reader() -> None:
    """Make torch's reader of profiles fail in this process, as it does for unexpected records."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("unexpected")

    setattr(_torch, "parse_legacy", refuse)  # noqa: B010
    logging.getLogger("actorrpc").addHandler(logging.NullHandler())
    logging.getLogger("actorrpc").propagate = False


class Doubler:
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, 2)


# -- remote events -----------------------------------------------------------------------------------------


def _remote(rpc: Any, kind: str) -> None:
    x = torch.ones(2, 3)
    with profile(kind, record_shapes=True) as found:
        rpc.rpc_sync("worker1", step, (x,))
        rpc.rpc_async("worker1", torch.neg, (x,)).wait()
        rpc.rpc_async("worker1", scripted, (x,)).wait()
        doubler = rpc.remote("worker1", Doubler)
        doubler.rpc_sync().double(x)
        kept = rpc.remote("worker0", torch.sub, (x, 1))
        kept._get_profiling_future().wait()
    key = "rpc_sync#step(worker0 -> worker1)"
    call, inner = one(found, key), one(found, f"{key}{_REMOTE}aten::add")
    assert (inner.is_remote, inner.node_id, inner.input_shapes) == (True, 1, [[2, 3], [], []])
    assert call.time_range.start <= inner.time_range.start <= inner.time_range.end <= call.time_range.end
    assert not call.is_remote
    assert kind != "old" or call.node_id == 0
    block = one(found, f"{key}{_REMOTE}##step##")
    assert {f"{key}{_REMOTE}aten::{name}" for name in ("add", "mul")} <= {
        child.name for child in block.cpu_children
    }
    for name in (
        f"rpc_async#aten::neg(worker0 -> worker1){_REMOTE}aten::neg",
        f"rpc_async#__torch__.{__name__}.scripted(worker0 -> worker1){_REMOTE}aten::add",
        f"rpc_sync#double(worker0 -> worker1){_REMOTE}aten::mul",
    ):
        assert one(found, name).node_id == 1
    assert one(found, f"rpc_remote#aten::sub(worker0 -> worker0){_REMOTE}aten::sub").node_id == 0
    assert "remote_op: aten::add" in found.key_averages().table(max_name_column_width=200)


def _nested(rpc: Any, kind: str) -> None:
    for function in (two_deep, elsewhere):
        with profile(kind) as found:
            result = rpc.rpc_async("worker1", function, ("worker2", torch.ones(2))).wait()
        assert result.tolist() == [0.0, 0.0]
        outer = f"rpc_async#{function.__qualname__}(worker0 -> worker1)"
        mode = "sync" if function is two_deep else "async"
        inner = f"{outer}{_REMOTE}rpc_{mode}#step(worker1 -> worker2)"
        assert one(found, f"{outer}{_REMOTE}aten::neg").node_id == 1
        call, add = one(found, inner), one(found, f"{inner}{_REMOTE}aten::add")
        assert (call.is_remote, call.node_id) == (True, 1)
        assert (add.is_remote, add.node_id) == (True, 2)
        assert call.time_range.start <= add.time_range.start <= add.time_range.end <= call.time_range.end


def _errors(rpc: Any) -> None:
    x = torch.ones(2)
    with profile("old") as found:
        with pytest.raises(RuntimeError, match="no"):
            rpc.rpc_sync("worker1", fail, (x,))
        with pytest.raises(RuntimeError, match="later"):
            rpc.rpc_async("worker1", failing_later).wait()
        with pytest.raises(LookupError, match="no"):
            rpc.remote("worker1", fail, (x,)).to_here()
        with pytest.raises(TypeError, match="must return a"):
            rpc.rpc_sync("worker1", no_future, (x,))
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rpc.rpc_sync("worker1", wait_at_gate, (x,), timeout=0.05)
        with pytest.raises(ValueError, match="Cannot get WorkerInfo"):
            rpc.rpc_async(1.5, fail, (x,))
        rpc.rpc_sync("worker1", open_gate)
        rpc.rpc_sync("worker1", step, (x,))
    names = [event.name for event in events_of(found) if event.name.startswith("rpc_")]
    calls = sorted(name.partition("(")[0] for name in names if _REMOTE not in name)
    assert calls == [
        "rpc_async#failing_later",
        "rpc_remote#fail",
        *("rpc_sync#fail", "rpc_sync#no_future", "rpc_sync#open_gate", "rpc_sync#step"),
        "rpc_sync#wait_at_gate",
    ]
    assert {name.partition("(")[0] for name in names if _REMOTE in name} == {
        "rpc_remote#fail",
        "rpc_sync#step",
    }


def _collective(rpc: Any, kind: str) -> None:
    with profile(kind) as found:
        assert rpc.rpc_async("worker1", summed_up).wait().tolist() == [1.0, 1.0]
    key = f"rpc_async#summed_up(worker0 -> worker1){_REMOTE}"
    seen = {event.name.removeprefix(key) for event in events_of(found)}
    assert {"c10d::allreduce_", "gloo:all_reduce", "DistributedDataParallel.forward"} <= seen


def _unreadable(rpc: Any) -> None:
    rpc.rpc_sync("worker1", break_the_reader)
    with profile("modern") as found:
        assert rpc.rpc_sync("worker1", step, (torch.ones(2),)).tolist() == [4.0, 4.0]
    assert not [event for event in events_of(found) if event.is_remote]


def _under_way(rpc: Any, kind: str) -> None:
    x = torch.ones(2)
    with profile(kind) as found:
        future = rpc.rpc_async("worker1", wait_at_gate, (x,))
    with profile(kind) as other:
        rpc.rpc_sync("worker1", open_gate)
        future.wait()
        rpc.rpc_sync("worker1", close_gate)
    assert not one(found, "rpc_async#wait_at_gate(worker0 -> worker1)").is_remote
    assert not [event for event in events_of(found) if event.is_remote]
    assert not [event for event in events_of(other) if "wait_at_gate" in event.name]


def _many(rpc: Any) -> None:
    with profile("old") as found:
        assert rpc.rpc_sync("worker1", many, (torch.ones(1),)) == 4001
    assert len([event for event in events_of(found) if event.name.endswith("aten::add_")]) == 4000


def _own(rpc: Any) -> None:
    with profile("old") as found:
        names = rpc.rpc_sync("worker1", with_its_own, (torch.ones(2),))
    assert "aten::neg" in names
    key = f"rpc_sync#with_its_own(worker0 -> worker1){_REMOTE}"
    remote = [event.name for event in events_of(found) if event.is_remote]
    assert f"{key}aten::abs" in remote
    assert f"{key}aten::neg" not in remote


def _not_waiting(rpc: Any) -> None:
    x = torch.ones(2)
    with profile("old") as found:
        rpc.rpc_async("worker1", not_waiting, ("worker0", x)).wait()
        with pytest.raises(RuntimeError, match="no"):
            rpc.rpc_sync("worker1", leaving_one_behind, ("worker0", x))
    key = f"rpc_async#not_waiting(worker0 -> worker1){_REMOTE}rpc_async#"
    assert one(found, f"{key}wait_at_gate(worker1 -> worker0)").node_id == 1
    assert one(found, f"{key}step(worker1 -> worker0)").node_id == 1
    assert one(found, f"{key}step(worker1 -> worker0){_REMOTE}aten::add").node_id == 0
    open_gate()


# -- traces -------------------------------------------------------------------------------------------------


def _clocks(rpc: Any, kind: str, folder: str) -> None:
    for error in (-(10**9), 10**9):
        with profile(kind) as found:
            # As if the thread had been suspended for a second between reading two clocks.
            profiling.collector().began += error
            for _ in range(3):
                rpc.rpc_async("worker1", step, (torch.ones(2),)).wait()
        key = "rpc_async#step(worker0 -> worker1)"
        calls = [event for event in events_of(found) if event.name == key]
        steps = [event for event in events_of(found) if event.name == f"{key}{_REMOTE}##step##"]
        for call, inner in zip(calls, steps, strict=True):
            assert (
                call.time_range.start <= inner.time_range.start <= inner.time_range.end <= call.time_range.end
            )
        assert events_of(found).index(calls[0]) < events_of(found).index(steps[0])
        if kind != "old":
            found.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
            calls = [event for event in events if event["name"] == key]
            steps = [event for event in events if event["name"] == f"{key}{_REMOTE}##step##"]
            for call, inner in zip(calls, steps, strict=True):
                assert call["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= call["ts"] + call["dur"]
                assert (inner["pid"], inner["args"]["node_id"]) == ("rank 1", 1)


def _all(rank: int, size: int, path: str, folder: str) -> None:
    with joined(rank, size, path) as rpc:
        if rank:
            return
        for kind in KINDS:
            _remote(rpc, kind)
            _clocks(rpc, kind, folder)
        for kind in ("old", "modern"):
            _nested(rpc, kind)
            _collective(rpc, kind)
            _under_way(rpc, kind)
        _many(rpc)
        _own(rpc)
        _not_waiting(rpc)
        _errors(rpc)
        _unreadable(rpc)


@pytest.mark.limit(120)
def test_profiles_contain_the_events_of_other_workers(tmp_path: Path) -> None:
    run_group(_all, 3, str(tmp_path / "store"), str(tmp_path), timeout=100)


# -- torch's modules -----------------------------------------------------------------------------------------


def test_uninstall_restores_torchs_profilers() -> None:
    places: list[tuple[Any, str]] = [
        *((profiler_legacy, name) for name in ("_disable_profiler_legacy", "_parse_legacy_records")),
        *((torch.autograd.profiler.profile, name) for name in ("_start_trace", "__exit__")),
    ]
    before = [getattr(*place) for place in places]
    compat.install()
    inside = [getattr(*place) for place in places]
    compat.uninstall()
    assert all(ours is not torchs for ours, torchs in zip(inside, before, strict=True))
    assert [getattr(*place) for place in places] == before


def test_profilers_work_without_a_group() -> None:
    compat.install()
    try:
        for kind in KINDS:
            with profile(kind) as found:
                torch.neg(torch.ones(2))
                with profile(kind, **{"enabled": False} if kind != "modern" else {"schedule": _never}):
                    pass
                assert profiling.collector() is not None
            assert profiling.collector() is None
            assert "aten::neg" in [event.name for event in events_of(found)]
    finally:
        compat.uninstall()


def _never(_step: int) -> torch.profiler.ProfilerAction:
    return torch.profiler.ProfilerAction.NONE
