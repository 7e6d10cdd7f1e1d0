"""``ray.exceptions``: Ray's error classes, each a subclass of the error that actorrpc raises for the same reason.

``except ray.exceptions.RayActorError`` works as on Ray, and ``except actorrpc.ActorDiedError`` works, too. When a result is
read, :func:`in_rays_words` converts actorrpc's error into Ray's: the rest of actorrpc does not use Ray's names.

The classes that ``_unraised`` makes are never raised: they exist only for ``except`` clauses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from actorrpc import errors
from actorrpc._exceptions import say
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
    "rays_words",
    "rays_words_of_actor",
]


class RayError(errors.RpcError):
    """Base of Ray's errors. The default message of an error is the docstring of its class."""

    def __init__(self, *args: Any, **known: Any) -> None:
        message = args or ((type(self).__doc__ or type(self).__name__).partition("\n")[0],)
        super().__init__(*message, **known)


class RayTaskError(RayError, errors.RemoteError):
    """A task or a method raised an exception.

    The error is also an instance of the user's exception class, if the classes can be combined. ``cause`` is that exception.

    Attributes:
        function_name: the name of the function that raised, if known.
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
        """The remote traceback, as text."""
        return exceptions.traceback_of(self) or str(self.traceback or "")

    def as_instanceof_cause(self) -> BaseException:
        """Return this error: if the two classes could be combined, it is an instance of the user's class already."""
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


class WorkerCrashedError(RayError, errors.PeerDiedError):
    """The process that executed the task ended."""


class RayActorError(RayError, errors.ActorError):
    """The actor is dead, or cannot be reached now."""

    @property
    def actor_init_failed(self) -> bool:
        """Whether the actor's constructor raised."""
        return self.cause is not None and (
            isinstance(self.cause, errors.RemoteError) or not isinstance(self.cause, errors.RpcError)
        )

    @property
    def error_msg(self) -> str:
        """The message."""
        return str(self)


class ActorDiedError(RayActorError, errors.ActorDiedError):
    """The actor is dead and is not restarted."""


class ActorUnavailableError(RayActorError, errors.ActorUnavailableError):
    """The actor cannot be reached now, but may be restarted."""


class ActorAlreadyExistsError(RayError, errors.NameTakenError):
    """There is an actor of this name in the namespace already."""


class RaySystemError(RayError):
    """An error of actorrpc for which Ray has no class. The error is also an instance of its class in actorrpc."""


class ObjectStoreFullError(RayError, errors.ObjectStoreFullError):
    """There is no room for a large object in the memory that the processes of this host share."""


class ObjectLostError(RayError, errors.PeerDiedError):
    """A result is lost: the process that kept it has ended."""


class OwnerDiedError(ObjectLostError):
    """A result is lost with the process that made it."""


class GetTimeoutError(RayError, errors.RpcTimeoutError):
    """A result was not ready in time; the call is not cancelled."""


class RuntimeEnvSetupError(RayError, errors.ConfigError):
    """A runtime_env is not supported: the message says what to do."""


class TaskPlacementGroupRemoved(RayError, errors.PlacementError):
    """The task's placement group has been removed."""


class ActorPlacementGroupRemoved(RayError, errors.PlacementError):
    """The actor's placement group has been removed."""


class PendingCallsLimitExceeded(RayError, errors.PendingCallsLimitExceeded):
    """As many calls wait for the actor as max_pending_calls allows; this call was not made."""


class TaskUnschedulableError(RayError, errors.PlacementError):
    """No node can run the task."""


class ActorUnschedulableError(RayError, errors.UnplacedActorError):
    """No node can run the actor."""


class AuthenticationError(RayError, errors.AuthenticationError):
    """The two sides do not share a key."""


def _unraised(name: str, meaning: str, *bases: type[BaseException]) -> type[RayError]:
    """Make an error class that actorrpc never raises, only for ``except`` clauses."""
    made = type(
        name, bases or (RayError,), {"__doc__": f"{meaning} Nothing raises it here.", "__module__": __name__}
    )
    return cast(type[RayError], made)


