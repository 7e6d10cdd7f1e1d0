"""How the tutorials' programs are run: unchanged, on actorrpc or on torch's own RPC, with a witness to which it was.

``python -m tests.tutorials.kit`` runs them on torch and writes down what they print (``expected.json``).
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

__all__ = ["EXPECTED", "NIGHTLY", "PROGRAMS", "Program", "Run", "run"]

NIGHTLY: Final = os.environ.get("ACTORRPC_NIGHTLY") == "1"  # torch's side takes long

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path(__file__).resolve().parent
SITE: Final = ROOT / "actorrpc" / "compat" / "site"
EXPECTED: Final = HERE / "expected.json"
TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

# Ways to put actorrpc into the place of torch's RPC: what stands before the program.
_RUN: Final = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
_WAYS: Final[dict[str, tuple[str, ...]]] = {
    "command": ("-m", "actorrpc.compat"),
    # Where actorrpc is installed, the file lies in the site-packages and is read at the start.
    "variable": ("-c", f"import site; site.addsitedir({str(SITE)!r}); {_RUN}"),
    "late": ("-c", f"import torch.distributed.rpc, actorrpc.compat; actorrpc.compat.install(); {_RUN}"),
    "torch": (),
}


@dataclass(frozen=True)
class Program:
    """One program, and how it is run."""

    name: str
    workers: int  # agents that it starts, one after the other or at once
    on_actorrpc: tuple[str, ...] = ()
    before: tuple[str, ...] = ()  # what starts it
    prints: tuple[str, ...] = ()  # what it may write to standard error on actorrpc (tests/output.py)


# Those that print the same on both.
PROGRAMS: Final = {
    each.name: each
    for each in (
        Program("rnn", 2),
        Program("autograd", 2, before=TORCHRUN),
        Program("rrefs", 3),
        Program("async_functions", 3),
        Program("remote_modules", 2, prints=(OUTSIDE_OF_A_CONTEXT,)),
        # torch does not come through a second group in one process where the first had an RRef.
        Program("starting", 10, on_actorrpc=("--rrefs",)),
    )
}


@dataclass(frozen=True)
class Run:
    """What came of a program: its exit status, what it printed, and which agents it started."""

    status: int
    lines: list[dict[str, Any]]
    errors: str
    agents: list[dict[str, Any]]


def run(folder: Path, program: Program, *arguments: str, way: str) -> Run:
    """Run a program to its end in a folder of its own.

    Args:
        way: ``"torch"``; or how actorrpc is to take its place: ``"command"``, ``"variable"``, or ``"late"`` (torch's module
            has been imported before).
    """
    witness = Path(tempfile.mkdtemp(dir=folder))
    path = [str(HERE / "witness"), *([] if way == "torch" else [str(ROOT)]), os.environ.get("PYTHONPATH")]
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
    command = (*_WAYS[way], *program.before, str(HERE / "programs" / f"{program.name}.py"), *arguments)
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
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return Run(done.returncode, lines, done.stderr, agents)


def main(names: Sequence[str]) -> None:
    """Write down what programs print on torch: those named, or all."""
    known = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    for name in names or PROGRAMS:
        with tempfile.TemporaryDirectory() as folder:
            done = run(Path(folder), PROGRAMS[name], way="torch")
        if done.status:
            sys.exit(done.errors)
        known[name] = done.lines
    texts = [f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known)]
    EXPECTED.write_text("{\n" + ",\n".join(texts) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
