"""Calls that signal handlers make, in the middle of one that the main thread makes."""

from __future__ import annotations

import contextlib
import operator
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actorrpc.agent.agent import Agent
from actorrpc.errors import DeadlockError
from actorrpc.transport.connection import Connection
from tests.agent.agents import agents

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
    """Send the main thread a signal whenever it sleeps in a wait for a reply, until that is enough."""
    main = threading.get_ident()

    def run() -> None:
        while not until.is_set():
            if conn.waiting._asleep:
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
    return one.call(one.peer(other.name), operator.add, (a, 2), {}, 20.0)


def test_a_handler_may_wait_for_a_call_while_the_main_thread_does() -> None:
    _gates["open"] = gate = threading.Event()
    heard: list[bool] = []
    enough = threading.Event()

    def handler() -> None:
        number = len(heard)
        try:
            heard.append(_add(one, other, number).result() == number + 2)
        except DeadlockError:  # it has interrupted another handler in the middle of something
            return
        if len(heard) >= 20:
            enough.set()
            gate.set()

    with agents(2) as (one, other), _handling(handler):
        to = one.peer(other.name)
        assert _add(one, other).result() == 3
        with _signals(to.conn, enough):
            assert one.call(to, _pass, ("open",), {}, 25.0).result() == "open"
        assert all(heard)


def test_handlers_that_interrupt_each_other_are_refused_in_the_end() -> None:
    _gates["nested"] = gate = threading.Event()
    refused: list[DeadlockError] = []
    passed: list[str] = []
    enough = threading.Event()

    def handler() -> None:
        try:
            passed.append(one.call(one.peer(other.name), _pass, ("nested",), {}, 25.0).result())
        except DeadlockError as error:
            refused.append(error)
            enough.set()
            gate.set()

    with agents(2) as (one, other), _handling(handler):
        to = one.peer(other.name)
        assert _add(one, other).result() == 3
        with _signals(to.conn, enough):
            assert one.call(to, _pass, ("nested",), {}, 25.0).result() == "nested"
        assert "has interrupted 9 others, each in its wait" in str(refused[0])
        assert len(passed) >= 8
        assert _add(one, other).result() == 3
    refused.clear()


def test_a_handler_that_interrupts_the_sending_is_refused_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[DeadlockError] = []
    drain = Connection._drain

    def interrupted(conn: Connection) -> bool:
        monkeypatch.setattr(Connection, "_drain", drain)
        signal.raise_signal(signal.SIGUSR1)
        return drain(conn)

    def handler() -> None:
        with pytest.raises(DeadlockError, match="while it sends or receives") as caught:
            _add(one, other).result()
        refused.append(caught.value)

    with agents(2) as (one, other), _handling(handler):
        assert _add(one, other).result() == 3
        monkeypatch.setattr(Connection, "_drain", interrupted)
        assert _add(one, other, 4).result() == 6
        assert len(refused) == 1
        assert _add(one, other).result() == 3
    refused.clear()


def test_what_a_handler_raises_ends_the_wait_and_not_the_connection() -> None:
    _gates["late"] = gate = threading.Event()
    enough = threading.Event()

    def handler() -> None:
        if not enough.is_set():
            enough.set()
            raise KeyError("of a handler")

    with agents(2) as (one, other), _handling(handler):
        to = one.peer(other.name)
        assert _add(one, other).result() == 3
        conn = to.conn
        with _signals(conn, enough), pytest.raises(KeyError, match="of a handler"):
            one.call(to, _pass, ("late",), {}, 25.0).result()
        gate.set()
        assert _add(one, other).result() == 3
        assert to.conn is conn
        assert conn is not None
        assert not conn.broken


def test_threads_that_wait_while_the_main_one_reads_are_no_handlers() -> None:
    _gates["threads"] = gate = threading.Event()
    found: list[Any] = []
    with agents(2) as (one, other):
        to = one.peer(other.name)
        assert _add(one, other).result() == 3

        def wait() -> None:
            until = threading.Event()
            while not to.conn.waiting._asleep:
                until.wait(0.001)
            try:
                found.append([_add(one, other, each).result() for each in range(20)])
            except BaseException as error:
                found.append(error)
            finally:
                gate.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert one.call(to, _pass, ("threads",), {}, 25.0).result() == "threads"
        thread.join()
    assert found == [[each + 2 for each in range(20)]]
