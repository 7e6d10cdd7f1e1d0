"""Decisions of supervision groups, with a model of children and without I/O, and the restart policy: limits and delays."""

from __future__ import annotations

import itertools
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from actorrpc.actors.supervision.strategies import (
    JITTER,
    MAX_BACKOFF_S,
    STRATEGIES,
    RestartOrder,
    RestartPolicy,
    RestartStrategy,
    Strategy,
)
from tests.migration.rows import row


class Model:
    """A model of children that carry out orders one by one, with a log of everything."""

    def __init__(self, size: int, strategy: Strategy, limit: int = 3, backoff: float = 0.0) -> None:
        self.now = 0.0
        self.siblings = RestartStrategy(["up"] * size, strategy, RestartPolicy(limit, 60.0, backoff))
        self.lives = [True] * size  # whether each child has an incarnation
        self.done: list[str] = []
        self.todo: list[RestartOrder] = []
        self.waits: list[RestartOrder] = []

    def carry_out(self, orders: list[RestartOrder]) -> None:
        for order in orders:
            if order.what == "wait":
                self.waits.append(order)
            elif order.what in ("end", "make"):
                pending = [each for each in self.todo if each.child == order.child]
                if order.what == "end" and pending:  # the construction had not begun
                    assert [each.what for each in pending] == ["make"]
                    self.todo.remove(pending[0])
                    self.lives[order.child] = True
                assert self.lives[order.child] is (order.what == "end")
                self.todo.append(order)
                self.done.append(f"{order.what} {order.child}")
            else:
                self.done.append(order.what)

    def die(self, child: int) -> None:
        assert self.lives[child]
        self.lives[child] = False
        self.todo = [order for order in self.todo if order.child != child]  # no child is left to end
        self.done.append(f"died {child}")
        self.carry_out(self.siblings.died(child, self.now, f"death of {child}"))

    def obey(self, which: int = 0) -> None:
        order = self.todo.pop(which)
        if order.what == "end":
            if self.lives[order.child]:
                self.lives[order.child] = False
                self.carry_out(self.siblings.died(order.child, self.now, "ended"))
        else:
            self.lives[order.child] = True
            self.carry_out(self.siblings.made(order.child, self.now))

    def pass_time(self) -> None:
        order = self.waits.pop(0)
        self.now += order.seconds
        assert order.plan is not None
        self.carry_out(self.siblings.due(order.plan, self.now))

    def settle(self) -> list[str]:
        while self.todo or self.waits:
            if self.todo:
                self.obey()
            else:
                self.pass_time()
        return self.done


@given(st.integers(0, 1 << 32), st.sampled_from(STRATEGIES), st.integers(1, 5))
def test_after_random_deaths_all_children_are_up_or_the_group_has_failed(
    seed: int, strategy: Strategy, size: int
) -> None:
    """Children that left stay out; a failed group has no living children."""
    chance = random.Random(seed)
    model = Model(size, strategy, limit=chance.choice([0, 1, 3, 100]), backoff=chance.choice([0.0, 1.0]))
    left: set[int] = set()
    for _ in range(chance.randrange(40)):
        what = chance.randrange(6)
        living = [child for child in range(size) if model.lives[child] and child not in left]
        if what < 2 and living:
            model.die(chance.choice(living))
        elif what == 2 and living and chance.random() < 0.2:
            child = chance.choice(living)
            left.add(child)
            model.lives[child] = False
            model.todo = [order for order in model.todo if order.child != child]
            model.carry_out(model.siblings.departed(child, model.now))
        elif what == 3 and model.waits:
            model.pass_time()
        elif model.todo:
            model.obey(chance.randrange(len(model.todo)))
    model.settle()
    assert not model.siblings.busy
    states: tuple[Any, ...] = model.siblings.states
    for child in range(size):
        if child in left:
            assert states[child] == "departed"
        else:
            assert model.lives[child] is not model.siblings.failed
            assert states[child] == ("down" if model.siblings.failed else "up")
    assert model.done.count("failed") == int(model.siblings.failed)
    # Children start in order: within a plan, a child is made only after the children before it.
    if strategy != "one_for_one":
        lives = [True] * size
        for step in model.done:
            word, _, number = step.partition(" ")
            if word == "make":
                assert all(lives[each] or each in left for each in range(int(number)))
                lives[int(number)] = True
            elif word in ("end", "died"):
                lives[int(number)] = False


# -- the restart policy --------------------------------------------------------------------------------

_times = st.lists(st.floats(0, 30), min_size=1, max_size=40)


def _play(policy: RestartPolicy, lives: list[float]) -> list[tuple[float, float | None]]:
    """Simulate lives of given lengths; return the time of each death and the delay before the restart."""
    now, found = 0.0, []
    for life in lives:
        policy.note_alive(now)
        now += life
        wait = policy.next(now)
        found.append((now, wait))
        if wait is None:
            break
        now += wait
    return found


def test_the_first_restart_is_immediate_and_later_delays_double() -> None:
    policy = RestartPolicy(-1, None, 0.1)
    waits = [policy.next(0.0) for _ in range(12)]
    assert waits[:5] == [0.0, 0.1, 0.2, 0.4, 0.8]
    assert waits[-1] == MAX_BACKOFF_S
    assert policy.count == 12


def test_the_delay_is_not_reset_if_the_actor_never_came_to_life() -> None:
    policy = RestartPolicy(-1, None, 0.1)
    assert [policy.next(at) for at in (0.0, 100.0, 200.0)] == [0.0, 0.1, 0.2]


@given(_times, st.integers(1, 4), st.floats(0.5, 60))
@row("restarts: a count", "from-ray")
def test_restarts_within_any_window_never_exceed_the_limit(
    lives: list[float], limit: int, window: float
) -> None:
    policy = RestartPolicy(limit, window)
    found = _play(policy, lives)
    times = [at for at, wait in found if wait is not None]
    for first, last in zip(times, times[limit:], strict=False):
        assert last - first >= window - 1e-9
    if found[-1][1] is None:  # refused only if the window is full
        assert len([at for at in times if at > found[-1][0] - window]) == limit
        assert f"within {window:g} s" in policy.why_not()


@given(_times, st.floats(0.1, 5), st.lists(st.floats(0, 1), min_size=1))
def test_jitter_shortens_delays_by_at_most_half(
    lives: list[float], backoff: float, drawn: list[float]
) -> None:
    numbers = itertools.cycle(drawn)
    plain = _play(RestartPolicy(-1, None, backoff), lives)
    found = _play(RestartPolicy(-1, None, backoff, lambda: next(numbers)), lives)
    for (_, wait), (_, most) in zip(found[:2], plain[:2], strict=True):
        # Later lives may end at different times.
        assert wait is not None
        assert most is not None
        assert (1 - JITTER) * most <= wait <= most


def test_causes_lists_the_deaths_within_the_window() -> None:
    policy = RestartPolicy(2, 10.0)
    for at, why in [(0.0, "old"), (95.0, "first\nwith more lines"), (97.0, "x" * 500), (100.0, "last")]:
        policy.next(at, why)
    assert policy.causes() == ["first", "x" * 200, "last"]
    endless = RestartPolicy(-1)
    for number in range(100):
        endless.next(float(number), f"number {number}")
    assert endless.causes() == [f"number {number}" for number in range(90, 100)]
    assert RestartPolicy(3).causes() == []
