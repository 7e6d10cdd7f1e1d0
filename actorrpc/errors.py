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

# A user's class may refuse to be asked for it, or given one.
_CAUSE: Any = BaseException.__dict__["__cause__"]


class RpcError(RuntimeError):
    """Base of every error that actorrpc raises.

    Remedy: that of the class that was raised; ``except RpcError`` is for a program that treats all of them alike.

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

    Remedy: the traceback of the other worker is printed above this one: what is wrong is there.

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
    """The formatted traceback of another worker; set as ``__cause__`` of a remote exception.

    Remedy: none is needed, as it is never raised: it is there to be read.
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

    Calls made after this one fail the same way: the worker does not come back under the same
    incarnation. ``maybe_executed`` says whether this call may have run before the end.

    Remedy: the message says how the worker ended, with what it said last; where ``maybe_executed`` is ``False``, make the
    call again on another worker. An actor with ``max_restarts`` is made again by itself. Where a worker that was alive was
    taken for dead, raise ``heartbeat`` or ``heartbeat_misses``.
    """


class LostArgumentError(PeerDiedError):
    """The call was not sent: the worker that holds the value of a reference among its arguments has ended.

    The called worker may be alive. If the called worker itself has ended, the error's class is ``PeerDiedError``.

    Remedy: make the value again, on another worker where its own has ended, and call again.
    """


class RpcTimeoutError(_CallEnded, TimeoutError):
    """A call, a fetch or a wait was not over within its time. Also a ``TimeoutError``.

    Remedy: see what the other worker does (the message names it), and give more time: ``timeout=`` of this call,
    ``rpc_timeout`` of all; 0 is none. The time of a nested call is what is left of its caller's.
    """


class CancelledError(_CallEnded, concurrent.futures.CancelledError):
    """The call was cancelled by its caller before it was over.

    Remedy: none, where the program has asked for it; also a call that is nested in a cancelled one ends like this.
    """


class BackpressureError(_CallEnded):
    """The other worker is not reading what is sent to it and the call may not wait any longer.

    Nothing of the call was sent: ``maybe_executed`` is ``False``.

    Remedy: wait for results before more is sent, or let more be under way with ``window`` (``ACTORRPC_WINDOW``).
    """


class ShutdownError(_CallEnded):
    """This worker, or the whole group, was shut down while the call was under way.

    Remedy: wait for what is wanted before ``shutdown()``, or before the block of ``with actorrpc.init()`` ends.
    """


class DeadlockError(_CallEnded):
    """The call cannot be served: it waits, directly or through others, for itself, or every thread that the worker may have is
    blocked, or a finaliser waits for it on the very thread that was reading the answers. The message names what is blocked.

    Remedy: break the circle that the message names: pass the reference on in place of its value, ``await`` in coroutines where
    they call ``get()``, or leave ``reentrant=True``. Where all threads are blocked, raise ``max_threads``. A ``__del__`` makes
    calls without waiting for them.
    """


class ActorError(_CallEnded):
    """Base of what can be wrong with an actor (not of what its methods raise, which is a RemoteError).

    Remedy: that of the class that was raised.

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
    """The actor is dead and does not come back: its process ended, its constructor raised, it was killed or it exited.

    Remedy: the message and ``report`` say how it ended. ``max_restarts=`` has it made again, ``max_task_retries=`` has the calls
    that this cut short made again, ``checkpoint()`` and ``restore()`` keep its state.
    """


class ActorUnavailableError(ActorError):
    """The actor cannot be reached now but may come back: it is being restarted.

    Remedy: call again later, or leave ``max_task_retries=0`` out: then calls wait for it.
    """


class PendingCallsLimitExceeded(ActorError):
    """More calls are waiting for the actor than ``max_pending_calls`` allows; this one was not made.

    Remedy: get results before more calls are made, or raise ``max_pending_calls``.
    """


class CheckpointError(ActorError):
    """The method has run, and the ``checkpoint()`` behind it raised, or returned what cannot be copied; the message says what.

    Its result is withheld, as it is not in the state that a next incarnation of the actor begins with: that is the one before.
    The actor goes on with what it has; where a later checkpoint succeeds, what this call has done is in it.

    Remedy: mend ``checkpoint()``. Do not call again without a look at what the first call has done.
    """


class SupervisionError(ActorError):
    """A supervision group has given up: its children died too often, or one cannot be made at all. All have been ended.

    The message lists how they died; ``cause`` is what a constructor raised, where that is why.

    Remedy: mend what the deaths have in common, or allow more of them: ``max_restarts`` and ``period`` of ``supervise()``.
    """


