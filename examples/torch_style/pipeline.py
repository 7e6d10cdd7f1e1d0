"""A residual network in a pipeline: one half on each of two workers, fed with micro-batches.

The master cuts each batch into micro-batches and sends them through both halves. It gives the second half an RRef of
what the first half will return, so that activations go directly from worker to worker; and while the second half
works on one micro-batch, the first works on the next. One backward pass then runs through all of it, and a
DistributedOptimizer steps where the parameters are. This is torch's tutorial on pipelines with RPC, with a small
network and images that are generated.

    python pipeline.py                             # on actorrpc; time per step for 1, 2, 4 and 8 micro-batches
    python pipeline.py --backend torch             # the same program on torch.distributed.rpc

The network normalises each image separately (GroupNorm), so the number of micro-batches does not change the training:
each number starts with the same parameters and gives the same losses, except for rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy

__all__ = ["Block", "Pipeline", "Result", "Shard", "draw_images", "main", "make_layers"]

MASTER, WORKERS = "master", ("worker1", "worker2")
CLASSES = 8

# The modules, chosen by --backend. Each process sets them in run_worker(), before it makes any object.
rpc: Any = None
dist_autograd: Any = None
DistributedOptimizer: Any = None


def choose(backend: str) -> None:
    """Import the modules of a backend: the names in them are the same."""
    global rpc, dist_autograd, DistributedOptimizer
    package = "torch.distributed" if backend == "torch" else "actorrpc"
    rpc = import_module(f"{package}.rpc")
    dist_autograd = import_module(f"{package}.autograd")
    DistributedOptimizer = import_module(f"{package}.optim").DistributedOptimizer


def draw_images(count: int, size: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return noisy pictures of stripes, and in which of the directions they run."""
    directions = torch.randint(CLASSES, (count,), generator=dice)
    angles = directions * (torch.pi / CLASSES)
    phases = torch.rand(count, generator=dice) * 2 * torch.pi
    across = torch.arange(size) - size / 2
    x, y = torch.meshgrid(across, across, indexing="xy")
    spot = x * angles.cos()[:, None, None] + y * angles.sin()[:, None, None]
    stripes = torch.sin(spot * 1.2 + phases[:, None, None])
    return stripes[:, None] + 0.5 * torch.randn(count, 3, size, size, generator=dice), directions


class Block(nn.Module):
    """A residual block of two convolutions; a stride above 1 makes the picture smaller."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(4, width),
        )
        same = stride == 1 and channels == width
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the sum of the output of the convolutions and the shortcut."""
        return torch.relu(self.body(images) + self.shortcut(images))


