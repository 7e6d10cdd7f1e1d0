"""The clock: what is due runs once, in order, and not before; ticks run while there is anything to look after."""

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
def test_timers_run_in_order_and_on_time(timers: list[tuple[int, bool]], steps: list[int]) -> None:
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


def test_a_timer_may_start_another_one() -> None:
    clock = VirtualClock()
    times: list[float] = []

    def again() -> None:
        times.append(clock.now())
        if len(times) < 4:
            clock.after(1.5, again)

    clock.after(1.0, again)
    clock.advance(3.0)
    assert times == [1.0, 2.5]
    clock.advance(100.0)
    assert times == [1.0, 2.5, 4.0, 5.5]


def test_a_tick_runs_while_there_is_something_to_look_after() -> None:
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


def test_a_wake_up_while_looking_is_not_lost() -> None:
    clock = VirtualClock()
    looks: list[float] = []

    def look() -> bool:
        looks.append(clock.now())
        if len(looks) == 1:
            tick.wake()  # something came up just now
        return False

    tick = Tick(clock, 1.0, look)
    tick.wake()
    clock.advance(10.0)
    assert looks == [1.0, 2.0]


# -- the thread ----------------------------------------------------------------------------------------


def test_an_earlier_timer_wakes_the_sleeper(clock: Clock) -> None:
    first, second = threading.Event(), threading.Event()
    order: list[str] = []
    clock.after(0.2, lambda: (order.append("late"), second.set()))
    clock.after(1000.0, lambda: order.append("never"))
    clock.after(0.0, lambda: (order.append("now"), first.set()))
    first.wait()
    second.wait()
    assert order == ["now", "late"]


def test_nudges_run_even_when_nothing_is_due(clock: Clock) -> None:
    for _ in range(20):
        came = threading.Event()
        clock.call_soon(came.set)
        came.wait()


@pytest.mark.prints("a timer raised.*ZeroDivisionError")
def test_an_error_in_a_timer_is_logged_and_the_next_one_runs(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    came = threading.Event()
    clock.after(0.0, lambda: 1 / 0)
    clock.after(0.01, came.set)
    came.wait()
    assert "a timer raised" in caplog.text


def test_many_threads_set_timers_and_every_one_runs_once(clock: Clock) -> None:
    ran: list[int] = []
    all_ran = threading.Semaphore(0)

    def work(number: int) -> None:
        for i in range(200):
            key = number * 1000 + i
            clock.after(0.0001 * (i % 7), lambda key=key: (ran.append(key), all_ran.release()))  # type: ignore[misc]
            if i % 3 == 0:
                clock.after(100.0, lambda: ran.append(-1)).cancel()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for _ in range(1200):
        all_ran.acquire()
    assert sorted(ran) == sorted(number * 1000 + i for number in range(6) for i in range(200))


def test_close_ends_the_thread_and_nothing_runs_after_it() -> None:
    before = set(threading.enumerate())
    clock = Clock()
    clock.start()
    ran: list[int] = []
    clock.after(1000.0, lambda: ran.append(1))
    clock.close()
    clock.close()
    assert {each for each in threading.enumerate() if each.name == "actorrpc-clock"} <= before
    assert ran == []


def test_it_may_be_closed_from_a_timer() -> None:
    clock = Clock()
    clock.start()
    closed = threading.Event()
    clock.after(0.0, lambda: (clock.close(), closed.set()))
    closed.wait()
    clock.close()
