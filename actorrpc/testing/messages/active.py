"""Which faults are in force in this process: the place where those who start them and the agent's gate find each other.

Here is also which workers and functions the arguments of faults and kill points mean.
"""

from __future__ import annotations

import math
import numbers
import os
import threading
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from actorrpc.errors import ConfigError, WrongTypeError
from actorrpc.testing.messages.types import names_of
from actorrpc.wire.identity import WorkerInfo

if TYPE_CHECKING:
    from actorrpc.testing.messages.faults import Fault
    from actorrpc.testing.messages.gate import FaultGate
    from actorrpc.testing.messages.kill_points import KillPoint
    from actorrpc.testing.messages.types import Message

__all__ = ["begin", "enforce", "functions_named", "is_meant", "lift", "number", "worker", "workers_named"]


def number(name: str, value: Any, most: float = math.inf) -> float:
    """Return a number from 0 to ``most`` as a float.

    Raises:
        ConfigError: it is none, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise WrongTypeError(f"{name} must be a number, not {value!r}")
    found = float(value)
    if math.isnan(found) or math.isinf(found) or not 0.0 <= found <= most:
        limit = "" if math.isinf(most) else f" and at most {most:g}"
        raise ConfigError(f"{name} must be at least 0{limit}, not {value!r}")
    return found


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple, set, frozenset)) else [given]


def workers_named(given: Any) -> list[str]:
    """Return the names, patterns and ranks by which workers were named.

    Raises:
        WrongTypeError: something else was given.
    """
    found = []
    for each in _several(given):
        name = each.name if isinstance(each, WorkerInfo) else each
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            raise WrongTypeError(f"a worker is named by a str, an int rank or a WorkerInfo, not by {each!r}")
        found.append(str(name))
    return found


def is_meant(message: Message, workers: list[str]) -> bool:
    """Say whether a message's peer is among the workers that :func:`workers_named` returned."""
    peer = message.peer
    return any(worker == str(peer.rank) or fnmatchcase(peer.name, worker) for worker in workers)


def functions_named(given: Any) -> list[str]:
    """Return the names and patterns by which functions were named.

    Raises:
        WrongTypeError: something else was given.
    """
    found = []
    for each in _several(given):
        names = names_of(each)
        if not names:
            raise WrongTypeError(f"a function is named by itself or by a str, not by {each!r}")
        # Of an actor's method only the name is known where it is called.
        found += [each] if isinstance(each, str) else [names[-1], f":{names[0]}"]
    return found


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
