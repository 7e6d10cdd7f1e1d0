"""Calls and casts between agents of one process: how they are sent, and how they end. No rendezvous, no RRefs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import operator
import queue
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from actorrpc import errors, rpc
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import CURRENT
from actorrpc.futures import WAITING, Future
from actorrpc.testing import InProcessCluster
from actorrpc.transport.connection import Connection
from actorrpc.wire.frames import Frame
from tests import certificates
from tests.agent.agents import agents, record


@pytest.fixture
def pair() -> Iterator[list[Agent]]:
    with agents(2) as made:
        yield made


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
        with pytest.raises(errors.SerializationError, match=kind.__name__) as caught:
            way(caller, "a1", RaisesOnUnpickling, kind, bytes(size))
        assert type(caught.value.__cause__) is kind
        with pytest.raises(errors.SerializationError, match=kind.__name__) as caught:
            way(caller, "a1", operator.is_, RaisesOnUnpickling(kind, bytes(size)), None)
        assert isinstance(caught.value, errors.RemoteError)
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


@pytest.mark.prints("an error cannot be sent to 'a0': actorrpc.errors.LimitError")
def test_an_error_that_cannot_be_shortened_to_max_message_becomes_a_limit_error() -> None:
    with (
        agents(2, max_message=1 << 10, chunk=1 << 10) as made,
        pytest.raises(errors.LimitError, match="max_message"),
    ):
        _sync(made[0], "a1", _fail_at_length, 6 << 20, timeout=60)


def test_calls_of_different_workers_never_belong_to_the_same_chain(pair: list[Agent]) -> None:
    """An actor lets a call of the same chain run within the call that it waits for."""
    chains = [agent.next_chain() for agent in pair for _ in range(100)]
    assert len(set(chains)) == 200


_gate = threading.Event()


def _wait_at_gate() -> None:
    _gate.wait()


def test_calls_for_which_no_thread_waits_time_out_one_after_another(pair: list[Agent]) -> None:
    ended: queue.Queue[Any] = queue.Queue()
    for seconds in (0.05, 0.2, 0.4):
        future = _call_async(pair[0], "a1", _wait_at_gate, timeout=seconds)
        future.add_done_callback(lambda done: ended.put(done.exception()))
    try:
        assert [type(ended.get(timeout=30)) for _ in range(3)] == [errors.RpcTimeoutError] * 3
    finally:
        _gate.set()


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
    assert isinstance(error, errors.DeadlockError)
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


def test_calls_made_while_an_agent_closes_end_with_typed_errors() -> None:
    """No call hangs: each returns its value or raises PeerDiedError or ShutdownError."""
    for _ in range(8):
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
            assert set(outcomes) <= {errors.ShutdownError, errors.PeerDiedError}, outcomes


@pytest.mark.skipif(certificates.OVER_TLS, reason="these agents listen on TCP over TLS")
@pytest.mark.parametrize(
    ("unix", "transport", "host", "text"),
    [
        (
            True,
            "tcp",
            None,
            "'a0' has ACTORRPC_TRANSPORT=tcp .*'b', on the same host, listens on a Unix socket only",
        ),
        (
            False,
            "unix",
            "elsewhere",
            "'a0' has ACTORRPC_TRANSPORT=unix .*'b', on another host, listens on TCP only",
        ),
        (True, "auto", "elsewhere", "'b' runs on another host than worker 'a0'.*ACTORRPC_BIND"),
    ],
)
def test_a_call_of_a_worker_without_a_usable_address_names_the_settings_to_give(
    unix: bool, transport: str, host: str | None, text: str
) -> None:
    with agents(1, transport=transport) as [a]:
        other = record("b", 1, "/a/path") if unix else replace(record("b", 1), tcp=(("192.0.2.1", 9),))
        a.peer_table.adopt(replace(other, host=host or other.host))
        with pytest.raises(errors.AuthenticationError, match=text):
            _sync(a, "b", operator.add, 1, 1)


@pytest.mark.skipif(certificates.OVER_TLS, reason="these agents listen on TCP over TLS")
def test_a_worker_that_drops_packets_is_out_of_reach_after_the_grace_period() -> None:
    with (
        agents(1, session_grace=0.3, handshake_timeout=0.2) as [a],
        socket.socket() as deaf,
        contextlib.ExitStack() as stack,
    ):
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        where = deaf.getsockname()
        for _ in range(3):  # they fill the backlog, so that the kernel drops further requests
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(where)
        a.peer_table.adopt(replace(record("b", 1), host="elsewhere", tcp=(where,)))
        text = rf"'b' on host 127.0.0.1 cannot be reached from worker 'a0' \(127.0.0.1:{where[1]}: no answer within 0.\d s\)"
        with pytest.raises(
            errors.PeerDiedError, match=f"cannot call .*: worker {text}; the call was not executed"
        ) as caught:
            _sync(a, "b", operator.add, 1, 1)
        assert caught.value.maybe_executed is False
        assert a.peer("b").state == "alive"


# -- deadlines and the order of sending --------------------------------------------------------------------


class _ServingRunner:
    """The runner of an actor's thread that has work to serve as soon as the thread waits."""

    def __init__(self, conn: Any) -> None:
        self.work = ["an order"]
        self.left: list[int] = []
        self._conn = conn

    def begin_wait(self, wake: Any, what: Any) -> None:
        pass

    def end_wait(self) -> None:
        pass

    def serve(self) -> None:
        self.left.append(len(self._conn.outbox))
        self.work.clear()


