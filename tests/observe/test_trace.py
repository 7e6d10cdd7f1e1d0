"""``actorrpc.trace()``: the file that it writes, for made-up records and for a running cluster."""

from __future__ import annotations

import json
import os
from collections import Counter as Counts
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import actorrpc
from actorrpc import autograd
from actorrpc.agent.context import current_worker
from actorrpc.cli.views import trace_lines
from actorrpc.flight_recorder import CALLED, EXECUTED, NOTED
from actorrpc.observe import collect
from actorrpc.observe.trace import Record, Recording, compare_clocks, events_of, write
from tests.actors.e2e.kit import open_gate, pass_gate, until

pytestmark = [pytest.mark.limit(60)]
_MS = 1e-3


def _called(number: int, made: float, answered: float, id: int, to: str, waits: bool = True) -> list[Any]:
    return [number, CALLED, made, answered, id, to, 1, "Counter.add", 11, False, waits, 100, 10]


def _executed(
    number: int, arrived: float, begun: float, ended: float, id: int, of: str, thread: int = 22
) -> list[Any]:
    return [number, EXECUTED, arrived, begun, ended, id, of, 7, "add", thread, False, "Counter#12ab"]


def _recording(worker: str, records: list[list[Any]], **more: Any) -> Recording:
    recorder = {"on": True, "total": 1, "now": 0.0, "threads": {11: "MainThread", 22: "actorrpc-actor-12ab"}}
    made = Recording.of(worker, more.pop("pid", 100), {"recorder": recorder, "records": records})
    return replace(made, **more)


def _check(events: list[dict[str, Any]]) -> None:
    """Check the rules of the format on which all viewers rely."""
    begun: Counts[tuple[Any, ...]] = Counts()
    arrows: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert event["ts"] >= 0
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0
            case "b" | "e":
                begun[event["pid"], event["cat"], event["id"], event["name"]] += (
                    1 if event["ph"] == "b" else -1
                )
            case "s" | "f":
                arrows.setdefault(event["id"], []).append(event)
            case kind:
                assert kind in "MCi"
    assert set(begun.values()) <= {0}
    slices = [each for each in events if each["ph"] == "X"]
    for ends in arrows.values():
        assert sorted(each["ph"] for each in ends) == ["f", "s"]
        for end in ends:  # viewers draw an arrow only if its ends lie within slices
            assert any(
                (each["pid"], each["tid"]) == (end["pid"], end["tid"])
                and each["ts"] <= end["ts"] <= each["ts"] + each["dur"] + 0.001
                for each in slices
            )


def _of(events: list[dict[str, Any]], kind: str, name: str) -> list[dict[str, Any]]:
    return [each for each in events if each["ph"] == kind and each["name"] == name]


def test_a_call_between_workers_with_different_clocks_is_placed_on_one_time_axis() -> None:
    here = _recording("driver", [_called(5, 50.0, 50.010, 3, "w1")])
    there = _recording(
        "w1", [_executed(0, 7.001, 7.003, 7.009, 3, "driver")], pid=200, offset=43.0, error=_MS
    )
    counts: dict[str, Any] = {}
    events = list(events_of([here, there], counts))
    _check(events)
    (call,), (execution,) = _of(events, "X", "call Counter.add"), _of(events, "X", "Counter#12ab.add")
    assert (call["ts"], call["dur"], call["pid"]) == (0.0, 10_000.0, 100)
    assert (execution["ts"], execution["dur"], execution["pid"]) == (3_000.0, 6_000.0, 200)
    assert execution["args"]["method"] == "Counter/add"
    (waits,) = _of(events, "b", "Counter#12ab.add waits")
    assert waits["ts"] == pytest.approx(1_000.0)
    starts = {each["name"]: each for each in events if each["ph"] == "s"}
    assert starts["call"]["pid"] == 100
    assert starts["answer"]["pid"] == 200
    names = [each["args"]["name"] for each in _of(events, "M", "thread_name")]
    assert names == ["MainThread", "actorrpc-actor-12ab"]
    assert _of(events, "i", "5 records before this were overwritten")
    assert counts == {
        "calls": 1,
        "executions": 1,
        "unfinished": 0,
        "unseen": 0,
        "arrows": 1,
        "profiles": 0,
        "workers": 2,
        "missing": {},
        "dropped": 5,
        "seconds": pytest.approx(0.010),
        "clock_error": _MS,
        "uncompared": (),
    }


