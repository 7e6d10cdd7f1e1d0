"""Starts distributed autograd for an agent when the process joins a group, and ends it at shutdown."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from actorrpc.agent.context import Worker, current_worker
from actorrpc.agent.hooks import Recorder
from actorrpc.agent.peers import Peer
from actorrpc.autograd.contexts import Contexts
from actorrpc.autograd.messages import Verdict
from actorrpc.autograd.participant import Participant
from actorrpc.autograd.recorder import GraphRecorder
from actorrpc.autograd.transport import NOTICE, AgentTransport, unpack_notice
from actorrpc.errors import NotInitializedError
from actorrpc.rpc import api

__all__ = ["contexts", "participant", "start"]

_LOOKS: Final = 4  # how many times contexts are checked in the time after which an unused context is released


def contexts() -> Contexts:
    """Return the autograd contexts of this worker.

    Raises:
        NotInitializedError: RPC is not initialised in this process.
    """
    return participant().contexts


def participant() -> Participant:
    """Return this worker's Participant in backward passes.

    Raises:
        NotInitializedError: RPC is not initialised in this process.
    """
    worker = current_worker()
    found: Participant | None = None if worker is None else worker.autograd
    if found is None:
        raise NotInitializedError(
            "distributed autograd needs RPC: call init_rpc() in every worker, or actorrpc.init(), first"
        )
    return found


def start(worker: Worker) -> Callable[[bool], None]:
    """Start distributed autograd of a worker; return the function that ends it at shutdown."""
    agent, references = worker.agent, worker.references
    made = Contexts(references.me)
    part = Participant(made, AgentTransport(agent, references))
    lease = agent.settings.context_ttl
    over = False

    def noticed(peer: Peer, body: bytes) -> None:
        notice = unpack_notice(body)
        if isinstance(notice, Verdict) and part.may_wait(notice):
            agent.submit(partial(part.on_notice, peer.key, notice))
        else:
            part.on_notice(peer.key, notice)

    def peer_ended(peer: Peer) -> None:
        part.worker_died(peer.key)

    def look() -> None:
        part.expire(lease)
        look_later()

    def look_later() -> None:
        if not over:
            agent.clock.after(lease / _LOOKS, partial(agent.submit, look))

    def shut_down(_graceful: bool) -> None:
        nonlocal over
        over = True
        worker.autograd = None
        agent.recorder = Recorder()
        for context in made.all():
            part.release(context.id)

    agent.on_notice[NOTICE] = noticed
    agent.inbox.prompt.add(NOTICE)
    agent.on_peer_end.append(peer_ended)
    agent.recorder = GraphRecorder(made)
    worker.autograd = part
    look_later()
    return shut_down


api.on_start.append(start)
