"""The plan of a pass: the order of messages in strata, for random graphs of messages."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorrpc.autograd.messages import Contribution, Sink
from actorrpc.autograd.planner import ROOTS, Send, make_plan
from actorrpc.errors import RpcError
from actorrpc.wire.identity import WorkerKey

WORKERS = [WorkerKey(rank, f"life{rank}") for rank in range(4)]
A, B, C, D = WORKERS

Answers = dict[Send, list[Sink]]


@st.composite
def answers(draw: st.DrawFn) -> Answers:
    """Draw a possible result of discovery, restricted to messages that can be reached from the roots.

    Messages are numbered in the order of the forward pass, each is opened several times, and later messages lead to earlier ones.
    """
    count = draw(st.integers(0, 12))
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    sends = [(rng.choice(WORKERS), number) for number in range(1, count + 1)]
    receipts: dict[WorkerKey, list[Sink]] = {worker: [] for worker in WORKERS}
    found: Answers = {}
    for number, (worker, message) in enumerate(sends):
        # A message may depend on any message that was opened before on the same worker.
        opened = receipts[worker]
        found[worker, message] = rng.sample(opened, rng.randint(0, len(opened)))
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            receipts[rng.choice(WORKERS)].append(Sink(worker, message, 100 * number + rng.randrange(100)))
    found[A, ROOTS] = list(receipts[A])
    reached: Answers = {}
    left: list[Send] = [(A, ROOTS)]
    while left:
        send = left.pop()
        if send not in reached:
            reached[send] = found[send]
            left += [(sink.worker, sink.message) for sink in found[send]]
    return reached


def _edges(given: Answers) -> set[tuple[Send, Send, Contribution]]:
    return {
        (send, (sink.worker, sink.message), Contribution(send[0], sink.receipt))
        for send, sinks in given.items()
        for sink in sinks
    }


@given(answers())
def test_every_message_is_in_one_stratum_and_waits_for_all_its_gradients(given: Answers) -> None:
    plan = make_plan(A, given)
    places = [
        ((worker, message), contributions)
        for worker, strata in plan.items()
        for stratum in strata
        for message, contributions in stratum.messages.items()
    ]
    assert sorted(send for send, _ in places) == sorted(given)
    for send, contributions in places:
        assert len(set(contributions)) == len(contributions)
        assert list(contributions) == sorted(contributions)
        wanted = {each for _, to, each in _edges(given) if to == send}
        assert set(contributions) == (wanted or {Contribution(A, 0)})


@given(answers())
def test_workers_that_run_their_strata_in_order_never_deadlock(given: Answers) -> None:
    """Simulate it: each worker runs its strata in order, and sends the gradient of a receipt after its last stratum."""
    plan = make_plan(A, given)
    received: set[tuple[Send, Contribution]] = {((A, ROOTS), Contribution(A, 0))}
    at = dict.fromkeys(plan, 0)
    moved = True
    while moved:
        moved = False
        for worker, strata in plan.items():
            while at[worker] < len(strata):
                waits = {
                    ((worker, message), each)
                    for message, contributions in strata[at[worker]].messages.items()
                    for each in contributions
                }
                if not waits <= received:
                    break
                at[worker] += 1
                moved = True
                later = {
                    (worker, message) for stratum in strata[at[worker] :] for message in stratum.messages
                }
                done = {(worker, message) for message in strata[at[worker] - 1].messages}
                for send, to, each in _edges(given):
                    if send in done and not any(s in later and e == each for s, _, e in _edges(given)):
                        received.add((to, each))
    assert all(at[worker] == len(strata) for worker, strata in plan.items())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({(A, ROOTS): [Sink(B, 1, 1)]}, "message 1 of worker 1, about which no worker was asked"),
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
def test_contradictory_answers_raise_an_error(given: Answers, text: str) -> None:
    with pytest.raises(RpcError, match=text):
        make_plan(A, given)
