"""What an actor's worker tells its supervisor: that it has ended by itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from actorrpc.actors.runtime import current
from actorrpc.errors import RpcError
from actorrpc.futures import Future

if TYPE_CHECKING:
    from actorrpc.actors.runtime import Runtime
    from actorrpc.actors.spec import ActorSpec

__all__ = ["send_ended"]

_log = logging.getLogger("actorrpc.actors")


def _ended(actor_id: int, epoch: int, kind: str, text: str) -> None:
    found = current()
    if found is not None:
        found.supervisor.note_ended(actor_id, epoch, kind, text)


def send_ended(runtime: Runtime, spec: ActorSpec, kind: str, text: str) -> None:
    """Tell the supervisor that the actor has ended by itself (``kind``: ``"exit"`` or ``"broken"``); does not wait.

    It has left with what is sent next at latest.
    """
    agent = runtime.agent
    future: Future[None] = Future()

    def over(done: Future[None]) -> None:
        done.acknowledge()  # the supervisor is gone: the actor is about to hear of that

    future.add_done_callback(over)
    try:
        peer = runtime.references.peer_of(spec.card.supervisor)
        agent.call(peer, _ended, (spec.actor_id, spec.epoch, kind, text), {}, 0, future=future)
        agent.flush()
    except RpcError as error:
        _log.info("the supervisor of actor %s cannot be told: %s", spec.card.title, error)
