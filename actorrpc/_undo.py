"""Take back what was begun if the rest of it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

__all__ = ["undo_on_error"]


@contextlib.contextmanager
def undo_on_error(*undo: Callable[[], object]) -> Generator[None]:
    """Call these functions, one after another, if the block raises anything, ``KeyboardInterrupt`` included."""
    try:
        yield
    except BaseException:
        for each in undo:
            each()
        raise
