"""The cost of a group by its size, from 1 to 10 000 workers: messages, connections, operations of the store, memory.

    python -m benchmarks.scale              # up to 64 processes, computed up to 10 000; two minutes; writes results/scale.json
    python -m benchmarks.scale --quick      # up to 8 processes, 1 000 computed; another file
    python -m benchmarks.scale --processes 2 16 64 --rest 0

Three kinds of figures, and the report says which is which:

* *simulated*: workers meet in virtual time, from a seed. The real code runs for up to 256 workers, and a model must make the
  same operations of the store for each worker; for larger groups only the model is run (``scale_meeting``);
* *in one process*: the real code of one worker, fed as in a group of n: its table, peers, barrier, heartbeats (``scale_parts``);
* *processes*: real processes on this machine, whose frames are counted; the formulas of ``FRAMES`` must give the same numbers,
  or this ends with an error. For larger groups, the figures are *computed* by the formulas.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import scale_meeting, scale_parts, scale_processes

__all__ = ["FRAMES", "check_frames", "check_meeting", "main", "rows"]

RESULTS: Final = Path(__file__).resolve().parent / "results"
SEED: Final = 7
HEARTBEAT_S: Final = 2.0
_SOFT_LIMIT: Final = 1024  # descriptors, on most systems

FRAMES: Final[dict[str, Callable[[int], dict[str, int]]]] = {
    # one call with a reference to a third worker's value, which does not depend on n
    "reference": lambda n: {"request": 4, "reply": 4, "notice": 5},
    # one call of each to each
    "all to all": lambda n: {"request": n * (n - 1), "reply": n * (n - 1)},
    # one pass from one worker to each of the others and back: calls, gradients, and the end of the context
    "backward": lambda n: {"request": 3 * (n - 1), "reply": 2 * (n - 1), "notice": 2 * (n - 1)},
    # the barrier at the end: each of the others asks rank 0, twice
    "shutdown": lambda n: {"request": 2 * (n - 1), "reply": 2 * (n - 1)},
}
"""Frames that arrive anywhere, by kind, in a group of n; introductions and goodbyes of connections are not among them."""


def check_meeting(sizes: Sequence[int], seed: int = SEED) -> None:
    """Check that the model makes the same operations of the store as the real code.

    Raises:
        AssertionError: it does not.
    """
    for dynamic in (False, True):
        for n in sizes:
            real = scale_meeting.real(n, seed, dynamic=dynamic)
            model = scale_meeting.model(n, seed, dynamic=dynamic)
            assert model.operations == real.operations, (n, dynamic)
            assert model.read == real.read, (n, dynamic)
            assert model.load == real.load, (n, dynamic)


def check_frames(found: dict[str, Any]) -> None:
    """Check that the formulas give the counts of real processes.

    Raises:
        AssertionError: they do not.
    """
    n = found["workers"]
    for name, formula in FRAMES.items():
        if name in found:
            counted = {
                kind: number
                for kind, number in found[name]["frames"].items()
                if kind in ("request", "reply", "notice", "failure")
            }
            wanted = formula(n)
            # On a busy machine, rank 0 may leave before its answers are sent: then the others also ask the next worker.
            spare = 2 * (n - 1) if name == "shutdown" else 0
            assert counted.keys() == wanted.keys(), (n, name, counted, wanted)
            for kind, number in wanted.items():
                assert abs(counted[kind] - number) <= spare, (n, name, counted, wanted)
    if n > 1:
        watched = found["watched by rank 0"]
        assert watched["frames"] == {"intro": n - 1}, (n, watched["frames"])
        assert watched["connections_of_rank_0"] == n - 1


def check_cluster(found: dict[str, Any]) -> None:
    """Check that a driver has received the frames that the formulas give.

    Raises:
        AssertionError: it has not.
    """
    n = found["workers"]
    assert found["joins"] == {"intro": n, "request": n}, found
    assert found["connections"] == n, found
    assert found["drain"].get("reply") == n + 2, found


def _mean(figures: dict[str, float], name: str) -> float:
    return round(float(figures[name]), 1)


def rows(
    sizes: Sequence[int],
    rates: dict[str, float],
    connection_kb: float | None = None,
    heartbeat_us: float | None = None,
) -> list[dict[str, Any]]:
    """Return a row of figures for each size of the group.

    Args:
        rates: the result of ``scale_parts.store_rates``.
        connection_kb: the memory of a connection, as measured in processes; None: not known.
        heartbeat_us: the processor time of one heartbeat frame, as measured in processes; None: not known.
    """
    made = []
    for n in sizes:
        fixed = scale_meeting.model(n, SEED).figures()
        dynamic = scale_meeting.model(n, SEED, dynamic=True).figures()
        memory = scale_parts.memory(n)
        busy = fixed["store_operations"] / rates["checks_per_s"] + fixed["store_bytes"] / rates["bytes_per_s"]
        mesh_kb = memory["table_bytes"] / 1024 + (n - 1) * (connection_kb or 0.0)
        made.append(
            {
                "workers": n,
                "start: store operations of a worker (simulated)": _mean(fixed, "operations_mean"),
                "start: of them polls (simulated)": _mean(fixed, "of_them_checks_mean"),
                "start: operations of a worker, group open to all (simulated)": _mean(
                    dynamic, "operations_mean"
                ),
                "start: kB that a worker reads (simulated)": round(fixed["read_bytes_mean"] / 1024, 1),
                "start: MB that the store sends (simulated)": round(fixed["store_bytes"] / 2**20, 1),
                "start: seconds that the store is busy (simulated / measured rate)": round(busy, 2),
                "table of a worker, kB (in one process)": round(memory["table_bytes"] / 1024),
                "reading it, processor s (in one process)": round(memory["reading_table_s"], 3),
                "connections of an idle worker (processes)": 0,
                "contact with all: connections of a worker (computed)": n - 1,
                "contact with all: descriptors of a worker, at least (computed)": 14 + 2 * (n - 1),
                "contact with all: MB of a worker (computed)": None
                if connection_kb is None
                else round(mesh_kb / 1024, 1),
                "a peer without a connection, kB (in one process)": round(
                    memory["peers_bytes"] / 1024 / n, 1
                ),
                "contact with all: heartbeat frames of a worker a second (computed)": (n - 1)
                * 2
                / HEARTBEAT_S,
                "contact with all: processor s a second for them (computed)": None
                if heartbeat_us is None
                else round((n - 1) * 2 / HEARTBEAT_S * heartbeat_us / 1e6, 4),
                "backward over all: frames (computed)": sum(FRAMES["backward"](n).values()),
                "end: connections of rank 0 (computed)": n - 1,
                "end: frames at rank 0 (computed)": sum(FRAMES["shutdown"](n).values()),
                "end: barrier at rank 0, processor s (in one process)": round(scale_parts.barrier(n), 3),
                "driver: connections (computed)": n,
                "driver: calls of one drain (computed)": n + 2,
            }
        )
    return made


def _table(made: Sequence[dict[str, Any]]) -> str:
    names = list(made[0])
    lines = [
        f"| {name} | " + " | ".join("-" if row[name] is None else f"{row[name]:,}" for row in made) + " |"
        for name in names
    ]
    return "\n".join([lines[0], "|---" * (len(made) + 1) + "|", *lines[1:]])


def _processes_table(found: Sequence[dict[str, Any]]) -> str:
    lines = []
    for each in found:
        lines.append(
            f"{each['workers']} processes: init_rpc {each['init_s']['all']:.2f} s, shutdown {each['shutdown_s']:.2f} s"
        )
        for stage in ("before", "idle", "watched by rank 0", "neighbours", "all to all"):
            row = each.get(stage)
            if row is None:
                continue
            rest = row.get("rest", {})
            lines.append(
                f"  {stage:18} rss {row['rss_kb_median'] / 1024:6.1f} MB, pss {row['pss_kb_median'] / 1024:5.1f} MB, "
                f"descriptors {row['descriptors_median']:.0f} (rank 0: {row['descriptors_of_rank_0']}), connections "
                f"{row['connections_median']:.0f} (rank 0: {row['connections_of_rank_0']})"
                + (
                    f", idle {rest['wakes_per_s']:.1f} wake-ups/s, {rest['cpu_us_per_s']:.0f} us/s, "
                    f"{rest['pings_per_s']:.2f} pings/s"
                    if rest
                    else ""
                )
            )
    return "\n".join(lines)


def _connection_kb(found: dict[str, Any]) -> float | None:
    """Return the memory of each further connection in a group, including its peer and buffers."""
    if "neighbours" not in found or found["workers"] < 16:
        return None
    after, before = found["all to all"], found["neighbours"]
    further = after["connections_median"] - before["connections_median"]
    return float(round((after["pss_kb_median"] - before["pss_kb_median"]) / further, 1))


def _heartbeat_us(found: dict[str, Any]) -> float | None:
    """Return the processor time of an idle worker per heartbeat frame, sent or received."""
    rest = found.get("all to all", {}).get("rest")
    if not rest or not rest["pings_per_s"]:
        return None
    # Each received ping is answered, and equally many pings are sent and answered: four frames.
    return float(round(rest["cpu_us_per_s"] / (4 * rest["pings_per_s"]), 1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it, print the tables, and write the figures. Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, and a file of another name")
    parser.add_argument("--processes", type=int, nargs="*", help="groups of so many real processes")
    parser.add_argument("--rest", type=float, help="seconds that they are left alone after each stage")
    parser.add_argument("--out", type=Path, help="where the figures go, without .json")
    given = parser.parse_args(arguments)
    quick = given.quick
    checked = (1, 2, 4, 8, 16, 64) if quick else (1, 2, 4, 8, 16, 64, 256)
    check_meeting(checked)
    print(f"the model asks the store for what the real code does, for {', '.join(map(str, checked))} workers")
    counts = given.processes if given.processes is not None else ([2, 8] if quick else [2, 4, 8, 16, 64])
    rest = given.rest if given.rest is not None else (0.0 if quick else 6.0)
    found = []
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            one = scale_processes.measure(
                count, f"file://{folder}/store", rest_s=rest if count == max(counts) else 0.0
            )
        check_frames(one)
        found.append(one)
    clusters = [scale_processes.measure_cluster(count) for count in ((2,) if quick else (2, 8))]
    for each in clusters:
        check_cluster(each)
    if counts:
        print(
            f"the formulas give the frames that were counted, for {', '.join(map(str, counts))} processes\n"
        )
        print(_processes_table(found), "\n")
    rates = scale_parts.store_rates(seconds=0.5 if quick else 2.0)
    connection_kb = _connection_kb(found[-1]) if found else None
    sizes = (10, 100, 1000) if quick else (1, 10, 100, 1000, 10_000)
    heartbeat_us = _heartbeat_us(found[-1]) if found else None
    made = rows(sizes, rates, connection_kb, heartbeat_us)
    print(_table(made), "\n")
    beats = [scale_parts.heartbeats(contacts, SEED) for contacts in (1, 10, 100, 1000)]
    for each in beats:
        print(
            f"idle, connected to {each['contacts']:,}: {each['frames_per_heartbeat']:,.0f} frames and "
            f"{each['wakes_per_heartbeat']:.1f} wake-ups of the clock in a heartbeat of {HEARTBEAT_S:g} s (simulated)"
        )
    print(f"\nthe store: {rates['checks_per_s']:,.0f} checks/s, {rates['bytes_per_s'] / 2**20:,.0f} MiB/s")
    print(
        f"a connection: {connection_kb} kB; a frame of a heartbeat: {heartbeat_us} us; "
        f"{_SOFT_LIMIT} descriptors do for {(_SOFT_LIMIT - 14) // 2} of them"
    )
    out = given.out or RESULTS / ("scale-quick" if quick else "scale")
    out.with_suffix(".json").write_text(
        json.dumps(
            {
                "cpus": os.cpu_count(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "seed": SEED,
                "checked": list(checked),
                "store_rates": rates,
                "connection_kb": connection_kb,
                "heartbeat_us": heartbeat_us,
                "table": made,
                "heartbeats": beats,
                "processes": found,
                "clusters": clusters,
            },
            indent=1,
        )
        + "\n",
        encoding="utf-8",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
