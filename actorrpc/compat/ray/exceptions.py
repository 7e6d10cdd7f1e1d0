"""``ray.exceptions``: Ray's names of errors, each a subclass of what actorrpc raises in its place.

``except ray.exceptions.RayActorError`` catches what it catches on Ray, ``except actorrpc.ActorDiedError`` goes on catching,
too. :func:`in_rays_words` makes the one of the other, where a result is looked at: the rest of actorrpc knows no names of Ray's.

Classes that are there for ``except`` clauses only, as nothing raises them here, say so.
"""

from __future__ import annotations

from typing import Any, Final, cast

from actorrpc import errors
from actorrpc._exception_text import say
from actorrpc.serialization import exceptions

__all__ = [
    "ActorAlreadyExistsError",
    "ActorDiedError",
    "ActorPlacementGroupRemoved",
    "ActorUnavailableError",
    "ActorUnschedulableError",
    "AsyncioActorExit",
    "AuthenticationError",
    "CrossLanguageError",
    "GetTimeoutError",
    "LocalRayletDiedError",
    "NodeDiedError",
    "ObjectFetchTimedOutError",
    "ObjectFreedError",
    "ObjectLostError",
    "ObjectReconstructionFailedError",
    "ObjectReconstructionFailedLineageEvictedError",
    "ObjectReconstructionFailedMaxAttemptsExceededError",
    "ObjectRefStreamEndOfStreamError",
    "ObjectStoreFullError",
    "OutOfDiskError",
    "OutOfMemoryError",
    "OwnerDiedError",
    "PendingCallsLimitExceeded",
    "PlasmaObjectNotAvailable",
    "RayActorError",
    "RayChannelError",
    "RayChannelTimeoutError",
    "RayError",
    "RaySystemError",
    "RayTaskError",
    "ReferenceCountingAssertionError",
    "RpcError",
    "RuntimeEnvSetupError",
    "TaskCancelledError",
    "TaskPlacementGroupRemoved",
    "TaskUnschedulableError",
    "UnserializableException",
    "UserCodeException",
    "WorkerCrashedError",
    "in_rays_words",
    "unplaced",
]


class RayError(errors.RpcError):
    """Base of Ray's errors. With no message given, an error says what its class means."""

    def __init__(self, *args: Any, **known: Any) -> None:
        message = args or ((type(self).__doc__ or type(self).__name__).partition("\n")[0],)
        super().__init__(*message, **known)


class CrossLanguageError(RayError):
    """An error of another language. Nothing raises it here."""


class RayTaskError(RayError, errors.RemoteError):
    """A task or a method raised.

    What is raised is an instance of the user's class as well, where the two mix; ``cause`` is the user's own exception.

    Attributes:
        function_name: what raised, as far as it is known.
        traceback_str: the traceback, as text.
    """

    function_name: str = ""

    def __init__(
        self,
        function_name: str = "",
        traceback_str: str = "",
        cause: BaseException | None = None,
        **more: Any,
    ) -> None:
        super().__init__(traceback_str or function_name or f"{type(cause).__name__}: {cause}")
        self.function_name = function_name
        self.traceback = traceback_str
        self.cause = cause
        if cause is not None:
            self.type_name = f"{type(cause).__module__}.{type(cause).__qualname__}"
        self.worker = more.get("worker")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_task_error, (
            str(self.args[0]),
            self.type_name,
            self.traceback,
            self.cause,
            self.worker,
        )

    @property
    def traceback_str(self) -> str:
        """The traceback of the place where it was raised, as text."""
        return exceptions.traceback_of(self) or str(self.traceback or "")

    def as_instanceof_cause(self) -> BaseException:
        """Return the error as an instance of the user's class, which it is already where the two classes mix."""
        return self


def _rebuild_task_error(
    message: str, type_name: str, traceback: str, cause: BaseException | None, worker: str | None
) -> RayTaskError:
    made = RayTaskError(message, traceback, cause, worker=worker)
    made.args = (message,)
    made.type_name = type_name
    if traceback:
        made.__cause__ = errors.RemoteTraceback(traceback)
    return made


class TaskCancelledError(RayError, errors.CancelledError):
    """The task was cancelled."""

    task_id: object = None


