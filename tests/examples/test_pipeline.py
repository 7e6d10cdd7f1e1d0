"""The pipeline in torch's style: it learns as one process does, however the batches are cut."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.examples.kit import load, outcome

SCRIPT = "pipeline.py"
# Five into eleven: micro-batches of different sizes.
SMALL = ("--steps", "4", "--batch", "11", "--size", "8", "--width", "8")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load(SCRIPT)


def in_one_process(example: ModuleType, flags: tuple[str, ...]) -> list[float]:
    """Return the losses of the example's steps, with whole batches."""
    args = example.parse(flags)
    halves = [example.make_layers(half, args.width, args.blocks, args.seed) for half in range(2)]
    model = torch.nn.Sequential(*halves)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    dice = torch.Generator().manual_seed(args.seed)
    losses = []
    for _ in range(args.steps):
        images, directions = example.draw_images(args.batch, args.size, dice)
        loss = cross_entropy(model(images), directions)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.limit(180)  # torch compiles its optimizer first
@pytest.mark.parametrize(("backend", "cuts"), [("actorrpc", ("1", "5")), ("torch", ("5",))])
def test_losses_are_those_of_one_process(
    tmp_path: Path, example: ModuleType, backend: str, cuts: tuple[str, ...]
) -> None:
    lines, told = outcome(tmp_path, SCRIPT, *SMALL, "--micro_batches", *cuts, backend=backend)
    assert len(lines) == len(cuts)
    expected = in_one_process(example, SMALL)
    assert len(expected) == 4
    for cut, training in zip(cuts, told["trainings"], strict=True):
        assert training["micro_batches"] == int(cut)
        assert training["losses"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.limit(120)
def test_learns(tmp_path: Path) -> None:
    flags = ("--steps", "40", "--micro_batches", "4", "--batch", "32", "--blocks", "1", "--size", "12")
    (line,), told = outcome(tmp_path, SCRIPT, *flags, backend="actorrpc")
    assert line.startswith(" 4 micro-batches ")
    assert " ms a step on actorrpc, loss " in line
    losses = told["trainings"][0]["losses"]
    assert losses[0] == pytest.approx(2.1, abs=0.3)  # knows nothing: one of eight directions
    assert sum(losses[-5:]) / 5 < 0.5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--micro_batches", "0"], "--micro_batches: must be at least 1, not 0"),
        (["--micro_batches", "1", "9", "--batch", "8"], "there are fewer images in a batch"),
        (["--width", "6"], "--width: must be a multiple of 4, not 6"),
    ],
)
def test_wrong_flags_are_refused(
    example: ModuleType, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        example.main(flags)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
