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
from actorrpc.testing.fault_filter import FaultFilter
from actorrpc.testing.faults import Fault, FaultOptions, apply_to
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


def faults_of(text: str) -> list[Fault]:
    """Return the faults that a text describes, not started.

    Example: ``drop call,remote times=2 to=worker1; delay answer seconds=0.5 function=step``. ``;`` separates faults. A fault
    consists of the action, the types, and the arguments of :func:`~actorrpc.testing.drop` or
    :func:`~actorrpc.testing.delay`; commas separate the items of a list.

    Raises:
        ConfigError: the text cannot be parsed; the message names the part.
    """
    return [_fault(part.split(), part.strip()) for part in text.split(";") if part.strip()]


def _fault(words: list[str], part: str) -> Fault:
    try:
        action, types, *fields = words
    except ValueError:
        raise ConfigError(f"{part!r} is no fault: say drop or delay, then types of messages") from None
    if action not in ("drop", "delay"):
        raise ConfigError(f"{part!r} is no fault: it begins with drop or delay, not with {action!r}")
    known = {each.name: str(each.type) for each in dataclasses.fields(FaultOptions) if each.metadata}
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
    if ("seconds" in given) != (action == "delay"):
        raise ConfigError(f"{part!r} is no fault: a delay has seconds=, and a drop has none")
    return Fault("drop" if action == "drop" else "delay", types.split(","), **given)


def from_environment() -> list[Fault]:
    """Return the faults that ``ACTORRPC_FAULT`` describes.

    Raises:
        ConfigError: the variable cannot be parsed.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        return faults_of(text)
    except ConfigError as error:
        raise ConfigError(f"{VARIABLE}={text!r} cannot be used: {error}") from error


def start(worker: Worker) -> Callable[[bool], None]:
    """Bring the faults of this process into force; return a function that ends them.

    Raises:
        ConfigError: ``ACTORRPC_FAULT`` cannot be parsed.
    """
    faults = from_environment()
    fault_filter = FaultFilter(worker.agent)
    apply_to(fault_filter)
    for fault in faults:
        fault.start()

    def shut_down(graceful: bool) -> None:
        apply_to(None)
        fault_filter.close(graceful)

    return shut_down


api.on_start.append(start)
