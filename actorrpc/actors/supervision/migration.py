"""Handing over: actors with ``checkpoint()`` and ``restore()`` go from a worker that is to leave to others, with their state.

Each worker's supervisor sees to its own actors. Calls that an actor has taken are finished before it goes; those that come
meanwhile are turned away by the worker, and their callers ask where it is now: handles go on working.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from actorrpc.actors.context import current
from actorrpc.actors.host.checkpoints import LAST
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.agent.executor import Later
from actorrpc.futures import Future, collect_all
from actorrpc.wire.identity import WorkerKey

if TYPE_CHECKING:
    from actorrpc.actors.supervision.record import ActorRecord
    from actorrpc.actors.supervision.supervisor import Supervisor

__all__ = ["hand_over"]


def hand_over(rank: int, incarnation: str, why: str) -> Any:
    """Have the actors that this process looks after, and that live in a worker, move to others. Answers with their number.

    Those that do not move (without ``checkpoint()``, or in a supervision group) stay; their deaths will say ``why``. The
    answer comes when each of the others has ended there, and its next incarnation is on the way. Run on each worker, by RPC.
    """
    found = current()
    if found is None:
        return 0
    supervisor: Supervisor = found.supervisor
    key = WorkerKey(rank, incarnation)
    elsewhere = None if found.spawner is not None else "turn"
    leaving: list[tuple[ActorRecord, int]] = []
    with supervisor.lock:
        for actor in list(supervisor._actors.values()):
            if actor.worker != key:
                continue
            if actor.phase != "alive" or not actor.card.info.has_checkpoint or actor.family is not None:
                actor.drained = why
                continue
            actor.moving = True
            if isinstance(actor.place, WorkerKey):
                actor.place = elsewhere
            leaving.append((actor, actor.instance_id))
    over = []
    for actor, instance_id in leaving:
        moved: Future[None] = Future()
        ended = supervisor.end_there(actor, instance_id, "move", why)
        ended.add_done_callback(partial(_moved, supervisor, actor, instance_id, why, moved))
        over.append(moved)
    if not over:
        return 0
    return Later(collect_all(over).then(lambda _: len(over)))


def _moved(
    supervisor: Supervisor,
    actor: ActorRecord,
    instance_id: int,
    why: str,
    moved: Future[None],
    done: Future[Any],
) -> None:
    done.acknowledge()
    state = done.value_or_none
    if isinstance(state, Snapshot):
        with supervisor.lock:
            if actor.instance_id == instance_id:
                actor.keep(actor.epoch, LAST, state)
    supervisor.ended(actor, instance_id, why)
    moved.set_result(None)
