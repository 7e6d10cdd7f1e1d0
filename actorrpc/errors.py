"""Every error a user of actorrpc can catch.

Two levels: :class:`RpcError` (a ``RuntimeError``, as torch's errors are) and its subclasses. An
error that ends a call also says whether the call *may have run* on the other worker:
``maybe_executed`` is ``False`` when it certainly has not (it is safe to call again), ``True`` when it
may have, and ``None`` where the question makes no sense.

This module knows nothing of the rest of the package and does nothing but define words.
"""

from __future__ import annotations

import concurrent.futures
from typing import Any

__all__ = [
    "ActorDiedError",
    "ActorError",
    "ActorUnavailableError",
    "AuthenticationError",
    "BackpressureError",
    "CancelledError",
    "CollectiveError",
    "ConfigError",
    "DeadlockError",
    "LimitError",
    "NameTakenError",
    "NotInitializedError",
    "PeerDiedError",
    "PendingCallsLimitExceeded",
    "PlacementError",
    "PlatformError",
    "ProtocolError",
    "RRefError",
    "RefusedError",
    "RemoteError",
    "RemoteTraceback",
    "RendezvousError",
    "RpcError",
    "RpcTimeoutError",
    "SerializationError",
    "ShutdownError",
    "SupervisionError",
    "UnknownActorError",
    "UnknownWorkerError",
    "UnplacedActorError",
    "VersionError",
    "WrongTypeError",
]

# A user's class may refuse to be asked for it, or given one.
_CAUSE: Any = BaseException.__dict__["__cause__"]


class RpcError(RuntimeError):
    """Base of every error that actorrpc raises.

    Attributes:
        maybe_executed: whether the call that this error ended may have run on the other worker.
    """

    maybe_executed: bool | None = None


class RemoteError(RpcError):
    """The called function raised on the other worker.

    What is raised at the caller is, wherever the two types allow it, an instance of *both* the
    user's exception class and this one, so that ``except ValueError`` and ``except RemoteError`` both
    catch a remote ``ValueError``. Where the user's class cannot be rebuilt here (it is not importable,
    or its memory layout does not mix), a plain ``RemoteError`` carries its name, message and traceback.

    Attributes:
        cause: the original exception object, or ``None`` where it could not be rebuilt.
        type_name: the qualified name of the exception's class on the other worker.
        traceback: the formatted traceback of the other worker; also printed as ``__cause__``.
        worker: the name of the worker on which it was raised, where known.
    """

    maybe_executed = True
    cause: BaseException | None = None
    type_name: str = ""
    traceback: str = ""
    worker: str | None = None


