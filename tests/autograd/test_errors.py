"""Backward passes between real workers when a worker dies or stops during the pass.

Each pass has three workers: the origin, the worker at whose gate the fault happens, and a bystander. Gradients flow from the
origin through the gate's worker, the bystander, and the gate's worker again, back to the origin. So the fault can happen in
each phase of a pass: discovery, the first gradient of a worker, a later gradient, and the finishing of leaves.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import actorrpc.autograd as dist_autograd
from actorrpc import rpc
from actorrpc.autograd import graph
from actorrpc.autograd.api import contexts, participant
from actorrpc.autograd.messages import Discover
from actorrpc.errors import PeerDiedError
from actorrpc.wire.identity import WorkerKey
from tests.actors.e2e.kit import until
from tests.layers import rest_is_slow
from tests.ranks import Died, rpc_group

PHASES = ("discovery", "first gradient", "later gradient", "finishing")
DEEP = (
    300  # nodes; messages do not announce where graphs of this size lead to, so the pass has to discover it
)

# -- gates ---------------------------------------------------------------------------------------

_armed: dict[str, Callable[[], None]] = {}


def _pass_gate(gate: str) -> None:
    """Pass a gate; its fault, if armed, happens once."""
    action = _armed.pop(gate, None)
    if action is not None:
        action()


class Gate(torch.autograd.Function):
    """A gate in the backward pass of a worker."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: str) -> Tensor:
        ctx.gate = gate
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        _pass_gate(ctx.gate)
        return gradient, None


def _arm(phase: str, fault: str, context: int, origin_pid: int = 0) -> None:
    def is_discarded() -> bool:
        found = contexts().live.get(context)
        return found is None or not found.passes

    def fault_happens() -> None:
        if fault in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
            threading.Event().wait()  # this thread may be stopped last
        else:
            os.kill(origin_pid, signal.SIGKILL)
            until(is_discarded)  # wait until this worker has discarded its part of the pass

    _armed[phase] = fault_happens
    if phase == "discovery":
        part = participant()
        handle = part.handle

        def guarded(sender: WorkerKey, message: Any) -> Any:
            if isinstance(message, Discover):
                _pass_gate("discovery")
            return handle(sender, message)

        part.handle = guarded  # type: ignore[method-assign]


# -- functions that run on workers -----------------------------------------------------------------------------

_weights: list[torch.nn.Parameter] = []


def _weight() -> torch.nn.Parameter:
    if not _weights:
        made = torch.nn.Parameter(torch.full((3,), 1.5, dtype=torch.float64))
        made.register_post_accumulate_grad_hook(lambda _: _pass_gate("finishing"))
        _weights.append(made)
    return _weights[0]


def _scale(x: Tensor) -> Tensor:
    return x * _weight()


def _gated(x: Tensor, gate: str, deep: int) -> Tensor:
    for _ in range(deep):
        x = x * 1
    y: Tensor = Gate.apply(x, gate)
    return y * _weight()


def _gradient(context: int) -> Tensor | None:
    return dist_autograd.get_gradients(context).get(_weight())


def _counts() -> tuple[int, int]:
    """Return the numbers of contexts and passes of this worker; wait until its weight is not borrowed."""
    with graph.Borrowed([_weight()]):
        passes = sum(len(context.passes) for context in contexts().all())
    return len(contexts().live), passes


def _forward(x: Tensor, at_gate: str, bystander: str, phase: str) -> Tensor:
    deep = DEEP if phase == "discovery" else 0
    y = rpc.rpc_sync(at_gate, _gated, (x, "later gradient", deep))
    y = rpc.rpc_sync(bystander, _scale, (y,))
    y = rpc.rpc_sync(at_gate, _gated, (y, "first gradient", deep))
    # The bystander also gets a gradient before the gate.
    return y.sum() + rpc.rpc_sync(bystander, _scale, (x,)).sum()


def _leaf() -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)


def _passes_work(me: str, other: str) -> None:
    """Run a pass in a new context between the remaining workers; its gradients must be right."""
    x, w = _leaf(), _weight().detach().clone().requires_grad_()
    with dist_autograd.context() as context:
        y = rpc.rpc_sync(other, _scale, (rpc.rpc_sync(other, _scale, (x,)) * x,))
        dist_autograd.backward(context, [y.sum()])
        found = dist_autograd.get_gradients(context)[x], rpc.rpc_sync(other, _gradient, (context,))
    want = torch.autograd.grad((x * w * x * w).sum(), (x, w))
    for got, g in zip(found, want, strict=True):
        torch.testing.assert_close(got, g)
    for worker in (me, other):
        until(lambda worker=worker: rpc.rpc_sync(worker, _counts) == (0, 0))


@contextmanager
def _in_phase(phase: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"phase of the pass: {phase}")
        raise


