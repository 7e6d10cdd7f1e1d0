"""The rows of docs/migration/ray-programs.md."""

from __future__ import annotations

import asyncio
import functools
import gc
import operator
import os
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import actorrpc
import actorrpc.compat.ray as ray
from actorrpc import errors
from actorrpc.compat.ray import cluster, options
from actorrpc.compat.ray.util.scheduling_strategies import (
    In,
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    NotIn,
    PlacementGroupSchedulingStrategy,
)
from actorrpc.testing import InProcessCluster
from tests.actors.e2e.kit import until
from tests.migration.rows import check, names, row

PAGE = "ray-programs.md"
rex = ray.exceptions

_seen: list[Any] = []  # by what runs on workers of this process


@pytest.fixture(autouse=True)
def _clean() -> None:
    _seen.clear()


def test_each_row_has_its_test() -> None:
    check(PAGE, globals())


class Wrong(ValueError):
    """Of the program."""


@ray.remote
class Counter:
    def __init__(self) -> None:
        self.n = 0
        self.event = threading.Event()

    def add(self, more: int = 1) -> int:
        self.n += more
        return self.n

    def fail(self) -> None:
        raise Wrong("no")

    def echo(self, value: Any) -> Any:
        return value

    def first(self, refs: list[Any]) -> Any:
        return ray.get(refs[0])

    def items(self, n: int) -> Iterator[int]:
        yield from range(n)

    def checkpoint(self) -> None:
        _seen.append("checkpoint")

    def restore(self, state: Any) -> None:
        _seen.append("restore")

    def __ray_shutdown__(self) -> None:
        _seen.append("shutdown")


@ray.remote
class Gate:
    def __init__(self) -> None:
        self.event = asyncio.Event()

    async def wait(self) -> str:
        await self.event.wait()
        return "open"

    async def open(self) -> None:
        self.event.set()


@ray.remote
def double(x: int) -> int:
    return 2 * x


@ray.remote
def fails() -> None:
    raise Wrong("no")


def _of_ray(name: str) -> Any:
    return functools.reduce(getattr, name.split("."), ray)


# -- what there is -------------------------------------------------------------------------------------------------


@row("init shutdown is_initialized")
@row("ObjectRef ObjectRefGenerator")
@row("actor.exit_actor")
@row("exceptions")
@row("util.ActorPool")
@row("util.placement_group")
@row("runtime_env.RuntimeEnv")
def test_the_names_are_there() -> None:
    for beginning in (
        *("init shutdown", "ObjectRef ", "actor.exit_actor", "exceptions", "util.ActorPool"),
        *("util.placement_group", "runtime_env.RuntimeEnv"),
    ):
        found = names(PAGE, beginning)
        assert found
        assert all(_of_ray(name) is not None for name in found)


@pytest.mark.usefixtures("near")
@row("init shutdown is_initialized")
def test_what_programs_call() -> None:
    assert ray.is_initialized()
    counter = Counter.options(name="one").remote()
    ref = counter.add.remote(ray.put(2))
    assert ray.wait([ref], num_returns=1) == ([ref], [])
    assert ray.get(ref) == 2
    assert ray.get_actor("one") == counter
    assert ray.cluster_resources()["CPU"] >= ray.available_resources()["CPU"] > 0
    assert ray.nodes()[0]["Alive"]
    assert ray.get_runtime_context().get_node_id() == ray.nodes()[0]["NodeID"]
    assert ray.get_gpu_ids() == []
    ray.kill(counter)


@pytest.mark.usefixtures("near")
@row("ObjectRef ObjectRefGenerator")
def test_references() -> None:
    ref = double.remote(1)

    async def waits() -> Any:
        return await ref, await ref.as_future()

    assert asyncio.run(waits()) == (2, 2)
    assert ref.future().result() == 2
    assert len(ref.hex()) > 10
    counter = Counter.remote()
    assert ray.get(counter.first.remote([ref])) == 2
    [inside] = ray.get(counter.echo.remote([ref]))
    assert inside == ref
    assert ray.get(ray.remote(lambda: ray.get(ref)).remote()) == 2


