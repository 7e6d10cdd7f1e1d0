"""``ray.runtime_context``: the actor, task and process in which code runs."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from actorrpc import actors
from actorrpc.actors.context import runtime
from actorrpc.agent.calls import CURRENT
from actorrpc.cluster import resources
from actorrpc.compat.ray import runtime_env
from actorrpc.compat.ray.actor import ActorHandle, _as_rays
from actorrpc.compat.ray.placement import get_current_placement_group
from actorrpc.compat.ray.runtime_env import RuntimeEnv

__all__ = ["RuntimeContext", "get_gpu_ids", "get_runtime_context"]


class RuntimeContext:
    """The place where this code runs. Ids are strings.

    Args:
        context: the actorrpc.RuntimeContext.

    Attributes:
        namespace: the default namespace of actors' names.
        was_current_actor_reconstructed: whether the actor has been restarted.
        worker: this worker.
        gcs_address: the word "local": there is no GCS.
    """

    gcs_address = "local"

    def __init__(self, context: actors.RuntimeContext) -> None:
        self._ours = context
        self.namespace = context.namespace
        self.was_current_actor_reconstructed = context.was_current_actor_reconstructed
        self.worker: Any = context.worker

    @property
    def current_actor(self) -> ActorHandle[Any]:
        """A weak handle of the actor that executes this code: the handle does not keep the actor alive.

        Raises:
            RuntimeError: no actor executes this code.
        """
        return _as_rays(actors.current_actor())

    @property
    def runtime_env(self) -> RuntimeEnv:
        """The ``runtime_env`` of this process."""
        return RuntimeEnv(**runtime_env.inherited())

    def get(self) -> dict[str, Any]:
        """Return the ids by name."""
        found = {"job_id": self.get_job_id(), "node_id": self.get_node_id(), "namespace": self.namespace}
        if self.get_actor_id() is not None:
            found["actor_id"] = self.get_actor_id() or ""
        if self.get_task_id() is not None:
            found["task_id"] = self.get_task_id() or ""
        return found

    def get_job_id(self) -> str:
        """Return the same id for every program: there are no jobs."""
        return "01000000"

    def get_node_id(self) -> str:
        """Return the id of the node."""
        return resources.node_id()

    def get_worker_id(self) -> str:
        """Return the id of this process."""
        return hashlib.sha224(self._ours.worker.name.encode()).hexdigest()

    def get_task_id(self) -> str | None:
        """Return the id of the call that executes this code; None in the driver."""
        execution = CURRENT.get()
        if execution is None:
            return None
        which = f"{self._ours.worker.name} {execution.peer.name} {execution.id} {execution.chain}"
        return hashlib.sha224(which.encode()).hexdigest()[:48]

    def get_task_name(self) -> str | None:
        """Return the name of the function or method that is executed; None in the driver."""
        execution = CURRENT.get()
        what = None if execution is None else execution.what
        return getattr(what, "__qualname__", None) or (None if what is None else str(what))

    get_task_function_name = get_task_name

    def get_actor_id(self) -> str | None:
        """Return the id of the actor; None outside of actors."""
        return self._ours.get_actor_id()

    def get_actor_name(self) -> str | None:
        """Return the name of the actor; empty if it has none, None outside of actors."""
        return None if self._ours.actor_id is None else self._ours.actor_name or ""

    job_id = property(get_job_id)
    node_id = property(get_node_id)
    task_id = property(get_task_id)
    actor_id = property(get_actor_id)

    def get_placement_group_id(self) -> str | None:
        """Return the id of the placement group in which this code runs; None if there is none."""
        found = get_current_placement_group()
        return None if found is None else found.id.hex()

    def get_assigned_resources(self) -> dict[str, float]:
        """Return the resources of the actor."""
        execution = CURRENT.get()
        hosted = None if execution is None else execution.actor
        options = None if hosted is None or hosted.spec is None else hosted.spec.descriptor.options
        if options is None:
            return {}
        found = {"CPU": options.num_cpus, "GPU": options.num_gpus, **(options.resources or {})}
        return {name: float(amount) for name, amount in found.items() if amount}

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        """Return the devices that this process can use, by their kind."""
        return {"GPU": [str(each) for each in get_gpu_ids()]}

    def get_runtime_env_string(self) -> str:
        """Return the ``runtime_env`` of this process as JSON."""
        return os.environ.get(runtime_env.VARIABLE, "{}")

    def get_node_labels(self) -> dict[str, str]:
        """Return the labels of the node."""
        own = self.get_node_id()
        found = [each["Labels"] for each in resources.nodes() if each["NodeID"] == own]
        return dict(found[0]) if found else {}


def get_runtime_context() -> RuntimeContext:
    """Return the place where this code runs. Starts the embedded cluster if this process is in no group."""
    runtime(start=True)
    return RuntimeContext(actors.get_runtime_context())


def get_gpu_ids() -> list[int | str]:
    """Return the CUDA devices that ``CUDA_VISIBLE_DEVICES`` assigns to this process; empty if it is not set."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [int(each) if each.isdigit() else each for each in said.split(",") if each]