class CollectiveError(ActorError):
    """A collective cannot be used: a member is gone or gave up, it was destroyed, or this actor is in none.

    What a method did before it came to the operation that ended like this has been done. ``cause`` is what torch raised,
    where it did.

    Remedy: ``collective.rebuild()``, or the next ``collective.call``, brings the group back where its actors have
    ``max_restarts``.
    """


class UnknownActorError(ActorError, ValueError):
    """No actor of this name is alive in the namespace. The message lists names that look alike.

    Remedy: check the name and the ``namespace``, or make the actor there with ``get_if_exists=True``.
    """


class NameTakenError(ActorError, ValueError):
    """There is an actor of this name in the namespace already.

    Remedy: another name or namespace, or ``get_if_exists=True``, which gives the one that there is.
    """


class NotInitializedError(RpcError):
    """RPC is not initialised in this process.

    Also raised in a child forked from a worker: a fork owns none of its parent's connections.

    Remedy: call ``init_rpc`` or ``actorrpc.init`` first; start children with the method "spawn", or use actors.
    """


class UnknownWorkerError(RpcError):
    """No worker of this name or rank is in the group. The message lists those that are.

    Remedy: one of those names; ``actorrpc.workers()`` shows them with their states.
    """


class SerializationError(RpcError, TypeError):
    """An argument, a result or a function cannot be sent.

    Raised before anything is sent. The message names the part that cannot travel.

    Remedy: send what it is made from, and make it there; or keep it in an actor, and send the handle.
    """

    maybe_executed = False


class RefusedError(SerializationError):
    """A message names something that a worker in the data-only mode does not take: nothing of it was run.

    Remedy: mark the function with ``rpc.exposed``, or the class with ``rpc.allow``, on the worker that is called.
    """


class LimitError(RpcError, ValueError):
    """A limit is in the way: of what may be sent (its size, the number of its tensors), or of the system (threads, descriptors,
    memory, space on a disk). The message names it; nothing was executed, and the call may be made again.

    Remedy: raise that limit (``ulimit``, the memory of a container, a setting), or ask for less at a time.
    """

    maybe_executed = False


class ObjectStoreFullError(LimitError, MemoryError):
    """There is no room for a large object in the memory that the group's processes on this host may use for them, and none has
    become free in time. The message says who holds what. Of a call, it is the result for which there is no room: it was executed.

    Remedy: let go of references and values, raise ``object_memory``, or give ``spill_dir`` a directory on a disk.
    """


class ProtocolError(RpcError):
    """The peer sent bytes that make no sense. The connection they came over is closed.

    Remedy: see what listens at that address: another program, a proxy, or a network that damages what it carries.
    """


class AuthenticationError(ProtocolError):
    """The two sides do not share the key, or this worker has no key where it needs one.

    Remedy: the same ``ACTORRPC_KEY`` or ``ACTORRPC_KEY_FILE`` for all workers of the group.
    """


class VersionError(ProtocolError):
    """The two sides speak versions of the protocol that do not overlap.

    Remedy: the same version of actorrpc on all hosts.
    """


class RendezvousError(RpcError):
    """The workers did not find each other (store unreachable, name taken, worker missing).

    Remedy: the message says who is missing, or what could not be reached: compare ``MASTER_ADDR``, ``MASTER_PORT``,
    ``world_size`` and the names, and see whether the missing worker has ended with an error of its own.
    """


class RRefError(RpcError):
    """An RRef was used in a way that its state or its owner forbids.

    Remedy: ``to_here()`` in place of ``local_value()`` where another worker owns it; RRefs travel in the arguments and results
    of calls, and not through ``pickle`` or ``copy``.
    """


class ConfigError(RpcError, ValueError):
    """An option or an ``ACTORRPC_*`` variable has a value that cannot be used.

    Remedy: what the message says is right.
    """


class PlacementError(ConfigError):
    """No worker has what was asked for, or none had it free in time. The message says what is missing, and what there is.

    Remedy: ask for less, let a worker join that has it, or wait longer with ``placement_timeout``.
    """


class UnplacedActorError(ActorDiedError, PlacementError):
    """An actor is dead since there was no place for it, when it was made or was to be made again. Also a PlacementError.

    Remedy: that of PlacementError, and a new actor.
    """


class WrongTypeError(ConfigError, TypeError):
    """An argument has a type that cannot be used. torch raises now ValueError, now TypeError: this is both.

    Remedy: a value of the type that the message names.
    """


class PlatformError(RpcError, ImportError):
    """This platform or Python version is not supported.

    Remedy: Linux with Python 3.11 or later.
    """
