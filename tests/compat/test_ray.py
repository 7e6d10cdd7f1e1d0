"""actorrpc.compat.ray on an embedded cluster: references, errors, actors, tasks, streams and utilities behave like Ray's."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import actorrpc
import actorrpc.compat.ray as ray
from actorrpc.compat.ray.cluster import IGNORED
from actorrpc.compat.ray.util.placement_group import PlacementGroup
from actorrpc.compat.ray.util.queue import Empty, Full, Queue
from actorrpc.compat.ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)
from actorrpc.testing import processes
from actorrpc.testing.pytest_plugin import WATCHDOG
from tests.actors.e2e.kit import until
from tests.migration.rows import row

rex = ray.exceptions


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    """Run one cluster for all tests of the module."""
    ignored: dict[str, Any] = dict.fromkeys(IGNORED, 1)
    context = ray.init(num_cpus=2, num_gpus=0, resources={"special": 2}, namespace="tests", **ignored)
    assert context["node_id"] == context.address_info["node_id"]
    assert context.dashboard_url is None
    yield
    gc.collect()
    ray.shutdown()
    ray.shutdown()


@pytest.fixture(autouse=True)
def _test_leaves_nothing(
    request: pytest.FixtureRequest, _module_leaves_nothing: None, running: None
) -> Iterator[None]:
    """Override the fixture of this name, because the cluster may start processes. Leaks are checked at the end of the module."""
    request.config.stash[WATCHDOG].keep(processes.descendants())
    yield
    gc.collect()  # an actor keeps its resources while a handle of it is in the traceback of a caught error


@ray.remote
class Counter:
    """An actor with a counter, and methods that fail in several ways."""

    def __init__(self, start: int = 0) -> None:
        self.n = start

    def add(self, more: int = 1) -> int:
        self.n += more
        return self.n

    def echo(self, value: Any) -> Any:
        return value

    def fail(self) -> None:
        raise Wrong("no", 3)

    def fail_plainly(self) -> None:
        raise Exception("plain")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        ray.actor.exit_actor()

    @ray.method(num_returns=2)
    def two(self) -> tuple[int, int]:
        return 1, 2

    def items(self, count: int, fails: bool = False) -> Iterator[int]:
        yield from range(count)
        if fails:
            raise Wrong("at the end", 4)


class Wrong(ValueError):
    """An error whose constructor has two parameters."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@ray.remote
