"""Changes: what becomes of the other workers, told in order to those who want to know.

A worker is ``alive``, ``suspect`` (silent, but not known to be dead), ``dead`` or ``left``; the last two are final.
Changes are noted by whoever finds out, on any thread, and told by one pool thread at a time: each once, in the order in
which they were noted, with no lock held. ``_lock`` guards the states, the queue and the listeners; it is a leaf.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from actorrpc.core.identity import WorkerInfo

if TYPE_CHECKING:
    from actorrpc.core.peer import Peer

__all__ = ["Changes", "Listener", "state_of"]

_log = logging.getLogger("actorrpc.members")

Listener = Callable[[WorkerInfo, str, str, str], None]
"""Called with the worker, its old state, its new state, and the reason in words."""

_FINAL: Final = ("dead", "left")


def state_of(peer: Peer) -> str:
    """Return "alive", "suspect", "dead" or "left"."""
    return "suspect" if peer.state == "alive" and peer.liveness.suspect else peer.state


class Changes:
    """Tells listeners of changes. Thread-safe.

    Args:
        submit: has something run on a pool thread.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], None]) -> None:
        self._submit = submit
        # Re-entrant: the collector may run a finaliser, which may remove a listener, on the thread that has it.
        self._lock = threading.RLock()
        self._listeners: dict[object, Listener] = {}
        self._untold: deque[tuple[WorkerInfo, str, str, str, list[object]]] = deque()
        self._telling = False

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` called for each change from now on; return what ends that. Idempotent, from any thread."""
        mark = object()
        with self._lock:
            self._listeners[mark] = listener

        def remove() -> None:
            with self._lock:
                self._listeners.pop(mark, None)

        return remove

    def note(self, peer: Peer, state: str, reason: str) -> bool:
        """Take note of a peer's state; say whether that is news. What comes after its end is not."""
        with self._lock:
            ended = peer.ending
            old = ended or ("suspect" if peer.liveness.suspect else "alive")
            if ended or state == old:
                return False
            peer.liveness.suspect = state == "suspect"
            if state in _FINAL:
                peer.ending = state
            if self._listeners and not peer.record.is_visitor:
                self._untold.append((peer.info, old, state, reason, list(self._listeners)))
            start = bool(self._untold) and not self._telling
            self._telling = self._telling or start
        _log.info("%r is %s, was %s: %s", peer.name, state, old, reason)
        if start:
            self._submit(self._tell)
        return True

    def _tell(self) -> None:
        while True:
            with self._lock:
                if not self._untold:
                    self._telling = False
                    return
                worker, old, new, reason, marks = self._untold.popleft()
            for mark in marks:
                listener = self._listeners.get(mark)
                if listener is None:
                    continue
                try:
                    listener(worker, old, new, reason)
                except Exception:
                    _log.exception("a listener for changes of members raised")
