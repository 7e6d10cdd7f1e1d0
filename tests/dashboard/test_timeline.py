"""The data of the timeline view: lanes, slices and arrows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from actorrpc.cli.dashboard.payloads import timeline
from actorrpc.flight_recorder import CALLED, EXECUTED, NOTED, UNDER_WAY
from actorrpc.observe.assemble import Silent
from actorrpc.observe.trace import Recording
from tests.dashboard.fakes import SCRIPT

_LANE, _KIND, _BEGUN, _ENDED, _TEXT, _FAILED, _WAITED, _OTHER, _UNFINISHED = range(9)


def called(number: int, made: float, answered: float, id: int, to: str) -> list[Any]:
    return [number, CALLED, made, answered, id, to, 1, "Store.get", 11, False, True, 100, 10]


def executed(
    number: int, arrived: float, begun: float, ended: float, id: int, actor: str = "Store#1"
) -> list[Any]:
    moments = map(float, (arrived, begun, ended))
    return [number, EXECUTED, *moments, id, "driver", 7, "get", 22, True, actor]


def _recording(worker: str, records: list[list[Any]], **more: Any) -> Recording:
    recorder = {"on": True, "total": len(records), "now": 0.0, "threads": {}}
    made = Recording.of(worker, 100, {"recorder": recorder, "records": records})
    return replace(made, **more)


def test_a_call_is_linked_to_its_execution_despite_different_clocks() -> None:
    caller = _recording("driver", [called(0, 50.0, 50.010, 3, "w1")])
    callee = _recording("w1", [executed(0, 7.001, 7.003, 7.009, 3)], offset=43.0, error=0.001)
    found = timeline([caller, callee], 30.0)
    assert found["lanes"] == [[0, "calls made", 0], [1, "Store#1", 0]]
    assert found["slices"] == [
        [0, CALLED, 0, 10_000, 0, 0, 0, 1, 0],
        [1, EXECUTED, 3000, 9000, 1, 1, 2000, -1, 0],
    ]
    assert found["texts"] == ["Store.get", "get"]
    assert (found["arrows"], found["left_out"], found["clock_error"]) == (1, 0, 0.001)
    assert [each["more"] for each in found["processes"]] == [False, False]


def test_overlapping_executions_are_in_separate_lanes() -> None:
    rows = [executed(n, n, n, n + 2.5, n) for n in range(6)]
    found = timeline([_recording("w1", rows)], 30.0)
    assert found["lanes"] == [[0, "Store#1", 0], [0, "Store#1", 1], [0, "Store#1", 2]]
    assert [each[_LANE] for each in found["slices"]] == [0, 1, 2, 0, 1, 2]
    crowd = timeline([_recording("w1", [executed(n, 0.0, 0.0, 9.0, n) for n in range(50)])], 30.0)
    assert len(crowd["lanes"]) == 10
    assert len(crowd["slices"]) == 50


def test_old_and_surplus_slices_are_left_out() -> None:
    rows = [executed(n, n, n, n + 1.0, n) for n in range(100)]
    found = timeline([_recording("w1", rows)], 9.5)
    assert len(found["slices"]) == 10
    assert not found["processes"][0]["more"]
    found = timeline([_recording("w1", rows)], 1e6, most=20)
    assert (len(found["slices"]), found["left_out"]) == (20, 80)
    assert found["slices"][0][_BEGUN] == 0
    late = timeline([_recording("w1", rows[50:])], 1e6)  # earlier records were overwritten or not requested
    assert late["processes"][0]["more"]


def test_unfinished_calls_are_shown_however_old_they_are() -> None:
    rows = [executed(0, 995.0, 995.0, 996.0, 0), executed(UNDER_WAY, 1.0, 2.0, 1000.0, 1)]
    found = timeline([_recording("w1", rows)], 30.0)
    shown = [(each[_BEGUN], each[_ENDED], each[_UNFINISHED]) for each in found["slices"]]
    # Time 0 is the start of the shown interval, not of the unfinished call.
    assert shown == [(-968_000_000, 30_000_000, 1), (25_000_000, 26_000_000, 0)]
    alone = timeline([_recording("w1", rows[1:])], 1e6)
    assert alone["slices"][0][_BEGUN] == 1_000_000


def test_functions_notes_and_silent_workers_are_shown() -> None:
    rows = [executed(0, 1.0, 1.0, 2.0, 1, ""), [1, NOTED, 3.0, 4.0, "restart", SCRIPT, 5]]
    silent = Recording.of("w2", 7, Silent("stopped", "a signal has stopped it"))
    found = timeline([_recording("w1", rows), silent], 30.0)
    assert [title for _, title, _ in found["lanes"]] == ["functions", "restarts, backward passes"]
    assert found["texts"] == ["get", f"restart {SCRIPT}"]
    assert found["missing"] == ["w2: a signal has stopped it"]
    assert timeline([], 30.0)["slices"] == []
