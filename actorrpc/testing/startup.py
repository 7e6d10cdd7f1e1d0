"""Faults that are in force from a worker's start, given by the variable ``ACTORRPC_FAULT`` or by options."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from actorrpc.agent.context import Worker
from actorrpc.errors import ConfigError, WrongTypeError
from actorrpc.rpc import api
from actorrpc.rpc.options import TensorPipeRpcBackendOptions
from actorrpc.testing.messages import active
from actorrpc.testing.messages.fault_filter import FaultFilter
from actorrpc.testing.messages.faults import Fault, FaultOptions
from actorrpc.testing.messages.kill_points import KillOptions, KillPoint
from actorrpc.validation import read

__all__ = ["VARIABLE", "FaultyRpcBackendOptions", "faults_of", "from_environment", "start"]


class FaultyRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Options for ``init_rpc`` with faults that are in force from the first message to the end of the worker.

    Args:
        faults: faults made by :func:`drop` and :func:`delay`, not started.

    For the other keywords, see :class:`~actorrpc.TensorPipeRpcBackendOptions`.

    Raises:
        ConfigError: a value cannot be used.
    """

    def __init__(self, *, faults: Sequence[Fault] = (), **given: Any) -> None:
        super().__init__(**given)
        if not all(isinstance(fault, Fault) for fault in faults):
            raise WrongTypeError(f"faults are made with drop() and delay(), not {faults!r}")
        self.faults = tuple(faults)

    def ready(self, worker: Worker) -> None:
        """Start the faults."""
        for fault in self.faults:
            fault.start()


VARIABLE: Final = "ACTORRPC_FAULT"


def faults_of(text: str) -> list[Fault | KillPoint]:
    """Return the faults and kill points that a text describes, not started.

    Example: ``drop call,remote times=2 to=worker1; delay answer seconds=0.5 function=step``. ``;`` separates faults. A fault
    consists of the action, the types, and the arguments of :func:`~actorrpc.testing.drop` or
    :func:`~actorrpc.testing.delay`; commas separate the items of a list. A kill point consists of ``kill``, the point and the
    arguments of :func:`~actorrpc.testing.kill_at`: ``kill call.sent nth=3 action=stop on=worker1``.

    Raises:
        ConfigError: the text cannot be parsed; the message names the part.
    """
    return [_fault(part.split(), part.strip()) for part in text.split(";") if part.strip()]


def _fault(words: list[str], part: str) -> Fault | KillPoint:
    try:
        action, types, *fields = words
    except ValueError:
        raise ConfigError(
            f"{part!r} is no fault: say drop or delay, then types of messages, or kill, then a point"
        ) from None
    if action not in ("drop", "delay", "kill"):
        raise ConfigError(f"{part!r} is no fault: it begins with drop, delay or kill, not with {action!r}")
    options = KillOptions if action == "kill" else FaultOptions
    known = {each.name: str(each.type) for each in dataclasses.fields(options) if each.metadata}
    given: dict[str, Any] = {}
    for field in fields:
        name, sign, value = field.partition("=")
        if name not in known or not sign or (name == "at_once" and action == "delay"):
            raise ConfigError(
                f"{field!r} in {part!r} is not an argument; the arguments are: {', '.join(known)}"
            )
        try:
            given[name] = read(known[name], value)
        except ValueError:
            raise ConfigError(f"{field!r} in {part!r} has a value that cannot be used") from None
    if action == "kill":
        return KillPoint(types, **given)
    if ("seconds" in given) != (action == "delay"):
        raise ConfigError(f"{part!r} is no fault: a delay has seconds=, and a drop has none")
    return Fault("drop" if action == "drop" else "delay", types.split(","), **given)


def from_environment() -> list[Fault | KillPoint]:
    """Return the faults and kill points that ``ACTORRPC_FAULT`` describes.

    Raises:
        ConfigError: it cannot be read.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        return faults_of(text)
    except ConfigError as error:
        raise ConfigError(f"{VARIABLE}={text!r} cannot be used: {error}") from error


_standing: list[KillPoint] = []  # kill points from the environment


def start(worker: Worker) -> Callable[[bool], None]:
    """Bring the faults of this process into force; return a function that ends them.

    Raises:
        ConfigError: ``ACTORRPC_FAULT`` cannot be parsed.
    """
    faults = from_environment()
    for old in _standing:  # of the previous group: they stay in force until its very end
        old.stop()
    _standing[:] = [fault for fault in faults if isinstance(fault, KillPoint)]
    fault_filter = FaultFilter(worker.agent)
    active.begin(fault_filter)
    for fault in faults:
        fault.start()

    def end(graceful: bool) -> None:
        active.begin(None)
        fault_filter.close(graceful)

    return end


api.on_start.append(start)
