"""Calls with pending arguments whose worker ends before the call is sent."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

import actorrpc
from actorrpc import errors
from actorrpc.actors.client.pending_call import CallState, ResultFuture
from actorrpc.agent.context import current_worker
from actorrpc.testing import InProcessCluster
from tests.actors.e2e.kit import until

_released = threading.Event()


class Source:
    def later(self) -> int:
        assert _released.wait(20)
        return 7


class Target:
    def note(self, value: int) -> int:
        return value


@pytest.mark.limit(60)
def test_a_reserved_call_whose_connection_has_closed_ends_as_an_ordinary_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _released.clear()
    with InProcessCluster(2, clock="real"):
        source: Any = actorrpc.remote(Source).options(worker="worker0").remote()
        target: Any = actorrpc.remote(Target).options(worker="worker1").remote()
        assert actorrpc.get(target.note.remote(1), timeout=20) == 1
        worker = current_worker()
        assert worker is not None
        agent = worker.agent
        held: list[partial[None]] = []
        closed = threading.Event()

        def hold(conn: Any, error: BaseException | None, lost: Any = agent.lost) -> None:
            held.append(partial(lost, conn, error))
            closed.set()

        monkeypatch.setattr(agent, "lost", hold)
        argument = source.later.remote()
        call = target.note.remote(argument)
        conn = agent.peer("worker1").conn
        assert conn is not None
        conn.close()
        assert closed.wait(20)
        _released.set()
        future = call._future
        assert isinstance(future, ResultFuture)
        until(lambda: future.state is not CallState.IN_FLIGHT)
        monkeypatch.undo()
        for lost in held:
            lost()
        with pytest.raises(errors.ActorDiedError) as caught:
            actorrpc.get(call, timeout=20)
        assert caught.value.maybe_executed is False
        del source, target, call, argument
