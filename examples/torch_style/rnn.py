"""A language model over two workers: the embedding table and the decoder on a parameter server, the LSTM here.

The two ends of a language model grow with its vocabulary, so they live on the worker "ps"; the worker
"trainer" holds the LSTM. Every forward pass crosses over four times (word numbers, embeddings, states of
the LSTM, scores of the words), and every backward pass takes the gradients back along the same way.

    python rnn.py                       # on actorrpc
    python rnn.py --backend torch       # the same program on torch.distributed.rpc

The text is the language reference that CPython ships for ``help()``. A training depends on the seed
alone: both backends go through the same losses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy

import actorrpc.autograd as dist_autograd
import actorrpc.rpc as rpc
from actorrpc.optim import DistributedOptimizer

State = tuple[Tensor, Tensor]


def use_torch() -> None:
    """Give the names above to torch's own RPC: the rest of this program does not know the difference."""
    global rpc, dist_autograd, DistributedOptimizer
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc
    from torch.distributed.optim import DistributedOptimizer


# --- The model -------------------------------------------------------------------------------------------


def call_method(method: Callable[..., Any], rref: Any, *args: Any) -> Any:
    """Call a method on the object behind an RRef; runs on its owner."""
    return method(rref.local_value(), *args)


def remote_method(method: Callable[..., Any], rref: Any, *args: Any) -> Any:
    """Call a method on the object behind an RRef, wherever that is."""
    return rpc.rpc_sync(rref.owner(), call_method, args=(method, rref, *args))


def parameter_rrefs(module: nn.Module) -> list[Any]:
    """Return an RRef for each parameter of a module that is in this process."""
    return [rpc.RRef(parameter) for parameter in module.parameters()]


class EmbeddingTable(nn.Module):
    """The first layer, on the parameter server."""

    def __init__(self, words: int, width: int, seed: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(words, width)
        # Its own generator, so that other random draws in this process do not change the weights.
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1, torch.Generator().manual_seed(seed))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vector of each word."""
        embeddings: Tensor = self.encoder(tokens)
        return embeddings


class Decoder(nn.Module):
    """The last layer, on the parameter server."""

    def __init__(self, words: int, width: int, seed: int) -> None:
        super().__init__()
        self.decoder = nn.Linear(width, words)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1, torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.decoder.bias)

    def forward(self, output: Tensor) -> Tensor:
        """Return the logits of the next word."""
        scores: Tensor = self.decoder(output)
        return scores


class RNNModel(nn.Module):
    """The whole model, on the trainer: a local LSTM between two RRefs."""

    def __init__(self, ps: str, words: int, embedding: int, hidden: int, seed: int) -> None:
        super().__init__()
        self.emb_table_rref = rpc.remote(ps, EmbeddingTable, args=(words, embedding, seed))
        torch.manual_seed(seed)
        self.rnn = nn.LSTM(embedding, hidden)
        self.decoder_rref = rpc.remote(ps, Decoder, args=(words, hidden, seed))

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return the scores of the next words, and the state to go on with."""
        embeddings = remote_method(EmbeddingTable.forward, self.emb_table_rref, tokens)
        output, state = self.rnn(embeddings, state)
        scores = remote_method(Decoder.forward, self.decoder_rref, output)
        return scores, state

    def parameter_rrefs(self) -> list[Any]:
        """Return RRefs to all parameters, here and on the parameter server."""
        return [
            *remote_method(parameter_rrefs, self.emb_table_rref),
            *parameter_rrefs(self.rnn),
            *remote_method(parameter_rrefs, self.decoder_rref),
        ]


# --- The text --------------------------------------------------------------------------------------------


class Text:
    """The prose of CPython's language reference: its words as numbers, in two parts."""

    UNKNOWN = "<unk>"

    def __init__(self, vocabulary: int, seed: int) -> None:
        prose = re.compile(r"\s*[A-Z][^|]*\.\s*")  # excludes grammar, code and tables
        split = (part for text in topics.values() for part in text.split("\n\n") if prose.fullmatch(part))
        words = (tuple(re.findall(r"[a-z]+|[.,:;]", part.lower())) for part in split)
        paragraphs = list(dict.fromkeys(words))  # once each: many stand under several topics
        random.Random(seed).shuffle(paragraphs)
        frequent = Counter(chain.from_iterable(paragraphs)).most_common(vocabulary - 1)
        self.words = [self.UNKNOWN, *(word for word, _ in frequent)]
        self.numbers = {word: number for number, word in enumerate(self.words)}
        held_out = len(paragraphs) // 10
        self.test = self.encode(paragraphs[:held_out])
        self.train = self.encode(paragraphs[held_out:])

    def encode(self, paragraphs: Sequence[Sequence[str]]) -> Tensor:
        """Return the paragraphs as one row of numbers."""
        return torch.tensor([self.numbers.get(word, 0) for word in chain.from_iterable(paragraphs)])


