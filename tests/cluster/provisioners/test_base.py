"""The interface of engines, with an engine that starts workers by a command."""

from __future__ import annotations

import os
import subprocess
import threading
from typing import Any

import pytest

import actorrpc
from actorrpc.actors.spec.actor_spec import DeathReport
from actorrpc.cluster import LaunchedEngine, LaunchRequest, Node, init
from actorrpc.errors import ActorDiedError, PlacementError
from tests.cluster.drive import python
from tests.forks import exit_at_once

_RUN = "import sys; from actorrpc.cluster import join as joining; sys.exit(joining.serve_order())"


class Commands(LaunchedEngine):
    """An engine that starts each worker as a local process."""

    name = "commands"

    def __init__(self) -> None:
        super().__init__(start_timeout=60)
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.orders: list[LaunchRequest] = []
        self.closed = False

    def nodes(self) -> list[Node]:
        return [Node(host="here", num_cpus=2, resources={"tape": 1}, labels={"kind": "test"})]

    def launch(self, order: LaunchRequest) -> None:
        self.orders.append(order)
        if order.spec.label == "Broken":
            raise OSError("the scheduler is away")
        process = python("-c", _RUN, env=order.environment(), stdout=None, stderr=None)
        self.processes[order.name] = process
        threading.Thread(target=self._watch, args=(order.name, process), daemon=True).start()

    def _watch(self, name: str, process: subprocess.Popen[str]) -> None:
        code = process.wait()
        self.ended(name, DeathReport(worker=name, pid=process.pid, exit_code=code))

    def stop(self, worker: str) -> None:
        self.processes[worker].kill()

    def close(self) -> None:
        self.closed = True
        for process in self.processes.values():
            process.wait(10)


@actorrpc.remote
class Place:
    def where(self) -> int:
        return os.getpid()

    def end(self) -> None:
        exit_at_once(3)


@actorrpc.remote
class Broken:
    def method(self) -> None:
        """Never reached."""


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.prints(r"^worker 'Place-commands-\d+' has joined tcp://")
def test_a_custom_engine_starts_watches_and_stops_workers() -> None:
    engine = Commands()
    with init(engine=engine):
        handle: Any = Place.options(resources={"tape": 1}, labels={"kind": "test"}).remote()
        pid = actorrpc.get(handle.where.remote())
        (order,) = engine.orders
        assert engine.processes[order.name].pid == pid
        assert order.resources == {"tape": 1.0}
        assert order.secret not in repr(order)
        assert order.environment()["ACTORRPC_KEY"] == order.secret
        with pytest.raises(ActorDiedError, match="exited with code 3"):
            actorrpc.get(handle.end.remote())
        with pytest.raises(PlacementError, match=r"tape 2.*new processes on here"):
            Place.options(resources={"tape": 2}).remote()
        broken = Broken.remote()
        with pytest.raises(ActorDiedError, match="the scheduler is away"):
            actorrpc.get(broken.method.remote())
        left = Place.remote()
        assert actorrpc.get(left.where.remote()) != pid
    assert engine.closed
    assert [each.returncode for each in engine.processes.values()] == [3, 0]