class LocalRayletDiedError(RayError):
    """The raylet died. Nothing raises it here, where there is none."""


class WorkerCrashedError(RayError, errors.PeerDiedError):
    """The process that executed the task ended."""


class RayActorError(RayError, errors.ActorError):
    """The actor is dead, or cannot be reached now."""

    @property
    def actor_init_failed(self) -> bool:
        """Whether its constructor raised."""
        return self.cause is not None and (
            isinstance(self.cause, errors.RemoteError) or not isinstance(self.cause, errors.RpcError)
        )

    @property
    def error_msg(self) -> str:
        """The message."""
        return str(self)


class ActorDiedError(RayActorError, errors.ActorDiedError):
    """The actor is dead and does not come back."""


class ActorUnavailableError(RayActorError, errors.ActorUnavailableError):
    """The actor cannot be reached now but may come back."""


class ActorAlreadyExistsError(RayError, errors.NameTakenError):
    """There is an actor of this name in the namespace already."""


class RaySystemError(RayError):
    """What no other class says: an error of ours that Ray has no name for is an instance of this and of its own class."""


class UserCodeException(RayError):
    """User code raised. Nothing raises it here: it is a RayTaskError."""


class UnserializableException(RayError):
    """An exception could not be pickled. Nothing raises it here: it arrives as a RayTaskError, with its text."""


class ObjectStoreFullError(RayError, errors.ObjectStoreFullError):
    """There is no room for a large object in the memory that the processes of this host may use for them."""


class OutOfDiskError(RayError, errors.LimitError):
    """The disk is full. Nothing raises it here: where ``spill_dir`` has no room, that is an ObjectStoreFullError."""


class OutOfMemoryError(RayError, errors.LimitError):
    """A node ran out of memory. Nothing raises it here: what the system ends is a WorkerCrashedError or an ActorDiedError."""


class NodeDiedError(RayError, errors.PeerDiedError):
    """A node died. Nothing raises it here: what was on it fails with WorkerCrashedError, ActorDiedError or ObjectLostError."""


class ObjectLostError(RayError, errors.PeerDiedError):
    """A result is lost: the process that kept it has ended."""


class ObjectFetchTimedOutError(ObjectLostError):
    """An object could not be fetched in time. Nothing raises it here."""


class ReferenceCountingAssertionError(ObjectLostError, AssertionError):
    """An object was deleted too early. Nothing raises it here."""


class ObjectFreedError(ObjectLostError):
    """An object was freed by the program. Nothing raises it here."""


class OwnerDiedError(ObjectLostError):
    """A result is lost with the process that made it."""


class ObjectReconstructionFailedError(ObjectLostError):
    """An object could not be made again. Nothing raises it here, where none is."""


class ObjectReconstructionFailedMaxAttemptsExceededError(ObjectReconstructionFailedError):
    """An object was made again too often. Nothing raises it here."""


class ObjectReconstructionFailedLineageEvictedError(ObjectReconstructionFailedError):
    """How an object was made is not known any more. Nothing raises it here."""


class ObjectRefStreamEndOfStreamError(RayError):
    """A stream is over. Nothing raises it here: it is StopIteration."""


class GetTimeoutError(RayError, errors.RpcTimeoutError):
    """A result was not there in time; the call goes on."""


class PlasmaObjectNotAvailable(RayError):
    """An object is not in the object store. Nothing raises it here."""


class AsyncioActorExit(RayError):
    """Ends an async actor. Nothing raises it here: exit_actor() has an exception of its own."""


class RuntimeEnvSetupError(RayError, errors.ConfigError):
    """A runtime_env cannot be had: the message says what to do."""


class TaskPlacementGroupRemoved(RayError, errors.PlacementError):
    """The placement group that a task was to run in has been removed."""


class ActorPlacementGroupRemoved(RayError, errors.PlacementError):
    """The placement group that an actor was to live in has been removed."""


class PendingCallsLimitExceeded(RayError, errors.PendingCallsLimitExceeded):
    """More calls are waiting for the actor than max_pending_calls allows; this one was not made."""


class TaskUnschedulableError(RayError, errors.PlacementError):
    """There is nothing on which the task could run."""


class ActorUnschedulableError(RayError, errors.UnplacedActorError):
    """There is nothing on which the actor could live."""


