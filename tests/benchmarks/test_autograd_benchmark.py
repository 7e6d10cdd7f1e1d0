"""The benchmark of autograd: its arithmetic on made-up numbers, and its scenarios on real groups, without timing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import autograd, autograd_breakdown, autograd_sections, report, run, series
from benchmarks.autograd_sections import MODELS, GradientBench, GradientRig, slope
from benchmarks.autograd_targets import AUTOGRAD_TARGETS
from benchmarks.bench import Member
from benchmarks.rigs import Stable

ROOT = Path(__file__).resolve().parents[2]
_NIGHTLY = pytest.mark.skipif(os.environ.get("ACTORRPC_NIGHTLY") != "1", reason="torch's side: nightly")
KEY = series.Key("made up", "", "same host", "one", "p50")

DRAW = """
import pathlib, sys
from benchmarks import autograd_chart, series
results = series.Results()
for section, case, placement, metric, peer, value in (
    ("rnn", "tutorial, 2 workers", "own", "time", "torch", 9.0),
    ("rnn", "tutorial, 2 workers", "own", "time", "actorrpc", 3.0),
    ("chain", "1 hop, 2 workers", "one", "p50", "actorrpc", 400.0),
    ("chain", "2 hops, 2 workers", "one", "p50", "actorrpc", 700.0),
    ("activation", "64 MiB", "one", "both_ways", "torch", None),
):
    results.add(series.Key(section, case, "same host", placement, metric), peer, value)
