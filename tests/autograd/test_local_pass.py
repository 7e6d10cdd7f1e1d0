"""Passes of small groups in the simulator: messages sent, errors, released contexts, and hooks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from actorrpc.autograd.contexts import Context, Contexts
from actorrpc.autograd.coordinator import make_plan
from actorrpc.autograd.messages import ROOTS, Contribution, Discover, Gradient, Run, Sink, Stratum
from actorrpc.autograd.participant import Participant
from actorrpc.errors import RpcError, RpcTimeoutError
from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerKey
from tests.autograd.programs import copies
from tests.autograd.simulator import Network, Worker, run
from tests.migration.rows import row

A, B, C = (WorkerKey(rank, f"life{rank}") for rank in range(3))


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
    with pytest.raises(RpcError, match="has 1 tensors that require grad, but 2 gradients were received"):
        group.worker(1).participant.handle(origin, run)
    del x


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ({(A, ROOTS): [Sink(B, 1, 1)]}, "message 1 of worker 1, about which no answer says anything"),
        (
            {(A, ROOTS): [Sink(B, 1, 1)], (B, 1): [Sink(C, 2, 1)], (C, 2): [Sink(B, 1, 1)]},
            r"in a circle: message 1 of worker 1, message 2 of worker 2",
        ),
        ({(A, ROOTS): [], (B, 1): []}, "nothing leads to message 1 of worker 1"),
        (
            {(A, ROOTS): [Sink(B, 1, 1), Sink(B, 2, 1)], (B, 1): [], (B, 2): []},
            "different messages for receipt 1 of worker 0: message 2 of worker 1 and message 1 of worker 1",
        ),
    ],
)
def test_contradictory_answers_of_discovery_raise_an_error(answers: Any, text: str) -> None:
    with pytest.raises(RpcError, match=text):
        make_plan(A, answers)


@row("a context whose origin has died", "from-torch-rpc")
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


def test_a_late_message_does_not_recreate_one_of_the_last_10_000_released_contexts() -> None:
    contexts = Contexts(WorkerKey(3, "life"))
    reached = contexts.reach(9 << 48 | 1)
    assert reached is contexts.reach(9 << 48 | 1)
    assert reached is not None
    assert contexts.release(reached.id) is reached
    assert contexts.reach(reached.id) is None
    assert contexts.release(reached.id) is None
    with pytest.raises(RpcError, match="has been released"):
        contexts.get(reached.id)
    # Nor does a message that arrives after the release of an unknown context.
    for id in range(10_020):
        assert contexts.release(id) is None
    assert contexts.reach(19) is not None
    assert contexts.reach(20) is None


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
