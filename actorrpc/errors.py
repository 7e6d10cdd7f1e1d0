"""Every error a user of actorrpc can catch.

All errors that are raised are of :class:`RpcError` (a ``RuntimeError``, as torch's errors are) or its subclasses. An
error that ends a call also says whether the call *may have run* on the other worker:
``maybe_executed`` is ``False`` if it certainly has not (it is safe to call again), ``True`` if it
may have, and ``None`` if that is not known, or no call was made.

This module imports nothing else of the package, and only defines classes.
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
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "DeadlockError",
    "LimitError",
    "LostArgumentError",
    "NameTakenError",
    "NotInitializedError",
    "ObjectStoreFullError",
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

# The descriptor, because a user's class may define a property of the name ``__cause__`` that raises.
_CAUSE: Any = BaseException.__dict__["__cause__"]


class RpcError(RuntimeError):
    """Base of every error that actorrpc raises.

    Remedy: see the class that was raised; ``except RpcError`` is for a program that treats all of them alike.

    Attributes:
        maybe_executed: whether the call that this error ended may have run on the other worker.
    """

    maybe_executed: bool | None = None


class RemoteError(RpcError):
    """The called function raised on the other worker.

    If the two types allow it, the exception at the caller is an instance of *both* the
    user's exception class and ``RemoteError``, so that ``except ValueError`` and ``except RemoteError`` both
    catch a remote ``ValueError``. If the caller cannot rebuild the user's exception (its class is not importable,
    or its memory layout is not compatible), a plain ``RemoteError`` contains its name, message and traceback.

    Remedy: correct the function; the traceback of the other worker, which is printed above the caller's, shows where it failed.

    Attributes:
        cause: the original exception object, or ``None`` if it could not be rebuilt.
        type_name: the qualified name of the exception's class on the other worker.
        traceback: the formatted traceback of the other worker; also printed as ``__cause__``.
        worker: the name of the worker on which the exception was raised, if known.
    """

    maybe_executed = True
    cause: BaseException | None = None
    type_name: str = ""
    traceback: str = ""
    worker: str | None = None


class RemoteTraceback(Exception):
    """The formatted traceback of another worker; set as ``__cause__`` of a remote exception.

    Remedy: no action is needed: it is never raised, but shows where the other worker failed.
    """

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

    Later calls to this incarnation of the worker fail in the same way. ``maybe_executed`` says whether this call may have run
    before the worker ended.

    Remedy: the message says how the worker ended, and shows its last output; if ``maybe_executed`` is ``False``, make the
    call again on another worker. An actor with ``max_restarts`` is restarted automatically. If a living worker was
    declared dead, raise ``heartbeat`` or ``heartbeat_misses``.
    """


class LostArgumentError(PeerDiedError):
    """The call was not sent: the worker that holds the value of a reference among its arguments has ended.

    The called worker may be alive. If the called worker itself has ended, the error's class is ``PeerDiedError``.

    Remedy: create the value again, on another worker if its owner has ended, and repeat the call.
    """


class RpcTimeoutError(_CallEnded, TimeoutError):
    """A call, a fetch or a wait took longer than its time-out. Also a ``TimeoutError``.

    Remedy: find out what the other worker is doing (the message names it), or allow more time: ``timeout=`` for this call,
    ``rpc_timeout`` for all calls; 0 means no limit. A nested call has the remaining time of its caller.
    """


class CancelledError(_CallEnded, concurrent.futures.CancelledError):
    """The caller cancelled the call before the call ended.

    Remedy: no action is needed if the program cancelled it, or cancelled the call in which this call was nested.
    """


class BackpressureError(_CallEnded):
    """The other worker does not read its messages, and the time-out of the call has passed.

    No part of the call was sent: ``maybe_executed`` is ``False``.

    Remedy: wait for results before making further calls, or allow more unread bytes with ``window`` (``ACTORRPC_WINDOW``).
    """


