"""A trace of two workers whose clocks differ by 1000 seconds, as one of them is in a time namespace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from tests import output
from tests.actors.e2e.kit import until
from tests.cluster.joiners import CLEAN

_APART_S = 1000
_ELSEWHERE = ("unshare", "--time", "--monotonic", str(_APART_S), "--mount", "--fork", "--kill-child")
_ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.limit(90), pytest.mark.slow]


@actorrpc.remote
class Clock:
    def now(self) -> float:
        return time.monotonic()


def test_trace_arrows_between_workers_point_backwards_by_at_most_the_stated_clock_error(
    tmp_path: Path,
) -> None:
    probe = subprocess.run([*_ELSEWHERE, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"time namespaces are not available: {probe.stderr.strip()}")
    with actorrpc.init(listen="tcp://127.0.0.1:0", num_cpus=0, log_to_driver=False) as context:
        joins = subprocess.Popen(
            [
                *(*_ELSEWHERE, sys.executable, "-m", "actorrpc.worker", "--join", context.address),
                *("--num-cpus", "1", "--name", "elsewhere"),
            ],
            env={**CLEAN, "PYTHONPATH": str(_ROOT), "ACTORRPC_KEY": _key()},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        try:
            until(lambda: any(each.name == "elsewhere" for each in actorrpc.workers()))
            clock = Clock.options(num_cpus=1).remote()
            assert abs(actorrpc.get(clock.now.remote()) - time.monotonic() - _APART_S) < _APART_S / 10
            actorrpc.get([clock.now.remote() for _ in range(50)])
            path = tmp_path / "trace.json"
            until(lambda: actorrpc.trace(path).arrows >= 51)
            summary = actorrpc.trace(path)
        finally:
            joins.kill()
            _, err = joins.communicate()
    output.check(err, r"^worker '.*' has joined tcp://", what="a worker that joined")
    assert summary.uncompared == ()
    assert 0.0 < summary.clock_error < _APART_S / 10
    assert summary.seconds < _APART_S / 10
    ends: dict[int, dict[str, Any]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], {})[event["ph"]] = event
    between = [each for each in ends.values() if each["s"]["pid"] != each["f"]["pid"]]
    assert len(between) >= 102
    for each in between:
        assert each["f"]["ts"] - each["s"]["ts"] >= -1e6 * summary.clock_error - 0.01


def _key() -> str:
    return os.environ["ACTORRPC_KEY"]


@pytest.fixture(autouse=True)
def _given_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORRPC_KEY", "a key for the tests of clocks, long enough")
