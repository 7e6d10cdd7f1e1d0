"""Undo the first steps of an operation when a later step fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

__all__ = ["undo_on_error"]


@contextlib.contextmanager
def undo_on_error(*undo: Callable[[], object]) -> Generator[None]:
    """Call the functions in order if the ``with`` block raises an exception, ``KeyboardInterrupt`` included."""
    try:
        yield
    except BaseException:
        for each in undo:
            each()
        raise
