"""Distributed autograd between real workers. Local autograd is the oracle."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import actorrpc.autograd as dist_autograd
from actorrpc import rpc
from actorrpc._stacks import top_frames
from actorrpc.autograd import graph
from actorrpc.autograd.api import contexts
from actorrpc.errors import NotInitializedError, RemoteError, RpcTimeoutError
from actorrpc.futures import WAITING
from tests.actors.e2e.kit import until
from tests.agent.together import in_threads
from tests.migration.rows import row
from tests.ranks import rpc_group

Tensor = torch.Tensor

# -- functions that run on workers ------------------------------------------------------------------------

_released = threading.Event()
_hooked: list[str] = []
_parameters: dict[str, torch.nn.Parameter] = {}


def _double(*sizes: int) -> Tensor:
    return torch.rand(*sizes, dtype=torch.float64)


def mix(a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a @ b) + a


def through(to: str, a: Tensor, b: Tensor) -> Tensor:
    return rpc.rpc_sync(to, mix, (a * 2, b)) * b


def through_reference(to: str, a: Tensor, b: Tensor) -> rpc.RRef[Tensor]:
    return rpc.remote(to, mix, (a, b))


def in_place(a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2).add_(b)
    b[0] = 1.0
    return a * b


def pair(a: Tensor, b: Tensor) -> dict[str, Any]:
    return {"x": [a @ b, a], "unused": b * 3, "n": 4}


@rpc.functions.async_execution
def later(to: str, a: Tensor, b: Tensor) -> rpc.Future[Tensor]:
    return rpc.rpc_async(to, mix, (a, b)).then(lambda done: done.wait() * 3)


class Holder:
    def __init__(self, size: int) -> None:
        self.weight = torch.nn.Parameter(torch.ones(size, size, dtype=torch.float64))

    def forward(self, a: Tensor) -> Tensor:
        return a @ self.weight

    def gradient(self, context: int) -> Tensor | None:
        return dist_autograd.get_gradients(context).get(self.weight)


def _has_context(context: int) -> bool:
    return contexts().live.get(context) is not None


# -- ways to send tensors and get results --------------------------------------------------------------------

Way = tuple[Callable[[str, str, Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]

WAYS: dict[str, Way] = {
    "rpc_sync": (lambda to, _, a, b: rpc.rpc_sync(to, mix, (a, b)), mix),
    "rpc_async": (lambda to, _, a, b: rpc.rpc_async(to, mix, (a, b)).wait(), mix),
    "remote": (lambda to, _, a, b: rpc.remote(to, mix, (a, b)).to_here(), mix),
    "twice": (
        lambda to, _, a, b: rpc.rpc_sync(to, mix, (a, b)) + rpc.rpc_sync(to, mix, (b, a)),
        lambda a, b: mix(a, b) + mix(b, a),
    ),
    "fetched twice": (
        lambda to, _, a, b: (lambda r: r.to_here() * r.to_here())(rpc.remote(to, mix, (a, b))),
        lambda a, b: mix(a, b) ** 2,
    ),
    "nested": (
        lambda to, on, a, b: rpc.rpc_sync(to, through, (on, a, b)),
        lambda a, b: mix(a * 2, b) * b,
    ),
    "nested, and back to here": (
        lambda to, _, a, b: rpc.rpc_sync(to, through, ("worker0", a, b)),
        lambda a, b: mix(a * 2, b) * b,
    ),
    "a reference from a third": (
        lambda to, on, a, b: rpc.rpc_sync(to, through_reference, (on, a, b)).to_here(),
        mix,
    ),
    "oneself": (lambda _, __, a, b: rpc.rpc_sync("worker0", mix, (a, b)), mix),
    "several visits": (
        lambda to, on, a, b: rpc.rpc_sync(
            to,
            mix,
            (rpc.rpc_sync(on, mix, (rpc.rpc_sync(to, mix, (a, b)), b)), rpc.rpc_sync(to, mix, (b, b))),
        ),
        lambda a, b: mix(mix(mix(a, b), b), mix(b, b)),
    ),
    "async execution": (lambda to, on, a, b: rpc.rpc_sync(to, later, (on, a, b)), lambda a, b: mix(a, b) * 3),
    "in place": (
        lambda to, _, a, b: rpc.rpc_sync(to, in_place, (a * 1, b * 1)),
        lambda a, b: in_place(a * 1, b * 1),
    ),
    "some of the results": (
        lambda to, _, a, b: (lambda d: d["x"][0] * d["x"][1] * d["n"])(rpc.rpc_sync(to, pair, (a, b))),
        lambda a, b: (a @ b) * a * 4,
    ),
    "unused results": (
        lambda to, on, a, b: (
            rpc.rpc_sync(to, mix, (a, b)),
            rpc.remote(on, mix, (a, b)),
            rpc.rpc_sync(to, through, (on, a, b)),
            rpc.rpc_sync(on, mix, (b, a)),
        )[3],
        lambda a, b: mix(b, a),
    ),
    "a built-in function": (lambda to, _, a, b: rpc.rpc_sync(to, torch.mm, (a, b)), torch.mm),
    "views of one tensor": (
        lambda to, _, a, b: rpc.rpc_sync(to, mix, ((lambda t: (t[:3], t[3:]))(torch.cat([a, b]) * 2))),
        lambda a, b: mix(a * 2, b * 2),
    ),
    "not contiguous": (
        lambda to, _, a, b: rpc.rpc_sync(to, torch.mm, (a.t(), b[0].expand(3, 3))),
        lambda a, b: torch.mm(a.t(), b[0].expand(3, 3)),
    ),
    "complex": (
        lambda to, _, a, b: rpc.rpc_sync(to, torch.mm, ((a * (1 + 2j)).conj(), b * 1j)).abs(),
        lambda a, b: torch.mm((a * (1 + 2j)).conj(), b * 1j).abs(),
    ),
    "mixed types": (
        lambda to, _, a, b: rpc.rpc_sync(to, torch.add, (a.float(), b)),
        lambda a, b: torch.add(a.float(), b),
    ),
    "an empty tensor": (
        lambda to, _, a, b: rpc.rpc_sync(to, torch.cat, ([a[:0], b, a],)),
        lambda a, b: torch.cat([a[:0], b, a]),
    ),
}


def _all_ways() -> None:
    wrong = []
    for number, (name, (distributed, local)) in enumerate(WAYS.items()):
        mode = ("smart", "fast")[number % 2]
        a, b = _double(3, 3).requires_grad_(), _double(3, 3).requires_grad_()
        with dist_autograd.context() as context:
            result = distributed("worker1", "worker2", a, b)
            dist_autograd.backward(context, [(result**2).sum()], mode=mode)  # type: ignore[arg-type]
            found = dist_autograd.get_gradients(context)
        expected = local(a, b)
        want = torch.autograd.grad((expected**2).sum(), (a, b))
        equal = torch.allclose(result.detach(), expected) and all(
            torch.allclose(found[t], g, rtol=1e-6) for t, g in zip((a, b), want, strict=True)
        )
        if not equal or a.grad is not None:
            wrong.append(name)
    assert not wrong


def _remote_parameters() -> None:
    holders = [rpc.remote(f"worker{n}", Holder, (3,)) for n in (1, 2)]
    x = _double(3, 3).requires_grad_()
    for accumulated in (1, 2):
        with dist_autograd.context() as context:
            y = holders[1].rpc_sync().forward(holders[0].rpc_sync().forward(x))
            loss = (y**2).sum()
            for last in range(accumulated):
                dist_autograd.backward(context, [loss], retain_graph=last + 1 < accumulated)
            found = [holder.rpc_sync().gradient(context) for holder in holders]
            mine = dist_autograd.get_gradients(context)
        assert list(mine) == [x]
        w, v = (torch.ones(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
        want = torch.autograd.grad(((x @ w @ v) ** 2).sum(), (x, w, v))
        for got, g in zip((mine[x], *found), want, strict=True):
            torch.testing.assert_close(got, g * accumulated)


# -- contexts ------------------------------------------------------------------------------------


def _open_another() -> str:
    try:
        with dist_autograd.context():
            return "opened"
    except RuntimeError as error:
        return str(error)


def _context_blocks() -> None:
    assert dist_autograd.current_context() is None
    with dist_autograd.context() as context:
        assert context >> 48 == 0
        assert dist_autograd.current_context() == context
        with pytest.raises(RuntimeError, match="Already have an autograd context id for this thread"):
            dist_autograd.context().__enter__()
        assert dist_autograd.current_context() == context
        # A call made in a context runs in that context.
        assert rpc.rpc_sync("worker1", dist_autograd.current_context) == context
        assert "Already have an autograd context" in rpc.rpc_sync("worker1", _open_another)
        found: list[Any] = []
        thread = threading.Thread(
            target=lambda: found.extend([dist_autograd.current_context(), _open_another()])
        )
        thread.start()
        thread.join()
        assert found == [None, "opened"]
        assert rpc.rpc_sync("worker1", _has_context, (context,))
    assert dist_autograd.current_context() is None
    with pytest.raises(RuntimeError, match="Could not find autograd context with id"):
        dist_autograd.get_gradients(context)
    with pytest.raises(RuntimeError, match="Could not find autograd context with id"):
        dist_autograd.backward(context, [torch.ones(1, requires_grad=True).sum()])
    until(lambda: not rpc.rpc_sync("worker1", _has_context, (context,)))
    with pytest.raises(ValueError, match="mine"), dist_autograd.context() as context:
        raise ValueError("mine")
    assert contexts().live.get(context) is None
    assert rpc.rpc_sync("worker1", _open_another) == "opened"


def test_contexts_and_passes_without_rpc_raise_not_initialized_error() -> None:
    with pytest.raises(NotInitializedError, match="init_rpc"), dist_autograd.context():
        pass
    for use in (lambda: dist_autograd.get_gradients(1), lambda: dist_autograd.backward(1, [torch.ones(1)])):
        with pytest.raises(NotInitializedError, match="init_rpc"):
            use()


# -- wrong use -----------------------------------------------------------------------------------


def _wrong() -> None:
    leaf = torch.rand(3, 3, requires_grad=True)
    with dist_autograd.context() as context:
        y = rpc.rpc_sync("worker1", torch.add, (leaf, leaf))
        loss = y.sum()
        for roots, text in (
            ([], "No tensors provided for gradient computation"),
            ([torch.rand(1)], "requires_grad not set on"),
            ([leaf * 2], "is not a scalar, all roots need to be scalar"),
            ([leaf], "is not a scalar, all roots need to be scalar"),
            ([torch.rand(1, requires_grad=True)], "does not have a valid gradient function"),
            ([loss, torch.rand(1)], "requires_grad not set on"),
            ([torch.complex(loss, loss)], "real scalar outputs"),
        ):
            with pytest.raises(RuntimeError, match=text):
                dist_autograd.backward(context, roots)
        for wrong in (None, loss, 3, ["x"], [loss, None]):
            with pytest.raises(TypeError):
                dist_autograd.backward(context, wrong)  # type: ignore[arg-type]
        for id in (None, "1", 1.5):
            with pytest.raises(TypeError):
                dist_autograd.backward(id, [loss])  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                dist_autograd.get_gradients(id)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="Could not find autograd context with id: 1"):
            dist_autograd.backward(1, [loss])
        with pytest.raises((ValueError, TypeError), match="mode"):
            dist_autograd.backward(context, [loss], mode="clever")  # type: ignore[arg-type]
        with pytest.raises((ValueError, TypeError), match="accumulate"):
            dist_autograd.backward(context, [loss], accumulate="here")  # type: ignore[arg-type]
        with pytest.raises((ValueError, TypeError), match="timeout"):
            dist_autograd.backward(context, [loss], timeout=-3)
        with pytest.raises((RuntimeError, ValueError), match=r"shape|size"):
            dist_autograd.backward(context, [y], gradient=torch.ones(2, 3))
        with pytest.raises(RuntimeError, match="complex"):
            dist_autograd.backward(context, [y], gradient=torch.ones(3, 3, dtype=torch.complex64))
        for gradient in ("ones", [3.0]):
            with pytest.raises(TypeError, match="gradient"):
                dist_autograd.backward(context, [y], gradient=gradient)  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError), match="one entry for each of the 2 roots"):
            dist_autograd.backward(context, [y, loss], gradient=[torch.ones(3, 3)])
        assert dist_autograd.get_gradients(context) == {}
        with pytest.raises(RuntimeError, match=r"actorrpc\.autograd\.backward"):
            loss.backward()
        dist_autograd.backward(context, [loss])  # the errors above changed nothing
        torch.testing.assert_close(dist_autograd.get_gradients(context)[leaf], torch.full((3, 3), 2.0))


def _from_another_context() -> None:
    leaf = torch.rand(3, requires_grad=True)
    with dist_autograd.context():
        old = rpc.rpc_sync("worker1", torch.add, (leaf, leaf))
    with dist_autograd.context() as context:
        new = rpc.rpc_sync("worker1", torch.add, (leaf, old))
        with pytest.raises(RuntimeError, match=r"another context.*detach\(\)"):
            dist_autograd.backward(context, [new.sum()])
        new = rpc.rpc_sync("worker1", torch.add, (leaf, old.detach()))
        dist_autograd.backward(context, [new.sum()])
        torch.testing.assert_close(dist_autograd.get_gradients(context)[leaf], torch.ones(3))


# -- beyond torch --------------------------------------------------------------------------------


def _options() -> None:
    holder = rpc.remote("worker1", Holder, (3,))
    x = _double(3, 3).requires_grad_()
    w = torch.ones(3, 3, dtype=torch.float64, requires_grad=True)
    seed = _double(3, 3)

    with dist_autograd.context() as context:
        y = holder.rpc_sync().forward(x)
        dist_autograd.backward(context, [y, (y * 2).sum()], gradient=[seed, None])
        want = torch.autograd.grad([x @ w, (x @ w * 2).sum()], [x, w], [seed, None])
        torch.testing.assert_close(dist_autograd.get_gradients(context)[x], want[0])
        torch.testing.assert_close(holder.rpc_sync().gradient(context), want[1])

    with dist_autograd.context() as context:
        y = holder.rpc_sync().forward(x)
        dist_autograd.backward(context, [y], gradient=seed)
        torch.testing.assert_close(
            dist_autograd.get_gradients(context)[x], torch.autograd.grad(x @ w, x, seed)[0]
        )

    x.grad = torch.ones_like(x)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [holder.rpc_sync().forward(x).sum()], accumulate="grad")
        assert dist_autograd.get_gradients(context) == {}
        assert holder.rpc_sync().gradient(context) is None
    torch.testing.assert_close(x.grad, 1 + torch.autograd.grad((x @ w).sum(), x)[0])
    x.grad = None

    # With retain_graph, the pass can be repeated with equal gradients.
    with dist_autograd.context() as context:
        y = sum(holder.rpc_sync().forward(x * (n + 0.1)) ** 2 for n in range(5))
        found = []
        for _ in range(3):
            before = dist_autograd.get_gradients(context).get(x)
            before = torch.zeros_like(x) if before is None else before.clone()
            dist_autograd.backward(context, [y.sum()], retain_graph=True)
            found.append(dist_autograd.get_gradients(context)[x] - before)
        torch.testing.assert_close(found[0], found[1])
        dist_autograd.backward(context, [y.sum()])
        with pytest.raises(RuntimeError, match=r"second time"):
            dist_autograd.backward(context, [y.sum()])


def cube(a: Tensor, b: Tensor) -> Tensor:
    return a**3 * b


def _second_order() -> None:
    a, b = _double(3).requires_grad_(), _double(3).requires_grad_()
    with dist_autograd.context() as context:
        y = rpc.rpc_sync("worker1", cube, (a, b))
        dist_autograd.backward(context, [y.sum()], create_graph=True)
        first = dist_autograd.get_gradients(context)[a]
        torch.testing.assert_close(first.detach(), (3 * a**2 * b).detach())
        b_before = dist_autograd.get_gradients(context)[b].detach().clone()
        dist_autograd.backward(context, [(first**2).sum()])
        second = dist_autograd.get_gradients(context)
        torch.testing.assert_close(second[a].detach() - first.detach(), (36 * a**3 * b**2).detach())
        torch.testing.assert_close(second[b].detach() - b_before, (18 * a**4 * b).detach())


def _rrefs() -> None:
    a, b = _double(3, 3).requires_grad_(), _double(3, 3).requires_grad_()
    want = torch.autograd.grad(mix(a, b).sum(), (a, b))
    with dist_autograd.context() as context:
        theirs = rpc.remote("worker1", _sum_of_mix, (a, b))
        with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id' to be specified"):
            theirs.backward()
        theirs.backward(context)  # the RRef's owner runs this pass
        for t, g in zip((a, b), want, strict=True):
            torch.testing.assert_close(dist_autograd.get_gradients(context)[t], g)
        mine = rpc.RRef(rpc.rpc_sync("worker1", mix, (a, b)).sum())
        mine.backward(context)
        for t, g in zip((a, b), want, strict=True):
            torch.testing.assert_close(dist_autograd.get_gradients(context)[t], 2 * g)
        for no_tensor in (rpc.RRef("x"), rpc.remote("worker1", str)):
            with pytest.raises(RuntimeError, match=r"RRef should contain a tensor for \.backward\(\)"):
                no_tensor.backward(context)
        with pytest.raises(TypeError):
            mine.backward("context")  # type: ignore[arg-type]
    local = rpc.RRef(mix(a, b).sum())
    local.backward(retain_graph=True)
    local.backward()
    torch.testing.assert_close(a.grad, 2 * want[0])


def _sum_of_mix(a: Tensor, b: Tensor) -> Tensor:
    return mix(a, b).sum()


# -- hooks ---------------------------------------------------------------------------------------


def _with_hooks(name: str, x: Tensor) -> Tensor:
    p = _parameters.get(name)
    if p is None:
        p = _parameters[name] = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        p.register_hook(lambda g: (_hooked.append(f"tensor {g[0].item():.2f}"), g.clamp(max=2.5))[1])
        p.register_post_accumulate_grad_hook(lambda p: _hooked.append(f"after {p.grad[0].item():.2f}"))
    return x * p


def _take_hooked() -> tuple[list[str], list[Tensor | None]]:
    taken = list(_hooked)
    _hooked.clear()
    return taken, [p.grad for p in _parameters.values()]


def _gradient_of(name: str, context: int) -> Tensor | None:
    return dist_autograd.get_gradients(context).get(_parameters[name])


def _hooks() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with dist_autograd.context() as context:
        # The pass visits worker1 three times, so the leaf's gradient is 1 + 1 + 1.
        y = x
        for _ in range(3):
            y = rpc.rpc_sync("worker1", _with_hooks, ("p", y))
        dist_autograd.backward(context, [y.sum()])
        assert rpc.rpc_sync("worker1", _take_hooked) == (["tensor 3.00", "after 2.50"], [None])
        assert rpc.rpc_sync("worker1", _gradient_of, ("p", context))[0] == 2.5
        torch.testing.assert_close(
            dist_autograd.get_gradients(context)[x], torch.ones(3, dtype=torch.float64)
        )


# -- failures ------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Raises in its backward pass, ``times`` times."""

    times = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if Fails.times:
            Fails.times -= 1
            raise ZeroDivisionError("simulated")
        return gradient


