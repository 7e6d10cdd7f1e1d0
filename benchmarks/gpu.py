"""Tensors of a GPU between two workers on it, by a device map: actorrpc and torch.distributed.rpc; and the memory afterwards.

    python -m benchmarks.gpu                     # 64 KiB to 256 MiB; writes results/gpu.json; four minutes
    python -m benchmarks.gpu --quick             # fewer rounds, sizes and kills; a file of another name, as with all options
    python -m benchmarks.gpu --device cpu        # the same with tensors of the CPU, for machines without a GPU

"actorrpc" sends from device to device (setting ``device_lane_bytes``), "actorrpc-host" through host memory, and "copy" is a copy
within the device in one process, the limit of all others. All groups are alive at the same time and take turns; ratios are
computed within a turn, and the median, the lowest and the highest are reported. "argument": the callee waits until the tensor
has arrived and returns a number; "echo": it sends the tensor back, and GB/s counts both ways. A call ends when the GPU has
finished all its work for it.

"memory": the bytes that torch has allocated in the caller ("allocated") and that the driver has left ("free"), before and after
transfers of 16 MiB, and before and after receivers were killed, each while it received a tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

__all__ = ["PEERS", "Copies", "Pair", "main", "measure", "memory", "missing", "peers"]

RESULTS = Path(__file__).resolve().parent / "results"
KIB = 1 << 10
LANE = {"ACTORRPC_DEVICE_LANE_BYTES": str(1 << 30)}
PEERS: dict[str, tuple[str, dict[str, str]]] = {
    "torch": ("torch.distributed.rpc", {}),
    "actorrpc": ("actorrpc.rpc", LANE),
    "actorrpc-host": ("actorrpc.rpc", {}),
}
SCENARIOS = ("argument", "echo")
TRANSFERS = 1000
AT_ONCE = 10  # receivers that are alive at the same time
RELEASED_S = 45.0  # a sender keeps blocks for 30 s after a receiver was killed
MEMORY_S = 240.0


def missing(device: str) -> str:
    """Return the reason why a device cannot be measured; empty if it can."""
    if torch.device(device).type != "cuda" or torch.cuda.is_available():
        return ""
    return f"this torch ({torch.__version__}) sees no CUDA device"


def peers(device: str) -> list[str]:
    """Return the names of the peers that are installed here, and differ for the device."""
    theirs: Any = torch.distributed.is_available() and importlib.import_module("torch.distributed.rpc")
    has_torch = theirs and theirs.is_available() and hasattr(theirs.BackendType, "TENSORPIPE")
    left_out = {
        *([] if has_torch else ["torch"]),
        *(["actorrpc-host"] if torch.device(device).type == "cpu" else []),
    }
    return [name for name in PEERS if name not in left_out]


# -- the workers -----------------------------------------------------------------------------------


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _take(tensor: torch.Tensor) -> int:
    _settle(tensor.device)
    return tensor.numel()


def _echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _calls(rpc: Any, device: str, scenario: str, size: int, count: int) -> float:
    """Return the seconds of so many calls, one after the other."""
    place = torch.device(device)
    tensor = torch.full((size,), 7, dtype=torch.uint8, device=place)
    _settle(place)
    begin = time.perf_counter()
    for _ in range(count):
        if scenario == "echo":
            back = rpc.rpc_sync("callee", _echo, (tensor,))
            _settle(place)
        elif rpc.rpc_sync("callee", _take, (tensor,)) != size:
            raise AssertionError("another tensor has arrived")
    took = time.perf_counter() - begin
    if scenario == "echo" and (back.device != place or not torch.equal(back, tensor)):
        raise AssertionError("the tensor that came back is not what was sent")
    return took


def _work(peer: str, rank: int, store: str, device: str, orders: Connection | None) -> None:
    module, variables = PEERS[peer]
    os.environ.update(variables)
    rpc: Any = importlib.import_module(module)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    if rank == 0:
        options.set_device_map("callee", {device: device})
    rpc.init_rpc(("caller", "callee")[rank], rank=rank, world_size=2, rpc_backend_options=options)
    while orders is not None and (order := orders.recv()) is not None:
        try:
            orders.send(_calls(rpc, device, *order))
        except Exception as error:
            orders.send(f"{type(error).__name__}: {error}")
    rpc.shutdown()


class Pair:
    """Two workers of one peer, in processes of their own."""

    def __init__(self, peer: str, device: str, folder: str) -> None:
        fresh = multiprocessing.get_context("spawn")  # nobody may use a GPU that was opened before a fork
        self._orders, theirs = fresh.Pipe()
        store = os.path.join(folder, peer)
        self._processes = [
            fresh.Process(
                target=_work, args=(peer, rank, store, device, None if rank else theirs), daemon=True
            )
            for rank in range(2)
        ]
        for process in self._processes:
            process.start()
        theirs.close()

    def seconds(self, scenario: str, size: int, count: int) -> float:
        """Return how long so many calls take.

        Raises:
            RuntimeError: they failed.
        """
        try:
            self._orders.send((scenario, size, count))
            found = self._orders.recv()
        except (EOFError, OSError):
            raise RuntimeError("the worker has ended; what it wrote says why") from None
        if isinstance(found, str):
            raise RuntimeError(found)
        return float(found)

    def close(self) -> None:
        """End both workers."""
        try:
            self._orders.send(None)
        except OSError:
            pass
        for process in self._processes:
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._orders.close()


class Copies:
    """Copies within the device, in this process."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def seconds(self, scenario: str, size: int, count: int) -> float:
        """Return how long so many copies take, two for each "echo"."""
        source = torch.full((size,), 7, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        _settle(self._device)
        begin = time.perf_counter()
        for _ in range(count * (2 if scenario == "echo" else 1)):
            target.copy_(source)
            _settle(self._device)
        return time.perf_counter() - begin

    def close(self) -> None:
        """Do nothing."""


# -- the memory --------------------------------------------------------------------------------------


def _die(tensor: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _receive(rank: int, count: int, store: str) -> None:
    rpc: Any = importlib.import_module("actorrpc.rpc")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"callee{rank}", rank=rank, world_size=count + 1, rpc_backend_options=options)
    rpc.shutdown()


@contextlib.contextmanager
def _group(device: str, folder: str, count: int) -> Iterator[Any]:
    """Make this process the caller of a group with so many callees; yields the module of actorrpc's RPC."""
    fresh = multiprocessing.get_context("spawn")
    store = os.path.join(folder, f"store-{time.monotonic_ns()}")
    processes = [
        fresh.Process(target=_receive, args=(rank, count, store), daemon=True) for rank in range(1, count + 1)
    ]
    for process in processes:
        process.start()
    rpc: Any = importlib.import_module("actorrpc.rpc")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    for rank in range(1, count + 1):
        options.set_device_map(f"callee{rank}", {device: device})
    try:
        rpc.init_rpc("caller", rank=0, world_size=count + 1, rpc_backend_options=options)
        yield rpc
        rpc.shutdown(graceful=False)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def _left(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {"allocated": 0, "free": 0}
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return {"allocated": torch.cuda.memory_allocated(device), "free": torch.cuda.mem_get_info(device)[0]}


def _through_device_memory() -> int:
    """Return the bytes that this worker has sent through memory of the device."""
    state = importlib.import_module("actorrpc").state(30)
    return sum(
        each.device_placed
        for worker in state.workers
        if worker.name == "caller"
        for each in worker.connections
    )


def _use_memory(device: str, folder: str, kills: int, answers: Connection) -> None:
    """Send tensors, and kill receivers; answer with the memory before and after."""
    os.environ.update(LANE)
    place = torch.device(device)
    tensor = torch.full((16 << 20,), 7, dtype=torch.uint8, device=place)
    with _group(device, folder, 1) as rpc:
        for _ in range(20):
            rpc.rpc_sync("callee1", _take, (tensor,))
        before = _left(place)
        for _ in range(TRANSFERS):
            rpc.rpc_sync("callee1", _take, (tensor,))
        sent = {"count": TRANSFERS, "through_device_memory": _through_device_memory()}
        found = {"transfers": {**sent, "before": before, "after": _left(place)}}
    before, killed, took = _left(place), 0, 0.0
    while killed < kills:
        count = min(AT_ONCE, kills - killed)
        with _group(device, folder, count) as rpc:
            for rank in range(1, count + 1):
                for _ in range(3):
                    rpc.rpc_sync(f"callee{rank}", _take, (tensor,))
                try:
                    rpc.rpc_sync(f"callee{rank}", _die, (tensor,))
                except RuntimeError:
                    killed += 1
            if killed == kills > AT_ONCE:  # otherwise the memory is released at the end of the group
                begin = time.perf_counter()
                while _left(place)["allocated"] > before["allocated"] and took < RELEASED_S:
                    time.sleep(0.1)
                    took = time.perf_counter() - begin
    found["killed receivers"] = {
        "count": killed,
        "released_in_s": took,
        "before": before,
        "after": _left(place),
    }
    answers.send(found)


def memory(device: str, kills: int) -> dict[str, Any]:
    """Return the memory before and after transfers, and before and after receivers were killed.

    Raises:
        RuntimeError: it has failed.
    """
    fresh = multiprocessing.get_context("spawn")
    answers, theirs = fresh.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        process = fresh.Process(target=_use_memory, args=(device, folder, kills, theirs))
        process.start()
        theirs.close()
        try:
            if not answers.poll(MEMORY_S):
                raise RuntimeError(f"the process has not ended within {MEMORY_S:.0f} s")
            return dict(answers.recv())
        except EOFError:
            raise RuntimeError("the process has ended; what it wrote says why") from None
        finally:
            process.join(10)
            process.kill()
            process.join()
            answers.close()


# -- the measurement ---------------------------------------------------------------------------------


def measure(
    chosen: Sequence[str], device: str, sizes: Sequence[int], rounds: int, seconds: float = 0.2
) -> tuple[dict[str, dict[str, dict[str, list[float]]]], dict[str, str]]:
    """Return GB/s of each round by scenario, size and peer; and the errors by peer. A peer that fails is then left out."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        pairs: dict[str, Pair | Copies] = {peer: Pair(peer, device, folder) for peer in chosen}
        pairs["copy"] = Copies(device)
        try:
            for scenario in SCENARIOS:
                for size in sizes:
                    rates = found.setdefault(scenario, {}).setdefault(str(size), {peer: [] for peer in pairs})
                    counts = dict.fromkeys(pairs, 0)
                    for turn in range(
                        rounds + 1
                    ):  # the first is not counted: connections and memory are made in it
                        for peer in [each for each in pairs if each not in failed]:
                            try:
                                took = pairs[peer].seconds(scenario, size, counts[peer] or 3)
                            except RuntimeError as error:
                                failed[peer] = f"{scenario} of {size} bytes: {error}"
                                continue
                            if not turn:
                                counts[peer] = max(1, min(2000, int(seconds * 3 / took)))
                                continue
                            ways = 2 if scenario == "echo" else 1
                            rates[peer].append(ways * size * counts[peer] / took / 1e9)
        finally:
            for pair in pairs.values():
                pair.close()
    return found, failed


def summary(rates: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return for each peer its rates, and the ratio to torch's in the same round."""
    theirs = rates.get("torch", [])
    lines: dict[str, dict[str, float]] = {}
    for peer, each in rates.items():
        if each:
            lines[peer] = {"gb_per_s": statistics.median(each), "lowest": min(each), "highest": max(each)}
            if theirs and peer != "torch":
                ratios = [mine / other for mine, other in zip(each, theirs, strict=False)]
                lines[peer]["ratio_to_torch"] = statistics.median(ratios)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[64, 1024, 16 * 1024, 256 * 1024], metavar="KIB"
    )
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="3 rounds instead of 7, 10 kills instead of 50, and no size above 16 MiB",
    )
    parser.add_argument("--out", type=Path, help="where results go; default results/gpu[-quick].json")
    options = parser.parse_args(arguments)
    if reason := missing(options.device):
        print(f"nothing was measured: {reason}. `--device cpu` measures tensors of the CPU.")
        return 0
    sizes = [int(size * KIB) for size in options.sizes]
    if options.quick:
        sizes = [size for size in sizes if size <= 16 << 20]
    chosen = peers(options.device)
    found, failed = measure(chosen, options.device, sizes, options.rounds or (3 if options.quick else 7))
    used: dict[str, Any] = {}
    try:
        used = memory(options.device, 10 if options.quick else 50)
    except RuntimeError as caught:
        failed["memory"] = str(caught)
    on_gpu = torch.device(options.device).type == "cuda"
    document: dict[str, Any] = {
        "about": "GB/s of tensors between two workers on one device, by a device map",
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(options.device) if on_gpu else "the CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "processors": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "compared": chosen,
        "failed": failed,
        "results": {
            scenario: {size: summary(rates) for size, rates in by_size.items()}
            for scenario, by_size in found.items()
        },
        "memory": used,
    }
    print(f"{document['device']}, torch {torch.__version__}; GB/s, median (lowest to highest)")
    for scenario, by_size in document["results"].items():
        for size, lines in by_size.items():
            for peer, line in lines.items():
                ratio = f"  {line['ratio_to_torch']:.2f} of torch's" if "ratio_to_torch" in line else ""
                print(
                    f"{scenario:9} {int(size) // KIB:8} KiB  {peer:13} {line['gb_per_s']:8.3f} "
                    f"({line['lowest']:.3f} to {line['highest']:.3f}){ratio}"
                )
    for what, figures in used.items():
        kept, lost = (figures["after"][key] - figures["before"][key] for key in ("allocated", "free"))
        print(
            f"{figures['count']} {what}: {kept:+} bytes allocated by torch, {lost:+} bytes free according to the driver"
        )
    for peer, error in failed.items():
        print(f"{peer} failed: {error}")
    path = options.out
    if path is None and on_gpu:
        whole = not options.quick and arguments is None and len(sys.argv) == 1
        path = RESULTS / f"gpu{'' if whole else '-quick'}.json"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
