"""The views of the dashboard for a running cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import autograd
from actorrpc.cli.dashboard.feed import Feed
from actorrpc.observe.outside import find_groups, look
from tests.actors.e2e.kit import open_gate, pass_gate, until
from tests.dashboard.fakes import ServedPage, served

pytestmark = [pytest.mark.limit(30)]


@actorrpc.remote
class Store:
    def __init__(self) -> None:
        print("a store is made", flush=True)

    def pass_gate(self, path: str) -> str:
        return pass_gate(path)

    def double(self, value: torch.Tensor) -> torch.Tensor:
        return 2 * value


def _counted(rows: list[dict[str, Any]]) -> int:
    return sum(
        each["count"] for each in rows if (each["side"], each["method"]) == ("server", "Store/pass_gate")
    )


def _drawn(found: dict[str, Any]) -> list[str]:
    """Return the calls with an arrow to an execution of the actor."""
    slices, lanes = found["slices"], found["lanes"]
    reached = [each for each in slices if each[7] >= 0]
    return [
        found["texts"][each[4]] for each in reached if lanes[slices[each[7]][0]][:2] == [1, "Store('store')"]
    ]


class _Browser:
    """A logged-in client of the page."""

    def __init__(self, page: ServedPage) -> None:
        self._page = page
        self._cookie = page.log_in()

    def get(self, path: str) -> dict[str, Any]:
        status, _, body = self._page.ask(path, Cookie=self._cookie)
        assert status == 200
        found: dict[str, Any] = json.loads(body)
        return found


@pytest.mark.slow
def test_views_show_the_actors_stacks_logs_memory_calls_and_passes_of_a_cluster(tmp_path: Path) -> None:
    gates = [tmp_path / "first", tmp_path / "second"]
    for gate in gates:
        os.mkfifo(gate)
    with actorrpc.init(num_cpus=2, log_to_driver=False):
        groups = find_groups(os.getpid())
        feed = Feed(lambda parts, begin=None: look(groups[0], parts, 30.0, begin=begin), lambda: groups, 0.02)
        store = Store.options(name="store").remote()
        calls = [store.pass_gate.remote(str(gate)) for gate in gates]
        with served(feed) as page:
            browser = _Browser(page)
            # The actor runs calls shortly before the driver knows that it was created.
            until(
                lambda: any(
                    each["waiting"] and each["runs"] and each["state"] == "ALIVE"
                    for each in browser.get("api/actors")["rows"]
                )
            )
            (row,) = browser.get("api/actors?q=store")["rows"]
            assert (row["title"], row["waiting"], row["state"]) == ("Store('store')", 1, "ALIVE")
            assert "pass_gate() for 'driver'" in row["runs"][0]
            seen = browser.get("api/now")
            assert [each["state"] for each in seen["workers"]] == ["alive", "alive"]
            assert seen["pid"] == os.getpid()
            # The stack of the running call comes first.
            fold = browser.get("api/stacks")["folds"][0]
            assert "pass_gate" in fold["calls"][0]
            assert "pass_gate" in [name for name, _, _ in fold["frames"]]
            (line,) = browser.get("api/logs?q=A%20STORE")["lines"]
            assert line["text"] == "a store is made"
            assert browser.get("api/logs?whom=stranger")["lines"] == []
            kept = actorrpc.put(torch.ones(1 << 20))
            until(lambda: browser.get("api/memory")["objects"])
            (held,) = browser.get("api/memory")["objects"]
            assert held["label"] == "put(Tensor)"
            assert held["site"].rpartition("/")[2].startswith("test_live.py:")
            assert held["holders"] == ["driver"]
            assert {"owner": "driver", "holder": "driver", "what": "actor"}.items() <= (
                browser.get("api/memory")["holders"][0].items()
            )
            del kept
            browser.get("api/calls")  # from now on, workers count calls
            for gate in gates:
                open_gate(gate)
            actorrpc.get(calls)
            until(lambda: _counted(browser.get("api/calls")["rows"]) >= 2)
            until(lambda: "Store.pass_gate" in _drawn(browser.get("api/timeline?seconds=300")))
            with autograd.context() as context:
                doubled = actorrpc.get(store.double.remote(torch.ones(2, requires_grad=True)))
                until(lambda: len(browser.get("api/now")["training"]["hops"]) == 2)
                assert browser.get("api/now")["training"]["contexts"][0]["origin"] == "driver"
                autograd.backward(context, [doubled.sum()])
            events = browser.get("api/trace")["traceEvents"]
            assert {each["ph"] for each in events} >= {"M", "X", "s", "f"}
