"""Operators on several hosts: what ``status``, ``doctor``, ``logs`` and the functions of the driver say about far workers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.drive import until
from tests.cluster.machines import Machines, Program, program
from tests.faults.hosts import Network, needs_hosts

# The driver is killed at the end of each test.
pytestmark = [
    needs_hosts,
    pytest.mark.slow,
    pytest.mark.prints("^worker '.*' has (joined|lost its driver at) tcp://"),
]
_ADDRESS = "tcp://10.77.0.1:7777"


class _Console:
    """The driver on host a, and commands on its host."""

    def __init__(self, machines: Machines, *settings: str) -> None:
        place = program(machines, "a", "console.py")
        self._machines = machines
        self._driver = machines.start("a", sys.executable, str(place / "console.py"), _ADDRESS, *settings)
        self._driver.expect("listening")

    def __call__(self, expression: str) -> Any:
        """Evaluate an expression in the driver."""
        self._driver.tell(expression)
        return json.loads(self._driver.expect("found"))

    def join(self, host: str, *arguments: str, **env: str) -> Program:
        """Start a worker on a host, and wait until it has joined."""
        worker = self._machines.join(host, _ADDRESS, *arguments, env=env)
        until(lambda: "has joined" in worker.errors or worker.process.poll() is not None)
        return worker

    def command(self, *words: str, host: str = "a", status: int = 0, **env: str) -> str:
        """Run a command on a host, check its exit status, and return its output."""
        run = self._machines.start(host, sys.executable, "-m", "actorrpc", *words, env=env)
        out, _ = run.process.communicate()
        assert run.process.returncode == status, out + run.errors
        return out


@pytest.fixture
def machines() -> Iterator[Machines]:
    with Network("a", "b") as network, Machines(network) as made:
        yield made


def test_a_worker_that_accepts_no_connections_is_seen_through_the_driver(machines: Machines) -> None:
    driver = _Console(machines)
    machines.network.close_port("b", 7801)
    driver.join("b", ACTORRPC_PORT="7801")
    found = json.loads(driver.command("status", "--json", "--timeout", "5"))
    (worker,) = [each for each in found["groups"][0]["workers"] if each["name"] == "b"]
    assert (worker["state"], worker["through"], bool(worker["memory"])) == ("alive", "driver", True)
    assert "1 worker seen through 'driver'" in driver.command("doctor", "--timeout", "5")
    # one name and one address per host
    assert (worker["host"], worker["address"]) == ("b", "10.77.0.2")
    rows = driver("[(each.name, each.host, each.address) for each in actorrpc.workers()]")
    assert rows == [["driver", "a", "10.77.0.1"], ["b", "b", "10.77.0.2"]]
    nodes = driver("[(each['NodeManagerHostname'], each['NodeManagerAddress']) for each in actorrpc.nodes()]")
    assert nodes == [["a", "10.77.0.1"], ["b", "10.77.0.2"]]
    resources = driver("sorted(each for each in actorrpc.cluster_resources() if each.startswith('node:'))")
    assert resources == ["node:10.77.0.1", "node:10.77.0.2"]


@pytest.mark.prints(r"\(pid \d+\): drain", "it has left$")
def test_the_drain_command_on_another_host_finds_the_workers_and_says_that_all_have_left(
    machines: Machines,
) -> None:
    driver = _Console(machines)
    workers = driver.join("b", "--count", "2")
    until(lambda: workers.errors.count("has joined") == 2)
    said = driver.command("drain", "b", host="b").splitlines()
    assert sorted(said) == ["worker b-0 has left", "worker b-1 has left"]
    workers.ends()
    assert driver("[each.name for each in actorrpc.workers() if each.state == 'alive']") == ["driver"]


@pytest.mark.prints("y{999}$", "the end$", "dropped here")
def test_the_output_of_a_far_worker_is_shown_by_the_driver_and_kept_in_a_file(machines: Machines) -> None:
    driver = _Console(machines, "log_rate=1000000")
    worker = driver.join("b")
    for lines in ("['y' * 1000 + chr(10)] * 9000", "['the end' + chr(10)]"):
        code = f"__import__('sys').stderr.writelines({lines})"
        driver(f"actorrpc.rpc.rpc_sync('b', eval, args=({code!r},))")
    driver("actorrpc.drain('b')")
    worker.ends()
    assert worker.errors.count("y\n") == 9000
    shown = driver.command("logs")
    dropped = r"\[\d+ lines \(\d+ bytes\) were dropped here: .* in /.*/log/b.log on host 'b'\]"
    assert re.search(rf"\(b pid=\d+, host=b\) {dropped}\n", shown)
    assert re.search(r"\(b pid=\d+, host=b\) the end\n", shown)
    with open(machines.network["b"].directory / "log" / "b.log") as file:
        assert file.read().count("y\n") == 9000
