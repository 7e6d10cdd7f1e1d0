"""The API of ``torch.distributed.rpc``, on actorrpc's own agent.

``import actorrpc.rpc as rpc`` replaces ``import torch.distributed.rpc as rpc``: names, signatures, defaults and error types are
torch's. Unlike torch's functions, these raise errors that explain more, Ctrl-C interrupts their waits, and nothing hangs.
"""

from actorrpc.futures import Future
from actorrpc.rpc import functions
from actorrpc.rpc import profiling as _profiling
from actorrpc.rpc import spans as _spans
from actorrpc.rpc.api import (
    WorkerState,
    get_rpc_timeout,
    get_worker_info,
    get_worker_infos,
    init_rpc,
    is_available,
    is_initialized,
    on_member_change,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
    workers,
)
from actorrpc.rpc.functions import Named, allow, exposed
from actorrpc.rpc.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from actorrpc.rpc.rref import RRef
from actorrpc.wire.identity import WorkerInfo

__all__ = [
    "BackendType",
    "Future",
    "Named",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "WorkerState",
    "allow",
    "exposed",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_available",
    "is_initialized",
    "on_member_change",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "workers",
]

_wired = _spans.start, _profiling.collect  # these modules add hooks
