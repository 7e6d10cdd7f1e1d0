"""``maybe_executed`` of the errors of calls, for each way in which a call can end and each moment.

It is False only if the call has certainly not run and never will; True if the call may have run.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from actorrpc import errors
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import CURRENT, Execution
from actorrpc.futures import Future
from actorrpc.transport.shared_memory import Lender
from tests import certificates
from tests.actors.e2e.kit import until
from tests.agent.agents import agents
from tests.migration.rows import row

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
def _reset() -> Iterator[None]:
    _ran.clear()
    _entered.clear()
    _release.clear()
    yield
    _release.set()


def _crash(agent: Agent) -> None:
    for peer in agent.peers():
        for conn in list(peer.conns):
            with suppress(OSError):
                conn.stream.shutdown(socket.SHUT_RDWR)


def _hold_calls(agent: Agent) -> threading.Event:
    """Make an agent start no call before `_release` is set; return the event that is set when a call has arrived."""
    arrived = threading.Event()
    execute = agent.pool._execute

    def hold(task: Any) -> None:
        arrived.set()
        _release.wait()
        execute(task)

    agent.pool._execute = hold
    return arrived


def _time_out(a: Agent, b: Agent, future: Future[int]) -> None:
    pass  # the time-out of the call expires


def _cancel(a: Agent, b: Agent, future: Future[int]) -> None:
    future.cancel()


def _peer_dies(a: Agent, b: Agent, future: Future[int]) -> None:
    _crash(b)


def _shut_down(a: Agent, b: Agent, future: Future[int]) -> None:
    a.close(0.05)


_WAYS: dict[str, tuple[Callable[[Agent, Agent, Future[int]], None], type[errors.RpcError]]] = {
    "time-out": (_time_out, errors.RpcTimeoutError),
    "cancelled": (_cancel, errors.CancelledError),
    "peer dies": (_peer_dies, errors.PeerDiedError),
    "shutdown": (_shut_down, errors.ShutdownError),
}


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("moment", ["in the outbox", "sent", "started"])
def test_maybe_executed_is_false_only_if_the_call_was_still_in_the_outbox(
    way: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, error = _WAYS[way]
    with agents(2) as (a, b):
        assert a.call_sync(a.peer("a1"), _note, (0,), {}, 0.0) == 0
        conn = a.peer("a1").conn
        assert conn is not None
        arrived = _hold_calls(b) if moment == "sent" else _entered
        future: Future[int] = Future()
        if moment == "in the outbox":
            monkeypatch.setattr(conn, "flush", lambda *_: False)
        a.call(a.peer("a1"), _work, (1,), {}, 0.5 if way == "time-out" else 0.0, future=future)
        if moment != "in the outbox":
            until(lambda: arrived.is_set() or future.done())
        end(a, b, future)
        with pytest.raises(error) as caught:
            future.wait()
        monkeypatch.undo()
        assert caught.value.maybe_executed is (moment != "in the outbox")
        _release.set()
    if moment != "sent":
        assert _ran == [0, *([1] if _entered.is_set() else [])]


@pytest.mark.parametrize("way", ["cancelled", "peer dies", "shutdown"])
def test_maybe_executed_is_right_if_another_thread_ends_the_call_during_serialization(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread must not report that the call did not run while this thread still sends it."""
    place = Lender.place
    with agents(2) as (a, b):
        peer = a.peer("a1")
        assert a.call_sync(peer, _note, (0,), {}, 0.0) == 0
        outer = Execution(None, a.self_peer, 0, float("inf"), a.next_chain())

        def end() -> None:
            if way == "cancelled":
                outer.cancel(True)
            elif way == "shutdown":
                a.close(0.05)
            else:
                _crash(b)
                until(lambda: peer.state != "alive")

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
                _release.set()  # over TLS, tensors use no shared memory, so `place` was not called
            ended = future.exception()
        except errors.RpcError as error:
            ended = error
        finally:
            CURRENT.reset(token)
        _release.set()
        if certificates.OVER_TLS:
            return
        assert isinstance(ended, _WAYS[way][1])
        assert ended.maybe_executed is (way == "cancelled")
    assert _ran == [0] or ended.maybe_executed


