"""Messages that are held up: they wait here, and leave one after the other when their time has come."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from actorrpc.core.layout import Span

if TYPE_CHECKING:
    from actorrpc.core.agent import Agent
    from actorrpc.testing.faults import Fault

__all__ = ["Held", "WaitingRoom", "copied"]

_log = logging.getLogger("actorrpc.testing")


def copied(encoded: Any) -> Any:
    """Have a packed message keep copies of the memory that goes with it: who has made it may change that soon."""
    if not isinstance(encoded, bytes) and encoded.spans:
        encoded.spans = [Span.of(bytearray(span.view())) for span in encoded.spans]
        encoded.outgoing = None
    return encoded


class Held:
    """A message that waits.

    Args:
        fault: what holds it up.
        send: sends it; called on a pool thread, with no lock held.
        discard: gives back what is in it, where it will not be sent.
        in_line: no message that is in line may overtake another one.
    """

    __slots__ = ("discard", "fault", "in_line", "send")

    def __init__(
        self,
        fault: Fault,
        send: Callable[[], None],
        discard: Callable[[], None],
        *,
        in_line: bool = False,
    ) -> None:
        self.fault = fault
        self.send = send
        self.discard = discard
        self.in_line = in_line


class WaitingRoom:
    """What is held up on its way to one worker. Thread-safe.

    Args:
        emptied: called, with no lock held, when the last message has left.
    """

    def __init__(self, agent: Agent, emptied: Callable[[], None]) -> None:
        self._agent = agent
        self._emptied = emptied
        # Guards all below; a leaf.
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Held]] = []
        self._numbers = itertools.count()
        self._line = 0  # how many of those in line have not left
        self._last: tuple[float, Fault] | None = None  # of those in line: when it is due, and why
        self._busy = False  # somebody is sending what is due

    @property
    def empty(self) -> bool:
        """Whether nothing waits, and nothing is just leaving."""
        return not self._heap and not self._busy

    def put(self, held: Held, seconds: float) -> None:
        """Have a message wait for some time, and for those before it in line."""
        due = self._agent.clock.now() + seconds
        with self._lock:
            if held.in_line:
                if self._line and self._last is not None:
                    due = max(due, self._last[0])
                self._line += 1
                self._last = due, held.fault
            heapq.heappush(self._heap, (due, next(self._numbers), held))
        held.fault.hold(1)
        self._agent.clock.at(due, partial(self._agent.submit, self.release))

    def line_held_by(self) -> Fault | None:
        """Return the fault for which the line waits; None if nobody is in line."""
        with self._lock:
            return self._last[1] if self._line and self._last is not None else None

    def put_behind(self, held: Held) -> None:
        """Have a message wait for those before it in line, and no longer."""
        with self._lock:
            due = self._last[0] if self._line and self._last is not None else float("-inf")
            self._line += 1
            heapq.heappush(self._heap, (due, next(self._numbers), held))
        held.fault.hold(1)
        self._agent.submit(self.release)  # those before it may be gone by now

    def hasten(self, fault: Fault | None) -> None:
        """Let what a fault holds up (None: everything) leave now, in order."""
        with self._lock:
            heap: list[tuple[float, int, Held]] = []
            front = float("-inf")
            for due, number, held in sorted(self._heap, key=lambda each: each[1]):
                if fault is None or held.fault is fault:
                    due = float("-inf")
                if held.in_line:
                    front = due = max(due, front)
                heap.append((due, number, held))
            heapq.heapify(heap)
            self._heap = heap
            if self._last is not None:
                self._last = front, self._last[1]

    def release(self) -> None:
        """Send what is due, on this thread, unless another one does."""
        clock = self._agent.clock
        with self._lock:
            if self._busy:
                return
            self._busy = True
        sent: Held | None = None
        while True:
            with self._lock:
                if sent is not None and sent.in_line:
                    self._line -= 1
                if not self._heap or self._heap[0][0] > clock.now():
                    self._busy = False
                    empty = not self._heap
                    break
                sent = heapq.heappop(self._heap)[2]
            sent.fault.hold(-1)
            try:
                sent.send()
            except Exception:
                _log.exception("a message that was held up could not be sent")
        if empty and sent is not None:
            self._emptied()

    def discard(self) -> None:
        """Give up all that waits."""
        with self._lock:
            heap, self._heap = self._heap, []
            self._line = 0
        for _, _, held in heap:
            held.fault.hold(-1)
            held.discard()
