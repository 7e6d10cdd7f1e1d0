"""``torch.distributed.rpc.backend_registry``: the backends by name. actorrpc's backend has torch's name, ``TENSORPIPE``.

Registering a backend replaces ``BackendType`` by a new enum with one more member: read it from this module each time.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from actorrpc.compat.rpc import api
from actorrpc.compat.rpc.agent import TensorPipeAgent, TensorPipeRpcBackendOptions
from actorrpc.errors import RendezvousError
from actorrpc.rpc import api as core
from actorrpc.rpc.options import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """The functions that make the options and the agent of a backend."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


def _enum_of(members: dict[str, BackendValue]) -> Any:
    make: Any = enum.Enum  # Any, because type checkers accept only literal members
    made = make("BackendType", members, module=__name__)
    made.__repr__ = lambda self: f"BackendType.{self.name}"
    return made


BackendType: Any = _enum_of({})
_groups = itertools.count()  # counts the groups that this process has tried to join


def backend_registered(backend_name: str) -> bool:
    """Say whether a backend of this name is registered."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend; return its member of the new ``BackendType``.

    Args:
        construct_rpc_backend_options_handler: returns the backend's options.
        init_backend_handler: returns the agent, given ``store``, ``name``, ``rank``, ``world_size``, ``rpc_backend_options``.

    Raises:
        RuntimeError: a backend of this name is registered.
    """
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    members = {member.name: member.value for member in BackendType}
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _enum_of({**members, backend_name: value})
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Return the options of a backend."""
    handler = backend.value.construct_rpc_backend_options_handler
    return handler(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the agent of a backend."""
    return backend.value.init_backend_handler(*args, **kwargs)


def _check_kind(store: Any, world_size: int | None) -> None:
    """Check that either all members of a group, or none, give the size of the group."""
    mine = b"fixed" if world_size else b"dynamic"
    key = f"actorrpc/kind/{next(_groups)}"  # a program may use one store for several groups, one after the other
    if store.compare_set(key, "", mine) != mine:
        raise RendezvousError(
            "RPC group mixes statically and dynamically initialized members which is not supported."
        )


def _make_agent(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> TensorPipeAgent:
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}"
        )
    _check_kind(store, world_size)
    try:
        core.join(name, rank, world_size or None, rpc_backend_options, store)
    except RendezvousError as error:
        if "name of its own" not in str(error):
            raise
        raise RendezvousError(f"RPC worker name {name} is not unique: {error}") from error
    agent = TensorPipeAgent(core.group().agent, rpc_backend_options)
    api._set_and_start_rpc_agent(agent)
    return agent


register_backend("TENSORPIPE", TensorPipeRpcBackendOptions, _make_agent)
