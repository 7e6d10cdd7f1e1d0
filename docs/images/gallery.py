"""Run the examples and draw the pictures of the gallery from their output: ``python docs/images/gallery.py [NAME ...]``.

All pictures take some minutes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
sys.path.insert(0, str(_ROOT))

from benchmarks.plots import INK, OURS, THEIRS, save, sheet  # noqa: E402 (found by the line above)


@dataclass(frozen=True, slots=True)
class Picture:
    """A curve.

    Attributes:
        command: the example and its arguments.
        point: finds x and y in a line that it prints.
    """

    name: str
    command: tuple[str, ...]
    point: str
    x: str
    y: str


PICTURES = (
    Picture(
        "cartpole",
        ("cartpole.py",),
        r"episode +(\d+)/.*running +([\d.]+)/",
        "episode",
        "mean reward",
    ),
    Picture(
        "parameter-server", ("parameter_server.py",), r"^step +(\d+) +accuracy ([\d.]+)", "step", "accuracy"
    ),
    Picture("split-learning", ("split_learning.py",), r"^round +(\d+) +loss ([\d.]+)", "round", "loss"),
    Picture(
        "data-parallel",
        ("data_parallel_actors.py", "--trainers", "2", "--lose", "3"),
        r"^epoch +(\d+): loss ([\d.]+)",
        "epoch",
        "loss",
    ),
    Picture(
        "rnn",
        ("torch_style/rnn.py", "--plot", ""),
        r"^epoch +(\d+) .*of unseen text +([\d.]+)",
        "epoch",
        "perplexity",
    ),
    Picture(
        "batch-reinforce",
        ("torch_style/batch_reinforce.py",),
        r"^episode +(\d+) .* games +([\d.]+)",
        "round",
        "reward of a game",
    ),
    Picture(
        "post-training", ("post_training.py",), r"^step +(\d+) +reward ([\d.]+)", "step", "right letters"
    ),
    Picture(
        "impala", ("impala.py",), r"^steps +(\d+) +reward +([\d.]+)", "steps of all games", "mean reward"
    ),
)


def printed(*command: str) -> str:
    """Run an example and return what it has printed."""
    program = [sys.executable, str(_ROOT / "examples" / command[0]), *command[1:]]
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    with tempfile.TemporaryDirectory() as folder:  # for the files that examples write
        done = subprocess.run(
            program, cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
    return done.stdout + done.stderr


def draw(picture: Picture) -> None:
    """Run an example and draw what it has printed."""
    points = re.findall(picture.point, printed(*picture.command), re.MULTILINE)
    figure, (axes,) = sheet(1, 3.6, 2.0)
    xs, ys = [float(x) for x, _ in points], [float(y) for _, y in points]
    axes.plot(xs, ys, color=OURS, marker="o", markersize=3)
    axes.set_xlabel(picture.x)
    axes.set_ylabel(picture.y)
    save(figure, _HERE / f"gallery-{picture.name}.svg")


def draw_rungs() -> None:
    """Run ``examples/hyperparameters.py`` and draw which trials went on from rung to rung, and which ended where."""
    found = re.findall(
        r"^rung \d+ +epochs (\d+) +trial (\d+) +accuracy ([\d.]+) +(\w+)",
        printed("hyperparameters.py"),
        re.MULTILINE,
    )
    figure, (axes,) = sheet(1, 3.6, 2.0)
    for trial in sorted({trial for _, trial, _, _ in found}, key=int):
        curve = [(int(epochs), float(accuracy)) for epochs, which, accuracy, _ in found if which == trial]
        ends = (trial, "ends") in {(which, outcome) for _, which, _, outcome in found}
        colour = INK if ends else OURS
        axes.plot(*zip(*curve, strict=True), color=colour, marker="o", markersize=3, zorder=1 if ends else 2)
    rungs = sorted({int(epochs) for epochs, _, _, _ in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(rungs, [str(rung) for rung in rungs])
    axes.set_xlabel("epochs")
    axes.set_ylabel("accuracy")
    save(figure, _HERE / "gallery-hyperparameters.svg")


def draw_schedule(stages: int = 3, parts: int = 4) -> None:
    """Draw when each stage of ``examples/pipeline.py`` works on which micro-batch: forward, and back in the other order."""
    figure, (axes,) = sheet(1, 5.0, 1.6)
    turn = stages + parts - 1
    for stage in range(stages):
        for part in range(parts):
            back = turn + (stages - 1 - stage) + part
            for start, colour in ((stage + part, OURS), (back, THEIRS)):
                axes.broken_barh([(start, 0.94)], (stages - 1 - stage, 0.9), color=colour)
                axes.text(
                    start + 0.47,
                    stages - 0.55 - stage,
                    str(part + 1),
                    ha="center",
                    va="center",
                    color="white",
                )
    axes.set_yticks(
        [stages - 0.55 - stage for stage in range(stages)], [f"stage {n + 1}" for n in range(stages)]
    )
    axes.set_xticks([turn / 2, turn * 1.5], ["forward", "backward"])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    save(figure, _HERE / "gallery-pipeline.svg")


if __name__ == "__main__":
    if "pipeline" in (sys.argv[1:] or ["pipeline"]):
        draw_schedule()
    if "hyperparameters" in (sys.argv[1:] or ["hyperparameters"]):
        draw_rungs()
    for each in PICTURES:
        if each.name in (sys.argv[1:] or [each.name]):
            draw(each)
