"""The functions of ``actorrpc`` for actors: making, finding, ending, watching and listing them, and what runs inside of one.

``remote`` is torch's function and Ray's decorator under one name: the first argument decides. Functions of handles are also
methods of a handle, as far as its class has none of the same name. All are thread-safe.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NoReturn, ParamSpec, Protocol, TypeVar, overload

from actorrpc import _time
from actorrpc._exception_text import say
from actorrpc.actors.client.actor_class import ActorClass, options_of
from actorrpc.actors.client.handle import ActorHandle, call, is_alive, kill, monitor, ready
from actorrpc.actors.client.route import Routes
from actorrpc.actors.client.supervisor_client import call_quietly, peer_of
from actorrpc.actors.context import runtime
from actorrpc.actors.host.registry import HostedActorState
from actorrpc.actors.library.tasks import RemoteFunction, TaskFuture
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.spec.actor_spec import ActorExit
from actorrpc.actors.spec.class_info import TASKS
from actorrpc.actors.spec.death_report import ActorState
from actorrpc.actors.spec.options import ActorOptions, TaskOptions
from actorrpc.actors.streams.consumer import ObjectRefGenerator
from actorrpc.actors.supervision.names import Names
from actorrpc.agent.calls import CURRENT
from actorrpc.errors import ConfigError, RpcError
from actorrpc.rpc import api
from actorrpc.rpc.options import UNSET_RPC_TIMEOUT
from actorrpc.rpc.rref import RRef
from actorrpc.validation import wait_limit
from actorrpc.wire.identity import WorkerInfo, WorkerKey

__all__ = [
    "ActorInfo",
    "RuntimeContext",
    "call",
    "cancel",
    "current_actor",
    "exit_actor",
    "get_actor",
    "get_runtime_context",
    "is_alive",
    "kill",
    "list_actors",
    "monitor",
    "ready",
    "remote",
]

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")
_ASK_S: Final = 30.0  # how long others may take to answer


# -- finding -------------------------------------------------------------------------------------------------


def get_actor(name: str, namespace: str | None = None) -> ActorHandle[Any]:
    """Return a handle to the actor of that name. It is weak: it does not keep the actor alive.

    Args:
        namespace: default that of this process.

    Raises:
        UnknownActorError: there is none; the message lists names that look alike. Also a ValueError.
        PeerDiedError, RpcTimeoutError: rank 0, which knows the names, does not answer.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"get_actor() takes the name of an actor, a non-empty str, not {say(name, repr)}")
    in_force = runtime()
    names: Names = in_force.names
    routes: Routes = in_force.routes
    descriptor = replace(names.lookup(name, namespace), anchor=None)
    return ActorHandle(descriptor, routes.of(descriptor))


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorInfo:
    """An actor, as :func:`list_actors` shows it.

    Attributes:
        actor_id: the actor's, for ever.
        state: ``"PENDING"``, ``"ALIVE"``, ``"RESTARTING"`` or ``"DEAD"``.
        worker, pid: where it lives; empty and 0 where it does not.
        pending_calls, running_calls: calls that wait in its mailbox, and that are being executed; -1 where its worker
            did not say.
        restarts: how often it has been made again.
        death_cause: why it is dead, or how it died last; empty if it has not.
    """

    actor_id: int
    class_name: str
    name: str | None
    namespace: str
    state: str
    worker: str
    pid: int
    pending_calls: int
    running_calls: int
    restarts: int
    death_cause: str


