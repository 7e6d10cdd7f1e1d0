"""Passes of small groups in the simulator: what is sent, what errors say, what becomes of them; and on real threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from actorrpc.autograd import graph
from actorrpc.autograd.contexts import Context, Contexts
from actorrpc.autograd.local_pass import LocalPass, Terms
from actorrpc.autograd.messages import (
    Contribution,
    Discover,
    Gradient,
    Message,
    Run,
    Stratum,
    Verdict,
)
from actorrpc.autograd.participant import Participant
from actorrpc.errors import PeerDiedError, RemoteError, RpcError, RpcTimeoutError
from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerKey
from tests.autograd.programs import compare, copies, expected, generate
from tests.autograd.simulator import Network, Worker, World, run


class Group:
    """Some workers in one context of worker 0."""

    def __init__(self, workers: int = 3, seed: int = 0) -> None:
        self.network = Network(seed, workers)
        self.context = self.network.worker(0).contexts.create().id
        for worker in self.network.workers.values():
            tag = self.worker(0).recorder.sent((), worker.peer, self.context)
            worker.recorder.arrived(tag, [], self.worker(0).peer)

    def worker(self, rank: int) -> Worker:
        return self.network.worker(rank)

    def known(self, rank: int) -> Context:
        found = self.worker(rank).contexts.live.get(self.context)
        assert found is not None
        return found

    def forget(self) -> None:
        """Have passes ask where messages lead to."""
        self.network.forget()

    def send(self, source: int, to: int, *tensors: Tensor) -> Any:
        """Send tensors in one message; returns what arrives."""
        tag = self.worker(source).recorder.sent(tensors, self.worker(to).peer, context=self.context)
        return self.open(source, to, tensors, tag)

    def keep(self, source: int, *tensors: Tensor) -> Callable[[int], Any]:
        """Keep tensors in one message; returns what opens it on a worker."""
        tag = self.worker(source).recorder.sent(tensors, None, context=self.context)
        return lambda to: self.open(source, to, tensors, tag)

    def open(self, source: int, to: int, tensors: tuple[Tensor, ...], tag: Any) -> Any:
        arrived = copies(tensors, connected=False)
        self.worker(to).recorder.arrived(tag, arrived, self.worker(source).peer)
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
        return dict(self.known(rank).gradients.values())


def _leaf(*shape: int) -> Tensor:
    return torch.rand(shape or (3,), dtype=torch.float64).requires_grad_()


class Fails(torch.autograd.Function):
    """Fails in its backward pass while there is an error to fail with."""

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


# -- what is sent ----------------------------------------------------------------------------------------------------


def test_a_pass_of_one_worker_sends_nothing() -> None:
    group = Group()
    a, b = _leaf(), _leaf()
    x = group.send(0, 0, a * b)  # a call to itself
    loss = (x * a).sum()
    assert group.start(loss).done()
    assert not group.network.mails
    torch.testing.assert_close(group.gradients(0)[b], (a * a).detach())
    torch.testing.assert_close(group.gradients(0)[a], (2 * a * b).detach())
    assert not group.known(0).passes


@pytest.mark.parametrize("forget", [False, True])
def test_a_chain_costs_one_gradient_for_each_hop_and_where_it_was_not_told_one_question(forget: bool) -> None:
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
    # The last hop leads to worker 0, which asks itself; the first gradient goes out with the order to run.
    assert counts["Discover"] == (4 if forget else 0)
    assert counts["Run"] == counts["Gradient"] == counts["Verdict"] == 4
    assert counts["Answer"] == (8 if forget else 4)
    torch.testing.assert_close(group.gradients(0)[a], torch.full((3,), 16.0, dtype=torch.float64))


def test_what_the_roots_do_not_depend_on_is_not_touched() -> None:
    group = Group()
    a, b = _leaf(), _leaf()
    group.send(1, 0, group.send(0, 1, a) * b)  # nobody uses the result
    unused = group.send(0, 2, a)
    x, y = group.send(1, 0, group.send(0, 1, a) * 3, b * 2)
    group.backward(x.sum())
    assert unused.requires_grad
    assert y.requires_grad
    torch.testing.assert_close(group.gradients(0)[a], torch.full((3,), 3.0, dtype=torch.float64))
    assert group.gradients(1) == {}  # no gradient, not zeros: local autograd has none, either
    assert not group.known(2).gradients


def test_gradients_given_for_roots_that_are_no_scalars() -> None:
    group = Group(2)
    a = _leaf(2, 3)
    x = group.send(1, 0, group.send(0, 1, a) ** 2)
    seed = torch.rand(2, 3, dtype=torch.float64)
    before = seed.clone()
    group.backward(x, (x * 2).sum(), gradients=[seed, None], retain_graph=True)
    torch.testing.assert_close(group.gradients(0)[a], (2 * a * (seed + 2)).detach())
    group.backward(a * 1, gradients=seed)
    group.gradients(0)[a].zero_()
    assert torch.equal(seed, before)  # it is the caller's


def test_gradients_add_up_over_passes_in_new_memory() -> None:
    group = Group(2)
    a = _leaf()
    x = group.send(1, 0, group.send(0, 1, a) ** 2).sum()
    group.backward(x, retain_graph=True)
    first = group.gradients(0)[a]
    value = first.clone()
    group.backward(x)
    assert torch.equal(first, value)
    assert torch.equal(group.gradients(0)[a], value + value)


def test_gradients_of_gradients() -> None:
    group = Group(2)
    a, w = _leaf(), _leaf()
    y = group.send(1, 0, torch.sin(group.send(0, 1, a * a)) * w)
    group.backward(y.sum(), create_graph=True)
    la, lw = a.detach().requires_grad_(), w.detach().requires_grad_()
    want = torch.autograd.grad((torch.sin(la * la) * lw).sum(), (la, lw), create_graph=True)
    first = group.gradients(0)[a]
    torch.testing.assert_close(first, want[0])
    torch.testing.assert_close(group.gradients(1)[w], want[1])
    again = torch.autograd.grad((want[0] ** 2).sum(), (la, lw))
    group.known(0).gradients.clear()
    group.known(1).gradients.clear()
    group.backward((first**2).sum())
    torch.testing.assert_close(group.gradients(0)[a], again[0])
    torch.testing.assert_close(group.gradients(1)[w], again[1])


# -- graphs that are given up ----------------------------------------------------------------------------------------


def test_a_second_pass_over_a_graph_that_was_given_up() -> None:
    group = Group(2)
    a = _leaf()
    x = group.send(1, 0, group.send(0, 1, a) * 2)  # nothing in it that torch itself would miss
    group.backward(x.sum())
    before = group.gradients(0)[a].clone()
    with pytest.raises(
        RuntimeError, match="Error on Node 1: Trying to backward through the graph a second time"
    ):
        group.backward(x.sum())
    assert torch.equal(group.gradients(0)[a], before)
    assert not group.known(1).reaches
    assert set(group.known(1).sends.values()) == {()}


@pytest.mark.parametrize("shares", [False, True])
def test_a_graph_is_given_up_as_soon_as_no_later_stratum_needs_it(shares: bool) -> None:
    group = Group(2)
    a, b = _leaf(), _leaf()
    first, later = torch.tanh(a), torch.tanh(b)
    x = group.send(1, 0, group.send(0, 1, first * 2) * 2)
    x = group.send(1, 0, group.send(0, 1, x * later * (first if shares else 1)) * 2)
    gone: list[bool] = []

    def look(_: Tensor) -> None:  # the last stratum comes through here, and where it is shared the one before
        try:
            torch.autograd.grad(later, b, torch.ones_like(later), retain_graph=True)
            gone.append(False)
        except RuntimeError:
            gone.append(True)

    first.register_hook(look)
    group.backward(x.sum())
    assert gone == ([False, False] if shares else [True])


# -- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_of_a_node_arrives_and_changes_nothing() -> None:
    group = Group(3)
    a, b = _leaf(), _leaf()
    x = group.send(2, 1, Fails.apply(group.send(1, 2, group.send(0, 1, a) * b)))
    loss = group.send(1, 0, x * 2).sum()
    group.backward(loss, retain_graph=True)
    before = [group.gradients(0)[a].clone(), group.gradients(1)[b].clone()]
    for _ in range(3):
        with (
            _failing(ZeroDivisionError("simulated")),
            pytest.raises(ZeroDivisionError, match=r"^Error on Node 2: simulated\n") as caught,
        ):
            group.backward(loss, retain_graph=True)
        assert isinstance(caught.value, RemoteError)
        assert "worker2" in "".join(caught.value.__notes__)
        assert "worker2" in caught.value.traceback
        for rank in range(3):
            assert not group.known(rank).passes
        assert torch.equal(group.gradients(0)[a], before[0])
        assert torch.equal(group.gradients(1)[b], before[1])
    group.backward(loss)
    assert torch.equal(group.gradients(0)[a], 2 * before[0])
    assert torch.equal(group.gradients(1)[b], 2 * before[1])


class Stubborn(Exception):
    """Has a message of its own, and takes no other."""

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
def test_errors_keep_their_type(error: Exception, text: str) -> None:
    group = Group(2)
    loss = group.send(1, 0, Fails.apply(group.send(0, 1, _leaf()))).sum()
    with _failing(error), pytest.raises(type(error), match=text) as caught:
        group.backward(loss)
    assert "worker1" in caught.value.__notes__[-1]


def test_an_error_here_is_raised_as_it_is_and_the_others_hear_of_it() -> None:
    group = Group(2)
    a = _leaf()
    loss = group.send(1, 0, group.send(0, 1, Fails.apply(a)) * 2).sum()
    error = ZeroDivisionError("simulated")
    with _failing(error), pytest.raises(ZeroDivisionError) as caught:
        group.backward(loss, retain_graph=True)
    assert caught.value is error
    assert str(error) == "simulated"
    assert not group.known(1).passes
    assert group.gradients(0) == {}
    group.backward(loss)
    torch.testing.assert_close(group.gradients(0)[a], torch.full((3,), 4.0, dtype=torch.float64))


def test_an_error_of_a_hook_of_a_leaf_is_one_of_the_pass() -> None:
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


def test_a_gradient_that_cannot_be_sent_on_is_an_error_of_the_pass() -> None:
    group = Group(3)
    loss = group.send(2, 0, group.send(1, 2, group.send(0, 1, _leaf()) * 2) * 2).sum()
    sender = group.worker(2)

    def post(to: WorkerKey, message: Gradient) -> None:
        raise ValueError("cannot be sent")

    sender.post = post  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="Error on Node 2: cannot be sent"):
        group.backward(loss)
    assert not any(group.known(rank).passes for rank in range(3))


def test_wrong_roots_are_refused_before_anything_is_asked() -> None:
    group = Group(2)
    x = group.send(1, 0, group.send(0, 1, _leaf(2, 2)))
    y = x.sum()
    for roots, options, error, text in (
        ((), {}, RuntimeError, "No tensors provided for gradient computation"),
        ((torch.rand(1),), {}, RuntimeError, "requires_grad not set on root"),
        ((x,), {}, RuntimeError, "is not a scalar, all roots need to be scalar"),
        ((_leaf(1),), {}, RuntimeError, "does not have a valid gradient function"),
        ((y, "y"), {}, TypeError, "incompatible function arguments"),
        ((torch.complex(y, y),), {}, RuntimeError, "real scalar outputs"),
        ((x,), {"gradients": torch.ones(3, 2)}, RuntimeError, "Mismatch in shape"),
        ((x,), {"gradients": torch.ones(2, 2, dtype=torch.complex64)}, RuntimeError, "complex"),
        ((x,), {"gradients": "ones"}, TypeError, "gradient must be"),
        ((x,), {"gradients": [3.0]}, TypeError, r"gradient\[0\] must be"),
        ((x, y), {"gradients": [torch.ones(2, 2)]}, ValueError, "one entry for each of the 2 roots"),
        ((y,), {"mode": "clever"}, ValueError, "mode"),
        ((y,), {"accumulate": "here"}, ValueError, "accumulate"),
    ):
        with pytest.raises(error, match=text):
            group.backward(*roots, **options)  # type: ignore[arg-type]
    part = group.worker(0).participant
    with pytest.raises(TypeError, match="incompatible function arguments"):
        part.begin(group.context, y)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 3"):
        part.begin(3, [y])
    with pytest.raises(TypeError):
        part.begin("3", [y])  # type: ignore[arg-type]
    assert not group.network.counts
    assert not group.known(0).passes


def test_a_message_that_nobody_sent() -> None:
    group = Group(2)
    part = group.worker(1).participant
    with pytest.raises(RpcError, match="Could not find send function: message 7 was not sent from here"):
        part.handle(group.worker(0).me, Discover(group.context, [7]))
    run = Run(group.context, 9, [Stratum({7: ()})], False, False, "context", 0.0, [])
    with pytest.raises(RpcError, match="Could not find send function"):
        part.handle(group.worker(0).me, run)
    with pytest.raises(RpcError, match="Could not find autograd context with id: 8"):
        part.handle(group.worker(0).me, Discover(8, [7]))


# -- early, late, twice ----------------------------------------------------------------------------------------------


def _part(group: Group, rank: int, *edges: int) -> tuple[LocalPass, list[int]]:
    context = group.known(rank)
    part = LocalPass(context, 77, group.worker(0).me)
    return part, sorted(context.sends)


def test_gradients_may_come_before_the_plan_and_twice() -> None:
    group = Group(2)
    a = _leaf()
    x = group.send(1, 0, a * 2, a * 3)
    del x
    part, (message,) = _part(group, 1)
    one = torch.ones(3, dtype=torch.float64)
    origin = group.worker(0).me
    part.arrive(origin, 5, message, [one, None])
    assert part.take() is None
    part.begin(
        Terms(False, False, "context", 0.0),
        [Stratum({message: (Contribution(origin, 5), Contribution(origin, 6))})],
    )
    assert part.take() is None
    part.arrive(origin, 5, message, [one * 100, one * 100])  # it has come already
    part.arrive(origin, 9, message, [one, one])  # nobody waits for it
    assert part.take() is None
    part.arrive(origin, 6, message, [one, one])
    assert part.take() == 0
    assert part.take() is None  # a thread is busy with it
    assert part.work(0) == []
    part.put(0, True)
    part.arrive(origin, 6, message, [one, one])
    assert part.finished  # no leaf is left to be finished
    assert part.take() is None
    assert not part.context.gradients
    part.commit()
    assert torch.equal(part.context.gradients[id(a)][1], one * 7)


def test_what_comes_late_of_a_pass_that_is_over_is_ignored() -> None:
    group = Group(2)
    a = _leaf()
    x = group.send(1, 0, group.send(0, 1, a) * 2)
    (message,) = group.known(1).sends
    worker, origin = group.worker(1).participant, group.worker(0).me
    gradient = Gradient(group.context, 99, message, 1, [torch.ones(3, dtype=torch.float64)])
    worker.hear(origin, Verdict(group.context, 99, False))
    assert worker.handle(origin, gradient) is None
    with pytest.raises(RpcError, match="given up before worker worker1 began it"):
        worker.handle(origin, Run(group.context, 99, [], False, False, "context", 0.0, []))
    assert not group.known(1).passes
    worker.hear(origin, Verdict(5, 99, True))  # of a context that is not known
    late = Gradient(group.worker(1).participant.contexts.create().id, 99, message, 1, gradient.gradients)
    worker.contexts.release(late.context)
    assert worker.handle(origin, late) is None  # it is posted: there is nobody to tell but the log
    group.backward(x.sum())
    assert group.gradients(0).keys() == {a}


def test_a_gradient_of_the_wrong_size() -> None:
    group = Group(2)
    x = group.send(1, 0, group.send(0, 1, _leaf()) * 2)
    (message,) = group.known(1).sends
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
    with pytest.raises(RpcError, match="has 1 gradients, but 2 came"):
        group.worker(1).participant.handle(origin, run)
    del x


# -- ends ------------------------------------------------------------------------------------------------------------


def test_a_context_that_is_released_in_a_pass() -> None:
    group = Group(3)
    loss = group.send(2, 0, group.send(1, 2, group.send(0, 1, _leaf()) * 2) * 2).sum()
    future = group.start(loss)
    for _ in range(5):
        group.network.step()
    group.worker(0).participant.release(group.context)
    assert future.done()
    with pytest.raises(RpcError, match="was released while a backward pass was under way"):
        future.value()
    group.network.settle()
    assert [len(worker.contexts.live) for worker in group.network.workers.values()] == [0, 0, 0]
    group.worker(0).participant.release(group.context)
    with pytest.raises(RpcError, match="it has been released"):
        group.start(loss)


def test_a_worker_that_stays_silent_is_named() -> None:
    group = Group(3)
    y = group.send(1, 0, group.send(0, 1, _leaf()) * 2) + group.send(2, 0, group.send(0, 2, _leaf()) * 2)
    worker = group.worker(2)
    worker.participant.handle = lambda sender, message: Future()  # type: ignore[method-assign]
    with pytest.raises(
        RpcTimeoutError, match=r"not over within 1000 s: no answer from worker2\. No gradients"
    ) as caught:
        group.backward(y.sum())
    assert caught.value.worker == "worker2"
    assert not group.known(0).passes
    assert not group.known(1).passes


def test_a_worker_that_dies_is_named() -> None:
    group = Group(3)
    y = group.send(1, 0, group.send(0, 1, _leaf()) * 2) + group.send(2, 0, group.send(0, 2, _leaf()) * 2)
    future = group.start(y.sum())
    while not group.known(2).passes:
        group.network.step()
    group.network.kill(group.worker(2).me)
    group.network.settle()
    with pytest.raises(PeerDiedError, match="worker2"):
        future.value()
    assert group.gradients(0) == {}
    assert not group.known(1).passes
    assert group.worker(2).me not in group.known(0).peers


def test_a_pass_that_began_elsewhere_ends_with_its_origin() -> None:
    group = Group(3)
    a = _leaf()
    root = group.send(0, 1, a * 2).sum()  # worker 1 is where the pass begins, worker 0 where the context does
    future = group.start(root, rank=1, timeout=0.0)
    while not group.known(0).passes:
        group.network.step()
    group.network.kill(group.worker(1).me)
    group.network.settle()
    assert not group.known(0).passes
    assert group.gradients(0) == {}
    future.acknowledge()


def test_contexts_of_a_worker_that_died_go_and_those_of_its_next_life_stay() -> None:
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


def test_contexts_that_nobody_uses_expire_where_they_were_not_made() -> None:
    group = Group(2)
    for rank in range(2):
        group.known(rank).touched -= 100
    for rank in range(2):
        group.worker(rank).participant.expire(1000)
    assert [len(group.worker(rank).contexts.live) for rank in range(2)] == [1, 1]
    for rank in range(2):
        group.worker(rank).participant.expire(50)
    assert [len(group.worker(rank).contexts.live) for rank in range(2)] == [1, 0]
    assert not group.network.mails


def test_ctrl_c_gives_a_pass_up() -> None:
    group = Group(2)
    a = _leaf()
    loss = group.send(1, 0, group.send(0, 1, a) * 2).sum()
    origin = group.worker(0)

    class Interrupted(Future[Any]):
        def exception(
            self, timeout: float | None = None
        ) -> BaseException | None:  # the origin is about to wait
            group.network.settle()
            raise KeyboardInterrupt

    asked: list[Future[Any]] = []

    def ask(to: WorkerKey, message: Message, timeout: float) -> Future[Any]:
        future: Future[Any] = Future() if isinstance(message, Discover) else Interrupted()
        group.network.ask(origin, to, message, timeout, future)
        asked.append(future)
        if isinstance(message, Discover):
            group.network.settle()
        return future

    origin.ask = ask  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        origin.participant.backward(group.context, [loss], retain_graph=True)
    group.network.settle()
    assert not group.known(0).passes
    assert not group.known(1).passes
    assert group.gradients(0) == {}
    del origin.ask
    group.backward(loss)
    assert group.gradients(0).keys() == {a}


# -- waiting for the verdict -----------------------------------------------------------------------------------------


def test_gradients_wait_for_the_verdict_of_a_pass_that_is_done_here() -> None:
    group = Group(2)
    w = _leaf()
    loss = group.send(1, 0, group.send(0, 1, _leaf()) * w).sum()
    future = group.start(loss)
    group.network.settle(future.done)
    part = group.worker(1).participant
    assert [mail.type for mail in group.network.mails] == ["Verdict"]
    with pytest.raises(RpcTimeoutError, match=r"worker 0, where it began, has not said within 0\.01 s"):
        part.gradients(group.context, 0.01)
    found: list[dict[int, tuple[Tensor, Tensor]]] = []
    thread = threading.Thread(target=lambda: found.append(part.gradients(group.context, 30.0)))
    thread.start()
    group.network.settle()
    thread.join()
    assert found[0].keys() == {id(w)}
    assert found[0] is not group.known(1).gradients
    assert found[0] == group.known(1).gradients


# -- user code in passes ---------------------------------------------------------------------------------------------


def test_a_hook_may_run_a_pass_of_its_own_even_in_the_same_context() -> None:
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


def test_hooks_of_a_leaf_see_the_sum_of_all_strata_once() -> None:
    group = Group(2)
    w, a = _leaf(), _leaf()
    seen: list[Tensor] = []
    w.register_hook(seen.append)
    x = a
    for _ in range(4):
        x = group.send(1, 0, group.send(0, 1, x) * w)
    group.backward(x.sum())
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], (4 * a * w**3).detach())


@pytest.mark.parametrize("how", ["alone", "with more", "twice", "two", "two strata"])
def test_hooks_of_a_leaf_that_is_sent_itself_run_once_on_the_whole_gradient(how: str) -> None:
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


# -- threads ---------------------------------------------------------------------------------------------------------


class Threads(Network):
    """The same network, but every message is handled on a thread of a pool, at once."""

    def __init__(self, seed: int, workers: int) -> None:
        super().__init__(seed, workers)
        self.pool = ThreadPoolExecutor(8)
        # Guards the mails: one thread puts its own into a list that another one takes away, and it would be lost.
        self.lock = threading.RLock()

    def _submit(self, put: Callable[..., None], given: tuple[Any, ...]) -> None:
        with self.lock:
            put(*given)
            mails, self.mails = self.mails, []
        for mail in mails:
            self.pool.submit(mail.arrive)

    def ask(self, *given: Any) -> None:
        self._submit(super().ask, given)

    def post(self, *given: Any) -> None:
        self._submit(super().post, given)

    def tell(self, *given: Any) -> None:
        self._submit(super().tell, given)

    def reply(self, *given: Any) -> None:
        self._submit(super().reply, given)


def test_passes_on_many_threads() -> None:
    wrong: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            program = generate(seed, workers=3, steps=20)
            world = World(program, network)
            part = world.origin.participant
            part.backward(world.context, world.roots, timeout=30.0)
            found = {}
            for name, (leaf, tensor) in world.leaves.items():
                gradients = network.worker(leaf.worker).participant.gradients(world.context, 30.0)
                if id(tensor) in gradients:
                    found[name] = gradients[id(tensor)][1]
            compare(program, found, expected(program))
            part.release(world.context)
        except BaseException as error:
            wrong.append(error)

    network = Threads(0, 3)
    with network.pool:
        with ThreadPoolExecutor(4) as users:
            list(users.map(run, range(60)))
        until = time.monotonic() + 30
        while (
            any(len(worker.contexts.live) for worker in network.workers.values()) and time.monotonic() < until
        ):
            network.pool.submit(int).result()  # notices are still on their way
    assert not wrong, wrong[:3]
    assert not any(len(worker.contexts.live) for worker in network.workers.values())
    assert not graph._taken
