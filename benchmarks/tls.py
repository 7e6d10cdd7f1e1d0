"""What TLS costs: small calls and large tensors over TCP, with TLS 1.3 and without.

    python -m benchmarks.tls                # 9 rounds; prints one line of JSON
    python -m benchmarks.tls --rounds 3

Measured as in ``benchmarks.seals``: two pairs of processes take turns, and ratios are taken within a turn.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import ssl
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from actorrpc.testing.certificates import temporary_certificates
from benchmarks import seals

__all__ = ["main"]


def serve(place: str, rank: int, environment: Mapping[str, str], pipe: Connection | None) -> None:
    """Be one worker of a pair."""
    os.environ.update(environment)
    seals.serve(place, rank, False, pipe)


def _spread(values: Sequence[float]) -> list[float]:
    return [round(each, 3) for each in (statistics.median(values), min(values), max(values))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args(arguments).rounds
    context = multiprocessing.get_context("spawn")
    found: list[list[tuple[float, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, Mapping[str, str]] = {
            "plain": {},
            "tls": temporary_certificates(folder).environment,
        }
        processes, pipes = [], []
        for kind, environment in kinds.items():
            ours, theirs = context.Pipe()
            pipes.append(ours)
            for rank, pipe in ((0, theirs), (1, None)):
                process = context.Process(
                    target=serve, args=(os.path.join(folder, f"meet-{kind}"), rank, environment, pipe)
                )
                process.start()
                processes.append(process)
        for turn in range(rounds + 1):  # the first is not counted: connections and memory are made in it
            row = []
            for pipe in pipes:
                pipe.send(True)
                row.append(pipe.recv())
            if turn:
                found.append(row)
        for pipe in pipes:
            pipe.send(False)
        for process in processes:
            process.join()
    report: dict[str, Any] = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "openssl": ssl.OPENSSL_VERSION,
        "rounds": rounds,
    }
    for which, name in enumerate(("call, us", "64 MiB, GB/s")):
        plain, secure = ([row[kind][which] for row in found] for kind in (0, 1))
        report[name] = {
            "plain": _spread(plain),
            "tls": _spread(secure),
            "tls / plain": _spread([b / a for a, b in zip(plain, secure, strict=True)]),
        }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
