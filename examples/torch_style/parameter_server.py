"""A parameter server: one worker holds the net, the others train it through RPC.

Each trainer has an RRef to the server's ``ParameterServer`` and a share of the data. It sends images and gets
scores back, computes the loss, and lets distributed autograd and the distributed optimizer do the rest on
the server: a trainer never sees a parameter. Trainers do not wait for each other, so their steps mix.

    python parameter_server.py                     # on actorrpc: one server, two trainers
    python parameter_server.py --world_size 5      # four trainers
    python parameter_server.py --backend torch     # the same program on torch.distributed.rpc

The data are the handwritten digits that come with scikit-learn. With one trainer (``--world_size 2``) the
training depends on the seed alone, and is the same on both backends.
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
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy

import actorrpc.autograd as dist_autograd
import actorrpc.rpc as rpc
from actorrpc.optim import DistributedOptimizer

TEST_IMAGES = 297  # the last ones; the trainers share the other 1500


def use_torch() -> None:
    """Give the names above to torch's own RPC: the rest of this program does not know the difference."""
    global rpc, dist_autograd, DistributedOptimizer
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc
    from torch.distributed.optim import DistributedOptimizer


def call_method(method: Callable[..., Any], rref: Any, *args: Any) -> Any:
    """Call a method on the object behind an RRef; runs on its owner."""
    return method(rref.local_value(), *args)


def remote_method(method: Callable[..., Any], rref: Any, *args: Any) -> Any:
    """Call a method on the object behind an RRef, wherever that is."""
    return rpc.rpc_sync(rref.owner(), call_method, args=(method, rref, *args))


def digits() -> tuple[Tensor, Tensor]:
    """Return 1797 images of 8 x 8 pixels, and which digit each of them shows."""
    data = import_module("sklearn.datasets").load_digits()  # takes a second: once, in the first process
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)
    return images / 16, torch.tensor(data.target)


# --- The parameter server --------------------------------------------------------------------------------


class ParameterServer(nn.Module):
    """Holds the net that all trainers train, and what they report."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(
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
        self.lock = threading.Lock()
        self.reports: dict[str, tuple[list[float], float]] = {}

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the ten digits for each image; called by the trainers.

        It computes with a copy of the parameters. Some other trainer's step may change the parameters
        before this trainer's backward pass comes back here, and that must find what the forward pass used.
        """
        with self.lock:  # the net has the copies in place of its parameters while functional_call() runs
            copies = {name: parameter.clone() for name, parameter in self.net.named_parameters()}
            scores: Tensor = torch.func.functional_call(self.net, copies, (images,))
        return scores

    def parameter_rrefs(self) -> list[Any]:
        """Return an RRef to each parameter, for the trainers' optimizers."""
        with self.lock:
            return [rpc.RRef(parameter) for parameter in self.net.parameters()]

    def report(self, trainer: str, losses: list[float], seconds: float) -> None:
        """Store a trainer's losses and the time that it took."""
        self.reports[trainer] = losses, seconds


server: ParameterServer | None = None
server_lock = threading.Lock()


def get_parameter_server(seed: int) -> ParameterServer:
    """Return the only parameter server of this process; the first call creates it."""
    global server
    with server_lock:
        if server is None:
            server = ParameterServer(seed)
        return server


def run_parameter_server(args: argparse.Namespace, images: Tensor, labels: Tensor) -> None:
    """Serve until all trainers have left, then say how good the net is."""
    rpc.init_rpc("parameter_server", rank=0, world_size=args.world_size)
    rpc.shutdown()  # waits for the trainers, and serves their calls until then

    trained = get_parameter_server(args.seed)
    with torch.no_grad():
        right = trained.net(images[-TEST_IMAGES:]).argmax(1) == labels[-TEST_IMAGES:]
    accuracy = right.float().mean().item()
    steps = sum(len(losses) for losses, _ in trained.reports.values())
    seconds = max(seconds for _, seconds in trained.reports.values())
    if args.json:
        losses = {trainer: losses for trainer, (losses, _) in sorted(trained.reports.items())}
        result = {"backend": args.backend, "accuracy": accuracy, "steps_per_second": steps / seconds}
        print(json.dumps(result | {"losses": losses}), flush=True)
    else:
        print(f"{steps} steps in {seconds:.1f} s: {steps / seconds:.1f} steps/s on {args.backend}")
        print(f"accuracy on {TEST_IMAGES} unseen images: {accuracy:.3f}", flush=True)


# --- The trainers ----------------------------------------------------------------------------------------


class TrainerNet(nn.Module):
    """A trainer's stand-in for the net: forward() calls the parameter server."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.server_rref = rpc.remote("parameter_server", get_parameter_server, args=(seed,))

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the ten digits for each image."""
        scores: Tensor = remote_method(ParameterServer.forward, self.server_rref, images)
        return scores

    def parameter_rrefs(self) -> list[Any]:
        """Return RRefs to the parameters, which are all on the server."""
        rrefs: list[Any] = remote_method(ParameterServer.parameter_rrefs, self.server_rref)
        return rrefs


def run_trainer(rank: int, args: argparse.Namespace, images: Tensor, labels: Tensor) -> None:
    """Train the net on one share of the images."""
    name = f"trainer{rank}"
    rpc.init_rpc(name, rank=rank, world_size=args.world_size)
    images, labels = (part[:-TEST_IMAGES][rank - 1 :: args.world_size - 1] for part in (images, labels))
    dice = torch.Generator().manual_seed(args.seed + rank)

    net = TrainerNet(args.seed)
    optimizer = DistributedOptimizer(torch.optim.SGD, net.parameter_rrefs(), lr=args.lr, momentum=0.9)
    losses: list[float] = []
    start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        first = len(losses)
        for chosen in torch.randperm(len(images), generator=dice).split(args.batch):
            with dist_autograd.context() as context_id:
                loss = cross_entropy(net(images[chosen]), labels[chosen])
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            losses.append(loss.item())
        mean = sum(losses[first:]) / (len(losses) - first)
        print(f"{name}  epoch {epoch:2d}/{args.epochs}  loss {mean:.3f}", flush=True)
    remote_method(ParameterServer.report, net.server_rref, name, losses, time.perf_counter() - start)
    rpc.shutdown()


# --- The processes ---------------------------------------------------------------------------------------


def run_worker(rank: int, args: argparse.Namespace, images: Tensor, labels: Tensor) -> None:
    """Be one member of the group: the server on rank 0, a trainer on any other rank."""
    if args.backend == "torch":
        use_torch()
    torch.set_num_threads(1)
    if rank == 0:
        run_parameter_server(args, images, labels)
    else:
        run_trainer(rank, args, images, labels)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        description="Train a small net on a parameter server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--backend", choices=("actorrpc", "torch"), default="actorrpc", help="which RPC to run on")
    add("--world_size", type=int, default=3, help="processes: one server, the rest trainers")
    add("--epochs", type=int, default=10, help="how often a trainer goes through its share of the images")
    add("--batch", type=int, default=32)
    add("--lr", type=float, default=0.03, help="learning rate of SGD with momentum")
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
        spawn(run_worker, args=(args, *digits()), nprocs=args.world_size)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
