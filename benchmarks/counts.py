"""Counts of Python functions, C calls and system calls of both sides per operation, which are free of noise, unlike times.

    python -m benchmarks.counts                # all operations; writes results/counts.json
    python -m benchmarks.counts --only sync    # one of them
    python -m benchmarks.counts --only sync --names   # and which functions they are

Two workers with spinning off. A profile function counts function calls in all threads but the clock's. It slows the program
down, so where threads race, the counts differ a little from run to run. ``strace -c`` counts system calls, if it is installed
and may attach. The counts explain a difference that ``benchmarks.ab`` finds; no test checks them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch

import actorrpc
import actorrpc.autograd as dist_autograd
from actorrpc import rpc
from benchmarks import autograd_models as models

__all__ = ["OPERATIONS", "PEER", "Count", "Operation", "count", "count_all"]

_RESULTS: Final = Path(__file__).resolve().parent / "results" / "counts.json"
PEER: Final = "callee"
_PIPELINED: Final = 100
_CREATED: Final = 20
_STATE: Final = 200
_PORTIONS: Final = 3
_PACKAGE: Final = Path(actorrpc.__file__).parent

# All calls of all threads since counting began: appending is atomic.
_calls: list[Any] = []
_counting = False
# Clock threads, which are not counted: their work depends on the elapsed time, and so on the load of the machine.
_clocks: set[int | None] = set()


def _profile(frame: FrameType, event: str, arg: Any) -> None:
    if _counting and threading.get_ident() not in _clocks:
        if event == "call":
            _calls.append(frame.f_code)
        elif event == "c_call":
            _calls.append(arg)


def _watch() -> None:
    """Count calls in this thread, and in all threads that start later."""
    threading.setprofile(_profile)
    sys.setprofile(_profile)


def start_counting() -> None:
    """Begin to count. Runs in both workers."""
    global _counting
    _calls.clear()
    _clocks.update(each.ident for each in threading.enumerate() if each.name == "actorrpc-clock")
    _counting = True


def stop_counting() -> tuple[dict[str, int], dict[str, int]]:
    """Return how often each Python function and each C function was called since :func:`start_counting`."""
    global _counting
    _counting = False
    own = {stop_counting.__code__, start_counting.__code__}
    functions: Counter[str] = Counter()
    in_c: Counter[str] = Counter()
    for called in _calls:
        if not hasattr(called, "co_qualname"):
            in_c[getattr(called, "__qualname__", repr(called))] += 1
        elif called not in own:
            functions[_name(called)] += 1
    return functions, in_c


def _name(code: CodeType) -> str:
    path = Path(code.co_filename)
    where = str(path.relative_to(_PACKAGE).with_suffix("")) if _PACKAGE in path.parents else path.stem
    return f"{where}.{code.co_qualname}"


# -- the operations: each returns what does it once -------------------------------------------------------


def nothing() -> int:
    """Return a number."""
    return 1


def echo(value: Any) -> Any:
    """Return the argument."""
    return value


@actorrpc.remote
class Plain:
    """An actor with a state."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, k: int) -> int:
        """Add to the state."""
        self.value += k
        return self.value


class _Served:
    def nothing(self) -> int:
        return 1


def _sync() -> Callable[[], object]:
    return lambda: rpc.rpc_sync(PEER, nothing)


def _actor() -> Callable[[], object]:
    actor = Plain.options(worker=PEER).remote()
    return lambda: actorrpc.get(actor.add.remote(1))


def _actor_pipelined() -> Callable[[], object]:
    actor = Plain.options(worker=PEER).remote()
    return lambda: actorrpc.get([actor.add.remote(1) for _ in range(_PIPELINED)])


def _rref() -> Callable[[], object]:
    rref = rpc.remote(PEER, _Served)
    rref.to_here()
    return lambda: rref.rpc_sync().nothing()


