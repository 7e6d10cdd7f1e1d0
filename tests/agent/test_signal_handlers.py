"""Calls that signal handlers make, in the middle of one that the main thread makes."""

from __future__ import annotations

import contextlib
import functools
import operator
import select
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actorrpc import _time
from actorrpc.agent.agent import Agent
from actorrpc.transport import signals
from actorrpc.transport.reader import ARMED
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
    """Send the main thread a signal whenever a thread reads the connection, until that is enough."""
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
    return one.ask(one.peer(other.name), operator.add, (a, 2), {}, 20.0)


def test_a_handler_may_wait_for_a_call_while_the_main_thread_does() -> None:
    _gates["open"] = gate = threading.Event()
    heard: list[bool] = []
    enough = threading.Event()

    def handler() -> None:
        number = len(heard)
        heard.append(_add(one, other, number) == number + 2)
        if len(heard) >= 20:
            enough.set()
            gate.set()

    with agents(2) as (one, other), _handling(handler):
        to = one.peer(other.name)
        assert _add(one, other) == 3
        with _signals(to.conn, enough):
            assert one.ask(to, _pass, ("open",), {}, 25.0) == "open"
        assert all(heard)


def test_a_message_in_chunks_is_not_torn_by_handlers() -> None:
    """It waits for the peer, which reads on after the signal: a handler that returns changes nothing, one that raises ends it."""
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
            """Waits for room in the kernel; before that, a signal comes."""

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
            patch.setattr(_time, "poll", Interrupted)  # the connection has not had to wait for room before
            hold()
            assert one.ask(to, len, (data,), {}, 25.0) == len(data)
            assert sent
            raises.append(True)
            hold()
            with pytest.raises(KeyError, match="of a handler"):
                one.ask(to, len, (data,), {}, 25.0)
        raises.clear()
        assert one.ask(to, len, (data,), {}, 25.0) == len(data)
        assert to.conn is conn
        assert not other.peer(one.name).conn.assemblies


@pytest.mark.slow
@pytest.mark.limit(200)
# Python's word for a socket that the handler's error has left to the collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_first_call_may_be_interrupted_at_each_step() -> None:
    """The connection is made by the call, and made again by the next one where a handler has raised."""
    steps, at = Steps(), 1
    while True:
        with agents(2) as (one, other), raising():
            to = one.peer(other.name)
            with contextlib.suppress(Interrupted):
                steps.run(functools.partial(one.ask, to, operator.add, (1, 2), {}, 20.0), at)
                signals.checkpoint()
            with contextlib.suppress(Interrupted):  # what was put off may come only now
                one.ask(to, operator.add, (1, 2), {}, 20.0)
            found = one.ask(to, operator.add, (1, 2), {}, 20.0)
            assert found == 3, steps.place
            assert len(to.conns) == 1, steps.place
        if not steps.place:
            break
        at += 1
    assert at > 100
