"""The pool: somebody always listens, work is never forgotten, small pools refuse instead of hanging."""

from __future__ import annotations

import ctypes
import os
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from actorrpc.agent import threads
from actorrpc.agent.threads import Pool, follow_torch
from actorrpc.agent.timers import Clock
from actorrpc.futures import Future


class _House:
    """A pool whose calls are plain functions in a tuple."""

    def __init__(self, max_threads: int) -> None:
        self.clock = Clock()
        self.refused: list[Any] = []
        self.pool = Pool(
            clock=self.clock,
            execute=lambda task: task[0](),
            refuse=lambda task, why: self.refused.append((task[1], why)),
            max_threads=max_threads,
            starvation_s=0.004,
        )
        self.clock.start()
        self.pool.start(2)

    def call(self, function: Callable[[], Any], name: object = None) -> None:
        self.pool.queue.append((function, name))
        self.pool.wake()

    def close(self) -> None:
        assert self.pool.close() == []
        self.clock.close()


@pytest.fixture
def build() -> Iterator[Callable[[int], _House]]:
    made: list[_House] = []

    def make(max_threads: int) -> _House:
        made.append(_House(max_threads))
        return made[-1]

    yield make
    for house in made:
        house.close()


def _until(condition: Callable[[], Any]) -> None:
    pause = threading.Event()
    while not condition():
        pause.wait(0.002)


def test_every_task_runs_once(build: Callable[[int], _House]) -> None:
    house = build(8)
    ran: list[int] = []
    done = threading.Semaphore(0)

    def work(number: int) -> None:
        for i in range(300):
            task = lambda key=number * 1000 + i: (ran.append(key), done.release())  # noqa: E731
            house.call(task) if i % 2 else house.pool.submit(task)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    for _ in range(1800):
        done.acquire()
    assert sorted(ran) == sorted(number * 1000 + i for number in range(6) for i in range(300))


def test_work_behind_blocked_work_is_done(build: Callable[[int], _House]) -> None:
    """Each task is put there at once and blocks where the pool does not see it; wake-ups may merge."""
    house = build(64)
    for _ in range(5):
        gate, entered = threading.Event(), threading.Semaphore(0)
        for _ in range(40):
            house.pool.queue.append((lambda e=entered, g=gate: (e.release(), g.wait()), None))
        house.pool.wake()
        for _ in range(40):
            entered.acquire()
        gate.set()