def list_actors(timeout: float = 10.0) -> list[ActorInfo]:
    """Return all actors of the group, in the order of their ids; those that died lately, too.

    Workers that do not answer within ``timeout`` seconds are left out: what they know is missing.
    """
    until = _time.now() + wait_limit(timeout)
    agent = runtime().agent
    asked = [
        call_quietly(
            agent, partial(peer_of, agent, WorkerKey(record.rank, record.incarnation)), _known, (), timeout
        )
        for record in agent.members()
    ]
    known: list[ActorState] = []
    lives: dict[int, HostedActorState] = {}
    for future in asked:
        try:
            supervised, hosted = future.wait(max(0.0, until - _time.now()))
        except RpcError:  # the worker has ended, or is too slow
            continue
        known += supervised
        lives.update((each.instance_id, each) for each in hosted)
    rows = [_row(each, lives.get(each.instance_id)) for each in known if each.class_name != TASKS]
    return sorted(rows, key=lambda row: row.actor_id)


def _known() -> tuple[list[ActorState], list[HostedActorState]]:
    """Return the actors that this worker supervises, and the actors that live here. Called by RPC."""
    here = runtime()
    return here.supervisor.states(), here.registry.states()


_SHOWN: Final = {"PENDING_CREATION": "PENDING", "ENDING": "ALIVE"}


def _row(known: ActorState, life: HostedActorState | None) -> ActorInfo:
    return ActorInfo(
        actor_id=known.actor_id,
        class_name=known.class_name,
        name=known.name,
        namespace=known.namespace,
        state=_SHOWN.get(known.state, known.state),
        worker=known.worker,
        pid=known.pid,
        pending_calls=-1 if life is None else life.waiting,
        running_calls=-1 if life is None else life.running,
        restarts=known.restarts,
        death_cause=known.death_cause,
    )


# -- ending --------------------------------------------------------------------------------------------------


def cancel(ref: Any, *, force: bool = False, recursive: bool = True) -> bool:
    """Give a call up: it ends with CancelledError; return False if it was over.

    A call that waits is not started, a coroutine is cancelled, a generator is closed. A method that runs on a thread is
    interrupted where Python allows it: between two steps of Python, not in C code, and its actor lives on. One that runs on an
    event loop goes on.

    A coroutine may catch asyncio.CancelledError and make calls to clean up, for 5 s: its call is over when it has ended, or that
    time is over. All other calls are over at once.

    Args:
        ref: what ``remote(...)`` returned: an ObjectRef, or a stream; a Future will do, too.
        force: of a task: end the process that executes it, if it cannot be interrupted. Other tasks that it has are
            made again as their ``max_retries`` says. Not for actors: kill those.
        recursive: must be True: calls that it waits for are cancelled with it.

    Raises:
        TypeError: it is nothing that can be cancelled.
        ConfigError: ``force`` for a call to an actor, or ``recursive=False``.
    """
    if not recursive:
        raise ConfigError(
            "recursive=False is not possible: a call that is cancelled gives up the calls that it waits for"
        )
    if isinstance(ref, list):
        done = [cancel(each, force=force) for each in ref]
        return any(done)
    future = ref._future if isinstance(ref, ObjectRef) else None
    if force and not isinstance(future, TaskFuture):
        raise ConfigError(
            "force=True is for tasks that were started here; an actor is ended with kill(handle)"
        )
    stop = getattr(ref, "cancel", None) if not isinstance(ref, (ActorHandle, type)) else None
    if stop is None:
        hint = "; an actor is ended with kill(handle)" if isinstance(ref, ActorHandle) else ""
        raise TypeError(f"cancel() takes what remote(...) returned, not a {type(ref).__name__}{hint}")
    ended = future.kill() if force and isinstance(future, TaskFuture) else None
    stopped = bool(stop())
    if ended is not None:
        ended.wait(_ASK_S)
    return stopped


def exit_actor() -> NoReturn:
    """End the actor that this is called in, for good: the call that does it fails with ActorDiedError, as do all others.

    Its ``on_stop`` runs. Works by an exception that is no Exception: let it pass. Also from a task that a method has begun.

    Raises:
        RuntimeError: this is not code of an actor.
    """
    execution = CURRENT.get()
    if execution is None or execution.actor is None:
        raise RuntimeError("exit_actor() was called outside of an actor; from there it is kill(handle)")
    if execution.actor.spec is not None and execution.actor.spec.info.name == TASKS:
        raise RuntimeError(
            f"exit_actor() was called in {execution.label}, and not in an actor: a task ends by returning"
        )
    why = "exit_actor() was called in it"
    execution.actor.leave(execution, why)
    raise ActorExit(why)


