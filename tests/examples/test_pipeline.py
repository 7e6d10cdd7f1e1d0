"""The pipeline in torch's style learns with the losses of one process, for any number of micro-batches."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.examples.kit import NIGHTLY, outcome
from tests.examples.modules import load

SCRIPT = "pipeline.py"
SMALL = (
    "--batch",
    "31",
    "--size",
    "8",
    "--blocks",
    "1",
)  # 31 is not divisible by 5, so micro-batches differ in size


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


@pytest.mark.limit(180)
def test_pipeline_learns_with_the_losses_of_one_process_for_any_micro_batches(
    tmp_path: Path, example: ModuleType
) -> None:
    flags = (*SMALL, "--steps", "30")
    lines, result = outcome(tmp_path, SCRIPT, *flags, "--micro_batches", "1", "5", backend="actorrpc")
    assert [line[:16] for line in lines] == [" 1 micro-batch  ", " 5 micro-batches"]
    expected = in_one_process(example, (*SMALL, "--steps", "6"))
    assert expected[0] == pytest.approx(2.1, abs=0.3)  # untrained: one of eight directions
    for cut, training in zip((1, 5), result["trainings"], strict=True):
        assert training["micro_batches"] == cut
        losses = training["losses"]
        assert len(losses) == 30
        assert losses[:6] == pytest.approx(expected, rel=1e-3)
        assert sum(losses[-5:]) / 5 < 0.9


@pytest.mark.skipif(not NIGHTLY, reason="torch's side: nightly")
@pytest.mark.limit(180)  # torch compiles its optimizer first
def test_pipeline_has_the_same_losses_on_torch(tmp_path: Path, example: ModuleType) -> None:
    flags = (*SMALL, "--steps", "3")
    _, result = outcome(tmp_path, SCRIPT, *flags, "--micro_batches", "5", backend="torch")
    (training,) = result["trainings"]
    assert training["losses"] == pytest.approx(in_one_process(example, flags), rel=1e-3)


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