class ShutdownError(_CallEnded):
    """This worker, or the whole group, was shut down before the call was answered.

    Remedy: wait for the results of calls before ``shutdown()``, or before the block of ``with actorrpc.init()`` ends.
    """


class DeadlockError(_CallEnded):
    """The call cannot be executed: it waits for itself, directly or through other calls; or all threads that the worker may
    have are blocked; or a finaliser waits for it on the thread that was reading the answers. The message names the blocked calls.

    Remedy: break the circle that the message names: pass the reference instead of its value, use ``await`` instead of
    ``get()`` in coroutines, or keep the default ``reentrant=True``. If all threads are blocked, raise ``max_threads``. In a
    ``__del__`` method, do not wait for calls.
    """


class ActorError(_CallEnded):
    """Base of the errors of actors. An exception of an actor's method is a RemoteError instead.

    Remedy: see the class that was raised.

    Attributes:
        actor: the actor in messages: its class and its name.
        actor_id: ``handle.actor_id`` of the actor, if it is known.
        method: the called method, if there was one.
        report: how the actor's process ended (exit code or signal, last lines of stderr, peak
            memory, uptime), or ``None``.
        cause: the error of the constructor, or the error that kept the process from starting, if there was one; also
            ``__cause__``, which is printed with the traceback of the other worker.
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
        # Pickling leaves ``__cause__`` out.
        return (_rebuild_actor, (type(self), self.args[0], known, getattr(below, "text", None)))


def _rebuild_actor(
    cls: type[ActorError], message: str, known: dict[str, Any], traceback: str | None
) -> ActorError:
    error = cls(message, **known)
    if error.cause is not None and traceback is not None:
        _CAUSE.__set__(error.cause, RemoteTraceback(traceback))
    return error


class ActorDiedError(ActorError):
    """The actor is dead and is not restarted: its process ended, its constructor raised, it was killed or it exited.

    Remedy: the message and ``report`` say how it ended. With ``max_restarts=`` an actor is restarted, with
    ``max_task_retries=`` the interrupted calls are repeated, and ``checkpoint()`` and ``restore()`` keep its state.
    """


class ActorUnavailableError(ActorError):
    """The actor cannot be reached now, because it is being restarted.

    Also raised if it was restarted and this call is not repeated, or if the caller has no connection to the actor's worker.

    Remedy: call again later, or omit ``max_task_retries=0``, so that calls wait for the actor.
    """


class PendingCallsLimitExceeded(ActorError):
    """More calls are waiting for the actor than ``max_pending_calls`` allows; this call was not made.

    Remedy: get results before making further calls, or raise ``max_pending_calls``.
    """


class CheckpointError(ActorError):
    """The method has run, but the ``checkpoint()`` after it raised, or returned a value that cannot be copied (see the message).

    The result is not returned, because a restarted actor would begin with the previous checkpoint, without the effects of this
    call. The running actor keeps them, and a later checkpoint that succeeds contains them.

    Remedy: correct ``checkpoint()``. Before repeating the call, check the effects of the first one.
    """


class SupervisionError(ActorError):
    """A supervision group has given up, because its children died too often, or a child cannot be made. All children have ended.

    The message lists how they died; ``cause`` is the error of the constructor that failed, if one did.

    Remedy: correct the cause of the deaths, or allow more restarts: ``max_restarts`` and ``period`` of ``supervise()``.
    """


class CollectiveError(ActorError):
    """A collective cannot be used: a member has ended, an operation failed, it was destroyed, or this actor is in no collective.

    The effects of the method before the failed operation remain. ``cause`` is the error that torch raised, if it raised
    an error.

    Remedy: call ``collective.rebuild()`` or ``collective.call``, which restore the group if its actors have
    ``max_restarts``.
    """


class UnknownActorError(ActorError, ValueError):
    """No actor of this name is alive in the namespace. The message lists similar names.

    Remedy: check the name and the ``namespace``, or create the actor with ``get_if_exists=True``.
    """


class NameTakenError(ActorError, ValueError):
    """The namespace already has an actor of this name.

    Remedy: use another name or namespace, or ``get_if_exists=True``, which returns the existing actor.
    """


class NotInitializedError(RpcError):
    """RPC is not initialised in this process.

    Also raised in a child forked from a worker: a fork cannot use its parent's connections.

    Remedy: call ``init_rpc`` or ``actorrpc.init`` first; start children with the method "spawn", or use actors.
    """


class UnknownWorkerError(RpcError):
    """No worker of this name or rank is in the group. The message lists the workers of the group.

    Remedy: use one of their names; ``actorrpc.workers()`` shows the workers with their states.
    """


class SerializationError(RpcError, TypeError):
    """An argument, a result or a function cannot be sent.

    For an argument or a function, raised before anything is sent. The message names the part that cannot be sent.

    Remedy: send the data from which the other worker can create the object; or keep the object in an actor, and send the handle.
    """

    maybe_executed = False


class RefusedError(SerializationError):
    """A worker in the data-only mode refused a message with a function that is not exposed or a class that is not allowed.

    Remedy: mark the function with ``rpc.exposed``, or the class with ``rpc.allow``, on the worker that is called.
    """


class LimitError(RpcError, ValueError):
    """A limit was exceeded: of messages (their size, the number of their tensors), or of the system (threads, descriptors,
    memory, space on a disk). The message names the limit. The call was not executed, unless ``maybe_executed`` is True.

    Remedy: raise that limit (``ulimit``, the memory of a container, a setting), or use less at a time.
    """

    maybe_executed = False


class ObjectStoreFullError(LimitError, MemoryError):
    """The memory that the group's processes on this host may use for large objects is full, and not enough of it was freed in
    time. The message says which processes use how much. ``maybe_executed`` is True if a function ran, and its result had no room.

    Remedy: delete references and values, raise ``object_memory``, or set ``spill_dir`` to a directory on a disk.
    """


class ProtocolError(RpcError):
    """The peer sent bytes that are not valid. The connection is closed.

    Remedy: find out whether another program or a proxy listens at the peer's address, or the network damages data.
    """


class AuthenticationError(ProtocolError):
    """The two sides do not share the key, or this worker needs a key and has none.

    Remedy: give all workers of the group the same ``ACTORRPC_KEY`` or ``ACTORRPC_KEY_FILE``.
    """


class VersionError(ProtocolError):
    """The two sides have no version of the protocol in common, or the driver requires its own versions (``require_same``).

    Remedy: install the same version of actorrpc on all hosts.
    """


class RendezvousError(RpcError):
    """The workers did not find each other (store unreachable, name taken, worker missing).

    Remedy: the message says which worker is missing, or which address could not be reached: compare ``MASTER_ADDR``,
    ``MASTER_PORT``, ``world_size`` and the names, and check whether the missing worker has ended with an error.
    """


class RRefError(RpcError):
    """An RRef was used in a way that its state or its owner forbids.

    Remedy: use ``to_here()`` instead of ``local_value()`` if another worker owns the value; send RRefs in the arguments and
    results of calls, not through ``pickle`` or ``copy``.
    """


class ConfigError(RpcError, ValueError):
    """An option or an ``ACTORRPC_*`` variable has a value that cannot be used.

    Remedy: use a value that the message allows.
    """


class PlacementError(ConfigError):
    """No worker has the requested resources, or they did not become free in time.

    Remedy: the message lists the workers' resources. Request less, add a worker, or wait longer with ``placement_timeout``.
    """


class UnplacedActorError(ActorDiedError, PlacementError):
    """An actor is dead because no worker had room for it when it was created or restarted. Also a PlacementError.

    Remedy: see PlacementError; then create a new actor.
    """


class WrongTypeError(ConfigError, TypeError):
    """An argument has a type that cannot be used. It is both a ValueError and a TypeError, since torch raises either.

    Remedy: use a value of the type that the message names.
    """


class PlatformError(RpcError, ImportError):
    """This platform, Python version or build of torch is not supported.

    Remedy: use Linux, Python 3.11 or later, and a build of torch that has ``torch.distributed``.
    """
