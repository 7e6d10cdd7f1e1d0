"""actorrpc: Ray-style actors for PyTorch on a pure-Python successor of ``torch.distributed.rpc``.

The names that most programs need are here; :mod:`actorrpc.rpc` mirrors ``torch.distributed.rpc`` name by name.
"""

from __future__ import annotations

import gc
import os
import sys

from actorrpc.errors import PlatformError

if sys.platform != "linux":
    raise PlatformError(f"actorrpc runs on Linux (it uses epoll, memfd and eventfd); this is {sys.platform}")
if sys.version_info < (3, 11):  # noqa: UP036 (for installations that ignore the package's metadata)
    raise PlatformError(f"actorrpc needs Python 3.11 or later; this is {sys.version.split()[0]}")


def _is_command() -> bool:
    """Whether this process is the command line, ``actorrpc`` or ``python -m actorrpc``, and not a user's program.

    The command line needs neither torch nor the rest of this module, and starts in a tenth of the time without them.
    """
    arguments = getattr(sys, "argv", None) or [""]
    if arguments[0] == "-m":  # Python imports this package while it locates the module of ``python -m``
        return bool(sys.orig_argv[-len(arguments)].removeprefix("-m") == "actorrpc")
    return bool(os.path.basename(arguments[0]) == "actorrpc")


if not _is_command():
    # Importing torch makes so many objects that a full garbage collection would start here, and take as long as the import.
    _collects = gc.isenabled()
    gc.disable()
    try:
        from torch.distributed import is_available as _is_distributed_available

        if not _is_distributed_available():
            raise PlatformError(
                "actorrpc needs torch.distributed, for its stores; this build of torch does not have it (USE_DISTRIBUTED=0)"
            )
        from actorrpc import actors, autograd, cluster, errors, nn, optim, rpc, testing
        from actorrpc.actors import (
            Actor,
            ActorClass,
            ActorGroup,
            ActorHandle,
            ActorPool,
            Collective,
            GetTimeoutError,
            ObjectRef,
            ObjectRefGenerator,
            Queue,
            RemoteFunction,
            Supervision,
            TensorTransport,
            as_completed,
            broadcast,
            call,
            cancel,
            collective,
            collective_group,
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
            progress,
            put,
            ready,
            register_tensor_transport,
            remote,
            share,
            spawn,
            supervise,
            unregister_tensor_transport,
            wait,
        )
        from actorrpc.agent.hooks import CallHooks, add_hooks, remove_hooks
        from actorrpc.cluster import available_resources, cluster_resources, drain, init, nodes, scale
        from actorrpc.errors import (
            ActorDiedError,
            ActorError,
            ActorUnavailableError,
            CancelledError,
            CheckpointError,
            CollectiveError,
            DeadlockError,
            NameTakenError,
            ObjectStoreFullError,
            PeerDiedError,
            PendingCallsLimitExceeded,
            PlacementError,
            RefusedError,
            RemoteError,
            RpcError,
            RpcTimeoutError,
            SupervisionError,
            UnknownActorError,
        )
        from actorrpc.futures import Future, collect_all, wait_all
        from actorrpc.nn import RemoteModule
        from actorrpc.observe.api import state, trace
        from actorrpc.optim import DistributedOptimizer
        from actorrpc.rpc import (
            BackendType,
            RpcBackendOptions,
            RRef,
            TensorPipeRpcBackendOptions,
            WorkerInfo,
            WorkerState,
            functions,
            get_rpc_timeout,
            get_worker_info,
            init_rpc,
            is_initialized,
            on_member_change,
            rpc_async,
            rpc_sync,
            shutdown,
            workers,
        )
    finally:
        if _collects:
            # Without this, the first calls would start a full collection: 1. The imports leave the collector's counters shortly
            # below their limits. 2. The objects of about 15 connections reach the limits, on all workers of a group at once.
            # 3. Each worker examines the 185 000 objects of the imports for 0.1 s, while the others wait for its answers.
            # freeze() and unfreeze() move all objects to the oldest generation unexamined, and reset the counters.
            if not gc.get_freeze_count():  # otherwise unfreeze() would undo the program's own freeze()
                gc.freeze()
                gc.unfreeze()
            gc.enable()

__version__ = "0.2.0"

__all__ = [
    "Actor",
    "ActorClass",
    "ActorDiedError",
    "ActorError",
    "ActorGroup",
    "ActorHandle",
    "ActorPool",
    "ActorUnavailableError",
    "BackendType",
    "CallHooks",
    "CancelledError",
    "CheckpointError",
    "Collective",
    "CollectiveError",
    "DeadlockError",
    "DistributedOptimizer",
    "Future",
    "GetTimeoutError",
    "NameTakenError",
    "ObjectRef",
    "ObjectRefGenerator",
    "ObjectStoreFullError",
    "PeerDiedError",
    "PendingCallsLimitExceeded",
    "PlacementError",
    "Queue",
    "RRef",
    "RefusedError",
    "RemoteError",
    "RemoteFunction",
    "RemoteModule",
    "RpcBackendOptions",
    "RpcError",
    "RpcTimeoutError",
    "Supervision",
    "SupervisionError",
    "TensorPipeRpcBackendOptions",
    "TensorTransport",
    "UnknownActorError",
    "WorkerInfo",
    "WorkerState",
    "__version__",
    "actors",
    "add_hooks",
    "as_completed",
    "autograd",
    "available_resources",
    "broadcast",
    "call",
    "cancel",
    "cluster",
    "cluster_resources",
    "collect_all",
    "collective",
    "collective_group",
    "current_actor",
    "current_rank",
    "drain",
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
    "nodes",
    "on_member_change",
    "optim",
    "progress",
    "put",
    "ready",
    "register_tensor_transport",
    "remote",
    "remove_hooks",
    "rpc",
    "rpc_async",
    "rpc_sync",
    "scale",
    "share",
    "shutdown",
    "spawn",
    "state",
    "supervise",
    "testing",
    "trace",
    "unregister_tensor_transport",
    "wait",
    "wait_all",
    "workers",
]


def __dir__() -> list[str]:
    # A shell completes `actorrpc.` with these names. Other attributes, such as loaded subpackages, are left out.
    return sorted(__all__)
