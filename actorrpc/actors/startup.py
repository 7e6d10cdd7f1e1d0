"""Adds the actor layer to an agent when the process joins a group, and removes it again."""

from __future__ import annotations

from collections.abc import Callable

from actorrpc import _time
from actorrpc.actors.client.route import Routes
from actorrpc.actors.collectives import member
from actorrpc.actors.collectives.rendezvous import Generations
from actorrpc.actors.context import Runtime
from actorrpc.actors.host.registry import ActorRegistry
from actorrpc.actors.library.tasks import RunnerPools
from actorrpc.actors.refs.host_copies import HostCopies
from actorrpc.actors.streams.producer import Streams
from actorrpc.actors.supervision.names import Names
from actorrpc.actors.supervision.supervisor import Supervisor
from actorrpc.agent.context import Worker
from actorrpc.futures import mute
from actorrpc.rpc import api

__all__ = ["start"]


def start(worker: Worker) -> Callable[[bool], None]:
    """Start the actor layer of a worker; return the function that ends the layer, with an argument ``graceful``."""
    agent = worker.agent
    made = Runtime(agent, worker.references)
    made.names = Names(made, api.namespace())
    made.streams = Streams(agent)
    made.registry = ActorRegistry(made)
    made.streams.wake = made.registry.deadlocks.wake
    made.routes = Routes(made)
    made.host_copies = HostCopies(worker.references)
    made.generations = Generations(agent, member.cut)
    made.members = member.Members(agent, worker.references.me)
    made.supervisor = Supervisor(made)
    made.task_pools = RunnerPools(made)
    worker.actors = made

    def shut_down(graceful: bool) -> None:
        mute(True)
        try:
            made.generations.close_all()
            made.members.close()
            made.supervisor.close(graceful, agent.leave_by - _time.now())
            made.registry.close(graceful, agent.leave_by - _time.now())
            made.routes.close()
            made.streams.close()
        finally:
            worker.actors = None

    return shut_down


api.on_start.append(start)
