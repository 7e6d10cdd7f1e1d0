"""What an error says of whether its call may have run, in each way that a call can end and at each moment of it.

``maybe_executed`` is False only where the call has certainly not run and never will; True where it may have.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import CURRENT, Execution
from actorrpc.errors import (
    CancelledError,
    DeadlockError,
    PeerDiedError,
    RpcError,
    RpcTimeoutError,
    SerializationError,
    ShutdownError,
)
from actorrpc.futures import Future
from actorrpc.transport.shared_memory import Lender
from tests import certificates
from tests.agent.agents import agents

_ran: list[int] = []
_entered = threading.Event()
_release = threading.Event()


def _note(number: int) -> int:
    _ran.append(number)
    return number


def _work(number: int, *_rest: Any) -> int:
    _ran.append(number)
    _entered.set()
    _release.wait()
    return number


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    _ran.clear()
    _entered.clear()
    _release.clear()
    yield
    _release.set()


def _until(condition: Callable[[], Any]) -> None:
    """Wait for something that nothing announces; bounded by the test's limit."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.002)


def _crash(agent: Agent) -> None:
    for peer in agent.peers():
        for conn in list(peer.conns):
            with suppress(OSError):
                conn.stream.shutdown(socket.SHUT_RDWR)


def _time_out(a: Agent, b: Agent, future: Future[int]) -> None:
    pass  # it comes by itself


def _cancel(a: Agent, b: Agent, future: Future[int]) -> None:
    future.cancel()


def _peer_dies(a: Agent, b: Agent, future: Future[int]) -> None:
    _crash(b)


def _shut_down(a: Agent, b: Agent, future: Future[int]) -> None:
    a.close(0.05)


