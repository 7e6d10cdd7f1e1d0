"""The benchmark of actors: its arithmetic on made-up numbers, and its scenarios on a real session, without timing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import actors, actors_sections, actors_sessions, report, run, series
from benchmarks.actors_targets import ACTOR_TARGETS
from benchmarks.bench import Bench, Member
from benchmarks.rigs import Stable

ROOT = Path(__file__).resolve().parents[2]

DRAW = """
import pathlib, sys
from benchmarks import actors_chart, series
results = series.Results()
for section, case, placement, metric, peer, value in (
    ("actor call", "", "own", "p50", "ray", 700.0),
    ("actor call", "", "own", "p50", "actorrpc", 90.0),
    ("start", "init", "both", "time", "monarch", None),
):
    results.add(series.Key(section, case, "same host", placement, metric), peer, value)
actors_chart.draw_actors(pathlib.Path(sys.argv[1]), results, "made up")
"""


def test_targets_have_one_bound_and_unique_texts() -> None:
    for target in ACTOR_TARGETS:
        assert (target.at_most is None) != (target.at_least is None), target
        assert target.key.metric in report.METRICS
    assert len({target.text for target in ACTOR_TARGETS}) == len(ACTOR_TARGETS)


def test_report_judges_by_the_targets_it_is_given(tmp_path: Path) -> None:
    results = series.Results()
    target = next(target for target in ACTOR_TARGETS if target.versus == "ray" and target.at_most == 1 / 6)
    for ray, ours in ((600.0, 90.0), (700.0, 140.0), (800.0, 80.0)):
        results.add(target.key, "ray", ray)
        results.add(target.key, "actorrpc", ours)
    shown = report.text(results, {}, ACTOR_TARGETS)
    row = next(line for line in shown.splitlines() if line.startswith(f"| {target.text} "))
    assert row.rstrip("| ").endswith("yes")
    report.write_json(tmp_path / "actors.json", results, {}, ACTOR_TARGETS)
    verdicts = {each["text"]: each for each in json.loads((tmp_path / "actors.json").read_text())["targets"]}
    assert verdicts[target.text]["measured"] == pytest.approx(0.15)
    assert verdicts["actor call p50, own CPUs / Monarch"]["reached"] is None


@pytest.mark.prints(
    r"^usage: python -m benchmarks\.", r"^python -m benchmarks\.\w+: error: (argument --only|--rounds)"
)
def test_flags_of_the_actor_benchmark_are_parsed() -> None:
    assert run.parse(actors.ACTORS, []).rounds == 5
    assert run.parse(actors.ACTORS, ["--quick"]).rounds == 2
    assert run.parse(actors.ACTORS, ["--only", "calls"]).only == ["calls"]
    for wrong in (["--only", "nothing"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            run.parse(actors.ACTORS, wrong)


@pytest.mark.limit(60)
def test_the_chart_of_actors_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    # In a separate process, as matplotlib keeps font files open.
    subprocess.run([sys.executable, "-c", DRAW, tmp_path / "actors.png"], cwd=ROOT, check=True)
    assert (tmp_path / "actors.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.prints("^ *note: ray is not installed here")
def test_a_peer_that_is_not_installed_is_noted_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors_sessions, "interpreter", lambda peer: None)
    stable = Stable(tmp_path)
    try:
        bench = Bench(stable, rounds=1, quick=True)
        with actors_sessions.sessions(bench, ("ray",)) as (rigs, took):
            assert rigs == {Member("ray"): None}
            assert took == {"ray": {}}
        assert "ray is not installed" in bench.results.notes[0]
    finally:
        stable.close()


@pytest.mark.limit(120)
def test_every_scenario_of_actors_runs_on_actorrpc(tmp_path: Path) -> None:
    stable = Stable(tmp_path)
    try:
        bench = Bench(stable, rounds=1, quick=True)
        with actors_sessions.sessions(bench, ("actorrpc",)) as (rigs, took):
            assert bench.results.notes == []
            assert 0 < took["actorrpc"]["init"] <= took["actorrpc"]["first"]
            session = rigs[actors_sections.OURS]
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
    finally:
        stable.close()
