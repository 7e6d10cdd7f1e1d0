"""Collectives: operations, training, wrong use, and errors and the next generation if members or creators end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import CollectiveError, get
from tests.actors.e2e.choir import Async, Maker, Member, check_operations, check_training, equal, totals
from tests.actors.e2e.kit import open_gate, until
from tests.migration.rows import row

pytestmark = pytest.mark.limit(30)
in_group = pytest.mark.parametrize(
    "place", ["group"], indirect=True, scope="module"
)  # actors share processes
embedded = pytest.mark.parametrize("place", ["embedded"], indirect=True, scope="module")


@pytest.fixture(autouse=True)
def _running(place: str) -> None:
    """Run each test in its marked place; unmarked tests run in both."""


@in_group
class TestUse:
    @row("RDMABuffer", "from-monarch")
    def test_operations_give_the_results_of_a_local_computation(self) -> None:
        actors = Member.group(4)
        for size in (2, 3, 4):
            collective = actorrpc.collective(actors.slice(rank=slice(0, size)), timeout=20)
            check_operations(get(collective.call("operations")))
            collective.destroy()

    def test_ordinary_calls_of_members_can_use_the_collective(self) -> None:
        actors = Member.group(3)
        collective = actorrpc.collective(actors)
        assert list(collective.members) == list(actors)
        assert [collective.ranks[each] for each in actors] == [0, 1, 2]
        assert (len(collective), collective.generation, collective.broken) == (3, 1, None)
        for found in get(actors.total.call([1.0, 2.0])):
            equal(found, torch.tensor([6.0, 12.0]))

    def test_data_parallel_training_equals_training_on_the_whole_batch(self) -> None:
        collective = actorrpc.collective([Member.remote() for _ in range(3)])
        check_training(collective)
        collective.destroy()

    def test_broadcast_copies_attributes_parameters_and_modules(self) -> None:
        actors = [Member.remote(float(rank)) for rank in range(3)]
        collective = actorrpc.collective(actors)
        get(collective.broadcast("weights", src=2))
        get(collective.broadcast("model.weight", src=1))
        for actor in actors:
            wanted = (torch.full((3,), 2.0), torch.full((2, 2), 2.0), torch.ones(2, 2))
            equal(get(actor.state.remote())[:3], wanted)
        get(collective.broadcast(lambda instance: instance.model, src=2))
        equal(get(actors[0].state.remote())[3], get(actors[2].state.remote())[3])
        for ref in collective.broadcast():
            with pytest.raises(actorrpc.errors.ConfigError, match="not a Member"):
                get(ref)
        with pytest.raises(actorrpc.errors.ConfigError, match="rank from 0 to 2"):
            collective.broadcast("weights", src=3)

    def test_two_collectives_can_share_an_actor(self) -> None:
        first, second, third = (Member.remote() for _ in range(3))
        left = actorrpc.collective([first, second], name="left")
        right = actorrpc.collective([second, third], name="right")
        for _ in range(3):
            refs = left.call("total", [1.0], "left") + right.call("total", [10.0], "right")
            assert totals(refs) == [3.0, 3.0, 30.0, 30.0]
        with pytest.raises(CollectiveError, match=r"in several collectives.*'left', 'right'"):
            get(second.total.remote([1.0]))
        with pytest.raises(actorrpc.NameTakenError, match="in a collective 'left' already"):
            actorrpc.collective([second, third], name="left")
        # A failed operation breaks only its own collective.
        waiting = second.wait_for.remote(0, "left")
        get(third.keep.remote())
        left.destroy(timeout=0)
        with pytest.raises(CollectiveError, match="collective 'left'"):
            get(waiting)
        assert right.broken is None
        assert totals(right.call("total", [10.0])) == [30.0, 30.0]
        # A method that kept the group gets this error, not torch's error about an unregistered group.
        right.destroy()
        with pytest.raises(CollectiveError, match="collective 'right'"):
            get(third.receive_from_kept.remote(0))
        # Each collective has a unique name, even if it reuses the memory of an earlier one, also in a forked
        # process.
        names = [actorrpc.collective([first]).name for _ in range(3)]
        assert len(set(names)) == 3

    def test_a_member_can_use_a_default_process_group_at_the_same_time(self) -> None:
        collective = actorrpc.collective([Member.remote() for _ in range(2)])
        first, second = collective.members
        refs = [first.default_group.remote(), second.total.remote([0.5])]
        assert get(refs[0]) == (True, 2.0, 1)
        assert totals(collective.call("total", [1.0])) == [3.0, 3.0]

    def test_a_member_can_create_the_collective(self) -> None:
        maker = Maker.remote()
        assert get(maker.total.remote([Member.remote(), Member.remote()])) == [3.0, 3.0, 3.0]


@in_group
class TestWrongUse:
    def test_invalid_members_backends_and_timeouts_are_refused(self) -> None:
        actor = Member.remote()
        error = actorrpc.errors.ConfigError
        with pytest.raises(error, match="at least one actor"):
            actorrpc.collective([])
        with pytest.raises(error, match="cannot be rank 1: it is rank 0"):
            actorrpc.collective([actor, actor])
        with pytest.raises(error, match=r"Async.* is async"):
            actorrpc.collective([actor, Async.remote()])
        with pytest.raises(error, match=r'"gloo".*"nccl".*not \'mpi\''):
            actorrpc.collective([actor], backend="mpi")
        with pytest.raises(TypeError, match="not a str"):
            actorrpc.collective([actor, "actor"])  # type: ignore[list-item]
        with pytest.raises(TypeError, match="a list of handles"):
            actorrpc.collective(actor)  # type: ignore[arg-type]
        with pytest.raises(error, match="timeout must be a number of seconds above 0"):
            actorrpc.collective([actor], timeout=0)
        with pytest.raises(TypeError, match="name of a collective"):
            actorrpc.collective([actor], name="")
        if not torch.cuda.is_available():
            with pytest.raises(error, match="nccl"):
                actorrpc.collective([actor], backend="nccl")
        with pytest.raises(CollectiveError, match="no actor runs here"):
            actorrpc.collective_group()
        with pytest.raises(CollectiveError, match="is in no collective"):
            get(actor.total.remote([1.0]))

    def test_a_collective_with_a_dead_actor_is_refused(self) -> None:
        actors = [Member.remote() for _ in range(2)]
        actors[1].kill()
        with pytest.raises(actorrpc.ActorDiedError):
            actorrpc.collective(actors)
        with pytest.raises(CollectiveError, match="no collective"):
            get(actors[0].total.remote([1.0]))

    def test_creation_times_out_if_a_member_is_busy_and_can_be_repeated(self, gate: Path) -> None:
        actors = [Member.remote() for _ in range(2)]
        busy = actors[1].block.remote(str(gate))
        with pytest.raises(actorrpc.RpcTimeoutError, match="not all members joined in time"):
            actorrpc.collective(actors, join_timeout=0.3)
        open_gate(gate)
        get(busy)
        assert totals(actorrpc.collective(actors).call("total", [1.0])) == [3.0] * 2

    def test_an_operation_times_out_if_another_rank_does_not_take_part(self) -> None:
        actors = [Member.remote() for _ in range(2)]
        collective = actorrpc.collective(actors, timeout=0.2)
        with pytest.raises(CollectiveError, match=r"rank 0.*Timed out"):
            get(actors[0].total.remote([1.0]))
        assert totals(collective.call("total", [1.0])) == [3.0] * 2

    def test_a_collective_cannot_be_sent_to_an_actor(self) -> None:
        collective = actorrpc.collective([actor := Member.remote()])
        with pytest.raises(actorrpc.errors.SerializationError, match="stays in the process"):
            actor.total.remote(collective)


# -- members and creators that end ---------------------------------------------------------------------------------


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
@pytest.mark.parametrize("end", ["destroyed", "killed"])
def test_an_ended_collective_leaves_no_threads_or_descriptors_in_shared_processes(end: str) -> None:
    watchers = [Member.options(worker=f"worker{rank}").remote() for rank in (1, 2)]
    threads = [each[1] for each in resources_of(watchers)]

    def once() -> None:
        actors = [Member.options(worker=f"worker{1 + at % 2}").remote() for at in range(4)]
        collective = actorrpc.collective(actors)
        get(collective.call("operations"))
        if end == "killed":
            for actor in actors:
                actor.kill()
            return
        collective.rebuild()
        get(collective.call("operations"))
        collective.destroy()
        assert collective.destroyed
        collective.destroy()
        with pytest.raises(CollectiveError, match="destroyed"):
            collective.call("total", [1.0])

    def is_over() -> bool:
        return all(now[1] <= then for now, then in zip(resources_of(watchers), threads, strict=True))

    once()
    until(is_over)
    files = [each[0] for each in resources_of(watchers)]  # includes connections that the workers keep
    once()
    until(is_over)
    until(lambda: all(now[0] <= then for now, then in zip(resources_of(watchers), files, strict=True)))
