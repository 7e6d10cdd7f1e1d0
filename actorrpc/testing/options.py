"""Options of a worker that has faults from its start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actorrpc.core.agent import Agent
from actorrpc.errors import WrongTypeError
from actorrpc.rpc.options import TensorPipeRpcBackendOptions
from actorrpc.testing.faults import Fault

__all__ = ["FaultyRpcBackendOptions"]


class FaultyRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Options for ``init_rpc`` with faults that are in force from the first message to the end of the worker.

    Args:
        faults: what :func:`drop` and :func:`delay` return, not started.

    The other keywords are those of :class:`~actorrpc.TensorPipeRpcBackendOptions`.

    Raises:
        ConfigError: a value cannot be used.
    """

    def __init__(self, *, faults: Sequence[Fault] = (), **given: Any) -> None:
        super().__init__(**given)
        if not all(isinstance(fault, Fault) for fault in faults):
            raise WrongTypeError(f"faults are made with drop() and delay(), not {faults!r}")
        self.faults = tuple(faults)

    def _ready(self, _agent: Agent) -> None:
        for fault in self.faults:
            fault.start()
