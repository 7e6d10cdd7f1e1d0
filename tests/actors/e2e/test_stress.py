"""Random graphs of calls between actors, with cancellations and kills: every ObjectRef completes in time."""

from __future__ import annotations

import random
from typing import Any

import pytest

import actorrpc
from tests.actors.e2e.kit import Gate, until

pytestmark = [
    pytest.mark.usefixtures("place"),
    pytest.mark.limit(60),
    # A method gets its results in order and leaves the later ones unread if one fails.
    pytest.mark.prints(
        r"^the call of \w+\.run( on '[\w-]+')? failed and its error was never retrieved: Actor(Died|Unavailable)Error",
        r"^the call of Crossing\.ping on '[\w-]+' failed and its error was never retrieved: DeadlockError",
    ),
]

_BOUND = 30.0


class _Node:
    def __init__(self) -> None:
        self.calls = 0

    def plan(self, plan: list[Any]) -> list[Any]:
        """Start the calls of a plan, which lists (actor, its own plan, whether to wait at once)."""
        self.calls += 1
        refs = []
        for actor, inner, at_once in plan:
            ref = actor.run.remote(inner)
            if at_once:
                actorrpc.get(ref)
            refs.append(ref)
        return refs


@actorrpc.remote
class Serial(_Node):
    def run(self, plan: list[Any]) -> int:
        return 1 + sum(actorrpc.get(self.plan(plan)))


@actorrpc.remote(max_concurrency=3)
class Threaded(_Node):
    def run(self, plan: list[Any]) -> int:
        return 1 + sum(actorrpc.get(self.plan(plan)))


@actorrpc.remote
class Async(_Node):
    async def run(self, plan: list[Any]) -> int:
        self.calls += 1
        total = 1
        refs = [actor.run.remote(inner) for actor, inner, _ in plan]
        for ref in refs:
            total += await ref
        return total


@actorrpc.remote(max_restarts=-1)
class Mortal(_Node):
    def run(self, plan: list[Any]) -> int:
        return 1 + sum(actorrpc.get(self.plan(plan)))


def _plan(seed: random.Random, actors: list[Any], below: int, depth: int) -> tuple[list[Any], int]:
    """Return a plan whose calls go only to actors of higher numbers or back into the chain, so that nothing can deadlock."""
    if not depth:
        return [], 0
    plan, size = [], 0
    for _ in range(seed.choice([0, 1, 1, 2, 3])):
        number = seed.randrange(below, len(actors))
        inner, count = _plan(seed, actors, number, depth - 1)
        plan.append((actors[number], inner, seed.random() < 0.3))
        size += 1 + count
    return plan, size


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3])
def test_random_call_graphs_end_with_the_right_results(number: int) -> None:
    seed = random.Random(number)
    actors = [seed.choice([Serial, Threaded, Async]).remote() for _ in range(6)]
    expected, refs = [], []
    for _ in range(60):
        first = seed.randrange(len(actors))
        plan, size = _plan(seed, actors, first, 4)
        refs.append(actors[first].run.remote(plan))
        expected.append(1 + size)
    assert actorrpc.get(refs, timeout=_BOUND) == expected


@pytest.mark.slow
@pytest.mark.parametrize("number", [11, 12])
def test_random_call_graphs_end_while_calls_are_cancelled(number: int) -> None:
    seed = random.Random(number)
    actors = [seed.choice([Serial, Threaded, Async]).remote() for _ in range(6)]
    refs, expected, cancelled = [], [], set()
    for _ in range(60):
        first = seed.randrange(len(actors))
        plan, size = _plan(seed, actors, first, 4)
        refs.append(actors[first].run.remote(plan))
        expected.append(1 + size)
        if seed.random() < 0.3:
            victim = seed.randrange(len(refs))
            if actorrpc.cancel(refs[victim]):
                cancelled.add(victim)
    for n, (ref, value) in enumerate(zip(refs, expected, strict=True)):
        if n in cancelled:
            with pytest.raises(actorrpc.CancelledError):
                actorrpc.get(ref, timeout=_BOUND)
        else:
            assert actorrpc.get(ref, timeout=_BOUND) == value
    assert actorrpc.get([each.run.remote([]) for each in actors], timeout=_BOUND) == [1] * 6


@pytest.mark.slow
@pytest.mark.parametrize("number", [21, 22])
def test_random_call_graphs_end_while_actors_are_killed(number: int) -> None:
    seed = random.Random(number)
    actors = [seed.choice([Serial, Threaded, Async, Mortal]).remote() for _ in range(6)]
    refs, expected = [], []
    for n in range(60):
        first = seed.randrange(len(actors))
        plan, size = _plan(seed, actors, first, 4)
        try:
            refs.append(actors[first].run.remote(plan))
        except actorrpc.ActorError:
            continue
        expected.append(1 + size)
        if n in (20, 35, 50):
            actorrpc.kill(seed.choice(actors), no_restart=False)
    for ref, value in zip(refs, expected, strict=True):
        try:
            assert actorrpc.get(ref, timeout=_BOUND) == value
        except (actorrpc.ActorError, actorrpc.PeerDiedError):
            pass  # the number of failed calls depends on timing


@actorrpc.remote
class Crossing:
    def cross(self, other: Any, gate: Any, count: int) -> str:
        actorrpc.get(gate.wait.remote())
        if count == 1:
            return actorrpc.get(other.ping.remote())
        return actorrpc.get([other.ping.remote() for _ in range(count)])[0]

    def ping(self) -> str:
        return "pong"


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_at_least_one_of_two_chains_that_need_each_others_actors_gets_deadlock_error(count: int) -> None:
    """Like two threads that take two locks in opposite order."""
    a, b, gate = Crossing.remote(), Crossing.remote(), Gate.remote()
    refs = [a.cross.remote(b, gate, count), b.cross.remote(a, gate, count)]
    until(lambda: actorrpc.get(gate.count.remote()) == 2)
    actorrpc.get(gate.open.remote())
    deadlocks = 0
    for ref in refs:
        try:
            assert actorrpc.get(ref, timeout=_BOUND) == "pong"
        except actorrpc.DeadlockError:
            deadlocks += 1
    assert deadlocks
    assert actorrpc.get([a.ping.remote(), b.ping.remote()]) == ["pong"] * 2
