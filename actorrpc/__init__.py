"""actorrpc: Ray-style actors for PyTorch on a pure-Python successor of ``torch.distributed.rpc``.

What a user needs most is here; :mod:`actorrpc.rpc` mirrors ``torch.distributed.rpc`` name by name.
"""

from __future__ import annotations

import sys

from actorrpc.errors import PlatformError

if sys.platform != "linux":
    raise PlatformError(f"actorrpc runs on Linux (it uses epoll, memfd and eventfd); this is {sys.platform}")
if sys.version_info < (3, 11):  # noqa: UP036 (for those who install it in spite of its metadata)
    raise PlatformError(f"actorrpc needs Python 3.11 or later; this is {sys.version.split()[0]}")

from actorrpc import actors, autograd, cluster, errors, nn, optim, rpc, testing
from actorrpc.actors import (
    ActorClass,
    ActorGroup,
    ActorHandle,
    ActorPool,
    GetTimeoutError,
    ObjectRef,
    ObjectRefGenerator,
    Queue,
    RemoteFunction,
    as_completed,
    call,
    cancel,
    current_actor,
    current_rank,
    exit_actor,
    get,
    get_actor,
    get_runtime_context,
    is_alive,
    kill,
    list_actors,
    method,
    monitor,
    put,
    ready,
    remote,
    spawn,
    wait,
)
from actorrpc.cluster import init
from actorrpc.errors import (
    ActorDiedError,
    ActorError,
    ActorUnavailableError,
    CancelledError,
    DeadlockError,
    NameTakenError,
    PeerDiedError,
    PendingCallsLimitExceeded,
    RemoteError,
    RpcError,
    RpcTimeoutError,
    UnknownActorError,
)
from actorrpc.futures import Future, collect_all, wait_all
from actorrpc.nn import RemoteModule
from actorrpc.optim import DistributedOptimizer
from actorrpc.rpc import (
    BackendType,
    RpcBackendOptions,
    RRef,
    TensorPipeRpcBackendOptions,
    WorkerInfo,
    functions,
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_initialized,
    rpc_async,
    rpc_sync,
    shutdown,
)

__version__ = "0.1.0"

__all__ = [
    "ActorClass",
    "ActorDiedError",
    "ActorError",
    "ActorGroup",
    "ActorHandle",
    "ActorPool",
    "ActorUnavailableError",
    "BackendType",
    "CancelledError",
    "DeadlockError",
    "DistributedOptimizer",
    "Future",
    "GetTimeoutError",
    "NameTakenError",
    "ObjectRef",
    "ObjectRefGenerator",
    "PeerDiedError",
    "PendingCallsLimitExceeded",
    "Queue",
    "RRef",
    "RemoteError",
    "RemoteFunction",
    "RemoteModule",
    "RpcBackendOptions",
    "RpcError",
    "RpcTimeoutError",
    "TensorPipeRpcBackendOptions",
    "UnknownActorError",
    "WorkerInfo",
    "__version__",
    "actors",
    "as_completed",
    "autograd",
    "call",
    "cancel",
    "cluster",
    "collect_all",
    "current_actor",
    "current_rank",
    "errors",
    "exit_actor",
    "functions",
    "get",
    "get_actor",
    "get_rpc_timeout",
    "get_runtime_context",
    "get_worker_info",
    "init",
    "init_rpc",
    "is_alive",
    "is_initialized",
    "kill",
    "list_actors",
    "method",
    "monitor",
    "nn",
    "optim",
    "put",
    "ready",
    "remote",
    "rpc",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "spawn",
    "testing",
    "wait",
    "wait_all",
]
