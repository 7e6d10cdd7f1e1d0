"""The clock: timers run once, in order, and not before they are due; ticks repeat until their function returns False."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorrpc.agent.timers import Clock, Tick
from tests.agent.virtual_clock import VirtualClock


@pytest.fixture
def clock() -> Iterator[Clock]:
    made = Clock()
    made.start()
    yield made
    made.close()


# -- virtual time ------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=30),
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
)
def test_timers_run_in_order_when_due_unless_cancelled(
    timers: list[tuple[int, bool]], steps: list[int]
) -> None:
    clock = VirtualClock()
    ran: list[tuple[float, int]] = []
    for number, (due, cancelled) in enumerate(timers):
        timer = clock.at(float(due), lambda number=number: ran.append((clock.now(), number)))  # type: ignore[misc]
        if cancelled:
            timer.cancel()
    for step in steps:
        clock.advance(float(step))
    now = float(sum(steps))
    expected = sorted((due, number) for number, (due, gone) in enumerate(timers) if not gone and due <= now)
    assert ran == [(float(due), number) for due, number in expected]
    assert clock.now() == now


def test_a_tick_repeats_until_its_function_returns_false() -> None:
    clock = VirtualClock()
    looks: list[float] = []
    left = [True, True, False]

    def look() -> bool:
        looks.append(clock.now())
        return left[len(looks) - 1]

    tick = Tick(clock, 0.5, look)
    clock.advance(5.0)
    assert looks == []
    tick.wake()
    tick.wake()
    clock.advance(5.0)
    assert looks == [5.5, 6.0, 6.5]
    assert not tick.active
    left.append(False)
    tick.wake()
    clock.advance(1.0)
    assert looks[3:] == [10.5]


# -- the thread ----------------------------------------------------------------------------------------


@pytest.mark.prints("a timer raised.*ZeroDivisionError")
def test_an_error_in_a_timer_is_logged_and_later_timers_run(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    came = threading.Event()
    clock.after(0.0, lambda: 1 / 0)
    clock.after(0.01, came.set)
    came.wait()
    assert "a timer raised" in caplog.text
