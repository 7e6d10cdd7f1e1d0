"""Ways that are lost: in one direction, or with the connection itself, while it may still come back.

Two agents of one process, each behind a proxy, that take each other for workers of different hosts: silence is all that they
can go by. Both learn of it within the one time that is promised (heartbeat times misses): the side that still hears the
other one is told by it, and the grace time of a broken connection is no respite for a peer that is silent.
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

from actorrpc.agent.agent import Agent
from actorrpc.agent.peers import state_of
from actorrpc.config import Settings
from actorrpc.errors import PeerDiedError
from actorrpc.futures import Future
from actorrpc.transport.connection_state import SUSPENDED
from actorrpc.wire.identity import WorkerInfo, WorkerRecord
from tests.agent.agents import KEY, record
from tests.harness.proxy import Disturbance, FaultProxy

_entered = threading.Semaphore(0)
_gate = threading.Event()


def _stay() -> None:
    _entered.release()
    _gate.wait()


class _End:
    """One of the two: its agent, the proxy before it, and what it was told of the other one."""

    def __init__(self, rank: int, records: dict[str | int, WorkerRecord], settings: dict[str, Any]) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.proxy = FaultProxy(listener.getsockname()).start()
        host, _, port = self.proxy.address.rpartition(":")
        mine = replace(record(f"a{rank}", rank), tcp=((host, int(port)),), host=f"host{rank}")
        records[rank] = records[mine.name] = mine
        self.agent = Agent(
            mine,
            settings=Settings(transport="tcp", **settings),
            key=KEY,
            resolve=records.get,
            members=lambda: [each for name, each in records.items() if isinstance(name, str)],
        )
        self.agent.start([listener])
        self.other = f"a{1 - rank}"
        self.told: list[tuple[str, str]] = []
        self.over = threading.Event()
        self.agent.scheduler.changes.listen(self._heard)

    def _heard(self, worker: WorkerInfo, old: str, new: str, reason: str) -> None:
        assert worker.name == self.other
        self.told.append((new, reason))
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
def _two(*each: dict[str, Any], **settings: Any) -> Iterator[list[_End]]:
    """Run the two, with settings of each one's own if there are any."""
    records: dict[str | int, WorkerRecord] = {}
    _gate.clear()
    with contextlib.ExitStack() as stack:
        ends = []
        for rank in range(2):
            ends.append(_End(rank, records, {**settings, **(each[rank] if each else {})}))
            stack.callback(ends[-1].close)
        stack.callback(_gate.set)
        yield ends


def _under_way(ends: list[_End], count: int = 3) -> dict[_End, list[Future[Any]]]:
    """Have calls run on both, made by the other one."""
    calls = {end: [end.begin(_stay) for _ in range(count)] for end in ends}
    for _ in range(2 * count):
        _entered.acquire()
    return calls


def _ended(calls: list[Future[Any]], executed: bool) -> None:
    for call in calls:
        with pytest.raises(PeerDiedError) as caught:
            call.wait()
        assert caught.value.maybe_executed is executed


def _is_dead(end: _End) -> None:
    """See that it has taken the other one for dead, once and for good."""
    end.over.wait()
    assert end.state == "dead"
    with pytest.raises(PeerDiedError) as caught:
        end.begin(operator.add, 1, 1).wait()
    assert caught.value.maybe_executed is False
    assert [state for state, _ in end.told].count("dead") == 1
    assert end.told[-1][0] == "dead"


@pytest.mark.limit(60)
@pytest.mark.parametrize("direction", ["to", "from"])
def test_the_side_that_still_hears_is_told(direction: str) -> None:
    # The connection is the one that a0 has made: over the proxy before a1.
    order = [0, 1] if direction == "from" else [1, 0]
    # The one that hears does not find out by its own count of silence, which is that of a day.
    own: list[dict[str, Any]] = [{"heartbeat": 0.5}, {"heartbeat": 86_400.0}]
    with _two(*(own[number] for number in order), session_grace=600.0) as ends:
        calls = _under_way(ends)
        deaf, hearing = (ends[number] for number in order)
        for end in ends:
            end.proxy.add(Disturbance("stall", direction=direction))
        for end in (deaf, hearing):
            _ended(calls[end], True)
            _is_dead(end)
        assert [state for state, _ in deaf.told] == ["suspect", "dead"]
        assert "silent for" in deaf.told[-1][1]
        assert hearing.told[-1][1] == "it considers this worker dead, and has closed the connection"


@pytest.mark.limit(60)
def test_a_grace_is_no_respite_for_who_is_silent() -> None:
    with _two(heartbeat=0.2, session_grace=600.0) as ends:
        calls = _under_way(ends)
        for end in ends:
            end.proxy.stall()  # of those that come, too: they are accepted, and hear nothing
        for end in ends:
            end.proxy.cut()
        conns = [end.agent.peer(end.other).conn for end in ends]
        for _ in itertools.count():
            if all(conn is None or conn.state is SUSPENDED for conn in conns):
                break
            threading.Event().wait(0.002)
        held: list[Future[Any]] = []
        for end in ends:
            with contextlib.suppress(PeerDiedError):  # on a busy machine, it is over by now
                held.append(end.begin(operator.add, 1, 1))
        for end in ends:
            _ended(calls[end], True)
            _is_dead(end)
            assert [state for state, _ in end.told] == ["suspect", "dead"]
        _ended(held, False)  # made while there was no connection: they never left
