"""Actions of visitors: only a visitor that declared actions in its handshake may kill, restart or drain."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

import actorrpc
from actorrpc import rpc
from actorrpc.errors import ActorDiedError
from actorrpc.observe.outside import find_groups
from actorrpc.observe.visitor import Target, Visit
from tests.actors.e2e.kit import until
from tests.ports import free_port

pytestmark = [pytest.mark.limit(60)]


@actorrpc.remote(max_restarts=1)
class Store:
    def __init__(self) -> None:
        self.number = 0

    def add(self) -> int:
        self.number += 1
        return self.number


def _act(target: Target, what: str, whom: str, *, acts: bool = True) -> str:
    limit = time.monotonic() + 30
    visit = Visit(target, limit, acts=acts)
    try:
        return visit.act(what, whom, limit)
    finally:
        visit.close()


@pytest.fixture
def alone(request: pytest.FixtureRequest) -> Iterator[Target]:
    """A worker in this process; it takes data only if the parameter says so."""
    options = rpc.RpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{free_port()}", data_only=getattr(request, "param", False)
    )
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        (group,) = find_groups(os.getpid())
        yield group.targets[0]
    finally:
        rpc.shutdown()


@pytest.mark.prints(r"\(pid \d+\)")
def test_a_read_only_visitor_cannot_kill_or_drain(alone: Target, caplog: pytest.LogCaptureFixture) -> None:
    for what, whom in (("kill", "0" * 16), ("drain", "alone"), ("eval", "1")):
        assert "this visitor may only read" in _act(alone, what, whom, acts=False)
    lines = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(lines) == 3
    assert all("not done" in each and f"pid {os.getpid()}" in each for each in lines)


@pytest.mark.prints(r"\(pid \d+\)")
def test_impossible_actions_return_the_reason(alone: Target) -> None:
    assert "'eval'" in _act(alone, "eval", "1 + 1")
    assert "is not the driver" in _act(alone, "drain", "alone")
    assert "invalid literal" in _act(alone, "kill", "x")


@pytest.mark.prints(r"\(pid \d+\)")
@pytest.mark.parametrize("alone", [True], indirect=True)
def test_a_data_only_worker_refuses_actions(alone: Target) -> None:
    assert "data only" in _act(alone, "kill", "0" * 16)


def _is_dead(actor: Any) -> bool:
    try:
        actorrpc.get(actor.add.remote())
    except ActorDiedError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.prints(r"\(pid \d+\)|it has left")
def test_a_visitor_can_kill_and_restart_actors_and_drain_workers(caplog: pytest.LogCaptureFixture) -> None:
    with actorrpc.init(num_cpus=2, log_to_driver=False):
        (group,) = find_groups(os.getpid())
        driver = group.targets[0]
        first, second = Store.remote(), Store.remote()
        assert actorrpc.get([first.add.remote(), first.add.remote(), second.add.remote()]) == [1, 2, 1]
        names = {each.actor_id: each.worker for each in actorrpc.state(30).actors}
        one, other = (f"{actor.actor_id:016x}" for actor in (first, second))
        assert _act(driver, "restart", one) == ""
        until(lambda: {each.actor_id: each.restarts for each in actorrpc.state(30).actors}[one] == 1)
        assert actorrpc.get(first.add.remote()) == 1
        assert _act(driver, "kill", one) == ""
        # While the process ends, a call may still be answered.
        until(lambda: _is_dead(first))
        assert "driver cannot be drained" in _act(driver, "drain", "driver")
        assert _act(driver, "drain", names[other]) == ""
        until(lambda: f"drain {names[other]}: it has left" in caplog.text)
    assert f"restart {one}" in caplog.text
    assert f"kill {one}" in caplog.text
