"""Several threads that do the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["in_threads"]


def in_threads(function: Callable[..., object], arguments: Iterable[tuple[Any, ...]]) -> None:
    """Call a function with each of the arguments, each call in a thread of its own; wait for all of them."""
    threads = [threading.Thread(target=function, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
