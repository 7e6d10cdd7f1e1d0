"""The weights of a trainer to other actors: by a process group, by a tree of calls, and by calls from the trainer.

    python -m benchmarks.broadcast               # 1, 16 and 64 MiB to 8 actors; writes results/broadcast.json
    python -m benchmarks.broadcast --quick       # fewer rounds, and a file of another name

All actors are processes of one host. Each way writes the values into existing tensors of the receivers. The ways take turns,
and ratios are computed within a turn; the median, the lowest and the highest are reported. "tcp" forces actorrpc's own
connections onto TCP, as between hosts, without shared memory; gloo always uses TCP.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import actorrpc
from actorrpc import get

__all__ = ["WAYS", "Holder", "main", "measure"]

RESULTS = Path(__file__).resolve().parent / "results"
MIB = 1 << 20
WAYS = ("group", "tree", "at once", "one by one")
ABOUT = {
    "group": "collective.broadcast(): gloo's tree over TCP",
    "tree": "a binary tree of calls: each receiver passes the weights on to two others",
    "at once": "the trainer calls all receivers, then waits for all",
    "one by one": "the trainer calls one receiver after the other",
}


@actorrpc.remote
class Holder:
    """The trainer, or a receiver of its weights."""

    def __init__(self, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self.weights = torch.zeros(0)

    def resize(self, size: int, value: float) -> None:
        """Make weights of ``size`` bytes."""
        self.weights = torch.full((size // 4,), value)

    def change(self, value: float) -> None:
        """Change all weights to a value."""
        self.weights.fill_(value)

    def ends(self) -> tuple[float, float]:
        """Return the first and the last weight."""
        return self.weights[0].item(), self.weights[-1].item()

    def take(self, weights: torch.Tensor, below: Sequence[Any] = ()) -> None:
        """Copy the weights, and send them to the actors in ``below``."""
        refs = _pass_on(weights, below)
        self.weights.copy_(weights)
        get(refs)

    def give(self, way: str, receivers: Sequence[Any]) -> None:
        """Send the weights to all receivers."""
        if way == "tree":
            get(_pass_on(self.weights, receivers))
        elif way == "at once":
            get([each.take.remote(self.weights) for each in receivers])
        else:
            for each in receivers:
                get(each.take.remote(self.weights))


def _pass_on(weights: torch.Tensor, below: Sequence[Any]) -> list[Any]:
    half = (len(below) + 1) // 2
    parts = [part for part in (below[:half], below[half:]) if part]
    return [part[0].take.remote(weights, list(part[1:])) for part in parts]


def measure(receivers: int, sizes: Sequence[int], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Return the milliseconds of each round, by size and way. Needs a running cluster."""
    trainer = Holder.remote()
    others = [Holder.remote() for _ in range(receivers)]
    everyone = [trainer, *others]
    collective = actorrpc.collective(everyone)
    found: dict[int, dict[str, list[float]]] = {}
    value = 0.0
    for size in sizes:
        get([each.resize.remote(size, -1.0) for each in everyone])
        found[size] = {way: [] for way in WAYS}
        for turn in range(rounds + 1):  # the first is not counted: connections and memory are made in it
            for way in WAYS:
                value += 1.0
                get(trainer.change.remote(value))
                begin = time.perf_counter()
                if way == "group":
                    get(collective.broadcast("weights", src=0))
                else:
                    get(trainer.give.remote(way, others))
                took = time.perf_counter() - begin
                if turn:
                    found[size][way].append(took * 1e3)
                if any(each != (value, value) for each in get([each.ends.remote() for each in others])):
                    raise AssertionError(f"{way} did not bring the weights to everyone")
    collective.destroy()
    return found


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return for each way its times, and the ratio to the group's in the same round."""
    return {
        way: {
            "ms": statistics.median(each),
            "lowest": min(each),
            "highest": max(each),
            "ratio_to_group": statistics.median(
                mine / group for mine, group in zip(each, times["group"], strict=True)
            ),
        }
        for way, each in times.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.broadcast", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--receivers", type=int, default=8)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 16, 64], metavar="MIB")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--transports", nargs="+", default=["auto", "tcp"], choices=["auto", "tcp"])
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 9")
    parser.add_argument("--out", type=Path, help="where results go; default results/broadcast[-quick].json")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (3 if options.quick else 9)
    sizes = [int(size * MIB) // 4 * 4 for size in options.sizes]
    document: dict[str, Any] = {
        "about": ABOUT,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processors": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "receivers": options.receivers,
        "rounds": rounds,
        "transports": {},
    }
    before = os.environ.get("ACTORRPC_TRANSPORT")
    for transport in options.transports:
        os.environ["ACTORRPC_TRANSPORT"] = transport
        try:
            # Actors that compute nothing share the processors that there are.
            with actorrpc.init(num_cpus=max(options.receivers + 1, os.cpu_count() or 1), log_to_driver=False):
                found = measure(options.receivers, sizes, rounds)
        finally:
            os.environ.pop("ACTORRPC_TRANSPORT")
            if before is not None:
                os.environ["ACTORRPC_TRANSPORT"] = before
        document["transports"][transport] = {size: summary(times) for size, times in found.items()}
        for size, ways in document["transports"][transport].items():
            print(f"{size / MIB:g} MiB to {options.receivers} actors, transport {transport}")
            for way, row in ways.items():
                print(
                    f"  {way:11} {row['ms']:9.1f} ms  ({row['lowest']:.1f} to {row['highest']:.1f})"
                    f"  {row['ratio_to_group']:6.2f} of the group's"
                )
            sys.stdout.flush()
    whole = not options.quick and arguments is None and len(sys.argv) == 1
    out = options.out or RESULTS / f"broadcast{'' if whole else '-quick'}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
