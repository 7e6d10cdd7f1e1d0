"""Handing over: actors with ``checkpoint()`` and ``restore()`` go from a worker that is to leave to others, with their state.

Each worker's supervisor moves its own actors. An actor finishes the calls in its mailbox before it moves. The worker refuses
later calls, and their callers ask where the actor is now: handles stay valid.
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
    """Have the actors that this process looks after, and that live in a worker, move to others. Answers with their number.

    Actors without ``checkpoint()``, or in a supervision group, stay; their deaths will say ``why``. The
    answer comes when each of the others has ended there, and its next incarnation is on the way. Run on each worker, by RPC.
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