def make_layers(half: int, width: int, blocks: int, seed: int) -> nn.Sequential:
    """Return the layers of the first or of the second half of the network; they take about the same time."""
    torch.manual_seed(10 * seed + half)
    if half == 0:
        stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        return nn.Sequential(stem, nn.GroupNorm(4, width), *(Block(width, width) for _ in range(blocks)))
    return nn.Sequential(
        Block(width, 2 * width, stride=2),
        *(Block(2 * width, 2 * width) for _ in range(blocks - 1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, CLASSES),
    )


class Shard(nn.Module):
    """One half of the network, on the worker that has it."""

    def __init__(self, half: int, width: int, blocks: int, seed: int) -> None:
        super().__init__()
        self.layers = make_layers(half, width, blocks, seed)
        # One micro-batch at a time: two at once would only delay both.
        self.lock = threading.Lock()

    def forward(self, images_rref: Any) -> Tensor:
        """Fetch a micro-batch from its owner, and return the output of this half."""
        images = images_rref.to_here()
        with self.lock:
            result: Tensor = self.layers(images)
        return result

    def parameter_rrefs(self) -> list[Any]:
        """Return references to the parameters."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Pipeline:
    """Both halves, as the master sees them."""

    def __init__(self, micro_batches: int, args: argparse.Namespace) -> None:
        self.micro_batches = micro_batches
        self.shards = [
            rpc.remote(worker, Shard, args=(half, args.width, args.blocks, args.seed))
            for half, worker in enumerate(WORKERS)
        ]

    def forward(self, images: Tensor) -> Tensor:
        """Send a batch through the pipeline; return the scores of the classes."""
        first, second = self.shards
        outputs = []
        for micro_batch in images.chunk(self.micro_batches):
            between = first.remote().forward(rpc.RRef(micro_batch))
            outputs.append(second.rpc_async().forward(between))
        return torch.cat(torch.futures.wait_all(outputs))

    def parameter_rrefs(self) -> list[Any]:
        """Return references to all parameters, wherever they are."""
        return [rref for shard in self.shards for rref in shard.rpc_sync().parameter_rrefs()]


@dataclass(slots=True)
class Result:
    """The outcome of a training with one number of micro-batches."""

    backend: str
    micro_batches: int
    seconds_per_step: float
    losses: list[float]

    def __str__(self) -> str:
        return (
            f"{self.micro_batches:2d} micro-batch{'es' if self.micro_batches > 1 else '  '}  "
            f"{self.seconds_per_step * 1e3:6.1f} ms a step on {self.backend}, "
            f"loss {self.losses[0]:.3f} -> {self.losses[-1]:.3f} after {len(self.losses)} steps"
        )


def train(micro_batches: int, args: argparse.Namespace) -> Result:
    """Train a fresh network; runs on the master."""
    model = Pipeline(micro_batches, args)
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=args.lr, momentum=0.9)
    dice = torch.Generator().manual_seed(args.seed)
    losses, times = [], []
    for _ in range(args.steps):
        images, directions = draw_images(args.batch, args.size, dice)
        start = time.perf_counter()
        with dist_autograd.context() as context_id:
            loss = cross_entropy(model.forward(images), directions)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    return Result(args.backend, micro_batches, sorted(times)[len(times) // 2], losses)


def run_worker(rank: int, args: argparse.Namespace) -> None:
    """Be one member of the group: the master on rank 0, or a worker with half of the network."""
    choose(args.backend)
    torch.set_num_threads(1)
    # A worker runs two calls at a time for each micro-batch, so it needs this number of threads.
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=max(16, 4 * max(args.micro_batches)))
    rpc.init_rpc((MASTER, *WORKERS)[rank], rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        results = []
        for micro_batches in args.micro_batches:
            results.append(train(micro_batches, args))
            print(results[-1], flush=True)
        if args.json:
            told = {"backend": args.backend, "trainings": [asdict(result) for result in results]}
            print(json.dumps(told), flush=True)
    # Waits until all members are here; until then the workers serve calls.
    rpc.shutdown()


def whole_number(smallest: int) -> Callable[[str], int]:
    """Return a converter for flags that are whole numbers, and not smaller than this."""

    def convert(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"must be at least {smallest}, not {value}")
        return value

    convert.__name__ = "whole number"  # argparse puts it into its message about other text
    return convert


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        description="Train a residual network, one half on each of two workers, with micro-batches.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--backend", choices=("actorrpc", "torch"), default="actorrpc", help="which RPC to run on")
    add(
        "--micro_batches",
        type=whole_number(1),
        nargs="+",
        default=[1, 2, 4, 8],
        metavar="NUMBER",
        help="into how many parts to cut a batch; a training for each",
    )
    add("--steps", type=whole_number(1), default=30, help="steps of each training")
    add("--batch", type=whole_number(1), default=64, help="images in a step")
    add("--size", type=whole_number(4), default=16, help="pixels of an image's side")
    add("--width", type=whole_number(4), default=16, help="channels of the first half (a multiple of 4)")
    add("--blocks", type=whole_number(1), default=2, help="residual blocks in each half")
    add("--lr", type=float, default=0.03, help="learning rate")
    add("--seed", type=whole_number(0), default=0, help="seed of the network and of the images")
    add("--json", action="store_true", help="print the outcome as one line of JSON")
    args = parser.parse_args(argv)
    if args.width % 4:
        parser.error(f"argument --width: must be a multiple of 4, not {args.width}")
    if max(args.micro_batches) > args.batch:
        parser.error("argument --micro_batches: there are fewer images in a batch")
    return args


def free_port() -> int:
    """Return a TCP port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
    return port


def main(argv: Sequence[str] | None = None) -> int:
    """Start all processes of the group and wait for them; return the exit status."""
    args = parse(argv)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    try:
        spawn(run_worker, args=(args,), nprocs=3)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
