"""What is recorded of messages: two agents in this process, each with a recorder of its own."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd.graph import GradientEdge

from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import CURRENT
from actorrpc.autograd import recorder as recorder_module
from actorrpc.autograd.contexts import Context, Contexts, Receipt
from actorrpc.autograd.graph import receive
from actorrpc.autograd.messages import Sink
from actorrpc.autograd.recorder import GraphRecorder, current_context
from actorrpc.errors import ProtocolError
from actorrpc.futures import Future
from actorrpc.rpc.functions import async_execution
from actorrpc.wire.identity import WorkerKey
from tests.agent.agents import agents
from tests.announced import OUTSIDE_OF_A_CONTEXT


class Pair:
    """A caller and a callee, and what they have recorded."""

    def __init__(self, caller: Agent, callee: Agent) -> None:
        self.caller, self.callee = caller, callee
        self.peer = caller.peer("a1")
        self.here, self.there = (
            Contexts(WorkerKey(each.record.rank, each.record.incarnation)) for each in (caller, callee)
        )
        self.caller.recorder = GraphRecorder(self.here)
        self.callee.recorder = GraphRecorder(self.there)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.caller.ask(self.peer, function, args, {}, 30)

    @contextlib.contextmanager
    def context(self) -> Iterator[Context]:
        made = self.here.create()
        token = recorder_module.enter(made.id)
        try:
            yield made
        finally:
            recorder_module.leave(token)
            self.here.release(made.id)
            self.there.release(made.id)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with agents(2) as (caller, callee):
        yield Pair(caller, callee)


def leads_to(edge: GradientEdge, tensor: torch.Tensor) -> bool:
    """Whether an edge is that of a tensor."""
    found = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node is found.node and edge.output_nr == found.output_nr


seen: list[Any] = []


def look(*tensors: torch.Tensor) -> int | None:
    seen[:] = tensors
    return current_context()


def test_arguments(pair: Pair) -> None:
    w, x = torch.ones(2, requires_grad=True), torch.zeros(2)
    y = w * 2
    with pair.context() as mine:
        assert pair.call(look, y, x, w, y) == mine.id
        theirs = pair.there.get(mine.id)
        assert mine.peers == {pair.there.me}
        assert not mine.receipts
        assert not theirs.sends  # nothing that came back requires grad
        ((message, edges),) = mine.sends.items()
        assert len(edges) == 2  # a tensor that is sent twice in one message is one tensor
        assert leads_to(edges[0], y)
        assert leads_to(edges[1], w)
        ((node, receipt),) = theirs.receipts.items()
        assert receipt == Receipt(Sink(pair.here.me, message, receipt.sink.receipt), 2)
        arrived_y, arrived_x, arrived_w, again = seen
        assert again is arrived_y
        assert arrived_y.grad_fn is node
        assert arrived_w.grad_fn is node
        assert (arrived_y.output_nr, arrived_w.output_nr) == (0, 1)
        assert not arrived_x.requires_grad
        assert not arrived_y._is_view()
        arrived_y.add_(1)  # may be changed in place


def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def test_results(pair: Pair) -> None:
    w = torch.ones(2, requires_grad=True)
    with pair.context() as mine:
        result = pair.call(double, w)
        theirs = pair.there.get(mine.id)
        ((message, edges),) = theirs.sends.items()
        (receipt,) = mine.receipts.values()
        assert receipt.sink.worker == pair.there.me
        assert receipt.sink.message == message
        assert result.grad_fn in mine.receipts
        assert edges[0].node.name() == "MulBackward0"
        with pytest.raises(RuntimeError, match=r"call\s+actorrpc\.autograd\.backward"):
            result.sum().backward()
    assert not pair.here.all()


def overlapping(order: list[int]) -> list[torch.Tensor]:
    y = torch.arange(6.0, requires_grad=True) * 1
    parts = [y, y[1:], y.view(2, 3)[:, 1], y[:2]]
    return [parts[number] for number in order]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_a_change_in_place_of_one_overlapping_result_is_seen_in_the_others(
    pair: Pair, order: tuple[int, ...]
) -> None:
    with pair.context():
        whole, *parts = (
            found
            for _, found in sorted(
                zip(order, pair.call(overlapping, list(order)), strict=True), key=lambda each: each[0]
            )
        )
        assert len({(each.grad_fn, each.output_nr) for each in (whole, *parts)}) == 4
        squares = [(each * each).sum() for each in parts]
        whole.mul_(2)
        for each, square in zip(parts, squares, strict=True):
            assert not each._is_view()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(square, each)


def halves() -> tuple[torch.Tensor, ...]:
    return (torch.arange(6.0, requires_grad=True) * 1).chunk(2)


def test_results_that_do_not_overlap_are_changed_in_place_each_by_itself(pair: Pair) -> None:
    with pair.context():
        left, right = pair.call(halves)
        assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        square = (left * left).sum()
        right.mul_(2)
        (gradient,) = torch.autograd.grad(square, left)
        assert gradient.tolist() == [0.0, 2.0, 4.0]


def parameter_there() -> torch.nn.Parameter:
    seen[:] = [torch.nn.Parameter(torch.ones(3))]
    return seen[0]


def test_only_the_result_requires_grad(pair: Pair) -> None:
    with pair.context() as mine:
        result = pair.call(parameter_there)
        assert not mine.sends
        (receipt,) = mine.receipts.values()
        (edge,) = pair.there.get(mine.id).sends[receipt.sink.message]
        assert leads_to(edge, seen[0])
        assert result.grad_fn is not None


def test_a_parameter_as_argument_is_recorded(pair: Pair) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    with pair.context() as mine:
        pair.call(look, p)
        ((edge,),) = mine.sends.values()
        assert leads_to(edge, p)
        assert seen[0].grad_fn in pair.there.get(mine.id).receipts


def test_nothing_but_the_context_where_nothing_requires_grad(pair: Pair) -> None:
    with pair.context() as mine:
        assert pair.call(look, torch.ones(2)) == mine.id
        assert pair.call(look) == mine.id
        assert pair.call(double, torch.ones(2)).grad_fn is None
        for context in (mine, pair.there.get(mine.id)):
            assert not context.sends
            assert not context.receipts
        assert mine.peers == {pair.there.me}


def test_no_grad_at_the_caller(pair: Pair) -> None:
    w = torch.ones(2, requires_grad=True)
    with pair.context() as mine:
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                assert pair.call(look, w) == mine.id
                assert seen[0].is_leaf
                # What comes back has its history where it was made.
                result = pair.call(parameter_there)
            assert result.grad_fn in mine.receipts
            assert not result.is_inference()
            assert (result * 2).requires_grad
        assert not mine.sends


@pytest.mark.prints(OUTSIDE_OF_A_CONTEXT)
def test_outside_of_a_context(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    w = torch.ones(2, requires_grad=True)
    with caplog.at_level(logging.WARNING, "actorrpc.autograd"):
        assert pair.call(look, w) is None  # a leaf is a leaf over there, too
        assert not caplog.records
        assert seen[0].is_leaf
        assert seen[0].requires_grad
        for _ in range(3):
            pair.call(look, w * 2)
        # This end, once; the other has sent nothing with a history.
        assert len(caplog.records) == 1
    assert "outside of a distributed autograd context" in caplog.text
    assert not pair.here.all()
    assert not pair.there.all()


def nested(peer_name: str, t: torch.Tensor) -> Any:
    agent = pair_of_test[0].callee
    return agent.ask(agent.peer(peer_name), double, (t,), {}, 30)


pair_of_test: list[Pair] = []


def test_nested_calls_are_in_the_context(pair: Pair) -> None:
    pair_of_test[:] = [pair]
    w = torch.ones(2, requires_grad=True)
    with pair.context() as mine:
        pair.call(nested, "a0", w)
        theirs = pair.there.get(mine.id)
        # Out, in again, back, back again.
        assert len(mine.sends) == 2
        assert len(mine.receipts) == 2
        assert len(theirs.sends) == 2
        assert len(theirs.receipts) == 2
        assert theirs.peers == {pair.here.me}
        assert mine.peers == {pair.there.me}
        pair.call(nested, "a1", w)  # to itself: recorded like any other
        assert theirs.peers == {pair.here.me, pair.there.me}


def test_a_call_to_oneself(pair: Pair) -> None:
    w = torch.ones(2, requires_grad=True)
    with pair.context() as mine:
        result = pair.caller.ask(pair.caller.self_peer, double, (w,), {}, 30)
        assert len(mine.sends) == len(mine.receipts) == 2
        assert result.grad_fn in mine.receipts


waiting: list[Future[Any]] = []
asked = threading.Event()


@async_execution
def later(t: torch.Tensor) -> Future[Any]:
    future: Future[Any] = Future()
    waiting.append(future)
    seen[:] = [t * 3]
    asked.set()
    return future


def test_an_answer_that_comes_later_is_in_its_own_context(pair: Pair) -> None:
    asked.clear()
    w = torch.ones(2, requires_grad=True)
    with pair.context() as mine:
        future: Future[Any] = Future()
        pair.caller.call(pair.peer, later, (w,), {}, 30, future=future)
        pair.caller.flush()
        asked.wait()
        other = pair.there.create()
        token = recorder_module.enter(other.id)  # the thread that completes it is in another one
        try:
            waiting.pop().set_result(seen[0])
        finally:
            recorder_module.leave(token)
        result = future.wait()
        assert result.grad_fn in mine.receipts
        assert not other.sends
        pair.there.release(other.id)


def test_a_late_message_finds_the_context_over(pair: Pair) -> None:
    w = torch.ones(2, requires_grad=True)
    with pair.context() as mine:
        pair.there.release(mine.id)
        assert pair.call(look, w * 2) == mine.id
        assert not seen[0].requires_grad
        assert seen[0].grad_fn is None
        assert pair.there.live.get(mine.id) is None


def in_block_of_its_own(t: torch.Tensor) -> Any:
    contexts = pair_of_test[0].there
    other = contexts.create()
    token = recorder_module.enter(other.id)
    try:
        return current_context() == other.id
    finally:
        recorder_module.leave(token)
        contexts.release(other.id)


def test_the_innermost_block_counts(pair: Pair) -> None:
    pair_of_test[:] = [pair]
    with pair.context() as mine:
        assert pair.call(in_block_of_its_own, torch.ones(1)) is True
        assert current_context() == mine.id
    assert current_context() is None


def test_a_block_is_not_that_of_another_call_on_the_same_thread(pair: Pair) -> None:
    with pair.context() as mine:
        assert current_context() == mine.id
        execution = type("Other", (), {"header": None})()
        token = CURRENT.set(execution)
        try:
            assert current_context() is None
            execution.header = {"tag": [12]}
            assert current_context() == 12
        finally:
            CURRENT.reset(token)


def test_kinds_of_tensors(pair: Pair) -> None:
    leaf = torch.randn(4, 4, requires_grad=True)
    sent = [
        (leaf * 2).t(),
        (leaf * 2).expand(3, 4, 4),
        (leaf * 1j).conj(),
        (leaf * 2).double()[1:3, ::2],
        torch.empty(0, 3, requires_grad=True) * 2,
        (torch.eye(4).to_sparse().requires_grad_() * 2),
    ]
    with pair.context() as mine:
        pair.call(look, *sent)
        ((_, edges),) = mine.sends.items()
        assert [leads_to(edge, each) for edge, each in zip(edges, sent, strict=True)] == [True] * len(sent)
        for n, (mine_, theirs) in enumerate(zip(sent, seen, strict=True)):
            assert theirs.output_nr == n
            assert theirs.dtype == mine_.dtype
            assert torch.equal(
                theirs.to_dense() if theirs.is_sparse else theirs,
                mine_.to_dense() if mine_.is_sparse else mine_,
            )


@pytest.mark.parametrize(
    "tag",
    [
        None,
        5,
        [],
        ["a"],
        [1, 2],
        [1, 2, [0, 0]],
        [1, 2, [1]],
        [1, 2, [-1]],
        [1, "2", [0]],
        [1, 2, [0], 3, 4],
        [1, 2, 0],
    ],
)
def test_a_tag_that_makes_no_sense(tag: Any) -> None:
    recorder = GraphRecorder(Contexts(WorkerKey(0, "x")))
    with pytest.raises(ProtocolError, match="cannot be read"):
        recorder.arrived(tag, [torch.ones(1)], None)


def test_what_is_kept_says_who_keeps_it() -> None:
    me = WorkerKey(2, "me")
    contexts = Contexts(me)
    recorder = GraphRecorder(contexts)
    context = contexts.create()
    w = torch.ones(2, requires_grad=True)
    assert recorder.sent([w.detach()], None, context.id) is None
    tag = recorder.sent([w.detach(), w * 2], None, context.id)
    other = Contexts(WorkerKey(4, "other"))
    for _ in range(2):  # it may be opened more than once
        opened = [torch.ones(2), torch.ones(2)]
        GraphRecorder(other).arrived(list(tag), opened, None)
        assert opened[1].grad_fn is not None
        assert not opened[0].requires_grad
    receipts = list(other.get(context.id).receipts.values())
    assert [each.sink[:2] for each in receipts] == [(me, next(iter(context.sends)))] * 2
    assert receipts[0].sink.receipt != receipts[1].sink.receipt


def test_receiving_gives_one_node_and_keeps_the_objects() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(3)
    node = receive([a, b])
    assert a.grad_fn is node
    assert b.grad_fn is node
    assert not a.is_leaf
