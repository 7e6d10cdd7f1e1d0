"""A search for hyperparameters by successive halving: in each rung, the better half continues, for twice as many epochs.

    python examples/hyperparameters.py --trials 16

Each configuration is trained by an actor of its own, on scikit-learn's handwritten digits. After each rung the worse
half of the actors ends; the others continue, with their weights and the state of their optimizer. A survivor whose process
dies (``--lose 2``: in the second rung) is restarted and continues from its last checkpoint.
(Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", 2016.)
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import actorrpc

JUDGED = 500  # images for validation, which are not trained on


@dataclass(frozen=True)
class Configuration:
    """The hyperparameters."""

    rate: float
    width: int
    batch: int
    momentum: float

    def __str__(self) -> str:
        return f"rate {self.rate:.4f}, width {self.width}, batch {self.batch}, momentum {self.momentum:.2f}"


def draw_configuration(dice: random.Random) -> Configuration:
    """Return a random configuration."""
    return Configuration(
        rate=10 ** dice.uniform(-4, 0),
        width=dice.choice([8, 16, 32, 64, 128]),
        batch=dice.choice([16, 32, 64, 128]),
        momentum=dice.choice([0.0, 0.5, 0.9]),
    )


def survivors(scores: Mapping[int, float]) -> list[int]:
    """Return the better half of the trials, the best first; equal trials keep their order."""
    ranked = sorted(scores, key=lambda trial: (-scores[trial], trial))
    return ranked[: math.ceil(len(ranked) / 2)]


@actorrpc.remote(max_restarts=3, max_task_retries=3)
class Trial:
    """Trains one configuration; a checkpoint of it is stored at its supervisor after each call."""

    def __init__(self, configuration: Configuration, pictures: Tensor, labels: Tensor, seed: int) -> None:
        torch.manual_seed(seed)
        self.pictures, self.labels, self.batch = pictures, labels, configuration.batch
        self.net = nn.Sequential(
            nn.Linear(64, configuration.width), nn.ReLU(), nn.Linear(configuration.width, 10)
        )
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), lr=configuration.rate, momentum=configuration.momentum
        )
        self.found: list[float] = []  # the accuracy after each epoch

    def train(self, until: int) -> list[float]:
        """Train until ``until`` epochs are done in all; return the accuracy after each epoch."""
        for epoch in range(len(self.found), until):
            order = torch.randperm(len(self.labels) - JUDGED, generator=torch.Generator().manual_seed(epoch))
            for chosen in (order + JUDGED).split(self.batch):
                self.optimizer.zero_grad()
                cross_entropy(self.net(self.pictures[chosen]), self.labels[chosen]).backward()
                self.optimizer.step()
            self.found.append(self.accuracy())
        return self.found

    @torch.inference_mode()
    def accuracy(self) -> float:
        """Return the fraction of the validation images that are recognised."""
        return (self.net(self.pictures[:JUDGED]).argmax(1) == self.labels[:JUDGED]).float().mean().item()

    def checkpoint(self) -> dict[str, Any]:
        """Return the state from which a restarted actor continues."""
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "found": self.found}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.found = state["found"]


def search(args: argparse.Namespace, curves: dict[int, list[float]]) -> tuple[int, Configuration]:
    """Halve until one trial is left, and return its number and configuration; add all accuracies to ``curves``."""
    dice = random.Random(args.seed)
    configurations = [draw_configuration(dice) for _ in range(args.trials)]
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(args.seed))
    # All actors read one copy in the driver's shared memory.
    pictures = actorrpc.put(torch.tensor(digits.data, dtype=torch.float32)[order] / 16)
    labels = actorrpc.put(torch.tensor(digits.target)[order])
    trials = {
        number: Trial.remote(configuration, pictures, labels, args.seed)
        for number, configuration in enumerate(configurations)
    }
    rung, epochs = 1, args.epochs
    while True:
        running = {trial.train.remote(epochs): number for number, trial in trials.items()}
        if rung == args.lose:
            actorrpc.kill(trials[min(trials)], no_restart=False)
        for ref in tqdm(
            actorrpc.as_completed(list(running)), f"rung {rung}", len(running), disable=None, leave=False
        ):
            curves[running[ref]] = actorrpc.get(ref)
        scores = {number: curves[number][-1] for number in trials}
        kept = survivors(scores)
        for number in sorted(scores, key=lambda number: -scores[number]):
            outcome = "ends" if number not in kept else "goes on" if len(trials) > 1 else "is left"
            print(
                f"rung {rung}  epochs {epochs}  trial {number}  accuracy {scores[number]:.3f}  {outcome:7}  "
                f"({configurations[number]})"
            )
        if len(trials) == 1:
            return kept[0], configurations[kept[0]]
        trials = {
            number: trials[number] for number in kept
        }  # the other actors end, as their last handles are released
        rung, epochs = rung + 1, epochs * 2


def draw(curves: dict[int, list[float]], best: int, epochs: int, file: str) -> None:
    """Write the curves of all trials as a PNG."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, curve in sorted(curves.items(), key=lambda each: len(each[1])):
        colour = "tab:blue" if number == best else str(0.8 - 0.5 * len(curve) / len(curves[best]))
        axes.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=1.5)
        axes.plot(len(curve), curve[-1], "." if number != best else "*", color=colour, markersize=9)
    rungs = [epochs * 2**rung for rung in range(int(math.log2(len(curves[best]) / epochs)) + 1)]
    for rung in rungs:
        axes.axvline(rung, color="0.85", linewidth=0.8, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(rungs, [str(rung) for rung in rungs])
    axes.set(title="successive halving", xlabel="epochs", ylabel="accuracy", ylim=(0, 1))
    figure.savefig(file, format="png", dpi=120)
    print(f"picture: {file}")


def main() -> int:
    """Search until one is left, or Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=16, help="configurations that begin (default 16)")
    parser.add_argument(
        "--epochs", type=int, default=1, help="of the first rung; doubles with each (default 1)"
    )
    parser.add_argument(
        "--lose", type=int, default=0, metavar="RUNG", help="a trial dies in this rung (from 1)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", default="hyperparameters.png", help="the picture ('' for none)")
    args = parser.parse_args()
    if min(args.trials, args.epochs) < 1:
        parser.error("--trials and --epochs must be at least 1")
    curves: dict[int, list[float]] = {}
    begin = time.perf_counter()
    try:
        with actorrpc.init():
            best, configuration = search(args, curves)
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    epochs = sum(len(curve) for curve in curves.values())
    print(
        f"best of {args.trials}: trial {best}, accuracy {curves[best][-1]:.3f} with {configuration}; "
        f"{epochs} epochs for {args.trials * len(curves[best])}, in {time.perf_counter() - begin:.1f} s"
    )
    if args.plot:
        draw(curves, best, args.epochs, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
