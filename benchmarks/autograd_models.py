"""The models of the autograd benchmark, of which a part is on a server. The same code for both backends.

Remote functions get their worker's modules from :data:`HERE`, which the scenario ``init`` fills in.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["HERE", "Backend", "bag_step", "dot", "echo", "hop", "plain_rnn_step", "rnn_step", "words_of"]

Step = Callable[[], float]  # one training step; returns the loss


class Backend:
    """The modules of one backend, and what a worker keeps for its callers."""

    def __init__(self) -> None:
        self.rpc: Any = None
        self.autograd: Any = None
        self.optimizer: Any = None
        self.kept: dict[object, Any] = {}

    def choose(self, rpc: str) -> None:
        """Import the modules that belong to ``torch.distributed.rpc`` or ``actorrpc.rpc``."""
        package = rpc.rpartition(".")[0]
        self.rpc = importlib.import_module(rpc)
        self.autograd = importlib.import_module(f"{package}.autograd")
        self.optimizer = importlib.import_module(f"{package}.optim").DistributedOptimizer

    def keep(self, name: object, make: Callable[[], Any]) -> Any:
        """Return the object with this name; ``make`` creates it at the first call."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]


HERE = Backend()


# -- the server's side ---------------------------------------------------------------------------------


def make_module(kind: Callable[..., nn.Module], *args: Any) -> tuple[Any, list[Any]]:
    """Make a module here; return a reference to it, and to each of its parameters."""
    torch.manual_seed(0)
    module = kind(*args)
    return HERE.rpc.RRef(module), [HERE.rpc.RRef(parameter) for parameter in module.parameters()]


def shared_module(kind: Callable[..., nn.Module], *args: Any) -> tuple[Any, list[Any]]:
    """Return references to the module of this kind that all callers share."""
    found: tuple[Any, list[Any]] = HERE.keep((kind, args), lambda: make_module(kind, *args))
    return found


def run_module(module: Any, *args: Any) -> Tensor:
    """Run a module of this process."""
    result: Tensor = module.local_value()(*args)
    return result


class WordBag(nn.EmbeddingBag):
    """A table of vectors with sparse gradients: only rows that were used get a gradient."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__(words, width, mode="sum", sparse=True)


# -- the trainer's side --------------------------------------------------------------------------------


def _remote(server: str, how: Callable[..., Any], *args: Any) -> tuple[Any, list[Any]]:
    made: tuple[Any, list[Any]] = HERE.rpc.rpc_sync(server, how, args=args)
    return made


def rnn_step(
    server: str, words: int, width: int, layers: int, length: int, batch: int, until: str = ""
) -> Step:
    """Return a step of torch's model-parallel RNN: embedding and decoder on the server, the LSTM here.

    Each trainer has a model of its own: the decoder's weight must not change between forward and backward. ``until``: end after
    ``"forward"`` or ``"backward"``, to count these phases separately.
    """
    rpc, autograd = HERE.rpc, HERE.autograd
    torch.manual_seed(0)
    table, table_parameters = _remote(server, make_module, nn.Embedding, words, width)
    decoder, decoder_parameters = _remote(server, make_module, nn.Linear, width, words)
    lstm = nn.LSTM(width, width, layers)
    local = [rpc.RRef(parameter) for parameter in lstm.parameters()]
    optimizer = HERE.optimizer(torch.optim.SGD, [*table_parameters, *local, *decoder_parameters], lr=0.05)
    text = torch.randint(words, (length + 1, batch), generator=torch.Generator().manual_seed(1))
    given, wanted = text[:-1], text[1:].reshape(-1)

    def step() -> float:
        with autograd.context() as context:
            embedded = rpc.rpc_sync(table.owner(), run_module, args=(table, given))
            output, _ = lstm(embedded)
            scores = rpc.rpc_sync(decoder.owner(), run_module, args=(decoder, output))
            loss = cross_entropy(scores.view(-1, words), wanted)
            if until != "forward":
                autograd.backward(context, [loss])
                if until != "backward":
                    optimizer.step(context)
        return loss.item()

    return step


def plain_rnn_step(words: int, width: int, layers: int, length: int, batch: int) -> Step:
    """Return a step of the same model in one process."""
    torch.manual_seed(0)
    table, decoder, lstm = nn.Embedding(words, width), nn.Linear(width, words), nn.LSTM(width, width, layers)
    optimizer = torch.optim.SGD([*table.parameters(), *lstm.parameters(), *decoder.parameters()], lr=0.05)
    text = torch.randint(words, (length + 1, batch), generator=torch.Generator().manual_seed(1))
    given, wanted = text[:-1], text[1:].reshape(-1)

    def step() -> float:
        optimizer.zero_grad()
        output, _ = lstm(table(given))
        loss = cross_entropy(decoder(output).view(-1, words), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step


def words_of(batch: int, length: int, words: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the words of some texts in one tensor, and the offset of each text."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(words, (batch * length,), generator=dice), torch.arange(0, batch * length, length)


def bag_step(server: str, words: int, width: int, length: int, batch: int, seed: int) -> Step:
    """Return a step with a parameter server: a large sparse table that all trainers share, small layers here."""
    rpc, autograd = HERE.rpc, HERE.autograd
    torch.manual_seed(seed)
    table, table_parameters = _remote(server, shared_module, WordBag, words, width)
    head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    local = [rpc.RRef(parameter) for parameter in head.parameters()]
    optimizer = HERE.optimizer(torch.optim.SGD, [*table_parameters, *local], lr=0.05)
    given, begins = words_of(batch, length, words, seed)
    wanted = torch.randint(10, (batch,), generator=torch.Generator().manual_seed(seed))

    def step() -> float:
        with autograd.context() as context:
            embedded = rpc.rpc_sync(table.owner(), run_module, args=(table, given, begins))
            loss = cross_entropy(head(embedded), wanted)
            autograd.backward(context, [loss])
            optimizer.step(context)
        return loss.item()

    return step


# -- chains and large tensors --------------------------------------------------------------------------


def hop(tensor: Tensor, path: Sequence[str]) -> Tensor:
    """Multiply by a parameter of this worker, then call the rest of the path, which does the same."""
    weight = HERE.keep(("hop", tensor.numel()), lambda: torch.full_like(tensor, 1.001, requires_grad=True))
    result: Tensor = tensor * weight
    if path:
        result = HERE.rpc.rpc_sync(path[0], hop, args=(result, path[1:]))
    return result


def dot(tensor: Tensor) -> Tensor:
    """Reduce the tensor to one number, whose gradient is as large as the tensor."""
    with_what: Tensor = HERE.keep(("dot", tensor.numel()), lambda: torch.full((tensor.numel(),), 0.5))
    return torch.dot(tensor, with_what)


def echo(tensor: Tensor) -> Tensor:
    """Answer with the tensor that came."""
    return tensor
