"""``async_execution``: functions whose answer is the value of a future.

This module only marks functions; the executor acts on the mark.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from actorrpc.core.execution import ASYNC_MARK

__all__ = ["async_execution"]

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Mark a function that returns a Future: its RPC is answered when that future completes.

    The function runs on a worker thread up to its return; from then on no thread waits. The value (or the
    error) of the returned ``torch.futures.Future`` or ``actorrpc.Future`` goes to the caller. Works with
    ``rpc_sync``, ``rpc_async``,
    ``remote`` and RRef proxies; on methods it goes under ``@staticmethod`` and ``@classmethod``::

        @staticmethod
        @rpc.functions.async_execution
        def add(to, x, y):
            return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda fut: fut.wait() + 1)

    Raises (at the caller):
        TypeError: the function returned something else than a future.
    """

    if not callable(fn):
        raise TypeError(
            f"async_execution marks functions, not {fn!r}: on methods it goes under @staticmethod and @classmethod"
        )

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, wrapper)
    return wrapper  # type: ignore[return-value]