class Gate:
    """Blocks callers of wait() until send() is called."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def wait(self) -> str:
        await self.open.wait()
        return "through"

    async def send(self) -> None:
        self.open.set()


@ray.remote
def double(value: int) -> int:
    """Return twice the value."""
    return 2 * value


@ray.remote
def fails() -> None:
    """Raise."""
    raise Wrong("no", 3)


@ray.remote
def get(refs: list[Any]) -> Any:
    """Get the first reference of a list."""
    return ray.get(refs[0])


@pytest.fixture(scope="module")
def counter() -> Any:
    """An actor shared by the tests."""
    return Counter.remote()


# -- references -------------------------------------------------------------------------------------------------


@row("ObjectRef ObjectRefGenerator", "ray-programs")
def test_object_refs_are_passed_resolved_copied_and_pickled_like_rays(counter: Any) -> None:
    ref = double.remote(double.remote(ray.put(3)))
    assert isinstance(ref, ray.ObjectRef)
    assert ray.get(ref) == 12
    assert ray.get([ref, ref]) == [12, 12]
    assert ray.get([]) == []
    assert ray.get(counter.echo.remote(value=ray.put([1]))) == [1]
    inside = ray.get(counter.echo.remote([ref]))
    assert inside == [ref]
    assert hash(inside[0]) == hash(ref)
    assert ray.get(get.remote([ref])) == 12
    assert ref.hex() == ref.binary().hex() == inside[0].hex()
    assert copy.deepcopy(ref) is copy.copy(ref) is ref
    assert bool(ref)
    assert not ref.is_nil()
    assert ref.hex() in repr(ref)
    with pytest.raises(TypeError, match="reference already"):
        ray.put(ref)
    assert ray.get(pickle.loads(ray.cloudpickle.dumps(ref))) == 12


def test_wait_returns_ready_and_pending_refs(counter: Any) -> None:
    gate = Gate.remote()
    held, free = gate.wait.remote(), counter.echo.remote(1)
    assert ray.wait([held, free]) == ([free], [held])
    assert ray.wait([held], timeout=0) == ([], [held])
    with pytest.raises(ValueError, match="twice"):
        ray.wait([free, free])
    with pytest.raises(ValueError, match="num_returns"):
        ray.wait([free], num_returns=2)
    with pytest.raises(TypeError):
        ray.wait([1])
    ray.get(gate.send.remote())
    assert ray.wait([held, free], num_returns=2) == ([held, free], [])
    stream = counter.items.remote(1)
    assert ray.wait([stream]) == ([stream], [])


@row("GetTimeoutError", "ray-programs")
def test_a_call_continues_after_get_timed_out() -> None:
    gate = Gate.remote()
    held = gate.wait.remote()
    with pytest.raises(rex.GetTimeoutError):
        ray.get(held, timeout=0.01)
    with pytest.raises(TimeoutError):
        ray.get([held], timeout=0.01)
    ray.get(gate.send.remote())
    assert ray.get(held) == "through"


def test_object_refs_can_be_awaited_and_turned_into_futures(counter: Any) -> None:
    async def awaits() -> list[Any]:
        with pytest.raises(Wrong):
            await counter.fail.remote()
        with pytest.raises(rex.RayTaskError):
            await counter.fail.remote().as_future()
        held = gate.wait.remote()
        late = held.as_future()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(late, 0.01)
        assert late.cancelled()
        await gate.send.remote()
        assert await held == await held == "through"
        return await asyncio.gather(counter.echo.remote(1), double.remote(1))

    gate = Gate.remote()
    assert asyncio.run(awaits()) == [1, 2]
    assert counter.echo.remote(3).future().result() == 3
    assert isinstance(counter.fail.remote().future().exception(), rex.RayTaskError)
    told: list[Any] = []
    ref = counter.echo.remote(4)
    ref._on_completed(told.append)
    ref.future().result()
    assert ray.wait([ref])[0] == [ref]


def test_streaming_generators_yield_refs_and_errors(counter: Any) -> None:
    stream = counter.items.remote(2, fails=True)
    assert isinstance(stream, ray.ObjectRefGenerator)
    refs = list(stream)
    assert ray.get(refs[:2]) == [0, 1]
    with pytest.raises(Wrong):
        ray.get(refs[2])

    async def reads() -> list[Any]:
        return [await ref async for ref in counter.items.remote(3)]

    assert asyncio.run(reads()) == [0, 1, 2]
    with pytest.raises(TypeError, match="iterating over"):
        ray.get(counter.items.remote(1))
    stream = counter.items.remote(1)
    ray.get(next(stream))
    ray.get(stream.completed())
    with pytest.raises(StopIteration):
        stream._next_sync(1)
    assert stream.next_ready()
    assert stream.is_finished()
    counter.items.remote(1).close()


def test_num_returns_of_a_generator_fixes_the_number_of_results(counter: Any) -> None:
    assert ray.get(counter.items.options(num_returns=3).remote(3)) == [0, 1, 2]
    assert ray.get(counter.items.options(num_returns=2).remote(3)) == [
        0,
        1,
    ]  # as in Ray, surplus values are ignored
    first, second, third = counter.items.options(num_returns=3).remote(1, fails=True)
    assert ray.get(first) == 0
    for ref in (second, third):
        with pytest.raises(Wrong):
            ray.get(ref)
    *_, last = counter.items.options(num_returns=3).remote(2)
    with pytest.raises(ValueError, match="must yield 3 values"):
        ray.get(last)


@row("calls of generators", "ray-programs")
def test_num_returns_dynamic_gives_a_generator_of_refs(counter: Any) -> None:
    @ray.remote(num_returns="dynamic")
    def gives(count: int, fails: bool = False) -> Iterator[int]:
        yield from range(count)
        if fails:
            raise Wrong("at the end", 4)

    @ray.remote
    def total(refs: Any) -> int:
        return sum(ray.get(list(refs)))

    of_actor = counter.items.options(num_returns="dynamic")
    for give in (gives, of_actor):
        ref = give.remote(4)
        assert len(ray.get(ref)) == 4
        assert next(ray.get(ref)) == next(iter(ray.get(ref)))
        assert ray.get(total.remote(ref)) == ray.get(total.remote(ray.get(ref))) == 6
        *rest, last = ray.get(give.remote(2, fails=True))
        assert ray.get(rest) == [0, 1]
        with pytest.raises(Wrong):
            ray.get(last)
    with pytest.raises(ValueError, match="is for generators"):
        ray.get(double.options(num_returns="dynamic").remote(1))
    assert ray.get(list(gives.options(num_returns="streaming").remote(2))) == [0, 1]


# -- errors -----------------------------------------------------------------------------------------------------


@row("RayTaskError, RayTaskError(ValueError)", "ray-programs")
@row("str(error) of a RayTaskError", "ray-programs")
def test_errors_have_the_users_type_and_rays_task_error_type(counter: Any) -> None:
    for ref in (
        fails.remote(),
        counter.fail.remote(),
        get.remote([fails.remote()]),
        double.remote(fails.remote()),
    ):
        with pytest.raises(Wrong, match="no") as caught:
            ray.get(ref)
        error: Any = caught.value
        assert isinstance(error, rex.RayTaskError)
        assert isinstance(error, actorrpc.RemoteError)
        assert error.code == 3
        assert type(error.cause) is Wrong
        assert str(error) == "no"
        assert "raise Wrong" in error.traceback_str
        assert error.as_instanceof_cause() is error
        assert repr(error).startswith("RayTaskError(Wrong)(")
    with pytest.raises(rex.RayTaskError, match="plain") as plain:
        ray.get(counter.fail_plainly.remote())
    assert plain.type is rex.RayTaskError
    assert type(plain.value.cause) is Exception


@pytest.mark.prints("KeyError: 'in it'", "ActorDiedError", "it is dead")
@row("actor.exit_actor", "ray-programs")
@row("ActorDiedError, ActorUnavailableError", "ray-programs")
def test_calls_to_dead_actors_raise_rays_actor_errors() -> None:
    class Broken:
        def __init__(self) -> None:
            raise KeyError("in it")

        def method(self) -> None: ...

    with pytest.raises(rex.RayActorError, match="in it") as broken:
        ray.get(ray.remote(Broken).remote().method.remote())
    assert broken.value.actor_init_failed
    for end in ("die", "leave", "__ray_terminate__"):
        actor = Counter.remote()
        ray.wait([getattr(actor, end).remote()])
        with pytest.raises(rex.ActorDiedError) as died:
            ray.get(actor.add.remote())
        assert isinstance(died.value, actorrpc.ActorDiedError)
        assert not died.value.actor_init_failed
    actor = Counter.remote()
    ray.kill(actor)
    with pytest.raises(rex.RayTaskError) as caught:
        ray.get(ray.remote(lambda: ray.get(actor.add.remote())).remote())
    assert not isinstance(caught.value, rex.RayActorError)
    assert isinstance(caught.value.cause, rex.RayActorError)
    with pytest.raises(TypeError, match="outside of an actor"):
        ray.actor.exit_actor()


@pytest.mark.prints("died", "not finished")
@row("WorkerCrashedError; OwnerDiedError", "ray-programs")
def test_a_task_whose_process_dies_raises_worker_crashed_error() -> None:
    @ray.remote(max_retries=0)
    def dies() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(rex.WorkerCrashedError) as caught:
        ray.get(dies.remote())
    assert isinstance(caught.value, actorrpc.PeerDiedError)


@row("TaskCancelledError", "ray-programs")
@row("cancel(ref, recursive=False)", "ray-programs")
def test_cancel_cancels_nested_tasks_and_force_is_for_tasks_only() -> None:
    gate = Gate.remote()
    held = gate.wait.remote()
    first = get.remote([held])
    second = get.remote([first])
    assert ray.wait([second], timeout=0.1)[0] == []
    assert ray.cancel(first)
    for ref in (first, second):
        with pytest.raises((rex.TaskCancelledError, rex.RayTaskError)):
            ray.get(ref)
    with pytest.raises(ValueError, match="force=True is for tasks"):
        ray.cancel(gate.wait.remote(), force=True)
    with pytest.raises(ValueError, match="recursive=False"):
        ray.cancel(held, recursive=False)
    forced = get.remote([gate.wait.remote()])
    ray.cancel(forced, force=True)
    with pytest.raises(rex.TaskCancelledError):
        ray.get(forced)
    ray.get(gate.send.remote())


@row("PendingCallsLimitExceeded", "ray-programs")
def test_exceeding_max_pending_calls_raises_rays_error() -> None:
    limited = Gate.options(max_pending_calls=1).remote()
    held = limited.wait.remote()
    with pytest.raises(rex.PendingCallsLimitExceeded):
        limited.wait.remote()
    ray.cancel(held)


# -- actors -----------------------------------------------------------------------------------------------------


def test_actor_handles_can_be_passed_pickled_and_inspected_like_rays(counter: Any) -> None:
    assert isinstance(counter, ray.ActorHandle)
    actor_id = counter._actor_id.hex()
    assert repr(counter) == f"Actor(Counter, {actor_id})"
    assert counter._ray_actor_id.binary().hex() == actor_id
    passed = ray.get(counter.echo.remote(counter))
    assert passed == counter
    assert isinstance(passed, ray.ActorHandle)
    pickled = pickle.loads(ray.cloudpickle.dumps(counter))
    assert pickled == counter
    assert ray.get(pickled.echo.remote(1)) == 1
    assert ray.get(counter.__ray_ready__.remote()) is True
    assert ray.get(
        counter.__ray_call__.remote(lambda instance, more: instance.add(more), ray.put(0))
    ) == ray.get(counter.add.remote(0))
    assert ray.get(counter.two.remote()) == [1, 2]
    assert ray.get(counter.two.options(num_returns=1).remote()) == (1, 2)
    assert ray.get(counter.echo._remote(args=[1], num_returns=1, name="x")) == 1
    method = ray.get(counter.echo.remote(counter.echo))
    assert ray.get(method.remote(5)) == 5
    with pytest.raises(AttributeError, match="has no method 'nothing'"):
        counter.nothing.remote()
    with pytest.raises(TypeError):
        counter.add.remote(1, 2, 3)
    with pytest.raises(TypeError):
        Counter.remote(1, 2)
    with pytest.raises(TypeError, match="cannot be called directly"):
        counter.add()


def test_an_actor_can_be_made_by_underscore_remote_and_have_a_call_method() -> None:
    class Callable:
        def __init__(self, base: int) -> None:
            self.base = base

        def __call__(self, value: int) -> int:
            return self.base + value

    made: Any = ray.remote(Callable)
    for given in ({"args": [1]}, {"kwargs": {"base": 1}, "num_cpus": 0}):
        actor = made._remote(**given)
        assert ray.get(actor.__call__.remote(1)) == 2


@row("ActorAlreadyExistsError", "ray-programs")
def test_named_actors_are_found_by_name_and_namespace() -> None:
    actor = Counter.options(name="one", lifetime="detached").remote(5)
    assert ray.get(ray.get_actor("one").add.remote()) == 6
    assert Counter.options(name="one", get_if_exists=True).remote() == actor
    with pytest.raises(rex.ActorAlreadyExistsError):
        Counter.options(name="one").remote()
    with pytest.raises(ValueError, match="no actor 'two'"):
        ray.get_actor("two")
    other = Counter.options(name="one", namespace="other").remote()
    assert ray.get_actor("one", namespace="other") == other
    assert "one" in ray.util.list_named_actors()
    assert {"name": "one", "namespace": "other"} in ray.util.list_named_actors(all_namespaces=True)
    ray.kill(actor)


@row("checkpoint() and restore(state)", "ray-programs")
def test_user_methods_named_checkpoint_and_restore_are_not_called_as_hooks(tmp_path: Path) -> None:
    """Only __ray_shutdown__ is called as a hook, as in Ray."""

    class Trainer:
        def checkpoint(self) -> None:
            raise AssertionError("not asked for")

        def restore(self, path: str) -> None:
            raise AssertionError("not asked for")

        def step(self) -> int:
            return 1

        def __ray_shutdown__(self) -> None:
            (tmp_path / "ended").write_text("it ran")

    actor = ray.remote(Trainer).remote()
    assert ray.get(actor.step.remote()) == 1
    os.mkfifo(tmp_path / "ended")
    actor.__ray_terminate__.remote()
    assert (tmp_path / "ended").read_text() == "it ran"


@pytest.mark.prints("died", "restarted")
def test_max_restarts_and_retries_repeat_failed_calls(tmp_path: Path) -> None:
    @ray.remote(max_restarts=1, max_task_retries=1)
    class Phoenix:
        def burn(self) -> bool:
            if not (tmp_path / "burnt").exists():
                (tmp_path / "burnt").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return ray.get_runtime_context().was_current_actor_reconstructed

    assert ray.get(Phoenix.remote().burn.remote())

    @ray.remote(max_retries=3, retry_exceptions=[Wrong])
    def tries() -> int:
        tried = len(list(tmp_path.glob("try*")))
        (tmp_path / f"try{tried}").touch()
        if tried < 2:
            raise Wrong("again", 1)
        return tried

    assert ray.get(tries.remote()) == 2


# -- tasks ------------------------------------------------------------------------------------------------------


def test_tasks_support_num_returns_and_nested_tasks() -> None:
    @ray.remote(num_returns=3)
    def three() -> tuple[int, ...]:
        return 1, 2, 3

    @ray.remote
    def nests(depth: int) -> int:
        return 0 if depth == 0 else 1 + ray.get(nests.remote(depth - 1))

    assert ray.get(three.remote()) == [1, 2, 3]
    assert ray.get(three.options(num_returns=1).remote()) == (1, 2, 3)
    assert three.options(num_returns=0).remote() is None
    assert ray.get(three._remote(num_returns=1)) == (1, 2, 3)
    assert ray.get(nests.remote(3)) == 3
    passed = ray.get(ray.put(double))
    assert ray.get(passed.remote(2)) == 4
    with pytest.raises(TypeError, match="cannot be called directly"):
        double(1)
    with pytest.raises(TypeError):
        double.remote()


def test_timeline_contains_executed_tasks(tmp_path: Path) -> None:
    assert ray.get(double.remote(4)) == 8
    until(lambda: "double" in str(ray.timeline()))
    assert all({"ph", "name", "pid", "tid", "ts"} <= event.keys() for event in ray.timeline())
    path = tmp_path / "timeline.json"
    assert ray.timeline(str(path)) is None
    assert "double" in path.read_text()


@row("ActorUnschedulableError, TaskUnschedulableError", "ray-programs")
def test_resources_and_node_affinity_limit_where_tasks_and_actors_run() -> None:
    assert ray.get(double.options(resources={"special": 1}, num_cpus=1).remote(1)) == 2
    missing = double.options(resources={"missing": 1}).remote(1)
    with pytest.raises(rex.TaskUnschedulableError, match="missing"):
        ray.get(missing)
    with pytest.raises(rex.ActorUnschedulableError):
        Counter.options(resources={"missing": 1}).remote()
    assert ray.cluster_resources()["special"] == 2
    actor = Counter.options(resources={"special": 1}, num_cpus=1).remote()
    assert ray.get(actor.add.remote()) == 1
    # The process of the task keeps its resources for a moment.
    until(lambda: {"special": 1, "CPU": 1}.items() <= ray.available_resources().items())
    [node] = ray.nodes()
    assert node["Alive"]
    assert node["Resources"]["CPU"] == 2
    here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    assert ray.get(double.options(scheduling_strategy=here).remote(1)) == 2
    assert ray.get(Counter.options(scheduling_strategy=here).remote().add.remote()) == 1
    nowhere = NodeAffinitySchedulingStrategy("0" * 56, soft=False)
    with pytest.raises(rex.ActorUnschedulableError, match="no node"):
        Counter.options(scheduling_strategy=nowhere)


# -- utilities --------------------------------------------------------------------------------------------------


@row("util.ActorPool", "ray-programs")
def test_actor_pool_maps_and_raises_like_rays() -> None:
    pool = ray.util.ActorPool([Counter.remote() for _ in range(2)])
    assert list(pool.map(lambda actor, value: actor.echo.remote(value), range(4))) == [0, 1, 2, 3]
    assert sorted(pool.map_unordered(lambda actor, value: actor.echo.remote(ray.put(value)), range(4))) == [
        0,
        1,
        2,
        3,
    ]
    for fetch in (pool.get_next, pool.get_next_unordered):
        pool.submit(lambda actor, _: actor.fail.remote(), None)
        assert pool.has_next()
        with pytest.raises(rex.RayTaskError):
            fetch()
    gate = Gate.remote()
    pool.submit(lambda actor, value: gate.wait.remote(), 0)
    with pytest.raises(TimeoutError):
        pool.get_next(timeout=0.01)
    ray.get(gate.send.remote())
    assert pool.get_next() == "through"
    with pytest.raises(StopIteration):
        pool.get_next()


def test_queue_blocks_raises_and_batches_like_rays() -> None:
    queue: Queue[Any] = Queue(maxsize=2, actor_options={"num_cpus": 0, "enable_task_events": False})
    queue.put(1)
    queue.put(ray.put(2))
    with pytest.raises(Full):
        queue.put_nowait(3)

    @ray.remote
    def drains(queue: Any) -> list[int]:
        return [queue.get(), queue.get()]

    assert ray.get(drains.remote(queue)) == [1, 2]
    with pytest.raises(Empty):
        queue.get(timeout=0.01)
    with pytest.raises(ValueError, match="timeout"):
        queue.get(timeout=-1)

    async def both() -> Any:
        await queue.put_async("x")
        return await queue.get_async()

    assert asyncio.run(both()) == "x"
    queue.put_nowait_batch([1, 2])
    assert queue.get_nowait_batch(2) == [1, 2]
    assert queue.empty()
    actor = queue.actor
    ray.kill(actor)
    with pytest.raises(rex.RayActorError):
        queue.get()
    queue.shutdown()


@row("util.placement_group", "ray-programs")
@row("ActorPlacementGroupRemoved", "ray-programs")
def test_placement_groups_reserve_place_and_remove_like_rays() -> None:
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_PACK", name="both")
    assert ray.get(group.ready()) == group
    assert group.wait(1)
    assert group.bundle_count == 2
    assert ray.util.get_placement_group("both") == group
    waiting = ray.util.placement_group([{"CPU": 2}])
    assert not waiting.wait(0)
    impossible = ray.util.placement_group([{"CPU": 100}])
    assert not impossible.wait(60)
    inside = PlacementGroupSchedulingStrategy(group, 0, True)

    @ray.remote
    class Member:
        def group(self) -> Any:
            return ray.util.get_current_placement_group()

        def makes(self) -> Any:
            return ray.get(Member.remote().group.remote())

    member = Member.options(scheduling_strategy=inside).remote()
    assert isinstance(ray.get(member.group.remote()), PlacementGroup)
    assert ray.get([member.group.remote(), member.makes.remote()]) == [group, group]
    assert ray.get(double.options(scheduling_strategy=inside).remote(1)) == 2
    assert ray.get(Counter.options(placement_group=group).remote().add.remote()) == 1
    with pytest.raises(ValueError, match="placement_group_bundle_index"):
        Member.options(placement_group=group, placement_group_bundle_index=5)
    row = ray.util.placement_group_table(group)
    assert (row["state"], row["strategy"], row["bundles"]) == (
        "CREATED",
        "STRICT_PACK",
        {0: {"CPU": 1}, 1: {"CPU": 1}},
    )
    ray.util.remove_placement_group(group)
    with pytest.raises(rex.RayActorError):
        ray.get(member.group.remote())
    assert waiting.wait(60)
    with pytest.raises(rex.ActorPlacementGroupRemoved):
        Member.options(scheduling_strategy=inside).remote()
    with pytest.raises(ValueError, match="no placement group 'both'"):
        ray.util.get_placement_group("both")
    ray.util.remove_placement_group(waiting)
    assert ray.util.get_current_placement_group() is None


@row("tasks: num_cpus", "ray-programs")
def test_runtime_env_applies_to_tasks_actors_and_nested_tasks(tmp_path: Path) -> None:
    (tmp_path / "only_there.py").write_text("VALUE = 7\n")
    (tmp_path / "work").mkdir()
    env = {
        "env_vars": {"TOLD": "yes"},
        "working_dir": str(tmp_path / "work"),
        "py_modules": [str(tmp_path / "only_there.py")],
    }

    def looks() -> Any:
        import only_there

        @ray.remote
        def below() -> Any:
            return os.environ.get("TOLD"), os.getcwd()

        return only_there.VALUE, os.environ["TOLD"], os.getcwd(), ray.get(below.remote())

    class Looks:
        def look(self) -> Any:
            return looks()

    there = (7, "yes", str(tmp_path / "work"), ("yes", str(tmp_path / "work")))
    assert ray.get(ray.remote(looks).options(runtime_env=env).remote()) == there
    assert ray.get(ray.remote(Looks).options(runtime_env=env).remote().look.remote()) == there
    assert "only_there" not in sys.modules


def test_the_runtime_context_gives_ids_names_and_resources(counter: Any) -> None:
    @ray.remote
    class Knows:
        def ids(self) -> Any:
            context = ray.get_runtime_context()
            return (
                context.get(),
                context.current_actor,
                context.get_actor_name(),
                context.get_assigned_resources(),
            )

    knows = Knows.options(name="knows", num_cpus=1).remote()
    ids, itself, name, resources = ray.get(knows.ids.remote())
    assert repr(knows) == f"Actor(Knows, {ids['actor_id']})"
    assert (itself, name, resources) == (knows, "knows", {"CPU": 1.0})
    assert ids["node_id"] == ray.nodes()[0]["NodeID"] == ray.get_runtime_context().get_node_id()
    own = ray.get_runtime_context()
    assert (own.namespace, own.get_actor_id(), own.get_task_id(), own.get_actor_name()) == (
        "tests",
        None,
        None,
        None,
    )
    assert ray.get_gpu_ids() == []
    assert own.get_placement_group_id() is None
    assert own.runtime_env == {}
    with pytest.raises(RuntimeError, match="outside of an actor"):
        _ = own.current_actor


@row("init shutdown is_initialized", "ray-programs")
def test_a_second_init_raises_unless_ignore_reinit_error() -> None:
    assert ray.is_initialized()
    with pytest.raises(RuntimeError, match="already"):
        ray.init()
    assert ray.init(ignore_reinit_error=True, include_dashboard=False, _temp_dir="/x")["address"] == "local"


@ray.remote
class Talker:
    def say(self, text: str) -> int:
        print(text, flush=True)
        print(f"not {text}", file=sys.stderr, flush=True)
        return os.getpid()

    def actor_id(self) -> str | None:
        return ray.get_runtime_context().get_actor_id()


@pytest.mark.prints("not (one|two|three|four)")
def test_get_log_returns_the_output_of_a_process_or_actor() -> None:
    talker = Talker.remote()
    pid = ray.get([talker.say.remote(text) for text in ("one", "two", "three")])[0]
    state: Any = ray.util.state
    until(lambda: len(list(state.get_log(pid=pid))) == len(list(state.get_log(pid=pid, suffix="err"))) == 3)
    assert list(state.get_log(pid=pid, tail=2)) == ["two\n", "three\n"]
    actor_id = ray.get(talker.actor_id.remote())
    assert next(iter(state.get_log(actor_id=actor_id, suffix="err"))) == "not one\n"
    lines = state.get_log(pid=pid, follow=True)
    assert [next(lines) for _ in range(3)] == ["one\n", "two\n", "three\n"]
    ray.get(talker.say.remote("four"))
    assert next(lines) == "four\n"
    lines.close()