def _fail(times: int) -> None:
    Fails.times = times


def fails(x: Tensor) -> Tensor:
    result: Tensor = Fails.apply(x * 2)
    return result


def fails_further(to: str, x: Tensor) -> Tensor:
    return rpc.rpc_sync(to, fails, (x * 3,))


def _errors(rank: int, _: int) -> None:
    if rank:
        return
    a = _double(3).requires_grad_()
    for distance, run in enumerate(
        (
            lambda: rpc.rpc_sync("worker1", fails, (a,)),
            lambda: rpc.rpc_sync("worker1", fails_further, ("worker2", a)),
            lambda: rpc.rpc_sync(
                "worker2", mix, (rpc.rpc_sync("worker1", fails, (a,)).expand(3, 3), a.expand(3, 3))
            ),
        )
    ):
        bad = "worker2" if distance == 1 else "worker1"
        with dist_autograd.context() as context:
            loss = run().sum()
            dist_autograd.backward(context, [loss], retain_graph=True)
            before = dist_autograd.get_gradients(context)[a].clone()
            rpc.rpc_sync(bad, _fail, (3,))
            for _ in range(3):
                with pytest.raises(ZeroDivisionError, match="simulated") as caught:
                    dist_autograd.backward(context, [loss], retain_graph=True)
                assert isinstance(caught.value, RemoteError)
                assert caught.value.worker == bad
                assert "in backward" in caught.value.traceback
                # A failed pass changes no gradients.
                assert torch.equal(dist_autograd.get_gradients(context)[a], before)
            dist_autograd.backward(context, [loss])
            torch.testing.assert_close(dist_autograd.get_gradients(context)[a], 2 * before)
    # An error at the origin, after worker1 has finished its part.
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync("worker1", mix, (fails(a).expand(3, 3), a.expand(3, 3))).sum()
        _fail(1)
        with pytest.raises(ZeroDivisionError, match="simulated"):
            dist_autograd.backward(context, [loss], retain_graph=True)
        assert dist_autograd.get_gradients(context) == {}
        dist_autograd.backward(context, [loss])
        assert a in dist_autograd.get_gradients(context)


