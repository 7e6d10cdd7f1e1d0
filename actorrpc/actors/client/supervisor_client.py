"""Queries to the supervisor of an actor, on this worker or another worker, and the errors of calls after its verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from actorrpc.actors.context import current
from actorrpc.agent.executor import Deferred
from actorrpc.agent.peers import Peer
from actorrpc.errors import (
    ActorDiedError,
    ActorUnavailableError,
    PeerDiedError,
    ProtocolError,
    RemoteError,
    RpcError,
    ShutdownError,
)
from actorrpc.flight_recorder import OWN
from actorrpc.futures import Future
from actorrpc.serialization import exceptions
from actorrpc.wire.identity import WorkerKey

if TYPE_CHECKING:
    from actorrpc.actors.client.call_template import CallTemplate
    from actorrpc.actors.context import Runtime
    from actorrpc.actors.refs.snapshot import Snapshot
    from actorrpc.actors.spec.actor_spec import ActorDescriptor, Restarting
    from actorrpc.actors.spec.class_info import ClassInfo
    from actorrpc.actors.spec.options import ActorOptions
    from actorrpc.agent.agent import Agent

__all__ = [
    "CREATE_S",
    "Fate",
    "call_quietly",
    "create_detached",
    "forgotten",
    "peer_of",
    "query",
    "request_detached",
    "unreachable",
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


# -- the verdicts of the supervisor ---------------------------------------------------------------------------


class Fate:
    """Whether an actor is dead or restarts, as far as this process knows. The lock of the actor's CallQueue guards a Fate.

    Attributes:
        death: the reason why the actor is dead; None if the actor is not known to be dead.
        after: the number of the last incarnation that is known to have ended; -1 before that.
        verdict: the supervisor's answer that it restarts or moves the actor; None before the answer. Kept after the restart.
    """

    __slots__ = ("_actor_id", "_oldest", "_supervisor", "_title", "after", "death", "verdict")

    def __init__(self, descriptor: ActorDescriptor) -> None:
        self._title, self._actor_id, self._supervisor = (
            descriptor.title,
            descriptor.actor_id,
            descriptor.supervisor_name,
        )
        self.death: ActorDiedError | None = None
        self.after = -1
        self.verdict: Restarting | None = None
        self._oldest = ""

    def lost(self, epoch: int, oldest: str) -> None:
        """Record the end of an incarnation; ``oldest`` is the label of this process's first call that was not answered then."""
        self.after, self.verdict, self._oldest = epoch, None, oldest

    @property
    def restarts(self) -> bool:
        """Whether the supervisor has decided to restart the actor. Stays true after the restart."""
        return self.verdict is not None and not self.verdict.moved

    def waits_for(self) -> str:
        """Describe, for messages, the event for which queued calls wait."""
        if self.verdict is not None:
            return f"{self._title} to be restarted ({self.verdict.text})"
        return (
            f"{self._title} to be created"
            if self.after < 0
            else f"the new location of {self._title}, which cannot be reached"
        )

    def died(self, template: CallTemplate | None, maybe_executed: bool | None) -> ActorDiedError:
        """Return a new error for a call to an actor that is dead for good, or, with ``template`` None, for a query about it."""
        death = self.death
        assert death is not None
        if template is None:
            prefix = ""
        elif maybe_executed:
            prefix = f"{template} was not answered, and may have run: "
            if self._oldest and self._oldest != template.label:
                prefix += f"(the oldest call of this process that was not answered is {self._oldest}) "
        else:
            prefix = f"{template} was not executed: "
        return type(death)(
            prefix + str(death.args[0]),
            maybe_executed=maybe_executed,
            worker=death.worker,
            actor=self._title,
            actor_id=death.actor_id,
            method=None if template is None else template.method.name,
            report=death.report,
            cause=death.cause,
        )

    def unavailable(self, template: CallTemplate | None, ran: bool | None, why: str) -> ActorUnavailableError:
        """Return a new error for a call that was not answered because the actor restarts or cannot be reached.

        Args:
            template: the template of the call; None: for a query of the actor's location.
            ran: whether the call may have run; None: unknown.
            why: the state of the actor, for the message.
        """
        verdict = self.verdict
        if verdict is not None:
            why += f": {verdict.text}"
        what = "" if template is None else f"{template} on "
        text = "" if ran is None else "; it may have run" if ran else "; it was not executed"
        return ActorUnavailableError(
            f"{what}{self._title} was not answered{text}, and is not made again: {why}. Call again later, or give "
            "max_task_retries= if it may be made twice",
            maybe_executed=ran,
            actor=self._title,
            actor_id=self._actor_id,
            method=None if template is None else template.method.name,
            report=None if verdict is None else verdict.report,
        )

    def orphaned(self, error: BaseException) -> ActorDiedError:
        """Return the error of an actor whose supervisor's worker has ended, because a supervised actor ends with that worker."""
        return ActorDiedError(
            f"{self._title} is dead, or out of reach for good: worker {self._supervisor!r}, its supervisor, has ended "
            f"({exceptions.original(error)})",
            actor=self._title,
            actor_id=self._actor_id,
            worker=self._supervisor,
        )


def forgotten(actor_id: int, supervisor: str) -> ActorDiedError:
    """Return the error of an actor whose supervisor has no record of it, or has dropped the record."""
    return ActorDiedError(
        f"actor {actor_id:016x} is dead: worker {supervisor!r} no longer has a record of it",
        worker=supervisor,
        actor_id=actor_id,
    )


def unreachable(title: str, actor_id: int, worker: str, supervisor: str) -> ActorUnavailableError:
    """Return the error of a call to an actor that its supervisor can reach, but the caller cannot."""
    return ActorUnavailableError(
        f"{title} lives on worker {worker!r}, which is alive for worker {supervisor!r}, its supervisor",
        worker=worker,
        actor=title,
        actor_id=actor_id,
    )
