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

from actorrpc import errors, rpc
from actorrpc.errors import (
    CancelledError,
    PeerDiedError,
    RemoteError,
    RpcError,
    RpcTimeoutError,
)
from actorrpc.futures import Future, collect_all, wait_all
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
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)

__version__ = "0.1.0"

__all__ = [
    "BackendType",
    "CancelledError",
    "Future",
    "PeerDiedError",
    "RRef",
    "RemoteError",
    "RpcBackendOptions",
    "RpcError",
    "RpcTimeoutError",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "__version__",
    "collect_all",
    "errors",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_initialized",
    "remote",
    "rpc",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_all",
]
