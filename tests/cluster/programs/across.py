"""A program on three hosts: the driver on host a, and workers on hosts b and c that join by hand.

    across.py ADDRESS [NAME=VALUE ...]      # settings of init()

It reports its progress to the test, and asks the test to disconnect host b.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ours
import rnn
import torch
from ours import Layer, OwnError, Part
from torch.nn.functional import cross_entropy

import actorrpc
from actorrpc import autograd, rpc
from actorrpc.optim import DistributedOptimizer

_STEPS = 6


def say(word: str, *rest: Any) -> None:
    """Report progress to the test."""
    print(word, *rest, flush=True)


def ask(word: str) -> float:
    """Ask the test for an action, and wait until it is done; return its time."""
    say(word)
    return float(sys.stdin.readline())


def fails(kind: type[Exception], words: str, action: Callable[[], Any]) -> None:
    """Check that an action raises this kind of error, with these words."""
    found: Exception | None = None
    try:
        action()
    except kind as error:
        found = error
    assert words in str(found), found


def placed() -> list[Any]:
    """Place actors by host, by address, by label and spread."""
    b = Part.options(host="b", placement_timeout=60).remote(1)
    c = Part.options(labels={"zone": "far", "name": "c"}, placement_timeout=60).remote(2)
    a = Part.remote(3)
    assert actorrpc.get([each.where.remote() for each in (b, c)]) == [("b", "b"), ("c", "c")]
    assert actorrpc.get(a.where.remote())[0] == "a"
    spread = [Part.options(spread=True).remote() for _ in range(3)]
    found = sorted(host for host, _ in actorrpc.get([each.where.remote() for each in spread]))
    assert found == ["a", "b", "c"], found
    fails(actorrpc.PlacementError, "nowhere", Part.options(host="nowhere").remote)
    say("placed")
    return [a, b, c]


def calls(parts: list[Any]) -> None:
    """Make calls between all actors, with code and errors that only this host has."""
    for size in (3, 200_000, 2_000_000):
        tensor = torch.arange(size, dtype=torch.float32)
        for one in parts:
            for other in parts:
                if one is not other:
                    assert torch.equal(actorrpc.get(one.through.remote(other, tensor)), tensor * 2)
    for each in parts[1:]:
        fails(OwnError, "on purpose", lambda each=each: actorrpc.get(each.fail.remote()))  # type: ignore[misc]
    found = rpc.rpc_sync("b", lambda x: ours.SCALE * x, (2,))
    assert found == 6.0
    say("called")


def gradients(parts: list[Any]) -> None:
    """Check that gradients over three hosts equal those of one process."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(4))
    here, there = x.clone().requires_grad_(), x.clone().requires_grad_()
    own = [Layer(3), Layer(1), Layer(2)]
    value = here
    for layer in own:
        value = layer(value)
    value.square().sum().backward()
    with autograd.context() as number:
        value = there
        for part in parts:
            value = actorrpc.get(part.forward.remote(value))
        autograd.backward(number, [value.square().sum()])
        assert torch.equal(autograd.get_gradients(number)[there], here.grad)
    say("differentiated")


def together(parts: list[Any]) -> Any:
    """Reduce tensors in a collective of the three actors."""
    collective = actorrpc.collective(parts, timeout=60)
    assert actorrpc.get(collective.call("total")) == [6.0] * 3
    say("collective")
    return collective


# -- the RNN -------------------------------------------------------------------------------------------


class Parted(rnn.RNNModel):
    """The model of the example, with embedding and decoder on two workers and the LSTM here."""

    def __init__(self, embedding: str, decoder: str, text: rnn.Text) -> None:
        super().__init__(embedding, len(text.words), 8, 12, 1)
        self.decoder_rref = rpc.remote(decoder, rnn.Decoder, args=(len(text.words), 12, 1))
        # Create the LSTM after embedding and decoder: in one process they share the random generator.
        self.parameter_rrefs()
        torch.manual_seed(1)
        self.rnn = torch.nn.LSTM(8, 12)

    def values(self) -> list[torch.Tensor]:
        """Return copies of all parameters."""
        return [each.to_here().detach().clone() for each in self.parameter_rrefs()]

    def take(self, values: list[torch.Tensor]) -> None:
        """Set all parameters to such copies."""
        for each, value in zip(self.parameter_rrefs(), values, strict=True):
            rpc.rpc_sync(each.owner(), fill, (each, value))


