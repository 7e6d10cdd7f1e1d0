"""The scenarios that a worker runs on request of the driver: one small function for each measurement.

The same code runs on both backends: it only uses ``context.rpc``, the module ``torch.distributed.rpc`` or
``actorrpc.rpc``. The functions of the first group are called by RPC; the driver requests the functions in
``SCENARIOS`` by name. These run on the worker's main thread, return plain dictionaries of numbers, and never
pin, print or sleep.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from actorrpc.config import Settings
from actorrpc.transport.tls import Tls
from benchmarks.series import percentile

__all__ = ["SCENARIOS", "Context"]


@dataclass(slots=True)
class Context:
    """One worker of one group: its backend, its rank, and the worker it calls."""

    rank: int = 0
    partner: str = ""
    rpc: Any = None
    stop_busy: threading.Event = field(default_factory=threading.Event)
    busy: threading.Thread | None = None


# -- the remote side -----------------------------------------------------------------------------------


def answer() -> int:
    """Answer a call without arguments."""
    return 1


def size_of(tensor: torch.Tensor) -> int:
    """Take a tensor, answer with a number."""
    return tensor.numel()


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor."""
    return tensor


class Answerer:
    """The value of a reference."""

    def answer(self) -> int:
        """Answer a call without arguments."""
        return 1


def count_of(tensors: list[torch.Tensor]) -> int:
    """Take tensors, answer with a number."""
    return len(tensors)


def cpu_seconds() -> float:
    """Return the processor time this process has used, all threads, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def full_collections() -> int:
    """Return the number of full garbage collections of this process."""
    return int(gc.get_stats()[2]["collections"])


def resident_bytes() -> int:
    """Return this process's resident memory, after a garbage collection."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- the calling side ----------------------------------------------------------------------------------


def _both_cpu(context: Context) -> float:
    """Return the sum of the processor times of this process and of the called process."""
    remote: float = context.rpc.rpc_sync(context.partner, cpu_seconds)
    return cpu_seconds() + remote


def init(
    context: Context,
    backend: str,
    rank: int,
    world_size: int,
    partner: int,
    init_method: str,
    options: dict[str, Any],
) -> dict[str, float]:
    """Join the group; the answer says when that was done, on the clock all processes share."""
    rpc = importlib.import_module(backend)
    rpc.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=init_method, **options),
    )
    done = time.monotonic()
    context.rpc, context.rank, context.partner = rpc, rank, f"w{partner}"
    return {"done": done}


def shutdown(context: Context) -> dict[str, float]:
    """Leave the group together with the others."""
    if context.rpc is not None:
        context.rpc.shutdown()
        context.rpc = None
    return {}


def _timed(context: Context, call: Callable[[], Any], calls: int, warm: int) -> dict[str, float]:
    """Make single calls one after another; microseconds per call."""
    clock = time.perf_counter_ns
    for _ in range(warm):
        call()
    times = [0] * calls
    gc.collect()
    full = full_collections() + context.rpc.rpc_sync(context.partner, full_collections)
    before = _both_cpu(context)
    for number in range(calls):
        start = clock()
        call()
        times[number] = clock() - start
    used = _both_cpu(context) - before
    full = full_collections() + context.rpc.rpc_sync(context.partner, full_collections) - full
    times.sort()
    return {
        "p50": percentile(times, 0.50) / 1e3,
        "p99": percentile(times, 0.99) / 1e3,
        "p999": percentile(times, 0.999) / 1e3,
        "longest": times[-1] / 1e3,
        "full": full,
        "cpu": used / calls * 1e6,
    }


def roundtrip(context: Context, calls: int, warm: int) -> dict[str, float]:
    """Call a function without arguments."""
    rpc_sync, partner = context.rpc.rpc_sync, context.partner
    return _timed(context, lambda: rpc_sync(partner, answer), calls, warm)


def first_call(context: Context) -> dict[str, float]:
    """Make the first call of a group, which connects and performs the handshakes; milliseconds."""
    start = time.perf_counter()
    context.rpc.rpc_sync(context.partner, answer)
    return {"time": (time.perf_counter() - start) * 1e3}


def handshakes(context: Context, count: int) -> dict[str, float]:
    """Perform TLS handshakes over TCP, one after another, with both sides in this process."""
    tls = Tls.load(Settings())
    assert tls is not None
    tls.serve()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        start = time.perf_counter()
        for _ in range(count):
            dialled = socket.create_connection(listener.getsockname())
            accepted = tls.accept(listener.accept()[0])
            thread = threading.Thread(target=tls.dial, args=(dialled, time.monotonic() + 10))
            thread.start()
            accepted.handshake_until(time.monotonic() + 10)
            thread.join()
            accepted.close()
            dialled.close()
        return {"rate": count / (time.perf_counter() - start)}


def reference_roundtrip(context: Context, calls: int, warm: int) -> dict[str, float]:
    """Call a method without arguments on the value of a reference."""
    reference = context.rpc.remote(context.partner, Answerer)
    return _timed(context, lambda: reference.rpc_sync().answer(), calls, warm)


def small_echo(context: Context, calls: int, warm: int) -> dict[str, float]:
    """Send 100 floats there and back, and say how many microseconds more than a call without arguments that takes."""
    rpc_sync, partner = context.rpc.rpc_sync, context.partner
    payload = torch.ones(100)
    plain = roundtrip(context, calls, warm)
    found = _timed(context, lambda: rpc_sync(partner, echo, args=(payload,)), calls, warm)
    return found | {"extra": found["p50"] - plain["p50"]}


def many_tensors(context: Context, calls: int, warm: int, count: int) -> dict[str, float]:
    """Send a list of small tensors as an argument."""
    rpc_sync, partner = context.rpc.rpc_sync, context.partner
    payload = [torch.ones(16, 8) for _ in range(count)]
    return _timed(context, lambda: rpc_sync(partner, count_of, args=(payload,)), calls, warm)