def test_a_call_is_sent_before_its_waiting_thread_serves_other_work() -> None:
    """The other work may take long, or wait for an effect of the call."""
    with agents(2) as (one, other):
        to = one.peer(other.name)
        assert one.call_sync(to, operator.add, (1, 2), {}, 20.0) == 3
        guest = _ServingRunner(to.conn)
        WAITING.runner = cast(Any, guest)
        try:
            assert one.call_sync(to, operator.add, (1, 2), {}, 20.0) == 3
        finally:
            WAITING.runner = None
        assert guest.left == [0]


_reached_last_worker = threading.Event()
_released = threading.Event()
_errors: queue.Queue[list[type[Exception]]] = queue.Queue()


def _forward(path: list[str]) -> None:
    """Call along a path twice: during the outer call, and after it has timed out. Record the errors."""
    if not path:
        _reached_last_worker.set()
        assert _released.wait(30)
        return
    found = []
    for _ in range(2):
        try:
            rpc.rpc_sync(path[0], _forward, (path[1:],), timeout=500)
        except Exception as error:
            found.append(type(error))
    _errors.put(found)


@pytest.mark.limit(60)
def test_nested_calls_time_out_with_the_outer_call_despite_a_later_deadline_of_their_own() -> None:
    """A deadline is sent as the remaining time; the time that the request took to arrive is subtracted."""
    with InProcessCluster(3) as cluster:
        caller = cluster["worker0"]
        caller.rpc_sync("worker1", int, (), timeout=0)
        cluster.cut("worker0", "worker1")
        call = caller.rpc_async("worker1", _forward, (["worker2", "worker0"],), timeout=60.0)
        cluster.clock.advance(5.0)
        cluster.heal("worker0", "worker1")
        assert _reached_last_worker.wait(30)
        cluster.clock.advance(56.0)
        with pytest.raises(errors.RpcTimeoutError):
            call.wait()
        assert [_errors.get(timeout=30) for _ in range(2)] == [
            [errors.RpcTimeoutError, errors.RpcTimeoutError]
        ] * 2
        _released.set()


# -- casts, definitions of functions, and the limit of buffers per message ---------------------------------


_received: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()


def _take(*args: object) -> None:
    execution = CURRENT.get()
    _received.put((execution.peer.name if execution else None, *args))


@pytest.mark.parametrize("elements", [1, 3000, 300_000, 3_000_000])
@pytest.mark.parametrize("transport", ["auto", "no lane"])
def test_a_cast_delivers_a_copy_of_its_arguments(elements: int, transport: str) -> None:
    with agents(2, lane=transport == "auto") as (a, b):
        sent = torch.arange(elements, dtype=torch.float32)
        for to in (b.name, a.name):
            a.cast(a.peer(to), _take, (1, sent), "take")
            sent_then = sent.clone()
            sent.add_(1)  # must not change the tensor of the receiver
            name, number, got = _received.get(timeout=20)
            assert (name, number) == ("a0", 1)
            assert torch.equal(got, sent_then)
        assert not any(peer.pending for peer in a.peers())


def _made(number: int) -> Callable[[], int]:
    return lambda: number


def _sum_of(functions: list[Callable[[], int]]) -> int:
    return sum(function() for function in functions)


def test_function_definitions_evicted_by_the_peer_are_sent_again(pair: list[Agent]) -> None:
    one, other = pair
    first, to = _made(7), one.peer(other.name)
    assert one.call_sync(to, first, (), {}, 10.0) == 7
    for begin in range(1000, 6000, 1000):
        functions = [_made(number) for number in range(begin, begin + 1000)]
        assert one.call_sync(to, _sum_of, (functions,), {}, 10.0) == sum(range(begin, begin + 1000))
    assert one.call_sync(to, first, (), {}, 10.0) == 7


def test_a_cast_that_cannot_be_sent_raises(pair: list[Agent]) -> None:
    a, b = pair
    peer = a.peer(b.name)
    with pytest.raises(errors.SerializationError):
        a.cast(peer, _take, (threading.Lock(),), "take")
    assert a.call_sync(peer, max, (1, 2), {}, 30) == 2
    b.close()
    while peer.state == "alive":
        threading.Event().wait(0.001)
    with pytest.raises(errors.PeerDiedError):
        a.cast(peer, _take, (), "take")
    a.close()
    with pytest.raises(errors.ShutdownError):
        a.cast(peer, _take, (), "take")


def test_max_buffers_can_be_raised_and_its_limit_error_names_the_setting() -> None:
    arrays = [np.zeros(4097, dtype=np.uint8) for _ in range(10_002)]
    with agents(2, max_buffers=10_001) as (caller, _):
        peer = caller.peer("a1")
        with pytest.raises(errors.LimitError, match=r"10002 tensors, arrays and buffers .* max_buffers"):
            caller.call_sync(peer, len, (arrays,), {}, 30)
        assert caller.call_sync(peer, len, (arrays[1:],), {}, 30) == 10_001
