"""Collects log messages about futures whose error was never retrieved."""

from __future__ import annotations

import gc
import logging
import threading
from typing import Any

from actorrpc.futures import Future

__all__ = ["LAST", "Reports"]

_LAST = "the last of these reports"
#: Output of tests that call :meth:`Reports.so_far`, for ``@pytest.mark.prints``.
LAST = rf"a future failed and its error was never retrieved: KeyError\('{_LAST}'\)"


class Reports(logging.Handler):
    """Context manager that collects the reports. One thread of the package logs them, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: list[str] = []
        self._come = threading.Semaphore(0)
        self._logger = logging.getLogger("actorrpc.futures")

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a report."""
        self._texts.append(record.getMessage())
        self._come.release()

    def so_far(self) -> list[str]:
        """Return the reports about futures that were destroyed since the last call."""
        gc.collect()
        last: Future[Any] = Future()
        last.set_exception(KeyError(_LAST))
        del last
        gc.collect()
        while not self._texts or _LAST not in self._texts[-1]:
            assert self._come.acquire(timeout=20), self._texts
        found, self._texts = self._texts[:-1], []
        return found

    def __enter__(self) -> Reports:
        self._logger.addHandler(self)
        self.so_far()  # discard reports of earlier tests
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