@pytest.mark.usefixtures("near")
@row("actor.exit_actor")
def test_what_handles_and_classes_of_rays_have() -> None:
    counter = Counter._remote(args=(), kwargs={})
    assert ray.get(counter.__ray_ready__.remote())
    assert ray.get(counter.__ray_call__.remote(operator.attrgetter("n"))) == 0
    assert ray.get(double._remote(args=(1,))) == 2
    assert ray.get(counter.add._remote(args=(2,))) == 2
    counter.__ray_terminate__.remote()
    with pytest.raises(rex.ActorDiedError):
        ray.get(counter.add.remote())
    until(lambda: _seen[-1:] == ["shutdown"])
    assert isinstance(counter, ray.actor.ActorHandle)
    assert isinstance(Counter, ray.actor.ActorClass)
    assert isinstance(double, ray.remote_function.RemoteFunction)


@pytest.mark.usefixtures("near")
@row("util.state.list_actors")
def test_what_there_is_to_see() -> None:
    counter = Counter.options(name="seen").remote()
    assert ray.get(counter.add.remote(1)) == 1
    state: Any = ray.util.state
    (seen,) = state.list_actors(filters=[("class_name", "=", "Counter"), ("state", "!=", "DEAD")])
    assert (seen.name, seen["state"], seen.get("nothing", 1)) == ("seen", "ALIVE", 1)
    assert seen.actor_id == counter._actor_id.hex()
    assert state.get_actor(seen.actor_id) == seen
    assert state.list_actors(limit=0) == []
    (node,) = state.list_nodes()
    assert (node.is_head_node, node.state, state.get_node(node.node_id)) == (True, "ALIVE", node)
    summary = state.summarize_actors()["cluster"]
    assert summary["summary"]["Counter"]["state_counts"]["ALIVE"] == 1
    with pytest.raises(ValueError, match="'=' or '!='"):
        state.list_actors(filters=[("state", "<", 3)])
    for given in ({}, {"filename": "x"}, {"actor_id": "nobody"}):
        with pytest.raises(ValueError, match=r"get_log\(\): "):
            state.get_log(**given)
    with pytest.raises(KeyError):
        seen["nothing"]


@pytest.mark.usefixtures("near")
@row("util.ActorPool")
def test_what_helps() -> None:
    pool = ray.util.ActorPool([Counter.remote()])
    assert list(pool.map(lambda actor, value: actor.echo.remote(value), range(3))) == [0, 1, 2]
    queue: Any = ray.util.queue.Queue(maxsize=1)
    queue.put(1)
    with pytest.raises(ray.util.queue.Full):
        queue.put_nowait(2)
    assert queue.get() == 1
    with pytest.raises(ray.util.queue.Empty):
        queue.get_nowait()
    assert ray.util.get_node_ip_address()
    named = Counter.options(name="one").remote()
    assert ray.util.list_named_actors() == ["one"]
    del named


@pytest.mark.usefixtures("near")
@row("util.placement_group")
def test_placement_groups() -> None:
    group = ray.util.placement_group([{"CPU": 1}], name="one")
    assert ray.get(group.ready()) == group
    assert ray.util.get_placement_group("one") == group
    assert ray.util.placement_group_table(group)["state"] == "CREATED"
    assert ray.util.get_current_placement_group() is None
    ray.util.remove_placement_group(group)


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("near")
@row("RayTaskError, RayTaskError(ValueError)")
@row("str(error) of a RayTaskError")
def test_what_a_program_raised() -> None:
    for ref in (fails.remote(), Counter.remote().fail.remote()):
        with pytest.raises(Wrong) as caught:
            ray.get(ref)
        error: Any = caught.value
        assert isinstance(error, rex.RayTaskError)
        assert isinstance(error, actorrpc.RemoteError)
        assert type(error.cause) is Wrong
        assert str(error) == "no"
        assert "raise Wrong" in error.traceback_str
        assert "raise Wrong" in "".join(traceback.format_exception(error))


@pytest.mark.usefixtures("near")
@pytest.mark.prints("it is dead", "was not finished", "was never retrieved")
@row("RayTaskError, RayTaskError(ValueError)")
@row("ActorDiedError, ActorUnavailableError")
def test_a_dead_actor_and_those_who_run_into_it() -> None:
    counter = Counter.remote()
    ray.kill(counter)
    with pytest.raises(rex.ActorDiedError) as died:
        ray.get(counter.add.remote())
    assert isinstance(died.value, rex.RayActorError)
    assert isinstance(died.value, actorrpc.ActorDiedError)
    with pytest.raises(rex.RayTaskError) as caught:
        ray.get(ray.remote(lambda: ray.get(counter.add.remote())).remote())
    assert not isinstance(caught.value, rex.RayActorError)
    assert isinstance(caught.value.cause, rex.RayActorError)


