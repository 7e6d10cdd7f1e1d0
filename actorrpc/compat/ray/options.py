"""Ray's options of actors, tasks and calls, as options of actorrpc.

Some options are converted. Options that cannot change a program's results are ignored (``IGNORED`` says why). Other options that
actorrpc does not have are refused; the error says what to do. All other options have the same names and meaning in actorrpc.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from actorrpc._exceptions import say
from actorrpc.cluster import resources
from actorrpc.compat.ray import cluster, runtime_env
from actorrpc.compat.ray.exceptions import ActorUnschedulableError, TaskUnschedulableError
from actorrpc.compat.ray.placement import (
    In,
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    PlacementGroup,
    PlacementGroupSchedulingStrategy,
    current_group,
)
from actorrpc.errors import ConfigError

__all__ = [
    "IGNORED",
    "Extras",
    "check_resources",
    "for_actors",
    "for_calls",
    "for_tasks",
    "group_of",
    "placed",
]

#: ignored option -> why it is ignored
IGNORED: Final = {
    "_labels": "they are not shown",
    "_metadata": "only Ray's own libraries use it",
    "accelerator_type": "num_gpus= sets the number of devices; labels= selects a worker by its kind of device",
    "enable_task_events": "there is no event store",
    "enable_tensor_transport": "tensors go through shared memory, and between hosts through TCP",
    "fallback_strategy": "if no worker has the required labels, an error is raised",
    "max_calls": "processes that run tasks are kept",
    "memory": "no memory is reserved",
    "object_store_memory": "init(object_memory=...) limits the memory of large objects of a host",
    "tensor_transport": "tensors go through shared memory, and between hosts through TCP",
}
_NO_CHECKPOINTS: Final = 1 << 62
_NOT_SAID: Final = (None, "DEFAULT", "default")


@dataclass(frozen=True, slots=True)
class Extras:
    """The options of Ray without an equivalent in actorrpc.

    Attributes:
        env: the option ``runtime_env``; None if it was not given.
        resources: the resources that a task requests.
        group: the placement group; None: the group of the process that starts the actor or task, if it captures them.
        bundle: the index of the bundle in the group; -1 for any.
        captures: whether the actors and tasks that this actor or task starts are in the group, too.
    """

    env: dict[str, Any] | None = None
    resources: tuple[tuple[str, float], ...] = ()
    group: PlacementGroup | None = None
    bundle: int = -1
    captures: bool = False


def _common(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert the options that actors and tasks have in common; return all options, and the changed attributes of Extras."""
    options = {name: value for name, value in given.items() if name not in IGNORED}
    extras: dict[str, Any] = {}
    if "runtime_env" in options:
        extras["env"] = runtime_env.checked(options.pop("runtime_env"))
    _place(options, extras)
    selector = options.pop("label_selector", None)
    if selector:
        options["labels"] = {**(options.get("labels") or {}), **_labels(selector)}
    for name in [name for name, value in options.items() if value is None and name in _NONE_IS_UNSAID]:
        del options[name]
    return options, extras


_NONE_IS_UNSAID: Final = (
    "max_pending_calls",
    "max_restarts",
    "num_returns",
    "retry_exceptions",
    "max_retries",
    "get_if_exists",
)


def _labels(selector: Any) -> dict[str, str]:
    if not isinstance(selector, Mapping):
        raise TypeError(f"label_selector must be a dict, not {say(selector, repr)}")
    for name, value in selector.items():
        if not isinstance(value, str) or value.startswith(("!", "in(")):
            raise ConfigError(
                f"label_selector: {name}={value!r} is not supported: give the one value that the label must have"
            )
    return dict(selector)


def _place(options: dict[str, Any], extras: dict[str, Any]) -> None:
    """Convert ``scheduling_strategy``, and Ray's older options ``placement_group...``, which have the same effects."""
    group = options.pop("placement_group", None)
    index = options.pop("placement_group_bundle_index", -1)
    captures = options.pop("placement_group_capture_child_tasks", None)
    if isinstance(group, PlacementGroup):
        options.setdefault("scheduling_strategy", PlacementGroupSchedulingStrategy(group, index, captures))
    elif group not in _NOT_SAID:
        raise ConfigError(f"placement_group must be what placement_group() returns, not {say(group, repr)}")
    if "scheduling_strategy" not in options:
        return
    strategy = options.pop("scheduling_strategy")
    if strategy == "SPREAD":
        options["spread"] = True
    elif isinstance(strategy, PlacementGroupSchedulingStrategy):
        group = strategy.placement_group
        index = strategy.placement_group_bundle_index
        if group is not None:
            group.check_index(index)
        extras.update(group=group, bundle=index, captures=bool(strategy.placement_group_capture_child_tasks))
    elif isinstance(strategy, NodeAffinitySchedulingStrategy):
        host = resources.host_of(strategy.node_id)
        if host is not None:
            options["host"] = host
        elif not strategy.soft:
            raise ActorUnschedulableError(
                f"there is no node {strategy.node_id!r}: ray.nodes() lists the nodes"
            )
    elif isinstance(strategy, NodeLabelSchedulingStrategy):
        options["labels"] = _hard_labels(strategy)
    elif strategy not in _NOT_SAID:
        raise ConfigError(
            f'scheduling_strategy must be "DEFAULT", "SPREAD" or one of ray.util.scheduling_strategies, not {say(strategy, repr)}'
        )


