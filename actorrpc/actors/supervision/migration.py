"""Migration: when a worker leaves, its actors with ``checkpoint()`` and ``restore()`` move to other workers with their state.

The supervisor in each worker moves the actors that it supervises. An actor finishes the calls in its mailbox before it moves. Its
old worker refuses later calls, whose callers then ask the supervisor where the actor lives: handles stay valid.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from actorrpc.actors.context import current
from actorrpc.actors.host.checkpoints import LAST
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.agent.executor import Deferred
from actorrpc.futures import Future, collect_all
from actorrpc.wire.identity import WorkerKey

if TYPE_CHECKING:
    from actorrpc.actors.supervision.record import ActorRecord, Incarnation
    from actorrpc.actors.supervision.supervisor import Supervisor

__all__ = ["hand_over"]


def hand_over(rank: int, incarnation: str, why: str) -> Any:
    """Move the actors that this process supervises, and that live on a worker, to other workers. Answers with their number.

    Actors that are being made, that have no ``checkpoint()``, or that are in a supervision group, stay; their later death errors
    contain ``why``. The answer is sent when all moving actors have ended on the worker, and their next incarnations were ordered.
    Called by RPC on each worker.
    """
    found = current()
    if found is None:
        return 0
    supervisor: Supervisor = found.supervisor
    key = WorkerKey(rank, incarnation)
    elsewhere = None if found.spawner is not None else "turn"
    over: list[Future[None]] = []
    leaving: list[tuple[ActorRecord, Incarnation]] = []
    with supervisor.lock:
        for actor, life in supervisor.living_on(key):
            if actor.phase != "alive" or not actor.descriptor.info.has_checkpoint or actor.family is not None:
                life.drained = why
                continue
            life.moving = True
            if isinstance(actor.place, WorkerKey):
                actor.place = elsewhere
            leaving.append((actor, life))
    for actor, life in leaving:
        moved: Future[None] = Future()
        ended = supervisor.end_there(life, "move", why)
        ended.add_done_callback(partial(_moved, supervisor, actor, life, why, moved))
        over.append(moved)
    if not over:
        return 0
    return Deferred(collect_all(over).then(lambda _: len(over)))


def _moved(
    supervisor: Supervisor,
    actor: ActorRecord,
    life: Incarnation,
    why: str,
    moved: Future[None],
    done: Future[Any],
) -> None:
    done.acknowledge()
    state = done.value_or_none
    if isinstance(state, Snapshot):
        with supervisor.lock:
            if actor.life is life:
                actor.keep(actor.epoch, LAST, state)
    supervisor.ended(actor, life, why)
    moved.set_result(None)
