"""Calls with pending arguments whose connection closes, or which are cancelled, while they are sent."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import actorrpc
from actorrpc import errors, rpc
from actorrpc.actors.client.pending_call import ResultFuture
from actorrpc.agent.calls import Call
from actorrpc.agent.context import current_worker
from actorrpc.testing import InProcessCluster
from tests.actors.e2e.kit import until

_released = threading.Event()
_pickling: list[Callable[[], object]] = []
_values: weakref.WeakSet[Value] = weakref.WeakSet()


class Source:
    def later(self) -> int:
        assert _released.wait(20)
        return 7


class Target:
    def note(self, value: int, *others: Any) -> int:
        return value


@pytest.mark.limit(60)
def test_a_call_with_a_pending_argument_fails_as_not_executed_if_its_connection_closes(
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
        until(lambda: not isinstance(future.source, Call))
        monkeypatch.undo()
        for lost in held:
            lost()
        with pytest.raises(errors.ActorDiedError) as caught:
            actorrpc.get(call, timeout=20)
        assert caught.value.maybe_executed is False
        del source, target, call, argument


class Pickled:
    """An argument that is pickled when its call is made and again when the call is sent."""

    def __reduce__(self) -> Any:
        for each in _pickling:
            each()
        return Pickled, ()


class Value:
    def __init__(self) -> None:
        _values.add(self)


@pytest.mark.limit(60)
@pytest.mark.parametrize("where", ["worker0", "worker1"])
def test_a_call_that_is_cancelled_while_it_is_sent_releases_its_arguments(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Thread A encodes the message. 2. Thread B cancels the call. 3. A notices this and does not send. 4. B finishes."""
    _released.clear()
    encoding, taken, unsent = threading.Event(), threading.Event(), threading.Event()
    withdraw = Call.withdraw

    def withdraw_later(call: Call) -> bool:
        taken.set()
        assert unsent.wait(20)
        return withdraw(call)

    with InProcessCluster(3, clock="real"):
        source: Any = actorrpc.remote(Source).options(worker="worker2").remote()
        target: Any = actorrpc.remote(Target).options(worker=where).remote()
        assert actorrpc.get(target.note.remote(1), timeout=20) == 1
        value = rpc.remote("worker2", Value)
        worker = current_worker()
        assert worker is not None
        agent = worker.agent
        send = agent.send

        def send_and_note(call: Call, *args: Any) -> None:
            again = call.id != 0  # the call has reserved its place in the order
            try:
                send(call, *args)
            finally:
                if again:
                    unsent.set()

        argument = source.later.remote()
        call = target.note.remote(argument, Pickled(), value)
        monkeypatch.setattr(agent, "send", send_and_note)
        monkeypatch.setattr(Call, "withdraw", withdraw_later)
        monkeypatch.setattr(sys.modules[__name__], "_pickling", [encoding.set, partial(taken.wait, 20)])
        _released.set()
        assert encoding.wait(20)
        actorrpc.cancel(call)
        monkeypatch.undo()
        with pytest.raises(errors.CancelledError):
            actorrpc.get(call, timeout=20)
        assert actorrpc.get(target.note.remote(2), timeout=20) == 2
        del value, call
        until(lambda: not _values)
        del source, target, argument
