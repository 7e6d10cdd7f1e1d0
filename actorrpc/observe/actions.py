"""The actions that a visitor may request: kill or restart an actor, drain a worker.

A worker carries out an action only for a visitor whose name has the prefix :data:`~actorrpc.observe.protocol.ACTING`. The
handshake authenticates the name, so the connection of a command that only reads cannot be used to trigger an action. A holder of
the group's key can always connect under such a name, or kill actors by calls.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Final

from actorrpc.agent.context import Worker
from actorrpc.agent.peers import Peer
from actorrpc.cluster.resources import drain
from actorrpc.errors import ConfigError, RpcError
from actorrpc.observe.protocol import ANSWER, is_acting, pack

__all__ = ["act"]

_log = logging.getLogger("actorrpc.observe")
_TEXT: Final = 1000


def act(worker: Worker, peer: Peer, asked: dict[str, Any]) -> None:
    """Carry out a visitor's request and answer it; called on a pool thread."""
    what, whom = str(asked.get("do"))[:20], str(asked.get("whom"))[:_TEXT]
    where = f"visitor {peer.name!r} (pid {peer.record.pid})"
    problem = ""
    try:
        _check(worker, peer)
        _log.warning("%s: %s %s", where, what, whom)
        _do(worker, what, whom)
    except (RpcError, ValueError) as error:
        problem = (str(error) or type(error).__name__)[:_TEXT]
        _log.warning("%s: %s %s: not done: %s", where, what, whom, problem)
    if not worker.agent.closed_down:
        worker.agent.notify(peer, ANSWER, pack({"id": asked["id"], "problem": problem}))


def _check(worker: Worker, peer: Peer) -> None:
    if not (peer.record.is_visitor and is_acting(peer.name)):
        raise RpcError("this visitor may only read the state of the group")
    if worker.agent.settings.data_only:
        raise RpcError(f"worker {worker.agent.name!r} takes data only")


def _do(worker: Worker, what: str, whom: str) -> None:
    if what in ("kill", "restart"):
        if worker.actors is None:
            raise ConfigError(f"worker {worker.agent.name!r} supervises no actors")
        worker.actors.supervisor.kill(int(whom, 16), what == "kill")
    elif what == "drain":
        if worker.cluster is None:
            raise ConfigError(f"worker {worker.agent.name!r} is not the driver of a cluster")
        if worker.agent.peer(whom).is_self:
            raise ConfigError("the driver cannot be drained: it leaves with actorrpc.shutdown()")
        worker.agent.submit(partial(_drain, whom))
    else:
        raise ConfigError(f"there is no action {what!r}")


def _drain(name: str) -> None:
    """Drain a worker, within the default time-out of ``drain()``. The result is only logged; the visitor was answered before."""
    try:
        drain(name)
    except RpcError as error:
        _log.warning("drain %s: %s", name, error)
    else:
        _log.warning("drain %s: it has left", name)
