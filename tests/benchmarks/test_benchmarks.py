"""The benchmarks: arithmetic and reports on made-up numbers, and each scenario of calls, actors, objects and autograd."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    actors,
    actors_sections,
    actors_sessions,
    autograd,
    autograd_breakdown,
    autograd_sections,
    idle,
    objects,
    report,
    rigs,
    sections,
    series,
    targets,
)
from benchmarks.actors_targets import ACTOR_TARGETS
from benchmarks.autograd_targets import AUTOGRAD_TARGETS
from benchmarks.bench import Bench, Member
from benchmarks.core import CORE, main
from benchmarks.run import parse

ROOT = Path(__file__).resolve().parents[2]
KEY = series.Key("round trip", "", "same host", "own", "p50")
_NIGHTLY = pytest.mark.skipif(os.environ.get("ACTORRPC_NIGHTLY") != "1", reason="torch's side: nightly")

DRAW = """
import pathlib, sys
from benchmarks import actors_chart, autograd_chart, chart, series
results = series.Results()
for section, case, placement, metric, peer, value in (
    ("round trip", "", "own", "p50", "torch", 100.0),
    ("round trip", "", "own", "p50", "actorrpc", None),
    ("idle", "", "own", "cpu_idle", "actorrpc", 0.0),
    ("tensors", "echo 1 MiB", "own", "rate", "torch", 1.5),
    ("actor call", "", "own", "p50", "ray", 700.0),
    ("actor call", "", "own", "p50", "actorrpc", 90.0),
    ("start", "init", "both", "time", "monarch", None),
    ("rnn", "tutorial, 2 workers", "own", "time", "torch", 9.0),
    ("rnn", "tutorial, 2 workers", "own", "time", "actorrpc", 3.0),
    ("chain", "1 hop, 2 workers", "one", "p50", "actorrpc", 400.0),
    ("chain", "2 hops, 2 workers", "one", "p50", "actorrpc", 700.0),
    ("activation", "64 MiB", "one", "both_ways", "torch", None),
):
    results.add(series.Key(section, case, "same host", placement, metric), peer, value)
here = pathlib.Path(sys.argv[1])
chart.draw(here / "core.png", results, "made up")
actors_chart.draw_actors(here / "actors.png", results, "made up")
autograd_chart.draw_autograd(here / "autograd.png", results, "made up")
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


@pytest.fixture
def stable(tmp_path: Path) -> Iterator[rigs.Stable]:
    made = rigs.Stable(tmp_path)
    try:
        yield made
    finally:
        made.close()


# -- arithmetic and reports ------------------------------------------------------------------------------


def test_summaries_and_ratios_ignore_missing_rounds_and_compare_within_a_round() -> None:
    assert series.percentile(list(range(100)), 0.99) == 99
    assert series.summarise([None, 3.0, 1.0, None, 2.0]) == series.Summary(2.0, 1.0, 3.0, 3)
    assert series.summarise([None]) is None
    assert series.ratio([1.0, None, 3.0, 4.0], [2.0, 1.0, None, 0.0]) == [0.5, None, None, None]
    # In the second round, the machine slowed down for both peers.
    found = series.summarise(series.ratio([10.0, 30.0, 10.0], [20.0, 60.0, 20.0]))
    assert found is not None
    assert (found.low, found.median, found.high) == (0.5, 0.5, 0.5)
    assert autograd_sections.slope((1, 2, 4), [110.0, None, 140.0]) == pytest.approx(10.0)
    assert autograd_sections.slope((1, 2, 4), [110.0, None, None]) is None


@pytest.mark.parametrize("judged", [targets.TARGETS, ACTOR_TARGETS, AUTOGRAD_TARGETS, objects.OBJECT_TARGETS])
def test_each_target_has_one_bound_a_known_metric_and_a_unique_text(judged: Any) -> None:
    for target in judged:
        assert (target.at_most is None) != (target.at_least is None), target
        assert report.metric_title(target.key) != target.key.metric
    assert len({target.text for target in judged}) == len(judged)


def test_targets_are_judged_by_the_median_ratio_or_by_absolute_bounds() -> None:
    target = targets.Target(text="t", key=KEY, versus="torch", at_most=0.25)
    verdict = targets.judge(made_up(), target)
    assert verdict.reached is True
    assert verdict.measured == series.Summary(0.1, 0.1, 0.2, 3)
    missed = targets.Target(text="t", key=KEY, peer="no spin", versus="raw", at_most=1.1)
    assert targets.judge(made_up(), missed).reached is False
    absent = targets.Target(text="t", key=series.Key(*KEY[:-1], "p99"), at_most=1.0)
    assert targets.judge(made_up(), absent).reached is None
    for bound, reached in ((10.0, True), (10.5, False)):
        assert targets.judge(made_up(), targets.Target(text="t", key=KEY, at_least=bound)).reached is reached