_delays = st.integers(1, 10_000).map(lambda each: each * 1e-6)


@given(st.lists(st.tuples(_delays, _delays), min_size=7, max_size=7), st.floats(-1e6, 1e6))
def test_the_stated_clock_error_bounds_the_true_error(
    delays: list[tuple[float, float]], ahead: float
) -> None:
    """Even if the two directions have different delays, no arrow points backwards by more than the stated error."""
    clock, delays_of_messages = [100.0], iter(delays)

    def ask(*_: object) -> dict[str, Any]:
        there, back = next(delays_of_messages)
        clock[0] += there
        found = {"recorder": {"now": clock[0] + ahead}}
        clock[0] += back
        return found

    offset, error = compare_clocks(ask, lambda: clock[0])
    assert error == pytest.approx(min(map(sum, delays)) / 2, abs=1e-9)
    assert abs(offset + ahead) <= error + 1e-9
    begun, taken_up = 500.0, 500.0 + 1e-6  # a call that is executed at once
    here = _recording("driver", [_called(0, begun, begun + 1e-5, 3, "w1")])
    row = _executed(0, *(each + ahead for each in (taken_up, taken_up, taken_up + 1e-6)), 3, "driver")
    there = _recording("w1", [row], pid=200, offset=offset, error=error)
    arrows = {each["ph"]: each["ts"] for each in events_of([here, there]) if each["name"] == "call"}
    assert arrows["f"] - arrows["s"] >= -1e6 * error - 0.01


def test_a_worker_without_a_clock_is_reported_as_uncompared(tmp_path: Path) -> None:
    offset, error = compare_clocks(lambda *_: {"recorder": {}}, lambda: 1.0)
    assert error is None
    path = tmp_path / "trace.json"
    made = _recording("w1", [_executed(0, 1.0, 1.0, 1.5, 1, "driver")], offset=offset, error=error)
    summary = write(str(path), [made])
    assert (summary.clock_error, summary.uncompared) == (0.0, ("w1",))

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    found = json.loads(path.read_text(), parse_constant=refuse)
    assert found["otherData"]["uncompared"] == ["w1"]
    assert "the clocks of w1 could not be compared: their events may be at wrong times" in trace_lines(
        summary
    )


def test_overlapping_coroutines_are_shown_as_async_events() -> None:
    rows = [_executed(0, 1.0, 1.0, 1.5, 1, "driver"), _executed(1, 1.2, 1.2, 1.9, 2, "driver")]
    events = list(events_of([_recording("w1", rows)]))
    _check(events)
    assert len(_of(events, "b", "Counter#12ab.add")) == 1
    assert [each["dur"] for each in _of(events, "X", "Counter#12ab.add")] == [500_000.0, 1.0, 1.0]


def test_malformed_records_are_ignored() -> None:
    whole = _executed(0, 1.0, 1.0, 1.5, 1, "driver")
    rows: list[Any] = [
        whole,
        whole[:-1],
        "no",
        [],
        [0, 77],
        [*whole[:2], "soon", *whole[3:]],
        None,
        [*whole[:2], float("nan"), *whole[3:]],
    ]
    made = _recording("w1", rows)
    assert made.records == [Record.of(whole)]
    for answer in (
        {},
        {"records": [], "recorder": 1},
        {"error": "it could not"},
        {"recorder": {"on": False}, "records": []},
    ):
        assert Recording.of("w1", 1, answer).why


