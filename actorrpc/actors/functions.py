"""Functions on actors: finding, ending, watching and listing them, and what runs inside of one.

Those of handles are also methods of a handle, as far as its class has none of the same name. All are thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

from actorrpc import moments
from actorrpc.actors.asking import call_quietly, gather_states, peer_of
from actorrpc.actors.exits import ActorExit
from actorrpc.actors.fates import ActorState
from actorrpc.actors.handle import ActorHandle, as_handle, call, kill, offer, route_to
from actorrpc.actors.methods import TASKS, method
from actorrpc.actors.object_ref import ObjectRef
from actorrpc.actors.residents import ResidentState, states
from actorrpc.actors.runtime import runtime
from actorrpc.actors.tasks import TaskFuture
from actorrpc.core.calls import CURRENT
from actorrpc.core.execution import named
from actorrpc.core.identity import WorkerInfo
from actorrpc.errors import ActorDiedError, ConfigError, RpcError, RpcTimeoutError
from actorrpc.futures import Future
from actorrpc.rpc.fork_messages import WorkerKey

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
    "method",
    "monitor",
    "ready",
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
        raise TypeError(f"get_actor() takes the name of an actor, a non-empty str, not {name!r}")
    in_force = runtime()
    card = replace(in_force.names.lookup(name, namespace), anchor=None)
    return ActorHandle(card, in_force.routes.of(card))


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
    in_force = runtime()
    until = moments.now() + timeout
    agent = in_force.agent
    asked = []
    for record in agent.members():
        key = WorkerKey(record.rank, record.incarnation)
        asked.append(call_quietly(agent, partial(peer_of, agent, key), states, (), timeout))
    known: list[ActorState] = _answer(gather_states(in_force), until)
    lives: dict[int, ResidentState] = {}
    for future in asked:
        lives.update((each.resident_id, each) for each in _answer(future, until))
    rows = [_row(each, lives.get(each.resident_id)) for each in known if each.class_name != TASKS]
    return sorted(rows, key=lambda row: row.actor_id)


def _answer(future: Future[Any], until: float) -> list[Any]:
    try:
        return list(future.wait(max(0.0, until - moments.now())))
    except RpcError:  # gone, or too slow
        return []


_SHOWN: Final = {"PENDING_CREATION": "PENDING", "ENDING": "ALIVE"}


def _row(known: ActorState, life: ResidentState | None) -> ActorInfo:
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
            f"exit_actor() was called in {named(execution)}, and not in an actor: a task ends by returning"
        )
    why = "exit_actor() was called in it"
    execution.actor.leave(execution, why)
    raise ActorExit(why)


# -- watching ------------------------------------------------------------------------------------------------


def ready(actor: ActorHandle[Any]) -> ObjectRef[None]:
    """Return an ObjectRef that completes, with None, when the actor has been made and can serve.

    It fails with ActorDiedError if that is not to be; with what the constructor raised as its cause.
    """
    handle = as_handle(actor, "ready()")
    located: Future[Any] = route_to(actor, "ready()").located()

    def nothing(done: Future[Any]) -> None:
        done.value()

    return ObjectRef(located.then(nothing), label=f"ready({handle!r})")


def is_alive(actor: ActorHandle[Any], timeout: float = 10.0) -> bool:
    """Say whether the actor lives, or is being made or restarted. Never waits behind its work.

    Args:
        timeout: seconds for the worker that looks after it; it counts as dead if that does not answer.
    """
    asked: Future[bool] = route_to(actor, "is_alive()").alive()
    try:
        return asked.wait(timeout)
    except RpcTimeoutError:
        return False


def monitor(
    actor: ActorHandle[Any], callback: Callable[[ActorDiedError], Any] | None = None
) -> Future[ActorDiedError]:
    """Watch an actor: the future completes, once, when it is dead for good; its value says why.

    Does not keep the actor alive. Restarts do not count.

    Args:
        callback: called with the ActorDiedError then, on a worker thread.

    Returns:
        A Future whose value is the ActorDiedError.
    """
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be callable, not a {type(callback).__name__}")
    watched: Future[ActorDiedError] = route_to(actor, "monitor()").watch()
    if callback is not None:
        tell = callback
        watched.add_done_callback(lambda done: tell(done.value()))
    return watched


# -- running something inside ----------------------------------------------------------------------------------


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
    resident = None if execution is None else execution.actor
    spec = None if resident is None else resident.spec
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
        worker=in_force.agent.info,
        namespace=in_force.names.namespace,
        actor_id=None if spec is None else spec.actor_id,
        actor_name=None if spec is None else spec.card.name,
        caller=None if execution is None else execution.peer.info,
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
    return ActorHandle(spec.card, runtime().routes.of(spec.card))


offer("ready", ready)
offer("is_alive", is_alive)
offer("monitor", monitor)
offer("kill", kill)
offer("call", call)
