"""Numbers that have been taken up: each once, however many threads ask."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from actorrpc.agent.peers import NUMBERS_KEPT, DuplicateFilter


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_each_number_is_taken_up_once() -> None:
    begun = DuplicateFilter()
    for number in range(3 * NUMBERS_KEPT):
        assert begun.first(number)
        assert not begun.first(number)
        assert number in begun
        assert not begun.first(max(0, number - NUMBERS_KEPT + 1))
    assert 0 not in begun  # long ago


class _Switching(dict[int, object]):
    """Lets another thread in wherever a number is put in."""

    def __init__(self, then: threading.Event, go_on: threading.Event) -> None:
        self._then, self._go_on = then, go_on

    def setdefault(self, key: int, mark: object = None) -> object:  # type: ignore[override]
        found = super().setdefault(key, mark)
        if key == -1:
            self._then.set()
            assert self._go_on.wait(10)
        return found


def test_one_that_is_put_in_while_the_halves_move_is_no_repeat() -> None:
    put_in, moved = threading.Event(), threading.Event()
    begun = DuplicateFilter()
    begun._younger = _Switching(put_in, moved)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(begun.first(-1)))
    thread.start()
    assert put_in.wait(10)
    for number in range(NUMBERS_KEPT):
        assert begun.first(number)
    assert isinstance(begun._older, _Switching)
    moved.set()
    thread.join()
    assert found == [True]
    assert not begun.first(-1)


@pytest.mark.usefixtures("hasty")
def test_threads_that_take_up_different_ones_do_not_hinder_each_other() -> None:
    begun = DuplicateFilter()
    refused: list[int] = []

    def take(first: int) -> None:
        refused.extend(number for number in range(first, 10 * NUMBERS_KEPT, 4) if not begun.first(number))

    threads = [threading.Thread(target=take, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not refused
