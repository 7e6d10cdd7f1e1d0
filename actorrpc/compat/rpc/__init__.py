"""Replaces ``torch.distributed.rpc``: its public names, and the private names that programs use."""

from __future__ import annotations

import logging
import numbers
import os
from typing import Any, Final

from torch.distributed.distributed_c10d import Store

from actorrpc._torch import set_profiler_rank
from actorrpc.compat import autograd as dist_autograd
from actorrpc.compat.imports import module
from actorrpc.compat.profiling import _server_process_global_profile

# Some of these names are not used here: programs use them as attributes of this module.
from actorrpc.compat.rpc import api, backend_registry, internal  # noqa: F401
from actorrpc.compat.rpc.agent import (  # noqa: F401
    CONSTANTS,
    RpcAgent,
    TensorPipeAgent,
    TensorPipeRpcBackendOptions,
    enable_gil_profiling,
)
from actorrpc.compat.rpc.agent import debug_info_of_references as _rref_context_get_debug_info
from actorrpc.compat.rpc.api import (  # noqa: F401
    AllGatherStates,
    PyRRef,
    RRef,
    _delete_all_user_and_unforked_owner_rrefs,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from actorrpc.compat.rpc.backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from actorrpc.group.store import open_store
from actorrpc.rpc.api import get_rpc_timeout, is_available, set_rpc_timeout  # noqa: F401
from actorrpc.rpc.functions import async_execution
from actorrpc.rpc.options import RpcBackendOptions
from actorrpc.wire.identity import WorkerInfo  # noqa: F401

__all__ = [
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "RRef",
    "TensorPipeRpcBackendOptions",
    "backend_registered",
    "construct_rpc_backend_options",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger = logging.getLogger(__name__)

_JOIN_S = 300.0
_CONTENTS: Final[dict[str, dict[str, Any]]] = {
    "constants": CONSTANTS,
    "functions": {"async_execution": async_execution},
    "options": {"TensorPipeRpcBackendOptions": TensorPipeRpcBackendOptions},
    "server_process_global_profiler": {"_server_process_global_profile": _server_process_global_profile},
}
constants, functions, options, server_process_global_profiler = [
    module(f"{__name__}.{name}", f"``torch.distributed.rpc.{name}``.", contents)
    for name, contents in _CONTENTS.items()
]


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Join a group of workers and start this one, as :func:`actorrpc.init_rpc` does.

    Raises:
        TypeError: there is no such backend, or no backend has these options.
        ValueError: this worker has no rank.
        RuntimeError: RPC is initialised already, or as :func:`actorrpc.init_rpc`.
    """
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = (
            backend_registry.BackendType.TENSORPIPE
            if rpc_backend_options is None
            else _backend_of(rpc_backend_options)
        )
    if rpc_backend_options is None:
        rpc_backend_options = construct_rpc_backend_options(backend)
    _check_rank(rank, world_size, rpc_backend_options.init_method)
    _check_there_is_none()
    store, rank, world_size = open_store(rpc_backend_options.init_method, rank, world_size, _JOIN_S)
    dist_autograd._init(rank)
    _start(backend, store, name, rank, world_size, rpc_backend_options)


def _backend_of(given: Any) -> Any:
    for candidate in backend_registry.BackendType:
        if isinstance(given, type(construct_rpc_backend_options(candidate))):
            if candidate.name != "TENSORPIPE":
                logger.warning("init_rpc: the backend is %s, because of its options", candidate)
            return candidate
    raise TypeError(f"Could not infer backend for options {given}")


def _check_rank(rank: int, world_size: int | None, init_method: str) -> None:
    """Check that a worker of a dynamic group has a rank, as torch does. (actorrpc itself would assign a rank.)"""
    if rank >= 0 or (world_size or 0) > 0:
        return
    kind = init_method.partition("://")[0]
    if kind == "env":
        if "RANK" not in os.environ:
            raise ValueError(
                "Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set"
            )
    elif "rank=" not in init_method.partition("?")[2]:
        raise ValueError(
            f"Error initializing torch.distributed using {kind}:// rendezvous: rank parameter missing"
        )


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Start a worker of a group, with a store of torch's for the rendezvous.

    Raises:
        RuntimeError: an argument has a wrong type, RPC is initialised already, or as :func:`init_rpc`.
    """
    expected = {
        "backend": (backend, backend_registry.BackendType),
        "store": (store, Store),
        "name": (name, str),
        "rank": (rank, numbers.Integral),
        "world_size": (world_size, (numbers.Integral, type(None))),
        "rpc_backend_options": (rpc_backend_options, RpcBackendOptions),
    }
    for argument, (given, kind) in expected.items():
        if not isinstance(given, kind):
            raise RuntimeError(f"Argument {argument} must be of type {kind} but got type {type(given)}")
    _start(backend, store, name, rank, world_size, rpc_backend_options)


def _check_there_is_none() -> None:
    if _is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")


def _start(backend: Any, store: Any, name: str, rank: int, world_size: int | None, options_: Any) -> None:
    _check_there_is_none()
    agent = init_backend(
        backend, store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=options_
    )
    api._init_rpc_states(agent)
    _set_profiler_node_id(rank)


@api._require_initialized
def _get_debug_info() -> dict[str, str]:
    """Return all counters of this worker, as text."""
    agent = _get_current_rpc_agent()
    return {
        **_rref_context_get_debug_info(),
        **agent.get_debug_info(),
        **dist_autograd._get_debug_info(),
    }


def _enable_jit_rref_pickle() -> None:
    """Do nothing: TorchScript cannot use these RRefs."""


_disable_jit_rref_pickle = _enable_jit_rref_pickle
_set_rpc_timeout = set_rpc_timeout


def _set_profiler_node_id(node_id: int) -> None:
    """Set the node id of this worker's events in profiles. Has no effect if torch was built without RPC."""
    set_profiler_rank(node_id)
