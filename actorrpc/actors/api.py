"""The functions of ``actorrpc`` for actors: make, find, end, watch and list them; and the runtime context inside of an actor.

Importing this module adds the actor layer to every group that is joined from then on (:func:`start`).

``remote`` is torch's function and Ray's decorator under one name: the first argument decides which. Functions that take a handle
are also methods of the handle, unless the actor's class has a method of that name. All functions are thread-safe.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NoReturn, ParamSpec, Protocol, TypeVar, overload

from actorrpc import _time
from actorrpc._exceptions import say
from actorrpc.actors.client.actor_class import ActorClass, options_of
from actorrpc.actors.client.handle import ActorHandle, call, is_alive, kill, monitor, ready
from actorrpc.actors.client.route import Routes
from actorrpc.actors.client.supervisor_client import call_quietly, peer_of
from actorrpc.actors.collectives import member
from actorrpc.actors.collectives.rendezvous import Generations
from actorrpc.actors.context import Runtime, runtime
from actorrpc.actors.host.registry import ActorRegistry, HostedActorState
from actorrpc.actors.library.tasks import RemoteFunction, RunnerPools, TaskFuture
from actorrpc.actors.refs.host_copies import HostCopies
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.offers import Offers
from actorrpc.actors.spec.actor_spec import ActorExit, ActorState
from actorrpc.actors.spec.class_info import TASKS
from actorrpc.actors.spec.options import ActorOptions, TaskOptions
from actorrpc.actors.streams.consumer import ObjectRefGenerator
from actorrpc.actors.streams.producer import Streams
from actorrpc.actors.supervision.names import Names
from actorrpc.actors.supervision.supervisor import Supervisor
from actorrpc.agent.calls import CURRENT
from actorrpc.agent.context import Worker
from actorrpc.errors import ConfigError, RpcError
from actorrpc.futures import mute
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
    "start",
]

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")
_ANSWER_S: Final = 30.0  # how long other workers may take to answer


# -- finding -------------------------------------------------------------------------------------------------


def get_actor(name: str, namespace: str | None = None) -> ActorHandle[Any]:
    """Return a weak handle to the actor of this name: the handle does not keep the actor alive.

    Args:
        namespace: the namespace of the name; by default that of this process.

    Raises:
        UnknownActorError: there is no such actor; the message lists similar names. Also a ValueError.
        PeerDiedError, RpcTimeoutError: rank 0, which has the table of names, does not answer.
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
    """An actor as returned by :func:`list_actors`.

    Attributes:
        actor_id: the actor's id, which stays the same after restarts.
        state: ``"PENDING"``, ``"ALIVE"``, ``"RESTARTING"`` or ``"DEAD"``.
        worker: the worker where it lives, or has lived before its restart; empty if it is dead.
        pid: its process; 0 if it does not live now.
        pending_calls, running_calls: calls that wait in its mailbox, and calls that are being executed; -1 if it lives nowhere,
            or its worker did not answer.
        restarts: how often it was restarted.
        death_cause: the reason of its death, or of its last restart; empty if it has never died.
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
    """Return all actors of the group, including actors that died recently, ordered by id.

    Actors that are only known to workers that do not answer within ``timeout`` seconds are missing.
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
    """Return the actors that this worker supervises, and the actors that live on it. Called by RPC."""
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
    """Cancel a call: it ends with CancelledError. Return False if the call had already ended.

    A waiting call is not started, a coroutine is cancelled, a generator is closed. A method that runs in a thread is
    interrupted between two steps of Python, but not inside C code; its actor lives on. A plain method that runs on an event loop
    continues.

    A coroutine may catch asyncio.CancelledError and make calls to clean up, for up to 5 s. Its call ends when the coroutine
    has ended, or after that time. All other calls end at once.

    Args:
        ref: the ObjectRef or stream that ``remote(...)`` returned, or a Future; or a list: False if all calls had already ended.
        force: for a task: end the process that executes it if the task cannot be interrupted. Other tasks in that process are
            repeated according to their ``max_retries``. Not for actors: use ``kill()``.
        recursive: must be True: the calls that the call waits for are cancelled, too.

    Raises:
        TypeError: ``ref`` cannot be cancelled.
        ConfigError: ``force`` for a call to an actor, or ``recursive=False``.
    """
    if not recursive:
        raise ConfigError(
            "recursive=False is not possible: a call that is cancelled also cancels the calls that it waits for"
        )
    if isinstance(ref, list):
        done = [cancel(each, force=force) for each in ref]
        return any(done)
    future = ref._future if isinstance(ref, ObjectRef) else None
    if force and not isinstance(future, TaskFuture):
        raise ConfigError(
            "force=True is for tasks that this process started; an actor is ended with kill(handle)"
        )
    stop = getattr(ref, "cancel", None) if not isinstance(ref, (ActorHandle, type)) else None
    if stop is None:
        hint = "; an actor is ended with kill(handle)" if isinstance(ref, ActorHandle) else ""
        raise TypeError(f"cancel() takes what remote(...) returned, not a {type(ref).__name__}{hint}")
    ended = future.kill() if force and isinstance(future, TaskFuture) else None
    stopped = bool(stop())
    if ended is not None:
        ended.wait(_ANSWER_S)
    return stopped


