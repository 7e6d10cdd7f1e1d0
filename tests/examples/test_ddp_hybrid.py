"""DDP trainers and a remote embedding: DDP averages within distributed autograd, and the model learns."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.examples.kit import NIGHTLY, outcome
from tests.examples.modules import load

SCRIPT = "ddp_hybrid.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load(SCRIPT)


def in_one_process(example: ModuleType, steps: int, *, trainers: int, vocabulary: int) -> list[float]:
    """Return the mean losses of the example's first steps in one process."""
    args = example.parse([])
    torch.manual_seed(args.seed)
    embedding = torch.nn.EmbeddingBag(vocabulary, args.width, mode="sum")
    torch.manual_seed(args.seed)
    layers = example.make_layers(args.width)
    optimizer = torch.optim.SGD([*embedding.parameters(), *layers.parameters()], lr=args.lr)
    dice = [example.dice_of(args.seed, rank) for rank in range(trainers)]
    losses = []
    for _ in range(steps):
        batches = [example.Texts.draw(args.batch, vocabulary, each) for each in dice]
        parts = [cross_entropy(layers(embedding(b.words, b.begins)), b.topics) for b in batches]
        optimizer.zero_grad()
        total = torch.stack(parts).sum()
        total.backward()
        for parameter in layers.parameters():
            assert parameter.grad is not None
            parameter.grad /= trainers  # like DDP; the embedding sums the gradients of all trainers
        optimizer.step()
        losses.append(total.item() / trainers)
    return losses


@pytest.mark.limit(180)
def test_ddp_hybrid_learns_with_the_losses_of_one_process(tmp_path: Path, example: ModuleType) -> None:
    flags = ("--steps", "40", "--vocabulary", "160", "--log_interval", "20")
    progress, result = outcome(tmp_path, SCRIPT, *flags, backend="actorrpc")
    assert [line[:10] for line in progress] == ["step   20 ", "step   40 "]
    losses = result["losses"]
    assert len(losses) == 40
    # Gradients that DDP has not averaged, or averaged twice, change the second loss. Rounding errors grow in later losses.
    expected = in_one_process(example, 6, trainers=2, vocabulary=160)
    assert losses[:6] == pytest.approx(expected, rel=1e-4)
    assert losses[0] == pytest.approx(math.log(8), abs=0.5)  # untrained: one of eight topics
    assert sum(losses[-5:]) / 5 < 0.6
    assert result["accuracy"] > 0.85


@pytest.mark.skipif(not NIGHTLY, reason="torch's side: nightly")
@pytest.mark.limit(180)  # torch compiles its optimizer first
def test_ddp_hybrid_has_the_same_losses_on_torch(tmp_path: Path, example: ModuleType) -> None:
    flags = ("--steps", "3", "--vocabulary", "160", "--trainers", "1")
    _, result = outcome(tmp_path, SCRIPT, *flags, backend="torch")
    assert result["losses"] == pytest.approx(in_one_process(example, 3, trainers=1, vocabulary=160), rel=1e-4)