def _tensor(size: int) -> Callable[[], Callable[[], object]]:
    def made() -> Callable[[], object]:
        tensor = torch.zeros(size // 4)
        return lambda: rpc.rpc_sync(PEER, echo, (tensor,))

    return made


def _tensors() -> Callable[[], object]:
    state = {f"layers.{number}.weight": torch.zeros(8, 8) for number in range(_STATE)}
    return lambda: rpc.rpc_sync(PEER, echo, (state,))


def _pipelined() -> Callable[[], object]:
    return lambda: torch.futures.wait_all([rpc.rpc_async(PEER, nothing) for _ in range(_PIPELINED)])


def _forward() -> Callable[[], object]:
    tensor = torch.zeros(100, requires_grad=True)

    def run() -> None:
        with dist_autograd.context():
            rpc.rpc_sync(PEER, echo, (tensor,))

    return run


def _hop() -> Callable[[], object]:
    tensor = torch.zeros(100, requires_grad=True)

    def run() -> None:
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [rpc.rpc_sync(PEER, echo, (tensor,)).sum()])

    return run


def _rnn() -> Callable[[], object]:
    return models.rnn_step(PEER, words=7, width=3, layers=4, length=3, batch=5)


def _creation() -> Callable[[], object]:
    kind = Plain.options(worker=PEER)
    kept: list[Any] = []

    def run() -> None:
        made = [kind.remote() for _ in range(_CREATED)]
        kept.extend(made)
        actorrpc.get([actorrpc.ready(each) for each in made])

    return run


class Operation:
    """A counted operation.

    Attributes:
        make: prepares the operation, and returns the function ``run`` that executes it.
        times: runs per portion while functions are counted; ten times as many for system calls.
        each: operations per run.
    """

    __slots__ = ("each", "make", "times")

    def __init__(self, make: Callable[[], Callable[[], object]], times: int = 50, each: int = 1) -> None:
        self.make, self.times, self.each = make, times, each


OPERATIONS: Final = {
    "sync": Operation(_sync),
    "actor": Operation(_actor),
    "actor pipelined": Operation(_actor_pipelined, 5, _PIPELINED),
    "rref": Operation(_rref),
    "echo 1 KiB": Operation(_tensor(1 << 10)),
    "echo 1 MiB": Operation(_tensor(1 << 20)),
    "each of 200 tensors": Operation(_tensors, 5, _STATE),
    "pipelined": Operation(_pipelined, 5, _PIPELINED),
    "forward": Operation(_forward),
    "hop": Operation(_hop),
    "RNN step": Operation(_rnn, 10),
    "creation": Operation(_creation, 5, _CREATED),
}


