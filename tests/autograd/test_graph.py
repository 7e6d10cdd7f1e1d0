"""Walks of graphs, captures of gradients and the finishing of leaves, compared with local backward passes."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from actorrpc.autograd import graph
from actorrpc.errors import RpcTimeoutError
from tests.autograd.programs import Twice


def _leaf(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64, requires_grad=True)


def _edges(*tensors: Tensor) -> list[GradientEdge]:
    return [get_gradient_edge(each) for each in tensors]


def _capture(*outputs: Tensor, create_graph: bool = False) -> dict[Tensor, Tensor | None]:
    """Walk a graph and capture the gradients of its leaves, like a stratum."""
    edges = _edges(*outputs)
    leaves = graph.reach(edges, {}).leaves
    ones = [torch.ones_like(each) for each in outputs]
    _, found = graph.capture(edges, ones, [], leaves, retain_graph=True, create_graph=create_graph)
    return {node.variable: each for node, each in zip(leaves, found, strict=True)}


def _finish(gradients: dict[Tensor, Tensor], **options: Any) -> dict[Tensor, Tensor]:
    leaves, box = list(gradients), list(gradients.values())
    gradients.clear()
    found = dict(graph.finish(leaves, box, **options))
    assert not box
    return found


def test_reach_walks_a_graph_of_20_000_nodes() -> None:
    a = _leaf(1)
    x = a
    for _ in range(20_000):
        x = x + 1
    assert len(graph.reach(_edges(x), {}).leaves) == 1


# -- captures --------------------------------------------------------------------------------------------------------


def test_leaf_hooks_do_not_run_in_captures_but_in_all_other_passes() -> None:
    a = _leaf(3)
    seen: list[str] = []
    a.register_hook(lambda g: seen.append("before"))
    torch.autograd.grad(a * 2, a, torch.ones(3, dtype=torch.float64))
    assert seen == ["before"]
    _capture(a * 2)
    assert seen == ["before"]
    handle = a.register_hook(lambda g: (seen.append("doubles"), g * 2)[1])  # registered after a capture
    middle = a * 3
    middle.register_hook(lambda g: seen.append("interior"))
    leaves = _capture(middle)
    assert seen == ["before", "interior"]
    assert torch.equal(leaves[a], torch.full((3,), 3.0, dtype=torch.float64))  # type: ignore[arg-type]
    # Other passes still run the hooks, and their handles still work.
    seen.clear()
    (a * 2).sum().backward()
    assert seen == ["before", "doubles"]
    assert torch.equal(a.grad, torch.full((3,), 4.0, dtype=torch.float64))  # type: ignore[arg-type]
    handle.remove()
    (a * 2).sum().backward()
    assert seen == ["before", "doubles", "before"]


def test_hooks_run_for_a_backward_pass_of_another_thread_during_a_capture() -> None:
    a = _leaf(3)
    seen: list[str] = []
    a.register_hook(lambda g: seen.append(threading.current_thread().name))
    out = a * 2

    def meanwhile(_: Tensor) -> None:
        thread = threading.Thread(
            target=lambda: torch.autograd.grad(a * 3, a, torch.ones(3, dtype=torch.float64)), name="other"
        )
        thread.start()
        thread.join()

    out.register_hook(meanwhile)
    _capture(out)
    assert seen == ["other"]


def _kept_hook(gradient: Tensor) -> Tensor:
    return gradient * 5


def test_a_silenced_hook_is_copied_and_pickled_as_the_original() -> None:
    a = _leaf(3)
    a.register_hook(_kept_hook)
    _capture(a * 2)
    hooks = a._backward_hooks
    (silenced,) = hooks.values()
    assert silenced is not _kept_hook
    assert silenced.__name__ == "_kept_hook"
    assert copy.deepcopy(silenced) is _kept_hook
    assert pickle.loads(pickle.dumps(silenced)) is _kept_hook
    _capture(a * 2)
    assert list(hooks.values()) == [silenced]  # wrapped once


# -- finishing -------------------------------------------------------------------------------------------------------


def _register_all_hooks(leaf: Tensor, seen: list[str]) -> list[Any]:
    """Register one hook of each kind, which records its gradient; return objects that must be kept alive."""
    node = get_gradient_edge(leaf).node

    def recorder(kind: str, answer: Any = None) -> Callable[..., Any]:
        def hook(*given: Any) -> Any:
            value = given[-1]
            while isinstance(value, tuple) and value:
                value = value[0]
            if isinstance(value, Tensor):
                kind_and_value = f"{kind} {float((value.grad if value is leaf else value)[0]):g}"  # type: ignore[index]
            else:
                kind_and_value = kind
            seen.append(kind_and_value)
            return answer(value) if answer is not None else None

        return hook

    leaf.register_hook(recorder("tensor", lambda g: g.clamp(max=2)))
    node.register_prehook(recorder("node before"))
    node.register_hook(recorder("node after"))
    leaf.register_post_accumulate_grad_hook(recorder("accumulated"))
    return [node]


def test_hooks_of_every_kind_run_once_on_the_sum_as_in_a_local_pass() -> None:
    local, ours = _leaf(3), _leaf(3)
    calls_local: list[str] = []
    calls_ours: list[str] = []
    kept = _register_all_hooks(local, calls_local) + _register_all_hooks(ours, calls_ours)
    (local * 1 + local * 3).sum().backward()

    total: Tensor | None = None
    for part in (ours * 1, ours * 3):  # two strata
        captured = _capture(part)[ours]
        assert captured is not None
        total = captured if total is None else graph.add(total, captured)
    assert calls_ours == []
    assert total is not None
    found = _finish({ours: total})
    assert calls_ours == calls_local
    assert "tensor 4" in calls_ours
    assert len(calls_ours) == 4
    assert torch.equal(found[ours], local.grad)  # type: ignore[arg-type]
    assert ours.grad is None
    assert kept


def test_finish_restores_grad_and_a_hook_may_remove_the_gradient() -> None:
    a, b, c = _leaf(3), _leaf(3), _leaf(3)
    a.grad = before = torch.full((3,), 9.0, dtype=torch.float64)
    seen: list[Tensor] = []

    def step(leaf: Tensor) -> None:  # an optimizer that steps in the backward pass
        assert leaf.grad is not None
        seen.append(leaf.grad.clone())
        leaf.grad = None

    b.register_post_accumulate_grad_hook(step)
    one = torch.ones(3, dtype=torch.float64)
    found = _finish({a: one * 1, b: one * 2, c: one * 3})
    assert a.grad is before
    assert torch.equal(before, one * 9)
    assert b.grad is c.grad is None
    assert {id(leaf) for leaf in found} == {id(a), id(c)}
    assert torch.equal(seen[0], one * 2)


def test_an_error_in_a_hook_restores_grad() -> None:
    a, b = _leaf(3), _leaf(3)
    a.grad = before = torch.zeros(3, dtype=torch.float64)

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError("simulated")

    b.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ZeroDivisionError, match="simulated"):
        graph.finish([a, b], [torch.ones(3, dtype=torch.float64) for _ in range(2)])
    assert a.grad is before
    assert b.grad is None
    with graph.Borrowed([a, b], 0.0):  # the leaves were released
        pass


def test_finish_skips_frozen_leaves_and_rejects_tensors_that_are_no_leaves() -> None:
    frozen, a, moved = _leaf(3), _leaf(3), _leaf(3)
    frozen.requires_grad_(False)
    found = _finish({frozen: torch.ones(3, dtype=torch.float64), a: torch.ones(3, dtype=torch.float64)})
    assert list(found) == [a]
    assert graph.finish([frozen], [torch.ones(3)]) == []
    moved.detach_().requires_grad_()
    torch.add(moved, 1, out=None)
    view = moved.clone()
    with pytest.raises(RuntimeError, match="moved into the graph interior"):
        graph.finish([view], [torch.ones(3)])


def test_finish_works_under_no_grad_and_inference_mode() -> None:
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        a = _leaf(3)
        gradient = torch.ones(3, dtype=torch.float64)
        with mode():
            found = dict(graph.finish([a], [gradient]))
        assert torch.equal(found[a], gradient)


def test_finish_with_create_graph_runs_tensor_hooks() -> None:
    a = _leaf(3)
    a.register_hook(lambda g: g * 2)
    captured = _capture(a**2, create_graph=True)
    found = _finish(captured, create_graph=True)  # type: ignore[arg-type]
    assert a.grad is None
    torch.testing.assert_close(
        torch.autograd.grad(found[a].sum(), a)[0], torch.full((3,), 8.0, dtype=torch.float64)
    )


def _sparse(*indices: int) -> Tensor:
    values = torch.ones(len(indices), dtype=torch.float64)
    return torch.sparse_coo_tensor(torch.tensor([indices]), values, (3,), check_invariants=False)


# -- exclusive use of .grad -------------------------------------------------------------------------------------------


def test_a_second_borrower_of_a_leaf_waits_or_times_out() -> None:
    a, b, c = _leaf(2), _leaf(2), _leaf(2)
    taken, release, order = threading.Event(), threading.Event(), []

    def first() -> None:
        with graph.Borrowed([a, b]):
            taken.set()
            release.wait()
            order.append("first")

    def second() -> None:
        with graph.Borrowed([b, c]):
            order.append("second")

    threads = [threading.Thread(target=first)]
    threads[0].start()
    taken.wait()
    threads.append(threading.Thread(target=second))
    threads[1].start()
    with graph.Borrowed([c]):  # a waiting borrower does not hold any of its leaves yet
        order.append("other")
    with pytest.raises(RpcTimeoutError, match="did not end in time"), graph.Borrowed([b], time.monotonic()):
        pass
    release.set()
    for thread in threads:
        thread.join()
    assert order == ["other", "first", "second"]


# -- into .grad ------------------------------------------------------------------------------------------------------


def test_accumulate_works_in_place_where_torch_does() -> None:
    a, b, c = _leaf(3), _leaf(3), _leaf(3)
    a.grad = kept = torch.ones(3, dtype=torch.float64)
    c.grad = _sparse(1)
    new = torch.full((3,), 2.0, dtype=torch.float64)
    with graph.Borrowed([a, b, c]) as grads:
        graph.accumulate(grads, [new, new.clone(), new.clone()])
    assert a.grad is kept
    assert torch.equal(kept, new + 1)
    assert torch.equal(b.grad, new)  # type: ignore[arg-type]
    assert torch.equal(c.grad, torch.tensor([2.0, 3.0, 2.0], dtype=torch.float64))
    with graph.Borrowed([a, b, c], 0.0):  # the leaves were released
        pass


@pytest.mark.parametrize("in_place", [False, True])
def test_sparse_and_dense_gradients_can_be_added(in_place: bool) -> None:
    dense = torch.ones(3, dtype=torch.float64)
    sparse = _sparse(1, 1)
    add = graph.add_to if in_place else graph.add
    want = torch.tensor([1.0, 3.0, 1.0], dtype=torch.float64)
    assert torch.equal(add(sparse, dense.clone()), want)
    assert torch.equal(add(dense.clone(), sparse), want)
    assert add(sparse, sparse).is_sparse
    assert torch.equal(add(sparse, sparse).to_dense(), torch.tensor([0.0, 4.0, 0.0], dtype=torch.float64))
    assert torch.equal(sparse.to_dense(), torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64))


# -- capture and finish in one run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "both",
    [
        lambda a, b: a + b,
        Twice.apply,
        lambda a, b: (a.view(1, -1) + b).view(-1),
        lambda a, b: torch.cat([a, b]),
    ],
)
def test_gradients_of_a_run_never_share_memory(both: Callable[..., Tensor]) -> None:
    a, b = _leaf(4), _leaf(4)
    out = both(a, b)
    results = dict(graph.run(_edges(out), [torch.ones_like(out)], [], [a, b], retain_graph=False)[1])
    results[a].mul_(2)
    assert results[b].tolist() == [1.0] * 4
    assert results[a].untyped_storage().data_ptr() != results[b].untyped_storage().data_ptr()
