"""The recorder of messages, with two agents in this process."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from actorrpc.agent.agent import Agent
from actorrpc.autograd import recorder as recorder_module
from actorrpc.autograd.contexts import Context, Contexts
from actorrpc.autograd.recorder import GraphRecorder, current_context
from actorrpc.errors import ProtocolError
from actorrpc.futures import Future
from actorrpc.rpc.functions import async_execution
from actorrpc.wire.identity import WorkerKey
from tests.agent.agents import agents
from tests.announced import OUTSIDE_OF_A_CONTEXT


class Pair:
    """A caller and a callee, with their contexts and recorders."""

    def __init__(self, caller: Agent, callee: Agent) -> None:
        self.caller, self.callee = caller, callee
        self.peer = caller.peer("a1")
        self.here, self.there = (
            Contexts(WorkerKey(each.record.rank, each.record.incarnation)) for each in (caller, callee)
        )
        self.caller.recorder = GraphRecorder(self.here)
        self.callee.recorder = GraphRecorder(self.there)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.caller.call_sync(self.peer, function, args, {}, 30)

    @contextlib.contextmanager
    def context(self) -> Iterator[Context]:
        made = self.here.create()
        token = recorder_module.enter(made.id)
        try:
            yield made
        finally:
            recorder_module.restore(token)
            self.here.release(made.id)
            self.there.release(made.id)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with agents(2) as (caller, callee):
        yield Pair(caller, callee)


seen: list[Any] = []


def record(*tensors: torch.Tensor) -> int | None:
    seen[:] = tensors
    return current_context()


def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def overlapping(order: list[int]) -> list[torch.Tensor]:
    y = torch.arange(6.0, requires_grad=True) * 1
    parts = [y, y[1:], y.view(2, 3)[:, 1], y[:2]]
    return [parts[number] for number in order]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)], ids=str)
def test_an_in_place_change_of_a_result_invalidates_overlapping_results(
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


def test_an_in_place_change_of_a_result_keeps_disjoint_results_valid(pair: Pair) -> None:
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


def test_a_call_without_gradients_sends_only_the_context(pair: Pair) -> None:
    with pair.context() as mine:
        assert pair.call(record, torch.ones(2)) == mine.id
        assert pair.call(record) == mine.id
        assert pair.call(double, torch.ones(2)).grad_fn is None
        for context in (mine, pair.there.get(mine.id)):
            assert not context.sends
            assert not context.receipts
        assert mine.peers == {pair.there.me}


def test_under_no_grad_results_are_recorded_but_not_arguments(pair: Pair) -> None:
    w = torch.ones(2, requires_grad=True)
    with pair.context() as mine:
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                assert pair.call(record, w) == mine.id
                assert seen[0].is_leaf
                # The result has its history at the callee.
                result = pair.call(parameter_there)
            assert result.grad_fn in mine.receipts
            assert not result.is_inference()
            assert (result * 2).requires_grad
        assert not mine.sends


@pytest.mark.prints(OUTSIDE_OF_A_CONTEXT)
def test_sending_a_tensor_with_history_outside_of_a_context_warns_once(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    w = torch.ones(2, requires_grad=True)
    with caplog.at_level(logging.WARNING, "actorrpc.autograd"):
        assert pair.call(record, w) is None  # a leaf arrives as a leaf
        assert not caplog.records
        assert seen[0].is_leaf
        assert seen[0].requires_grad
        for _ in range(3):
            pair.call(record, w * 2)
        # The caller warns once; the callee has sent no tensor with a history.
        assert len(caplog.records) == 1
    assert "outside of a distributed autograd context" in caplog.text
    assert not pair.here.all()
    assert not pair.there.all()


pair_of_test: list[Pair] = []


waiting: list[Future[Any]] = []
asked = threading.Event()


@async_execution
def later(t: torch.Tensor) -> Future[Any]:
    future: Future[Any] = Future()
    waiting.append(future)
    seen[:] = [t * 3]
    asked.set()
    return future


def test_an_asynchronous_result_is_recorded_in_the_context_of_its_call(pair: Pair) -> None:
    asked.clear()
    w = torch.ones(2, requires_grad=True)
    with pair.context() as mine:
        future: Future[Any] = Future()
        pair.caller.call(pair.peer, later, (w,), {}, 30, future=future)
        pair.caller.flush()
        asked.wait()
        other = pair.there.create()
        token = recorder_module.enter(other.id)  # the completing thread is in another context
        try:
            waiting.pop().set_result(seen[0])
        finally:
            recorder_module.restore(token)
        result = future.wait()
        assert result.grad_fn in mine.receipts
        assert not other.sends
        pair.there.release(other.id)


def test_a_message_of_a_released_context_is_not_recorded(pair: Pair) -> None:
    w = torch.ones(2, requires_grad=True)
    with pair.context() as mine:
        pair.there.release(mine.id)
        assert pair.call(record, w * 2) == mine.id
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
        recorder_module.restore(token)
        contexts.release(other.id)


def test_the_innermost_context_block_is_current(pair: Pair) -> None:
    pair_of_test[:] = [pair]
    with pair.context() as mine:
        assert pair.call(in_block_of_its_own, torch.ones(1)) is True
        assert current_context() == mine.id
    assert current_context() is None


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
def test_malformed_tags_raise_protocol_error(tag: Any) -> None:
    recorder = GraphRecorder(Contexts(WorkerKey(0, "x")))
    with pytest.raises(ProtocolError, match="cannot be read"):
        recorder.received(tag, [torch.ones(1)], None)