# -- being inside ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeContext:
    """Where some code runs, and for whom.

    Attributes:
        worker: this worker.
        namespace: where names are looked for here.
        actor_id: the actor that executes this code; None outside of actors.
        actor_name: its name, if it has one.
        caller: the worker that made the call which is being executed; None outside of calls.
        was_current_actor_reconstructed: whether the actor has been restarted.
    """

    worker: WorkerInfo
    namespace: str
    actor_id: int | None
    actor_name: str | None
    caller: WorkerInfo | None
    was_current_actor_reconstructed: bool

    @property
    def current_actor(self) -> ActorHandle[Any]:
        """The handle of the actor that executes this code. Raises as :func:`actorrpc.current_actor`."""
        return current_actor()

    def get_actor_id(self) -> str | None:
        """Return the actor's id as text; None outside of actors."""
        return None if self.actor_id is None else f"{self.actor_id:016x}"

    def get_actor_name(self) -> str | None:
        """Return the actor's name, if it has one."""
        return self.actor_name

    def get_worker_id(self) -> str:
        """Return the name of this worker."""
        return self.worker.name


def _spec() -> Any:
    execution = CURRENT.get()
    hosted = None if execution is None else execution.actor
    spec = None if hosted is None else hosted.spec
    # A task is executed by an actor of ours, of which its code knows nothing.
    return None if spec is None or spec.info.name == TASKS else spec


def get_runtime_context() -> RuntimeContext:
    """Return where this code runs: which worker, which actor, and for whom.

    Raises:
        NotInitializedError: nothing runs in this process.
    """
    in_force = runtime()
    execution, spec = CURRENT.get(), _spec()
    return RuntimeContext(
        worker=in_force.agent.record.info,
        namespace=in_force.names.namespace,
        actor_id=None if spec is None else spec.actor_id,
        actor_name=None if spec is None else spec.descriptor.name,
        caller=None if execution is None else execution.peer.record.info,
        was_current_actor_reconstructed=spec is not None and spec.epoch > 0,
    )


def current_actor() -> ActorHandle[Any]:
    """Return a handle of the actor that executes this code. It is weak: an actor does not keep itself alive.

    Raises:
        RuntimeError: this is not code of an actor.
    """
    spec = _spec()
    if spec is None:
        raise RuntimeError("current_actor() was called outside of an actor")
    routes: Routes = runtime().routes
    return ActorHandle(spec.descriptor, routes.of(spec.descriptor))


T = TypeVar("T")
C_co = TypeVar("C_co", covariant=True)

_TORCH: tuple[str, ...] = ("to", "func", "args", "kwargs", "timeout")


class _Class(Protocol[P, C_co]):
    """A class, as type checkers see one that is passed as an argument: it is called, and has bases."""

    __bases__: tuple[type, ...]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C_co: ...


# The first overload that fits is meant: a class is also a function that returns its instances.


class _Remote(Protocol):
    """What ``@remote(...)`` returns."""

    @overload
    def __call__(self, cls: _Class[P, C], /) -> ActorClass[P, C]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> RemoteFunction[P, ObjectRef[T]]: ...
    @overload
    def __call__(self, function: Callable[P, Iterator[T]], /) -> RemoteFunction[P, ObjectRefGenerator[T]]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, AsyncIterator[T]], /
    ) -> RemoteFunction[P, ObjectRefGenerator[T]]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> RemoteFunction[P, ObjectRef[T]]: ...


