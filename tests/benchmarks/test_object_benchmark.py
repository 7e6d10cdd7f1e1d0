"""The benchmark of objects: its targets, and its scenarios on a real session, without timing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import actors_sessions, objects, report, run
from benchmarks.bench import Bench, Member
from benchmarks.rigs import Stable


def test_targets_have_one_bound_and_unique_texts() -> None:
    for target in objects.OBJECT_TARGETS:
        assert (target.at_most is None) != (target.at_least is None), target
        assert report.metric_title(target.key) != target.key.metric
    assert len({target.text for target in objects.OBJECT_TARGETS}) == len(objects.OBJECT_TARGETS)
    assert run.parse(objects.OBJECTS, ["--quick", "--only", "put"]).rounds == 2


@pytest.mark.slow
@pytest.mark.limit(120)
def test_every_scenario_of_objects_runs_on_actorrpc(tmp_path: Path) -> None:
    size = 1 << 20
    stable = Stable(tmp_path)
    try:
        bench = Bench(stable, rounds=1, quick=True)
        with actors_sessions.sessions(bench, ("actorrpc",), objects.MODULE) as (rigs, _):
            assert bench.results.notes == []
            session = rigs[Member("actorrpc")]
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
    finally:
        stable.close()
