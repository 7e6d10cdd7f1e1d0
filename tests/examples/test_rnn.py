"""The model-parallel language model: it learns, draws its curve, and its losses are those of torch's RPC."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.kit import PNG, outcome

SCRIPT = "rnn.py"
SIZES = ("--vocabulary", "300", "--hidden", "64", "--embedding", "32", "--lr", "0.01")


@pytest.mark.skipif(
    find_spec("matplotlib") is None, reason="needs matplotlib: pip install 'actorrpc[examples]'"
)
@pytest.mark.limit(180)  # two groups, and torch compiles its optimizer first
def test_perplexity_falls_with_the_losses_of_torch(tmp_path: Path) -> None:
    flags = ("--epochs", "2", "--plot", "curve.png")
    lines, ours = outcome(tmp_path, SCRIPT, *SIZES, *flags, backend="actorrpc")
    untrained, first, second = ours["perplexities"]  # of text that is not trained on
    assert untrained == pytest.approx(300, rel=0.05)  # knows nothing: one of all words, all alike
    assert untrained > first > second
    assert second < 60
    assert [line[:10] for line in lines if "perplexity" in line] == ["untrained ", "epoch    1", "epoch    2"]
    assert lines[-1].startswith("what it says now: ")
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)

    flags = ("--epochs", "1", "--max_steps", "12", "--plot", "")
    _, theirs = outcome(tmp_path, SCRIPT, *SIZES, *flags, backend="torch")
    losses = ours["losses"][:12]
    assert losses[0] == pytest.approx(math.log(300), rel=0.01)
    assert losses[-1] < losses[0] - 0.5
    # Twelve steps of Adam tell a gradient that is missing or doubled anywhere, not the order of some sums.
    assert losses == pytest.approx(theirs["losses"], rel=1e-5)
    assert theirs["perplexities"][0] == pytest.approx(untrained, rel=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]
