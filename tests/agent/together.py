"""Run a function in several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["in_threads"]


def in_threads(function: Callable[..., object], arguments: Iterable[tuple[Any, ...]]) -> None:
    """Call a function once for each tuple of arguments, each in a new thread, and wait for all threads."""
    threads = [threading.Thread(target=function, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
