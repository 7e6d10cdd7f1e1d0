"""Data parallel and model parallel at once: DDP trainers, and an embedding on a parameter server.

Two trainers learn to classify texts by topic. The small dense layers of the model are replicated: each trainer has a
copy, and DistributedDataParallel (on gloo) averages their gradients. The embedding, which is large in real programs,
exists once, on a parameter server; trainers use it like any other layer, as a RemoteModule. A master starts all of
this and does not train. This is torch's tutorial on DDP and RPC, with generated texts.

    python ddp_hybrid.py                       # on actorrpc
    python ddp_hybrid.py --backend torch       # the same program on torch.distributed.rpc

The backward pass runs through distributed autograd, which DDP's hooks take part in: they see each gradient of the
dense layers as they would in a local pass, and average it before the optimizer gets it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

__all__ = ["HybridModel", "Result", "Texts", "main", "make_layers"]

MASTER, SERVER, TRAINER = "master", "ps", "trainer{}"
TOPICS = 8
LONGEST = 12  # words of a text

# The modules, chosen by --backend. Each process sets them in run_worker(), before it makes any object.
rpc: Any = None
dist_autograd: Any = None
DistributedOptimizer: Any = None
RemoteModule: Any = None


def choose(backend: str) -> None:
    """Import the modules of a backend: the names in them are the same."""
    global rpc, dist_autograd, DistributedOptimizer, RemoteModule
    package = "torch.distributed" if backend == "torch" else "actorrpc"
    rpc = import_module(f"{package}.rpc")
    dist_autograd = import_module(f"{package}.autograd")
    DistributedOptimizer = import_module(f"{package}.optim").DistributedOptimizer
    RemoteModule = import_module(f"{package}.nn").RemoteModule


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts as an EmbeddingBag takes them: all their words in a row, and where each text begins."""

    words: Tensor
    begins: Tensor
    topics: Tensor

    @classmethod
    def draw(cls, count: int, vocabulary: int, dice: torch.Generator) -> Texts:
        """Return texts of which most words belong to the topic: word ``w`` is one of topic ``w % TOPICS``."""
        topics = torch.randint(TOPICS, (count,), generator=dice)
        lengths = torch.randint(LONGEST // 2, LONGEST + 1, (count,), generator=dice)
        words = torch.randint(vocabulary // TOPICS, (int(lengths.sum()),), generator=dice) * TOPICS
        own = torch.rand(words.shape, generator=dice) < 0.7
        words += torch.where(
            own, topics.repeat_interleave(lengths), torch.randint(TOPICS, words.shape, generator=dice)
        )
        return cls(words, lengths.cumsum(0) - lengths, topics)


def make_layers(width: int) -> nn.Sequential:
    """Return the layers that find the topic in what the embedding gives."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, TOPICS))


class HybridModel(nn.Module):
    """The embedding on the parameter server, then layers that DDP replicates on the trainers."""

    def __init__(self, remote_embedding: Any, width: int) -> None:
        super().__init__()
        self.remote_embedding = remote_embedding
        self.layers = DistributedDataParallel(make_layers(width))

    def forward(self, words: Tensor, begins: Tensor) -> Tensor:
        """Return the scores of the topics for each text."""
        scores: Tensor = self.layers(self.remote_embedding.forward(words, begins))
        return scores

    def parameter_rrefs(self) -> list[Any]:
        """Return references to all parameters, wherever they are."""
        rrefs = self.remote_embedding.remote_parameters()
        return [*rrefs, *(rpc.RRef(parameter) for parameter in self.layers.parameters())]


def accuracy(model: HybridModel, texts: Texts) -> float:
    """Return the share of texts whose topic is found."""
    # no_grad does not reach the server: what it answers has a history, which belongs into a context.
    with dist_autograd.context(), torch.no_grad():
        found = model(texts.words, texts.begins).argmax(1)
    return (found == texts.topics).float().mean().item()


def dice_of(seed: int, rank: int) -> torch.Generator:
    """Return the random generator from which a trainer draws its texts."""
    return torch.Generator().manual_seed(1000 * seed + rank)


def run_trainer(remote_embedding: Any, rank: int, args: argparse.Namespace) -> tuple[list[float], float]:
    """Train, together with the other trainers; return the loss of each step and the accuracy at the end."""
    torch.manual_seed(args.seed)
    model = HybridModel(remote_embedding, args.width)
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=args.lr)
    dice = dice_of(args.seed, rank)
    losses = []
    for step in range(args.steps):
        texts = Texts.draw(args.batch, args.vocabulary, dice)
        with dist_autograd.context() as context_id:
            loss = cross_entropy(model(texts.words, texts.begins), texts.topics)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        # All trainers share the embedding. The barrier keeps their steps together, so that the values that they
        # look up do not depend on timing, and all runs are equal.
        dist.barrier()
        losses.append(loss.item())
        if rank == 0 and (step + 1) % args.log_interval == 0:
            recent = losses[-args.log_interval :]
            print(f"step {step + 1:4d}  loss {sum(recent) / len(recent):.3f}", flush=True)
    unseen = Texts.draw(1000, args.vocabulary, torch.Generator().manual_seed(-1))
    return losses, accuracy(model, unseen)


@dataclass(slots=True)
class Result:
    """The outcome of a training; the losses are the means over the trainers, one a step."""

    backend: str
    trainers: int
    seconds: float
    losses: list[float]
    accuracy: float

    def __str__(self) -> str:
        steps = len(self.losses)
        return (
            f"{steps} steps of {self.trainers} trainers in {self.seconds:.1f} s on {self.backend}, "
            f"{self.seconds / steps * 1e3:.1f} ms a step: loss {self.losses[0]:.3f} -> {self.losses[-1]:.3f}, "
            f"accuracy {self.accuracy:.3f}"
        )


def run_master(args: argparse.Namespace) -> None:
    """Make the embedding, have the trainers train, and tell the outcome."""
    remote_embedding = RemoteModule(
        f"{SERVER}/cpu", nn.EmbeddingBag, args=(args.vocabulary, args.width), kwargs={"mode": "sum"}
    )
    start = time.perf_counter()
    futures = [
        rpc.rpc_async(TRAINER.format(rank), run_trainer, args=(remote_embedding, rank, args), timeout=0)
        for rank in range(args.trainers)
    ]
    losses, accuracies = zip(*torch.futures.wait_all(futures), strict=True)
    seconds = time.perf_counter() - start
    means = [sum(step) / len(step) for step in zip(*losses, strict=True)]
    result = Result(args.backend, args.trainers, seconds, means, sum(accuracies) / len(accuracies))
    print(json.dumps(asdict(result)) if args.json else result, flush=True)


def run_worker(rank: int, args: argparse.Namespace, meeting: str) -> None:
    """Be one member: a trainer on the first ranks, then the master, then the parameter server."""
    choose(args.backend)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    trains = rank < args.trainers
    name = TRAINER.format(rank) if trains else (MASTER, SERVER)[rank - args.trainers]
    if trains:
        # The group on which DDP averages: the trainers alone.
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=args.trainers)
    rpc.init_rpc(name, rank=rank, world_size=args.trainers + 2)
    if name == MASTER:
        run_master(args)
    # Waits until all members are here; until then trainers and server serve calls.
    rpc.shutdown()
    if trains:
        dist.destroy_process_group()


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
        description="Tell topics of texts apart: trainers under DDP, and an embedding on a parameter server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--backend", choices=("actorrpc", "torch"), default="actorrpc", help="which RPC to run on")
    add("--trainers", type=whole_number(1), default=2, help="beside them run a master and a server")
    add("--steps", type=whole_number(1), default=200, help="steps of each trainer")
    add("--batch", type=whole_number(1), default=64, help="texts of each trainer in a step")
    add("--vocabulary", type=whole_number(TOPICS), default=400, help="words that there are")
    add("--width", type=whole_number(1), default=32, help="size of a word's vector")
    add("--lr", type=float, default=1.0, help="learning rate")
    add("--seed", type=whole_number(0), default=0, help="seed of the model and of the texts")
    add("--log_interval", type=whole_number(1), default=20, help="steps between log lines")
    add("--json", action="store_true", help="print the outcome as one line of JSON")
    return parser.parse_args(argv)


def free_port() -> int:
    """Return a TCP port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
    return port


def main(argv: Sequence[str] | None = None) -> int:
    """Start all processes and wait for them; return the exit status."""
    args = parse(argv)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    with tempfile.TemporaryDirectory(prefix="ddp-hybrid-") as scratch:
        try:
            spawn(run_worker, args=(args, f"file://{scratch}/trainers"), nprocs=args.trainers + 2)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