class RemoteTraceback(Exception):
    """The formatted traceback of another worker; set as ``__cause__`` of a remote exception."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text


class _CallEnded(RpcError):
    """A call that ended without an answer from the called function."""

    def __init__(
        self, message: str, *, maybe_executed: bool | None = None, worker: str | None = None
    ) -> None:
        super().__init__(message)
        self.maybe_executed = maybe_executed
        self.worker = worker

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_ended, (type(self), self.args[0], self.maybe_executed, self.worker))


def _rebuild_ended(
    cls: type[_CallEnded], message: str, maybe_executed: bool | None, worker: str | None
) -> _CallEnded:
    return cls(message, maybe_executed=maybe_executed, worker=worker)


class PeerDiedError(_CallEnded, ConnectionError):
    """The other worker's process ended, or was declared dead, before the call was answered.

    Calls made after this one fail the same way: the worker does not come back under the same
    incarnation. ``maybe_executed`` says whether this call may have run before the end.
    """


class RpcTimeoutError(_CallEnded, TimeoutError):
    """A call, a fetch or a wait was not over within its time. Also a ``TimeoutError``."""


class CancelledError(_CallEnded, concurrent.futures.CancelledError):
    """The call was cancelled by its caller before it was over."""


class BackpressureError(_CallEnded):
    """The other worker is not reading what is sent to it and the call may not wait any longer.

    Nothing of the call was sent: ``maybe_executed`` is ``False``.
    """


class ShutdownError(_CallEnded):
    """This worker, or the whole group, was shut down while the call was under way."""


class DeadlockError(_CallEnded):
    """The call cannot be served: it waits, directly or through others, for itself, or every thread
    that the worker may have is blocked. The message names what is blocked."""


class ActorError(_CallEnded):
    """Base of what can be wrong with an actor (not of what its methods raise, which is a RemoteError).

    Attributes:
        actor: how the actor is called in messages: its class and its name.
        actor_id: ``handle.actor_id`` of the actor, where it is known which one.
        method: the method that was called, where there was one.
        report: what is known of the end of its process (exit code or signal, last lines of stderr, peak
            memory, uptime), or ``None``.
        cause: what the constructor raised, or kept the process from starting, where that is why; also
            ``__cause__``, below which the traceback of the other worker is printed.
    """

    actor: str | None = None
    actor_id: int | None = None
    method: str | None = None
    report: object = None
    cause: BaseException | None = None

    def __init__(
        self,
        message: str,
        *,
        maybe_executed: bool | None = None,
        worker: str | None = None,
        actor: str | None = None,
        actor_id: int | None = None,
        method: str | None = None,
        report: object = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message, maybe_executed=maybe_executed, worker=worker)
        if actor is not None:
            self.actor = actor
        if actor_id is not None:
            self.actor_id = actor_id
        if method is not None:
            self.method = method
        if report is not None:
            self.report = report
        if cause is not None:
            self.cause = self.__cause__ = cause

    def __reduce__(self) -> tuple[object, ...]:
        cause = self.cause
        below = _CAUSE.__get__(cause) if cause is not None else None
        known = {
            "maybe_executed": self.maybe_executed,
            "worker": self.worker,
            "actor": self.actor,
            "actor_id": self.actor_id,
            "method": self.method,
            "report": self.report,
            "cause": cause,
        }
        # ``__cause__`` does not travel by itself.
        return (_rebuild_actor, (type(self), self.args[0], known, getattr(below, "text", None)))


def _rebuild_actor(
    cls: type[ActorError], message: str, known: dict[str, Any], traceback: str | None
) -> ActorError:
    error = cls(message, **known)
    if error.cause is not None and traceback is not None:
        _CAUSE.__set__(error.cause, RemoteTraceback(traceback))
    return error


class ActorDiedError(ActorError):
    """The actor is dead and does not come back: its process ended, its constructor raised, it was killed or it exited."""


class ActorUnavailableError(ActorError):
    """The actor cannot be reached now but may come back: it is being restarted. Call again later."""


class PendingCallsLimitExceeded(ActorError):
    """More calls are waiting for the actor than ``max_pending_calls`` allows; this one was not made."""


class SupervisionError(ActorError):
    """A supervision group has given up: its children died too often, or one cannot be made at all. All have been ended.

    The message lists how they died; ``cause`` is what a constructor raised, where that is why.
    """


class CollectiveError(ActorError):
    """A collective cannot be used: a member is gone or gave up, it was destroyed, or this actor is in none.

    What a method did before it came to the operation that ended like this has been done. ``collective.rebuild()`` brings
    the group back; ``cause`` is what torch raised, where it did.
    """


class UnknownActorError(ActorError, ValueError):
    """No actor of this name is alive in the namespace. The message lists names that look alike."""


class NameTakenError(ActorError, ValueError):
    """There is an actor of this name in the namespace already."""


class NotInitializedError(RpcError):
    """RPC is not initialised in this process: call ``init_rpc`` first.

    Also raised in a child forked from a worker: a fork owns none of its parent's connections.
    """


class UnknownWorkerError(RpcError):
    """No worker of this name or rank is in the group. The message lists those that are."""


class SerializationError(RpcError, TypeError):
    """An argument, a result or a function cannot be sent.

    Raised before anything is sent. The message names the part that cannot travel.
    """

    maybe_executed = False


class RefusedError(SerializationError):
    """A message names something that a worker in the data-only mode does not take: nothing of it was run."""


class LimitError(RpcError, ValueError):
    """A limit is in the way: of what may be sent (its size, the number of its tensors), or of the system (threads, descriptors,
    memory, space on a disk). The message names it; nothing was executed, and the call may be made again."""

    maybe_executed = False


class ProtocolError(RpcError):
    """The peer sent bytes that make no sense. The connection they came over is closed."""


class AuthenticationError(ProtocolError):
    """The two sides do not share the key, or this worker has no key where it needs one."""


class VersionError(ProtocolError):
    """The two sides speak versions of the protocol that do not overlap."""


class RendezvousError(RpcError):
    """The workers did not find each other (store unreachable, name taken, worker missing)."""


class RRefError(RpcError):
    """An RRef was used in a way that its state or its owner forbids."""


class ConfigError(RpcError, ValueError):
    """An option or an ``ACTORRPC_*`` variable has a value that cannot be used."""


class PlacementError(ConfigError):
    """No worker has what was asked for, or none had it free in time. The message says what is missing, and what there is."""


class UnplacedActorError(ActorDiedError, PlacementError):
    """An actor is dead since there was no place for it, when it was made or was to be made again. Also a PlacementError."""


class WrongTypeError(ConfigError, TypeError):
    """An argument has a type that cannot be used. torch raises now ValueError, now TypeError: this is both."""


class PlatformError(RpcError, ImportError):
    """This platform or Python version is not supported."""
