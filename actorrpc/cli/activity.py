"""What workers and actors have done between two looks at their groups. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from actorrpc.observe.model import GroupState

__all__ = ["rates", "shares"]


def rates(before: Iterable[GroupState], after: Iterable[GroupState]) -> dict[str, float]:
    """Return how many calls of each actor ended in a second, by its id; without those that were not seen before."""
    old = {each.actor_id: each for state in before for each in state.actors}
    found = {}
    for state in after:
        for actor in state.actors:
            then = old.get(actor.actor_id)
            if then is not None and actor.age > then.age and actor.calls_done >= then.calls_done:
                found[actor.actor_id] = (actor.calls_done - then.calls_done) / (actor.age - then.age)
    return found


def shares(before: Iterable[GroupState], after: Iterable[GroupState]) -> dict[tuple[str, int], float]:
    """Return how much of a processor each worker used, in percent, by its name and process id."""
    old = {(each.name, each.pid): each for state in before for each in state.workers}
    found = {}
    for state in after:
        for worker in state.workers:
            then = old.get((worker.name, worker.pid))
            if then is not None and worker.age > then.age:
                found[worker.name, worker.pid] = 100 * (worker.cpu - then.cpu) / (worker.age - then.age)
    return found
