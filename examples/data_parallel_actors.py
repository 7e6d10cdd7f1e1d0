"""Data parallel training in actors: each uses DistributedDataParallel, and the driver replaces lost actors.

    python examples/data_parallel_actors.py --trainers 3
    python examples/data_parallel_actors.py --lose 2       # a trainer dies in the second epoch, and training continues

The trainers are actors of one class. A collective puts them into a process group of torch.distributed (gloo), through
which DDP averages their gradients: the driver receives losses and no tensors. When a trainer dies, the current step of the
others ends with a CollectiveError; supervision restarts the trainer, the collective is rebuilt, a surviving trainer sends
its weights to the new one, and the epoch continues where it was. If no trainer is lost, the result equals the result of
one process with the same batches, which is checked at the end. The images are scikit-learn's handwritten digits.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import actorrpc

TESTED = 297  # images for the test, which are not trained on
RATE = 0.2


def load() -> tuple[Tensor, Tensor]:
    """Return images of digits, shuffled, and their labels."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    pictures = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    return pictures, torch.tensor(digits.target, dtype=torch.int64)[order]


def make_model(seed: int) -> nn.Sequential:
    """Return an untrained model."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def batches(epoch: int, count: int, size: int) -> list[Tensor]:
    """Return the indices of the images of each step of an epoch; all trainers compute the same."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch + 1))
    return list(order[: count // size * size].split(size))


@actorrpc.remote(max_restarts=3)
class Trainer:
    """Learns from its share of each batch."""

    def __init__(self, seed: int, batch: int, pictures: Tensor, labels: Tensor) -> None:
        torch.set_num_threads(1)
        self.pictures, self.labels = pictures, labels
        self.batch = batch
        self.model = make_model(seed)
        self.progress = (0, 0)  # the next epoch and step

    def train(self, epoch: int, first: int, dies: bool = False) -> float:
        """Train on the batches of an epoch from ``first`` on; return the mean loss of this trainer's shares."""
        group = actorrpc.collective_group()
        model = DistributedDataParallel(self.model, process_group=group)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        losses = []
        for step, batch in enumerate(batches(epoch, len(self.labels) - TESTED, self.batch)[first:], first):
            if dies and group.rank() == 1 and step == first + 3:
                os._exit(1)
            share = batch.chunk(group.size())[group.rank()] + TESTED
            optimizer.zero_grad()
            loss = cross_entropy(model(self.pictures[share]), self.labels[share])
            loss.backward()
            optimizer.step()
            self.progress = (epoch, step + 1)
            losses.append(loss.item())
        self.progress = (epoch + 1, 0)
        return sum(losses) / max(1, len(losses))

    def where(self) -> tuple[int, int]:
        """Return the next epoch and step."""
        return self.progress

    def accuracy(self) -> float:
        """Return the fraction of the test images that are recognised."""
        with torch.no_grad():
            found = self.model(self.pictures[:TESTED]).argmax(1)
        return (found == self.labels[:TESTED]).float().mean().item()

    def parameters(self) -> list[Tensor]:
        """Return the parameters."""
        return [each.detach() for each in self.model.parameters()]


def train_alone(seed: int, epochs: int, batch: int, pictures: Tensor, labels: Tensor) -> list[Tensor]:
    """Do the same training in this process."""
    model = make_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for epoch in range(epochs):
        for chosen in batches(epoch, len(labels) - TESTED, batch):
            optimizer.zero_grad()
            cross_entropy(model(pictures[chosen + TESTED]), labels[chosen + TESTED]).backward()
            optimizer.step()
    return [each.detach() for each in model.parameters()]


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trainers", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=20, help="pictures of each trainer in a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--lose", type=int, default=0, metavar="EPOCH", help="a trainer dies in this epoch (from 1)"
    )
    options = parser.parse_args()
    whole = options.batch * options.trainers
    begin = time.perf_counter()
    actorrpc.init(num_cpus=max(options.trainers, os.cpu_count() or 1))
    pictures, labels = load()
    trainers = [Trainer.remote(options.seed, whole, pictures, labels) for _ in range(options.trainers)]
    collective = actorrpc.collective(trainers)
    epoch = first = 0
    dies, lost = options.lose > 0, False
    while epoch < options.epochs:
        try:
            found = actorrpc.get(collective.call("train", epoch, first, dies and epoch == options.lose - 1))
        except (actorrpc.CollectiveError, actorrpc.ActorUnavailableError) as error:
            print(f"epoch {epoch + 1}: {type(error).__name__}: a trainer is lost", file=sys.stderr)
            collective.rebuild()
            # The trainer with the most progress sends its weights to all others, including the new one.
            places = actorrpc.get([each.where.remote() for each in trainers])
            (epoch, first), best = max((place, rank) for rank, place in enumerate(places))
            actorrpc.get(collective.broadcast("model", src=best))
            dies, lost = False, True
            print(
                f"all {len(collective)} are back: it goes on at epoch {epoch + 1}, step {first + 1}",
                file=sys.stderr,
            )
            continue
        epoch, first = epoch + 1, 0
        print(f"epoch {epoch}: loss {sum(found) / len(found):.3f}", file=sys.stderr)
    accuracy = actorrpc.get(trainers[0].accuracy.remote())
    learned = actorrpc.get(trainers[-1].parameters.remote())
    took = time.perf_counter() - begin
    collective.destroy()
    actorrpc.shutdown()
    print(f"{options.trainers} trainers, {options.epochs} epochs in {took:.1f} s: accuracy {accuracy:.3f}")
    if not lost:
        alone = train_alone(options.seed, options.epochs, whole, pictures, labels)
        same = all(
            torch.allclose(mine, theirs, atol=1e-4) for mine, theirs in zip(alone, learned, strict=True)
        )
        print(f"{'the same as' if same else 'NOT the same as'} in one process")
        return 0 if same else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
