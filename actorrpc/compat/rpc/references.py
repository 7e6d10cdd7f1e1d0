"""RRefs with torch's private names and error texts.

In a group that was joined while the drop-in is installed, all RRefs are instances of :class:`RRef` in this module.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn, TypeVar

from torch.autograd.profiler import record_function

from actorrpc import futures
from actorrpc.compat.translate import Future, reword
from actorrpc.errors import NotInitializedError, RpcTimeoutError, RRefError
from actorrpc.rpc import api, rref
from actorrpc.rpc.options import UNSET_RPC_TIMEOUT
from actorrpc.rpc.profiling import profiled
from actorrpc.rpc.rref import RRefProxy

__all__ = ["RRef"]

T = TypeVar("T")

# Guards RRef._kind.
_lock = threading.Lock()


def _rref_typeof_on_owner(reference: RRef[Any]) -> type:
    """Return the class of an RRef's value. Runs on the owner of the value."""
    return type(reference.local_value())


def _look_up(reference: RRef[Any], name: str) -> None:
    """Raise AttributeError if an RRef's value has no attribute ``name``. Runs on the owner of the value."""
    getattr(reference.local_value(), name)


class RRef(rref.RRef[T]):
    """As :class:`actorrpc.RRef`."""

    __slots__ = ("_kind",)

    def __init__(self, value: T, type_hint: Any = None) -> None:
        try:
            super().__init__(value, type_hint)
        except NotInitializedError as error:
            raise NotInitializedError(
                f"Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)? {error}"
            ) from None

    def local_value(self) -> T:
        """Return the value itself, on its owner."""
        if not self.is_owner():
            me = self._references.agent.record.info
            shown = f"UserRRef(rref_id={self._handle.rref_id}, fork_id={self._handle.fork_id})"
            raise RRefError(
                f"For {shown}, can't call localValue() on user {me}. Call it on owner {self.owner()}"
            )
        return super().local_value()

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Fetch a copy of the value; on the owner, return the value itself."""
        if not self.is_owner() and self._references.agent.closed_down:
            raise RRefError(f"{self!r} has been deleted. Cannot call to_here() on it after deletion.")
        late = self._not_made()
        if late is not None:
            raise RpcTimeoutError(
                self._say_not_made(late), maybe_executed=late.maybe_executed, worker=late.worker
            ) from late
        try:
            if profiled() and not self.is_owner():
                me = self._references.agent.record.info.name
                with record_function(f"to_here#({me})->({self.owner_name()})"):
                    return super().to_here(timeout)
            return super().to_here(timeout)
        except Exception as error:
            reword(error)
            raise

    def _not_made(self) -> RpcTimeoutError | None:
        """Return the RpcTimeoutError of the value's creation, after which the value may still exist; None if there is none."""
        error: BaseException | None
        if self.is_owner():
            error = None if self._creation is None else self._creation.error
        else:
            error = rref.failure(self)
        return error if isinstance(error, RpcTimeoutError) else None

    def _say_not_made(self, error: RpcTimeoutError) -> str:
        return (
            f"RRef creation via rpc.remote() to {self.owner()} timed out, and it is possible that the RRef on the owner "
            f"node does not exist: {error}"
        )

    def _check(self) -> None:
        if self._references.agent.closed_down and not self.is_owner():
            raise RRefError(f"{self!r} has been deleted. Cannot call fork an UserRRef after deletion.")
        error = self._not_made()
        if error is not None:
            raise RRefError(self._say_not_made(error)) from error
        super()._check()

    def __reduce__(self) -> Any:
        self._check()
        return super().__reduce__()

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: ``rref.remote().method(x)`` calls the method on the owner and gives an RRef to its result.

        As in torch, the call raises an error at once if the value's creation has timed out, or the value has no such method.
        """
        return _CheckedProxy(self, "remote", timeout)

    # -- private names of torch's ------------------------------------------------------------------------

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Return the class of the value, or without ``blocking`` a future of the class. A successful answer is cached."""
        with _lock:
            future: Future[type] | None = getattr(self, "_kind", None)
        if future is None or (future.done() and future.error is not None):
            future = Future()
            if self.is_owner():
                future.set_result(_rref_typeof_on_owner(self))
            else:
                api.send(future, self.owner(), _rref_typeof_on_owner, (self,), timeout=timeout)
            with _lock:
                self._kind = future
        return future.wait() if blocking else future

    def _get_future(self) -> futures.Future[None]:
        """Return a future that completes when the value was created or its creation has failed."""
        if self._creation is not None:
            return self._creation
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _get_profiling_future(self) -> futures.Future[None]:
        """Return a future that completes when this RRef was created."""
        return self._get_future().then(lambda done: done.value())

    def _serialize(self) -> NoReturn:
        self._check()
        raise RRefError("an RRef can only be packed into a message")


class _CheckedProxy(RRefProxy):
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        method = super().__getattr__(name)
        reference: Any = self._rref

        def call(*args: Any, **kwargs: Any) -> Any:
            if not hasattr(reference._get_type(self._timeout), name):
                api.rpc_sync(reference.owner(), _look_up, (reference, name), timeout=self._timeout)
            return method(*args, **kwargs)

        return call
