"""For tests of programs that use actorrpc: losing and holding up messages on purpose, by their type.

    from actorrpc import testing

    with testing.drop("call", function="step", total=2) as lost:
        train()                                # two calls of step() end with RpcTimeoutError, at their deadlines
    assert lost.count == 2

    with testing.delay("answer", seconds=0.5, to="trainer*"):
        ...

A fault is one of the worker whose process starts it, and concerns what that worker sends, also to itself. Faults of other
processes come with their environment (``ACTORRPC_FAULT="drop call times=1; delay answer seconds=0.5"``) or options
(:class:`FaultyRpcBackendOptions`).
"""

from actorrpc.testing import wiring as _wiring
from actorrpc.testing.faults import Fault, delay, drop
from actorrpc.testing.message_types import MESSAGES
from actorrpc.testing.options import FaultyRpcBackendOptions
from actorrpc.testing.variable import faults_of

__all__ = ["MESSAGES", "Fault", "FaultyRpcBackendOptions", "delay", "drop", "faults_of"]

_wired = _wiring.start  # what the import above is for
