"""Answering: what the thread that has executed a call does with its connection after that.

It sends the answer, and may find the next request before any other thread is woken for it: at once, where both ends
share a processor (the caller has run while the answer was being sent), or by spinning for a moment where they do not.
Which of the two pays is measured, for each connection.
"""

from __future__ import annotations

import itertools
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from actorrpc.core.frames import Frame
from actorrpc.core.interrupts import uninterruptible
from actorrpc.core.spin import Spin, spinner

if TYPE_CHECKING:
    from actorrpc.core.connection import Connection

__all__ = ["ARMED", "DISARMED", "Answering", "Guest"]

ARMED: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
DISARMED: Final = select.EPOLLONESHOT
_PAYS: Final = 0.15  # how often the next request must have been there at once


class Guest(Protocol):
    """A thread that attends a connection."""

    attends: Connection | None

    def called(self) -> bool:
        """Say, once, whether there is something else for it to do."""


class Answering:
    """The end of a call, for one connection. Any thread may use it; the measurements need no exactness."""

    __slots__ = ("_conn", "_hit", "_quick", "_replies", "_spin")

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._spin = Spin(off=2e-3)
        self._quick = 0.0
        self._hit = False
        self._replies = itertools.count()

    def reply(self) -> list[Frame] | None:
        """Send the answers in the outbox, and return what comes at once or soon after; ``None`` if nothing is read.

        Where both ends share a processor, the next request is here before ``send`` returns: then it is read here,
        instead of waking another thread for it. Where they do not, spinning may pay.
        """
        conn = self._conn
        if self._quick > _PAYS or not next(self._replies) & 15:
            frames = self._turn_around()
            if frames is None or self._hit or self._quick > _PAYS:
                return frames
        else:
            conn.flush(True)
        return None if conn.broken else self._linger()

    @uninterruptible
    def _read(self, read: Callable[[list[Frame]], None]) -> list[Frame] | None:
        """Have ``read(frames)`` read, with nobody else reading before or between; ``None``: somebody else reads."""
        conn = self._conn
        if conn.broken or conn.suspended or not conn.read_lock.acquire(False):
            return None
        frames: list[Frame] = []
        conn.expecting = False
        conn.arm(DISARMED)
        try:
            if conn.suspended:
                return None
            read(frames)
        except BaseException as error:
            conn.failed(error)
        finally:
            conn.read_lock.release()
        conn.arm(ARMED)
        return frames

    @uninterruptible
    def _turn_around(self) -> list[Frame] | None:
        """Send, and read without blocking, with nobody else reading between."""
        conn = self._conn
        self._hit = False
        before = conn.heard

        def read(frames: list[Frame]) -> None:
            conn.flush()
            conn.receive(frames)

        frames = self._read(read)
        if frames is None or conn.outbox or conn._rest:
            # What has come is others' answers as well: those do not wait until the other end reads.
            conn.flush(not frames)
        if frames is not None:
            # Time may stand still between two reads: what has come decides.
            hit = self._hit = bool(frames) or conn.heard != before
            self._quick += 0.03 * (hit - self._quick)
        return frames

    @uninterruptible
    def attend(self, guest: Guest) -> list[Frame] | None:
        """Send what is in the outbox, and wait for what comes over this connection; ``None``: somebody else reads it.

        For a thread that has nothing to do but to execute what its last caller sends next: it reads that itself,
        instead of being woken by another thread that has. Returns also when the guest is called, or the connection ends.
        """
        conn = self._conn

        def read(frames: list[Frame]) -> None:
            if conn.outbox:
                conn.flush()
            # Whoever calls the guest either sees where it is and wakes it, or is seen here.
            guest.attends = conn
            try:
                if not guest.called():
                    self._wait(frames)
            finally:
                guest.attends = None

        frames = self._read(read)
        if frames is not None and (conn.outbox or conn._rest):
            conn.flush(not frames)  # as in _turn_around
        return frames

    def _wait(self, frames: list[Frame]) -> None:
        conn, spin = self._conn, self._spin
        if conn.settings.spin_us and self._quick < _PAYS and spin.choose() and spinner.acquire():
            try:
                tries = conn.spin_for(frames)
            finally:
                spinner.release()
            self._note(tries)
            if tries:
                return
        self._quick += 0.03 * (conn.sleep(frames) - self._quick)

    def _note(self, tries: int) -> None:
        """Take note of what spinning has brought. What was there already says nothing about it."""
        if tries == 1:
            self._quick += 0.03 * (1 - self._quick)
        else:
            # Compared with sleeping, which is noted as a long wait: a hit counts for spinning, a miss against it.
            self._spin.note(True, 0.0 if tries else 2.0)

    @uninterruptible
    def _linger(self) -> list[Frame] | None:
        """Spin for the next frames after having answered, if that has paid here; ``None`` if nothing came."""
        conn = self._conn
        if not conn.settings.spin_us or not self._spin.choose() or not spinner.acquire():
            return None
        tries = 0

        def read(frames: list[Frame]) -> None:
            nonlocal tries
            tries = conn.spin_for(frames)

        try:
            frames = self._read(read)
        finally:
            spinner.release()
        if frames is not None:
            self._note(tries)
        return frames
