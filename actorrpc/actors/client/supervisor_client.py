"""Queries to the supervisor of an actor, on this worker or another worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from actorrpc.actors.context import current
from actorrpc.agent.executor import Deferred
from actorrpc.agent.peers import Peer
from actorrpc.errors import PeerDiedError, ProtocolError, RemoteError, RpcError, ShutdownError
from actorrpc.flight_recorder import OWN
from actorrpc.futures import Future
from actorrpc.serialization import exceptions
from actorrpc.wire.identity import WorkerKey

if TYPE_CHECKING:
    from actorrpc.actors.context import Runtime
    from actorrpc.actors.refs.snapshot import Snapshot
    from actorrpc.actors.spec.actor_spec import ActorDescriptor
    from actorrpc.actors.spec.class_info import ClassInfo
    from actorrpc.actors.spec.options import ActorOptions
    from actorrpc.agent.agent import Agent

__all__ = [
    "CREATE_S",
    "call_quietly",
    "create_detached",
    "peer_of",
    "query",
    "request_detached",
]

CREATE_S: Final = 60.0  # how long rank 0 may take to record a detached actor
_QUERIES: Final = frozenset({"alive", "kill", "locate", "watch"})


def peer_of(agent: Agent, key: WorkerKey) -> Peer:
    """Return the peer of the worker that ``key`` identifies by its rank and incarnation.

    Raises:
        PeerDiedError: that worker has ended, and a new worker has its rank.
        UnknownWorkerError: no worker has that rank.
    """
    peer = agent.peer(key.rank)
    if peer.record.incarnation != key.incarnation:
        raise PeerDiedError(
            f"worker {key.rank} has ended and another one, {peer.name!r}, has taken its place",
            maybe_executed=False,
            worker=peer.name,
        )
    return peer


def call_quietly(
    agent: Agent,
    peer: Callable[[], Peer],
    function: Any,
    args: tuple[Any, ...],
    timeout: float = 0,
    label: str | None = None,
) -> Future[Any]:
    """Call a function on the worker ``peer()``. If this fails, the future fails. A failure of the future is not logged."""
    future: Future[Any] = Future()
    future.add_done_callback(Future.acknowledge)
    try:
        agent.call(peer(), function, args, {}, timeout, future=future, label=label)
        agent.flush()
    except RpcError as error:
        future.try_fail(error)
    return future


def query(here: Runtime, key: WorkerKey, what: str, *args: Any) -> Future[Any]:
    """Call the supervisor's method ``what`` (``"locate"``, ``"kill"``, ``"watch"`` or ``"alive"``) on the worker ``key``.

    Returns:
        The future of the answer, which fails with PeerDiedError or UnknownWorkerError if that worker has ended.
    """
    if key == here.references.me:
        answer: Future[Any] = getattr(here.supervisor, what)(*args)
        return answer
    agent = here.agent
    return call_quietly(agent, lambda: peer_of(agent, key), _answer, (what, *args), 0, f"{OWN}{what}")


# -- called by RPC on the supervisor's worker -----------------------------------------------------------------


def _supervisor() -> Any:
    """Return the supervisor of this worker, for a query of another worker."""
    found = current()
    if found is None:
        raise ShutdownError(
            "the worker of this actor's supervisor leaves its group, and its actors end with it",
            maybe_executed=False,
        )
    return found.supervisor


def _answer(what: str, *args: Any) -> Deferred:
    if what not in _QUERIES:
        raise ProtocolError(f"supervisors have no query {what!r}")
    return Deferred(getattr(_supervisor(), what)(*args))


def create_detached(
    actor_id: int, cls: Snapshot, arguments: Snapshot | None, info: ClassInfo, options: ActorOptions
) -> ActorDescriptor:
    """Make a detached actor, which rank 0 supervises. Called by RPC on rank 0."""
    descriptor: ActorDescriptor = _supervisor().adopt(actor_id, cls, arguments, info, options)
    return descriptor


def request_detached(
    agent: Agent,
    actor_id: int,
    cls: Snapshot,
    arguments: Snapshot | None,
    info: ClassInfo,
    options: ActorOptions,
) -> ActorDescriptor:
    """Let rank 0 make a detached actor; blocks until rank 0 has recorded the actor.

    Raises:
        RpcError: rank 0 does not answer; or an error of :meth:`Supervisor.create` there.
    """
    try:
        descriptor: ActorDescriptor = agent.call_sync(
            agent.peer(0), create_detached, (actor_id, cls, arguments, info, options), {}, CREATE_S
        )
    except RemoteError as error:
        raise exceptions.original(error) from None
    return descriptor