_LOST: Final = (ObjectLostError,)
_LIMIT: Final = (RayError, errors.LimitError)
_DIED: Final = (RayError, errors.PeerDiedError)
AsyncioActorExit = _unraised("AsyncioActorExit", "Ends an async actor; exit_actor() raises another error.")
CrossLanguageError = _unraised("CrossLanguageError", "An error of another language.")
LocalRayletDiedError = _unraised("LocalRayletDiedError", "The raylet died.")
NodeDiedError = _unraised(
    "NodeDiedError", "A node died; here, each of its actors and tasks has another error.", *_DIED
)
ObjectFetchTimedOutError = _unraised(
    "ObjectFetchTimedOutError", "An object could not be fetched in time.", *_LOST
)
ObjectFreedError = _unraised("ObjectFreedError", "An object was freed by the program.", *_LOST)
ObjectReconstructionFailedError = _unraised(
    "ObjectReconstructionFailedError", "A lost object could not be computed again.", *_LOST
)
ObjectReconstructionFailedLineageEvictedError = _unraised(
    "ObjectReconstructionFailedLineageEvictedError",
    "A lost object could not be computed again, because its call is not recorded any more.",
    ObjectReconstructionFailedError,
)
ObjectReconstructionFailedMaxAttemptsExceededError = _unraised(
    "ObjectReconstructionFailedMaxAttemptsExceededError",
    "A lost object was computed again too often.",
    ObjectReconstructionFailedError,
)
ObjectRefStreamEndOfStreamError = _unraised(
    "ObjectRefStreamEndOfStreamError", "A stream has ended; here, StopIteration is raised."
)
OutOfDiskError = _unraised("OutOfDiskError", "The disk is full; here, an ObjectStoreFullError.", *_LIMIT)
OutOfMemoryError = _unraised(
    "OutOfMemoryError", "A node ran out of memory; here, the process crashes.", *_LIMIT
)
PlasmaObjectNotAvailable = _unraised("PlasmaObjectNotAvailable", "An object is not in the object store.")
RayChannelError = _unraised("RayChannelError", "A channel of a compiled graph failed.")
RayChannelTimeoutError = _unraised(
    "RayChannelTimeoutError",
    "A channel of a compiled graph was too slow.",
    RayChannelError,
    errors.RpcTimeoutError,
)
ReferenceCountingAssertionError = _unraised(
    "ReferenceCountingAssertionError", "An object was deleted too early.", ObjectLostError, AssertionError
)
RpcError = _unraised("RpcError", "A call between Ray's own processes failed.")
UnserializableException = _unraised(
    "UnserializableException", "An exception cannot be pickled; here, a RayTaskError is raised."
)
UserCodeException = _unraised("UserCodeException", "User code raised; here, a RayTaskError.")


# (actorrpc's class, Ray's class). The first pair with a class of the error is used, so subclasses come before their bases.
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
# Errors of the program, for which Ray has no classes. These errors are not converted.
_PLAIN: Final = (
    errors.SerializationError,
    errors.ConfigError,
    errors.UnknownActorError,
    errors.NotInitializedError,
)
_others: dict[type[errors.RpcError], type[RayError]] = {}


def in_rays_words(error: errors.RpcError) -> errors.RpcError:
    """Return Ray's error in place of ``error``; ``error`` itself if its class is Ray's already, or in ``_PLAIN``."""
    if isinstance(error, errors.RemoteError):
        cause = exceptions.original(error)
        is_told = isinstance(error, RayTaskError) and (cause is error or not isinstance(cause, RayError))
        return error if is_told else _task_error(error, cause)
    if isinstance(error, RayError):
        return error
    if isinstance(error, errors.PeerDiedError):
        # With such a cause, the process that kept a result has ended; otherwise, the process of a task has ended.
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


def _of_actor(error: errors.RpcError) -> errors.RpcError:
    """Return the error that Ray would raise in place of actorrpc's when an actor cannot be created."""
    if isinstance(error, errors.PlacementError) and not isinstance(error, RayError):
        return _as(ActorUnschedulableError, error)
    return in_rays_words(error)


class _RaysWords:
    """A ``with`` block that raises Ray's errors instead of actorrpc's; ``words`` converts them."""

    __slots__ = ("_words",)

    def __init__(self, words: Callable[[errors.RpcError], errors.RpcError]) -> None:
        self._words = words

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, caught: BaseException | None, _traceback: object) -> None:
        if not isinstance(caught, errors.RpcError):
            return
        error = self._words(caught)
        if error is not caught:
            try:
                raise error
            finally:
                error.__context__ = None  # tracebacks must not show actorrpc's error, too
                del caught, error


rays_words: Final = _RaysWords(in_rays_words)
rays_words_of_actor: Final = _RaysWords(_of_actor)


def _as(kind: type[RayError], error: errors.RpcError) -> RayError:
    """Return a copy of an error as an instance of ``kind``, Ray's subclass of the error's class."""
    _, seed, state = exceptions.parts(error)
    made: Any = exceptions.assemble(kind, seed, state)
    made.__cause__ = error.__cause__
    found: RayError = made
    return found


def _task_error(error: errors.RemoteError, cause: BaseException) -> errors.RpcError:
    # The task has raised the RayTaskError of a task that it had called. Such an error is sent as a RayTaskError only if its class
    # is not a combination with the class of the user's exception.
    if isinstance(cause, RayTaskError):
        return _rebuild_task_error(
            str(cause.args[0]), cause.type_name, error.traceback, cause.cause, cause.worker
        )
    if isinstance(cause, errors.RpcError) and not isinstance(cause, (RayError, errors.RemoteError)):
        return in_rays_words(cause)  # the error occurred in the process that sent the ObjectRef
    # For a plain Exception no class is combined, because every RayTaskError is an Exception.
    if cause is not error and not isinstance(cause, RayError) and type(cause) is not Exception:
        made = exceptions.raised_as(error, RayTaskError)
        if isinstance(made, RayTaskError):
            return made
    # A Ray error that was raised inside of the task must not look like an error of the call of this task.
    found = None if cause is error else cause
    text, name = exceptions.traceback_of(error), error.type_name
    return _rebuild_task_error(say(error) or name, name, text, found, error.worker)
