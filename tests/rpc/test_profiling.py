"""Calls in torch's profiles, without the drop-in: their ranges, and that nothing is left of them."""

from __future__ import annotations

import functools
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler_legacy
from torch.autograd.profiler import emit_itt

from actorrpc import rpc
from actorrpc.agent.calls import CURRENT
from actorrpc.errors import RpcTimeoutError, SerializationError, UnknownWorkerError
from actorrpc.rpc import profiling
from tests.announced import PROFILER
from tests.ranks import rpc_group

pytestmark = pytest.mark.prints(PROFILER)

KINDS = ["old", "modern"]
_TINY = 0.05  # a time-out that is meant to pass

_gate = threading.Event()
_on = threading.Event()


def profile(kind: str, **how: Any) -> Any:
    return profiler_legacy.profile(**how) if kind == "old" else torch.profiler.profile(**how)


def events_of(found: Any) -> list[Any]:
    return list(found.function_events if isinstance(found, profiler_legacy.profile) else found.events())


def names_of(found: Any) -> list[str]:
    return [event.name for event in events_of(found) if "#" in event.name]


def left_over() -> list[Any]:
    """What profiled calls must not leave behind."""
    return [*profiling._open, *profiling._asked.values()]


# -- what runs on workers ---------------------------------------------------------------------------------


def wait_at_gate() -> str:
    assert _gate.wait(30)
    return "through"


def open_gate() -> None:
    _gate.set()


def wait_until_on() -> None:
    assert _on.wait(30)


def header() -> Any:
    execution = CURRENT.get()
    assert execution is not None
    return execution.header


def fail(text: str) -> None:
    raise LookupError(text)


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def add(self, more: int) -> int:
        self.value += more
        return self.value


# -- ranges -----------------------------------------------------------------------------------------------


def _every_way(rank: int, _: int, kind: str) -> Any:
    if rank:
        return None
    x = torch.ones(2)
    with profile(kind) as found:
        rpc.rpc_sync("worker1", torch.add, (x, 1))
        rpc.rpc_sync("worker1", torch.add, args=[x, 1], timeout=20)
        rpc.rpc_async("worker1", torch.mul, (x, 2)).wait()
        counter = rpc.remote("worker1", Counter)
        counter.rpc_sync().add(1)
        counter.rpc_async().add(2).wait()
        assert counter.remote().add(3).to_here() == 6
    assert not left_over()
    return names_of(found), [event.is_remote for event in events_of(found) if event.is_remote]


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_calling(kind: str) -> None:
    names, remote = rpc_group(_every_way, 2, kind)[0]
    assert sorted(names) == [
        f"rpc_{name}(worker0 -> worker1)"
        for name in (
            "async#add",
            "async#aten::mul",
            "remote#Counter",
            "remote#add",
            "sync#add",
            "sync#aten::add",
            "sync#aten::add",
        )
    ]
    assert not remote  # nobody collects


def _ends(rank: int, _: int, kind: str) -> Any:
    if rank:
        return None
    with profile(kind) as found:
        with torch.profiler.record_function("before"):
            future = rpc.rpc_async("worker1", wait_at_gate)
        with torch.profiler.record_function("meanwhile"):
            rpc.rpc_sync("worker1", open_gate)
        future.wait()
        with torch.profiler.record_function("after"):
            pass
    spans = {event.name.partition("(")[0]: event.time_range for event in events_of(found)}
    call = spans["rpc_async#wait_at_gate"]
    assert spans["before"].start <= call.start <= spans["before"].end
    assert spans["rpc_sync#open_gate"].start <= call.end <= spans["after"].start
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_ends_when_the_outcome_is_there(kind: str) -> None:
    assert rpc_group(_ends, 2, kind)[0]


