"""What the operations may take: no more functions than the file of ceilings says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.counts import OPERATIONS

_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.limit(240)
def test_no_operation_takes_more_steps_than_its_ceiling(tmp_path: Path) -> None:
    out = tmp_path / "counts.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.counts", "--no-system", "--out", str(out)],
        cwd=_ROOT,
        env=os.environ | {"ACTORRPC_SPIN_US": "0"},
        stdout=subprocess.PIPE,
        timeout=200,
        check=True,
    )
    counted = json.loads(out.read_text(encoding="utf-8"))
    ceilings = json.loads((_ROOT / "benchmarks" / "ceilings.json").read_text(encoding="utf-8"))
    assert ceilings.keys() == counted.keys() == OPERATIONS.keys()
    over = {
        (operation, what): (counted[operation][what], most)
        for operation, kinds in ceilings.items()
        for what, most in kinds.items()
        if counted[operation][what] > most
    }
    assert not over