def test_maybe_executed_is_false_for_calls_refused_before_sending() -> None:
    with agents(3) as (a, b, _):
        with pytest.raises(errors.SerializationError) as not_serializable:
            a.call(a.peer("a1"), _note, (threading.Lock(),), {}, 0.0)
        assert not_serializable.value.maybe_executed is False
        b.close()
        until(lambda: a.peer("a1").state != "alive" or a.peer("a1").conn is None)
        with pytest.raises(errors.PeerDiedError) as dead:
            a.call_sync(a.peer("a1"), _note, (1,), {}, 0.0)
        assert dead.value.maybe_executed is False
        a.close()
        with pytest.raises(errors.ShutdownError) as over:
            a.call(a.peer("a2"), _note, (1,), {}, 0.0)
        assert over.value.maybe_executed is False
    assert _ran == []


@row("each call has a deadline of its own", "from-torch-rpc")
def test_maybe_executed_is_false_for_late_and_cancelled_calls_that_the_callee_refuses() -> None:
    """The call arrived after its time-out, or was cancelled while it was queued."""
    with agents(2) as (a, b):
        assert a.call_sync(a.peer("a1"), abs, (-1,), {}, 0.0) == 1
        begun = _hold_calls(b)
        refused: list[tuple[Any, errors.RpcError]] = []
        refuse = b.executor.refuse

        def note(conn: Any, frame: Any, error: errors.RpcError, **given: Any) -> None:
            refused.append((frame.id, error))
            refuse(conn, frame, error, **given)

        b.executor.refuse = note  # type: ignore[method-assign]
        while not begun.is_set():  # on a busy machine, the call may time out before it is sent
            late: Future[int] = Future()
            a.call(a.peer("a1"), _note, (1,), {}, 0.1, future=late)
            a.flush()
            with pytest.raises(errors.RpcTimeoutError):
                late.wait()
        given_up: Future[int] = Future()
        begun.clear()
        call = a.call(a.peer("a1"), _note, (2,), {}, 0.0, future=given_up)
        a.flush()
        begun.wait()
        assert given_up.cancel()
        a.flush()
        until(lambda: call.id in b.peer("a0").cancelled)
        _release.set()
        until(lambda: len(refused) >= 2)
        assert {type(error) for _, error in refused} <= {errors.RpcTimeoutError, errors.CancelledError}
        assert {error.maybe_executed for _, error in refused} == {False}
        assert _ran == []


def test_maybe_executed_is_false_for_calls_refused_without_a_free_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actorrpc.agent.threads._STUCK_S", 0.2)
    with agents(2, max_threads=3) as (a, _):
        futures: list[Future[int]] = []
        for number in range(8):
            future: Future[int] = Future()
            a.call(a.peer("a1"), _work, (number,), {}, 0.0, future=future)
            a.flush()
            futures.append(future)
        until(lambda: any(each.done() for each in futures))
        with pytest.raises(errors.DeadlockError) as caught:
            next(each for each in futures if each.done()).wait()
        assert caught.value.maybe_executed is False
        number = next(number for number, each in enumerate(futures) if each.done())
        _release.set()
        for each in futures:
            each.exception()
        assert number not in _ran


def test_maybe_executed_is_false_for_a_nested_call_after_the_outer_call_was_cancelled() -> None:
    """The nested call is not sent, as its outer call was cancelled before."""
    with agents(2) as (a, b):
        ends: list[BaseException] = []
        done = threading.Event()

        def outer() -> None:
            _entered.set()
            _release.wait()
            try:
                b.call_sync(b.peer("a0"), _note, (5,), {}, 0.0)
            except errors.CancelledError as error:
                ends.append(error)
            done.set()

        _outer.append(outer)
        future: Future[None] = Future()
        a.call(a.peer("a1"), _run_outer, (), {}, 0.0, future=future)
        a.flush()
        _entered.wait()
        future.cancel()
        a.flush()
        until(lambda: all(each.cancelled for each in b.peer("a0").running.values()))
        _release.set()
        done.wait()
        _outer.clear()
        assert [getattr(error, "maybe_executed", None) for error in ends] == [False]
        assert _ran == []


_outer: list[Callable[[], None]] = []


def _run_outer() -> None:
    _outer[-1]()
