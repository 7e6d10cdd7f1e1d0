"""A parameter server as an actor: it holds the model and the optimizer, workers compute gradients.

    python examples/parameter_server.py                  # every step waits for all workers
    python examples/parameter_server.py --mode async     # every gradient is applied as soon as it arrives

The driver only makes the calls. It has ObjectRefs of weights and gradients, whose values go directly from the server to
the workers and back, and never pass the driver.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import actorrpc

FEATURES, CLASSES = 32, 10


def make_model() -> nn.Module:
    """Return the model that the server and the workers use, untrained."""
    return nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def make_data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy points around one centre for each class, and their classes."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    dice = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=dice)
    return centres[labels] + 1.5 * torch.randn(count, FEATURES, generator=dice), labels


@actorrpc.remote
class ParameterServer:
    """Owns the parameters; no other actor changes them."""

    def __init__(self, lr: float) -> None:
        torch.manual_seed(0)
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.test_data = make_data(2000, seed=-1)

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the parameters as they are now."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def apply(self, *gradients: list[Tensor]) -> dict[str, Tensor]:
        """Take one step along the mean of these gradients; return the new parameters."""
        for parameter, *parts in zip(self.model.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack(parts).mean(0)
        self.optimizer.step()
        return self.weights()

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the fraction of unseen points that are classified correctly."""
        points, labels = self.test_data
        return (self.model(points).argmax(1) == labels).float().mean().item()


@actorrpc.remote
class Worker:
    """Computes gradients on a share of the data that only it has."""

    def __init__(self, index: int, batch: int) -> None:
        self.model = make_model()
        self.points, self.labels = make_data(4000, seed=1 + index)
        self.dice = torch.Generator().manual_seed(index)
        self.batch = batch

    def gradient(self, weights: dict[str, Tensor]) -> list[Tensor]:
        """Return the gradients of the loss on the next batch, at these weights."""
        self.model.load_state_dict(weights)
        self.model.zero_grad()
        chosen = torch.randint(len(self.labels), (self.batch,), generator=self.dice)
        cross_entropy(self.model(self.points[chosen]), self.labels[chosen]).backward()
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]


Server = actorrpc.ActorHandle[ParameterServer]
Workers = list[actorrpc.ActorHandle[Worker]]


def train_sync(server: Server, workers: Workers, steps: int) -> None:
    """Make a step of the gradients of all workers. All calls are made without waiting for their results."""
    weights = server.weights.remote()
    for step in range(steps):
        # References as arguments: the receiver gets the values, from where they are.
        weights = server.apply.remote(*[worker.gradient.remote(weights) for worker in workers])
        if (step + 1) % 10 == 0:
            print(f"step {step + 1:4d}  accuracy {actorrpc.get(server.accuracy.remote()):.3f}", flush=True)


def train_async(server: Server, workers: Workers, steps: int) -> None:
    """Make a step whenever a worker has answered, and send the new parameters to that worker."""
    weights = server.weights.remote()
    working = {worker.gradient.remote(weights): worker for worker in workers}
    for step in range(steps * len(workers)):
        (gradient,), _ = actorrpc.wait(list(working), num_returns=1)
        worker = working.pop(gradient)
        working[worker.gradient.remote(server.apply.remote(gradient))] = worker
        if (step + 1) % (10 * len(workers)) == 0:
            print(f"step {step + 1:4d}  accuracy {actorrpc.get(server.accuracy.remote()):.3f}", flush=True)
    actorrpc.get(list(working))


def main() -> int:
    """Train, and print the accuracy."""
    parser = argparse.ArgumentParser(description="Train a small classifier with a parameter server.")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50, help="steps of each worker (default 50)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, help="learning rate (default 0.1; async 0.1 / workers)")
    args = parser.parse_args()
    lr = args.lr or (0.1 if args.mode == "sync" else 0.1 / args.workers)

    with actorrpc.init():
        server = ParameterServer.remote(lr)
        workers = [Worker.remote(index, args.batch) for index in range(args.workers)]
        actorrpc.get([actorrpc.ready(server), *map(actorrpc.ready, workers)])
        start = time.perf_counter()
        (train_sync if args.mode == "sync" else train_async)(server, workers, args.steps)
        accuracy = actorrpc.get(server.accuracy.remote())
        seconds = time.perf_counter() - start
    print(
        f"{args.mode}: {args.steps * args.workers} gradients of {args.workers} workers in {seconds:.2f} s, "
        f"accuracy {accuracy:.3f}"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
