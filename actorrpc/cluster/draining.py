"""Draining: how a worker leaves without losing its work.

:func:`drain` runs on the driver. It moves the actors of the worker, waits for the worker's calls, and then asks the worker to
leave. A worker that has received SIGTERM requests its own drain by calling :func:`drain_soon` on the driver. Thread-safe. No lock
is held during the waits.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Final

from actorrpc import _time
from actorrpc.actors.supervision.supervisor import hand_over
from actorrpc.agent.context import current_worker
from actorrpc.agent.peers import Peer
from actorrpc.cluster.driver import Cluster, current_cluster, leave
from actorrpc.errors import ConfigError, PeerDiedError, RpcError, RpcTimeoutError, WrongTypeError
from actorrpc.futures import Future
from actorrpc.group.store import poll, remaining
from actorrpc.rpc import api
from actorrpc.validation import number

__all__ = ["DRAIN_S", "drain", "drain_soon", "driven_cluster"]

_log = logging.getLogger("actorrpc.cluster")
DRAIN_S: Final = 60.0
"""How long a drain may take by default, in seconds."""

_LOOK_S: Final = 0.02


def driven_cluster(what: str) -> Cluster:
    """Return the cluster that this process drives.

    Raises:
        ConfigError: this process is no driver; ``what`` is the function that needs a driver.
    """
    found = current_cluster()
    if found is None:
        raise ConfigError(
            f"{what} is for the driver of a cluster, the process that has called actorrpc.init(); this process is "
            f"{api.what() or 'no worker'}"
        )
    return found


def drain(worker: Any, timeout: float = DRAIN_S) -> None:
    """Make a worker leave without losing its work: no more actors are placed on it, its calls finish, its actors move.

    Actors whose class has ``checkpoint()`` and ``restore(state)`` restart elsewhere with their state, and their handles stay
    valid. Other actors end with the worker, after their calls: they restart elsewhere according to ``max_restarts``
    (except actors that were placed by ``worker=``), or are dead, with an ActorDiedError that names the drained worker. Actors in
    supervision groups are restarted by their groups, with their last checkpoint, or their groups give up. Values of
    RRefs do not move. A process that runs its own script, because it has joined by ``init(address)`` or ``init(spmd=True)``,
    continues as a worker on which nothing is placed, until its script ends. Only on the driver.

    Args:
        worker: the worker's name, rank or WorkerInfo.
        timeout: for the whole operation, in seconds. After it, unfinished calls continue, and no actors are placed on the worker.

    Raises:
        ConfigError: this process is not the driver, or ``worker`` is the driver itself.
        UnknownWorkerError: there is no such worker.
        RpcTimeoutError: calls have not finished, or actors have not moved, in time; call this again to continue waiting.
    """
    cluster = driven_cluster("drain()")
    seconds = number("timeout", timeout, unit="seconds", most=math.inf, above=True, error=WrongTypeError)
    until = _time.now() + seconds
    peer = cluster.agent.peer(worker)
    if peer.is_self:
        raise ConfigError("drain() is for other workers: the driver leaves with actorrpc.shutdown()")
    if peer.state != "alive":
        return
    cluster.stop_placing(peer.name)
    try:
        ended = _finish_work(cluster, peer, until)
        if ended and cluster.agent.call_sync(peer, leave, (False, True), {}, remaining(until)):
            ended = poll(lambda: peer.state != "alive", until, _LOOK_S)
    except PeerDiedError:
        return
    except RpcTimeoutError:
        # A supervisor has not moved all its actors, or the worker has not answered running() or leave(), in time.
        ended = False
    if not ended:
        raise RpcTimeoutError(
            f"drain of {peer.name!r}: its calls have not finished within {timeout:g} s; nothing new is placed there. "
            "Call drain() again to continue waiting",
            worker=peer.name,
        )


def _finish_work(cluster: Cluster, peer: Peer, until: float) -> bool:
    """Wait until the actors that can move have moved away from a worker, and no call runs there; return False at the time-out.

    Raises:
        RpcTimeoutError: some supervisors have not moved all actors in time, or the worker has not answered in time.
        PeerDiedError: the worker has ended.
    """

    def is_idle() -> bool:
        # The query running() counts itself as one running call.
        return int(cluster.agent.call_sync(peer, running, (), {}, remaining(until))) <= 1

    # An actor that was placed on the worker just before stop_placing() can move only after its constructor has run: the second
    # round moves it.
    rounds = 0
    while _hand_over(cluster, peer, until) or rounds < 2:
        rounds += 1
        if not poll(is_idle, until, _LOOK_S):
            return False
    return poll(is_idle, until, _LOOK_S)


def _hand_over(cluster: Cluster, peer: Peer, until: float) -> int:
    """Let the supervisors on all workers move their actors away from the worker ``peer``, and wait for them.

    Returns:
        how many actors have moved or are being made on ``peer``.

    Raises:
        RpcTimeoutError: some supervisors have not moved all actors in time.
    """
    agent = cluster.agent
    why = f"its worker {peer.name!r} is drained"
    asked: list[Future[int]] = []
    for record in cluster.directory.members():
        future: Future[int] = Future()
        future.add_done_callback(Future.acknowledge)
        arguments = (peer.record.rank, peer.record.incarnation, why)
        try:
            agent.call(agent.peer(record.name), hand_over, arguments, {}, remaining(until), future=future)
        except RpcError:
            continue  # this worker has ended, and the actors that it supervised with it
        asked.append(future)
    agent.flush()
    moved = 0
    for future in asked:
        try:
            moved += future.wait(remaining(until))
        except RpcTimeoutError:
            raise
        except RpcError:
            pass  # the asked worker has ended, and the actors that it supervised with it
    return moved


def running() -> int:
    """Return how many calls run or wait on this worker, including this one."""
    worker = current_worker()  # None if this worker has begun to leave since the query arrived
    return 0 if worker is None else sum(len(peer.running) for peer in worker.agent.peers())


def drain_soon(worker: str, timeout: float = DRAIN_S, level: int = logging.INFO) -> None:
    """Begin to :func:`drain` a worker, and return; the result is only logged. Called on the driver, also by RPC.

    Args:
        level: the level of the log message about success.

    Raises:
        ConfigError: this process is not the driver.
    """

    def run() -> None:
        try:
            drain(worker, timeout)
        except RpcTimeoutError:  # its text asks the caller of drain() for another call
            text = "drain of %r: its calls have not finished within %g s; nothing new is placed there"
            _log.warning(text, worker, timeout)
        except RpcError as error:
            _log.warning("drain %s: %s", worker, error)
        else:
            _log.log(level, "drain %s: it has left", worker)

    driven_cluster("drain()").agent.submit(run)
