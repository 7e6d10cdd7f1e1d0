"""Signal handlers that make calls, or raise, while the main thread makes a call."""

from __future__ import annotations

import contextlib
import functools
import operator
import select
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from actorrpc import _time
from actorrpc.agent.agent import Agent
from actorrpc.transport import signals
from actorrpc.transport.connection import ARMED, Connection
from tests.agent.agents import agents
from tests.interruptions import Interrupted, Steps, raising

pytestmark = pytest.mark.limit(30)

_gates: dict[str, threading.Event] = {}


def _pass(name: str) -> str:
    _gates[name].wait()
    return name


@contextlib.contextmanager
def _handling(handler: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def _signals(conn: Any, until: threading.Event) -> Iterator[None]:
    """Send signals to the main thread while a thread reads the connection, until ``until`` is set."""
    main = threading.get_ident()

    def run() -> None:
        while not until.is_set():
            if conn.read_lock.locked():
                signal.pthread_kill(main, signal.SIGUSR1)
            until.wait(0.001)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        until.set()
        thread.join()


def _add(one: Agent, other: Agent, a: int = 1) -> Any:
    return one.call_sync(one.peer(other.name), operator.add, (a, 2), {}, 20.0)


def test_signal_handlers_may_interrupt_each_other_while_they_wait_for_calls() -> None:
    _gates["nested"] = gate = threading.Event()
    passed: list[str] = []
    begun: list[None] = []
    enough = threading.Event()

    def handler() -> None:
        begun.append(None)
        if len(begun) >= 12:
            enough.set()
            gate.set()
        passed.append(one.call_sync(one.peer(other.name), _pass, ("nested",), {}, 25.0))

    with agents(2) as (one, other), _handling(handler):
        to = one.peer(other.name)
        assert _add(one, other) == 3
        with _signals(to.conn, enough):
            assert one.call_sync(to, _pass, ("nested",), {}, 25.0) == "nested"
        assert passed == ["nested"] * len(begun)
        assert _add(one, other) == 3


class _Interrupted:
    """A stream whose next ``send`` is interrupted by a signal."""

    def __init__(self, conn: Connection, found: list[int]) -> None:
        self._conn, self._stream, self._found = conn, conn.stream, found

    def send(self, *arguments: Any) -> int:
        self._conn.stream = self._stream
        signal.raise_signal(signal.SIGUSR1)
        assert not self._found
        return self._stream.send(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def test_a_signal_handler_that_calls_is_deferred_until_a_send_has_finished() -> None:
    found: list[int] = []
    with agents(2) as (one, other), _handling(lambda: found.append(_add(one, other))):
        assert _add(one, other) == 3
        conn = one.peer(other.name).conn
        assert conn is not None
        conn.stream = cast(Any, _Interrupted(conn, found))
        assert _add(one, other, 4) == 6
        assert found == [3]


def test_a_signal_handler_never_leaves_a_chunked_message_half_sent() -> None:
    """The signal arrives while the sender waits for the peer to read. If the handler returns, the message is sent completely;
    if it raises, the message is aborted."""
    data = bytes(range(256)) * (1 << 16)
    sent: list[bool] = []
    raises: list[bool] = []
    held: list[threading.Lock] = []

    def handler() -> None:
        sent.append(True)
        if raises:
            raise KeyError("of a handler")

    with agents(2, lane=False) as (one, other), _handling(handler):
        to = one.peer(other.name)
        assert _add(one, other) == 3
        conn = to.conn
        reading = other.peer(one.name).conn
        assert reading is not None

        class Interrupted:
            """A poll before which a signal arrives."""

            def __init__(self) -> None:
                poll = select.poll()
                self.register = poll.register
                self._poll = poll.poll

            def poll(self, wait_ms: float) -> object:
                if threading.current_thread() is threading.main_thread():
                    signal.raise_signal(signal.SIGUSR1)
                    if held:
                        held.pop().release()
                        reading.arm(ARMED)
                return self._poll(wait_ms)

        def hold() -> None:
            reading.read_lock.acquire()
            held.append(reading.read_lock)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_time, "poll", Interrupted)  # the connection creates its poll at the first wait
            hold()
            assert one.call_sync(to, len, (data,), {}, 25.0) == len(data)
            assert sent
            raises.append(True)
            hold()
            with pytest.raises(KeyError, match="of a handler"):
                one.call_sync(to, len, (data,), {}, 25.0)
        raises.clear()
        assert one.call_sync(to, len, (data,), {}, 25.0) == len(data)
        assert to.conn is conn
        assert not other.peer(one.name).conn.assemblies


@pytest.mark.slow
@pytest.mark.limit(200)
# Python's warning about a socket that the collector closes after the handler's exception.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_first_call_interrupted_at_any_step_leaves_a_usable_connection() -> None:
    """The call opens the connection; if a handler has raised, the next call opens it."""
    steps, at = Steps(), 1
    while True:
        with agents(2) as (one, other), raising():
            to = one.peer(other.name)
            with contextlib.suppress(Interrupted):
                steps.run(functools.partial(one.call_sync, to, operator.add, (1, 2), {}, 20.0), at)
                signals.checkpoint()
            with contextlib.suppress(Interrupted):  # a deferred signal may arrive only now
                one.call_sync(to, operator.add, (1, 2), {}, 20.0)
            found = one.call_sync(to, operator.add, (1, 2), {}, 20.0)
            assert found == 3, steps.place
            assert len(to.conns) == 1, steps.place
        if not steps.place:
            break
        at += 1
    assert at > 100
