"""A worker restarts repeatedly under the same name while others call it: no call reaches another incarnation.

All agents are in one process, so that a restart takes milliseconds. The new agent has the name, the rank and the address of its
predecessor. Each call names its target incarnation, and the executing agent compares it with its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter
from typing import Any

import pytest

from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import CURRENT
from actorrpc.config import Settings
from actorrpc.errors import PeerDiedError, RpcError
from actorrpc.futures import Future
from actorrpc.wire import keys
from actorrpc.wire.identity import WorkerRecord
from tests.agent.agents import KEY, record
from tests.faults.figures import NIGHTLY, note

_RESTARTS = 1000 if NIGHTLY else 20

_agents: dict[str, Agent] = {}  # agents by incarnation
_executed: Counter[str] = Counter()
_wrong: list[tuple[str, str]] = []


def _execute(incarnation: str) -> str:
    """Run on the restarting worker; record a call for another incarnation as wrong."""
    execution = CURRENT.get()
    assert execution is not None
    for mine, agent in list(_agents.items()):
        if any(peer is execution.peer for peer in agent.peers()):
            _executed[mine] += 1
            if mine != incarnation:
                _wrong.append((incarnation, mine))
            return mine
    raise AssertionError("executed by no agent")


class _Group:
    """Two calling agents, and the restarting worker."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._records: dict[str | int, WorkerRecord] = {}
        self.callers = [self.start(f"a{rank}", rank) for rank in range(2)]
        for agent in self.callers:
            stack.callback(agent.close)

    def start(self, name: str, rank: int, path: str | None = None) -> Agent:
        path = path or keys.socket_path(keys.runtime_directory())
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind(path)
        listener.listen(16)
        mine = record(name, rank, path)
        agent = Agent(
            mine,
            settings=Settings(),
            key=KEY,
            resolve=self._records.get,
            members=lambda: [each for key, each in self._records.items() if isinstance(key, str)],
        )
        agent.start([listener])
        # From here on, the callers resolve the name to this incarnation.
        self._records[name] = self._records[rank] = mine
        return agent


def _crash(agent: Agent) -> None:
    """End without a GOODBYE frame, like a killed process."""
    for peer in agent.peers():
        for conn in list(peer.conns):
            with contextlib.suppress(OSError):
                conn.stream.shutdown(socket.SHUT_RDWR)
    agent.close(0.0)


@pytest.mark.prints("threads of 'victim' are still in user code after shutdown")
def test_a_call_to_a_dead_incarnation_raises_peer_died_error_when_its_address_has_a_new_one() -> None:
    with contextlib.ExitStack() as stack:
        group = _Group(stack)
        path = keys.socket_path(keys.runtime_directory())
        before = group.start("victim", 2, path)
        caller = group.callers[0]
        peer = caller.peer("victim")
        before.close(0.0)
        after = group.start("victim", 2, path)
        stack.callback(after.close)
        for function in (abs, str):
            with pytest.raises(PeerDiedError, match="a new run") as caught:
                caller.call_sync(peer, function, (-1,), {}, 20.0)
            assert (caught.value.worker, caught.value.maybe_executed) == ("victim", False)
        new = caller.peer("victim")
        assert new is not peer
        assert caller.call_sync(new, abs, (-1,), {}, 20.0) == 1


@pytest.mark.limit(1200 if NIGHTLY else 60)
@pytest.mark.prints("threads of 'victim' are still in user code after shutdown")
def test_no_call_reaches_another_incarnation_during_restarts() -> None:
    _agents.clear()
    _executed.clear()
    _wrong.clear()
    outcomes: Counter[str] = Counter()
    over = threading.Event()
    grew = threading.Condition()

    def call(agent: Agent) -> None:
        """Call the present incarnation, and the previous one that this thread has called."""
        known: list[Any] = []
        while not over.is_set():
            peer = agent.peer("victim")
            if not known or known[-1] is not peer:
                known.append(peer)
            for each in known[-2:]:
                incarnation = each.record.incarnation
                futures = []
                try:
                    for _ in range(4):
                        future: Future[Any] = Future()
                        agent.call(each, _execute, (incarnation,), {}, 20.0, future=future)
                        futures.append(future)
                    agent.cast(each, _execute, (incarnation,), "a post")
                    assert agent.call_sync(each, _execute, (incarnation,), {}, 20.0) == incarnation
                    agent.flush()
                except RpcError as error:
                    outcomes[type(error).__name__] += 1
                for future in futures:
                    end = future.exception()
                    outcomes[type(end).__name__] += 1
                    assert end is not None or future.wait() == incarnation
            with grew:
                grew.notify_all()

    with contextlib.ExitStack() as stack:
        group = _Group(stack)
        path = keys.socket_path(keys.runtime_directory())
        victim = group.start("victim", 2, path)
        _agents[victim.record.incarnation] = victim
        threads = [threading.Thread(target=call, args=(agent,)) for agent in group.callers for _ in range(2)]
        for each in threads:
            each.start()
        try:
            for number in range(_RESTARTS):
                mine = victim.record.incarnation
                with grew:  # wait until it was called
                    assert grew.wait_for(lambda mine=mine: _executed[mine] > 20, 50.0)
                before, crashes = victim, number % 2
                if crashes:
                    _crash(before)
                else:
                    before.close(0.2)
                victim = group.start("victim", 2, path)
                _agents[victim.record.incarnation] = victim
                if len(_agents) > 8:
                    del _agents[next(iter(_agents))]
        finally:
            over.set()
            for each in threads:
                each.join()
            victim.close()
    assert _wrong == []
    assert len(_executed) >= _RESTARTS
    assert outcomes["PeerDiedError"]
    assert not outcomes["AuthenticationError"], (
        "a new incarnation at the same address means a death, not a wrong key"
    )
    note(
        "restarts under load",
        {"restarts": _RESTARTS, "calls that reached another incarnation": len(_wrong), **outcomes},
    )