_WAYS: dict[str, tuple[Callable[[Agent, Agent, Future[int]], None], type[RpcError]]] = {
    "time-out": (_time_out, RpcTimeoutError),
    "cancelled": (_cancel, CancelledError),
    "peer dies": (_peer_dies, PeerDiedError),
    "shutdown": (_shut_down, ShutdownError),
}


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("moment", ["in the outbox", "sent", "started"])
def test_a_call_that_ends_on_its_callers_side(way: str, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    end, error = _WAYS[way]
    with agents(2) as (a, b):
        assert a.ask(a.peer("a1"), _note, (0,), {}, 0.0) == 0
        conn = a.peer("a1").conn
        assert conn is not None
        arrived = threading.Event()
        execute = b.pool._execute

        def hold(task: Any) -> None:
            arrived.set()
            _release.wait()
            execute(task)

        if moment == "sent":
            b.pool._execute = hold
        future: Future[int] = Future()
        if moment == "in the outbox":
            monkeypatch.setattr(conn, "flush", lambda *_: False)
        a.call(a.peer("a1"), _work, (1,), {}, 0.5 if way == "time-out" else 0.0, future=future)
        if moment == "sent":
            _until(lambda: arrived.is_set() or future.done())
        elif moment == "started":
            _until(lambda: _entered.is_set() or future.done())
        end(a, b, future)
        with pytest.raises(error) as caught:
            future.wait()
        monkeypatch.undo()
        assert caught.value.maybe_executed is (moment != "in the outbox")
        _release.set()
    if moment == "in the outbox":
        assert _ran == [0]
    if moment == "started":
        assert _ran == [0, *([1] if _entered.is_set() else [])]


@pytest.mark.parametrize("way", ["cancelled", "peer dies", "shutdown"])
def test_a_call_that_ends_while_its_frame_is_made(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread can say that it did not run, and then have it sent."""
    place = Lender.place
    with agents(2) as (a, b):
        peer = a.peer("a1")
        assert a.ask(peer, _note, (0,), {}, 0.0) == 0
        outer = Execution(None, a.self_peer, 0, float("inf"), a.next_chain())

        def end() -> None:
            if way == "cancelled":
                outer.cancel(True)
            elif way == "shutdown":
                a.close(0.05)
            else:
                _crash(b)
                _until(lambda: peer.state != "alive")

        def end_in_between(lender: Lender, spans: Any) -> Any:
            placed = place(lender, spans)
            thread = threading.Thread(target=end)
            thread.start()
            thread.join()
            return placed

        monkeypatch.setattr(Lender, "place", end_in_between)
        future: Future[int] = Future()
        token = CURRENT.set(outer)
        try:
            a.call(peer, _work, (1, torch.zeros(1 << 20)), {}, 0.0, future=future)
            if certificates.OVER_TLS:
                _release.set()  # tensors go through no shared memory there: nothing has ended the call
            ended = future.exception()
        except RpcError as error:
            ended = error
        finally:
            CURRENT.reset(token)
        _release.set()
        if certificates.OVER_TLS:
            return
        assert isinstance(ended, _WAYS[way][1])
        assert ended.maybe_executed is (way == "cancelled")
    assert _ran == [0] or ended.maybe_executed


def test_a_call_that_is_refused_before_it_is_sent() -> None:
    with agents(3) as (a, b, _):
        with pytest.raises(SerializationError) as unsent:
            a.call(a.peer("a1"), _note, (threading.Lock(),), {}, 0.0)
        assert unsent.value.maybe_executed is False
        b.close()
        _until(lambda: a.peer("a1").state != "alive" or a.peer("a1").conn is None)
        with pytest.raises(PeerDiedError) as dead:
            a.ask(a.peer("a1"), _note, (1,), {}, 0.0)
        assert dead.value.maybe_executed is False
        a.close()
        with pytest.raises(ShutdownError) as over:
            a.call(a.peer("a2"), _note, (1,), {}, 0.0)
        assert over.value.maybe_executed is False
    assert _ran == []


def test_a_call_that_its_worker_refuses() -> None:
    """Too late to be started, given up before its turn, or with no thread left for it."""
    with agents(2) as (a, b):
        assert a.ask(a.peer("a1"), abs, (-1,), {}, 0.0) == 1
        begun, go = threading.Event(), threading.Event()
        execute = b.pool._execute

        def hold(task: Any) -> None:
            begun.set()
            go.wait()
            execute(task)

        b.pool._execute = hold
        refused: list[tuple[Any, RpcError]] = []
        refuse = b.executor.refuse

        def note(conn: Any, frame: Any, error: RpcError, **given: Any) -> None:
            refused.append((frame.id, error))
            refuse(conn, frame, error, **given)

        b.executor.refuse = note  # type: ignore[method-assign]
        while not begun.is_set():  # on a loaded machine, its time may be over before it has left
            late: Future[int] = Future()
            a.call(a.peer("a1"), _note, (1,), {}, 0.1, future=late)
            a.flush()
            with pytest.raises(RpcTimeoutError):
                late.wait()
        given_up: Future[int] = Future()
        begun.clear()
        call = a.call(a.peer("a1"), _note, (2,), {}, 0.0, future=given_up)
        a.flush()
        begun.wait()
        assert given_up.cancel()
        a.flush()
        _until(lambda: call.id in b.peer("a0").cancelled)
        go.set()
        _until(lambda: len(refused) >= 2)
        assert {type(error) for _, error in refused} <= {RpcTimeoutError, CancelledError}
        assert {error.maybe_executed for _, error in refused} == {False}
        assert _ran == []


def test_a_call_that_no_thread_can_take_has_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorrpc.agent.threads._STUCK_S", 0.2)
    with agents(2, max_threads=3) as (a, _):
        futures: list[Future[int]] = []
        for number in range(8):
            future: Future[int] = Future()
            a.call(a.peer("a1"), _work, (number,), {}, 0.0, future=future)
            a.flush()
            futures.append(future)
        _until(lambda: any(each.done() for each in futures))
        with pytest.raises(DeadlockError) as caught:
            next(each for each in futures if each.done()).wait()
        assert caught.value.maybe_executed is False
        number = next(number for number, each in enumerate(futures) if each.done())
        _release.set()
        for each in futures:
            each.exception()
        assert number not in _ran


def test_nested_calls_say_it_of_themselves() -> None:
    """What is nested in a call that has been given up is not sent any more, and says so."""
    with agents(2) as (a, b):
        ends: list[BaseException] = []
        done = threading.Event()

        def outer() -> None:
            _entered.set()
            _release.wait()
            try:
                b.ask(b.peer("a0"), _note, (5,), {}, 0.0)
            except CancelledError as error:
                ends.append(error)
            done.set()

        _outer.append(outer)
        future: Future[None] = Future()
        a.call(a.peer("a1"), _run_outer, (), {}, 0.0, future=future)
        a.flush()
        _entered.wait()
        future.cancel()
        a.flush()
        _until(lambda: all(each.cancelled for each in b.peer("a0").running.values()))
        _release.set()
        done.wait()
        _outer.clear()
        assert [getattr(error, "maybe_executed", None) for error in ends] == [False]
        assert _ran == []


_outer: list[Callable[[], None]] = []


def _run_outer() -> None:
    _outer[-1]()
