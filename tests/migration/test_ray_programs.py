"""The rows of docs/migration/ray-programs.md that tests/compat/test_ray.py and test_ray_names.py do not test."""

from __future__ import annotations

import asyncio
import functools
import gc
from pathlib import Path
from typing import Any

import pytest

import actorrpc
import actorrpc.compat.ray as ray
from actorrpc.cluster import resources
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
from tests.migration.rows import names, row

PAGE = "ray-programs"
rex = ray.exceptions


class Wrong(ValueError):
    """An error of the program."""


@ray.remote
class Counter:
    def __init__(self) -> None:
        self.n = 0

    def add(self, more: int = 1) -> int:
        self.n += more
        return self.n

    def echo(self, value: Any) -> Any:
        return value


@ray.remote
class Endless:
    async def wait(self) -> None:
        await asyncio.Event().wait()


@ray.remote
def double(x: int) -> int:
    return 2 * x


def _of_ray(name: str) -> Any:
    return functools.reduce(getattr, name.split("."), ray)


# -- names and state -------------------------------------------------------------------------------------------------


@row("init shutdown is_initialized", "ray-programs")
@row("ObjectRef ObjectRefGenerator", "ray-programs")
@row("actor.exit_actor", "ray-programs")
@row("exceptions", "ray-programs")
@row("util.ActorPool", "ray-programs")
@row("util.placement_group", "ray-programs")
@row("runtime_env.RuntimeEnv", "ray-programs")
def test_the_listed_names_of_ray_exist() -> None:
    for beginning in (
        *("init shutdown", "ObjectRef ", "actor.exit_actor", "exceptions", "util.ActorPool"),
        *("util.placement_group", "runtime_env.RuntimeEnv"),
    ):
        found = names(PAGE, beginning)
        assert found
        assert all(_of_ray(name) is not None for name in found)


@pytest.mark.usefixtures("near")
@row("util.state.list_actors", "ray-programs")
def test_the_state_api_lists_actors_and_nodes() -> None:
    counter = Counter.options(name="seen").remote()
    assert ray.get(counter.add.remote(1)) == 1
    state: Any = ray.util.state
    (seen,) = state.list_actors(filters=[("class_name", "=", "Counter"), ("state", "!=", "DEAD")])
    assert (seen.name, seen["state"], seen.get("nothing", 1)) == ("seen", "ALIVE", 1)
    assert repr(counter) == f"Actor(Counter, {seen.actor_id})"
    assert state.get_actor(seen.actor_id) == seen
    assert state.list_actors(limit=0) == []
    (node,) = state.list_nodes()
    assert (node.is_head_node, node.state, state.get_node(node.node_id)) == (True, "ALIVE", node)
    summary = state.summarize_actors()["cluster"]
    assert summary["summary"]["Counter"]["state_counts"]["ALIVE"] == 1
    with pytest.raises(ValueError, match="'=' or '!='"):
        state.list_actors(filters=[("state", "<", 3)])
    for given in ({}, {"filename": "x"}, {"actor_id": "stranger"}):
        with pytest.raises(ValueError, match=r"get_log\(\): "):
            state.get_log(**given)
    with pytest.raises(KeyError):
        seen["nothing"]


# -- errors --------------------------------------------------------------------------------------------------------


@row("ActorDiedError, ActorUnavailableError", "ray-programs")
@row("calls while an actor restarts", "from-ray")
def test_calls_wait_for_a_restart_or_raise_actor_unavailable_error(near: InProcessCluster) -> None:
    counter = Counter.options(max_restarts=-1, restart_backoff_s=60.0).remote()
    for _ in range(2):  # the second consecutive restart is delayed
        ray.get(counter.add.remote())
        ray.kill(counter, no_restart=False)
    until(lambda: actorrpc.list_actors()[0].state == "RESTARTING")
    waits = counter.add.remote()
    with pytest.raises(rex.ActorUnavailableError) as caught:
        ray.get(counter.add.options(max_task_retries=0).remote())
    assert isinstance(caught.value, actorrpc.ActorUnavailableError)
    near.clock.advance(120.0)
    assert ray.get(waits) == 1


