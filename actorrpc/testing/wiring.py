"""Wiring: gives a process that joins a group its faults, and takes them off at the end."""

from __future__ import annotations

from collections.abc import Callable

from actorrpc.core.agent import Agent
from actorrpc.rpc import api
from actorrpc.rpc.references import References
from actorrpc.testing import force
from actorrpc.testing.gate import FaultGate
from actorrpc.testing.variable import from_environment

__all__ = ["start"]


def start(agent: Agent, _references: References) -> Callable[[bool], None]:
    """Bring the faults of this process into force; returns what ends them.

    Raises:
        ConfigError: ``ACTORRPC_FAULT`` cannot be read.
    """
    gate = FaultGate(agent)
    faults = from_environment()
    force.begin(gate)
    for fault in faults:
        fault.start()

    def end(graceful: bool) -> None:
        force.begin(None)
        gate.close(graceful)

    return end


api.on_start.append(start)
