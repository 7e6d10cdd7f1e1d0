"""Collectives whose members or creators end: errors of the other members, and the next generation."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc import CollectiveError, get
from tests.actors.e2e.choir import Maker, Member, totals
from tests.actors.e2e.kit import open_gate, until

pytestmark = pytest.mark.limit(30)
in_group = pytest.mark.parametrize("place", ["group"], indirect=True, scope="module")
embedded = pytest.mark.parametrize("place", ["embedded"], indirect=True, scope="module")


@pytest.fixture(autouse=True)
def _running(place: str) -> None:
    """Run each test in its marked place; unmarked tests run in both."""


def resources_of(actors: list[Any]) -> list[tuple[int, int]]:
    """Return the numbers of descriptors and threads of the actors' processes."""
    return get([each.resources.remote() for each in actors])


@embedded
def test_a_member_that_restarted_unnoticed_joins_again_at_the_next_call() -> None:
    actors = [Member.options(max_restarts=1).remote() for _ in range(2)]
    collective = actorrpc.collective(actors)
    get([each.keep.remote() for each in actors])
    actors[1].kill(no_restart=False)
    assert totals(collective.call("total", [1.0])) == [3.0] * 2
    # The group of the old generation fails.
    with pytest.raises(CollectiveError, match="failed"):
        get(actors[0].use_kept.remote())


@embedded
def test_calls_made_before_a_rebuild_fail_with_the_old_generation(gate: Path) -> None:
    actors = [Member.options(max_restarts=1).remote() for _ in range(3)]
    collective = actorrpc.collective(actors)
    busy = actors[1].block.remote(str(gate))
    early = [each.total.remote([1.0]) for each in actors[:2]]
    actors[2].kill(no_restart=False)
    with pytest.raises(CollectiveError):
        get(early[0])
    rebuilding = threading.Thread(target=collective.rebuild)
    rebuilding.start()
    until(lambda: collective.generation == 2)
    open_gate(gate)
    rebuilding.join()
    later = [each.total.remote([1.0]) for each in actors]
    with pytest.raises(CollectiveError):
        get(early[1])
    assert get(busy) == "go"
    assert totals(later) == [6.0] * 3


@embedded
def test_a_collective_ends_with_its_creator() -> None:
    actors = [Member.remote() for _ in range(2)]
    maker = Maker.options(max_restarts=0).remote()
    get(maker.make.remote(actors))
    assert totals([each.total.remote([1.0]) for each in actors]) == [3.0, 3.0]
    maker.kill()

    def ended() -> bool:
        refs = [each.total.remote([1.0]) for each in actors]
        errors = [ref.future().exception() for ref in refs]
        assert all(error is None or isinstance(error, CollectiveError) for error in errors)
        return any(errors)

    until(ended)


@pytest.mark.slow
@embedded
def test_destroying_a_collective_leaves_no_threads_or_descriptors() -> None:
    actors = [Member.remote() for _ in range(3)]
    once = actorrpc.collective(actors)  # creates what is kept once per process
    get(once.call("train", 1))
    once.destroy()
    before = resources_of(actors)
    collective = actorrpc.collective(actors)
    get(collective.call("train", 1))
    collective.rebuild()
    get(collective.call("operations"))
    collective.destroy()
    until(lambda: all(a <= b and c <= d for (a, c), (b, d) in zip(resources_of(actors), before, strict=True)))
    assert collective.destroyed
    collective.destroy()
    with pytest.raises(CollectiveError, match="destroyed"):
        collective.call("total", [1.0])
    with pytest.raises(CollectiveError, match="no collective"):
        get(actors[0].total.remote([1.0]))


def test_the_death_of_a_member_fails_operations_of_the_others() -> None:
    actors = [Member.options(max_restarts=1).remote() for _ in range(3)]
    collective = actorrpc.collective(actors, name="mortal")
    waiting = actors[0].wait_for.remote(1)  # rank 1 lives and never sends
    dying = actors[2].die.remote()
    with pytest.raises(CollectiveError, match=r"'mortal' \(generation 1\).*rank 2 was lost") as caught:
        get(waiting)
    assert isinstance(caught.value.cause, RuntimeError)
    with pytest.raises(actorrpc.ActorUnavailableError):
        get(dying)
    with pytest.raises(CollectiveError, match=r"is broken: |rank 2 was lost"):
        get(actors[1].total.remote([1.0]))
    assert "rank 2 was lost" in (collective.broken or "")
    # The next call waits for the restart, and all members join again.
    assert totals(collective.call("total", [1.0])) == [6.0] * 3
    assert (collective.generation, collective.broken) == (2, None)


@in_group
def test_a_call_fails_if_a_dead_member_is_not_restarted() -> None:
    actors = [Member.remote() for _ in range(3)]
    collective = actorrpc.collective(actors)
    actors[0].kill()
    with pytest.raises(actorrpc.ActorDiedError, match="dead"):
        collective.call("total", [1.0])
    others = actorrpc.collective(actors[1:])
    assert totals(others.call("total", [1.0], others.name)) == [3.0, 3.0]


@in_group
def test_a_collective_of_an_actor_group_includes_a_replaced_member() -> None:
    actors = Member.group(2)
    collective = actorrpc.collective(actors)
    made = actors.restart(1)
    assert totals(collective.call("total", [1.0])) == [3.0, 3.0]
    assert collective.members[1] == made


@in_group
def test_killed_members_leave_no_threads_or_descriptors_in_shared_processes() -> None:
    watchers = [Member.options(worker=f"worker{rank}").remote() for rank in (1, 2)]
    threads = [each[1] for each in resources_of(watchers)]

    def once() -> None:
        actors = [Member.options(worker=f"worker{1 + at % 2}").remote() for at in range(4)]
        collective = actorrpc.collective(actors)
        get(collective.call("operations"))
        for actor in actors:
            actor.kill()

    def is_over() -> bool:
        return all(now[1] <= then for now, then in zip(resources_of(watchers), threads, strict=True))

    once()
    until(is_over)
    files = [each[0] for each in resources_of(watchers)]  # includes connections that the workers keep
    once()
    until(is_over)
    until(lambda: all(now[0] <= then for now, then in zip(resources_of(watchers), files, strict=True)))
