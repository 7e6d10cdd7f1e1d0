"""Helpers that run examples as users do, in a separate directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.output import check
from tests.ports import free_port

__all__ = ["NIGHTLY", "PNG", "ROOT", "environment", "run"]

NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"  # runs examples a second time

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


def environment() -> dict[str, str]:
    """Return an environment with this tree's actorrpc, and without addresses of a group."""
    found = {key: value for key, value in os.environ.items() if not key.startswith("MASTER_")}
    found["MASTER_PORT"] = str(free_port())
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return found


def run(
    directory: Path, name: str, *flags: str, prints: Sequence[str] = (), folder: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run an example to its end.

    Args:
        prints: patterns of allowed standard error, if it succeeds (tests/output.py).
        folder: folder of the example, below ``examples``.
    """
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / folder / name), *flags],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.returncode:
        check(done.stderr, *prints, what=name)
    return done