autograd_chart.draw_autograd(pathlib.Path(sys.argv[1]), results, "made up")
"""


def test_targets_have_one_bound_and_known_metrics_and_sections() -> None:
    for target in AUTOGRAD_TARGETS:
        assert (target.at_most is None) != (target.at_least is None), target
        assert target.key.metric in report.METRICS
        assert target.key.section in {*autograd_sections.AUTOGRAD_SECTIONS, "local pass"}
    assert len({target.text for target in AUTOGRAD_TARGETS}) == len(AUTOGRAD_TARGETS)


def test_slope_is_the_cost_of_one_more_unit() -> None:
    assert slope((1, 2, 4), [110.0, 120.0, 140.0]) == pytest.approx(10.0)
    assert slope((1, 2, 4), [110.0, None, 140.0]) == pytest.approx(10.0)
    assert slope((1, 2, 4), [110.0, None, None]) is None


def test_report_compares_with_torch_and_with_plain_autograd(tmp_path: Path) -> None:
    results = series.Results()
    target = next(target for target in AUTOGRAD_TARGETS if target.key.section == "rnn")
    for theirs, ours in ((9.0, 3.0), (10.0, 6.0), (8.0, 2.0)):
        results.add(target.key, "torch", theirs)
        results.add(target.key, "actorrpc", ours)
    local = series.Key("local pass", "1 layer", "same host", "own", "p50")
    for peer, value in (("plain", 50.0), ("actorrpc", 75.0)):
        results.add(local, peer, value)
    shown = report.text(results, {}, AUTOGRAD_TARGETS)
    row = next(line for line in shown.splitlines() if line.startswith(f"| {target.text} "))
    assert row.rstrip("| ").endswith("yes")
    assert "actorrpc / plain" in shown
    report.write_json(tmp_path / "autograd.json", results, {}, AUTOGRAD_TARGETS)
    verdicts = {
        each["text"]: each for each in json.loads((tmp_path / "autograd.json").read_text())["targets"]
    }
    assert verdicts[target.text]["measured"] == pytest.approx(1 / 3)


@pytest.mark.prints(
    r"^usage: python -m benchmarks\.", r"^python -m benchmarks\.\w+: error: (argument --only|--rounds)"
)
def test_flags_of_the_autograd_benchmark_are_parsed() -> None:
    assert run.parse(autograd.AUTOGRAD, []).rounds == 5
    assert run.parse(autograd.AUTOGRAD, ["--quick"]).rounds == 2
    assert run.parse(autograd.AUTOGRAD, ["--only", "rnn"]).only == ["rnn"]
    for wrong in (["--only", "nothing"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            run.parse(autograd.AUTOGRAD, wrong)


@pytest.mark.limit(60)
def test_the_chart_of_autograd_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    # In a separate process, as matplotlib keeps font files open.
    subprocess.run([sys.executable, "-c", DRAW, tmp_path / "autograd.png"], cwd=ROOT, check=True)
    assert (tmp_path / "autograd.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_writes_its_table_json_and_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tiny(bench: GradientBench) -> None:
        bench.results.add(KEY, "actorrpc", 1.0)

    drawn: list[Path] = []
    drawing = replace(autograd.AUTOGRAD, draw=lambda path, *_: drawn.append(path))
    monkeypatch.setattr(autograd, "AUTOGRAD", drawing)
    monkeypatch.setitem(autograd_sections.AUTOGRAD_SECTIONS, "chain", tiny)
    assert autograd.main(["--only", "chain", "--rounds", "1", "--out", str(tmp_path)]) == 0
    assert "made up" in capsys.readouterr().out
    assert json.loads((tmp_path / "autograd-partial.json").read_text())["series"][0]["values"] == [1.0]
    assert drawn == [tmp_path / "autograd-partial.png"]


@contextmanager
def group(tmp_path: Path, peer: str, pairs: int) -> Iterator[GradientRig]:
    """Run a group of one peer on one CPU."""
    stable = Stable(tmp_path)
    bench = GradientBench(stable, rounds=1, quick=True)
    try:
        with bench.groups([Member(peer)], bench.placements["one"], pairs=pairs) as rigs:
            assert bench.results.notes == []
            rig = rigs[Member(peer)]
            assert isinstance(rig, GradientRig)
            rig.resume()
            yield rig
    finally:
        stable.close()


@pytest.mark.limit(120)
@pytest.mark.parametrize("peer", ["actorrpc", pytest.param("torch", marks=_NIGHTLY)])
def test_every_scenario_of_autograd_runs(tmp_path: Path, peer: str) -> None:
    with group(tmp_path, peer, pairs=2) as rig:
        for model, cases in MODELS.items():
            sizes = dict(next(iter(cases.values())))
            if model == "server":
                sizes |= {"words": 100, "batch": 4, "seed": 1}
            rig.trainers("make", model=model, server=3, **sizes)
            results = rig.trainers("train", steps=2, warm=0)
            assert len(results) == 3
            for each in results:
                assert each["time"] > 0
                assert math.isfinite(each["loss"])
        for path in ([1], [1, 2, 3, 0, 1]):
            found = rig.caller("chain", path=path, turns=2, warm=1)
            assert found["p50"] >= found["forward"] > 0 < found["backward"]
        assert rig.caller("activation", size=1 << 20, turns=1, warm=1)["both_ways"] > 0
        for plain in (False, True):
            assert rig.caller("alone", layers=2, turns=2, warm=1, plain=plain)["p50"] > 0
        for how in ("outside", "inside", "grad"):
            assert rig.caller("recording", turns=4, warm=1, how=how)["p50"] > 0
        assert all(each["seconds"] > 0 for each in rig.everyone("used"))


def losses(tmp_path: Path, peer: str, steps: int) -> list[dict[str, float]]:
    """Return the losses of training both models on a peer."""
    results = []
    with group(tmp_path, peer, pairs=1) as rig:
        for model, cases in MODELS.items():
            sizes = next(iter(cases.values())) | ({"words": 1000, "seed": 1} if model == "server" else {})
            rig.trainers("make", model=model, server=1, **sizes)
            results.append(
                {
                    f"{model} {step}": rig.trainers("train", steps=1, warm=0)[0]["loss"]
                    for step in range(steps)
                }
            )
    return results


@pytest.mark.limit(120)
@_NIGHTLY
def test_both_backends_train_with_the_same_losses(tmp_path: Path) -> None:
    ours, theirs = (losses(tmp_path, peer, 4) for peer in ("actorrpc", "torch"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
        assert len(set(mine.values())) == 4  # all losses differ


def test_the_breakdown_has_a_part_for_every_module_that_a_step_runs() -> None:
    package = ROOT / "actorrpc"
    for floor in ("agent", "autograd", "optim", "rpc", "serialization", "transport", "wire"):
        for path in (package / floor).rglob("*.py"):
            function = f"{path.relative_to(package).with_suffix('')}.something"
            assert autograd_breakdown.part_of(function) != "user code", function
    assert autograd_breakdown.part_of("sgd.SGD.step") == "user code"
    assert autograd_breakdown.part_of("autograd/graph.receive") == "recording"
    assert autograd_breakdown.part_of("autograd/graph.capture") == "engine"
