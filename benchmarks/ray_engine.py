"""Actor calls on workers that Ray has placed, compared with Ray's own actor calls: both in one process and one run, in turns.

``python -m benchmarks.ray_engine [--quick] [--out FOLDER]`` runs on this interpreter, or on the interpreter that
BENCHMARK_RAY_PYTHON names, which needs torch and Ray. One Ray has one actor of its own and one of our workers, each in a
process that Ray has started; every round measures both. No process is pinned. ``same host`` uses the defaults (our workers
find that they are on one machine, and use Unix sockets and shared memory; Ray's calls go over TCP and large results through
its shared memory), ``TCP`` makes our connections as between machines. Writes ``results/ray_engine.json``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.actors_sessions import interpreter
from benchmarks.report import text, write_json
from benchmarks.series import Key, Results, percentile, ratio, summarise

__all__ = ["Echo", "main"]

_OUT = Path(__file__).resolve().parent / "results"
_TRANSPORTS = {"same host": "auto", "TCP": "tcp"}
_TIMEOUT_S = 540.0
_MIB = 1 << 20


class Echo:
    """The same actor for both."""

    def ping(self) -> int:
        return 1

    def take(self, value: torch.Tensor) -> int:
        return value.numel()

    def give(self, count: int) -> torch.Tensor:
        return torch.ones(count)


# -- in a process that has Ray ------------------------------------------------------------------------------


def _singly(call: Callable[[], Any], calls: int) -> dict[str, float]:
    for _ in range(calls // 5):
        call()
    clock, times = time.perf_counter_ns, []
    gc.collect()
    gc.disable()
    try:
        for _ in range(calls):
            begin = clock()
            call()
            times.append(clock() - begin)
    finally:
        gc.enable()
    times.sort()
    return {"p50": percentile(times, 0.5) / 1e3, "p99": percentile(times, 0.99) / 1e3}


def _rate(call: Callable[[], Any], calls: int) -> float:
    call()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return calls / (time.perf_counter() - begin)


def _measure(get: Callable[[Any], Any], actor: Any, scale: int) -> list[tuple[str, str, str, float]]:
    """Measure one peer once: section, case, metric, value."""
    found = [
        ("actor call", "", metric, value)
        for metric, value in _singly(lambda: get(actor.ping.remote()), 100 * scale).items()
    ]
    window = 1000
    rate = _rate(lambda: get([actor.ping.remote() for _ in range(window)]), max(1, scale // 2))
    found.append(("actor calls, 1000 under way", "", "rate", rate * window))
    for size in (1, 64):
        value = torch.ones(size * _MIB // 4)
        repeats = max(3, (40 if size == 1 else 2) * scale // 10)
        taken = _rate(lambda value=value: get(actor.take.remote(value)), repeats)
        found.append(("actor tensors", f"{size} MiB as argument", "rate", taken * size * _MIB / 1e9))
        given = _rate(lambda count=size * _MIB // 4: get(actor.give.remote(count)).sum(), repeats)
        found.append(("actor tensors", f"{size} MiB as result, read", "rate", given * size * _MIB / 1e9))
    return found


def _session(transport: str, rounds: int, scale: int) -> None:
    """Run the driver of both; print the measurements as one line of JSON."""
    import ray  # noqa: PLC0415 (only a session has it)

    import actorrpc  # noqa: PLC0415

    os.environ["ACTORRPC_TLS"] = "off"  # as Ray; the workers inherit it
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=2 << 30)
    begin = time.perf_counter()
    actorrpc.init(engine="ray", num_workers=1, num_cpus=1, transport=_TRANSPORTS[transport])
    started = time.perf_counter() - begin
    theirs = ray.remote(num_cpus=1)(Echo).remote()
    ours = actorrpc.remote(Echo).options(worker="ray-0").remote()
    peers = {"ray": (ray.get, theirs), "actorrpc": (actorrpc.get, ours)}
    figures = []
    try:
        for turn in range(rounds):
            for name in sorted(peers, reverse=bool(turn % 2)):
                figures += [[name, *each] for each in _measure(*peers[name], scale)]
    finally:
        actorrpc.shutdown()
        ray.shutdown()
    print(json.dumps({"figures": figures, "ray": ray.__version__, "start": started}))


# -- the command ----------------------------------------------------------------------------------------------


def _run(python: str, transport: str, rounds: int, scale: int) -> dict[str, Any]:
    command = [python, "-m", "benchmarks.ray_engine", "--session", transport]
    command += ["--rounds", str(rounds), "--scale", str(scale)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        command,
        cwd=Path(__file__).resolve().parents[1],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the session ended with {done.returncode}:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def main(arguments: list[str] | None = None) -> int:
    """Run it; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_engine", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and calls")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--out", type=Path, default=_OUT)
    parser.add_argument("--session", choices=list(_TRANSPORTS), help=argparse.SUPPRESS)
    parser.add_argument("--scale", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    rounds = given.rounds or (3 if given.quick else 7)
    scale = given.scale or (4 if given.quick else 20)
    if given.session:
        _session(given.session, rounds, scale)
        return 0
    python = interpreter("ray")
    if python is None:
        print("Ray is not installed here, and BENCHMARK_RAY_PYTHON names no interpreter that has it")
        return 1
    results = Results()
    meta: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "machine": f"{os.cpu_count()} CPUs, Linux {platform.release()}",
        "load before": " ".join(f"{each:.2f}" for each in psutil.getloadavg()),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "rounds": rounds,
        "quick": given.quick,
    }
    for transport in _TRANSPORTS:
        answer = _run(python, transport, rounds, scale)
        meta["ray"] = answer["ray"]
        for peer, section, case, metric, value in answer["figures"]:
            results.add(Key(section, case, transport, "any", metric), peer, value)
    meta["load after"] = " ".join(f"{each:.2f}" for each in psutil.getloadavg())
    print(text(results, meta, ()))
    for transport in _TRANSPORTS:
        key = Key("actor call", "", transport, "any", "p50")
        found = summarise(ratio(results.values(key, "ray"), results.values(key, "actorrpc")))
        if found is not None:
            print(
                f"\n{transport}: Ray's own actor call takes {found.median:.1f} times as long [{found.low:.1f}..{found.high:.1f}]"
            )
    given.out.mkdir(parents=True, exist_ok=True)
    write_json(given.out / "ray_engine.json", results, meta, ())
    return 0


if __name__ == "__main__":
    sys.exit(main())
