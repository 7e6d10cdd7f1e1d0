"""Profiles: selection of samples, and the formats of the files."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc.cli import profile
from actorrpc.cli.profile import Sampler
from actorrpc.observe.visitor import Target

_OURS = f"{Path(actorrpc.__file__).parent}/agent/threads.py"


def _target() -> Target:
    return Target(record=None, addresses=[], key=None)


def _sampler(actors: dict[str, str] | None = None, *, with_idle: bool = False) -> Sampler:
    return Sampler("w", _target(), actors, with_idle)


def _thread(ident: int, *functions: str, name: str = "main") -> dict[str, Any]:
    files = {"_loop": _OURS}
    frames = [{"function": each, "file": files.get(each, "/user/a.py"), "line": 1} for each in functions]
    return {"ident": ident, "name": name, "frames": frames}


def _functions(sampler: Sampler) -> dict[int, list[tuple[list[str], int]]]:
    return {
        ident: [([function for function, _ in stack], seen) for stack, seen in thread.stacks]
        for ident, thread in sampler.threads.items()
    }


def test_a_profile_of_an_actor_has_only_the_threads_of_its_calls() -> None:
    sampler = _sampler({"a1": "Store('a')"})
    actors = [
        {"actor_id": "a1", "running": [{"thread": 1}, {"thread": 0}]},
        {"actor_id": "a2", "running": [{"thread": 2}]},
    ]
    threads = [_thread(1, "f"), _thread(2, "g"), _thread(3, "h", name="helper of Store('a')")]
    sampler.add({"threads": threads, "actors": actors})
    sampler.add({"threads": threads, "actors": [{"actor_id": "a1", "running": []}]})
    assert _functions(sampler) == {1: [(["f"], 1)], 3: [(["h"], 2)]}


def test_a_profile_without_any_answer_says_why_and_writes_no_file() -> None:
    sampler = _sampler()
    profile.sample([sampler], 1.0, 1.0, 1.0, threading.Event())
    assert sampler.why == "it listens on no address that this process can reach"
    numbers = dict.fromkeys(("workers", "threads", "samples", "late", "lost"), 0)
    summary = profile.ProfileSummary(path="", seconds=1.0, rate=1.0, missing={"w": "why"}, **numbers)
    lines = profile.lines(summary, False)
    assert lines[0].startswith("there is nothing to sample, and no file was written")
    assert lines[1:] == ["w is missing: why", "actorrpc stack w shows where it is"]


@pytest.fixture
def sampled() -> Sampler:
    """Samples of a worker, taken four times."""
    sampler = _sampler()
    for functions in (("f", "g"), ("f", "g"), ("f",), ("f", "g")):
        sampler.add({"threads": [_thread(1, *functions), _thread(2, "a;b\n", name="")]})
    return sampler


def test_the_profile_has_the_format_of_speedscope(sampled: Sampler, tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    assert profile.write(path, [sampled], {}, 1.0, 4.0, False).threads == 2
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    assert found["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert found["shared"]["frames"] == [{"name": name, "file": "/user/a.py"} for name in ("f", "g", "a;b\n")]
    kind = {"type": "sampled", "unit": "seconds", "startValue": 0, "endValue": 1.0}
    assert found["profiles"] == [
        {**kind, "name": "w: main", "samples": [[0, 1], [0], [0, 1]], "weights": [0.5, 0.25, 0.25]},
        {**kind, "name": "w: thread 2", "samples": [[2]], "weights": [1.0]},
    ]


def test_the_collapsed_profile_has_the_format_of_flamegraph(sampled: Sampler, tmp_path: Path) -> None:
    path = tmp_path / "profile.txt"
    assert profile.write(str(path), [sampled], {}, 1.0, 4.0, True).threads == 2
    assert path.read_text() == "w;main;f (a.py) 1\nw;main;f (a.py);g (a.py) 3\nw;thread 2;a,b (a.py) 4\n"
