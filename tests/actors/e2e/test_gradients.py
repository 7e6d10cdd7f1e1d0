"""Gradients of computations through actors equal those of the same computations in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import autograd
from actorrpc.autograd.api import contexts
from tests.actors.e2e import kit
from tests.migration.rows import row

pytestmark = [
    pytest.mark.usefixtures("place"),
    # AsyncLayer calls get() on its event loop, which is logged once per actor.
    pytest.mark.prints(r"waits \(get\(\) and the like\) on the actor's event loop"),
]

WIDTH = 6
LARGE = 32  # repeated this often in both directions, a result is too large for the reply


def weight(seed: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(
        torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    )


@actorrpc.remote
class Layer:
    """A layer whose methods take and return tensors in every way."""

    def __init__(self, seed: int) -> None:
        self.weight = weight(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)

    def large(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight).repeat(LARGE, LARGE)

    def shrink(self, big: torch.Tensor) -> torch.Tensor:
        return big[: big.shape[0] // LARGE, :WIDTH] @ self.weight

    def pair(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ self.weight, x * 2

    def stream(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for n in range(4):
            yield x @ self.weight * (n + 1)

    def into(self, other: Any, x: torch.Tensor) -> torch.Tensor:
        return actorrpc.get(other.forward.remote(x @ self.weight))

    def tree(self, x: dict[str, Any]) -> dict[str, Any]:
        return {"out": [x["in"][0] @ self.weight, 7], "same": x["in"][0]}

    def nested_refs(self, refs: list[Any]) -> torch.Tensor:
        total: torch.Tensor = sum(actorrpc.get(refs))
        return total @ self.weight

    def ref_of(self, other: Any, x: torch.Tensor) -> list[Any]:
        return [other.forward.remote(x @ self.weight)]

    def gradient(self, context: int) -> torch.Tensor | None:
        return autograd.get_gradients(context).get(self.weight)

    def learn(self, other: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a forward and backward pass that starts in this actor."""
        with autograd.context() as context:
            loss = actorrpc.get(other.forward.remote(x @ self.weight)).sum()
            autograd.backward(context, [loss])
            return autograd.get_gradients(context)[self.weight], actorrpc.get(other.gradient.remote(context))