def _under_way(rank: int, _: int, kind: str) -> Any:
    if rank:
        return None
    for _ in range(3):
        with profile(kind) as found:
            calls = []
            for _ in range(3):
                calls.append(rpc.rpc_async("worker1", wait_at_gate))
                torch.ones(1)  # the old profiler takes equal events one after the other for one
            kept = rpc.remote("worker1", wait_at_gate)
        names = names_of(found)
        assert not profiling._open
        rpc.rpc_sync("worker1", open_gate)
        assert [call.wait() for call in calls] == ["through"] * 3
        assert kept.to_here() == "through"
        rpc.rpc_sync("worker1", _gate_clear)
    return sorted(names)


def _gate_clear() -> None:
    _gate.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_outlive_the_profile(kind: str) -> None:
    """Their ranges end with it: to a modern profile, those that ended later would be fatal."""
    assert rpc_group(_under_way, 2, kind)[0] == [
        *["rpc_async#wait_at_gate(worker0 -> worker1)"] * 3,
        "rpc_remote#wait_at_gate(worker0 -> worker1)",
    ]


def _errors(rank: int, _: int, kind: str) -> Any:
    if rank:
        return None
    with profile(kind) as found:
        with pytest.raises(LookupError, match="sync"):
            rpc.rpc_sync("worker1", fail, ("sync",))
        with pytest.raises(LookupError, match="later"):
            rpc.rpc_async("worker1", fail, ("later",)).wait()
        with pytest.raises(LookupError, match="kept"):
            rpc.remote("worker1", fail, ("kept",)).to_here()
        with pytest.raises(UnknownWorkerError, match="nobody"):
            rpc.rpc_async("nobody", fail, ("unsent",))
        with pytest.raises(TypeError, match="callable"):
            rpc.rpc_sync("worker1", "no function")  # type: ignore[arg-type]
        with pytest.raises(SerializationError, match="cannot pickle"):
            rpc.rpc_async("worker1", print, (threading.Lock(),))
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", wait_at_gate, timeout=_TINY)
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_async("worker1", wait_at_gate, timeout=_TINY).wait()
    open_ = left_over()
    rpc.rpc_sync("worker1", open_gate)
    return names_of(found), open_


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_fail(kind: str) -> None:
    names, left = rpc_group(_errors, 2, kind)[0]
    assert sorted(name.partition("(")[0] for name in names) == [
        "rpc_async#fail",
        "rpc_async#print",
        "rpc_async#wait_at_gate",
        "rpc_remote#fail",
        "rpc_sync#fail",
        "rpc_sync#wait_at_gate",
    ]
    assert not left


def _headers(rank: int, _: int) -> Any:
    if rank:
        return None
    before = rpc.rpc_sync("worker1", header)
    with profile("old"):
        inside = rpc.rpc_sync("worker1", header)
    return before, inside, rpc.rpc_sync("worker1", header)


def test_nothing_travels_where_no_profile_is() -> None:
    before, inside, after = rpc_group(_headers, 2)[0]
    assert before is None
    assert inside == {"profile": [0, "rpc_sync#header(worker0 -> worker1)"]}
    assert after is None


def _all_threads(rank: int, _: int) -> Any:
    if rank == 0:
        rpc.rpc_sync("worker1", wait_until_on)
        with profile("modern"):
            rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1))
        rpc.rpc_sync("worker1", open_gate)
        return None
    with profile("modern", experimental_config=_ExperimentalConfig(profile_all_threads=True)) as found:
        _on.set()
        assert _gate.wait(30)
        rpc.rpc_sync("worker0", torch.neg, (torch.ones(2),))
    return [event.name for event in found.events()]


def test_executions_show_where_all_threads_are_profiled() -> None:
    names = rpc_group(_all_threads, 2)[1]
    assert "rpc_sync#aten::add(worker0 -> worker1)#execution" in names
    assert "aten::add" in names
    assert "rpc_sync#aten::neg(worker1 -> worker0)" in names


def _trace(rank: int, _: int, path: str) -> Any:
    if rank:
        return None
    with profile("modern") as found:
        rpc.rpc_async("worker1", torch.add, (torch.ones(2), 1)).wait()
    found.export_chrome_trace(path)
    return None


