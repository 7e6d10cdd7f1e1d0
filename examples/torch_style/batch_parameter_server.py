"""A parameter server that updates in batches: one step for the gradients of all trainers together.

Each trainer computes gradients on its share of the data, reports them and gets the next model in return.
The server takes a step once every trainer has reported. ``update_and_fetch_model`` would have to wait for
that, in a thread of the server for each trainer; with ``@rpc.functions.async_execution`` it returns a future
instead, the same for all trainers of a batch, and their answers are sent when the last report completes it. No
gradient is ever stale, and the server adds the gradients in a fixed order, whatever their order of arrival, so the
training equals training in one process with one large batch. (All gradients are local: no distributed autograd.)

    python batch_parameter_server.py                     # on actorrpc: one server, three trainers
    python batch_parameter_server.py --world_size 6      # five trainers
    python batch_parameter_server.py --backend torch     # the same program on torch.distributed.rpc

The data are the handwritten digits that come with scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy

import actorrpc.rpc as rpc

TEST_IMAGES = 297  # the last ones; the trainers share the other 1500


def use_torch() -> None:
    """Give the name ``rpc`` to torch's own RPC. The mark of async_execution below means the same to both."""
    global rpc
    import torch.distributed.rpc as rpc


def digits() -> tuple[Tensor, Tensor]:
    """Return 1797 images of 8 x 8 pixels, and which digit each of them shows."""
    data = import_module("sklearn.datasets").load_digits()  # takes a second: once, on the server
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)
    return images / 16, torch.tensor(data.target)


def make_model(seed: int) -> nn.Module:
    """Return an untrained model."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class BatchUpdateParameterServer:
    """Holds the model and its optimizer, and the gradients reported since the last step."""

    def __init__(self, trainers: int, *, lr: float, seed: int) -> None:
        self.trainers = trainers
        self.model = make_model(seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        # The lock guards what follows: each report comes in a thread of its own.
        self.lock = threading.Lock()
        self.reported: dict[int, list[Tensor]] = {}
        self.future_model: torch.futures.Future[nn.Module] = torch.futures.Future()

    def get_model(self) -> nn.Module:
        """Return the current model; the caller gets a copy."""
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(ps_rref: Any, trainer: int, grads: list[Tensor]) -> Any:
        """Take the gradients of a trainer; return the future of the model after the next step."""
        self = ps_rref.local_value()
        with self.lock:
            self.reported[trainer] = grads
            future = self.future_model
            if len(self.reported) < self.trainers:
                return future
            reported = [self.reported[index] for index in sorted(self.reported)]
            self.reported = {}
            self.future_model = torch.futures.Future()
        # All trainers wait for this future, so no other thread runs this code or reads the model.
        for parameter, *parts in zip(self.model.parameters(), *reported, strict=True):
            parameter.grad = torch.stack(parts).mean(0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        future.set_result(self.model)
        return future

    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Return the fraction of images that the model recognises."""
        with torch.no_grad():
            return (self.model(images).argmax(1) == labels).float().mean().item()


class Trainer:
    """Computes gradients on its share of the images."""

    def __init__(
        self, ps_rref: Any, index: int, images: Tensor, labels: Tensor, args: argparse.Namespace
    ) -> None:
        self.ps_rref = ps_rref
        self.index = index
        self.images = images
        self.labels = labels
        self.args = args
        self.dice = torch.Generator().manual_seed(args.seed + index)

    def get_next_batch(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of the images, in another order in each epoch."""
        for _ in range(self.args.epochs):
            for chosen in torch.randperm(len(self.images), generator=self.dice).split(self.args.batch):
                yield self.images[chosen], self.labels[chosen]

    def train(self) -> list[float]:
        """Report gradients and go on with the model that comes back; return the losses."""
        model = self.ps_rref.rpc_sync().get_model()
        losses = []
        for images, labels in self.get_next_batch():
            loss = cross_entropy(model(images), labels)
            loss.backward()
            losses.append(loss.item())
            model = rpc.rpc_sync(
                self.ps_rref.owner(),
                BatchUpdateParameterServer.update_and_fetch_model,
                args=(self.ps_rref, self.index, [parameter.grad for parameter in model.parameters()]),
            )
            if self.index == 0 and len(losses) % 16 == 0:
                print(f"update {len(losses):4d}  loss {loss.item():.3f}", flush=True)
        return losses


def run_trainer(ps_rref: Any, index: int, *share_and_args: Any) -> list[float]:
    """Train; called by the server, runs on a trainer."""
    return Trainer(ps_rref, index, *share_and_args).train()


def run_ps(args: argparse.Namespace) -> None:
    """Make a server here, have all trainers train with it, and say how good the model is."""
    images, labels = digits()
    trainers = args.world_size - 1
    # Shares of equal size: otherwise some trainers would wait for reports of trainers that have finished.
    size = (len(images) - TEST_IMAGES) // trainers
    shares = list(zip(images.split(size), labels.split(size), strict=True))
    ps = BatchUpdateParameterServer(trainers, lr=args.lr, seed=args.seed)
    ps_rref = rpc.RRef(ps)
    start = time.perf_counter()
    futures = [
        rpc.rpc_async(
            f"trainer{index}",
            run_trainer,
            args=(ps_rref, index, *shares[index], args),
            timeout=0,
        )
        for index in range(trainers)
    ]
    losses = [future.wait() for future in futures]
    seconds = time.perf_counter() - start

    accuracy = ps.accuracy(images[-TEST_IMAGES:], labels[-TEST_IMAGES:])
    updates = len(losses[0])
    if args.json:
        result = {"backend": args.backend, "accuracy": accuracy, "updates_per_second": updates / seconds}
        print(json.dumps(result | {"losses": losses}), flush=True)
    else:
        print(
            f"{updates} updates with {updates * trainers} gradients in {seconds:.1f} s: "
            f"{updates / seconds:.1f} updates/s on {args.backend}"
        )
        print(f"accuracy on {TEST_IMAGES} unseen images: {accuracy:.3f}", flush=True)


def run_worker(rank: int, args: argparse.Namespace) -> None:
    """Be one member of the group: the server on rank 0, a trainer on any other rank."""
    if args.backend == "torch":
        use_torch()
    torch.set_num_threads(1)
    rpc.init_rpc("ps" if rank == 0 else f"trainer{rank - 1}", rank=rank, world_size=args.world_size)
    if rank == 0:
        run_ps(args)
    # Waits until all members are here; until then the trainers do what the server asks of them.
    rpc.shutdown()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        description="Train a small model on a parameter server that takes one step for all trainers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--backend", choices=("actorrpc", "torch"), default="actorrpc", help="which RPC to run on")
    add("--world_size", type=int, default=4, help="processes: one server, the rest trainers")
    add("--epochs", type=int, default=6, help="how often a trainer goes through its share of the images")
    add("--batch", type=int, default=16, help="images in a trainer's share of a batch")
    add("--lr", type=float, default=0.05, help="learning rate of SGD with momentum")
    add("--seed", type=int, default=1)
    add("--json", action="store_true", help="print the outcome as one line of JSON")
    args = parser.parse_args(argv)
    if args.world_size < 2:
        parser.error("--world_size: a server and a trainer make 2")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Start all processes of the group and wait for them; return the exit status."""
    args = parse(argv)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        os.environ.setdefault("MASTER_PORT", str(probe.getsockname()[1]))
    try:
        spawn(run_worker, args=(args,), nprocs=args.world_size)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
