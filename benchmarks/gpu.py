"""Tensors of a GPU between two workers on it, by a device map: actorrpc and torch.distributed.rpc.

    python -m benchmarks.gpu                     # 64 KiB to 256 MiB; writes results/gpu.json; two minutes
    python -m benchmarks.gpu --quick             # fewer rounds and sizes; a file of another name, as with all options
    python -m benchmarks.gpu --device cpu        # the same with tensors of the CPU, for machines without a GPU

The groups of both are alive at the same time and take turns; ratios are computed within a turn, and the median, the lowest
and the highest are reported. "argument": the callee waits until the tensor has arrived and returns a number; "echo": it sends
the tensor back, and GB/s counts both ways. A call ends when the GPU has finished all its work for it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

__all__ = ["PEERS", "Pair", "main", "measure", "missing", "peers"]

RESULTS = Path(__file__).resolve().parent / "results"
PEERS = {"torch": "torch.distributed.rpc", "actorrpc": "actorrpc.rpc"}
SCENARIOS = ("argument", "echo")
KIB = 1 << 10


def missing(device: str) -> str:
    """Return the reason why a device cannot be measured; empty if it can."""
    if torch.device(device).type != "cuda" or torch.cuda.is_available():
        return ""
    return f"this torch ({torch.__version__}) sees no CUDA device"


def peers() -> list[str]:
    """Return the names of the peers that are installed here."""
    theirs: Any = torch.distributed.is_available() and importlib.import_module("torch.distributed.rpc")
    has_torch = theirs and theirs.is_available() and hasattr(theirs.BackendType, "TENSORPIPE")
    return [name for name in PEERS if name != "torch" or has_torch]


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
    rpc: Any = importlib.import_module(PEERS[peer])
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


# -- the measurement ---------------------------------------------------------------------------------


def measure(
    chosen: Sequence[str], device: str, sizes: Sequence[int], rounds: int, seconds: float = 0.2
) -> tuple[dict[str, dict[str, dict[str, list[float]]]], dict[str, str]]:
    """Return GB/s of each round by scenario, size and peer; and the errors by peer. A peer that fails is then left out."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        pairs = {peer: Pair(peer, device, folder) for peer in chosen}
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
        "--quick", action="store_true", help="3 rounds instead of 9, and no size above 16 MiB"
    )
    parser.add_argument("--out", type=Path, help="where results go; default results/gpu[-quick].json")
    options = parser.parse_args(arguments)
    if reason := missing(options.device):
        print(f"nothing was measured: {reason}. `--device cpu` measures tensors of the CPU.")
        return 0
    sizes = [int(size * KIB) for size in options.sizes]
    if options.quick:
        sizes = [size for size in sizes if size <= 16 << 20]
    chosen = peers()
    found, failed = measure(chosen, options.device, sizes, options.rounds or (3 if options.quick else 9))
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
    }
    print(f"{document['device']}, torch {torch.__version__}; GB/s, median (lowest to highest)")
    for scenario, by_size in document["results"].items():
        for size, lines in by_size.items():
            for peer, line in lines.items():
                ratio = f"  {line['ratio_to_torch']:.2f} of torch's" if "ratio_to_torch" in line else ""
                print(
                    f"{scenario:9} {int(size) // KIB:8} KiB  {peer:9} {line['gb_per_s']:8.3f} "
                    f"({line['lowest']:.3f} to {line['highest']:.3f}){ratio}"
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
