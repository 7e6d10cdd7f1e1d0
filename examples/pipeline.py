"""A model in a pipeline of actors: each stage has some of the layers, micro-batches flow through them.

    python examples/pipeline.py --stages 3 --micro-batches 8

The driver makes all calls of a step at once, with the results of calls as arguments of later calls, and waits only for
the losses. Activations go directly from each stage to the next, gradients directly back; while stage 1 works on the second
micro-batch, stage 2 works on the first. At the end, the same training in this process alone must give the same losses and
parameters.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import actorrpc
from actorrpc import ActorHandle, ObjectRef

Batch = tuple[Tensor, Tensor]


def make_layers(stage: int, width: int) -> nn.Sequential:
    """Return the layers of one stage, which depend on its number alone."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def make_batch(step: int, size: int, width: int) -> Batch:
    """Return inputs and the expected outputs."""
    inputs = torch.randn(size, width, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.roll(1, dims=1).tanh()


@actorrpc.remote
class Stage:
    """Owns the layers of one stage, and the activations that it keeps between forward and backward."""

    def __init__(self, stage: int, width: int, lr: float) -> None:
        self.layers = make_layers(stage, width)
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=lr)
        self.open: dict[int, tuple[Tensor, Tensor]] = {}  # micro-batch -> its input and its output here

    def forward(self, micro: int, inputs: Tensor) -> Tensor:
        """Return the output of this stage."""
        inputs = inputs.detach().requires_grad_()
        outputs: Tensor = self.layers(inputs)
        self.open[micro] = inputs, outputs
        return outputs.detach()

    def loss(self, micro: int, targets: Tensor, share: float) -> float:
        """Return the loss of a micro-batch, on the last stage; ``backward`` then begins with it."""
        inputs, outputs = self.open[micro]
        loss = share * mse_loss(outputs, targets)
        self.open[micro] = inputs, loss
        return loss.item()

    def backward(self, micro: int, gradient: Tensor | None) -> Tensor:
        """Return the gradient of this stage's input, from the gradient of its output (None: from the loss)."""
        inputs, outputs = self.open.pop(micro)
        outputs.backward(gradient)
        assert inputs.grad is not None
        return inputs.grad

    def step(self) -> None:
        """Do an optimizer step with the summed gradients of all micro-batches."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[Tensor]:
        """Return the parameters as they are now."""
        return [parameter.detach().clone() for parameter in self.layers.parameters()]


def train_pipeline(stages: list[ActorHandle[Stage]], batches: list[Batch], micro_batches: int) -> list[float]:
    """Train with the stages; return the loss of each step."""
    losses = []
    for inputs, targets in batches:
        parts = []
        chunks = zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True)
        for micro, (given, wanted) in enumerate(chunks):
            flowing: Tensor | ObjectRef[Tensor] = given
            for stage in stages:
                flowing = stage.forward.remote(micro, flowing)  # a reference goes in, a reference comes out
            parts.append(stages[-1].loss.remote(micro, wanted, len(wanted) / len(targets)))
        for micro in range(len(parts)):
            gradient: ObjectRef[Tensor] | None = None
            for stage in reversed(stages):
                gradient = stage.backward.remote(micro, gradient)
        for stage in stages:
            stage.step.remote()
        losses.append(math.fsum(actorrpc.get(parts)))
    return losses


def train_alone(count: int, width: int, lr: float, batches: list[Batch]) -> tuple[list[float], list[Tensor]]:
    """Do the same in this process; return the losses and the parameters."""
    model = nn.Sequential(*[make_layers(stage, width) for stage in range(count)])
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        loss = mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


def main() -> int:
    """Train both ways and compare; the exit status says whether they agree."""
    parser = argparse.ArgumentParser(description="Train a small model in a pipeline of actors.")
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=20.0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # as in the actors

    batches = [make_batch(step, args.batch, args.width) for step in range(args.steps)]
    with actorrpc.init():
        stages = [Stage.remote(number, args.width, args.lr) for number in range(args.stages)]
        actorrpc.get([actorrpc.ready(stage) for stage in stages])
        start = time.perf_counter()
        losses = train_pipeline(stages, batches, args.micro_batches)
        seconds = time.perf_counter() - start
        parameters = list(chain(*actorrpc.get([stage.parameters.remote() for stage in stages])))
    expected_losses, expected = train_alone(args.stages, args.width, args.lr, batches)

    # Micro-batches are summed up in another order than one batch: the last digits differ.
    agree = torch.allclose(torch.tensor(losses), torch.tensor(expected_losses), rtol=1e-4) and all(
        torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(parameters, expected, strict=True)
    )
    print(
        f"{args.stages} stages, {args.steps} steps of {args.micro_batches} micro-batches in {seconds:.2f} s: "
        f"loss {losses[0]:.5f} -> {losses[-1]:.5f}; "
        f"{'the same' if agree else 'NOT THE SAME'} as in one process"
    )
    return 0 if agree else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