def fill(held: Any, value: torch.Tensor) -> None:
    """Copy into a parameter, on its owner."""
    with torch.no_grad():
        held.local_value().copy_(value)


def train(model: Parted, text: rnn.Text, lose: Any = None) -> list[float]:
    """Train; after the loss of a worker, repeat the step from saved parameters."""
    found: list[float] = []
    batches = list(rnn.batches(text.train, 4, 8))[:_STEPS]
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=0.5)
    while len(found) < _STEPS:
        kept = model.values()
        if lose is not None and len(found) == _STEPS // 2:
            lose()
            lose = None
        inputs, targets = batches[len(found)]
        try:
            with autograd.context() as number:
                scores, _ = model(inputs)
                loss = cross_entropy(scores.flatten(0, 1), targets.flatten())
                autograd.backward(number, [loss])
                optimizer.step(number)
        except actorrpc.PeerDiedError as error:
            say("stopped", error.worker)
            model = Parted("c", "c", text)
            model.take(kept)
            optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=0.5)
        else:
            found.append(loss.item())
    return found


# -- a host is lost --------------------------------------------------------------------------------------


class Watch:
    """Records how and when calls to a lost host end."""

    def __init__(self, **waits: Callable[[], Any]) -> None:
        self.ends: dict[str, tuple[str, float]] = {}
        self._threads = [threading.Thread(target=self._wait, args=each) for each in waits.items()]
        for thread in self._threads:
            thread.start()

    def _wait(self, name: str, wait: Callable[[], Any]) -> None:
        try:
            wait()
        except actorrpc.RpcError as error:
            self.ends[name] = type(error).__name__, time.time()

    def told(self, since: float) -> dict[str, tuple[str, float]]:
        """Return the types of errors, with the seconds since ``since``."""
        for thread in self._threads:
            thread.join()
        return {name: (kind, when - since) for name, (kind, when) in self.ends.items()}


def on(host: str, make: Callable[[], Any]) -> Any:
    """Create actors until one is placed on a host; with spread=True these are at most three."""
    made = []
    while True:
        made.append(make())
        if actorrpc.get(made[-1].where.remote())[0] == host:
            return made[-1]


def losing(parts: list[Any]) -> None:
    """Train while host b is lost, and continue without it."""
    anywhere = Part.options(labels={"zone": "far"}, spread=True, max_restarts=1)
    parts[1] = on("b", lambda: anywhere.remote(1))
    collective = together(parts)
    text = rnn.Text(60, 1)
    alone = train(Parted("driver", "driver", text), text)
    hangs = parts[1].hang.remote()
    sleeps = rpc.rpc_async("b", time.sleep, (1000,))
    watch = Watch(actor=lambda: actorrpc.get(hangs), call=sleeps.wait)
    lost: list[float] = []
    across = train(Parted("b", "c", text), text, lambda: lost.append(ask("lose")))
    assert across == alone, (across, alone)
    say("trained", json.dumps(across))
    say("ended", json.dumps(watch.told(lost[0])))
    # The actor of b was restarted on c, so the collective can be rebuilt.
    assert actorrpc.get(parts[1].where.remote()) == ("c", "c")
    assert collective.broken is not None
    collective.rebuild()
    assert actorrpc.get(collective.call("total")) == [6.0] * 3
    collective.destroy()
    say("rebuilt")


def main() -> None:
    """Run all parts."""
    settings = {name: json.loads(value) for name, _, value in (each.partition("=") for each in sys.argv[2:])}
    with actorrpc.init(listen=sys.argv[1], rpc_timeout=0, num_cpus=4, **settings) as context:
        say("listening", context.address)
        parts = placed()
        calls(parts)
        gradients(parts)
        losing(parts)
    say("done")


if __name__ == "__main__":
    main()
