"""The restart policy: limits, delays and windows."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from actorrpc.actors.supervision.restart_policy import JITTER, MAX_BACKOFF_S, RestartPolicy

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
