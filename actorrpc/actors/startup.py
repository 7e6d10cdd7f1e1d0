"""Wiring: puts the actor layer on top of an agent when the process joins a group, and takes it off again."""

from __future__ import annotations

import os
from collections.abc import Callable

from actorrpc import _time
from actorrpc.actors.client.route import Routes
from actorrpc.actors.collectives import member
from actorrpc.actors.collectives.rendezvous import Generations
from actorrpc.actors.context import Runtime, set_runtime
from actorrpc.actors.host.registry import ActorRegistry
from actorrpc.actors.library import tasks
from actorrpc.actors.streams.producer import Streams
from actorrpc.actors.supervision.names import Names
from actorrpc.actors.supervision.supervisor import Supervisor
from actorrpc.agent.agent import Agent
from actorrpc.futures import hush
from actorrpc.rpc import api
from actorrpc.rpc.refcount.runtime import References

__all__ = ["start"]


def start(agent: Agent, references: References) -> Callable[[bool], None]:
    """Bring the actor layer into force in this process; returns what ends it."""
    made = Runtime(agent, references)
    made.names = Names(made, api.namespace())
    made.streams = Streams(agent)
    made.residents = ActorRegistry(made)
    made.streams.poke = made.residents.deadlocks.poke
    made.routes = Routes(made)
    made.meetings = Generations(made, member.cut)
    made.members = member.Members(made)
    made.supervisor = Supervisor(made)
    set_runtime(made)

    def end(graceful: bool) -> None:
        hush(True)
        try:
            tasks.forget()
            made.meetings.end()
            made.members.close()
            made.supervisor.close(graceful, agent.leave_by - _time.now())
            made.residents.close(graceful, agent.leave_by - _time.now())
            made.routes.close()
            made.streams.close()
        finally:
            set_runtime(None)

    return end


api.on_start.append(start)
# A fork of a worker has none of its parent's actors.
os.register_at_fork(after_in_child=lambda: set_runtime(None))
