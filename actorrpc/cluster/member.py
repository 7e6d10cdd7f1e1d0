"""A member: a process that is in a cluster and is not its driver, from the moment that it has a name and a rank to its end.

Forked processes (``child.py``) and those that joined over the network (``joining.py``) are the same from here on. No lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from actorrpc.actors import runtime
from actorrpc.cluster import serving
from actorrpc.cluster.leaving import Leaver, set_leaver
from actorrpc.cluster.remote import RemoteDirectory, RemoteSpawner
from actorrpc.core.agent import Agent
from actorrpc.core.calls import CURRENT
from actorrpc.core.identity import WorkerRecord
from actorrpc.core.peer import Peer
from actorrpc.errors import RpcError
from actorrpc.rpc import api, rref
from actorrpc.rpc.group import Group

__all__ = ["Member", "enter"]

_JOIN_S: Final = 30.0
_LEAVE_S: Final = 4.0


@dataclass(slots=True)
class Member:
    """This process as a member of a cluster.

    Attributes:
        agent: its agent.
        driver: the name of the driver.
        leaver: decides when it ends.
    """

    agent: Agent
    driver: str
    leaver: Leaver
    facts: Mapping[str, Any] = field(default_factory=dict)

    def wait(self) -> None:
        """Serve until it is released, the driver ends, or it leaves; then leave. Interruptible."""
        self.leaver.wait()
        api.shutdown(self.leaver.graceful, _LEAVE_S)


def enter(
    group: Group,
    directory: RemoteDirectory,
    driver: WorkerRecord,
    *,
    timeout: float,
    what: str,
    namespace: str,
    facts: Mapping[str, Any] | None = None,
    dress: Callable[[], None] = lambda: None,
    limit: float = _JOIN_S,
) -> Member:
    """Put a member in force in this process, and tell the driver that it is there.

    Args:
        timeout: the default time-out of calls.
        what: what this process is, in words.
        facts: what the driver is told beside the record; None for a process that it has started itself.
        dress: called when the sockets are there, before anything is served.
        limit: how long the driver may take to answer, in seconds.

    Raises:
        RpcError: the driver does not want it, or does not answer. Nothing is in force then, and the group is closed.
    """
    agent = group.agent
    directory.attach(agent)
    leavers: list[Leaver] = []

    def ready(agent: Agent) -> None:
        leaver = Leaver(agent, rref.runtime(), lambda: _announce(agent, driver.name))
        leavers.append(leaver)
        set_leaver(leaver)

        def ended(peer: Peer) -> None:
            if peer.name == driver.name:
                if peer.state == "dead":
                    leaver.bereft = peer.cause or "it died"
                leaver.leave(False)

        agent.on_peer_end.append(ended)
        found = runtime.current()
        if found is not None:
            found.spawner = RemoteSpawner(agent, driver.name)

    def stop(graceful: bool, _seconds: float) -> None:
        if graceful:
            references = rref.runtime()
            references.carry_out(references.table.delete_all_users())
        for leaver in leavers:  # it may have been the user's code that called shutdown
            leaver.leave(graceful)

    try:
        dress()
        api.install(lambda: group, timeout, what, namespace=namespace, ready=ready, stop=stop)
    except BaseException:  # another group may be in force, and has not even looked at this one
        group.close()
        raise
    try:
        arguments = (agent.record.to_bytes(),) if facts is None else (agent.record.to_bytes(), dict(facts))
        agent.call(agent.peer(driver.name), serving.register, arguments, {}, limit).result()
    except BaseException:
        api.shutdown(False)
        raise
    return Member(agent, driver.name, leavers[0], facts or {})


def _announce(agent: Agent, driver: str) -> None:
    token = CURRENT.set(None)
    try:
        agent.call(agent.peer(driver), serving.leaving, (agent.name,), {}, _LEAVE_S).result()
    except RpcError:
        pass  # it is gone, or very busy: this process ends all the same
    finally:
        CURRENT.reset(token)
