"""Gradients that are lent: whose they are meanwhile, and what is left afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import actorrpc.autograd as dist_autograd
from actorrpc import errors
from actorrpc.autograd import graph, startup
from actorrpc.optim import local_optimizer
from tests.optim.things import weight


@pytest.fixture
def leaves() -> list[torch.Tensor]:
    found = [weight(seed, (2,)) for seed in range(3)]
    found[0].grad = torch.full((2,), 7.0)
    return found


@pytest.fixture
def context_id(workers: list[str], leaves: list[torch.Tensor]) -> Iterator[int]:
    """A context that has gradients for the first two leaves."""
    with dist_autograd.context() as found:
        context = startup.contexts().get(found)
        context.gradients.update({id(leaf): (leaf, torch.ones(2)) for leaf in leaves[:2]})
        yield found


def test_those_of_a_context(leaves: list[torch.Tensor], context_id: int) -> None:
    with local_optimizer.lent(leaves[1:], context_id) as lent:
        assert lent[1] is None
        assert lent[0] is not None
        assert torch.equal(lent[0], torch.ones(2))
        lent[0].mul_(3)
    found = dist_autograd.get_gradients(context_id)
    assert torch.equal(found[leaves[1]], torch.full((2,), 3.0))
    assert torch.equal(found[leaves[0]], torch.ones(2))


def test_replaced_ones_go_back_unless_the_block_fails(leaves: list[torch.Tensor], context_id: int) -> None:
    for place in (context_id, None):
        with pytest.raises(LookupError):
            _replace_and_fail(leaves, place)
        with local_optimizer.lent(leaves, place) as lent:
            assert lent[0] is not None
            assert lent[0][0] == (7 if place is None else 1)
            lent[0] = torch.full((2,), 5.0)
    assert torch.equal(dist_autograd.get_gradients(context_id)[leaves[0]], torch.full((2,), 5.0))
    assert torch.equal(leaves[0].grad, torch.full((2,), 5.0))  # type: ignore[arg-type]


def _replace_and_fail(leaves: list[torch.Tensor], place: int | None) -> None:
    with local_optimizer.lent(leaves, place) as lent:
        lent[0] = torch.zeros(2)
        raise LookupError


def test_grad_is_free_meanwhile(leaves: list[torch.Tensor], context_id: int) -> None:
    for place in (context_id, None):
        with local_optimizer.lent(leaves, place):
            assert all(leaf.grad is None for leaf in leaves)
            leaves[2].grad = torch.ones(2)
        assert leaves[2].grad is None
        assert torch.equal(leaves[0].grad, torch.full((2,), 7.0))  # type: ignore[arg-type]


def _clear(leaves: list[torch.Tensor], place: int | None, set_to_none: bool) -> None:
    local_optimizer.LocalOptimizer(torch.optim.SGD(leaves)).clear(place, set_to_none)


def test_clearing(leaves: list[torch.Tensor], context_id: int) -> None:
    _clear(leaves[:1], context_id, False)
    found = dist_autograd.get_gradients(context_id)
    assert [found[leaf].sum().item() for leaf in leaves[:2]] == [0.0, 2.0]
    _clear(leaves[:1], context_id, True)
    assert set(dist_autograd.get_gradients(context_id)) == {leaves[1]}
    assert leaves[0].grad is not None
    _clear(leaves, None, True)
    assert leaves[0].grad is None


def test_clearing_waits_for_whoever_has_the_gradients(leaves: list[torch.Tensor], workers: list[str]) -> None:
    """What is put back afterwards would bring the cleared gradient back."""
    entered = threading.Event()

    def clear() -> None:
        entered.set()
        _clear(leaves, None, True)

    thread = threading.Thread(target=clear)
    with graph.Borrowed(leaves):
        thread.start()
        assert entered.wait(30)
    thread.join()
    assert leaves[0].grad is None


def test_unknown_contexts(leaves: list[torch.Tensor], workers: list[str]) -> None:
    local_optimizer.check_context(None)
    for check in (local_optimizer.check_context, lambda id: _clear(leaves, id, True)):
        with pytest.raises(errors.RpcError, match="Could not find autograd context with id: 3"):
            check(3)
    for wrong in ("3", True, 3.0):
        with pytest.raises(TypeError):
            local_optimizer.check_context(wrong)  # type: ignore[arg-type]