@row("a worker dies in a pass", "from-torch-rpc")
@row("an error in a node or a hook elsewhere", "from-torch-rpc")
def test_an_error_in_a_backward_function_is_raised_at_the_origin_and_changes_no_gradients() -> None:
    rpc_group(_errors, 3)


class Blocks(torch.autograd.Function):
    """Blocks in its backward pass until ``_release`` is called."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        _released.wait()
        return gradient


def blocks(x: Tensor) -> Tensor:
    result: Tensor = Blocks.apply(x)
    return result


def _blocked(rank: int, _: int) -> None:
    if rank == 0:
        a = _double(3).requires_grad_()
        with dist_autograd.context() as context:
            y = (rpc.rpc_sync("worker1", blocks, (a,)) + rpc.rpc_sync("worker0", torch.neg, (a,))).sum()
            text = r"did not end within 0\.3 s: no answer from worker1\. No gradients"
            with pytest.raises(RpcTimeoutError, match=text) as caught:
                dist_autograd.backward(context, [y], timeout=0.3)
            assert caught.value.worker == "worker1"
            assert dist_autograd.get_gradients(context) == {}
        rpc.rpc_sync("worker1", _release)


def _release() -> None:
    _released.set()


@row("backward has no time-out", "from-torch-rpc")
def test_a_pass_with_a_blocked_worker_times_out_and_the_error_names_the_worker() -> None:
    rpc_group(_blocked, 2)


_leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
_held: list[graph.Borrowed] = []


def _hold_leaf() -> None:
    """Use the ``.grad`` of the leaf from now on, and interrupt the main thread when it waits for the leaf."""
    _held.append(graph.Borrowed([_leaf]))
    _held[0].__enter__()
    main = threading.main_thread().ident
    assert main is not None

    def waits() -> bool:
        frame: Any = top_frames()[main]
        while frame is not None and frame.f_code is not graph.Borrowed.__enter__.__code__:
            frame = frame.f_back
        return frame is not None

    def interrupt() -> None:
        until(waits)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()


def _weighted(x: Tensor) -> Tensor:
    weight = _parameters["weight"] = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    weight.register_hook(lambda _: rpc.rpc_sync("worker0", _hold_leaf))
    return x * weight


def _weight_grad() -> Tensor | None:
    return _parameters["weight"].grad


def _interrupted_commit(rank: int, _: int) -> None:
    if rank == 0:
        with dist_autograd.context() as context:
            y = (_leaf * rpc.rpc_sync("worker1", _weighted, (torch.ones(3, dtype=torch.float64),))).sum()
            with pytest.raises(KeyboardInterrupt):
                dist_autograd.backward(context, [y], accumulate="grad")
            _held[0].__exit__(None, None, None)
        assert _leaf.grad is None
        assert rpc.rpc_sync("worker1", _weight_grad) is None


@row("backward has no time-out", "from-torch-rpc")
def test_a_pass_interrupted_before_it_may_change_grad_changes_no_grad_on_any_worker() -> None:
    rpc_group(_interrupted_commit, 2)


# -- the thread that waits for a pass --------------------------------------------------------------

_HOPS = 5


def twice(x: Tensor) -> Tensor:
    return x * 2


def _there_and_back(leaf: Tensor, hook: Any = None) -> Tensor:
    """Send a tensor to the other worker several times; ``hook`` runs here in each step of the backward pass."""
    found = leaf
    for _ in range(_HOPS):
        found = rpc.rpc_sync("worker1", twice, (found * 1.0,))
        if hook is not None:
            found = found * 1.0
            found.register_hook(hook)
    return found


def _hooks_run_in_the_waiting_thread() -> None:
    leaf, threads = torch.ones(2, requires_grad=True), list[int]()
    for _ in range(20):
        with dist_autograd.context() as context:
            loss = _there_and_back(leaf, lambda _: threads.append(threading.get_ident())).sum()
            dist_autograd.backward(context, [loss])
            assert dist_autograd.get_gradients(context)[leaf].tolist() == [2.0**_HOPS] * 2
        assert WAITING.casts is None
    assert len(threads) == 20 * _HOPS
    # Another thread reads gradients that arrive before this thread waits.
    assert threads.count(threading.get_ident())
    # Later waits of this thread read messages of other calls again.
    assert rpc.rpc_sync("worker1", twice, (torch.ones(1),)).item() == 2.0


def _four_threads() -> None:
    ended: list[bool] = []
    in_threads(_passes, [(ended,) for _ in range(4)])
    assert len(ended) == 4


def _passes(ended: list[bool]) -> None:
    leaf, held = torch.ones(2, requires_grad=True), threading.Lock()

    def hook(_: Tensor) -> None:
        # The waiting thread holds this lock during the pass. Another thread's wait must not run this pass's hooks.
        assert held.locked()

    for _ in range(15):
        with held, dist_autograd.context() as context:
            dist_autograd.backward(context, [_there_and_back(leaf, hook).sum()])
            assert dist_autograd.get_gradients(context)[leaf].tolist() == [2.0**_HOPS] * 2
    ended.append(True)


def _interrupted() -> None:
    leaf = torch.ones(2, requires_grad=True)
    calls = 0

    def hook(_: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with dist_autograd.context() as context:
        loss = _there_and_back(leaf, hook).sum()
        with pytest.raises(KeyboardInterrupt):
            dist_autograd.backward(context, [loss])
        assert dist_autograd.get_gradients(context) == {}
        assert WAITING.casts is None
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [_there_and_back(leaf).sum()])
        assert dist_autograd.get_gradients(context)[leaf].tolist() == [2.0**_HOPS] * 2


def _all(rank: int, _: int) -> None:
    if rank == 0:
        for check in (
            *(_all_ways, _remote_parameters, _context_blocks, _wrong, _from_another_context, _options),
            *(_second_order, _rrefs, _hooks, _hooks_run_in_the_waiting_thread, _four_threads, _interrupted),
        ):
            check()


@pytest.mark.limit(120)
@row("dist_autograd.context()", "from-torch-rpc")
@row("a call whose result the loss does not use", "from-torch-rpc")
@row("hooks of leaves", "from-torch-rpc")
@row("roots are scalars", "from-torch-rpc")
def test_gradients_between_workers_equal_local_autograd_and_wrong_use_raises() -> None:
    rpc_group(_all, 3, timeout=100)
