"""Futures of calls as torch's are: what their callbacks raise is a RuntimeError, and a failure ends a wait for all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from actorrpc import futures
from actorrpc.compat.wording import as_runtime_error, reword

__all__ = ["Future", "collect_all", "wait_all"]

T = TypeVar("T")
S = TypeVar("S")


class Future(futures.Future[T]):
    """As :class:`actorrpc.Future`.

    Attributes:
        function: what was called.
    """

    __slots__ = ("function",)

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__(devices=devices)
        self.function: Any = None

    def _outcome(self) -> T:
        if self._error is not None:
            reword(self._error, self.function)
        return super()._outcome()

    def then(self, callback: Callable[[Any], S]) -> futures.Future[S]:
        """Return a future for ``callback(self)``; what it raises arrives as a RuntimeError, too."""
        if not callable(callback):
            raise TypeError(f"then(): incompatible function arguments. {callback!r} is not callable")

        def run(done: Any) -> S:
            try:
                return callback(done)
            except Exception as error:
                raise as_runtime_error(error) from error

        run.__qualname__ = getattr(callback, "__qualname__", run.__qualname__)
        return super().then(run)


def collect_all(given: Iterable[torch.futures.Future[Any]]) -> futures.Future[list[Any]]:
    """Stand in the place of ``torch.futures.collect_all``: the future fails with the first of the given ones that does."""
    listed = list(given)
    everything: Future[list[Any]] = Future()
    everything.label = f"collect_all of {len(listed)} futures"
    everything.awaits = listed

    def one(done: Any) -> None:
        try:
            done.value()
        except Exception as error:
            if everything._claim():
                everything._finish(None, error)

    def last(_: Any) -> None:
        if everything._claim():
            everything._finish(listed, None)

    for future in listed:
        source = getattr(future, "_source", None)
        if source is not None:
            source.flush()
        future.add_done_callback(one)
    futures.collect_all(listed).add_done_callback(last)
    return everything


def wait_all(given: Iterable[torch.futures.Future[Any]]) -> list[Any]:
    """Stand in the place of ``torch.futures.wait_all``: return the values, or raise the first failure as soon as there is one."""
    return [future.wait() for future in collect_all(given).wait()]