@overload
def remote(cls: _Class[P, C], /) -> ActorClass[P, C]: ...  # type: ignore[overload-overlap]
@overload
def remote(function: Callable[P, Coroutine[Any, Any, T]], /) -> RemoteFunction[P, ObjectRef[T]]: ...
@overload
def remote(function: Callable[P, Iterator[T]], /) -> RemoteFunction[P, ObjectRefGenerator[T]]: ...  # type: ignore[overload-overlap]
@overload
def remote(function: Callable[P, AsyncIterator[T]], /) -> RemoteFunction[P, ObjectRefGenerator[T]]: ...  # type: ignore[overload-overlap]
@overload
def remote(function: Callable[P, T], /) -> RemoteFunction[P, ObjectRef[T]]: ...
@overload
def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[T]: ...
@overload
def remote(**options: Any) -> _Remote: ...
def remote(*given: Any, **options: Any) -> Any:
    """Make a class a class of actors, make a function a task, or call a function on a worker.

    ``@remote`` over a class, or ``remote(Cls)``, gives an :class:`~actorrpc.actors.client.actor_class.ActorClass`:
    ``Cls.remote(...)`` makes an actor. Over a function it gives a :class:`~actorrpc.actors.library.tasks.RemoteFunction`:
    ``f.remote(...)`` runs it elsewhere. ``@remote(num_cpus=2, ...)`` also says how: see
    :class:`~actorrpc.actors.spec.options.ActorOptions` and :class:`~actorrpc.actors.spec.options.TaskOptions`.

    ``remote(to, func, args=(), kwargs=None, timeout=...)`` with a worker's name, rank or WorkerInfo first is
    ``torch.distributed.rpc.remote``: it calls the function there and returns an RRef to its result at once.

    Raises:
        ConfigError: an option is unknown, or its value is wrong; the message lists the right ones.
        TypeError: the first argument is neither a class, a function nor a worker.
    """
    if not given:
        if "to" in options:
            return api.remote(**options)
        if not options:
            raise TypeError("remote() needs a class or a function, options, or a worker and a function")
        if "func" in options:
            raise TypeError("remote() is given a function, but no worker to call it on: give to=")
        _check_either(options)
        return lambda made: _decorate(made, options)
    first = given[0]
    if isinstance(first, (type, ActorClass, RemoteFunction)):
        return _decorate(_only(given, options), {})
    if isinstance(first, (str, int, WorkerInfo)) or not callable(first):
        if len(given) == 1 and "func" not in options:
            _not_remote(first, options)
        return api.remote(*given, **options)
    return _decorate(_only(given, options), {})


def _only(given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if len(given) > 1 or options:
        name = getattr(given[0], "__name__", "Cls")
        shown = ", ".join(f"{key}=..." for key in options) or "..."
        raise TypeError(
            f"remote({name}) takes nothing else: options go into remote({shown})({name}), or {name}.options({shown})"
        )
    return given[0]


def _not_remote(first: Any, options: dict[str, Any]) -> None:
    what = say(first, repr)
    if isinstance(first, (str, int, WorkerInfo)) or (options and set(options) <= {*_TORCH}):
        raise TypeError(
            f"remote() makes actors of classes and tasks of functions, and {what} is neither. As torch's remote() it calls a "
            f"function on a worker, whose name or rank {what} would be: then say which one, remote({what}, func)"
        )
    raise TypeError(f"@remote is for classes and functions, not for {what}")


def _check_either(options: dict[str, Any]) -> None:
    """Refuse at once what neither a class nor a function can have."""
    try:
        ActorOptions().merged(**options)
    except ValueError as error:
        try:
            TaskOptions().merged(**options)
        except ValueError:
            raise error from None


def _decorate(made: Any, options: dict[str, Any]) -> Any:
    if isinstance(made, (ActorClass, RemoteFunction)):
        return made.options(**options)
    if isinstance(made, type):
        return ActorClass(made, options_of(made).merged(**options))
    if isinstance(made, (staticmethod, classmethod)) or not callable(made):
        raise TypeError(f"@remote is for classes and functions, not for {say(made, repr)}")
    return RemoteFunction(made, TaskOptions().merged(**options))
