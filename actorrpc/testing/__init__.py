"""Tools for testing programs that use actorrpc: lost and delayed messages, bad networks, crashes at named points, leaks.

    from actorrpc import testing

    with testing.drop("call", function="step", total=2) as lost:
        train()                                # two calls of step() end with RpcTimeoutError, at their deadlines
    assert lost.count == 2

    with testing.delay("answer", seconds=0.5, to="trainer*"):
        ...

    with testing.kill_at("answer.sending", function="step", nth=3, action="stop"):
        ...                                    # before it sends the third answer of step(), this process stops: SIGSTOP

    with testing.FaultProxy(disturbances=[testing.reset(after=(1_000, 50_000))], seed=7) as proxy:
        ...                                    # start a worker with proxy.options: its connections break again and again

    with testing.InProcessCluster(3) as cluster:   # three workers, on threads, with a clock that the test sets
        call = cluster["worker0"].rpc_async("worker1", step, timeout=60.0)
        cluster.cut("worker0", "worker1")
        cluster.clock.advance(60.0)            # the call ends with RpcTimeoutError, after a few real milliseconds

``actorrpc.testing.certificates`` makes temporary certificates for TLS. ``actorrpc.testing.pytest_plugin`` limits the time of
tests, and has fixtures that report leaks.

A fault acts on the messages that the worker of its process sends, including messages to itself. To start faults in other
processes, set their environment (``ACTORRPC_FAULT="drop call times=1; delay answer seconds=0.5"``) or options
(:class:`FaultyRpcBackendOptions`).
"""

from actorrpc.testing import startup as _wiring
from actorrpc.testing.in_process import ClusterWorker, InProcessCluster
from actorrpc.testing.messages.faults import Fault, delay, drop
from actorrpc.testing.messages.kill_points import POINTS, KillPoint, KillPointError, kill_at
from actorrpc.testing.messages.types import MESSAGES
from actorrpc.testing.network.disturbances import (
    Disturbance,
    bit_flips,
    cut,
    half_close,
    latency,
    reset,
    stall,
    throttle,
)
from actorrpc.testing.network.proxy import FaultProxy
from actorrpc.testing.startup import FaultyRpcBackendOptions, faults_of
from actorrpc.testing.virtual_time import VirtualTime

__all__ = [
    "MESSAGES",
    "POINTS",
    "ClusterWorker",
    "Disturbance",
    "Fault",
    "FaultProxy",
    "FaultyRpcBackendOptions",
    "InProcessCluster",
    "KillPoint",
    "KillPointError",
    "VirtualTime",
    "bit_flips",
    "cut",
    "delay",
    "drop",
    "faults_of",
    "half_close",
    "kill_at",
    "latency",
    "reset",
    "stall",
    "throttle",
]

_wired = _wiring.start  # marks the import above as used
