"""Wiring: gives a process that joins a group its faults, and takes them off at the end."""

from __future__ import annotations

from collections.abc import Callable

from actorrpc.core.agent import Agent
from actorrpc.rpc import api
from actorrpc.rpc.references import References
from actorrpc.testing import force
from actorrpc.testing.gate import FaultGate
from actorrpc.testing.kill_points import KillPoint
from actorrpc.testing.variable import from_environment

__all__ = ["start"]

_standing: list[KillPoint] = []  # those of the environment


def start(agent: Agent, _references: References) -> Callable[[bool], None]:
    """Bring the faults of this process into force; returns what ends them.

    Raises:
        ConfigError: ``ACTORRPC_FAULT`` cannot be read.
    """
    faults = from_environment()
    for old in _standing:  # of a former group: they may stand at its very end
        old.stop()
    _standing[:] = [fault for fault in faults if isinstance(fault, KillPoint)]
    gate = FaultGate(agent)
    force.begin(gate)
    for fault in faults:
        fault.start()

    def end(graceful: bool) -> None:
        force.begin(None)
        gate.close(graceful)

    return end


api.on_start.append(start)
