"""Wiring: puts distributed autograd on top of an agent when the process joins a group, and takes it off again."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Final

from actorrpc.agent.agent import Agent
from actorrpc.agent.context import here
from actorrpc.agent.hooks import NoRecorder
from actorrpc.agent.peers import Peer
from actorrpc.autograd.contexts import Contexts
from actorrpc.autograd.participant import Participant
from actorrpc.autograd.recorder import GraphRecorder
from actorrpc.autograd.transport import NOTICE, AgentTransport, set_participant, unpack_notice
from actorrpc.errors import NotInitializedError
from actorrpc.rpc import api
from actorrpc.rpc.refcount.runtime import References

__all__ = ["contexts", "participant", "start"]

_LOOKS: Final = 4  # so often is a context looked at during its lease

_runtime: tuple[Contexts, Participant] | None = None


def contexts() -> Contexts:
    """Return the autograd contexts of this worker.

    Raises:
        NotInitializedError: RPC is not initialised in this process.
    """
    return _required()[0]


def participant() -> Participant:
    """Return who takes part in backward passes for this worker.

    Raises:
        NotInitializedError: RPC is not initialised in this process.
    """
    return _required()[1]


def _required() -> tuple[Contexts, Participant]:
    found = _runtime
    if found is None:
        if here() is not None:
            raise NotInitializedError(
                "there is no distributed autograd in an in-process cluster: test it with processes (actorrpc.cluster)"
            )
        raise NotInitializedError(
            "distributed autograd needs RPC: call init_rpc() in every worker, or actorrpc.init(), first"
        )
    return found


def start(agent: Agent, references: References) -> Callable[[bool], None]:
    """Bring distributed autograd into force in this process; returns what ends it."""
    global _runtime
    made = Contexts(references.me)
    part = Participant(made, AgentTransport(agent, references))
    lease = agent.settings.context_ttl
    over = False

    def noticed(peer: Peer, body: bytes) -> None:
        notice = unpack_notice(body)
        if part.may_wait(notice):
            agent.submit(partial(part.hear, References.key_of(peer), notice))
        else:
            part.hear(References.key_of(peer), notice)

    def peer_ended(peer: Peer) -> None:
        part.worker_died(References.key_of(peer))

    def look() -> None:
        part.expire(lease)
        look_later()

    def look_later() -> None:
        if not over:
            agent.clock.after(lease / _LOOKS, partial(agent.submit, look))

    def end(_graceful: bool) -> None:
        global _runtime
        nonlocal over
        over = True
        _runtime = None
        set_participant(None)
        agent.recorder = NoRecorder()
        for context in made.all():
            part.release(context.id)

    agent.on_notice[NOTICE] = noticed
    agent.inbox.prompt.add(NOTICE)
    agent.on_peer_end.append(peer_ended)
    agent.recorder = GraphRecorder(made)
    set_participant(part)
    _runtime = made, part
    look_later()
    return end


def _forget() -> None:
    global _runtime
    _runtime = None
    set_participant(None)


api.on_start.append(start)
# A fork of a worker has none of its parent's contexts.
os.register_at_fork(after_in_child=_forget)
