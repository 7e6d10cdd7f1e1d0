"""Passes of small groups in the simulator: messages sent, errors, expiry of contexts, and hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from actorrpc.autograd.contexts import Context, Contexts
from actorrpc.autograd.messages import (
    Contribution,
    Discover,
    Gradient,
    Run,
    Stratum,
)
from actorrpc.autograd.participant import Participant
from actorrpc.errors import RpcError, RpcTimeoutError
from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerKey
from tests.autograd.programs import copies
from tests.autograd.simulator import Network, Worker, run


class Group:
    """Simulated workers in one context of worker 0."""

    def __init__(self, workers: int = 3, seed: int = 0) -> None:
        self.network = Network(seed, workers)
        self.context = self.network.worker(0).contexts.create().id
        for worker in self.network.workers.values():
            tag = self.worker(0).recorder.sent((), worker.peer, self.context)
            worker.recorder.received(tag, [], self.worker(0).peer)

    def worker(self, rank: int) -> Worker:
        return self.network.worker(rank)

    def context_of(self, rank: int) -> Context:
        found = self.worker(rank).contexts.live.get(self.context)
        assert found is not None
        return found

    def forget(self) -> None:
        """Make passes discover where messages lead to."""
        self.network.forget()

    def send(self, source: int, to: int, *tensors: Tensor) -> Any:
        """Send tensors in one message; return the tensors that arrive."""
        tag = self.worker(source).recorder.sent(tensors, self.worker(to).peer, context=self.context)
        return self.open(source, to, tensors, tag)

    def keep(self, source: int, *tensors: Tensor) -> Callable[[int], Any]:
        """Keep tensors in one message; return a function that opens it on a worker."""
        tag = self.worker(source).recorder.sent(tensors, None, context=self.context)
        return lambda to: self.open(source, to, tensors, tag)

    def open(self, source: int, to: int, tensors: tuple[Tensor, ...], tag: Any) -> Any:
        arrived = copies(tensors, connected=False)
        self.worker(to).recorder.received(tag, arrived, self.worker(source).peer)
        return arrived[0] if len(arrived) == 1 else arrived

    def start(self, *roots: Tensor, rank: int = 0, **options: Any) -> Future[None]:
        options.setdefault("timeout", 1000.0)
        return run(self.worker(rank).participant.begin(self.context, roots, **options))

    def backward(self, *roots: Tensor, rank: int = 0, **options: Any) -> None:
        future = self.start(*roots, rank=rank, **options)
        self.network.settle()
        assert future.done()
        future.value()

    def gradients(self, rank: int) -> dict[Tensor, Tensor]:
        return dict(self.context_of(rank).gradients.values())


def _leaf(*shape: int) -> Tensor:
    return torch.rand(shape or (3,), dtype=torch.float64).requires_grad_()


class Fails(torch.autograd.Function):
    """Raises ``error`` in its backward pass, if it is set."""

    error: BaseException | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if Fails.error is not None:
            raise Fails.error
        return gradient * 2


@contextmanager
def _failing(error: BaseException) -> Iterator[None]:
    Fails.error = error
    try:
        yield
    finally:
        Fails.error = None


# -- messages ----------------------------------------------------------------------------------------------------


def test_a_pass_of_one_worker_sends_nothing() -> None:
    group = Group()
    a, b = _leaf(), _leaf()
    x = group.send(0, 0, a * b)  # a call to itself
    loss = (x * a).sum()
    assert group.start(loss).done()
    assert not group.network.mails
    torch.testing.assert_close(group.gradients(0)[b], (a * a).detach())
    torch.testing.assert_close(group.gradients(0)[a], (2 * a * b).detach())
    assert not group.context_of(0).passes


@pytest.mark.parametrize("forget", [False, True])
def test_a_chain_sends_one_gradient_per_hop_and_one_discover_message_per_unknown_hop(forget: bool) -> None:
    group = Group(5)
    a = _leaf()
    x = a * 1
    for source, to in ((0, 1), (1, 2), (2, 3), (3, 4)):
        x = group.send(source, to, x) * 2
    x = group.send(4, 0, x)
    if forget:
        group.forget()
    group.backward(x.sum())
    counts = group.network.counts
    # The last hop leads to worker 0, which needs no message to itself. Run messages carry the first gradients.
    assert counts["Discover"] == (4 if forget else 0)
    assert counts["Run"] == counts["Gradient"] == counts["Verdict"] == 4
    assert counts["Answer"] == (8 if forget else 4)
    torch.testing.assert_close(group.gradients(0)[a], torch.full((3,), 16.0, dtype=torch.float64))


def test_tensors_that_the_roots_do_not_depend_on_get_no_gradient() -> None:
    group = Group()
    a, b = _leaf(), _leaf()
    group.send(1, 0, group.send(0, 1, a) * b)  # unused result
    unused = group.send(0, 2, a)
    x, y = group.send(1, 0, group.send(0, 1, a) * 3, b * 2)
    group.backward(x.sum())
    assert unused.requires_grad
    assert y.requires_grad
    torch.testing.assert_close(group.gradients(0)[a], torch.full((3,), 3.0, dtype=torch.float64))
    assert group.gradients(1) == {}  # no gradient instead of zeros, like local autograd
    assert not group.context_of(2).gradients


# -- freeing of graphs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [False, True])
def test_a_graph_is_freed_as_soon_as_no_later_stratum_needs_it(shares: bool) -> None:
    group = Group(2)
    a, b = _leaf(), _leaf()
    first, later = torch.tanh(a), torch.tanh(b)
    x = group.send(1, 0, group.send(0, 1, first * 2) * 2)
    x = group.send(1, 0, group.send(0, 1, x * later * (first if shares else 1)) * 2)
    gone: list[bool] = []

    def is_freed(
        _: Tensor,
    ) -> None:  # called by the last stratum, and by the stratum before if the node is shared
        try:
            torch.autograd.grad(later, b, torch.ones_like(later), retain_graph=True)
            gone.append(False)
        except RuntimeError:
            gone.append(True)

    first.register_hook(is_freed)
    group.backward(x.sum())
    assert gone == ([False, False] if shares else [True])


# -- errors ----------------------------------------------------------------------------------------------------------


class Stubborn(Exception):
    """An exception whose text cannot be changed."""

    def __str__(self) -> str:
        return "as ever"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("simulated", 3), r"^\('simulated', 3\)\nError on Node 1: "),
        (KeyError("simulated"), r"^'simulated'\nError on Node 1: "),
        (Stubborn("simulated"), "^as ever\nError on Node 1: "),
        (OSError(5, "simulated"), "simulated\nError on Node 1: "),
        (RuntimeError(), "^\nError on Node 1: "),
    ],
)
def test_errors_of_other_workers_keep_their_type_and_name_the_worker(error: Exception, text: str) -> None:
    group = Group(2)
    loss = group.send(1, 0, Fails.apply(group.send(0, 1, _leaf()))).sum()
    with _failing(error), pytest.raises(type(error), match=text) as caught:
        group.backward(loss)
    assert "worker1" in caught.value.__notes__[-1]


def test_an_error_in_a_leaf_hook_fails_the_pass_and_a_retry_succeeds() -> None:
    group = Group(2)
    a, b = _leaf(), _leaf()
    fail = [True]

    def hook(_: Tensor) -> None:
        if fail:
            raise ZeroDivisionError("simulated")

    b.register_post_accumulate_grad_hook(hook)
    loss = group.send(1, 0, group.send(0, 1, a) * b).sum()
    with pytest.raises(ZeroDivisionError, match="Error on Node 1: simulated"):
        group.backward(loss, retain_graph=True)
    assert group.gradients(0) == group.gradients(1) == {}
    fail.clear()
    group.backward(loss)
    assert group.gradients(0).keys() == {a}
    assert group.gradients(1).keys() == {b}


def test_a_gradient_that_cannot_be_sent_fails_the_pass() -> None:
    group = Group(3)
    loss = group.send(2, 0, group.send(1, 2, group.send(0, 1, _leaf()) * 2) * 2).sum()
    sender = group.worker(2)

    def cast(to: WorkerKey, message: Gradient) -> None:
        raise ValueError("cannot be sent")

    sender.cast = cast  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="Error on Node 2: cannot be sent"):
        group.backward(loss)
    assert not any(group.context_of(rank).passes for rank in range(3))


def test_messages_about_unknown_sends_or_contexts_raise_an_error() -> None:
    group = Group(2)
    part = group.worker(1).participant
    with pytest.raises(RpcError, match="Could not find send function: this worker sent no message 7"):
        part.handle(group.worker(0).me, Discover(group.context, [7]))
    run = Run(group.context, 9, [Stratum({7: ()})], False, False, "context", 0.0, [])
    with pytest.raises(RpcError, match="Could not find send function"):
        part.handle(group.worker(0).me, run)
    with pytest.raises(RpcError, match="Could not find autograd context with id: 8"):
        part.handle(group.worker(0).me, Discover(8, [7]))


# -- malformed messages ----------------------------------------------------------------------------------------------


def test_a_message_with_a_wrong_number_of_gradients_raises_an_error() -> None:
    group = Group(2)
    x = group.send(1, 0, group.send(0, 1, _leaf()) * 2)
    (message,) = group.context_of(1).sends
    origin = group.worker(0).me
    run = Run(
        group.context,
        3,
        [Stratum({message: (Contribution(origin, 1),)})],
        False,
        False,
        "context",
        0.0,
        [Gradient(group.context, 3, message, 1, [None, None])],
    )
    with pytest.raises(RpcError, match="has 1 gradients, but 2 were received"):
        group.worker(1).participant.handle(origin, run)
    del x


# -- ends ------------------------------------------------------------------------------------------------------------


def test_the_time_out_error_names_the_worker_that_did_not_answer() -> None:
    group = Group(3)
    y = group.send(1, 0, group.send(0, 1, _leaf()) * 2) + group.send(2, 0, group.send(0, 2, _leaf()) * 2)
    worker = group.worker(2)
    worker.participant.handle = lambda sender, message: Future()  # type: ignore[method-assign]
    with pytest.raises(
        RpcTimeoutError, match=r"did not end within 1000 s: no answer from worker2\. No gradients"
    ) as caught:
        group.backward(y.sum())
    assert caught.value.worker == "worker2"
    assert not group.context_of(0).passes
    assert not group.context_of(1).passes


def test_contexts_of_a_dead_worker_are_released_but_not_of_its_next_incarnation() -> None:
    me, old, new = WorkerKey(0, "me"), WorkerKey(1, "old"), WorkerKey(1, "new")
    contexts = Contexts(me)
    part = Participant(contexts, Group(1).worker(0))
    of_old, of_new = Contexts(old).create().id, Contexts(new).create().id
    for key, id in ((old, of_old), (new, of_new)):
        context = contexts.reach(id)
        assert context is not None
        assert part.handle(key, Discover(id, [])) == {}
    part.worker_died(old)
    assert [context.id for context in contexts.all()] == [of_new]


def test_unused_contexts_expire_except_at_their_origin() -> None:
    group = Group(2)
    for rank in range(2):
        group.context_of(rank).touched -= 100
    for rank in range(2):
        group.worker(rank).participant.expire(1000)
    assert [len(group.worker(rank).contexts.live) for rank in range(2)] == [1, 1]
    for rank in range(2):
        group.worker(rank).participant.expire(50)
    assert [len(group.worker(rank).contexts.live) for rank in range(2)] == [1, 0]
    assert not group.network.mails


# -- waiting for the verdict -----------------------------------------------------------------------------------------


def test_reading_gradients_waits_for_the_verdict_of_the_pass() -> None:
    group = Group(2)
    w = _leaf()
    loss = group.send(1, 0, group.send(0, 1, _leaf()) * w).sum()
    future = group.start(loss)
    group.network.settle(future.done)
    part = group.worker(1).participant
    assert [mail.type for mail in group.network.mails] == ["Verdict"]
    with pytest.raises(
        RpcTimeoutError, match=r"worker 0, where it began, has not sent its outcome within 0\.01 s"
    ):
        part.gradients(group.context, 0.01)
    found: list[dict[int, tuple[Tensor, Tensor]]] = []
    thread = threading.Thread(target=lambda: found.append(part.gradients(group.context, 30.0)))
    thread.start()
    group.network.settle()
    thread.join()
    assert found[0].keys() == {id(w)}
    assert found[0] is not group.context_of(1).gradients
    assert found[0] == group.context_of(1).gradients


# -- user code in passes ---------------------------------------------------------------------------------------------


def test_a_hook_may_run_another_pass_in_the_same_context() -> None:
    group = Group(2)
    a, b = _leaf(), _leaf()
    inner = group.send(1, 0, group.send(0, 1, b) * 5).sum()
    x = group.send(0, 1, a) * 3
    done: list[int] = []

    def hook(_: Tensor) -> None:
        run(group.worker(0).participant.begin(group.context, [inner])).add_done_callback(
            lambda _: done.append(1)
        )
        group.network.settle(lambda: bool(done))

    x.register_hook(hook)
    group.backward(group.send(1, 0, x).sum())
    assert done
    torch.testing.assert_close(group.gradients(0)[a], torch.full((3,), 3.0, dtype=torch.float64))
    torch.testing.assert_close(group.gradients(0)[b], torch.full((3,), 5.0, dtype=torch.float64))


@pytest.mark.parametrize("how", ["alone", "with more", "twice", "two", "two strata"])
def test_hooks_of_a_leaf_that_was_sent_run_once_on_the_whole_gradient(how: str) -> None:
    group = Group(2)
    a, b = _leaf(), _leaf()
    seen: list[Tensor] = []
    a.register_hook(seen.append)
    a.register_post_accumulate_grad_hook(seen.append)
    if how == "alone":
        loss, wanted = group.send(1, 0, group.send(0, 1, a) * 3), 3.0
    elif how == "with more":
        one, other = group.send(0, 1, a, a * 2)
        loss, wanted = group.send(1, 0, one + other), 3.0
    elif how == "twice":
        kept = group.keep(0, a)
        loss, wanted = group.send(1, 0, kept(1) + kept(1) * 2), 3.0
    elif how == "two":
        one, other = group.send(0, 1, a, b)
        loss, wanted = group.send(1, 0, one * 3 + other), 3.0
    else:
        there = group.send(0, 1, group.send(1, 0, group.send(0, 1, a) * 2) + a)
        loss, wanted = group.send(1, 0, there), 3.0
    group.backward(loss.sum())
    assert len(seen) == 2
    assert seen[0].tolist() == [wanted] * 3
    assert seen[1] is a
    assert group.gradients(0)[a].tolist() == [wanted] * 3
    assert a.grad is None
    assert (b in group.gradients(0)) == (how == "two")
