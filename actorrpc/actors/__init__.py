"""Actors: objects that live in another process and are called from anywhere, Ray's way and torch's.

Importing this puts the actor layer on top of every group that is joined from now on (``wiring.py``).
"""

from __future__ import annotations

from actorrpc.actors import wiring as _wiring
from actorrpc.actors.actor_class import ActorClass
from actorrpc.actors.collective import Collective, collective, collective_group
from actorrpc.actors.decorator import remote
from actorrpc.actors.functions import (
    ActorInfo,
    RuntimeContext,
    call,
    cancel,
    current_actor,
    exit_actor,
    get_actor,
    get_runtime_context,
    is_alive,
    kill,
    list_actors,
    monitor,
    ready,
)
from actorrpc.actors.groups import ActorGroup, GroupMethod, GroupStream, current_rank, spawn
from actorrpc.actors.handle import ActorHandle, ActorMethod, ActorProxy
from actorrpc.actors.mesh import Mesh, Point, ValueMesh
from actorrpc.actors.methods import method
from actorrpc.actors.object_ref import ObjectRef, put
from actorrpc.actors.options import NEW_PROCESS, ActorOptions, CallOptions, TaskOptions
from actorrpc.actors.pool import ActorPool, PoolResults
from actorrpc.actors.processes import DeathReport
from actorrpc.actors.queue import Empty, Full, Queue
from actorrpc.actors.ref_generator import ObjectRefGenerator
from actorrpc.actors.supervision import Supervision, supervise
from actorrpc.actors.tasks import RemoteFunction
from actorrpc.actors.waits import GetTimeoutError, as_completed, get, wait

__all__ = [
    "NEW_PROCESS",
    "ActorClass",
    "ActorGroup",
    "ActorHandle",
    "ActorInfo",
    "ActorMethod",
    "ActorOptions",
    "ActorPool",
    "ActorProxy",
    "CallOptions",
    "Collective",
    "DeathReport",
    "Empty",
    "Full",
    "GetTimeoutError",
    "GroupMethod",
    "GroupStream",
    "Mesh",
    "ObjectRef",
    "ObjectRefGenerator",
    "Point",
    "PoolResults",
    "Queue",
    "RemoteFunction",
    "RuntimeContext",
    "Supervision",
    "TaskOptions",
    "ValueMesh",
    "as_completed",
    "call",
    "cancel",
    "collective",
    "collective_group",
    "current_actor",
    "current_rank",
    "exit_actor",
    "get",
    "get_actor",
    "get_runtime_context",
    "is_alive",
    "kill",
    "list_actors",
    "method",
    "monitor",
    "put",
    "ready",
    "remote",
    "spawn",
    "supervise",
    "wait",
]

_wired = _wiring.start  # what the import above is for