class RayChannelError(RayError):
    """A channel of a compiled graph failed. Nothing raises it here, where there are none."""


class RayChannelTimeoutError(RayChannelError, errors.RpcTimeoutError):
    """A channel of a compiled graph was too slow. Nothing raises it here."""


class RpcError(RayError):
    """A call between Ray's own processes failed. Nothing raises it here."""


class AuthenticationError(RayError, errors.AuthenticationError):
    """The two sides do not share a key."""


# The first that fits is meant: subclasses stand before their bases.
_WORDS: Final[tuple[tuple[type[errors.RpcError], type[RayError]], ...]] = (
    (errors.ObjectStoreFullError, ObjectStoreFullError),
    (errors.UnplacedActorError, ActorUnschedulableError),
    (errors.ActorDiedError, ActorDiedError),
    (errors.ActorUnavailableError, ActorUnavailableError),
    (errors.PendingCallsLimitExceeded, PendingCallsLimitExceeded),
    (errors.NameTakenError, ActorAlreadyExistsError),
    (errors.RpcTimeoutError, GetTimeoutError),
    (errors.CancelledError, TaskCancelledError),
    (errors.PlacementError, TaskUnschedulableError),
    (errors.AuthenticationError, AuthenticationError),
)
# Ray has no class of its own for these: the program, not the system, is at fault.
_PLAIN: Final = (
    errors.SerializationError,
    errors.ConfigError,
    errors.UnknownActorError,
    errors.NotInitializedError,
)
_others: dict[type[errors.RpcError], type[RayError]] = {}


def in_rays_words(error: errors.RpcError) -> errors.RpcError:
    """Return what Ray raises in the place of an error; the error itself where Ray has no word for it."""
    if isinstance(error, errors.RemoteError):
        cause = exceptions.original(error)
        is_told = isinstance(error, RayTaskError) and (cause is error or not isinstance(cause, RayError))
        return error if is_told else _task_error(error, cause)
    if isinstance(error, RayError):
        return error
    if isinstance(error, errors.PeerDiedError):
        # What a process has kept is lost with it; what a task's process did not finish is told by its actor's end.
        lost = isinstance(error.__cause__, errors.PeerDiedError)
        return _as(OwnerDiedError if lost else WorkerCrashedError, error)
    for ours, rays in _WORDS:
        if isinstance(error, ours):
            return _as(rays, error)
    if isinstance(error, _PLAIN):
        return error
    kind = type(error)
    made = _others.get(kind)
    if made is None:
        made = _others[kind] = type(
            f"RaySystemError({kind.__name__})", (RaySystemError, kind), {"__doc__": kind.__doc__}
        )
    return _as(made, error)


def unplaced(error: errors.PlacementError) -> ActorUnschedulableError:
    """Return what Ray calls it where there is no place for an actor."""
    return (
        error
        if isinstance(error, ActorUnschedulableError)
        else cast(ActorUnschedulableError, _as(ActorUnschedulableError, error))
    )


def _as(kind: type[RayError], error: errors.RpcError) -> RayError:
    """Return the same error, as an instance of a subclass of its class."""
    _, seed, state = exceptions.parts(error)
    made: Any = exceptions.assemble(kind, seed, state)
    made.__cause__ = error.__cause__
    found: RayError = made
    return found


def _task_error(error: errors.RemoteError, cause: BaseException) -> errors.RpcError:
    if isinstance(cause, RayTaskError):  # of a task that this one has called, and that could not be mixed
        return _rebuild_task_error(
            str(cause.args[0]), cause.type_name, error.traceback, cause.cause, cause.worker
        )
    if isinstance(cause, errors.RpcError) and not isinstance(cause, (RayError, errors.RemoteError)):
        return in_rays_words(cause)  # it came on from the process that the reference has come from
    # Of the class Exception it is already.
    if cause is not error and not isinstance(cause, RayError) and type(cause) is not Exception:
        made = exceptions.raised_as(error, RayTaskError)
        if isinstance(made, RayTaskError):
            return made
    # An error of Ray's own that the task ran into is no such error of the task's caller.
    found = None if cause is error else cause
    text, name = exceptions.traceback_of(error), error.type_name
    return _rebuild_task_error(say(error) or name, name, text, found, error.worker)
