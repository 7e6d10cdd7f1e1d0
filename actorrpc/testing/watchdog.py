"""The limit on each test's time.

When a test's time runs out, a thread collects the stacks of this process and of every process that the test
started, then makes the main thread raise `pytest.fail` with them (by SIGALRM: it also ends a blocking system
call). If that does not free the main thread - it waits in C++, or the exception was swallowed - the test's
processes are killed, which fails most waits, and it is tried again; at last everything is printed and the
session ends. Should even this thread never get the GIL, faulthandler's own C thread does the same later.
SIGINT is left alone.
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

import pytest

from actorrpc.testing import processes

__all__ = ["Watchdog"]

_RETRY = 2.0  # between two attempts to make the main thread raise
_LAST_RETRIES = 8  # then the session ends
# Frames of pytest itself, under every test.
_PYTEST = re.compile(r'^  File "(<frozen runpy>|.*/(_pytest|pluggy|pytest)/)')
_BACKSTOP = 60.0  # past the limit, for the thread that needs no GIL


class Watchdog:
    """Ends tests that do not end. One per session; `guard` is for the main thread only."""

    def __init__(self, stderr: TextIO) -> None:
        self._stderr = stderr  # the real one: pytest replaces descriptor 2 during tests
        self._main = threading.get_ident()
        # Guards what follows it; never held while anything else is waited for. The handler of SIGALRM
        # runs in the main thread, perhaps inside `guard`, so it takes no lock: it reads one attribute.
        self._changed = threading.Condition()
        self._armed: object | None = None
        self._deadline = 0.0
        self._limit = 0.0
        self._report: str | None = None
        self._closed = False
        self._before: set[processes.ProcessId] = set()
        self._thread = threading.Thread(target=self._run, name="test-watchdog", daemon=True)
        self._previous = signal.signal(signal.SIGALRM, self._on_alarm)
        self._thread.start()

    def keep(self, before: set[processes.ProcessId]) -> None:
        """Record the processes that do not belong to the test that runs next."""
        self._before = before

    @contextlib.contextmanager
    def guard(self, limit: float) -> Iterator[None]:
        """Let the body run for at most `limit` seconds; 0 is no limit."""
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
            # First a plain store: from here on an alarm raises nothing, not even inside this block.
            self._armed = None
            faulthandler.cancel_dump_traceback_later()
            if self._report is not None:
                processes.kill(self.of_test())

    def close(self) -> None:
        """End the thread and put the signal's handler back."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        signal.signal(signal.SIGALRM, self._previous)

    def of_test(self) -> set[processes.ProcessId]:
        """Return the processes that the test which runs has started and that exist now."""
        helpers = processes.helper_pids()
        return {process for process in processes.of_session() - self._before if process.pid not in helpers}

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
            with self._changed:  # so that the next test cannot be armed in between
                if self._armed is not token:
                    return
                self._report = report
                signal.pthread_kill(self._main, signal.SIGALRM)
            if self._left(token):
                return
        self._stderr.write(f"\n{report}\nIt could not be ended: the session ends.\n")
        self._stderr.flush()
        processes.kill(self.of_test())
        processes.end_session()
        os._exit(70)

    def _left(self, token: object) -> bool:
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
                    continue  # it is being started
                own = own.replace(f"0x{thread.ident:016x}", f"0x{thread.ident:016x} {thread.name}")
            return (
                f"stacks of the test process {os.getpid()}:\n{own}\n{processes.dump_stacks(self.of_test())}"
            )
        except Exception:  # a report without stacks is better than no limit
            return f"(no stacks: {traceback.format_exc()})"
