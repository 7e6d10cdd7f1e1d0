"""Actors: objects that live in another process, with methods that any worker can call, in the style of Ray or of torch.

Importing this package adds the actor layer to every group that is joined from then on (``api.py``).
"""

from __future__ import annotations

from actorrpc.actors.api import (
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
    remote,
)
from actorrpc.actors.client.actor_class import Actor, ActorClass, ActorMaker
from actorrpc.actors.client.handle import ActorHandle, ActorMethod, ActorProxy
from actorrpc.actors.client.typed_methods import BoundMethod, Method, RemoteCall, method
from actorrpc.actors.collectives.collective import Collective, collective, collective_group
from actorrpc.actors.groups.broadcast import broadcast
from actorrpc.actors.groups.group import ActorGroup, GroupMethod, GroupStream, current_rank, spawn
from actorrpc.actors.groups.mesh import Mesh, Point, ValueMesh
from actorrpc.actors.groups.supervision import Supervision, supervise
from actorrpc.actors.library.pool import ActorPool, PoolResults
from actorrpc.actors.library.queue import Empty, Full, Queue
from actorrpc.actors.library.tasks import RemoteFunction
from actorrpc.actors.refs.object_ref import ObjectRef, put, share
from actorrpc.actors.refs.transports import (
    TensorTransport,
    register_tensor_transport,
    unregister_tensor_transport,
)
from actorrpc.actors.refs.wait import GetTimeoutError, as_completed, get, progress, wait
from actorrpc.actors.spec.actor_spec import DeathReport
from actorrpc.actors.spec.options import NEW_PROCESS, ActorOptions, CallOptions, TaskOptions
from actorrpc.actors.streams.consumer import ObjectRefGenerator

__all__ = [
    "NEW_PROCESS",
    "Actor",
    "ActorClass",
    "ActorGroup",
    "ActorHandle",
    "ActorInfo",
    "ActorMaker",
    "ActorMethod",
    "ActorOptions",
    "ActorPool",
    "ActorProxy",
    "BoundMethod",
    "CallOptions",
    "Collective",
    "DeathReport",
    "Empty",
    "Full",
    "GetTimeoutError",
    "GroupMethod",
    "GroupStream",
    "Mesh",
    "Method",
    "ObjectRef",
    "ObjectRefGenerator",
    "Point",
    "PoolResults",
    "Queue",
    "RemoteCall",
    "RemoteFunction",
    "RuntimeContext",
    "Supervision",
    "TaskOptions",
    "TensorTransport",
    "ValueMesh",
    "as_completed",
    "broadcast",
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
    "progress",
    "put",
    "ready",
    "register_tensor_transport",
    "remote",
    "share",
    "spawn",
    "supervise",
    "unregister_tensor_transport",
    "wait",
]