@row("ActorDiedError, ActorUnavailableError")
def test_an_actor_that_is_being_restarted(near: InProcessCluster) -> None:
    counter = Counter.options(max_restarts=-1, restart_backoff_s=60.0).remote()
    for _ in range(2):  # the second restart in a row waits
        ray.get(counter.add.remote())
        ray.kill(counter, no_restart=False)
    until(lambda: actorrpc.list_actors()[0].state == "RESTARTING")
    with pytest.raises(rex.ActorUnavailableError) as caught:
        ray.get(counter.add.options(max_task_retries=0).remote())
    assert isinstance(caught.value, actorrpc.ActorUnavailableError)
    near.clock.advance(120.0)
    assert ray.get(counter.add.remote()) == 1


@row("WorkerCrashedError; OwnerDiedError")
@pytest.mark.prints("died", "not finished")
def test_a_process_that_ends(passing: InProcessCluster) -> None:
    gate = Gate.options(worker="worker0").remote()
    large = ray.remote(_large).remote()
    ray.wait([large], fetch_local=False)
    held = ray.remote(max_retries=0)(_waits).remote([gate])
    passing.clock.settle()
    passing.kill("worker1")
    for ref, kind in ((held, rex.WorkerCrashedError), (large, rex.OwnerDiedError)):
        with pytest.raises(kind) as caught:
            ray.get(ref)
        assert isinstance(caught.value, actorrpc.PeerDiedError)
    assert issubclass(rex.OwnerDiedError, rex.ObjectLostError)


def _large() -> bytes:
    return bytes(1 << 20)


def _waits(gates: list[Any]) -> Any:
    held = gates[0].wait.remote()
    # Its process is killed while it waits; the call itself fails when the cluster ends, or after that.
    held._ours._ask().cover()
    return ray.get(held)


@pytest.mark.usefixtures("passing")
@row("GetTimeoutError")
@row("TaskCancelledError")
@row("cancel(ref, recursive=False)")
def test_late_and_cancelled() -> None:
    gate = Gate.remote()
    held = gate.wait.remote()
    with pytest.raises(rex.GetTimeoutError) as late:
        ray.get(held, timeout=5)
    assert isinstance(late.value, actorrpc.RpcTimeoutError)
    assert isinstance(late.value, TimeoutError)
    with pytest.raises(ValueError, match="recursive=False"):
        ray.cancel(held, recursive=False)
    ray.cancel(held)
    with pytest.raises(rex.TaskCancelledError) as cancelled:
        ray.get(held)
    assert isinstance(cancelled.value, actorrpc.CancelledError)


@pytest.mark.usefixtures("near")
@row("ActorAlreadyExistsError")
def test_a_name_that_is_taken() -> None:
    actor = Counter.options(name="one").remote()
    with pytest.raises(rex.ActorAlreadyExistsError) as caught:
        Counter.options(name="one").remote()
    assert isinstance(caught.value, actorrpc.NameTakenError)
    assert isinstance(caught.value, ValueError)
    del actor


@pytest.mark.usefixtures("near")
@row("PendingCallsLimitExceeded")
def test_a_call_too_many() -> None:
    gate = Gate.options(max_pending_calls=1).remote()
    held = gate.wait.remote()
    with pytest.raises(rex.PendingCallsLimitExceeded) as caught:
        gate.wait.remote()
    assert isinstance(caught.value, actorrpc.PendingCallsLimitExceeded)
    ray.cancel(held)


@row("RuntimeEnvSetupError")
def test_an_environment_that_cannot_be_had() -> None:
    for kind in ("pip", "conda", "uv"):
        with pytest.raises(rex.RuntimeEnvSetupError) as caught:
            Gate.options(runtime_env={kind: ["x"]})
        assert isinstance(caught.value, errors.ConfigError)


@pytest.mark.usefixtures("near")
@row("ActorPlacementGroupRemoved")
def test_a_placement_group_that_is_gone() -> None:
    group = ray.util.placement_group([{"CPU": 1}])
    ray.get(group.ready())
    ray.util.remove_placement_group(group)
    with pytest.raises(rex.ActorPlacementGroupRemoved) as caught:
        Counter.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote()
    assert isinstance(caught.value, actorrpc.PlacementError)


