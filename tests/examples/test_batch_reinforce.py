"""Batched action selection learns, and (nightly) plays the same games as torch's RPC without batches."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.kit import NIGHTLY, outcome

pytestmark = pytest.mark.skipif(
    find_spec("gymnasium") is None, reason="needs gymnasium: pip install 'actorrpc[examples]'"
)

SCRIPT = "batch_reinforce.py"


@pytest.mark.limit(180)
def test_batched_action_selection_learns(tmp_path: Path) -> None:
    flags = ("--world_size", "3", "--steps", "300")
    lines, ours = outcome(tmp_path, SCRIPT, *flags, "--episodes", "12", backend="actorrpc")
    assert len(lines) == len(ours["rewards"]) == 12
    assert ours["rewards"][0] < 30
    assert max(ours["rewards"]) > 50
    if NIGHTLY:
        _, theirs = outcome(tmp_path, SCRIPT, *flags, "--episodes", "2", "--no-batch", backend="torch")
        assert ours["rewards"][:2] == theirs["rewards"]
