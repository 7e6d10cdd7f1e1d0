"""``torch.distributed.rpc._testing``: the agent that loses and delays messages, and its options.

Importing this package registers its backend, and so replaces ``BackendType``. Therefore only tests of this agent import it.
"""

from __future__ import annotations

from actorrpc.compat.rpc._testing import faulty_agent_backend_registry
from actorrpc.compat.rpc._testing.faulty_agent import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions

__all__ = [
    "FaultyTensorPipeAgent",
    "FaultyTensorPipeRpcBackendOptions",
    "faulty_agent_backend_registry",
    "is_available",
]


def is_available() -> bool:
    """Say whether there is a faulty agent in this build: always."""
    return True
