"""A worker that restarts under its name, again and again, while others call it: nothing meant for one life reaches another.

In one process, so that a restart costs milliseconds: the new agent has the name, the rank and the very address of the one
before. Each call says whom it is for, and is compared with who executes it.
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

_lives: dict[str, Agent] = {}  # by incarnation
_landed: Counter[str] = Counter()
_wrong: list[tuple[str, str]] = []


def _land(incarnation: str) -> str:
    """Run on the worker that restarts: be for this life of it."""
    execution = CURRENT.get()
    assert execution is not None
    for mine, agent in list(_lives.items()):
        if any(peer is execution.peer for peer in agent.peers()):
            _landed[mine] += 1
            if mine != incarnation:
                _wrong.append((incarnation, mine))
            return mine
    raise AssertionError("executed by nobody")


class _Town:
    """Two callers, and the worker that restarts."""

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
        # Known to the others from here on: until now they know the life before.
        self._records[name] = self._records[rank] = mine
        return agent


def _crash(agent: Agent) -> None:
    """End without a goodbye, as a process that is killed."""
    for peer in agent.peers():
        for conn in list(peer.conns):
            with contextlib.suppress(OSError):
                conn.stream.shutdown(socket.SHUT_RDWR)
    agent.close(0.0)


@pytest.mark.prints("threads of 'victim' are still in user code after shutdown")
def test_an_address_that_a_later_life_has_is_no_question_of_keys() -> None:
    with contextlib.ExitStack() as stack:
        town = _Town(stack)
        path = keys.socket_path(keys.runtime_directory())
        before = town.start("victim", 2, path)
        caller = town.callers[0]
        peer = caller.peer("victim")
        before.close(0.0)
        after = town.start("victim", 2, path)
        stack.callback(after.close)
        for what in (abs, str):
            with pytest.raises(PeerDiedError, match="a new run") as caught:
                caller.ask(peer, what, (-1,), {}, 20.0)
            assert (caught.value.worker, caught.value.maybe_executed) == ("victim", False)
        new = caller.peer("victim")
        assert new is not peer
        assert caller.ask(new, abs, (-1,), {}, 20.0) == 1


@pytest.mark.limit(1200 if NIGHTLY else 60)
@pytest.mark.prints("threads of 'victim' are still in user code after shutdown")
def test_nothing_that_is_meant_for_a_life_reaches_another() -> None:
    _lives.clear()
    _landed.clear()
    _wrong.clear()
    outcomes: Counter[str] = Counter()
    over = threading.Event()
    grew = threading.Condition()

    def call(agent: Agent) -> None:
        """Call whoever is there, and those whom this thread has known before."""
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
                        agent.call(each, _land, (incarnation,), {}, 20.0, future=future)
                        futures.append(future)
                    agent.cast(each, _land, (incarnation,), "a post")
                    assert agent.ask(each, _land, (incarnation,), {}, 20.0) == incarnation
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
        town = _Town(stack)
        path = keys.socket_path(keys.runtime_directory())
        victim = town.start("victim", 2, path)
        _lives[victim.record.incarnation] = victim
        threads = [threading.Thread(target=call, args=(agent,)) for agent in town.callers for _ in range(2)]
        for each in threads:
            each.start()
        try:
            for number in range(_RESTARTS):
                mine = victim.record.incarnation
                with grew:  # it is called
                    assert grew.wait_for(lambda mine=mine: _landed[mine] > 20, 50.0)
                before, crashes = victim, number % 2
                if crashes:
                    _crash(before)
                else:
                    before.close(0.2)
                victim = town.start("victim", 2, path)
                _lives[victim.record.incarnation] = victim
                if len(_lives) > 8:
                    del _lives[next(iter(_lives))]
        finally:
            over.set()
            for each in threads:
                each.join()
            victim.close()
    assert _wrong == []
    assert len(_landed) >= _RESTARTS
    assert outcomes["PeerDiedError"]
    assert not outcomes["AuthenticationError"], "the address has a new life: that is a death, not a wrong key"
    note(
        "restarts under load",
        {"restarts": _RESTARTS, "calls that reached another life": len(_wrong), **outcomes},
    )