def exit_actor() -> NoReturn:
    """End the actor that executes this code, for good. All calls of the actor that have not ended fail with ActorDiedError.

    The actor's ``on_stop`` runs. Raises a BaseException; do not catch it. May also be called in a task that a method has started.

    Raises:
        RuntimeError: this is not code of an actor.
    """
    execution = CURRENT.get()
    if execution is None or execution.actor is None:
        raise RuntimeError("exit_actor() was called outside of an actor: use kill(handle) to end an actor")
    if execution.actor.spec is not None and execution.actor.spec.info.name == TASKS:
        raise RuntimeError(
            f"exit_actor() was called in {execution.label}, which is not an actor: a task ends by returning"
        )
    why = "exit_actor() was called in it"
    execution.actor.on_exit_actor(execution, why)
    raise ActorExit(why)


# -- inside of an actor ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeContext:
    """Where some code runs, and which worker has called it.

    Attributes:
        worker: this worker.
        namespace: the default namespace of names here.
        actor_id: the actor that executes this code; None outside of actors.
        actor_name: that actor's name, if it has one.
        caller: the worker that made the call that this thread executes; None outside of calls.
        was_current_actor_reconstructed: whether the actor was restarted.
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
    # Tasks are executed by an internal actor (TaskRunner), which is hidden from their code.
    return None if spec is None or spec.info.name == TASKS else spec


def get_runtime_context() -> RuntimeContext:
    """Return the worker and actor that execute this code, and the worker of the caller.

    Raises:
        NotInitializedError: this process is not in a group.
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
    """Return a weak handle of the actor that executes this code: an actor does not keep itself alive.

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
    """A class that is passed as an argument, as type checkers see it: a callable with bases."""

    __bases__: tuple[type, ...]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C_co: ...


# The overloads for classes come first: type checkers use the first that fits, and a class also fits the overloads for functions.


class _Remote(Protocol):
    """The return type of ``@remote(...)``."""

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
    """Make an actor class of a class, make a task of a function, or call a function on a worker.

    ``@remote`` above a class, or ``remote(Cls)``, returns an :class:`~actorrpc.actors.client.actor_class.ActorClass`:
    ``Cls.remote(...)`` makes an actor. Above a function, it returns a :class:`~actorrpc.actors.library.tasks.RemoteFunction`:
    ``f.remote(...)`` runs the function on another worker. ``@remote(num_cpus=2, ...)`` sets options: see
    :class:`~actorrpc.actors.spec.options.ActorOptions` and :class:`~actorrpc.actors.spec.options.TaskOptions`.

    ``remote(to, func, args=(), kwargs=None, timeout=...)`` with a worker's name, rank or WorkerInfo first is
    ``torch.distributed.rpc.remote``: it calls the function there and returns an RRef to its result at once.

    Raises:
        ConfigError: an option is unknown, or its value is wrong; the message lists valid options.
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
            f"remote() makes actors of classes and tasks of functions, and {what} is neither. If {what} is the name or rank of "
            f"a worker, also give the function to call there, as in torch: remote({what}, func)"
        )
    raise TypeError(f"@remote is for classes and functions, not for {what}")


def _check_either(options: dict[str, Any]) -> None:
    """Raise for options that neither classes nor functions have."""
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


# -- the actor layer of a worker ---------------------------------------------------------------------------------------


def start(worker: Worker) -> Callable[[bool], None]:
    """Start the actor layer of a worker; return the function that ends the layer, with an argument ``graceful``."""
    agent = worker.agent
    made = Runtime(agent, worker.references)
    made.names = Names(made, api.namespace())
    made.streams = Streams(agent)
    made.registry = ActorRegistry(made)
    made.streams.wake = made.registry.deadlocks.wake
    made.routes = Routes(made)
    made.host_copies = HostCopies(worker.references)
    made.offers = Offers(agent)
    made.generations = Generations(agent, member.cut)
    made.members = member.Members(agent, worker.references.me)
    made.supervisor = Supervisor(made)
    made.task_pools = RunnerPools(made)
    worker.actors = made

    def shut_down(graceful: bool) -> None:
        mute(True)
        try:
            made.generations.close_all()
            made.members.close()
            made.supervisor.close(graceful, agent.leave_by - _time.now())
            made.registry.close(graceful, agent.leave_by - _time.now())
            made.routes.close()
            made.streams.close()
            made.offers.close()
        finally:
            worker.actors = None

    return shut_down


api.on_start.append(start)
