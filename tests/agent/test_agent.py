"""Calls between agents of one process: how they end, and that they leave nothing behind. No rendezvous, no RRefs."""

from __future__ import annotations

import asyncio
import gc
import operator
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from actorrpc.agent.agent import Agent
from actorrpc.agent.inbound import Inbox
from actorrpc.agent.peers import Window
from actorrpc.errors import (
    AuthenticationError,
    CancelledError,
    DeadlockError,
    LimitError,
    PeerDiedError,
    RemoteError,
    SerializationError,
    ShutdownError,
)
from actorrpc.futures import Future
from actorrpc.transport.connection import Connection
from actorrpc.wire import frames
from actorrpc.wire.frames import Frame
from tests import certificates
from tests.agent.agents import agents

_gate = threading.Event()
_entered = threading.Semaphore(0)


@pytest.fixture
def pair() -> Iterator[list[Agent]]:
    _gate.clear()
    with agents(2) as made:
        yield made
        _gate.set()


def _block(value: Any = None) -> Any:
    _entered.release()
    _gate.wait()
    return value


def _sync(agent: Agent, to: Any, function: Any, *args: Any, timeout: float = 0) -> Any:
    return agent.call_sync(agent.peer(to), function, args, {}, timeout)


def _call_async(agent: Agent, to: Any, function: Any, *args: Any, timeout: float = 0) -> Future[Any]:
    future: Future[Any] = Future()
    agent.call(agent.peer(to), function, args, {}, timeout, future=future)
    return future


class RaisesOnUnpickling:
    """Raises a BaseException that is no Exception when it is unpickled."""

    def __init__(self, kind: type[BaseException], padding: bytes = b"") -> None:
        self.kind = kind
        self.padding = padding

    def __reduce__(self) -> Any:
        return _raise_on_unpickling, (self.kind, self.padding)


def _raise_on_unpickling(kind: type[BaseException], padding: bytes) -> None:
    if kind is SystemExit:
        sys.exit(3)
    if kind is InterruptedError:
        signal.raise_signal(signal.SIGUSR1)  # the program's handler raises KeyboardInterrupt
    raise kind


@pytest.mark.parametrize("size", [0, 3 << 20])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_a_base_exception_during_unpickling_fails_only_its_call(
    pair: list[Agent], kind: type[BaseException], size: int
) -> None:
    caller = pair[0]
    for way in (_sync, lambda *call: _call_async(*call).wait(60)):
        with pytest.raises(SerializationError, match=kind.__name__) as caught:
            way(caller, "a1", RaisesOnUnpickling, kind, bytes(size))
        assert type(caught.value.__cause__) is kind
        with pytest.raises(SerializationError, match=kind.__name__) as caught:
            way(caller, "a1", operator.is_, RaisesOnUnpickling(kind, bytes(size)), None)
        assert isinstance(caught.value, RemoteError)
    assert _sync(caller, "a1", operator.add, 1, 2) == 3
    del caught


def test_keyboard_interrupt_of_a_signal_handler_during_unpickling_reaches_the_caller(
    pair: list[Agent],
) -> None:
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            _sync(pair[0], "a1", RaisesOnUnpickling, InterruptedError)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert _sync(pair[0], "a1", operator.add, 1, 2) == 3


def _fail_at_length(size: int) -> None:
    raise LookupError("x" * size)


@pytest.mark.parametrize("max_message", [1 << 20, 4 << 20])
def test_an_error_text_longer_than_max_message_is_shortened(max_message: int) -> None:
    with agents(2, max_message=max_message, chunk=1 << 16) as made, pytest.raises(LookupError) as caught:
        _sync(made[0], "a1", _fail_at_length, 6 << 20, timeout=60)
    assert "characters left out" in str(caught.value)


@pytest.mark.prints("an error cannot be sent to 'a0': actorrpc.errors.LimitError")
def test_an_error_that_cannot_be_shortened_to_max_message_becomes_a_limit_error() -> None:
    with (
        agents(2, max_message=1 << 10, chunk=1 << 10) as made,
        pytest.raises(LimitError, match="max_message"),
    ):
        _sync(made[0], "a1", _fail_at_length, 6 << 20, timeout=60)


