"""Random graphs of calls between actors, with cancellations and kills: every ObjectRef completes in time."""

from __future__ import annotations

import random
from typing import Any

import pytest

import actorrpc

pytestmark = [
    pytest.mark.usefixtures("place"),
    pytest.mark.limit(60),
    # A method gets its results in order and leaves the later ones unread if one fails.
    pytest.mark.prints(
        r"^the call of \w+\.run( on '[\w-]+')? failed and its error was never retrieved: Actor(Died|Unavailable)Error",
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
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("fault", ["none", "cancel", "kill"])
def test_random_call_graphs_end_with_the_right_results_or_errors(fault: str, number: int) -> None:
    seed = random.Random(number)
    kinds = [Serial, Threaded, Async, *([Mortal] if fault == "kill" else [])]
    actors = [seed.choice(kinds).remote() for _ in range(6)]
    calls: list[tuple[Any, int]] = []
    cancelled = set()
    for n in range(60):
        first = seed.randrange(len(actors))
        plan, size = _plan(seed, actors, first, 4)
        try:
            calls.append((actors[first].run.remote(plan), 1 + size))
        except actorrpc.ActorError:
            assert fault == "kill"
        if fault == "cancel" and seed.random() < 0.3:
            victim = seed.randrange(len(calls))
            if actorrpc.cancel(calls[victim][0]):
                cancelled.add(victim)
        if fault == "kill" and n in (20, 35, 50):
            actorrpc.kill(seed.choice(actors), no_restart=False)
    for n, (ref, value) in enumerate(calls):
        try:
            assert actorrpc.get(ref, timeout=_BOUND) == value
            assert n not in cancelled
        except actorrpc.CancelledError:
            assert n in cancelled
        except (actorrpc.ActorError, actorrpc.PeerDiedError):
            assert fault == "kill"  # the number of failed calls depends on timing
    if fault != "kill":
        assert actorrpc.get([each.run.remote([]) for each in actors], timeout=_BOUND) == [1] * 6
