"""Agents in one process: calls, their ends and what is left of them; no rendezvous, no RRefs."""

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
from tests.agent.agents import agents

_gate = threading.Event()
_entered = threading.Semaphore(0)


@pytest.fixture
def pair() -> Iterator[list[Agent]]:
    _gate.clear()
    with agents(2) as made:
        yield made
        _gate.set()


def _hold(value: Any = None) -> Any:
    _entered.release()
    _gate.wait()
    return value


def _sync(agent: Agent, to: Any, function: Any, *args: Any, timeout: float = 0) -> Any:
    return agent.ask(agent.peer(to), function, args, {}, timeout)


def _later(agent: Agent, to: Any, function: Any, *args: Any, timeout: float = 0) -> Future[Any]:
    future: Future[Any] = Future()
    agent.call(agent.peer(to), function, args, {}, timeout, future=future)
    return future


class Leaving:
    """Raises something that is no Exception where it is unpickled."""

    def __init__(self, kind: type[BaseException], padding: bytes = b"") -> None:
        self.kind = kind
        self.padding = padding

    def __reduce__(self) -> Any:
        return _leave, (self.kind, self.padding)


def _leave(kind: type[BaseException], padding: bytes) -> None:
    if kind is SystemExit:
        sys.exit(3)
    if kind is InterruptedError:
        signal.raise_signal(signal.SIGUSR1)  # the program's handler raises KeyboardInterrupt
    raise kind


@pytest.mark.parametrize("size", [0, 3 << 20])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_what_unpickling_raises_ends_neither_reader_nor_worker(
    pair: list[Agent], kind: type[BaseException], size: int
) -> None:
    caller = pair[0]
    for way in (_sync, lambda *call: _later(*call).wait(60)):
        with pytest.raises(SerializationError, match=kind.__name__) as caught:
            way(caller, "a1", Leaving, kind, bytes(size))
        assert type(caught.value.__cause__) is kind
        with pytest.raises(SerializationError, match=kind.__name__) as caught:
            way(caller, "a1", operator.is_, Leaving(kind, bytes(size)), None)
        assert isinstance(caught.value, RemoteError)
    assert _sync(caller, "a1", operator.add, 1, 2) == 3
    del caught


def test_what_a_signal_handler_raises_in_unpickling_stays_what_it_is(pair: list[Agent]) -> None:
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            _sync(pair[0], "a1", Leaving, InterruptedError)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert _sync(pair[0], "a1", operator.add, 1, 2) == 3


def _fail_at_length(size: int) -> None:
    raise LookupError("x" * size)


@pytest.mark.parametrize("max_message", [1 << 20, 4 << 20])
def test_an_error_over_the_limit_of_messages_is_shortened(max_message: int) -> None:
    with agents(2, max_message=max_message, chunk=1 << 16) as made, pytest.raises(LookupError) as caught:
        _sync(made[0], "a1", _fail_at_length, 6 << 20, timeout=60)
    assert "characters left out" in str(caught.value)


@pytest.mark.prints("an error cannot be sent to 'a0': actorrpc.errors.LimitError")
def test_an_error_whose_text_is_over_the_limit_of_messages_ends_its_call() -> None:
    with (
        agents(2, max_message=1 << 10, chunk=1 << 10) as made,
        pytest.raises(LimitError, match="max_message"),
    ):
        _sync(made[0], "a1", _fail_at_length, 6 << 20, timeout=60)


def test_a_pending_table_is_empty_when_all_calls_are_over(pair: list[Agent]) -> None:
    a, b = pair
    futures = [_later(a, "a1", operator.add, i, 1) for i in range(300)]
    futures += [_later(a, "a1", operator.truediv, 1, 0) for _ in range(3)]
    assert [f.wait() for f in futures[:300]] == list(range(1, 301))
    for future in futures[300:]:
        with pytest.raises(ZeroDivisionError):
            future.wait()
    assert not a.peer("a1").pending
    assert a.peer("a1").window.charged == 0
    assert not b.peer("a0").cancelled


def test_a_call_that_is_over_before_its_bytes_are_counted_leaves_none(
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
    future = _later(a, "a1", torch.numel, torch.zeros(100_000))
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


def test_a_finaliser_that_waits_while_its_thread_reads_ends_in_an_error(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector may run it at any allocation, with the lock of the connection held."""
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


def test_values_go_with_their_futures_without_a_collection(pair: list[Agent]) -> None:
    """No cycle keeps a value: large tensors would pile up until the collector runs."""
    a, _ = pair
    gc.collect()
    gc.disable()
    try:
        for to in ("a0", "a1"):
            future = _later(a, to, torch.ones, 10)
            value = weakref.ref(future.wait())
            assert value() is not None
            del future
            pause = threading.Event()
            while value() is not None:  # whoever delivered it lets go in a moment
                pause.wait(0.001)
    finally:
        gc.enable()


def test_cancelled_calls_end_at_once_and_free_their_number(pair: list[Agent]) -> None:
    a, _ = pair
    for to in ("a0", "a1"):
        future = _later(a, to, _hold)
        _entered.acquire()
        assert future.cancel()
        assert not future.cancel()
        with pytest.raises(CancelledError) as caught:
            future.wait()
        assert caught.value.maybe_executed
        assert not a.peer(to).pending
    # Never sent: certainly not executed.
    assert _sync(a, "a1", operator.add, 1, 1) == 2
    keep = _later(a, "a1", _hold)  # so that the next one waits in the outbox for company
    conn = a.peer("a1").conn
    assert conn is not None
    with conn.writer.lock:
        future = _later(a, "a1", _hold)
        assert future.cancel()
    with pytest.raises(CancelledError) as caught:
        future.wait()
    assert caught.value.maybe_executed is False
    _gate.set()
    keep.wait()
    assert _sync(a, "a1", operator.add, 1, 1) == 2


@pytest.mark.prints("threads of 'a0' are still in user code after shutdown")
def test_the_end_of_an_agent_ends_calls_on_both_sides() -> None:
    _gate.clear()
    with agents(3) as (a, b, c):
        waiting = [_later(a, to, _hold) for to in ("a0", "a1", "a2")]
        to_a = _later(b, "a0", _hold)
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


def test_an_end_does_not_overtake_the_answer_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread has read the answer, and another the end behind it."""
    read, lost, ended = threading.Event(), threading.Event(), threading.Event()
    deliver, reap = Inbox.deliver, Connection.reap

    def late(inbox: Inbox, conn: Connection, batch: list[Frame], waiting: bool) -> bool:
        if any(frame.kind == frames.REPLY for frame in batch):
            read.set()
            assert lost.wait(20)
            ended.wait(0.1)  # it does not come; where it is not held back, it comes at once
        return deliver(inbox, conn, batch, waiting)

    def gone(conn: Connection) -> None:
        reap(conn)
        lost.set()

    monkeypatch.setattr(Inbox, "deliver", late)
    with agents(2) as (a, b):
        a.on_peer_end.append(lambda _: ended.set())
        answer = _later(a, "a1", operator.add, 1, 1)
        a.flush()
        assert read.wait(20)
        monkeypatch.setattr(Connection, "reap", gone)
        b.close()
        assert answer.result(20) == 2
        assert ended.wait(20)


def test_closing_while_others_call() -> None:
    """No call hangs, whatever moment the end comes at: each ends with a value, a death or a shutdown."""
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
                        assert _later(agent, to, operator.add, 1, 1).wait() == 2
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
