"""The Ray engine: scenarios on a real Ray if it is installed, and tests without Ray."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import time

import psutil
import pytest

import actorrpc
from actorrpc.cluster.provisioners.ray_link import missing
from actorrpc.errors import ConfigError

_MARK = "ACTORRPC_TEST_RAY"
_needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


def _marked(token: str) -> list[psutil.Process]:
    """Return the live processes that a scenario has started, with their descendants."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@_needs_ray
@pytest.mark.limit(240)
@pytest.mark.parametrize(
    "scenario",
    [
        "one_node",
        "one_actor",
        "several_nodes",
        "strict",
        "frozen",
        pytest.param(
            "client",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("aiohttp") is None,
                reason="Ray's server for clients needs ray[default]",
            ),
        ),
        "driver_killed",
        "refused",
    ],
)
def test_each_scenario_succeeds_on_a_real_ray_and_leaves_no_process(scenario: str) -> None:
    token = secrets.token_hex(8)
    environment = {**os.environ, _MARK: token, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "tests.cluster.ray_scenarios", scenario]
    left: list[psutil.Process] = []
    try:
        done = subprocess.run(
            command, env=environment, check=False, capture_output=True, text=True, timeout=220
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        assert done.stdout.endswith("done\n")
        end = time.monotonic() + 15
        while (left := _marked(token)) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left, [" ".join(process.cmdline())[:200] for process in left]
    finally:
        for process in _marked(token):
            process.send_signal(signal.SIGKILL)


def test_without_ray_installed_the_error_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for call in (
        lambda: actorrpc.init(engine="ray"),
        lambda: actorrpc.init("ray://head:10001"),
    ):
        with pytest.raises(ConfigError, match=r"actorrpc\[ray\]"):
            call()
        assert not actorrpc.is_initialized()


_TWO = [{"CPU": 4.0, "disk": 1.0}, {"CPU": 2.0, "GPU": 1.0}]


@pytest.mark.parametrize("strategy", [None, "PACK", "SPREAD"])
def test_ray_requests_that_fit_the_nodes_have_no_missing_resources(strategy: str | None) -> None:
    assert missing({"CPU": 1.0}, 6, strategy, _TWO) == ""
    assert missing({"CPU": 0.5, "GPU": 0.5}, 2, strategy, _TWO) == ""
    assert missing({}, 100, strategy, _TWO) == ""


@pytest.mark.parametrize(
    ("shape", "count", "strategy", "text"),
    [
        ({"CPU": 5.0}, 1, None, "no node has CPU 5 (the most on one node: 4)"),
        ({"TPU": 1.0}, 1, None, "no node has TPU 1 (the most on one node: 0)"),
        ({"disk": 1.0, "GPU": 1.0}, 1, None, "no single node has all"),
        ({"CPU": 1.0}, 7, "SPREAD", "all nodes together hold 6"),
        ({"CPU": 1.0}, 3, "STRICT_SPREAD", "needs 3 nodes"),
        ({"GPU": 1.0}, 2, "STRICT_SPREAD", "there are 1"),
        ({"CPU": 1.0}, 5, "STRICT_PACK", "no node holds more than 4"),
    ],
)
def test_ray_requests_that_do_not_fit_name_the_missing_resource(
    shape: dict[str, float], count: int, strategy: str | None, text: str
) -> None:
    assert text in missing(shape, count, strategy, _TWO)


def test_without_nodes_no_request_fits() -> None:
    assert missing({}, 1, None, []) == "Ray has no nodes"