@row("RaySystemError")
def test_what_ray_has_no_name_for() -> None:
    told = rex.in_rays_words(actorrpc.DeadlockError("x"))
    assert isinstance(told, rex.RaySystemError)
    assert isinstance(told, actorrpc.DeadlockError)


@row("errors of Ray's are no RuntimeError")
def test_all_errors_are_runtime_errors() -> None:
    assert issubclass(rex.RayError, RuntimeError)


# -- options -------------------------------------------------------------------------------------------------------


@row("tasks: num_cpus")
def test_options_of_tasks(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": 0,
        "name": "one",
        "max_retries": 2,
        "retry_exceptions": [Wrong],
        "num_returns": 2,
    }
    assert set(names(PAGE, "tasks: num_cpus")) == {*given, "runtime_env"}
    assert options.for_tasks(given, options.Extras())[0] == given
    ray.remote(**given, runtime_env={"working_dir": str(tmp_path)})(_large)


@row("actors: num_cpus")
def test_options_of_actors() -> None:
    given: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": 0,
        "name": "one",
        "retry_exceptions": True,
        "resources": {"a": 1},
        "namespace": "n",
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": 1,
        "max_task_retries": 1,
        "max_concurrency": 2,
        "max_pending_calls": 3,
        "concurrency_groups": {"io": 2},
        "allow_out_of_order_execution": True,
    }
    assert set(names(PAGE, "actors: num_cpus")) == {*given, "runtime_env"}
    ours, _ = options.for_actors(given, options.Extras())
    assert {name: ours[name] for name in given} == given
    Counter.options(**given, runtime_env={"env_vars": {"A": "1"}})


@pytest.mark.usefixtures("near")
@row("methods: num_returns")
def test_options_of_methods() -> None:
    given: dict[str, Any] = {
        "num_returns": 2,
        "concurrency_group": "io",
        "max_task_retries": 1,
        "retry_exceptions": True,
        "name": "x",
    }
    assert set(names(PAGE, "methods: num_returns")) == {*given}
    assert options.for_calls(given) == given
    counter = Counter.options(concurrency_groups={"io": 1}).remote()
    assert ray.get(counter.echo.options(**given).remote((1, 2))) == [1, 2]


@pytest.mark.usefixtures("near")
@row("calls of generators")
def test_generators_with_a_number_of_results() -> None:
    counter = Counter.remote()
    assert ray.get(list(ray.get(counter.items.options(num_returns="dynamic").remote(3)))) == [0, 1, 2]
    assert ray.get(counter.items.options(num_returns=2).remote(2)) == [0, 1]


@row("actors: label_selector")
def test_labels() -> None:
    for given in (
        {"label_selector": {"zone": "a"}},
        {"scheduling_strategy": NodeLabelSchedulingStrategy({"zone": In("a")})},
    ):
        assert options.for_actors(given, options.Extras())[0]["labels"] == {"zone": "a"}
    for refused in (
        {"label_selector": {"zone": "!a"}},
        {"scheduling_strategy": NodeLabelSchedulingStrategy({"zone": NotIn("a")})},
    ):
        with pytest.raises(ValueError):
            options.for_actors(refused, options.Extras())


