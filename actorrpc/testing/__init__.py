"""Tools for testing programs that use actorrpc: lost and delayed messages, workers in one process, leaks.

    from actorrpc import testing

    with testing.drop("call", function="step", total=2) as lost:
        train()                                # two calls of step() end with RpcTimeoutError, at their deadlines
    assert lost.count == 2

    with testing.delay("answer", seconds=0.5, to="trainer*"):
        ...

    with testing.InProcessCluster(3) as cluster:   # three workers, on threads, with a clock that the test sets
        call = cluster["worker0"].rpc_async("worker1", step, timeout=60.0)
        cluster.cut("worker0", "worker1")
        cluster.clock.advance(60.0)            # the call ends with RpcTimeoutError, after a few real milliseconds

``actorrpc.testing.pytest_plugin`` limits the time of tests, and has fixtures that report leaks.

A fault acts on the messages that the worker of this process sends, including messages to itself. To start faults in other
processes, set their environment (``ACTORRPC_FAULT="drop call times=1; delay answer seconds=0.5"``) or options
(:class:`FaultyRpcBackendOptions`).
"""

from actorrpc.testing import fault_filter  # noqa: F401 (applies the faults of ACTORRPC_FAULT to each worker that starts)
from actorrpc.testing.faults import Fault, FaultyRpcBackendOptions, delay, drop, faults_of
from actorrpc.testing.in_process import ClusterWorker, InProcessCluster
from actorrpc.testing.message_types import MESSAGES
from actorrpc.testing.virtual_time import VirtualTime

__all__ = [
    "MESSAGES",
    "ClusterWorker",
    "Fault",
    "FaultyRpcBackendOptions",
    "InProcessCluster",
    "VirtualTime",
    "delay",
    "drop",
    "faults_of",
]