@actorrpc.remote
class AsyncLayer:
    def __init__(self, seed: int) -> None:
        self.weight = weight(seed)

    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0)
        return torch.tanh(x @ self.weight)

    async def stream(self, x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
        for n in range(4):
            yield x @ self.weight * (n + 1)

    async def into(self, other: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = await other.forward.remote(x @ self.weight)
        return result

    async def gradient(self, context: int) -> torch.Tensor | None:
        return autograd.get_gradients(context).get(self.weight)


@actorrpc.remote
def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2


Local = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def values(refs: Any) -> torch.Tensor:
    total: torch.Tensor = sum(actorrpc.get(ref) * (n + 1) for n, ref in enumerate(refs))
    return total


# For each way: a computation with two actors, and the same computation with local tensors.
WAYS: dict[str, tuple[Callable[[Any, Any, torch.Tensor], torch.Tensor], Local]] = {
    "references": (
        lambda a, b, x: actorrpc.get(b.forward.remote(a.forward.remote(x))),
        lambda x, wa, wb: forward(forward(x, wa), wb),
    ),
    "a large result, twice, and fetched as well": (
        lambda a, b, x: (
            lambda ref: (
                actorrpc.get(b.shrink.remote(ref))
                + actorrpc.get(b.shrink.remote(ref))
                + actorrpc.get(ref).mean()
            )
        )(a.large.remote(x)),
        lambda x, wa, wb: 2 * (forward(x, wa) @ wb) + forward(x, wa).repeat(LARGE, LARGE).mean(),
    ),
    "from actor to actor": (
        lambda a, b, x: actorrpc.get(a.into.remote(b, x)),
        lambda x, wa, wb: forward(x @ wa, wb),
    ),
    "a stream": (
        lambda a, b, x: values(a.stream.remote(b.forward.remote(x))),
        lambda x, wa, wb: sum(forward(x, wb) @ wa * (n + 1) ** 2 for n in range(4)),  # type: ignore[misc,return-value]
    ),
    "several results": (
        lambda a, b, x: values(a.pair.options(num_returns=2).remote(b.forward.remote(x))),
        lambda x, wa, wb: forward(x, wb) @ wa + forward(x, wb) * 2 * 2,
    ),
    "containers": (
        lambda a, b, x: (
            (lambda d: d["out"][0] * d["same"])(actorrpc.get(a.tree.remote({"in": [x * 2]})))
            + actorrpc.get(b.forward.remote(x))
        ),
        lambda x, wa, wb: (x * 2 @ wa) * (x * 2) + forward(x, wb),
    ),
    "references in a container": (
        lambda a, b, x: actorrpc.get(a.nested_refs.remote([b.forward.remote(x), b.forward.remote(x * 2)])),
        lambda x, wa, wb: (forward(x, wb) + forward(x * 2, wb)) @ wa,
    ),
    "a reference as a result": (
        lambda a, b, x: actorrpc.get(actorrpc.get(a.ref_of.remote(b, x))[0]),
        lambda x, wa, wb: forward(x @ wa, wb),
    ),
    "values that were put": (
        lambda a, b, x: (
            lambda small, large: (
                actorrpc.get(a.forward.remote(small))
                + actorrpc.get(b.shrink.remote(large))
                + actorrpc.get(b.shrink.remote(large))
            )
        )(actorrpc.put(x * 3), actorrpc.put((x * 2).repeat(LARGE, LARGE))),
        lambda x, wa, wb: forward(x * 3, wa) + 2 * (x * 2 @ wb),
    ),
    "a function of the actor": (
        lambda a, b, x: actorrpc.get(
            actorrpc.call(a, lambda layer, t: layer.weight * t, b.forward.remote(x))
        ),
        lambda x, wa, wb: wa * forward(x, wb),
    ),
    "tasks": (
        lambda a, b, x: actorrpc.get(b.forward.remote(twice.remote(twice.remote(a.forward.remote(x))))),
        lambda x, wa, wb: forward(torch.sin(torch.sin(forward(x, wa)) * 2) * 2, wb),
    ),
    "torch's proxies": (
        lambda a, b, x: (
            a.rpc_sync().forward(b.rpc_async().forward(x).wait()) + actorrpc.get(a.remote().forward(x))
        ),
        lambda x, wa, wb: forward(forward(x, wb), wa) + forward(x, wa),
    ),
}


def check(way: str, a: Any, b: Any, seeds: tuple[int, int]) -> None:
    run, local = WAYS[way]
    x = torch.randn(
        WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True
    )
    with autograd.context() as context:
        result = run(a, b, x)
        autograd.backward(context, [(result**2).sum()])
        mine = autograd.get_gradients(context)[x]
        theirs = actorrpc.get([a.gradient.remote(context), b.gradient.remote(context)])
    weights = [weight(seed) for seed in seeds]
    expected = local(x, *weights)
    torch.testing.assert_close(result.detach(), expected.detach())
    (expected**2).sum().backward()
    torch.testing.assert_close(mine, x.grad)
    for got, w in zip(theirs, weights, strict=True):
        torch.testing.assert_close(got, w.grad)


@pytest.fixture(scope="module")
def layers(place: str) -> Iterator[tuple[Any, Any]]:
    """Two layers for all tests of the module."""
    made = [Layer.remote(1), Layer.remote(2)]
    actorrpc.get([each.ready() for each in made])
    yield made[0], made[1]
    made.clear()


@pytest.mark.parametrize("way", WAYS)
@row("mesh.m.rref(x)", "from-monarch")
def test_gradients_equal_those_of_a_local_computation(layers: tuple[Any, Any], way: str) -> None:
    check(way, *layers, (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["references", "from actor to actor", "a large result, twice, and fetched as well"]
)
def test_gradients_pass_through_calls_made_before_the_actors_exist(way: str) -> None:
    # The arguments of such calls are kept as copies.
    check(way, Layer.remote(1), Layer.remote(2), (1, 2))


def test_gradients_pass_through_coroutines() -> None:
    layers = AsyncLayer.remote(1), AsyncLayer.remote(2)
    for way in ("references", "from actor to actor", "a stream"):
        check(way, *layers, (1, 2))


@pytest.mark.slow
def test_gradients_of_an_argument_of_a_group_call_are_summed() -> None:
    group = Layer.group(10, 4)
    x = torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    big = torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context:
        small, large = group.forward.call(x * 2), group.shrink.call(big.repeat(LARGE, LARGE))
        result = sum(actorrpc.get(small).values()) + sum(actorrpc.get(large).values())
        autograd.backward(context, [result.sum()])
        found = autograd.get_gradients(context)
        theirs = list(actorrpc.get(group.gradient.call(context)).values())
    w = weight(4)
    (forward(x * 2, w) + big @ w).sum().backward()
    torch.testing.assert_close(found[x], 10 * x.grad)
    torch.testing.assert_close(found[big], 10 * big.grad)
    for got in theirs:
        torch.testing.assert_close(got, w.grad)


def test_an_actor_can_run_a_backward_pass() -> None:
    x = torch.randn(WIDTH, WIDTH, dtype=torch.float64)
    mine, theirs = actorrpc.get(Layer.remote(1).learn.remote(Layer.remote(2), x))
    w, v = weight(1), weight(2)
    forward(x @ w, v).sum().backward()
    torch.testing.assert_close(mine, w.grad)
    torch.testing.assert_close(theirs, v.grad)


def test_coroutines_of_one_event_loop_have_separate_autograd_contexts() -> None:
    layer = AsyncLayer.remote(1)

    async def learn(factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((WIDTH, WIDTH), factor, dtype=torch.float64, requires_grad=True)
        with autograd.context() as context:
            out = await layer.forward.remote(x)
            await asyncio.sleep(0)
            out = out + await layer.forward.remote(x * 2)
            await asyncio.get_running_loop().run_in_executor(None, autograd.backward, context, [out.sum()])
            return autograd.get_gradients(context)[x], await layer.gradient.remote(context)

    async def main() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return await asyncio.gather(*[learn(float(n)) for n in range(4)])

    for n, (mine, theirs) in enumerate(asyncio.run(main())):
        x, w = torch.full((WIDTH, WIDTH), float(n), dtype=torch.float64, requires_grad=True), weight(1)
        (forward(x, w) + forward(x * 2, w)).sum().backward()
        torch.testing.assert_close(mine, x.grad)
        torch.testing.assert_close(theirs, w.grad)


def _knows(_layer: Any, context: int) -> bool:
    return contexts().live.get(context) is not None


def test_an_autograd_context_is_released_on_the_worker_when_it_ends() -> None:
    layer = Layer.remote(1)
    for _ in range(3):
        with autograd.context() as context:
            actorrpc.get(
                layer.large.remote(torch.ones(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True))
            )
        # The message about its end is sent on the same connection, but is handled by another thread.
        kit.until(lambda id=context: not actorrpc.get(actorrpc.call(layer, _knows, id)))
