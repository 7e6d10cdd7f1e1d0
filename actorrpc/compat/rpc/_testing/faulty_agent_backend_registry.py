"""Registers the backend ``FAULTY_TENSORPIPE``."""

from __future__ import annotations

from typing import Any

from torch.distributed.distributed_c10d import Store

from actorrpc.compat.rpc import api, backend_registry
from actorrpc.compat.rpc._testing.faulty_agent import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions

__all__: list[str] = []


def _make_options(**given: Any) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(**given)


def _make_agent(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> FaultyTensorPipeAgent:
    if not isinstance(store, Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. {rpc_backend_options}"
        )
    made = backend_registry._make_agent(store, name, rank, world_size, rpc_backend_options)
    agent = FaultyTensorPipeAgent(made.agent, rpc_backend_options)
    api._set_and_start_rpc_agent(agent)
    return agent


backend_registry.register_backend("FAULTY_TENSORPIPE", _make_options, _make_agent)
