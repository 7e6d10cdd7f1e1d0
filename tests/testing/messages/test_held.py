"""The waiting room, with a clock that stands still: who leaves when, and before whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actorrpc.testing import Fault, delay
from actorrpc.testing.messages.fault_filter import HeldMessage, WaitingRoom
from tests.agent.virtual_clock import VirtualClock


class Room:
    """A waiting room whose messages say that they have left."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.left: list[Any] = []
        self.emptied = 0
        self.room = WaitingRoom(self, self._empty)  # type: ignore[arg-type]

    def submit(self, task: Callable[[], Any]) -> None:
        task()

    def _empty(self) -> None:
        self.emptied += 1

    def held(self, name: Any, fault: Fault, *, in_line: bool = False) -> HeldMessage:
        return HeldMessage(
            fault,
            lambda: self.left.append(name),
            lambda: self.left.append((name, "discarded")),
            in_line=in_line,
        )

    def put(self, name: Any, seconds: float, fault: Fault | None = None, *, in_line: bool = False) -> None:
        self.room.put(self.held(name, fault or delay("call", seconds=1), in_line=in_line), seconds)


def test_each_leaves_at_its_time_and_equals_in_order() -> None:
    room = Room()
    for name, seconds in (("a", 2.0), ("b", 1.0), ("c", 2.0), ("d", 0.5)):
        room.put(name, seconds)
    room.clock.advance(0.4)
    assert room.left == []
    room.clock.advance(0.7)
    assert room.left == ["d", "b"]
    assert (room.emptied, room.room.empty) == (0, False)
    room.clock.advance(1.0)
    assert room.left == ["d", "b", "a", "c"]
    assert (room.emptied, room.room.empty) == (1, True)


def test_nobody_in_line_is_overtaken() -> None:
    room = Room()
    fault = delay("actor_call", seconds=2)
    assert room.room.line_held_by() is None
    room.put(1, 2.0, fault, in_line=True)
    room.put(2, 0.5, in_line=True)
    room.put("other", 0.5)
    ahead = room.room.line_held_by()
    assert ahead is not None
    room.room.put_behind(room.held(3, ahead, in_line=True))
    room.clock.advance(1.0)
    assert room.left == ["other"]
    room.clock.advance(1.0)
    assert room.left == ["other", 1, 2, 3]
    assert room.room.line_held_by() is None
    room.room.put_behind(room.held(4, fault, in_line=True))  # the line has gone meanwhile
    assert room.left[-1] == 4


def test_what_a_fault_holds_leaves_with_it() -> None:
    room = Room()
    one, two = delay("call", seconds=1), delay("call", seconds=1)
    room.put("a", 3.0, one)
    room.put("b", 1.0, two)
    room.put("c", 2.0, one)
    assert (one.held, two.held) == (2, 1)
    room.room.hasten(one)
    room.room.release()
    assert room.left == ["a", "c"]  # in the order in which they came
    assert (one.held, two.held) == (0, 1)
    room.room.hasten(None)
    room.room.release()
    assert room.left == ["a", "c", "b"]


def test_the_end_of_a_fault_does_not_break_the_line() -> None:
    room = Room()
    one, two = delay("actor_call", seconds=1), delay("actor_call", seconds=1)
    room.put(1, 5.0, one, in_line=True)
    room.put(2, 1.0, two, in_line=True)
    room.put("loose", 5.0, two)
    room.room.hasten(two)
    room.room.release()
    assert room.left == ["loose"]
    room.room.hasten(one)
    room.room.release()
    room.clock.advance(5.0)
    assert room.left == ["loose", 1, 2]


def test_what_is_given_up_is_given_back() -> None:
    room = Room()
    fault = delay("call", seconds=1)
    room.put("a", 1.0, fault)
    room.put("b", 1.0, fault, in_line=True)
    room.room.discard()
    assert sorted(room.left) == [("a", "discarded"), ("b", "discarded")]
    assert fault.held == 0
    room.clock.advance(2.0)
    assert len(room.left) == 2
    assert room.room.line_held_by() is None


@pytest.mark.prints("a message that was held up could not be sent.*ZeroDivisionError: on purpose$")
def test_one_that_fails_keeps_nobody_back(caplog: pytest.LogCaptureFixture) -> None:
    room = Room()

    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    room.room.put(HeldMessage(delay("call", seconds=1), fail, fail), 1.0)
    room.put("next", 1.0)
    room.clock.advance(1.0)
    assert room.left == ["next"]
    assert "could not be sent" in caplog.text