def pipelined(context: Context, windows: int, window: int, warm: int) -> dict[str, float]:
    """Start ``window`` calls, then wait for all of them, ``windows`` times over."""
    rpc_async, partner = context.rpc.rpc_async, context.partner

    def once() -> None:
        futures = [rpc_async(partner, answer) for _ in range(window)]
        for future in futures:
            future.wait()

    for _ in range(warm):
        once()
    gc.collect()
    before, start = _both_cpu(context), time.perf_counter()
    for _ in range(windows):
        once()
    elapsed = time.perf_counter() - start
    used = _both_cpu(context) - before
    calls = windows * window
    return {"rate": calls / elapsed, "cpu": used / calls * 1e6}


def together(
    context: Context, start_at: float, seconds: float, window: int, warm: int, callee: str = ""
) -> dict[str, float]:
    """Call from ``start_at`` (shared clock) for ``seconds``, at the same time as other callers.

    A window of 0 makes single calls; otherwise ``window`` calls are in flight at a time. ``callee`` names the called worker;
    by default it is the partner.
    """
    rpc_sync, rpc_async, partner = context.rpc.rpc_sync, context.rpc.rpc_async, callee or context.partner
    clock = time.monotonic

    def batch() -> None:
        futures = [rpc_async(partner, answer) for _ in range(window)]
        for future in futures:
            future.wait()

    def single() -> None:
        rpc_sync(partner, answer)

    once, per_turn = (batch, window) if window else (single, 1)
    for _ in range(warm):
        once()
    gc.collect()
    before = _both_cpu(context)
    time.sleep(max(0.0, start_at - clock()))
    start = clock()
    stop_at, turns = start + seconds, 0
    while clock() < stop_at:
        once()
        turns += 1
    elapsed = clock() - start
    used = _both_cpu(context) - before
    return {"calls": float(turns * per_turn), "elapsed": elapsed, "used": used}


def tensor(context: Context, size: int, repeats: int, direction: str, warm: int) -> dict[str, float]:
    """Send one tensor of ``size`` bytes again and again, as an argument or there and back."""
    rpc_sync, partner = context.rpc.rpc_sync, context.partner
    payload = torch.full((size,), 7, dtype=torch.uint8)
    function: Callable[[torch.Tensor], Any] = echo if direction == "echo" else size_of
    for _ in range(warm):  # the first calls cause page faults and open segments
        rpc_sync(partner, function, args=(payload,))
    gc.collect()
    before, start = _both_cpu(context), time.perf_counter()
    for _ in range(repeats):
        rpc_sync(partner, function, args=(payload,))
    elapsed = time.perf_counter() - start
    used = _both_cpu(context) - before
    moved = size * repeats * (2 if direction == "echo" else 1)
    return {"rate": moved / elapsed / 1e9, "cpu": used / (moved / 1e9)}


def churn(context: Context, calls: int, warm: int, sizes: list[int]) -> dict[str, float]:
    """Make many calls and return the growth of the resident memory, of the process that grew more.

    Half of the calls are single, half in windows of 50; with ``sizes``, each echoes a tensor.
    """
    rpc_sync, rpc_async, partner = context.rpc.rpc_sync, context.rpc.rpc_async, context.partner
    payloads = [torch.zeros(size, dtype=torch.uint8) for size in sizes]

    def hundred() -> None:
        for number in range(50):
            if payloads:
                rpc_sync(partner, echo, args=(payloads[number % len(payloads)],))
            else:
                rpc_sync(partner, answer)
        if payloads:
            turn = [payloads[number % len(payloads)] for number in range(50)]
            futures = [rpc_async(partner, echo, args=(payload,)) for payload in turn]
        else:
            futures = [rpc_async(partner, answer) for _ in range(50)]
        for future in futures:
            future.wait()

    for _ in range(warm // 100):
        hundred()
    before = (resident_bytes(), int(rpc_sync(partner, resident_bytes)))
    for _ in range(calls // 100):
        hundred()
    after = (resident_bytes(), int(rpc_sync(partner, resident_bytes)))
    scale = 1e5 / calls / 1e6
    return {
        "growth": max(late - early for late, early in zip(after, before, strict=True)) * scale,
        "caller": (after[0] - before[0]) * scale,
        "callee": (after[1] - before[1]) * scale,
    }


# -- asked of either side ------------------------------------------------------------------------------


def usage(_context: Context) -> dict[str, float]:
    """Return this process's memory in MB: resident and private."""
    private = 0
    resident = resident_bytes()
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith("Private_"):
                private += int(line.split()[1]) * 1024
    return {"rss": resident / 1e6, "uss": private / 1e6}


def busy_start(context: Context) -> dict[str, float]:
    """Keep the interpreter busy on another thread until ``busy_stop``."""
    context.stop_busy.clear()

    def work() -> None:
        total = 0
        while not context.stop_busy.is_set():
            for number in range(2_000):
                total += number * number

    context.busy = threading.Thread(target=work, name="busy", daemon=True)
    context.busy.start()
    return {}


def busy_stop(context: Context) -> dict[str, float]:
    """End the thread of ``busy_start``."""
    context.stop_busy.set()
    if context.busy is not None:
        context.busy.join(10.0)
        context.busy = None
    return {}


SCENARIOS: dict[str, Callable[..., dict[str, float]]] = {
    function.__name__: function
    for function in (
        init, shutdown, roundtrip, first_call, handshakes, reference_roundtrip, small_echo, many_tensors, pipelined, together,
        tensor, churn, usage, busy_start, busy_stop,
    )
}  # fmt: skip