class Count(dict[str, float]):
    """The counts of one operation: ``functions``, ``C calls``, ``system calls`` (absent if they cannot be counted)."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, dict[str, float]] = {}


def count(
    operation: Operation,
    *,
    system: bool = True,
    also: Mapping[str, Callable[[Callable[[], object]], float]] = {},
) -> Count:
    """Count one operation. In the caller's process, with both workers in a group.

    Args:
        also: returns further counts, from the function that runs the operation.
    """
    run = operation.make()
    for _ in range(operation.times):
        run()
    found = Count()
    # Timers, heartbeats and waits for a processor add calls to some portions: the smallest portion has the fewest of them.
    here, there = min((_portion(run, operation.times) for _ in range(_PORTIONS)), key=_functions_of)
    total = operation.times * operation.each
    for index, what in enumerate(("functions", "C calls")):
        found[what] = (sum(here[index].values()) + sum(there[index].values())) / total
    for side, of in (("caller", here), ("callee", there)):
        for where, names in zip((side, f"{side} in C"), of, strict=True):
            found.names[where] = {function: times / total for function, times in names.items()}
    for what, look in also.items():
        found[what] = look(run) / operation.each
    if system:
        total *= 10
        calls = _system_calls(run, operation.times * 10)
        if calls is not None:
            found["system calls"] = sum(calls.values()) / total
            found.names["kernel"] = {call: times / total for call, times in calls.items()}
    return found


def _portion(run: Callable[[], object], times: int) -> tuple[Any, Any]:
    rpc.rpc_sync(PEER, start_counting)
    start_counting()
    for _ in range(times):
        run()
    here = stop_counting()
    return here, rpc.rpc_sync(PEER, stop_counting)


def _functions_of(portion: tuple[Any, Any]) -> int:
    return sum(sum(functions.values()) for functions, _ in portion)


def _system_calls(run: Callable[[], object], times: int) -> Counter[str] | None:
    if shutil.which("strace") is None:
        return None
    pids = [os.getpid(), rpc.rpc_sync(PEER, os.getpid)]
    with tempfile.NamedTemporaryFile("r") as table:
        arguments = ["strace", "-f", "-c", "-o", table.name, *(f"-p{pid}" for pid in pids)]
        with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            attached: set[int] = set()
            for line in process.stderr:
                attached.update(int(pid) for pid in re.findall(r"Process (\d+) attached", line))
                if attached.issuperset(pids):
                    break
            else:
                return None  # it may not attach here
            for _ in range(times):
                run()
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
        rows = re.findall(
            r"^\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+)\s+(?:\d+\s+)?(\w+)$", table.read(), re.MULTILINE
        )
    return Counter({name: int(calls) for calls, name in rows if name != "total"})


# -- the two processes ------------------------------------------------------------------------------------


def _worker(rank: int, rendezvous: str) -> None:
    _watch()
    torch.set_num_threads(1)  # its own threads sleep and wake as well
    models.HERE.choose("actorrpc.rpc")
    options = rpc.RpcBackendOptions(init_method=f"file://{rendezvous}")
    rpc.init_rpc(("caller", PEER)[rank], rank=rank, world_size=2, rpc_backend_options=options)


def serve(rendezvous: str) -> None:
    """Run the other worker."""
    _worker(1, rendezvous)
    rpc.shutdown()


def count_all(operations: Mapping[str, Operation], **options: Any) -> dict[str, Count]:
    """Start the other worker, form a group with it, and count. The options are as for :func:`count`."""
    os.environ.setdefault("ACTORRPC_SPIN_US", "0")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"{folder}/rendezvous"
        # Imported by name: the requests of this process use the counters of ``benchmarks.counts``, not of ``__main__``.
        serve = f"from benchmarks.counts import serve; serve({rendezvous!r})"
        arguments = [sys.executable, "-c", serve]
        with subprocess.Popen(arguments) as callee:
            found = _measure(operations, rendezvous, **options)
            callee.wait(30)
    return found


def _measure(operations: Mapping[str, Operation], rendezvous: str, **options: Any) -> dict[str, Count]:
    _worker(0, rendezvous)
    try:
        return {name: count(operation, **options) for name, operation in operations.items()}
    finally:
        rpc.shutdown()
        sys.setprofile(None)
        threading.setprofile(None)


def main() -> None:
    """Count, print, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(OPERATIONS), default=list(OPERATIONS))
    parser.add_argument("--names", action="store_true", help="say which they are")
    parser.add_argument("--no-system", action="store_true", help="count no system calls")
    parser.add_argument("--out", type=Path, help="where the results go")
    options = parser.parse_args()
    found = count_all({name: OPERATIONS[name] for name in options.only}, system=not options.no_system)
    for name, counted in found.items():
        shown = ", ".join(f"{value:.1f} {what}" for what, value in counted.items())
        print(f"{name}: {shown}")
        if options.names:
            for side, functions in counted.names.items():
                for function, times in sorted(functions.items(), key=lambda item: -item[1]):
                    print(f"    {side} {times:6.2f} {function}")
    out = options.out or (_RESULTS if options.only == list(OPERATIONS) else None)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    importlib.import_module("benchmarks.counts").main()
