"""Split learning: several clients and a server train one model, and no client's data leaves it.

    python examples/split_learning.py --clients 3

The clients have the data and the bottom layers of the model, the server has the top layers. A client sends the output of
the bottom layers, the server sends back its scores, and only the client has the labels from which the loss is computed.
Gradients take the same way back: client -> server -> client. Clients take turns, and each gets the bottom layers from
the client before it.

All of them are actors whose classes are nn.Modules. The driver has handles: it makes calls whose arguments are results of
other calls, so activations do not pass through the driver; it starts the backward pass, and its optimizer updates the
parameters where they are. At the end, the same training in this process alone must give the same losses.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import actorrpc
import actorrpc.autograd as dist_autograd
from actorrpc.optim import DistributedOptimizer

HEIGHT, WIDTH, DIGITS = 14, 10, 10
# The seven bars of a digit as rows and columns of a picture, and which of them each digit has.
BARS = (
    (slice(0, 2), slice(0, 6)),  # a: top
    (slice(0, 6), slice(4, 6)),  # b: upper right
    (slice(5, 11), slice(4, 6)),  # c: lower right
    (slice(9, 11), slice(0, 6)),  # d: bottom
    (slice(5, 11), slice(0, 2)),  # e: lower left
    (slice(0, 6), slice(0, 2)),  # f: upper left
    (slice(4, 6), slice(0, 6)),  # g: middle
)
SHAPES = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")


def draw_digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy images of digits at random positions, and their labels."""
    dice = torch.Generator().manual_seed(seed)
    labels = torch.randint(DIGITS, (count,), generator=dice)
    pictures = 0.3 * torch.randn(count, 1, HEIGHT, WIDTH, generator=dice)
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        down, right = (int(torch.randint(4, (), generator=dice)) for _ in range(2))
        shape = torch.zeros(11, 6)
        for bar in SHAPES[label]:
            shape[BARS["abcdefg".index(bar)]] = 1.0
        picture[0, down : down + 11, right : right + 6] += shape
    return pictures, labels


def make_bottom(seed: int) -> nn.Module:
    """Return the layers that turn images into features."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def make_top(seed: int) -> nn.Module:
    """Return the layers that turn features into scores."""
    torch.manual_seed(seed + 1)
    features = 8 * (HEIGHT // 2) * (WIDTH // 2)
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, DIGITS))


class Share:
    """The data of one client: batches of training images, and test images."""

    def __init__(self, index: int, batch: int) -> None:
        self.pictures, self.labels = draw_digits(400, seed=2 * index)
        self.unseen = draw_digits(200, seed=2 * index + 1)
        self.dice = torch.Generator().manual_seed(index)
        self.batch = batch

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return some images and their labels."""
        chosen = torch.randint(len(self.labels), (self.batch,), generator=self.dice)
        return self.pictures[chosen], self.labels[chosen]


@actorrpc.remote
class Server(nn.Module):
    """Has the top layers of the model, and receives neither images nor labels."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = make_top(seed)

    def forward(self, features: Tensor) -> Tensor:
        """Return the scores of the digits."""
        scores: Tensor = self.layers(features)
        return scores

    @torch.no_grad()
    def classify(self, features: Tensor) -> Tensor:
        """Return the digits with the best scores."""
        return self.layers(features).argmax(1)


@actorrpc.remote
class Client(nn.Module):
    """Has the bottom layers of the model, and private data."""

    def __init__(self, index: int, batch: int, seed: int) -> None:
        super().__init__()
        self.layers = make_bottom(seed)
        self.share = Share(index, batch)  # not in state_dict(), which the next client gets

    def forward(self) -> Tensor:
        """Return the features of the next batch of images; its labels are kept for ``loss``."""
        pictures, self.wanted = self.share.next_batch()
        features: Tensor = self.layers(pictures)
        return features

    def loss(self, scores: Tensor) -> Tensor:
        """Return the loss of the scores of the current batch."""
        return cross_entropy(scores, self.wanted)

    @torch.no_grad()
    def accuracy(self, server: actorrpc.ActorHandle[Server]) -> float:
        """Return the fraction of the test images that are recognised."""
        pictures, labels = self.share.unseen
        found = actorrpc.get(server.classify.remote(self.layers(pictures)))
        return (found == labels).float().mean().item()


def train_split(
    server: actorrpc.ActorHandle[Server],
    clients: list[actorrpc.ActorHandle[Client]],
    args: argparse.Namespace,
) -> list[float]:
    """Let the clients train with the server, one after another; return the loss of each step."""
    # One optimizer for all: a step changes the parameters with gradients in its context, of the server and one client.
    optimizer = DistributedOptimizer(torch.optim.Adam, [server, *clients], lr=args.lr)
    losses: list[float] = []
    before = clients[0]
    for turn in range(args.rounds):
        for client in clients:
            if client is not before:
                client.load_state_dict.remote(before.state_dict.remote())  # from client to client
            for _ in range(args.steps):
                with dist_autograd.context() as context_id:
                    features = client.forward.remote()
                    loss = actorrpc.get(client.loss.remote(server.forward.remote(features)))
                    dist_autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
                losses.append(loss.item())
            before = client
        recent = losses[-args.steps * len(clients) :]
        print(f"round {turn + 1:2d}  loss {math.fsum(recent) / len(recent):.3f}", flush=True)
    return losses


def train_alone(args: argparse.Namespace) -> list[float]:
    """Do the same with everything in this process; return the loss of each step."""
    top, bottoms = make_top(args.seed), [make_bottom(args.seed) for _ in range(args.clients)]
    optimizer = torch.optim.Adam(nn.ModuleList([top, *bottoms]).parameters(), lr=args.lr)
    shares = [Share(index, args.batch) for index in range(args.clients)]
    losses = []
    before = bottoms[0]
    for _ in range(args.rounds):
        for bottom, share in zip(bottoms, shares, strict=True):
            if bottom is not before:
                bottom.load_state_dict(before.state_dict())
            for _ in range(args.steps):
                pictures, labels = share.next_batch()
                loss = cross_entropy(top(bottom(pictures)), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            before = bottom
    return losses


def main() -> int:
    """Train both ways and compare; the exit status says whether they agree."""
    parser = argparse.ArgumentParser(description="Train a model whose bottom and data are with the clients.")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each client (default 8)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn (default 10)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-3, help="learning rate of Adam (default 0.005)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # as in the actors

    with actorrpc.init():
        server = Server.remote(args.seed)
        clients = [Client.remote(index, args.batch, args.seed) for index in range(args.clients)]
        actorrpc.get([actorrpc.ready(actor) for actor in (server, *clients)])
        start = time.perf_counter()
        losses = train_split(server, clients, args)
        seconds = time.perf_counter() - start
        # The last client has the bottom as it is now; the others get it before they are tested.
        bottom = clients[-1].state_dict.remote()
        for client in clients[:-1]:
            client.load_state_dict.remote(bottom)
        accuracies = actorrpc.get([client.accuracy.remote(server) for client in clients])
    agree = torch.allclose(torch.tensor(losses), torch.tensor(train_alone(args)), rtol=1e-3, atol=1e-4)
    print(
        f"{args.clients} clients, {len(losses)} steps in {seconds:.2f} s: "
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {'the same' if agree else 'NOT THE SAME'} as in one process; "
        f"accuracy {sum(accuracies) / len(accuracies):.3f}"
    )
    return 0 if agree else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
