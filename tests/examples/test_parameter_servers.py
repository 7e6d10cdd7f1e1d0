"""Both parameter-server examples learn, (nightly) with the same losses as on torch's RPC."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.kit import NIGHTLY, outcome, run

pytestmark = pytest.mark.skipif(
    find_spec("sklearn") is None, reason="the digits need scikit-learn: pip install 'actorrpc[examples]'"
)

PLAIN = "parameter_server.py"
BATCH = "batch_parameter_server.py"


@pytest.mark.limit(120)
def test_two_trainers_of_one_server_learn(tmp_path: Path) -> None:
    lines, result = outcome(tmp_path, PLAIN, "--world_size", "3", "--epochs", "5", backend="actorrpc")
    assert {name: len(losses) for name, losses in result["losses"].items()} == {
        "trainer1": 5 * 24,
        "trainer2": 5 * 24,
    }
    assert result["accuracy"] > 0.8
    assert sorted(line.split("  loss")[0] for line in lines) == [
        f"trainer{rank}  epoch  {epoch}/5" for rank in (1, 2) for epoch in range(1, 6)
    ]


@pytest.mark.limit(180)  # two groups, and torch compiles its optimizer first
def test_one_trainer_learns_with_the_losses_of_torch(tmp_path: Path) -> None:
    flags = ("--world_size", "2", "--epochs", "1")
    _, ours = outcome(tmp_path, PLAIN, *flags, backend="actorrpc")
    losses = ours["losses"]["trainer1"]
    assert len(losses) == 47
    assert losses[-1] < losses[0] - 0.2
    if NIGHTLY:
        _, theirs = outcome(tmp_path, PLAIN, *flags, backend="torch")
        # With momentum, a missing or doubled gradient changes all later losses; the order of sums changes only the last digits.
        assert losses == pytest.approx(theirs["losses"]["trainer1"], rel=1e-4)


@pytest.mark.limit(180)
def test_batched_updates_learn_with_the_losses_of_torch(tmp_path: Path) -> None:
    lines, ours = outcome(tmp_path, BATCH, "--world_size", "3", "--epochs", "2", backend="actorrpc")
    assert [len(losses) for losses in ours["losses"]] == [94, 94]
    assert ours["accuracy"] > 0.8
    assert [line.split("  loss")[0] for line in lines] == [f"update {16 * count:4d}" for count in range(1, 6)]
    if NIGHTLY:
        _, theirs = outcome(tmp_path, BATCH, "--world_size", "3", "--epochs", "1", backend="torch")
        # No gradient is stale and sums have a fixed order, so the losses are bitwise equal.
        assert [losses[:47] for losses in ours["losses"]] == theirs["losses"]


@pytest.mark.limit(60)
def test_a_world_size_of_1_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, PLAIN, "--world_size", "1")
    assert done.returncode == 2
    assert "--world_size: a server and a trainer make 2" in done.stderr
