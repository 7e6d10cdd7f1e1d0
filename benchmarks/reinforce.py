"""The reinforcement-learning example on both backends, in turns: environment steps per second.

``python -m benchmarks.reinforce [--rounds N] [--episodes N] [--world_size N]`` alone, or as one section
of ``benchmarks.core``. The same seed plays the same episodes on both backends, so both do the same work;
the figure is the example's own, without the start of its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.rigs import Placement, placements
from benchmarks.series import Key, Results, ratio, summarise

__all__ = ["main", "measure", "run_once"]

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "torch_style" / "reinforce.py"
BACKENDS = ("torch", "actorrpc")
TIMEOUT = 180.0


def run_once(
    backend: str, place: Placement, *, episodes: int, world_size: int, seed: int
) -> dict[str, float]:
    """Run the example once and return the figures that it prints.

    Raises:
        RuntimeError: it fails, or does not end in time.
    """
    command = [
        sys.executable, "-m", "benchmarks.pinned",
        ",".join(map(str, place.callers)), ",".join(map(str, place.callees)),
        "--backend", backend, "--world_size", str(world_size), "--seed", str(seed),
        "--max_episodes", str(episodes), "--quiet", "--json", "--plot", "",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{EXAMPLE.parent}"}
    for variable in ("MASTER_ADDR", "MASTER_PORT"):
        environment.pop(variable, None)
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired as error:
            process.terminate()
            raise RuntimeError(f"did not end within {TIMEOUT:.0f} s") from error
    if process.returncode != 0 or not output.strip():
        last = errors.strip().splitlines()[-1:] or ["no output"]
        raise RuntimeError(f"ended with {process.returncode}: {last[0]}")
    answer: dict[str, float] = json.loads(output.strip().splitlines()[-1])
    return answer


def measure(
    results: Results,
    *,
    rounds: int,
    quick: bool,
    note: Callable[[str], None],
    episodes: int | None = None,
    worlds: tuple[int, ...] = (2,),
) -> None:
    """Run both backends in turns and add their figures to the results."""
    if not EXAMPLE.exists():
        note(f"{EXAMPLE.relative_to(ROOT)} is not there: reinforce is left out")
        return
    found = placements()
    count = episodes or (12 if quick else 60)
    names = ("one",) if quick else ("own", "one")
    for place in [found[name] for name in names if name in found]:
        for world_size in worlds:
            failed: set[str] = set()
            for turn in range(rounds):
                for backend in BACKENDS:
                    value: float | None = None
                    try:
                        if backend not in failed:
                            answer = run_once(
                                backend, place, episodes=count, world_size=world_size, seed=543 + turn
                            )
                            value = answer["env_steps"] / answer["seconds"]
                    except RuntimeError as error:
                        failed.add(backend)
                        note(f"reinforce {backend} {place.name}: {error}")
                    case = f"{world_size - 1} observer" + ("s" if world_size > 2 else "")
                    key = Key("reinforce", case, "same host", place.name, "steps")
                    results.add(key, backend, value)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--world_size", type=int, nargs="+", default=[2])
    options = parser.parse_args(arguments)
    results = Results()
    measure(
        results,
        rounds=options.rounds,
        quick=False,
        note=lambda text: print(text, file=sys.stderr),
        episodes=options.episodes,
        worlds=tuple(options.world_size),
    )
    for key, peers in results.series.items():
        for peer, values in peers.items():
            print(key.case, key.placement, peer, "steps/s:", summarise(values))
        both = ratio(results.values(key, "actorrpc"), results.values(key, "torch"))
        print(key.case, key.placement, "actorrpc / torch:", summarise(both))
    return 0


if __name__ == "__main__":
    sys.exit(main())
