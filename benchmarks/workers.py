"""The worker processes: pinned before torch is imported, told what to do by the driver.

``python -m benchmarks.workers fork FD CPUS MODULES`` pins itself to the CPUs, imports the modules
(comma-separated), and forks one worker for every channel that it receives. Forked workers are already pinned
and have torch imported, so a group starts in milliseconds. ``... solo FD CPUS MODULES`` is one worker that
shares no memory with any other process (for the memory figures).

A worker's main thread reads one request a line from its channel (JSON), runs the scenario, and answers
with one line. It waits in a blocking read, which uses no processor time and holds no lock. All these
processes end when the driver ends, for whatever reason.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["main", "work"]

PR_SET_PDEATHSIG = 1


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def work(channel: socket.socket) -> None:
    """Answer the driver's requests until it closes the channel.

    The first request is always ``begin``: whether this worker is raw, and its environment.
    """
    lines = channel.makefile("r", encoding="utf-8")
    scenarios: dict[str, Callable[..., Any]] = {}
    context: Any = None
    for line in lines:
        request = json.loads(line)
        reply: dict[str, Any]
        try:
            if request["do"] == "begin":
                os.environ.update(request["environment"])
                module = importlib.import_module(request["module"])
                raw = request["module"].endswith(".raw")
                scenarios = module.RAW_SCENARIOS if raw else module.SCENARIOS
                context = module.RawContext() if raw else module.Context()
                reply = {"value": {"pid": os.getpid()}}
            else:
                reply = {"value": scenarios[request["do"]](context, **request["with"])}
        except Exception:
            reply = {"error": traceback.format_exc()}
        channel.sendall(json.dumps(reply).encode() + b"\n")


def _fork_workers(orders: socket.socket) -> None:
    """Fork a worker for every received descriptor; answer with its process id."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers that end
    gc.collect()
    gc.freeze()
    parent = os.getpid()
    orders.sendall(b"ready\n")
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, 1, 1)
        if not message:
            return
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _die_with(parent)
            orders.close()
            work(socket.socket(fileno=descriptors[0]))
            os._exit(0)
        os.close(descriptors[0])
        orders.sendall(b"%d\n" % child)


def main(arguments: list[str]) -> None:
    """Pin, import, then serve."""
    how, descriptor, cpus, modules = arguments
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    _die_with(os.getppid())
    channel = socket.socket(fileno=int(descriptor))
    for module in filter(None, modules.split(",")):
        importlib.import_module(module)
    if how == "fork":
        _fork_workers(channel)
    else:
        work(channel)
    sys.stdout.flush()
    os._exit(0)  # a group that was not shut down may have threads that never end


if __name__ == "__main__":
    main(sys.argv[1:])