# -- a worker is killed, or stopped --------------------------------------------------------------


def _participants_die(rank: int, workers: int, fault: str) -> None:
    if rank:
        return
    bystander = "worker1"
    pids = {f"worker{n}": rpc.rpc_sync(f"worker{n}", os.getpid) for n in range(2, workers)}
    try:
        for phase, mortal in zip(PHASES, pids, strict=True):
            with _in_phase(phase):
                _dies_in(phase, fault, mortal, bystander)
                _passes_work("worker0", bystander)
    finally:
        if fault == "stopped":
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)


def _dies_in(phase: str, fault: str, mortal: str, bystander: str) -> None:
    x = _leaf()
    with dist_autograd.context() as context:
        for worker in (mortal, bystander):
            dist_autograd.backward(context, [rpc.rpc_sync(worker, _scale, (x,)).sum()])
        mine = dist_autograd.get_gradients(context)[x].clone()
        theirs = rpc.rpc_sync(bystander, _gradient, (context,))
        loss = _forward(x, mortal, bystander, phase)
        rpc.rpc_sync(mortal, _arm, (phase, fault, context))
        with pytest.raises(PeerDiedError, match=mortal):
            dist_autograd.backward(context, [loss], retain_graph=True)
        # The failed pass changed no gradients, and no worker waits for it.
        assert torch.equal(dist_autograd.get_gradients(context)[x], mine)
        assert torch.equal(rpc.rpc_sync(bystander, _gradient, (context,)), theirs)
        for worker in ("worker0", bystander):
            until(lambda worker=worker: rpc.rpc_sync(worker, _counts) == (1, 0))
        with pytest.raises(PeerDiedError, match=mortal):  # another pass that needs the worker
            dist_autograd.backward(context, [loss])
    assert x.grad is None


@pytest.mark.limit(120)
@pytest.mark.parametrize("fault", rest_is_slow(["killed", "stopped"]))
def test_a_worker_killed_or_stopped_in_any_phase_fails_the_pass_and_changes_no_gradients(fault: str) -> None:
    _group(_participants_die, fault, options={"heartbeat": 0.2})


def _group(fn: Callable[..., None], *args: Any, **options: Any) -> None:
    """Run a group of two workers that survive, and for each phase one worker that dies."""
    mortal = range(2, 2 + len(PHASES))
    ended = rpc_group(fn, mortal.stop, *args, may_die=mortal, timeout=100, **options)
    assert ended[2:] == [Died(-signal.SIGKILL)] * len(mortal)


# -- the origin is killed ------------------------------------------------------------------------


def _begin_and_die(phase: str) -> None:
    with dist_autograd.context():
        _begin_and_die_in_it(phase)


def _begin_and_die_in_it(phase: str) -> None:
    context = dist_autograd.current_context()
    assert context is not None
    loss = _forward(_leaf(), "worker0", "worker1", phase)
    rpc.rpc_sync("worker0", _arm, (phase, "origin killed", context, os.getpid()))
    dist_autograd.backward(context, [loss])


def _origins_die(rank: int, workers: int) -> None:
    if rank:
        return
    for phase, origin in zip(PHASES, range(2, workers), strict=True):
        with _in_phase(phase):
            with pytest.raises(PeerDiedError, match=f"worker{origin}"):
                rpc.rpc_sync(f"worker{origin}", _begin_and_die, (phase,))
            for worker in ("worker0", "worker1"):
                until(lambda worker=worker: rpc.rpc_sync(worker, _counts) == (0, 0))
                assert rpc.rpc_sync(worker, _grad_of_weight) is None
            assert not _armed
            _passes_work("worker0", "worker1")
            _passes_work("worker0", "worker0")


def _origins_of_passes_die(rank: int, workers: int) -> None:
    """As above, but another worker has created the context, which outlives the pass."""
    if rank:
        return
    for phase, origin in zip(PHASES, range(2, workers), strict=True):
        with _in_phase(phase), dist_autograd.context() as context:
            with pytest.raises(PeerDiedError, match=f"worker{origin}"):
                rpc.rpc_sync(f"worker{origin}", _begin_and_die_in_it, (phase,))
            for worker in ("worker0", "worker1"):
                until(lambda worker=worker: rpc.rpc_sync(worker, _counts) == (1, 0))
                assert rpc.rpc_sync(worker, _gradient, (context,)) is None
            assert not _armed
        _passes_work("worker0", "worker1")


def _grad_of_weight() -> Tensor | None:
    return _weight().grad


@pytest.mark.limit(120)
@pytest.mark.parametrize("scenario", rest_is_slow([_origins_die, _origins_of_passes_die]))
def test_workers_discard_the_pass_of_an_origin_killed_in_any_phase(scenario: Callable[..., None]) -> None:
    _group(scenario)
