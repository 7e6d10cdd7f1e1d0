"""The recorder of messages, with two agents in this process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from actorrpc.agent.agent import Agent
from actorrpc.autograd import recorder as recorder_module
from actorrpc.autograd.contexts import Context, Contexts
from actorrpc.autograd.recorder import GraphRecorder, current_context, record_news
from actorrpc.errors import ProtocolError
from actorrpc.wire.identity import WorkerKey
from tests.agent.agents import agents
from tests.announced import OUTSIDE_OF_A_CONTEXT
from tests.tensors import is_view


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
            assert not is_view(each)
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


def test_a_message_of_a_released_context_is_not_recorded(pair: Pair) -> None:
    w = torch.ones(2, requires_grad=True)
    with pair.context() as mine:
        pair.there.release(mine.id)
        assert pair.call(record, w * 2) == mine.id
        assert not seen[0].requires_grad
        assert seen[0].grad_fn is None
        assert pair.there.live.get(mine.id) is None


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


@pytest.mark.parametrize(
    "news",
    [
        [1],
        [1, 2],
        ["a", []],
        [2 << 48 | 1, []],
        [1 << 48 | 1, [5]],
        [1 << 48 | 1, ["a", "b"]],
        [1, [], 5],
        {1: 2},
    ],
)
def test_malformed_reachability_information_raises_protocol_error(news: Any) -> None:
    context = Context(7)
    with pytest.raises(ProtocolError, match="cannot be read"):
        record_news(context, WorkerKey(0, "a"), WorkerKey(1, "b"), news)
    assert not context.sinks
