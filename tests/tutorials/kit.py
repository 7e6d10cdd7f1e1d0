"""Runs the tutorials' programs unchanged on actorrpc or on torch's own RPC; a witness records which of the two ran.

``python -m tests.tutorials.kit`` runs them on torch and records their output in ``expected.json``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.announced import OUTSIDE_OF_A_CONTEXT
from tests.output import check
from tests.ports import free_port

__all__ = ["EXPECTED", "NIGHTLY", "PIPELINE_SIZES", "PROGRAMS", "RNN_SIZES", "Program", "Run", "run"]

NIGHTLY: Final = os.environ.get("ACTORRPC_NIGHTLY") == "1"  # runs on torch take long

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path(__file__).resolve().parent
SITE: Final = ROOT / "actorrpc" / "compat" / "site"
EXPECTED: Final = HERE / "expected.json"
EXAMPLES: Final = ROOT / "examples" / "torch_style"
RNN_SIZES: Final = ("--vocabulary", "300", "--hidden", "64", "--embedding", "32", "--lr", "0.01")
# 31 images are not divisible by 5, so micro-batches differ in size.
PIPELINE_SIZES: Final = ("--batch", "31", "--size", "8", "--blocks", "1")
# Names of results that are not compared: times, and counts of right answers, which rounding errors may change.
IGNORED: Final = {"accuracy", "seconds", "seconds_per_step", "steps_per_second", "updates_per_second"}
TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

# Ways to replace torch's RPC by actorrpc: arguments before the program.
_RUN: Final = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
_WAYS: Final[dict[str, tuple[str, ...]]] = {
    "command": ("-m", "actorrpc.compat"),
    # An installed actorrpc has this file in site-packages, which Python reads at its start.
    "variable": ("-c", f"import site; site.addsitedir({str(SITE)!r}); {_RUN}"),
    "late": ("-c", f"import torch.distributed.rpc, actorrpc.compat; actorrpc.compat.install(); {_RUN}"),
    "torch": (),
}


@dataclass(frozen=True)
class Program:
    """A program of this folder or of examples/torch_style, and how to run it."""

    name: str
    workers: int  # number of agents that it starts in total
    flags: tuple[str, ...] = ()
    on_actorrpc: tuple[str, ...] = ()  # further flags on actorrpc
    before: tuple[str, ...] = ()  # arguments of its launcher
    prints: tuple[str, ...] = ()  # patterns of allowed standard error on actorrpc (tests/output.py)


_ON_TORCH: Final = (
    "--backend",
    "torch",
    "--json",
)  # an example imports torch.distributed.rpc, and prints JSON

# Programs that print the same on torch and on actorrpc.
PROGRAMS: Final = {
    each.name: each
    for each in (
        # torch's tutorials, which are also examples of this package:
        Program("reinforce", 3, ("--world_size", "3", "--max_episodes", "3", "--plot", "", *_ON_TORCH)),
        Program("rnn", 2, (*RNN_SIZES, "--epochs", "1", "--max_steps", "12", "--plot", "", *_ON_TORCH)),
        Program("parameter_server", 2, ("--world_size", "2", "--epochs", "1", *_ON_TORCH)),
        Program("ddp_hybrid", 4, ("--steps", "6", "--vocabulary", "160", *_ON_TORCH)),
        Program("batch_parameter_server", 3, ("--world_size", "3", "--epochs", "1", *_ON_TORCH)),
        Program("batch_reinforce", 3, ("--world_size", "3", "--steps", "300", "--episodes", "2", *_ON_TORCH)),
        Program("pipeline", 3, (*PIPELINE_SIZES, "--steps", "6", "--micro_batches", "1", "5", *_ON_TORCH)),
        # The pages of torch's documentation:
        Program("autograd", 2, before=TORCHRUN),
        Program("rrefs", 3),
        Program("async_functions", 3),
        Program("remote_modules", 2, prints=(OUTSIDE_OF_A_CONTEXT,)),
        # torch fails in a second group of a process if the first group had an RRef.
        Program("starting", 10, on_actorrpc=("--rrefs",)),
    )
}


@dataclass(frozen=True)
class Run:
    """Result of a program: its exit status, its output, and the agents that it started."""

    status: int
    lines: list[dict[str, Any]]
    errors: str
    agents: list[dict[str, Any]]


def run(folder: Path, program: Program, *arguments: str, way: str) -> Run:
    """Run a program to its end, in this folder.

    Args:
        way: ``"torch"``, or a way to replace it: ``"command"``, ``"variable"``, or ``"late"`` (after the import of torch's
            module).
    """
    witness = Path(tempfile.mkdtemp(dir=folder))
    path = [str(HERE / "witness"), str(ROOT), os.environ.get("PYTHONPATH")]
    first, second = free_port(), free_port()
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "ACTORRPC_DROP_IN": "1" if way == "variable" else "0",
        "RPC_WITNESS": str(witness),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(first),
        "SECOND_PORT": str(second),
        "DDP_STORE": str(witness / "ddp_store"),
        "OMP_NUM_THREADS": "1",
    }
    file = HERE / "programs" / f"{program.name}.py"
    if not file.exists():
        file = EXAMPLES / file.name
    command = (*_WAYS[way], *program.before, str(file), *program.flags, *arguments)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    agents = [
        json.loads(line)
        for file in witness.iterdir()
        if file.name.isdigit()
        for line in file.read_text().splitlines()
    ]
    if not done.returncode and way != "torch":
        check(done.stderr, *program.prints, what=program.name)
    lines = [
        json.loads(line, object_hook=_without_ignored)
        for line in done.stdout.splitlines()
        if line.startswith("{")
    ]
    return Run(done.returncode, lines, done.stderr, agents)


def _without_ignored(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in IGNORED}


def main(names: Sequence[str]) -> None:
    """Record the output of the named programs on torch, or of all."""
    known = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    for name in names or PROGRAMS:
        with tempfile.TemporaryDirectory() as folder:
            done = run(Path(folder), PROGRAMS[name], way="torch")
        if done.status:
            sys.exit(done.errors)
        known[name] = done.lines
    texts = [f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known) if name in PROGRAMS]
    EXPECTED.write_text("{\n" + ",\n".join(texts) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
