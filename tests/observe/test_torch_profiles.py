"""Profiles of torch.profiler that workers keep: malformed profiles, times and ids, and the trace of a cluster."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc.errors import NotInitializedError
from actorrpc.observe import keep_profile
from actorrpc.observe.torch_profiles import TorchProfile
from actorrpc.observe.trace import Recording, events_of
from tests.announced import PROFILER

pytestmark = [pytest.mark.limit(60)]


def test_keep_profile_outside_of_a_group_raises_not_initialized_error() -> None:
    with pytest.raises(NotInitializedError, match="this process is in none"):
        keep_profile(torch.profiler.profile())


def _packed(document: Any, shift: object = 100.0) -> bytes:
    return zlib.compress(f"{shift!r}\n{json.dumps(document)}".encode())


def _profile(*events: dict[str, Any], base_s: float = 1000.0) -> TorchProfile:
    found = TorchProfile.read(
        _packed({"baseTimeNanoseconds": int(base_s * 1e9), "traceEvents": list(events)})
    )
    assert found is not None
    return found


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"no compression",
        zlib.compress(b"no line"),
        zlib.compress(b"1.0\nno json"),
        _packed([]),
        _packed({}),
        _packed({"traceEvents": 1}),
        _packed({"traceEvents": []}, "x"),
        _packed({"traceEvents": [], "baseTimeNanoseconds": "x"}),
        _packed({"traceEvents": [], "baseTimeNanoseconds": 1e999}),
    ],
)
def test_malformed_torch_profiles_are_ignored(packed: bytes) -> None:
    assert TorchProfile.read(packed) is None
    answer = {"recorder": {"on": True}, "records": [], "profiles": [[1, packed], 7, [1], ["x", b""]]}
    assert Recording.of("w", 1, answer).profiles == []


def test_events_of_merged_torch_profiles_share_one_time_axis_and_have_unique_ids() -> None:
    own, gpu = {"pid": 41, "tid": 41}, {"pid": 0, "tid": 7}
    events = (
        {"ph": "M", "name": "process_name", "ts": 1, **own, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "ts": 1, **own, "args": {"name": "thread 41"}},
        {"ph": "M", "name": "process_name", "ts": 1, **gpu, "args": {"name": "GPU 0"}},
        {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 2_000_000.0, "dur": 5.0, **own},
        {"ph": "s", "name": "ac2g", "cat": "ac2g", "id": 3, "ts": 2_000_001.0, **own},
        {"ph": "f", "name": "ac2g", "cat": "ac2g", "id": 3, "ts": 2_000_002.0, "bp": "e", **gpu},
        {"ph": "X", "name": "nonsense", "ts": "x", **own},
        {"name": "nonsense"},
    )
    made = []
    for worker in ("a", "b"):
        recording = Recording(worker=worker, pid=41, profiles=[_profile(*events)])
        recording.offset = 3.0
        made.append(recording)
    counts: dict[str, Any] = {}
    found = list(events_of(made, counts))
    assert counts["profiles"] == 2
    assert counts["seconds"] == pytest.approx(5e-6)
    ops = [each for each in found if each["name"] == "aten::mm"]
    assert [each["ts"] for each in ops] == [0.0, 0.0]
    assert len({each["pid"] for each in ops}) == 2  # the process ids of two hosts may be equal
    gpus = {each["args"]["name"]: each["pid"] for each in found if "torch: GPU" in str(each.get("args"))}
    assert set(gpus) == {"a, torch: GPU 0", "b, torch: GPU 0"}
    ends = [(each["pid"], each["ph"], each["id"]) for each in found if each["name"] == "ac2g"]
    assert len({id for _, _, id in ends}) == 2
    assert {pid for pid, kind, _ in ends if kind == "f"} == set(gpus.values())
    names = [each["args"]["name"] for each in found if each["ph"] == "M" and each["pid"] == ops[0]["pid"]]
    assert names == ["a (pid 41)", "torch: thread 41"]


@actorrpc.remote
class Trainer:
    def train(self) -> None:
        with (
            torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], on_trace_ready=keep_profile
            ),
            torch.profiler.record_function("a step"),
        ):
            torch.ones(8, 8) @ torch.ones(8, 8)


# torch prints the second line for a profiler outside of the main thread.
@pytest.mark.prints(PROFILER, "^ERROR: External init callback")
def test_profiled_operators_lie_within_the_call_that_ran_them(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with actorrpc.init(num_cpus=2):
        trainers = [Trainer.remote() for _ in range(2)]
        actorrpc.get([each.train.remote() for each in trainers])
        summary = actorrpc.trace(path)
        del trainers
    assert summary.profiles == 2
    events = json.loads(path.read_text())["traceEvents"]
    runs = {
        each["pid"]: each
        for each in events
        if each["ph"] == "X" and each["name"].endswith(".train") and each["cat"] == "execution"
    }
    steps = [each for each in events if each["ph"] == "X" and each["name"] == "a step"]
    assert len(runs) == len(steps) == 2
    for step in steps:
        run = runs[step["pid"]]
        assert run["ts"] <= step["ts"]
        assert step["ts"] + step["dur"] <= run["ts"] + run["dur"]
