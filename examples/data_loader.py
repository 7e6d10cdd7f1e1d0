"""Loading data in parallel with training: actors read, unpack and distort images in advance, up to a limit.

    python examples/data_loader.py --loaders 2 --ahead 4

Each loader is an actor whose generator method yields batches. With ``options(max_buffered_items=4)`` a generator
produces up to four batches in advance; then it pauses until the reader takes one, so memory stays bounded however slow
the training is. For comparison, the same batches are then loaded in the training process, between the steps. Both ways
must give the same loss; they differ in the number of images per second.

The data are scikit-learn's handwritten digits, packed into files, and distorted at random for each use. torch has one
thread in each process, so the speed of both ways depends on how many processors they keep busy.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, interpolate
from tqdm import tqdm

import actorrpc

SIZE = 40  # width and height of a picture
PER_FILE = 256

Batch = tuple[Tensor, Tensor]


class Run(NamedTuple):
    """The result of a training: the numbers of images and when they were reached, and the mean of the last losses."""

    items: list[int]
    seconds: list[float]
    loss: float

    @property
    def rate(self) -> float:
        """Pictures in a second."""
        return self.items[-1] / self.seconds[-1]


def write_files(folder: Path, count: int, seed: int) -> list[Path]:
    """Pack the digits into files, in an order drawn from the seed."""
    digits = load_digits()
    dice = np.random.default_rng(seed)
    paths = [folder / f"{number}.npz" for number in range(count)]
    for path in paths:
        chosen = dice.integers(len(digits.target), size=PER_FILE)
        pictures = np.kron(digits.images[chosen] / 16, np.ones((5, 5))).astype(np.float32)
        np.savez_compressed(path, pictures=pictures, labels=digits.target[chosen])
    return paths


def bend(pictures: Tensor, dice: torch.Generator) -> Tensor:
    """Rotate, shift and distort each image a little, like the variations of handwriting."""
    count = len(pictures)
    angle = 0.5 * (torch.rand(count, generator=dice) - 0.5)
    turned = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(count, 2, 2)
    shift = 0.2 * (torch.rand(count, 2, 1, generator=dice) - 0.5)
    grid = affine_grid(torch.cat([turned, shift], 2), [count, 1, SIZE, SIZE], align_corners=False)
    waves = 0.15 * torch.randn(count, 2, 5, 5, generator=dice)
    waves = interpolate(waves, size=(SIZE, SIZE), mode="bicubic", align_corners=False)
    bent = grid_sample(pictures.unsqueeze(1), grid + waves.permute(0, 2, 3, 1), align_corners=False)
    return bent + 0.05 * torch.randn(bent.shape, generator=dice)


def load(paths: Iterable[Path], size: int) -> Iterator[Batch]:
    """Yield the batches of some files."""
    for path in paths:
        dice = torch.Generator().manual_seed(int(path.stem))
        with np.load(path) as packed:
            pictures, labels = torch.from_numpy(packed["pictures"]), torch.from_numpy(packed["labels"])
        for start in range(0, PER_FILE, size):
            yield bend(pictures[start : start + size], dice), labels[start : start + size]


@actorrpc.remote(concurrency_groups={"questions": 1})
class Loader:
    """Makes batches."""

    def __init__(self) -> None:
        self.count = 0

    def batches(self, paths: list[Path], size: int) -> Iterator[Batch]:
        """Yield the batches of some files, up to ``max_buffered_items`` in advance."""
        for batch in load(paths, size):
            self.count += 1
            yield batch

    @actorrpc.method(concurrency_group="questions")
    def made(self) -> int:
        """Return how many batches were made; also answers while the generator is paused."""
        return self.count


class Prefetched:
    """Batches from loaders, in the order of the files, which are assigned to the loaders in turn.

    Attributes:
        furthest: the largest observed number of batches that a loader had made in advance.
    """

    def __init__(
        self, loaders: list[actorrpc.ActorHandle[Loader]], paths: list[Path], size: int, ahead: int
    ) -> None:
        self.loaders, self.files, self.per_file = loaders, len(paths), math.ceil(PER_FILE / size)
        self.furthest = 0
        self.streams = [
            loader.batches.options(max_buffered_items=ahead).remote(paths[number :: len(loaders)], size)
            for number, loader in enumerate(loaders)
        ]

    def __iter__(self) -> Iterator[Batch]:
        values = [stream.values() for stream in self.streams]
        taken = [0] * len(values)
        for file in range(self.files):
            which = file % len(values)
            for _ in range(self.per_file):
                taken[which] += 1
                yield next(values[which])
            made = actorrpc.get([loader.made.remote() for loader in self.loaders])
            self.furthest = max(self.furthest, *(m - t for m, t in zip(made, taken, strict=True)))


def train(batches: Iterable[Batch], total: int, seed: int, title: str) -> Run:
    """Learn from all batches."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.LazyLinear(10)),
    )
    net(torch.zeros(1, 1, SIZE, SIZE))  # the lazy layer takes its width from this input
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    items, seconds, losses = [0], [0.0], []
    begin = time.perf_counter()
    with tqdm(total=total, desc=title, unit="picture", disable=None) as progress:
        for pictures, labels in batches:
            optimizer.zero_grad()
            loss = cross_entropy(net(pictures), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            items.append(items[-1] + len(labels))
            seconds.append(time.perf_counter() - begin)
            progress.update(len(labels))
    last = losses[-10:]
    return Run(items, seconds, sum(last) / len(last))


def draw(runs: dict[str, Run], file: str) -> None:
    """Write the progress of both runs as a PNG."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for title, run in runs.items():
        axes.plot(run.seconds, run.items, linewidth=1.5, label=f"{title}: {run.rate:.0f} pictures/s")
    axes.set(xlabel="seconds", ylabel="pictures learned from", xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, format="png", dpi=120)
    print(f"picture: {file}")


def main() -> int:
    """Train both ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--loaders", type=int, default=2, help="actors that load (default 2)")
    parser.add_argument("--ahead", type=int, default=4, help="batches that each may be ahead (default 4)")
    parser.add_argument("--files", type=int, default=120, help=f"of {PER_FILE} pictures each (default 120)")
    parser.add_argument("--batch", type=int, default=64, help="pictures in a batch (default 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", default="data_loader.png", help="the picture ('' for none)")
    args = parser.parse_args()
    if min(args.loaders, args.ahead, args.files, args.batch) < 1:
        parser.error("--loaders, --ahead, --files and --batch must be at least 1")
    torch.set_num_threads(1)
    total = args.files * PER_FILE
    try:
        with tempfile.TemporaryDirectory() as folder, actorrpc.init():
            paths = write_files(Path(folder), args.files, args.seed)
            loaders = [Loader.remote() for _ in range(args.loaders)]
            actorrpc.get([loader.made.remote() for loader in loaders])  # wait until they have started
            train(load(paths[:1], args.batch), PER_FILE, args.seed, "warming up")  # the first steps are slow
            prefetched = Prefetched(loaders, paths, args.batch, args.ahead)
            beside = train(prefetched, total, args.seed, "loaded by actors")
            within = train(load(paths, args.batch), total, args.seed, "loaded in between")
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    same = math.isclose(beside.loss, within.loss, rel_tol=1e-4)
    print(
        f"loaded by {args.loaders} actors: {beside.rate:.0f} items/s, at most {prefetched.furthest} batches ahead"
    )
    print(f"loaded in between: {within.rate:.0f} items/s; {'the same loss' if same else 'NOT the same loss'}")
    if args.plot:
        draw({"loaded by actors": beside, "loaded in between": within}, args.plot)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