def test_a_report_has_medians_ratios_verdicts_notes_and_every_round(tmp_path: Path) -> None:
    results = made_up()
    results.notes.append("something happened")
    shown = report.text(results, {"machine": "made up"})
    row = next(line for line in shown.splitlines() if line.startswith("| round trip |"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "round trip", "same host", "own", "100 [90.0..200]", "10.0 [9.00..40.0]", "65.0 [60.0..90.0]",
        "50.0 [50.0..60.0]", "0.10 [0.10..0.20]", "0.20 [0.18..0.67]",
    ]  # fmt: skip
    verdict = next(line for line in shown.splitlines() if "p50, own CPUs / torch" in line)
    assert verdict.rstrip("| ").endswith("yes")
    assert "note: something happened" in shown
    report.write_json(tmp_path / "core.json", results, {"rounds": 3})
    document = json.loads((tmp_path / "core.json").read_text())
    ours = next(entry for entry in document["series"] if entry["peer"] == "actorrpc")
    assert (ours["values"], ours["median"]) == ([10.0, 40.0, 9.0], 10.0)
    results.series[KEY]["actorrpc"] = [100.0, 200.0, 90.0]
    assert "not reached; no reason known yet" in report.text(results, {})


@pytest.mark.limit(60)
def test_the_charts_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    # In a separate process, as matplotlib keeps font files open.
    subprocess.run([sys.executable, "-c", DRAW, tmp_path], cwd=ROOT, check=True)
    for name in ("core.png", "actors.png", "autograd.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.prints(
    r"^usage: python -m benchmarks\.", r"^python -m benchmarks\.\w+: error: (argument --only|--rounds)"
)
@pytest.mark.parametrize(
    ("benchmark", "rounds", "quick", "section"),
    [
        (CORE, 7, 3, "flat"),
        (actors.ACTORS, 5, 2, "calls"),
        (autograd.AUTOGRAD, 5, 2, "rnn"),
        (objects.OBJECTS, 5, 2, "put"),
    ],
)
def test_flags_of_each_benchmark_are_parsed(benchmark: Any, rounds: int, quick: int, section: str) -> None:
    assert parse(benchmark, []).rounds == rounds
    assert parse(benchmark, ["--quick"]).rounds == quick
    assert parse(benchmark, ["--only", section]).only == [section]
    for wrong in (["--only", "nothing"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            parse(benchmark, wrong)


def test_a_run_writes_its_table_json_and_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tiny(bench: Any) -> None:
        bench.results.add(KEY, "actorrpc", 1.0)

    drawn: list[Path] = []
    drawing = replace(CORE, draw=lambda path, *_: drawn.append(path))
    monkeypatch.setattr("benchmarks.core.CORE", drawing)
    monkeypatch.setitem(sections.SECTIONS, "roundtrip", tiny)
    assert main(["--only", "roundtrip", "--rounds", "1", "--out", str(tmp_path)]) == 0
    assert "round trip" in capsys.readouterr().out
    assert json.loads((tmp_path / "core-partial.json").read_text())["series"][0]["values"] == [1.0]
    assert drawn == [tmp_path / "core-partial.png"]


def test_the_breakdown_has_a_part_for_every_module_that_a_step_runs() -> None:
    package = ROOT / "actorrpc"
    for floor in ("agent", "autograd", "optim", "rpc", "serialization", "transport", "wire"):
        for path in (package / floor).rglob("*.py"):
            function = f"{path.relative_to(package).with_suffix('')}.something"
            assert autograd_breakdown.part_of(function) != "user code", function
    assert autograd_breakdown.part_of("sgd.SGD.step") == "user code"


# -- scenarios -------------------------------------------------------------------------------------------


def test_idle_costs_are_per_second_and_ignore_ended_threads() -> None:
    before = {1: (1_000, 5), 2: (0, 1), 3: (9, 9)}
    after = {1: (5_000, 7), 2: (0, 1), 4: (1_000, 1)}
    # Thread 3 ended, which counts as no wake-up. Thread 4 is new.
    assert idle.difference(before, after, 2.0) == {"cpu_idle": 2.5, "wakes": 2.0}
    assert threading.get_native_id() in idle.sample([os.getpid()])


@pytest.mark.parametrize("transport", ["same host", "TCP"])
def test_a_raw_pair_of_processes_runs_a_scenario_and_reports_errors(
    transport: str, stable: rigs.Stable, tmp_path: Path
) -> None:
    place = rigs.placements()["one"]
    stable.prepare(place.callers, "benchmarks.raw")  # starts quickly, as it does not import torch
    rig = rigs.Rig(
        rigs.PEERS["raw", transport], [stable.fork(place.callers, "benchmarks.raw") for _ in range(2)]
    )
    try:
        rig.begin()
        rig.join_raw(tmp_path)
        assert rig.caller("roundtrip", calls=10, warm=1)["p50"] > 0
        with pytest.raises(rigs.RigError, match="KeyError"):
            rig.caller("no such scenario")
        with pytest.raises(rigs.RigError, match="failed before"):
            rig.caller("roundtrip", calls=1, warm=0)
    finally:
        rig.close()


def test_a_worker_that_ended_is_an_error_not_a_hang(stable: rigs.Stable) -> None:
    worker = stable.fork(rigs.placements()["one"].callers, "benchmarks.raw")
    os.kill(worker.pid, 9)
    with pytest.raises(rigs.RigError, match="has ended"):
        worker.receive(10.0)
    worker.close(kill=False)


@pytest.mark.limit(120)
def test_every_scenario_of_actors_runs_on_actorrpc(stable: rigs.Stable) -> None:
    bench = Bench(stable, rounds=1, quick=True)
    with actors_sessions.sessions(bench, ("actorrpc",)) as (found, took):
        assert bench.results.notes == []
        assert 0 < took["actorrpc"]["init"] <= took["actorrpc"]["first"]
        session = found[actors_sections.OURS]
        assert session is not None
        ask = session.caller
        assert ask("overhead")["pss"] > 0
        for what in ("tiny", "caller", "holder"):
            ask("make", what=what, count=2)
        cpus = list(bench.placements["one"].callers)
        ask("place", driver=cpus, actors={"tiny": cpus})
        for scenario in ("roundtrip", "core_roundtrip", "proxy_roundtrip"):
            assert ask(scenario, calls=10)["p50"] > 0
        assert ask("pipelined", windows=1, window=20)["rate"] > 0
        assert ask("together", seconds=0.05, window=5)["rate"] > 0
        assert ask("fan", members=2, rounds=5)["p50"] > 0
        for direction in ("argument", "result", "hand-over"):
            moved = ask("tensor", size=1 << 20, direction=direction, kind="torch", repeats=1)
            assert moved["rate"] > 0
        ask("forget")
        for what in ("tiny", "caller", "holder"):
            ask("end", what=what)
        assert ask("create", count=2, torch_too=True)["private"] > 0
        assert ask("crowd", count=50)["rate"] > 0


@pytest.mark.limit(120)
def test_every_scenario_of_objects_runs_on_actorrpc(stable: rigs.Stable) -> None:
    size = 1 << 20
    bench = Bench(stable, rounds=1, quick=True)
    with actors_sessions.sessions(bench, ("actorrpc",), objects.MODULE) as (found, _):
        assert bench.results.notes == []
        session = found[Member("actorrpc")]
        assert session is not None
        ask = session.caller
        ask("make", count=2)
        assert ask("memcpy", size=size, repeats=2)["rate"] > 0
        assert ask("small", count=100)["there"] > 0
        for kind in objects.KINDS:
            assert ask("put", size=size, kind=kind, repeats=2, pause=0.0)["fresh"] > 0
            for touch in (False, True):
                assert ask("get", size=size, kind=kind, readers=2, touch=touch, pause=0.0)["next"] > 0
            assert ask("hand_over", size=size, kind=kind, repeats=1)["rate"] > 0
            assert ask("pieces", size=size, kind=kind, count=5)["get_all"] > 0
            assert ask("weights", size=size, kind=kind, readers=2, pause=0.0)["time"] > 0


@pytest.mark.limit(120)
@pytest.mark.parametrize("peer", ["actorrpc", pytest.param("torch", marks=_NIGHTLY)])
def test_every_scenario_of_autograd_runs(stable: rigs.Stable, peer: str) -> None:
    bench = autograd_sections.GradientBench(stable, rounds=1, quick=True)
    with bench.groups([Member(peer)], bench.placements["one"], pairs=2) as found:
        assert bench.results.notes == []
        rig = found[Member(peer)]
        assert isinstance(rig, autograd_sections.GradientRig)
        rig.resume()
        for model, cases in autograd_sections.MODELS.items():
            sizes = dict(next(iter(cases.values())))
            if model == "server":
                sizes |= {"words": 100, "batch": 4, "seed": 1}
            rig.trainers("make", model=model, server=3, **sizes)
            results = rig.trainers("train", steps=2, warm=0)
            assert len(results) == 3
            assert all(each["time"] > 0 and math.isfinite(each["loss"]) for each in results)
        for path in ([1], [1, 2, 3, 0, 1]):
            times = rig.caller("chain", path=path, turns=2, warm=1)
            assert times["p50"] >= times["forward"] > 0 < times["backward"]
        assert rig.caller("activation", size=1 << 20, turns=1, warm=1)["both_ways"] > 0
        for plain in (False, True):
            assert rig.caller("alone", layers=2, turns=2, warm=1, plain=plain)["p50"] > 0
        for how in ("outside", "inside", "grad"):
            assert rig.caller("recording", turns=4, warm=1, how=how)["p50"] > 0
        assert all(each["seconds"] > 0 for each in rig.everyone("used"))
