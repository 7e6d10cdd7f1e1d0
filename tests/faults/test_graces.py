"""Detection when a link loses one direction, or when a broken connection may still be resumed.

Two agents of one process, each behind a proxy, consider each other workers of different hosts, so only silence reveals a fault.
Both must detect it within the promised time (heartbeat times misses): a side that still receives is told by its peer, and
the grace time of a broken connection does not extend the time of a silent peer.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from actorrpc.agent.peers import state_of
from actorrpc.errors import PeerDiedError
from actorrpc.futures import Future
from actorrpc.transport.stream import SUSPENDED
from actorrpc.wire.identity import WorkerInfo, WorkerRecord
from tests.agent.agents import record, start_agent
from tests.harness.proxy import Disturbance, FaultProxy

_entered = threading.Semaphore(0)
_gate = threading.Event()


def _block() -> None:
    _entered.release()
    _gate.wait()


class _Side:
    """One of the two agents, with its proxy and its membership events about the other agent."""

    def __init__(self, rank: int, records: dict[str | int, WorkerRecord], settings: dict[str, Any]) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.proxy = FaultProxy(listener.getsockname()).start()
        host, _, port = self.proxy.address.rpartition(":")
        mine = replace(record(f"a{rank}", rank), tcp=((host, int(port)),), host=f"host{rank}")
        self.agent = start_agent(mine, listener, records, transport="tcp", **settings)
        self.other = f"a{1 - rank}"
        self.events: list[tuple[str, str]] = []
        self.over = threading.Event()
        self.agent.scheduler.changes.listen(self._on_change)

    def _on_change(self, worker: WorkerInfo, old: str, new: str, reason: str) -> None:
        assert worker.name == self.other
        self.events.append((new, reason))
        if new in ("dead", "left"):
            self.over.set()

    @property
    def state(self) -> str:
        return state_of(self.agent.peer(self.other))

    def begin(self, function: Any, *args: Any) -> Future[Any]:
        """Make a call without a time-out."""
        future: Future[Any] = Future()
        self.agent.call(self.agent.peer(self.other), function, args, {}, 0, future=future)
        self.agent.flush()
        return future

    def close(self) -> None:
        self.agent.close()
        self.proxy.close()


@contextlib.contextmanager
def _two(*each: dict[str, Any], **settings: Any) -> Iterator[list[_Side]]:
    """Run two agents; ``each`` has settings of the single agents."""
    records: dict[str | int, WorkerRecord] = {}
    _gate.clear()
    with contextlib.ExitStack() as stack:
        ends = []
        for rank in range(2):
            ends.append(_Side(rank, records, {**settings, **(each[rank] if each else {})}))
            stack.callback(ends[-1].close)
        stack.callback(_gate.set)
        yield ends


def _start_calls(ends: list[_Side], count: int = 3) -> dict[_Side, list[Future[Any]]]:
    """Start calls in both directions, and wait until they run."""
    calls = {end: [end.begin(_block) for _ in range(count)] for end in ends}
    for _ in range(2 * count):
        _entered.acquire()
    return calls


def _failed(calls: list[Future[Any]], executed: bool) -> None:
    for call in calls:
        with pytest.raises(PeerDiedError) as caught:
            call.wait()
        assert caught.value.maybe_executed is executed


def _declares_other_dead(end: _Side) -> None:
    """Wait until this side has declared the other dead, exactly once, and check that calls fail."""
    end.over.wait()
    assert end.state == "dead"
    with pytest.raises(PeerDiedError) as caught:
        end.begin(operator.add, 1, 1).wait()
    assert caught.value.maybe_executed is False
    assert [state for state, _ in end.events].count("dead") == 1
    assert end.events[-1][0] == "dead"


@pytest.mark.limit(60)
@pytest.mark.parametrize("direction", ["to", "from"])
def test_a_peer_that_still_receives_is_told_that_the_other_direction_is_lost(direction: str) -> None:
    # a0 opened the connection, through the proxy of a1.
    order = [0, 1] if direction == "from" else [1, 0]
    # With this heartbeat, the receiving side cannot detect the silence by itself.
    own: list[dict[str, Any]] = [{"heartbeat": 0.5}, {"heartbeat": 86_400.0}]
    with _two(*(own[number] for number in order), session_grace=600.0) as ends:
        calls = _start_calls(ends)
        silent_side, receiving_side = (ends[number] for number in order)
        for end in ends:
            end.proxy.add(Disturbance("stall", direction=direction))
        for end in (silent_side, receiving_side):
            _failed(calls[end], True)
            _declares_other_dead(end)
        assert [state for state, _ in silent_side.events] == ["suspect", "dead"]
        assert "silent for" in silent_side.events[-1][1]
        assert receiving_side.events[-1][1] == "it considers this worker dead, and has closed the connection"


@pytest.mark.limit(60)
def test_the_session_grace_time_does_not_delay_the_detection_of_a_silent_peer() -> None:
    with _two(heartbeat=0.2, session_grace=600.0) as ends:
        calls = _start_calls(ends)
        for end in ends:
            end.proxy.stall()  # new connections as well: they are accepted and receive nothing
        for end in ends:
            end.proxy.cut()
        conns = [end.agent.peer(end.other).conn for end in ends]
        for _ in itertools.count():
            if all(conn is None or conn.state is SUSPENDED for conn in conns):
                break
            threading.Event().wait(0.002)
        held: list[Future[Any]] = []
        for end in ends:
            with contextlib.suppress(
                PeerDiedError
            ):  # on a busy machine, the peer may be declared dead already
                held.append(end.begin(operator.add, 1, 1))
        for end in ends:
            _failed(calls[end], True)
            _declares_other_dead(end)
            assert [state for state, _ in end.events] == ["suspect", "dead"]
        _failed(held, False)  # made without a connection, so never sent