def test_no_call_stays_pending_after_all_calls_have_ended(pair: list[Agent]) -> None:
    a, b = pair
    futures = [_call_async(a, "a1", operator.add, i, 1) for i in range(300)]
    futures += [_call_async(a, "a1", operator.truediv, 1, 0) for _ in range(3)]
    assert [f.wait() for f in futures[:300]] == list(range(1, 301))
    for future in futures[300:]:
        with pytest.raises(ZeroDivisionError):
            future.wait()
    assert not a.peer("a1").pending
    assert a.peer("a1").window.charged == 0
    assert not b.peer("a0").cancelled


def test_a_call_cancelled_before_it_is_sent_uses_none_of_the_window(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = pair
    to = a.peer("a1")
    assert _sync(a, "a1", operator.add, 1, 1) == 2
    charge = Window.charge

    def late(window: Window, call: Any, size: int) -> None:
        call.cancel()
        charge(window, call, size)

    monkeypatch.setattr(Window, "charge", late)
    future = _call_async(a, "a1", torch.numel, torch.zeros(100_000))
    with pytest.raises(CancelledError):
        future.wait()
    assert to.window.charged == 0


class _Finalised:
    def __init__(self, agent: Agent, met: list[BaseException]) -> None:
        self.agent, self.met, self.me = agent, met, self

    def __del__(self) -> None:
        try:
            _sync(self.agent, "a1", operator.add, 1, 2)
        except BaseException as error:
            self.met.append(error)


def test_a_finaliser_that_calls_while_its_thread_reads_raises_deadlock_error(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector may run a finaliser at any allocation, while the thread holds the lock of the connection."""
    a, _ = pair
    assert _sync(a, "a1", operator.add, 1, 1) == 2
    met: list[BaseException] = []
    receive = Connection.receive

    def collects(conn: Connection, found: list[Frame]) -> None:
        receive(conn, found)
        if conn is a.peer("a1").conn and not met:
            _Finalised(a, met)
            gc.collect()

    monkeypatch.setattr(Connection, "receive", collects)
    assert _sync(a, "a1", operator.add, 2, 2) == 4
    (error,) = met
    assert isinstance(error, DeadlockError)
    assert "a finaliser waits" in str(error)
    monkeypatch.undo()
    assert _sync(a, "a1", operator.add, 3, 3) == 6


def test_results_are_freed_with_their_future_without_garbage_collection(pair: list[Agent]) -> None:
    """A reference cycle would keep large tensors until the collector runs."""
    a, _ = pair
    gc.collect()
    gc.disable()
    try:
        for to in ("a0", "a1"):
            future = _call_async(a, to, torch.ones, 10)
            value = weakref.ref(future.wait())
            assert value() is not None
            del future
            pause = threading.Event()
            while value() is not None:  # the thread that delivered it drops its reference soon
                pause.wait(0.001)
    finally:
        gc.enable()


def test_a_cancelled_call_ends_at_once_and_says_whether_it_may_have_run(pair: list[Agent]) -> None:
    a, _ = pair
    for to in ("a0", "a1"):
        future = _call_async(a, to, _block)
        _entered.acquire()
        assert future.cancel()
        assert not future.cancel()
        with pytest.raises(CancelledError) as caught:
            future.wait()
        assert caught.value.maybe_executed
        assert not a.peer(to).pending
    # A call that was never sent has certainly not run.
    assert _sync(a, "a1", operator.add, 1, 1) == 2
    keep = _call_async(a, "a1", _block)  # so that the next call stays in the outbox
    conn = a.peer("a1").conn
    assert conn is not None
    with conn.writer.lock:
        future = _call_async(a, "a1", _block)
        assert future.cancel()
    with pytest.raises(CancelledError) as caught:
        future.wait()
    assert caught.value.maybe_executed is False
    _gate.set()
    keep.wait()
    assert _sync(a, "a1", operator.add, 1, 1) == 2


@pytest.mark.prints("threads of 'a0' are still in user code after shutdown")
def test_closing_an_agent_fails_pending_calls_on_both_sides() -> None:
    _gate.clear()
    with agents(3) as (a, b, c):
        waiting = [_call_async(a, to, _block) for to in ("a0", "a1", "a2")]
        to_a = _call_async(b, "a0", _block)
        for _ in range(4):
            a.flush()
            b.flush()
            _entered.acquire()
        ended = threading.Event()
        waiting[1].add_done_callback(lambda _: ended.set())
        closer = threading.Thread(target=a.close, args=(0.05,))
        closer.start()
        ended.wait()
        for future in waiting:
            with pytest.raises(ShutdownError):
                future.wait()
        with pytest.raises(PeerDiedError, match="left"):
            to_a.wait()
        closer.join()
        _gate.set()
        with pytest.raises(ShutdownError):
            _sync(a, "a1", operator.add, 1, 1)
        with pytest.raises(PeerDiedError):
            _sync(b, "a0", operator.add, 1, 1)
        assert _sync(b, "a2", operator.add, 1, 1) == 2
        assert _sync(c, "a1", operator.add, 1, 1) == 2


def test_a_reply_read_before_the_connection_ended_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread has read the reply but not delivered it yet when another thread reads the end of the connection."""
    read, lost, ended = threading.Event(), threading.Event(), threading.Event()
    deliver, reap = Inbox.deliver, Connection.reap

    def late(inbox: Inbox, conn: Connection, batch: list[Frame], waiting: bool) -> bool:
        if any(frame.kind == frames.REPLY for frame in batch):
            read.set()
            assert lost.wait(20)
            ended.wait(0.1)  # must time out: the end may be announced only after the delivery
        return deliver(inbox, conn, batch, waiting)

    def gone(conn: Connection) -> None:
        reap(conn)
        lost.set()

    monkeypatch.setattr(Inbox, "deliver", late)
    with agents(2) as (a, b):
        a.on_peer_end.append(lambda _: ended.set())
        answer = _call_async(a, "a1", operator.add, 1, 1)
        a.flush()
        assert read.wait(20)
        monkeypatch.setattr(Connection, "reap", gone)
        b.close()
        assert answer.result(20) == 2
        assert ended.wait(20)


def test_calls_made_while_an_agent_closes_end_with_typed_errors() -> None:
    """No call hangs: each returns its value or raises PeerDiedError or ShutdownError."""
    for _ in range(8):
        _gate.set()
        with agents(2) as (a, b):
            outcomes: list[type] = []
            begun = threading.Semaphore(0)

            def work(agent: Agent, to: str, outcomes: list[type] = outcomes, begun: Any = begun) -> None:
                begun.release()
                while True:
                    try:
                        assert _sync(agent, to, operator.add, 1, 1) == 2
                        assert _call_async(agent, to, operator.add, 1, 1).wait() == 2
                        assert _sync(agent, agent.name, operator.add, 1, 1) == 2
                    except BaseException as error:
                        outcomes.append(type(error))
                        if agent.closed_down or agent.peer(to).state != "alive":
                            return

            threads = [threading.Thread(target=work, args=(a, "a1")) for _ in range(3)]
            threads += [threading.Thread(target=work, args=(b, "a0")) for _ in range(2)]
            for each in threads:
                each.start()
            for _ in threads:
                begun.acquire()
            a.close()
            for each in threads:
                each.join()
            assert set(outcomes) <= {ShutdownError, PeerDiedError}, outcomes


@pytest.mark.skipif(certificates.OVER_TLS, reason="these agents listen on TCP over TLS")
def test_a_call_of_a_worker_without_a_usable_address_names_the_settings_to_give() -> None:
    with (
        agents(2, transport="tcp") as (a, _),
        pytest.raises(AuthenticationError) as caught,
    ):  # on Unix sockets
        _sync(a, "a1", operator.add, 1, 1)
    assert "has no address there" in str(caught.value)
    assert "ACTORRPC_BIND" in str(caught.value)