@pytest.mark.usefixtures("near")
@row("actors: scheduling_strategy")
def test_strategies_of_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    for_actors = functools.partial(options.for_actors, before=options.Extras())
    assert for_actors({"scheduling_strategy": "SPREAD"})[0]["spread"] is True
    [node] = ray.nodes()
    here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    assert for_actors({"scheduling_strategy": here})[0]["host"] == node["NodeManagerHostname"]
    group = ray.util.placement_group([{"CPU": 1}])
    ray.get(group.ready())
    _, extras = for_actors({"scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0)})
    assert "host" not in options.placed(extras, None, None)[0]  # of one machine there is nothing to say
    monkeypatch.setattr(type(group), "host_for", lambda *_: "there")
    assert options.placed(extras, None, None)[0]["host"] == "there"


@row("tasks: scheduling_strategy")
def test_strategies_of_tasks(near: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"scheduling_strategy": "SPREAD", "num_cpus": 1}
    assert ray.get(double.options(**given).remote(1)) == 2
    missing = double.options(resources={"missing": 1}).remote(1)
    with pytest.raises(rex.TaskUnschedulableError, match="missing"):
        ray.get(missing)
    assert options.for_tasks({"resources": {"a": 1}}, options.Extras())[0] == {}  # nothing is booked
    monkeypatch.setattr(cluster, "hosts", lambda: ["a", "b"])
    with pytest.raises(ValueError, match="make it a method of an actor"):
        double.options(label_selector={"zone": "a"})


@row("all: memory")
def test_options_that_are_ignored() -> None:
    listed = names(PAGE, "all: memory")
    assert set(listed) == set(options.IGNORED)
    assert all(options.IGNORED.values())
    given = dict.fromkeys(listed, 1)
    assert options.for_tasks(given, options.Extras())[0] == {}
    assert options.for_calls(given) == {}
    ours, _ = options.for_actors(given, options.Extras())
    assert not set(ours) & set(listed)


@row("init: include_dashboard")
def test_options_of_init_that_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = names(PAGE, "init: include_dashboard")
    assert set(listed) == {"init", *cluster.IGNORED}
    assert all(cluster.IGNORED.values())
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(cluster.cluster, "init", lambda where, **rest: given.append(rest))
    monkeypatch.setattr(cluster, "RayContext", lambda context: context)
    ray.init(**dict.fromkeys(cluster.IGNORED, 1), _temp_dir="/x")
    assert not set(given[0]) & {*cluster.IGNORED, "_temp_dir"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"job_config": object()}, "say namespace= and runtime_env="),
        ({"address": "auto"}, "leave address= out"),
        ({"address": "ray://head:10001"}, "the address of a driver of actorrpc's"),
    ],
    ids=["job_config", "auto", "ray"],
)
@row("init: job_config")
def test_options_of_init_that_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, ConnectionError), match=says):
        ray.init(**given)
    assert not ray.is_initialized()


@pytest.mark.usefixtures("passing")
@row("all: options of ours")
def test_options_of_ours() -> None:
    counter = Counter.options(worker="worker0").remote()
    assert ray.get(counter.add.options(priority=1).remote()) == 1
    assert actorrpc.list_actors()[0].worker == "worker0"
    with pytest.raises(TimeoutError):
        ray.get(Gate.remote().wait.options(timeout=5.0).remote())


# -- what a program can tell ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("near")
@row("a reference or a handle that the program pickles by itself")
def test_a_pickle_keeps_nothing() -> None:
    counter = Counter.remote()
    pickled = ray.cloudpickle.dumps(counter)
    loaded = ray.cloudpickle.loads(pickled)
    del counter
    assert ray.get(loaded.add.remote()) == 1
    ref = ray.put(2)
    assert ray.get(ray.cloudpickle.loads(ray.cloudpickle.dumps(ref))) == 2
    del loaded
    gc.collect()
    until(lambda: actorrpc.list_actors()[0].state == "DEAD")


@pytest.mark.usefixtures("near")
@row("checkpoint() and restore(state)")
def test_checkpoints_are_the_programs_own() -> None:
    counter = Counter.options(max_restarts=1).remote()
    assert ray.get(counter.add.remote()) == 1
    ray.kill(counter, no_restart=False)
    assert ray.get(counter.add.remote()) == 1
    assert not {"checkpoint", "restore"} & set(_seen)


# -- what needs processes ------------------------------------------------------------------------------------------


@pytest.mark.slow
@row("ActorUnschedulableError, TaskUnschedulableError")
@row("init shutdown is_initialized")
@row("tasks: num_cpus")
def test_a_cluster_of_rays(tmp_path: Path) -> None:
    (tmp_path / "only_there.py").write_text("VALUE = 7\n")
    env = {
        "env_vars": {"TOLD": "yes"},
        "working_dir": str(tmp_path),
        "py_modules": [str(tmp_path / "only_there.py")],
    }
    ray.init(num_cpus=1)
    try:
        with pytest.raises(rex.ActorUnschedulableError) as of_actor:
            Counter.options(resources={"missing": 1}).remote()
        with pytest.raises(rex.TaskUnschedulableError) as of_task:
            ray.get(double.options(num_cpus=2).remote(1))
        for each in (of_actor, of_task):
            assert isinstance(each.value, actorrpc.PlacementError)
        seen = ray.get(ray.remote(_looks).options(runtime_env=env).remote())
        assert seen == (7, "yes", str(tmp_path))
    finally:
        ray.shutdown()
    assert not ray.is_initialized()


def _looks() -> Any:
    import only_there

    return only_there.VALUE, os.environ["TOLD"], os.getcwd()
