"""The limit on each test's time.

When a test's time runs out, the watchdog's thread:

1. collects the stacks of this process and of every process that the test has started;
2. sends SIGALRM to the main thread, whose handler calls `pytest.fail` with the stacks. The signal also interrupts a blocking
   system call;
3. if the main thread still runs the test (it waits in C++, or the exception was swallowed), kills the test's processes, which
   makes most waits fail, and tries again;
4. after several attempts, prints the stacks and ends the session.

If the watchdog's thread does not get the GIL, the C thread of faulthandler prints the stacks and ends the session later.
SIGINT is not used.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

import psutil
import pytest

from actorrpc.testing import processes

__all__ = ["Watchdog"]

_RETRY = 2.0  # seconds between two attempts to make the main thread raise
_LAST_RETRIES = 8  # after so many further attempts, the session ends
# Frames of pytest itself, which are part of every test's stack.
_PYTEST = re.compile(r'^  File "(<frozen runpy>|.*/(_pytest|pluggy|pytest)/)')
_BACKSTOP = 60.0  # faulthandler ends the session so many seconds after the limit


class Watchdog:
    """Ends tests that take too long. One per session; `guard` is for the main thread only."""

    def __init__(self, stderr: TextIO) -> None:
        self._stderr = stderr  # a copy of the original stream: pytest replaces descriptor 2 during tests
        self._main = threading.get_ident()
        # Guards the attributes below; never held during a wait for anything else. The handler of SIGALRM runs in the main
        # thread, perhaps inside `guard`, so it takes no lock and only reads attributes.
        self._changed = threading.Condition()
        self._armed: object | None = None
        self._deadline = 0.0
        self._limit = 0.0
        self._report: str | None = None
        self._closed = False
        self._before: set[psutil.Process] = set()
        self._thread = threading.Thread(target=self._run, name="test-watchdog", daemon=True)
        self._previous = signal.signal(signal.SIGALRM, self._on_alarm)
        self._thread.start()

    def keep(self, before: set[psutil.Process]) -> None:
        """Record the processes that do not belong to the test that runs next."""
        self._before = before

    @contextlib.contextmanager
    def guard(self, limit: float) -> Iterator[None]:
        """Limit the time of the body to `limit` seconds; 0 means no limit."""
        if limit <= 0:
            yield
            return
        faulthandler.dump_traceback_later(limit + _BACKSTOP, exit=True, file=self._stderr)
        with self._changed:
            self._armed, self._report = object(), None
            self._limit, self._deadline = limit, time.monotonic() + limit
            self._changed.notify()
        try:
            yield
        finally:
            # This assignment comes first: after it, the handler of SIGALRM does not raise, not even inside this block.
            self._armed = None
            faulthandler.cancel_dump_traceback_later()
            if self._report is not None:
                processes.kill(self.of_test())

    def close(self) -> None:
        """End the thread and restore the signal's handler."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        signal.signal(signal.SIGALRM, self._previous)

    def of_test(self) -> set[psutil.Process]:
        """Return the existing processes that the running test has started."""
        return processes.of_session() - self._before

    def _on_alarm(self, signum: int, frame: FrameType | None) -> None:
        if self._armed is not None and self._report is not None:
            pytest.fail(self._report)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                if self._armed is None:
                    self._changed.wait()
                    continue
                late = time.monotonic() - self._deadline
                if late < 0:
                    self._changed.wait(-late)
                    continue
                token = self._armed
            self._fire(token)

    def _fire(self, token: object) -> None:
        report = f"the test was not over within its {self._limit:g} s\n{self._stacks()}"
        for attempt in range(_LAST_RETRIES + 1):
            if attempt:
                processes.kill(self.of_test())
            with self._changed:  # held so that guard() cannot arm the next test before the signal is sent
                if self._armed is not token:
                    return
                self._report = report
                signal.pthread_kill(self._main, signal.SIGALRM)
            if self._test_ended(token):
                return
        self._stderr.write(f"\n{report}\nThe test could not be ended: the session ends.\n")
        self._stderr.flush()
        processes.kill(self.of_test())
        processes.end_session()
        os._exit(70)

    def _test_ended(self, token: object) -> bool:
        give_up = time.monotonic() + _RETRY
        while time.monotonic() < give_up:
            if self._armed is not token:
                return True
            time.sleep(0.02)
        return False

    def _stacks(self) -> str:
        try:
            with tempfile.TemporaryFile("w+", errors="replace") as file:
                faulthandler.dump_traceback(file=file, all_threads=True)
                file.seek(0)
                own = "".join(line for line in file if not _PYTEST.search(line))
            for thread in threading.enumerate():
                if thread.ident is None:
                    continue  # it is starting
                own = own.replace(f"0x{thread.ident:016x}", f"0x{thread.ident:016x} {thread.name}")
            return (
                f"stacks of the test process {os.getpid()}:\n{own}\n{processes.dump_stacks(self.of_test())}"
            )
        except Exception:  # a report without stacks is better than no limit
            return f"(no stacks: {traceback.format_exc()})"
