"""Decorators of users' functions: ``async_execution``, and the permissions of the data-only mode.

``async_execution`` only marks a function that returns a future; the executor answers such a call with the future's value.

A worker that joins with ``data_only=True`` (or ``ACTORRPC_DATA_ONLY=1``) is in the data-only mode: its peers may only send data,
call exposed functions (:func:`exposed`, :func:`allow`, :class:`Named`) by ``rpc_sync``, ``rpc_async`` and ``remote``, and fetch
results of ``remote``. Methods of an RRef's value, functions by value, actors and distributed autograd are refused, because with
them a peer could run any code. This module also allows the functions and classes that these calls and ``shutdown`` need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from actorrpc._exceptions import say
from actorrpc.agent.executor import ASYNC_MARK
from actorrpc.group import group
from actorrpc.rpc import rref
from actorrpc.rpc.refcount.messages import ForkId, RRefId
from actorrpc.serialization.data_only import Named, allow, exposed, permit_maker

__all__ = ["Named", "allow", "async_execution", "exposed"]

for _function in (group._on_arrival, rref._create, rref._fetch):
    exposed(_function)
permit_maker(rref._rebuild)
permit_maker(rref._rebuild_own)
for _class in (RRefId, ForkId):
    allow(_class)


F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Mark a function that returns a Future: a call of the function is answered when this future completes.

    The function runs on a worker thread up to its return; from then on no thread waits. The value (or the
    error) of the returned ``torch.futures.Future`` or ``actorrpc.Future`` goes to the caller. Works with
    ``rpc_sync``, ``rpc_async``, ``remote`` and RRef proxies; on methods, write it below ``@staticmethod`` and
    ``@classmethod``::

        @staticmethod
        @rpc.functions.async_execution
        def add(to, x, y):
            return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda fut: fut.wait() + 1)

    Raises (at the caller):
        TypeError: the function returned something else than a future.
    """

    if not callable(fn):
        raise TypeError(
            f"async_execution marks functions, not {say(fn, repr)}: on methods it must be below @staticmethod and @classmethod"
        )

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, wrapper)
    return wrapper  # type: ignore[return-value]