def test_the_trace_file_is_replaced_only_by_a_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("the last one")
    with pytest.raises(ZeroDivisionError):
        write(str(path), (1 // 0 for _ in "x"))  # type: ignore[misc]
    assert path.read_text() == "the last one"
    summary = write(str(path), [_recording("w1", [[0, NOTED, 1.0, 2.0, "restart", "Counter#12ab", 22]])])
    assert json.loads(path.read_text())["otherData"]["seconds"] == summary.seconds == 1.0
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]
    monkeypatch.chdir(tmp_path)
    write("here.json", [])
    assert json.loads((tmp_path / "here.json").read_text())["traceEvents"] == []


@actorrpc.remote
class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count

    def pass_gate(self, path: str) -> str:
        return pass_gate(path)


@pytest.mark.usefixtures("embedded")
def test_the_trace_of_a_cluster_has_unfinished_calls_and_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, path = tmp_path / "gate", tmp_path / "trace.json"
    os.mkfifo(gate)
    counter, layer = Counter.remote(), Layer.remote()
    calls = [counter.pass_gate.remote(str(gate)), counter.add.remote()]
    stream = layer.numbers.options(backpressure=1).remote(100)
    assert actorrpc.get(next(stream)) == 0

    def unfinished() -> set[str]:
        actorrpc.trace(path)
        events = json.loads(path.read_text())["traceEvents"]
        _check(events)
        found = [each for each in events if each.get("args", {}).get("unfinished")]
        return {each["name"].split(".")[-1] for each in found if each["cat"] != "call"} | {
            each["name"] for each in found if each["cat"] == "call"
        }

    wanted = {"pass_gate (unfinished)", "add waits (unfinished)", "numbers() (unfinished)"}
    wanted |= {f"call Counter.{method} (unfinished)" for method in ("pass_gate", "add")}
    until(lambda: wanted <= unfinished())
    monkeypatch.setattr(collect, "_UNDER_WAY", 1)  # in this process
    summary = actorrpc.trace(path)
    assert summary.unseen >= 1
    worker = current_worker()
    assert worker is not None
    page = collect.answer(worker, {"id": 1, "what": ["records"], "from": {"records": 1}})
    assert "under_way" not in page  # only the first page has unfinished calls
    assert any(line.endswith("that the file leaves out") for line in trace_lines(summary))
    open_gate(gate)
    assert actorrpc.get(calls) == ["go", 1]
    stream.close()
    until(lambda: not any("pass_gate" in each or "numbers" in each for each in unfinished()))


@actorrpc.remote
class Layer:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def numbers(self, n: int) -> Iterator[int]:
        yield from range(n)

    def size(self, x: torch.Tensor) -> int:
        return x.nbytes


@pytest.mark.usefixtures("embedded")
def test_the_trace_of_a_cluster_has_streams_backward_passes_and_object_copies(tmp_path: Path) -> None:
    layer = Layer.remote()
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        y = actorrpc.get(layer.forward.remote(x))
        autograd.backward(context, [y.sum()])
    assert list(layer.numbers.remote(3).values()) == [0, 1, 2]
    large = torch.ones(1 << 20)
    ref = actorrpc.put(large)
    assert actorrpc.get([layer.size.remote(large), layer.size.remote(ref)]) == [4 << 20] * 2
    path = tmp_path / "trace.json"
    summary = actorrpc.trace(path)
    assert (summary.missing, summary.clock_error) == ({}, 0.0)
    events = json.loads(path.read_text())["traceEvents"]
    _check(events)
    assert _methods_of(events)["Layer/size"] == 2
    assert len({each["pid"] for each in events}) == summary.workers
    names = {each["args"]["name"]: each["pid"] for each in events if each["name"] == "process_name"}
    own = next(pid for name, pid in names.items() if name.endswith(f"(pid {os.getpid()})"))
    found = {(each["cat"], each["pid"] == own, each["name"]) for each in events if each["ph"] in "Xb"}
    assert {("visit", is_own, f"visit of context {context:x}") for is_own in (True, False)} <= found
    assert any(cat == "stream" and not is_own and name.endswith(" of 3 items") for cat, is_own, name in found)
    copies = {name for cat, is_own, name in found if cat == "copy" and is_own}
    assert len(copies) == 2
    assert all(f" of {4 << 20} bytes into " in name for name in copies)
    assert "copy of 4194304 bytes into put(Tensor), in shared memory" in copies


def _methods_of(events: list[dict[str, Any]]) -> Counts[str]:
    return Counts(
        each["args"]["method"] for each in events if each["ph"] in "Xb" and each.get("cat") == "execution"
    )
