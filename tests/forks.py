"""Forked child processes, and processes that end at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn


def exit_at_once(code: int) -> NoReturn:
    """End this process at once, without its exit handlers and finalizers."""
    os._exit(code)


def fork(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked child and return its pid. The child exits with 0 if ``work`` did not raise, else with 1."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            exit_at_once(code)
    return pid


def exit_code(pid: int) -> int:
    """Wait for the end of a child."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
