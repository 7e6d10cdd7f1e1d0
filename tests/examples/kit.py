"""How the tests of the torch-style examples run them: as a user would, in a directory of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.ports import free_port

__all__ = ["NIGHTLY", "PNG", "outcome", "run"]

NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"  # where torch's side of a comparison takes long

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


def run(directory: Path, name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run an example to its end with this tree's actorrpc, in no group's environment."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MASTER_")}
    environment["MASTER_PORT"] = str(free_port())
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "torch_style" / name), *flags],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def outcome(directory: Path, name: str, *flags: str, backend: str) -> tuple[list[str], dict[str, Any]]:
    """Run an example with ``--json``; return the lines of its progress, and what the last line says."""
    done = run(directory, name, "--json", "--backend", backend, *flags)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    told: dict[str, Any] = json.loads(last)
    assert told["backend"] == backend
    return lines, told