def batches(tokens: Tensor, columns: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut a text into columns and read them side by side: yield some rows, and the same rows one word on."""
    rows = len(tokens) // columns
    table = tokens[: rows * columns].view(columns, rows).t().contiguous()
    for start in range(0, rows - 1, length):
        end = min(start + length, rows - 1)
        yield table[start:end], table[start + 1 : end + 1]


# --- The training ----------------------------------------------------------------------------------------


@torch.no_grad()
def perplexity(model: RNNModel, tokens: Tensor, args: argparse.Namespace) -> float:
    """Return the perplexity of the model on a text."""
    total, count, state = 0.0, 0, None
    for inputs, targets in batches(tokens, args.batch, args.length):
        scores, state = model(inputs, state)
        total += cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum").item()
        count += targets.numel()
    return math.exp(total / count)


@torch.no_grad()
def sample(model: RNNModel, text: Text, count: int, seed: int) -> str:
    """Return words that are sampled one by one from the model."""
    dice = torch.Generator().manual_seed(seed)
    token, state, words = torch.tensor([[text.numbers["."]]]), None, []
    for _ in range(count):
        scores, state = model(token, state)
        scores[..., 0] = -math.inf  # no unknown words
        token = torch.multinomial(torch.softmax(scores[0] / 0.7, 1), 1, generator=dice)
        words.append(text.words[int(token)])
    return re.sub(r" (?=[.,:;])", "", " ".join(words))


def train(args: argparse.Namespace) -> None:
    """Train the model and tell how it went; runs on the trainer."""
    text = Text(args.vocabulary, args.seed)
    model = RNNModel("ps", len(text.words), args.embedding, args.hidden, args.seed)
    optimizer = DistributedOptimizer(torch.optim.Adam, model.parameter_rrefs(), lr=args.lr)
    losses: list[float] = []
    history = [perplexity(model, text.test, args)]
    print(f"{len(text.train)} words of text, {len(text.words)} different ones")
    print(f"untrained  perplexity of unseen text {history[0]:7.1f}", flush=True)

    seconds = 0.0
    for epoch in range(1, args.epochs + 1):
        state = None
        start, first = time.perf_counter(), len(losses)
        for inputs, targets in batches(text.train, args.batch, args.length):
            if state is not None:
                state = (state[0].detach(), state[1].detach())  # no gradients into the batches before
            with dist_autograd.context() as context_id:
                scores, state = model(inputs, state)
                loss = cross_entropy(scores.flatten(0, 1), targets.flatten())
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            losses.append(loss.item())
            if len(losses) - first == args.max_steps:
                break
        took = time.perf_counter() - start
        seconds += took
        steps = len(losses) - first
        history.append(perplexity(model, text.test, args))
        print(
            f"epoch {epoch:4d}  perplexity {math.exp(sum(losses[first:]) / steps):7.1f}, "
            f"of unseen text {history[-1]:7.1f}  {steps / took:.1f} steps/s",
            flush=True,
        )
    speed = len(losses) / seconds
    if args.plot:
        draw(history, f"{len(text.words)} words, LSTM of {args.hidden}, seed {args.seed}", args.plot)
    print("what it says now:", sample(model, text, 60, args.seed))
    if args.json:
        result = {"backend": args.backend, "steps_per_second": speed, "perplexities": history}
        print(json.dumps(result | {"losses": losses}), flush=True)
    else:
        print(f"{len(losses)} steps in {seconds:.1f} s: {speed:.1f} steps/s on {args.backend}", flush=True)


def draw(history: Sequence[float], title: str, file: str) -> None:
    """Write the perplexity after each epoch as a PNG file."""
    figure = import_module("matplotlib.figure").Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(len(history)), history, marker="o")
    axes.set(title=title, xlabel="epoch", ylabel="perplexity of unseen text", yscale="log")
    axes.grid(alpha=0.3, which="both")
    figure.savefig(file, format="png", dpi=120)


# --- The processes ---------------------------------------------------------------------------------------


def run_worker(rank: int, args: argparse.Namespace) -> None:
    """Be one of the two workers."""
    if args.backend == "torch":
        use_torch()
    torch.set_num_threads(1)
    rpc.init_rpc("ps" if rank == 0 else "trainer", rank=rank, world_size=2)
    if rank == 1:
        train(args)
    # Waits until both are here; until then the parameter server serves calls.
    rpc.shutdown()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        description="Train a language model whose two ends are on a parameter server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--backend", choices=("actorrpc", "torch"), default="actorrpc", help="which RPC to run on")
    add("--epochs", type=int, default=5)
    add("--max_steps", type=int, help="end an epoch after this many steps (None: with the text)")
    add("--vocabulary", type=int, default=1200, help="how many words to know")
    add("--embedding", type=int, default=64, help="width of the embeddings")
    add("--hidden", type=int, default=128, help="width of the LSTM")
    add("--batch", type=int, default=16, help="columns of text in a batch")
    add("--length", type=int, default=16, help="words of each column in a batch")
    add("--lr", type=float, default=5e-3, help="learning rate of Adam")
    add("--seed", type=int, default=1)
    add("--plot", default="rnn_curve.png", metavar="FILE", help="the curve as PNG; '' for none")
    add("--json", action="store_true", help="print the outcome as one line of JSON")
    args = parser.parse_args(argv)
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib, or give --plot ''")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Start both workers and wait for them; return the exit status."""
    args = parse(argv)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        os.environ.setdefault("MASTER_PORT", str(probe.getsockname()[1]))
    try:
        spawn(run_worker, args=(args,), nprocs=2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
