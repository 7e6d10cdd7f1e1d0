"""Ranges of calls in torch's profiles, without the drop-in replacement of torch's RPC."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler_legacy

from actorrpc import rpc
from actorrpc.errors import RpcTimeoutError, SerializationError, UnknownWorkerError
from actorrpc.rpc import profiling
from tests.agent.together import in_threads
from tests.announced import PROFILER, TORCHSCRIPT
from tests.migration.rows import row
from tests.ranks import rpc_group

pytestmark = pytest.mark.prints(PROFILER, TORCHSCRIPT)

KINDS = ["old", "modern"]
_TINY = 0.05  # a time-out that must expire

_gate = threading.Event()
_on = threading.Event()


def profile(kind: str, **how: Any) -> Any:
    return profiler_legacy.profile(**how) if kind == "old" else torch.profiler.profile(**how)


def events_of(found: Any) -> list[Any]:
    return list(found.function_events if isinstance(found, profiler_legacy.profile) else found.events())


def names_of(found: Any) -> list[str]:
    return [event.name for event in events_of(found) if "#" in event.name]


def wait_at_gate() -> str:
    assert _gate.wait(30)
    return "through"


def open_gate() -> None:
    _gate.set()


def wait_until_on() -> None:
    assert _on.wait(30)


def fail(text: str) -> None:
    raise LookupError(text)


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def add(self, more: int) -> int:
        self.value += more
        return self.value


def _every_way(kind: str) -> None:
    x = torch.ones(2)
    with profile(kind) as found:
        rpc.rpc_sync("worker1", torch.add, (x, 1))
        rpc.rpc_sync("worker1", torch.add, args=[x, 1], timeout=20)
        rpc.rpc_async("worker1", torch.mul, (x, 2)).wait()
        counter = rpc.remote("worker1", Counter)
        counter.rpc_sync().add(1)
        counter.rpc_async().add(2).wait()
        assert counter.remote().add(3).to_here() == 6
    assert sorted(names_of(found)) == [
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
    assert not any(
        event.is_remote for event in events_of(found)
    )  # remote events are only collected by the drop-in


def _ends(kind: str) -> None:
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
    rpc.rpc_sync("worker1", _gate_clear)


def _under_way(kind: str) -> None:
    """The ranges of unfinished calls end with the profile, because a modern profile crashes if a range ends later."""
    for _ in range(3):
        with profile(kind) as found:
            calls = []
            for _ in range(3):
                calls.append(rpc.rpc_async("worker1", wait_at_gate))
                torch.ones(1)  # the old profiler merges equal events that follow each other
            kept = rpc.remote("worker1", wait_at_gate)
        names = names_of(found)
        rpc.rpc_sync("worker1", open_gate)
        assert [call.wait() for call in calls] == ["through"] * 3
        assert kept.to_here() == "through"
        rpc.rpc_sync("worker1", _gate_clear)
        assert sorted(names) == [
            *["rpc_async#wait_at_gate(worker0 -> worker1)"] * 3,
            "rpc_remote#wait_at_gate(worker0 -> worker1)",
        ]


def _gate_clear() -> None:
    _gate.clear()


def _errors(kind: str) -> None:
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
    rpc.rpc_sync("worker1", open_gate)
    rpc.rpc_sync("worker1", _gate_clear)
    assert sorted(name.partition("(")[0] for name in names_of(found)) == [
        "rpc_async#fail",
        "rpc_async#print",
        "rpc_async#wait_at_gate",
        "rpc_remote#fail",
        "rpc_sync#fail",
        "rpc_sync#wait_at_gate",
    ]


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


@pytest.mark.skipif(
    "profile_all_threads" not in (_ExperimentalConfig.__init__.__doc__ or ""),
    reason="this torch cannot profile all threads",
)
def test_executions_appear_in_profiles_of_all_threads() -> None:
    names = rpc_group(_all_threads, 2)[1]
    assert "rpc_sync#aten::add(worker0 -> worker1)#execution" in names
    assert "aten::add" in names
    assert "rpc_sync#aten::neg(worker1 -> worker0)" in names


def _threads() -> None:
    names: dict[int, list[str]] = {}

    def work(number: int) -> None:
        function = [torch.add, torch.mul, torch.sub][number]
        with profile("old") as found:
            for _ in range(20):
                rpc.rpc_async("worker1", function, (torch.ones(2), 1)).wait()
        names[number] = names_of(found)

    in_threads(work, [(number,) for number in range(3)])
    for number, name in enumerate(("add", "mul", "sub")):
        assert names[number] == [f"rpc_async#aten::{name}(worker0 -> worker1)"] * 20


def _every_check(rank: int, _: int, kind: str) -> None:
    if rank:
        return
    _every_way(kind)
    _ends(kind)
    _under_way(kind)
    _errors(kind)
    if kind == "old":
        _threads()


@pytest.mark.parametrize("kind", KINDS)
@row("profiles: calls show in", "from-torch-rpc")
def test_profiles_contain_one_range_per_call_that_ends_with_the_call(kind: str) -> None:
    """All kinds of calls, ends of ranges, calls that outlive the profile or fail, and threads."""
    rpc_group(_every_check, 2, kind)


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
def test_functions_appear_in_profiles_under_their_names(function: Any, name: str) -> None:
    assert profiling.name_of(function) == name


def test_profiling_one_execution_leaves_a_running_profile_of_the_program_alone() -> None:
    read: list[Any] = []
    with profile("old") as found:
        with profiling.Observation(profiling.ProfilerSettings(), read.extend):
            pass
        torch.neg(torch.ones(1))
    assert not read
    assert "aten::neg" in [event.name for event in found.function_events]