def _rush(house: _House) -> int:
    """Have four callers put 2000 short pieces of work there each; return how many threads ran at most."""
    pool, done = house.pool, threading.Semaphore(0)
    most = 0

    def work() -> None:
        nonlocal most
        most = max(most, len(pool.threads))
        sum(range(500))
        done.release()

    def caller() -> None:
        for _ in range(200):
            for _ in range(10):
                pool.queue.append((work, None))
            pool.wake()

    callers = [threading.Thread(target=caller) for _ in range(4)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    for _ in range(8000):
        done.acquire()
    return most


def test_a_rush_of_short_calls_brings_no_crowd(build: Callable[[int], _House]) -> None:
    for _ in range(3):  # where threads are not bounded, there are some hundred in nearly every rush
        assert _rush(build(512)) <= 3 * threads._WIDTH


def test_more_blocked_calls_than_the_width_all_run(build: Callable[[int], _House]) -> None:
    """Each waits for the last one: none may be left in the queue because others are there."""
    house = build(512)
    count = 5 * threads._WIDTH
    together = threading.Barrier(count)
    done = threading.Semaphore(0)

    def work() -> None:
        together.wait()
        done.release()

    for _ in range(2):
        for _ in range(count):
            house.call(work)
        for _ in range(count):
            done.acquire()

    # And in a chain, where each piece is put there by the one that waits for it.
    def deeper(depth: int) -> None:
        if depth:
            over = threading.Event()
            house.call(lambda: (deeper(depth - 1), over.set()))
            over.wait()

    deeper(count)


def test_somebody_listens_whatever_the_others_do(build: Callable[[int], _House]) -> None:
    for size in (2, 3, 8):
        house = build(size)
        read, write = os.pipe()
        heard = threading.Semaphore(0)

        def ready(fd: int = read, house: _House = house, heard: threading.Semaphore = heard) -> None:
            os.read(fd, 1)
            house.pool.epoll.modify(fd, select.EPOLLIN | select.EPOLLONESHOT)
            heard.release()

        house.pool.watch(read, ready)
        house.pool.epoll.register(read, select.EPOLLIN | select.EPOLLONESHOT)
        gate = threading.Event()
        for _ in range(size * 3):
            house.call(gate.wait)
        for _ in range(20):
            os.write(write, b"x")
            heard.acquire()
        gate.set()
        _until(lambda house=house: not house.pool.queue)
        house.pool.forget(read)
        os.close(read)
        os.close(write)


def test_internal_work_is_done_when_calls_hold_all_threads(build: Callable[[int], _House]) -> None:
    house = build(2)
    gate, entered = threading.Event(), threading.Event()
    house.call(lambda: (entered.set(), gate.wait()))
    entered.wait()
    house.call(gate.wait)
    for _ in range(3):
        done = threading.Event()
        house.pool.submit(done.set)
        done.wait()
    # Even if such work blocks itself.
    other, done = threading.Event(), threading.Event()
    house.pool.submit(other.wait)
    house.pool.submit(done.set)
    done.wait()
    assert not house.refused
    other.set()
    gate.set()


def test_calls_that_no_thread_can_take_are_refused(
    build: Callable[[int], _House], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_STUCK_S", 0.05)
    house = build(3)
    gate, entered = threading.Event(), threading.Semaphore(0)
    for _ in range(2):
        house.call(lambda: (entered.release(), gate.wait()))
    for _ in range(2):
        entered.acquire()
    for name in range(4):
        house.call(gate.wait, name)
    _until(lambda: len(house.refused) == 4)
    assert [name for name, _ in house.refused] == [0, 1, 2, 3]
    assert all("threads are blocked, and it may have no more" in why for _, why in house.refused)
    gate.set()
    done = threading.Event()
    house.call(done.set)
    done.wait()


@pytest.mark.prints("a task of the pool raised.*ZeroDivisionError")
def test_a_task_that_raises_ends_nothing(
    build: Callable[[int], _House], caplog: pytest.LogCaptureFixture
) -> None:
    house = build(3)
    for _ in range(10):
        house.call(lambda: 1 / 0)
        house.pool.submit(lambda: 1 / 0)
    done = threading.Event()
    house.call(done.set)
    done.wait()
    _until(lambda: caplog.text.count("a task of the pool raised") == 20)


def test_idle_threads_go_home(build: Callable[[int], _House]) -> None:
    house = build(100)
    gate, entered = threading.Event(), threading.Semaphore(0)
    for _ in range(50):
        house.call(lambda: (entered.release(), gate.wait()))
    for _ in range(50):
        entered.acquire()
    assert len(house.pool.threads) > 50
    gate.set()
    _until(lambda: len(house.pool.threads) <= threads._KEPT)
    done = threading.Event()
    house.call(done.set)
    done.wait()


def test_a_pool_starts_no_more_threads_than_it_may_have(build: Callable[[int], _House]) -> None:
    house = build(1)  # asks for two
    assert len(house.pool.threads) == 1


def test_close_names_the_threads_that_are_still_at_work() -> None:
    house = _House(4)
    gate, entered = threading.Event(), threading.Event()
    house.call(lambda: (entered.set(), gate.wait()))
    entered.wait()
    left = house.pool.close(0.05)
    assert len(left) == 1
    gate.set()
    left[0].join()
    assert house.pool.close() == []
    house.clock.close()
    with pytest.raises(ValueError):
        house.pool.epoll.fileno()


def _openmp() -> ctypes.CDLL | None:
    """Return the OpenMP library that torch uses in this process."""
    with open("/proc/self/maps") as maps:
        paths = {
            line.split(None, 5)[5].strip() for line in maps if "omp" in line and len(line.split(None, 5)) > 5
        }
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        if hasattr(library, "omp_get_max_threads"):
            return library
    return None


def test_torchs_number_of_threads_counts_on_new_threads() -> None:
    library = _openmp()
    if library is None:
        pytest.skip("this torch does not use OpenMP")
    before = torch.get_num_threads()
    wanted = before + 2
    found: list[int] = []

    def look(follow: bool) -> None:
        if follow:
            follow_torch()
        found.append(library.omp_get_max_threads())

    torch.set_num_threads(wanted)
    try:
        for follow in (False, True):
            thread = threading.Thread(target=look, args=(follow,))
            thread.start()
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert found[0] != wanted  # else this tests nothing
    assert found[1] == wanted


def test_callbacks_of_futures_are_called_whenever_the_pool_ends(build: Callable[[int], _House]) -> None:
    """Those that were queued, and those that come later: what follows from a call that is over is owed to somebody."""
    house = build(4)
    before, after, nested = (Future[int]() for _ in range(3))
    following = [each.then(lambda done: done.wait() + 1) for each in (before, after)]
    ran: list[str] = []
    after.add_done_callback(lambda _: nested.conclude(3, None, house.pool.submit))
    follows = nested.then(lambda done: done.wait() + 1)
    with house.pool._lock:  # no thread can end meanwhile
        house.pool.stopping = True
        before.conclude(1, None, house.pool.queue.append)
        house.pool.queue.append(lambda: ran.append("a task"))
    house.close()
    after.conclude(2, None, house.pool.submit)
    house.pool.submit(lambda: ran.append("another"))
    assert [each.wait() for each in (*following, follows)] == [2, 3, 4]
    assert ran == []