def test_the_trace_of_a_modern_profile(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    rpc_group(_trace, 2, str(path))
    events = json.loads(path.read_text())["traceEvents"]
    [found] = [each for each in events if each["name"] == "rpc_async#aten::add(worker0 -> worker1)"]
    assert found["dur"] > 0


def _threads(rank: int, _: int) -> Any:
    if rank:
        return None
    names: dict[int, list[str]] = {}

    def work(number: int) -> None:
        function = [torch.add, torch.mul, torch.sub][number]
        with profile("old") as found:
            for _ in range(20):
                rpc.rpc_async("worker1", function, (torch.ones(2), 1)).wait()
        names[number] = names_of(found)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not left_over()
    return names


def test_each_thread_has_its_own_profile() -> None:
    names = rpc_group(_threads, 2)[0]
    for number, name in enumerate(("add", "mul", "sub")):
        assert names[number] == [f"rpc_async#aten::{name}(worker0 -> worker1)"] * 20


def _forked(rank: int, _: int) -> Any:
    if rank:
        return None
    with profile("old"):
        future = rpc.rpc_async("worker1", wait_at_gate)
        child = os.fork()
        if not child:
            os._exit(len(profiling._open) + len(profiling._asked))
        _, status = os.waitpid(child, 0)
        rpc.rpc_sync("worker1", open_gate)
        future.wait()
    return os.waitstatus_to_exitcode(status)


def test_a_fork_has_no_open_ranges() -> None:
    assert rpc_group(_forked, 2)[0] == 0


# -- names ------------------------------------------------------------------------------------------------


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.add, "aten::add"),
        (scripted, f"__torch__.{__name__}.scripted"),
        (fail, "fail"),
        (Counter, "Counter"),
        (Counter.add, "Counter.add"),
        (functools.partial(fail, "no"), "partial"),
        ("step", "step"),
    ],
)
def test_names(function: Any, name: str) -> None:
    assert profiling.name_of(function) == name


# -- profiles of executions ---------------------------------------------------------------------------------


def test_observing_a_call() -> None:
    read: list[list[str]] = []

    def reader(events: list[Any]) -> None:
        read.append([event.name for event in events if event.name == "aten::neg"])

    def inner() -> int:
        with profiling.Observation(profiling.ProfilerSettings(), reader):
            torch.neg(torch.ones(1))
        torch.neg(torch.ones(1))
        return 7

    with profiling.Observation(profiling.ProfilerSettings(memory=True), reader):
        assert inner() == 7
    assert read == [["aten::neg"] * 2] * 2  # both see all of it, and no events of memory
    assert not profiling.profiled()


def test_observing_a_call_that_raises() -> None:
    read: list[Any] = []

    def call() -> None:
        with profiling.Observation(profiling.ProfilerSettings(), read.extend):
            torch.neg(torch.ones(1))
            raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        call()
    assert "aten::neg" in [event.name for event in read]
    assert not profiling.profiled()


def test_a_profile_of_the_programs_own_is_left_alone() -> None:
    read: list[Any] = []
    with profile("old") as found:
        with profiling.Observation(profiling.ProfilerSettings(), read.extend):
            pass
        torch.neg(torch.ones(1))
    assert not read
    assert "aten::neg" in [event.name for event in found.function_events]


def test_no_range_where_ranges_are_on_a_stack() -> None:
    """NVTX and ITT: a range that ends on another thread, or in another order, would confuse them."""
    with emit_itt():
        span = profiling.ProfiledSpan("none")
        thread = threading.Thread(target=span.close)
        thread.start()
        thread.join()
    assert span not in profiling._open


def test_a_range_ends_once() -> None:
    with profile("old") as found:
        span = profiling.ProfiledSpan("once")
        threads = [threading.Thread(target=span.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        span.close()
    assert [event.name for event in found.function_events] == ["once"]
    assert span not in profiling._open
