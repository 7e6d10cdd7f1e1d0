"""Which faults are in force in this process: the place where those who start them and the agent's gate find each other."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actorrpc.testing.faults import Fault
    from actorrpc.testing.gate import FaultGate
    from actorrpc.testing.kill_points import KillPoint

__all__ = ["begin", "enforce", "lift", "worker"]

# Guards the two below. The gate's and the faults' own locks are taken under it.
_lock = threading.Lock()
_gate: FaultGate | None = None
_worker = ""  # who this process is, or was last: points come even after the end of its agent
_early: list[Fault | KillPoint] = []  # started before there was an agent


def enforce(fault: Fault | KillPoint) -> None:
    """Bring a fault or kill point into force: now, or when this process joins a group."""
    with _lock:
        if _gate is None:
            _early.append(fault)
        else:
            _gate.add(fault)


def lift(fault: Fault | KillPoint) -> None:
    """Take a fault or kill point out of force. What it holds up leaves now."""
    with _lock:
        if fault in _early:
            _early.remove(fault)
        gate = _gate
    if gate is not None:
        gate.remove(fault)


def begin(gate: FaultGate | None) -> None:
    """Name the gate of the agent that is in force in this process; it gets the faults that wait for one."""
    global _gate, _worker
    with _lock:
        _gate = gate
        if gate is not None:
            _worker = gate.worker
            early, _early[:] = _early[:], []
            for fault in early:
                gate.add(fault)


def worker() -> str:
    """Return the name of the worker that this process is, or was last; empty where it has been none."""
    return _worker


def _forget() -> None:
    """In a forked child: another thread may have held the lock."""
    global _gate, _lock, _worker
    _lock = threading.Lock()
    _gate = None
    _worker = ""
    _early.clear()


os.register_at_fork(after_in_child=_forget)