def _hard_labels(strategy: NodeLabelSchedulingStrategy) -> dict[str, str]:
    found = {}
    for name, wanted in (strategy.hard or {}).items():
        if not isinstance(wanted, In) or len(wanted.values) != 1:
            raise ConfigError(
                f"label {name!r}: only In(...) with one value is supported here, which the worker's label must have"
            )
        found[name] = wanted.values[0]
    return found


def _resources(given: Mapping[str, Any]) -> dict[str, float]:
    for name in ("CPU", "GPU"):
        if name in given:
            raise ConfigError(f"resources: {name!r} is set with num_{name.lower()}s=")
    return {name: amount for name, amount in given.items() if not name.startswith("node:")}


def for_actors(given: Mapping[str, Any], before: Extras) -> tuple[dict[str, Any], Extras]:
    """Convert Ray's options of an actor: return actorrpc's options, and ``before`` with the extras that have changed.

    Raises:
        ConfigError: an option is not supported here, or its value is wrong; the message says what to do.
    """
    options, extras = _common(given)
    if options.get("resources"):
        options["resources"] = _resources(options["resources"])
    # Make no checkpoints: a class written for Ray may have methods checkpoint() and restore() with another meaning.
    options.setdefault("checkpoint_every", _NO_CHECKPOINTS)
    return options, replace(before, **extras)


def for_tasks(given: Mapping[str, Any], before: Extras) -> tuple[dict[str, Any], Extras]:
    """Convert Ray's options of a task, as :func:`for_actors`."""
    options, extras = _common(given)
    if options.get("resources"):
        options["resources"] = _resources(options["resources"])
        extras["resources"] = tuple(sorted(options["resources"].items()))
    options.pop("spread", None)  # tasks share processes
    host = options.pop("host", None)
    labels = options.pop("labels", None)
    if (host is not None or labels) and len(resources.machines()) > 1:
        raise ConfigError(
            "a task cannot be placed on a certain node: make it a method of an actor with this scheduling strategy"
        )
    return options, replace(before, **extras)


def for_calls(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert Ray's options of the calls of a method to actorrpc's."""
    return {
        name: value
        for name, value in given.items()
        if name not in IGNORED and not (value is None and name in _NONE_IS_UNSAID)
    }


def check_resources(extras: Extras) -> None:
    """Check that a node has the resources that a task requests.

    Raises:
        TaskUnschedulableError: no node has these resources.
    """
    if extras.resources:
        _look_for(extras.resources, cluster.identity())


@functools.lru_cache(maxsize=256)
def _look_for(requested: tuple[tuple[str, float], ...], _cluster: str) -> None:
    wanted = dict(requested)
    if not any(
        all(each["total"].get(name, 0.0) >= amount for name, amount in wanted.items())
        for each in resources.machines()
    ):
        raise TaskUnschedulableError(f"no node has {wanted}: ray.nodes() shows the resources of all nodes")


def placed(extras: Extras, env: Mapping[str, str] | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return changed options for an actor or task that is started now, and directories for the import path of its process.

    Both depend on this process, whose placement group and ``runtime_env`` the actor or task may inherit.

    Args:
        env: the present value of this option.

    Raises:
        ActorPlacementGroupRemoved: the placement group has been removed.
    """
    options, paths = runtime_env.options_of(runtime_env.merged(extras.env))
    group, bundle, captures = extras.group, extras.bundle, extras.captures
    if group is None:
        group, bundle, captures = current_group(), -1, True
    if group is not None and not group.is_empty:
        group.check_exists()
        options["bundle"] = group.id.text, bundle, captures
    if "env" in options and env:
        options["env"] = {**env, **options["env"]}
    return options, paths


def group_of(extras: Extras) -> PlacementGroup | None:
    """Return the placement group of an actor or task that is started now; None if there is none."""
    group = extras.group if extras.group is not None else current_group()
    return None if group is None or group.is_empty else group