# -- options -------------------------------------------------------------------------------------------------------


@row("tasks: num_cpus", "ray-programs")
def test_the_listed_options_of_tasks_are_accepted(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": 0,
        "resources": {"a": 1.0},
        "name": "one",
        "max_retries": 2,
        "retry_exceptions": [Wrong],
        "num_returns": 2,
    }
    assert set(names(PAGE, "tasks: num_cpus")) == {*given, "runtime_env"}
    assert options.for_tasks(given, options.Extras())[0] == given
    ray.remote(**given, runtime_env={"working_dir": str(tmp_path)})(len)


@row("actors: num_cpus", "ray-programs")
def test_the_listed_options_of_actors_are_accepted() -> None:
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
@row("methods: num_returns", "ray-programs")
def test_the_listed_options_of_methods_are_accepted() -> None:
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


@row("actors: label_selector", "ray-programs")
def test_label_selectors_become_labels_and_negations_are_refused() -> None:
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
@row("actors: scheduling_strategy", "ray-programs")
def test_scheduling_strategies_of_actors_become_spread_a_host_or_a_bundle() -> None:
    for_actors = functools.partial(options.for_actors, before=options.Extras())
    assert for_actors({"scheduling_strategy": "SPREAD"})[0]["spread"] is True
    [node] = ray.nodes()
    here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    assert for_actors({"scheduling_strategy": here})[0]["host"] == node["NodeManagerHostname"]
    group = ray.util.placement_group([{"CPU": 1}])
    ray.get(group.ready())
    _, extras = for_actors({"scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0)})
    assert options.placed(extras, None)[0]["bundle"] == (group.id.hex(), 0, False)


@row("tasks: scheduling_strategy", "ray-programs")
def test_scheduling_options_of_tasks_are_ignored_or_refused(
    near: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"scheduling_strategy": "SPREAD", "num_cpus": 1}
    assert ray.get(double.options(**given).remote(1)) == 2
    missing = double.options(resources={"missing": 1}).remote(1)
    with pytest.raises(rex.TaskUnschedulableError, match="missing"):
        ray.get(missing)
    monkeypatch.setattr(resources, "machines", lambda: ["a", "b"])
    with pytest.raises(ValueError, match="make it a method of an actor"):
        double.options(label_selector={"zone": "a"})


@row("all: memory", "ray-programs")
def test_the_listed_ignored_options_have_no_effect() -> None:
    listed = names(PAGE, "all: memory")
    assert set(listed) == set(options.IGNORED)
    assert all(options.IGNORED.values())
    given = dict.fromkeys(listed, 1)
    assert options.for_tasks(given, options.Extras())[0] == {}
    assert options.for_calls(given) == {}
    ours, _ = options.for_actors(given, options.Extras())
    assert not set(ours) & set(listed)


@row("init: include_dashboard", "ray-programs")
def test_the_listed_options_of_init_are_ignored() -> None:
    """The cluster of tests/compat/test_ray.py starts with all of them."""
    listed = names(PAGE, "init: include_dashboard")
    assert set(listed) == {"init", *cluster.IGNORED}
    assert all(cluster.IGNORED.values())


@pytest.mark.usefixtures("passing")
@row("all: options of actorrpc", "ray-programs")
def test_options_of_actorrpc_are_accepted_as_well() -> None:
    counter = Counter.options(worker="worker0").remote()
    assert ray.get(counter.add.options(priority=1).remote()) == 1
    assert actorrpc.list_actors()[0].worker == "worker0"
    with pytest.raises(TimeoutError):
        ray.get(Endless.remote().wait.options(timeout=5.0).remote())


# -- differences that a program can notice ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("near")
@row("a reference or a handle that the program pickles by itself", "ray-programs")
def test_a_pickled_handle_does_not_keep_its_actor_alive() -> None:
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
