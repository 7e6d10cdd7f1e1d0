"""Every call ends exactly once: with its value, its error, PeerDiedError, RpcTimeoutError or CancelledError.

Agents in one process call each other at random, while connections are cut and agents are closed: plain and nested calls, calls
that raise, that return unpicklable values, that are cancelled or time out, and large tensors. Each future must complete
exactly once, with one of these outcomes, and ``maybe_executed`` of its error, and of the errors of nested calls, must agree with
what ran.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch

from actorrpc import errors
from actorrpc.agent.agent import Agent
from actorrpc.futures import Future
from tests.actors.e2e.kit import until
from tests.agent.agents import agents
from tests.faults.figures import NIGHTLY, note

_CALLS = 1_000_000 if NIGHTLY else 5_000  # of all rounds
_ROUND = 1_000  # calls with the same agents
_AGENTS = 4

_ran: Counter[int] = Counter()
_names: dict[str, Agent] = {}
_gate = threading.Event()


def _return(number: int, value: Any = None) -> Any:
    _ran[number] += 1
    return value


def _raise(number: int) -> None:
    _ran[number] += 1
    raise ValueError(number)


def _unpicklable(number: int) -> Any:
    _ran[number] += 1
    return threading.Lock()


def _slow(number: int, seconds: float) -> int:
    _ran[number] += 1
    _gate.wait(seconds)
    return number


def _nested(number: int, path: list[str], seconds: float) -> int:
    """Call the next agent of a path; at its end, wait."""
    if not path:
        return int(_slow(number, seconds))
    here, *rest = path
    agent = _names[here]
    _to = rest[0] if rest else here
    try:
        return int(agent.call_sync(agent.peer(_to), _nested, (number, rest, seconds), {}, 0.0))
    except errors.RpcError as error:
        if error.maybe_executed is False:
            _reported_as_not_executed.append(number)
        raise


class _Watched:
    """A future and the number of its completions."""

    def __init__(self, number: int, allowed: tuple[type[BaseException], ...]) -> None:
        self.number = number
        self.allowed = allowed
        self.future: Future[Any] = Future()
        self.ends = 0
        self.future.add_done_callback(self._count_end)

    def _count_end(self, _: Any) -> None:
        self.ends += 1


_ANY_TIME = (errors.PeerDiedError, errors.ShutdownError, errors.CancelledError, errors.RpcTimeoutError)


class _Round:
    """Random calls between some agents, of which up to two are closed."""

    def __init__(self, made: list[Agent], seed: int, first: int) -> None:
        self.agents = made
        self.dice = random.Random(seed)
        self.number = first
        self.watched: list[_Watched] = []
        self.ended: list[_Watched] = []
        self.ends: Counter[str] = Counter()
        self.closed: set[str] = set()

    def call(self) -> None:
        dice = self.dice
        agent, to = dice.choice(self.agents), dice.choice(self.agents)
        self.number += 1
        number, timeout, allowed = self.number, 0.0, _ANY_TIME
        function, args = _return, (number, number)
        match dice.randrange(12):
            case 0:
                function, args, allowed = _raise, (number,), (*_ANY_TIME, ValueError)
            case 1:
                function, args = _unpicklable, (number,)
                allowed = (*_ANY_TIME, errors.SerializationError, errors.RemoteError)
            case 2:
                function, args = _slow, (number, dice.random() * 0.004)
            case 3:
                function, args, timeout = _slow, (number, 0.01), dice.random() * 0.02 + 1e-4
            case 4 | 5:
                path = [to.name, *(dice.choice(self.agents).name for _ in range(dice.randrange(3)))]
                function, args = _nested, (number, path, dice.random() * 0.002)
                timeout = dice.choice((0.0, 0.0, 0.003, 1.0))
            case 6:
                function, args = _return, (number, torch.zeros(dice.choice((10, 20_000, 200_000))))
            case _:
                pass
        watched = _Watched(number, allowed)
        sync = dice.random() < 0.2
        try:
            if sync:
                agent.call_sync(agent.peer(to.name), function, args, {}, timeout)
                self.end("value", number)
                return
            agent.call(agent.peer(to.name), function, args, {}, timeout, future=watched.future)
        except allowed as error:  # of a synchronous call, or raised before anything was sent
            self.end(type(error).__name__, number, error)
            return
        self.watched.append(watched)

    def disturb(self) -> None:
        dice = self.dice
        kind = dice.random()
        if kind < 0.08 and self.watched:
            dice.choice(self.watched).future.cancel()
        elif kind < 0.081:
            agent, to = dice.sample(self.agents, 2)
            conn = agent.peer(to.name).conn
            if conn is not None:
                conn.close(ConnectionResetError("cut by the test"))
        elif kind < 0.0815 and len(self.closed) < 2:
            agent = dice.choice(self.agents)
            self.closed.add(agent.name)
            agent.close(0.05)

    def collect(self, keep: int) -> None:
        """Wait for calls in random order, until ``keep`` remain."""
        while len(self.watched) > keep:
            watched = self.watched.pop(self.dice.randrange(len(self.watched)))
            try:
                watched.future.wait(60.0)
            except watched.allowed as error:
                assert watched.future.done(), f"call {watched.number} has not ended after 60 s"
                self.end(type(error).__name__, watched.number, error)
            else:
                self.end("value", watched.number)
            self.ended.append(watched)

    def end(self, how: str, number: int, error: BaseException | None = None) -> None:
        self.ends[how] += 1
        assert _ran[number] <= 1, f"call {number} has run {_ran[number]} times"
        if how in ("value", "ValueError", "SerializationError"):
            assert _ran[number] == 1, (how, number)
        if isinstance(error, errors.RpcError) and error.maybe_executed is False:
            _reported_as_not_executed.append(number)


_reported_as_not_executed: list[int] = []


def _play(seed: int, calls: int, first: int) -> Counter[str]:
    _ran.clear()
    _reported_as_not_executed.clear()
    _gate.clear()
    with agents(_AGENTS) as made:
        _names.update({agent.name: agent for agent in made})
        played = _Round(made, seed, first)
        for _ in range(calls):
            played.call()
            played.disturb()
            played.collect(64)
        for agent in made:
            agent.flush()
        played.collect(0)
        # Callbacks run on threads of the agents, and calls nested in a cancelled call end a little later.
        until(lambda: all(each.ends for each in played.ended))
        until(lambda: not any(peer.pending for agent in made for peer in agent.peers()))
    _gate.set()
    _names.clear()
    # Checked at the end: no future completed twice, and no call with maybe_executed False ran later.
    assert {each.ends for each in played.ended} == {1}
    assert [number for number in _reported_as_not_executed if _ran[number]] == []
    return played.ends


@pytest.mark.limit(7200 if NIGHTLY else 60)
@pytest.mark.prints(r"threads of 'a\d' are still in user code after shutdown")
def test_every_call_ends_exactly_once() -> None:
    ends: Counter[str] = Counter()
    begun = time.monotonic()
    for number in range(_CALLS // _ROUND):
        ends += _play(number, _ROUND, number * _ROUND)
    assert ends.total() == _CALLS
    assert {"value", "ValueError", "CancelledError", "RpcTimeoutError", "PeerDiedError"} <= set(ends)
    note(
        "outcomes of random calls",
        {"calls": _CALLS, "hung": 0, "seconds": round(time.monotonic() - begun, 1), **ends},
    )
