"""A group of one worker in the test's own process, on which actors can be made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import actorrpc.actors.api  # noqa: F401 (brings actors into force with RPC)
from actorrpc.actors.context import Runtime, runtime
from actorrpc.rpc import TensorPipeRpcBackendOptions, init_rpc, shutdown

__all__ = ["alone"]


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[Runtime]:
    """Join a group of one worker and leave it at the end. Tests must drop their actors before that."""
    init_rpc(
        "w0",
        rank=0,
        world_size=1,
        rpc_backend_options=TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store"),
    )
    try:
        yield runtime()
    finally:
        gc.collect()
        shutdown()
