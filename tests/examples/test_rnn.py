"""The model-parallel language model learns, draws its curve, and has the losses of torch's RPC."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.examples.kit import PNG, outcome
from tests.examples.modules import load

SCRIPT = "rnn.py"
SIZES = ("--vocabulary", "300", "--hidden", "64", "--embedding", "32", "--lr", "0.01")


@pytest.mark.skipif(
    find_spec("matplotlib") is None, reason="needs matplotlib: pip install 'actorrpc[examples]'"
)
@pytest.mark.limit(180)  # two groups, and torch compiles its optimizer first
def test_perplexity_falls_with_the_losses_of_torch(tmp_path: Path) -> None:
    flags = ("--epochs", "2", "--plot", "curve.png")
    lines, ours = outcome(tmp_path, SCRIPT, *SIZES, *flags, backend="actorrpc")
    untrained, first, second = ours["perplexities"]  # of held-out text
    assert untrained == pytest.approx(300, rel=0.05)  # untrained: all words are equally likely
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
    # With Adam, a missing or doubled gradient changes all later losses; the order of sums changes only the last digits.
    assert losses == pytest.approx(theirs["losses"], rel=1e-5)
    assert theirs["perplexities"][0] == pytest.approx(untrained, rel=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]


def test_batches_are_consecutive_and_targets_are_one_word_ahead() -> None:
    batches = list(load(SCRIPT).batches(torch.arange(23), 2, 4))
    assert [inputs[:, 0].tolist() for inputs, _ in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [inputs[:, 1].tolist() for inputs, _ in batches] == [[11, 12, 13, 14], [15, 16, 17, 18], [19, 20]]
    assert all(torch.equal(targets, inputs + 1) for inputs, targets in batches)


def test_no_paragraph_is_both_trained_on_and_held_out() -> None:
    text = load(SCRIPT).Text(
        vocabulary=10**6, seed=1
    )  # all words are known, so unknown words hide no difference
    assert 0 not in text.train
    train, test = ([text.words[number] for number in part] for part in (text.train, text.test))
    assert 0.05 < len(test) / len(train) < 0.2
    spoken = " ".join(train)
    runs = [" ".join(test[start : start + 40]) for start in range(len(test) - 40)]
    assert not any(run in spoken for run in runs)
