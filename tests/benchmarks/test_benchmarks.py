"""The arithmetic and reports of the benchmarks on made-up numbers, and a tiny raw measurement, without timing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import idle, raw, report, rigs, sections, series, targets
from benchmarks.core import CORE, main
from benchmarks.run import parse

ROOT = Path(__file__).resolve().parents[2]
KEY = series.Key("round trip", "", "same host", "own", "p50")
values = st.lists(st.none() | st.floats(min_value=1e-3, max_value=1e9), max_size=9)


DRAW = """
import pathlib, sys
from benchmarks import chart, series
results = series.Results()
for section, case, metric, peer, value in (
    ("round trip", "", "p50", "torch", 100.0),
    ("round trip", "", "p50", "actorrpc", None),
    ("idle", "", "cpu_idle", "actorrpc", 0.0),
    ("tensors", "echo 1 MiB", "rate", "torch", 1.5),
):
    results.add(series.Key(section, case, "same host", "own", metric), peer, value)
chart.draw(pathlib.Path(sys.argv[1]), results, "made up")
"""


def made_up() -> series.Results:
    results = series.Results()
    for torch, ours, no_spin, plain in (
        (100.0, 10.0, 60.0, 50.0),
        (200.0, 40.0, 90.0, 60.0),
        (90.0, 9.0, 65.0, 50.0),
    ):
        results.add(KEY, "torch", torch)
        results.add(KEY, "actorrpc", ours)
        results.add(KEY, "no spin", no_spin)
        results.add(KEY, "raw", plain)
    return results


class TestSeries:
    def test_percentile_is_an_element_of_the_sorted_numbers(self) -> None:
        numbers = list(range(100))
        assert series.percentile(numbers, 0.5) == 50
        assert series.percentile(numbers, 0.99) == 99
        assert series.percentile([7], 0.99) == 7

    def test_summary_ignores_missing_rounds(self) -> None:
        assert series.summarise([None, 3.0, 1.0, None, 2.0]) == series.Summary(2.0, 1.0, 3.0, 3)
        assert series.summarise([None]) is None
        assert series.summarise([]) is None

    def test_ratio_is_taken_round_by_round(self) -> None:
        assert series.ratio([1.0, None, 3.0, 4.0], [2.0, 1.0, None, 0.0]) == [0.5, None, None, None]

    def test_ratios_are_summarised_and_not_medians_divided(self) -> None:
        # In the second round, the machine slowed down for both peers.
        found = series.summarise(series.ratio([10.0, 30.0, 10.0], [20.0, 60.0, 20.0]))
        assert found is not None
        assert (found.low, found.median, found.high) == (0.5, 0.5, 0.5)

    @given(values)
    def test_median_lies_within_the_spread(self, found: list[float | None]) -> None:
        summary = series.summarise(found)
        assert (summary is None) == all(value is None for value in found)
        if summary is not None:
            assert summary.low <= summary.median <= summary.high

    @given(values, values)
    def test_ratio_keeps_rounds_together(self, ours: list[float | None], theirs: list[float | None]) -> None:
        found = series.ratio(ours, theirs)
        assert len(found) == min(len(ours), len(theirs))
        for mine, other, result in zip(ours, theirs, found, strict=False):
            assert (result is None) == (mine is None or other is None)


class TestTargets:
    def test_median_ratio_decides(self) -> None:
        target = targets.Target(text="t", key=KEY, versus="torch", at_most=0.25)
        verdict = targets.judge(made_up(), target)
        assert verdict.reached is True
        assert verdict.measured == series.Summary(0.1, 0.1, 0.2, 3)

    def test_missed_targets_differ_from_unmeasured_ones(self) -> None:
        missed = targets.Target(text="t", key=KEY, peer="no spin", versus="raw", at_most=1.1)
        assert targets.judge(made_up(), missed).reached is False
        absent = targets.Target(text="t", key=KEY._replace(metric="p99"), at_most=1.0)
        assert targets.judge(made_up(), absent).reached is None

    def test_targets_may_have_absolute_bounds(self) -> None:
        assert targets.judge(made_up(), targets.Target(text="t", key=KEY, at_least=10.0)).reached is True
        assert targets.judge(made_up(), targets.Target(text="t", key=KEY, at_least=10.5)).reached is False

    def test_every_target_has_one_bound_and_a_known_section_and_metric(self) -> None:
        names = {
            "round trip", "reference call", "pipelined", "4 to 4", "fan-in", "busy callee", "oversubscribed",
            "small tensors", "tensors", "idle", "flat memory", "reinforce",
        }  # fmt: skip
        for target in targets.TARGETS:
            assert (target.at_most is None) != (target.at_least is None), target
            assert target.key.section in names
            assert target.key.metric in report.METRICS
            if target.key.section == "tensors":
                assert target.key.case.partition(" ")[2] in sections.TENSOR_SIZES
        assert len({target.text for target in targets.TARGETS}) == len(targets.TARGETS)


class TestReport:
    def test_numbers_are_rounded_for_display(self) -> None:
        shown = [report.number(value) for value in (0.0, 0.0123, 0.5, 12.34, 123.4, 123456.0)]
        assert shown == ["0", "0.0123", "0.50", "12.3", "123", "123 456"]

    def test_table_is_aligned(self) -> None:
        lines = report.table(["a", "long head"], [["cell that is long", "x"], ["", "y"]]).splitlines()
        assert len({len(line) for line in lines}) == 1
        assert lines[0].startswith("| a ")

    def test_text_shows_medians_ratios_and_verdicts(self) -> None:
        shown = report.text(made_up(), {"machine": "made up"})
        row = next(line for line in shown.splitlines() if line.startswith("| round trip |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells == [
            "round trip", "same host", "own", "100 [90.0..200]", "10.0 [9.00..40.0]", "65.0 [60.0..90.0]",
            "50.0 [50.0..60.0]", "0.10 [0.1..0.20]".replace("[0.1.", "[0.10."), "0.20 [0.18..0.67]",
        ]  # fmt: skip
        verdict = next(line for line in shown.splitlines() if "p50, own CPUs / torch" in line)
        assert verdict.rstrip("| ").endswith("yes")

    def test_notes_and_reasons_are_shown(self) -> None:
        results = made_up()
        results.notes.append("something happened")
        results.series[KEY]["actorrpc"] = [100.0, 200.0, 90.0]
        shown = report.text(results, {})
        assert "note: something happened" in shown
        assert "not reached; no reason known yet" in shown

    def test_json_keeps_every_round(self, tmp_path: Path) -> None:
        report.write_json(tmp_path / "core.json", made_up(), {"rounds": 3})
        document = json.loads((tmp_path / "core.json").read_text())
        ours = next(entry for entry in document["series"] if entry["peer"] == "actorrpc")
        assert ours["values"] == [10.0, 40.0, 9.0]
        assert ours["median"] == 10.0
        assert any(target["reached"] for target in document["targets"])

    def test_the_chart_is_drawn(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        # In a separate process, as matplotlib keeps font files open.
        subprocess.run([sys.executable, "-c", DRAW, tmp_path / "core.png"], cwd=ROOT, check=True, timeout=60)
        assert (tmp_path / "core.png").read_bytes().startswith(b"\x89PNG")


class TestIdle:
    def test_idle_costs_are_per_second_and_ignore_ended_threads(self) -> None:
        before = {1: (1_000, 5), 2: (0, 1), 3: (9, 9)}
        after = {1: (5_000, 7), 2: (0, 1), 4: (1_000, 1)}
        # Thread 3 ended, which counts as no wake-up. Thread 4 is new.
        assert idle.difference(before, after, 2.0) == {"cpu_idle": 2.5, "wakes": 2.0}

    def test_sample_sees_this_process(self) -> None:
        assert threading.get_native_id() in idle.sample([os.getpid()])


class TestRaw:
    @pytest.mark.parametrize("direction", ["argument", "echo"])
    def test_every_raw_scenario_on_a_socketpair(self, direction: str) -> None:
        here, there = socket.socketpair()
        thread = threading.Thread(target=raw.serve, args=(there,))
        thread.start()
        context = raw.RawContext(link=here)
        try:
            found = raw.roundtrip(context, calls=20, warm=2)
            assert 0 < found["p50"] <= found["p99"]
            moved = raw.tensor(context, size=300_000, repeats=2, direction=direction, warm=1)
            assert moved["rate"] > 0
            assert raw.copy(context, size=1000, repeats=2)["rate"] > 0
        finally:
            raw.shutdown(context)
            thread.join(10.0)
        assert not thread.is_alive()


class TestRigs:
    @pytest.mark.parametrize("transport", ["same host", "TCP"])
    def test_a_raw_pair_of_processes_runs_a_scenario_and_reports_errors(
        self, transport: str, tmp_path: Path
    ) -> None:
        stable = rigs.Stable(tmp_path)
        place = rigs.placements()["one"]
        rig = None
        try:
            stable.prepare(place.callers, "benchmarks.raw")  # starts quickly, as it does not import torch
            make = [stable.fork(place.callers, "benchmarks.raw") for _ in range(2)]
            rig = rigs.Rig(rigs.PEERS["raw", transport], make)
            rig.begin()
            rig.join_raw(tmp_path)
            assert rig.caller("roundtrip", calls=10, warm=1)["p50"] > 0
            with pytest.raises(rigs.RigError, match="KeyError"):
                rig.caller("no such scenario")
            with pytest.raises(rigs.RigError, match="failed before"):
                rig.caller("roundtrip", calls=1, warm=0)
        finally:
            if rig is not None:
                rig.close()
            stable.close()

    def test_a_worker_that_ended_is_an_error_not_a_hang(self, tmp_path: Path) -> None:
        stable = rigs.Stable(tmp_path)
        try:
            worker = stable.fork(rigs.placements()["one"].callers, "benchmarks.raw")
            os.kill(worker.pid, 9)
            with pytest.raises(rigs.RigError, match="has ended"):
                worker.receive(10.0)
            worker.close(kill=False)
        finally:
            stable.close()


class TestCommand:
    @pytest.mark.prints(
        r"^usage: python -m benchmarks\.", r"^python -m benchmarks\.\w+: error: (argument --only|--rounds)"
    )
    def test_flags_of_the_core_benchmark_are_parsed(self) -> None:
        assert parse(CORE, []).rounds == 7
        assert parse(CORE, ["--quick"]).rounds == 3
        assert parse(CORE, ["--only", "roundtrip", "flat"]).only == ["roundtrip", "flat"]
        with pytest.raises(SystemExit):
            parse(CORE, ["--only", "nothing"])
        with pytest.raises(SystemExit):
            parse(CORE, ["--rounds", "0"])

    def test_a_run_writes_its_table_json_and_chart(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def tiny(bench: object) -> None:
            bench.results.add(KEY, "actorrpc", 1.0)  # type: ignore[attr-defined]

        drawn: list[Path] = []
        drawing = replace(CORE, draw=lambda path, *_: drawn.append(path))
        monkeypatch.setattr("benchmarks.core.CORE", drawing)
        monkeypatch.setitem(sections.SECTIONS, "roundtrip", tiny)
        assert main(["--only", "roundtrip", "--rounds", "1", "--out", str(tmp_path)]) == 0
        assert "round trip" in capsys.readouterr().out
        assert json.loads((tmp_path / "core-partial.json").read_text())["series"][0]["values"] == [1.0]
        assert drawn == [tmp_path / "core-partial.png"]
