"""The Ray engine: workers inside Ray actors. Ray's scheduler places and restarts them; calls use actorrpc's own connections.

The engine starts two kinds of workers. Workers of a *pool* (``num_workers=``) join as if they were started by hand, and hold
several actors each; when such a worker dies, Ray starts it again, on another node if its node is lost. A worker for *one actor*
ends with that actor, and is never restarted by Ray, because supervision requests another worker.

The key is passed to each worker as an argument of its Ray actor's constructor: over Ray's own connections, into Ray's own tables
(from which Ray restarts the actor), never into a command line or a log. All code that runs in that Ray can read the key.

Thread-safe. ``_guard`` guards ``_hosts`` (the Ray actors) and ``_free`` (free places in the placement group), and is a leaf. Ray
reports ends in its own threads, which pass them to the agent's pool at once.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from actorrpc import _time
from actorrpc._exceptions import undo_on_error
from actorrpc.actors.spec.actor_spec import DeathReport, ProcessSpec
from actorrpc.agent.agent import Agent
from actorrpc.agent.peers import Peer
from actorrpc.cluster.driver import Reception
from actorrpc.cluster.join import JoinedResources, describe_loss, join
from actorrpc.cluster.provisioners.base import LaunchedEngine, LaunchRequest, Node
from actorrpc.cluster.provisioners.ray_link import STRATEGIES, Link, labels_here, missing, package
from actorrpc.errors import (
    ConfigError,
    PeerDiedError,
    PlacementError,
    RendezvousError,
    RpcTimeoutError,
    WrongTypeError,
)
from actorrpc.group.store import some, wait_until
from actorrpc.rpc import api
from actorrpc.validation import amounts, choice, integer, number
from actorrpc.wire import keys
from actorrpc.wire.identity import WorkerRecord

__all__ = ["Host", "RayEngine", "make"]

_log = logging.getLogger("actorrpc.cluster")
_AGAIN_S: Final = 0.5  # pause between two queries about an actor that Ray cannot reach now
_STAYS_S: Final = 5.0  # how long a worker's process may still run after its connection has ended
_LOOK_S: Final = 0.02
_LEFT_S: Final = 2.0  # how long end() waits until workers that were asked to leave have left
_GONE_S: Final = 3.0  # how long close() waits until killed actors have ended
_REJOIN_S: Final = 0.25  # pause between two attempts of a worker to join
_LOST: Final = 1  # the exit code of a worker that has lost its driver: Ray may restart it
_TEXT: Final = 400
_BESIDE: Final = ("CPU", "GPU", "memory", "object_store_memory")


@dataclass(slots=True, eq=False)
class _Hosted:
    """One worker's Ray actor.

    Attributes:
        waiting: Ray's reference to the result of :meth:`Host.wait`.
        bundle: the number of its place in the placement group; None if it has no place there.
        node: the id of its node, if the worker was added later to a pool with STRICT_PACK or STRICT_SPREAD.
        heard: how often Ray has reported that it cannot reach the process.
    """

    order: LaunchRequest
    pooled: bool
    actor: Any = None
    waiting: Any = None
    bundle: int | None = None
    node: str = ""
    stopped: bool = False
    heard: int = 0

    @property
    def name(self) -> str:
        return self.order.name


class RayEngine(LaunchedEngine):
    """Starts workers inside Ray actors.

    Args:
        address: the Ray to use; see :class:`~actorrpc.cluster.provisioners.ray_link.Link`.
        num_workers: the initial number of workers of the pool.
        num_cpus, num_gpus, resources: what each worker of the pool books with Ray, and has for actors. A worker for one
            actor books what the actor requests.
        strategy: the placement of the workers of the pool: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"``, ``"STRICT_SPREAD"`` (a
            placement group), or None for wherever Ray puts them.
        max_restarts: how often Ray restarts each worker of the pool; -1 (the default): without limit.
        start_timeout: how long connecting, booking, and each start of a worker may take, in seconds.
        log_to_driver: show the output of the workers here; only if this process connects to Ray.
        runtime_env: Ray's option, for the workers' processes (packages, files, variables).
        ray_options: further arguments of ``ray.init``; only if this process connects to Ray.

    Raises:
        ConfigError: Ray is not installed, or an argument cannot be used.
        RendezvousError: no Ray answers at the address.
        PlacementError: Ray does not have what the pool needs. No actor and no placement group is left in Ray then.
    """

    name = "ray"

    def __init__(
        self,
        address: str | None = None,
        *,
        num_workers: int = 0,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        strategy: str | None = None,
        max_restarts: int = -1,
        start_timeout: float = 60.0,
        log_to_driver: bool = True,
        runtime_env: Mapping[str, Any] | None = None,
        ray_options: Mapping[str, Any] | None = None,
    ) -> None:
        package()  # before all other checks, so that a missing Ray is the reported error
        self.num_workers = integer("num_workers", num_workers, least=0, error=WrongTypeError)
        self._max_restarts = integer("max_restarts", max_restarts, least=-1, error=WrongTypeError)
        self._timeout = float(_amount("start_timeout", start_timeout, unit="seconds", above=True))
        self._shape = _shape(num_cpus, num_gpus, resources or {})
        if choice("strategy", strategy, of=STRATEGIES, none=True) is not None and not self._shape:
            raise ConfigError(
                f"strategy={strategy!r} needs something to book for each worker: num_cpus=1, for example"
            )
        self._strategy = strategy
        self._runtime_env = dict(runtime_env) if runtime_env else None
        super().__init__(start_timeout=self._timeout)
        self._guard = threading.Lock()
        self._hosts: dict[str, _Hosted] = {}
        self._group: Any = None
        self._free: list[int] = []
        self._numbers = itertools.count()
        self._failed: dict[str, str] = {}
        self._joined: Callable[[], list[WorkerRecord]] = list
        self._closed = False
        self.link = Link(address, self._timeout, log_to_driver, dict(ray_options or {}))
        with undo_on_error(self.close):
            self._book()

    # -- Ray's nodes --------------------------------------------------------------------------------------

    def host(self) -> str:
        """Return this host's address for Ray's nodes: the loopback if this engine has started Ray, on this host only."""
        return "127.0.0.1" if self.link.alone else self.link.host()

    def nodes(self) -> list[Node]:
        """Return Ray's nodes, with their labels in Ray."""
        return [
            Node(
                host=str(node["NodeManagerAddress"]),
                num_cpus=float(node["Resources"].get("CPU", 0.0)),
                num_gpus=float(node["Resources"].get("GPU", 0.0)),
                resources={
                    name: float(amount)
                    for name, amount in node["Resources"].items()
                    if name not in _BESIDE and not name.startswith("node:")
                },
                labels=dict(node.get("Labels") or {}),
            )
            for node in self.link.alive()
        ]

    def _book(self) -> None:
        """Book the placement group of the pool.

        Raises:
            PlacementError: Ray has not made the group within the time-out, or has no nodes that could hold the workers.
        """
        if not self.num_workers:
            return
        self._await_room(self.num_workers, self._strategy)
        if self._strategy is None or not self._shape:
            return
        util = self.link.ray.util
        self._group = util.placement_group([dict(self._shape)] * self.num_workers, strategy=self._strategy)
        if not self._group.wait(self._timeout):
            raise PlacementError(
                f"Ray has not made the placement group ({self._strategy}, {self.num_workers} x {self._shape}) within "
                f"{self._timeout:g} s: others have booked what it needs. In total: {self.link.ray.cluster_resources()}; "
                f"free: {self.link.ray.available_resources()}"
            )
        self._free = list(range(self.num_workers))

    def _await_room(self, count: int, strategy: str | None) -> None:
        """Wait until Ray's nodes could hold ``count`` workers of the pool; do not wait if this engine has started Ray."""
        lacking = ""

        def has_room() -> bool:
            nonlocal lacking
            lacking = missing(self._shape, count, strategy, [node["Resources"] for node in self.link.alive()])
            return not lacking

        until = _time.now() + (0.0 if self.link.alone else self._timeout)
        if not wait_until(
            has_room, until, "the Ray engine", lambda: f"nodes to be added to Ray: {lacking}", _AGAIN_S
        ):
            raise PlacementError(
                f"Ray has no place for {count} workers: {lacking}. Add nodes to it, or ask for less; in total it has "
                f"{self.link.ray.cluster_resources()}"
            )

    # -- starting ------------------------------------------------------------------------------------------

    def open(self, reception: Reception, joined: Callable[[], list[WorkerRecord]]) -> None:
        """See :class:`LaunchedEngine`.

        Raises:
            PeerDiedError: a worker has ended before it joined.
            RpcTimeoutError: not all workers have joined in time.
        """
        self._joined = joined
        self.grow(self.num_workers, self._timeout)

    def grow(self, count: int, timeout: float) -> None:
        """See :class:`LaunchedEngine`."""
        address = self.reception.address
        until = _time.now() + timeout
        names = self._more(count)
        absent: list[str] = []

        def all_joined() -> bool:
            absent[:] = sorted(set(names) - {record.name for record in self._joined()})
            for name in absent:
                if name in self._failed:
                    raise PeerDiedError(
                        f"worker {name!r} of the Ray engine could not be started: {self._failed[name]}",
                        maybe_executed=False,
                        worker=name,
                    )
            return not absent

        if not wait_until(
            all_joined, until, "the Ray engine", lambda: f"{some(absent)} to join {address}", _LOOK_S
        ):
            raise RpcTimeoutError(
                f"{', '.join(absent)} of the Ray engine have not joined within {timeout:g} s. They wait for resources "
                f"(Ray has free: {self.link.ray.available_resources()}), or cannot reach {address}",
                maybe_executed=False,
                worker=absent[0],
            )

    def _more(self, count: int) -> list[str]:
        """Begin to start ``count`` more workers of the pool; return their names."""
        names = [f"ray-{next(self._numbers)}" for _ in range(count)]
        for name in names:
            order = LaunchRequest(
                name=name,
                address=self.reception.address,
                spec=ProcessSpec(label=name),
                secret=self.reception.secret,
            )
            self._host(order, pooled=True)
        return names

    @property
    def pool(self) -> list[str]:
        """The names of the workers of the pool."""
        with self._guard:
            return [each.name for each in self._hosts.values() if each.pooled]

    def launch(self, order: LaunchRequest) -> None:
        """See :class:`LaunchedEngine`."""
        self._host(order, pooled=False)

    def _host(self, order: LaunchRequest, pooled: bool) -> None:
        hosted = _Hosted(order, pooled)
        spec = order.spec
        shape = self._shape if pooled else _shape(spec.num_cpus or 0, spec.num_gpus or 0, order.resources)
        with self._guard:
            if self._closed:
                raise PlacementError("the engine has been closed")
            if order.name in self._hosts:
                raise ConfigError(f"Ray runs a worker {order.name!r} already")
            if pooled and self._free:
                hosted.bundle = self._free.pop(0)
            self._hosts[order.name] = hosted
        with undo_on_error(partial(self._forget, hosted)):
            options = self._options(hosted, shape)
            resources = {name: amount for name, amount in shape.items() if name not in ("CPU", "GPU")}
            hosted.actor = (
                self.link.ray.remote(Host)
                .options(**options)
                .remote(
                    order.environment(),
                    spec.working_dir,
                    shape.get("CPU", 0.0),
                    shape.get("GPU", 0.0),
                    resources,
                    self._timeout,
                )
            )
        self._watch(hosted)

    def _options(self, hosted: _Hosted, shape: Mapping[str, float]) -> dict[str, Any]:
        order = hosted.order
        resources = {name: amount for name, amount in shape.items() if name not in ("CPU", "GPU")}
        if order.host is not None:
            resources[f"node:{order.host}"] = 0.001
        options: dict[str, Any] = {
            "num_cpus": shape.get("CPU", 0.0),
            "num_gpus": shape.get("GPU", 0.0),
            "max_restarts": self._max_restarts if hosted.pooled else 0,
            "max_task_retries": 0,
        }
        if resources:
            options["resources"] = resources
        if self._runtime_env is not None:
            options["runtime_env"] = self._runtime_env
        if order.labels:
            options["label_selector"] = dict(order.labels)
        strategies = self.link.ray.util.scheduling_strategies
        if hosted.bundle is not None:
            options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=hosted.bundle
            )
        elif order.spread or (hosted.pooled and self._strategy == "SPREAD"):
            options["scheduling_strategy"] = "SPREAD"
        elif hosted.pooled and self._strategy in ("STRICT_PACK", "STRICT_SPREAD"):
            # A placement group does not grow, so later workers are put on nodes by node id.
            hosted.node = self._node_for_more(shape)
            options["scheduling_strategy"] = strategies.NodeAffinitySchedulingStrategy(
                hosted.node, soft=False
            )
        return options

    def _node_for_more(self, shape: Mapping[str, float]) -> str:
        """Return the id of the node for one more worker of a pool with STRICT_PACK or STRICT_SPREAD."""
        util = self.link.ray.util
        used = set(util.placement_group_table(self._group).get("bundles_to_node_id", {}).values())
        apart = self._strategy == "STRICT_SPREAD"
        found = [node for node in self.link.alive() if (node["NodeID"] in used) is not apart]
        with self._guard:
            taken = {each.node for each in self._hosts.values()}
        found = [node for node in found if not apart or node["NodeID"] not in taken]
        room = [node for node in found if not missing(shape, 1, None, [node["Resources"]])]
        if not room:
            raise PlacementError(
                f"no node for one more worker of the pool ({self._strategy}, each {dict(shape)}): "
                f"{'every node has one' if apart else 'its node has no room'}"
            )
        return str(room[0]["NodeID"])

    # -- watching ------------------------------------------------------------------------------------------

    def _watch(self, hosted: _Hosted) -> None:
        """Ask Ray to report when the worker has left, or its process has ended."""
        with self._guard:
            if self._closed or self._hosts.get(hosted.name) is not hosted:
                return
        try:
            hosted.waiting = hosted.actor.wait.remote()
            hosted.waiting.future().add_done_callback(partial(self._heard, hosted))
        except Exception as error:  # Ray itself has ended
            self._over(hosted, error)

    def _heard(self, hosted: _Hosted, done: Any) -> None:
        """Handle Ray's report that a worker has left or ended, in one of Ray's threads."""
        try:
            error = done.exception()
        except Exception as problem:  # cancelled: Ray is shutting down
            error = problem
        self._submit(partial(self._over, hosted, error))

    def _submit(self, function: Callable[[], Any]) -> None:
        try:
            self.agent.submit(function)
        except Exception:  # the agent is closed, so the report is not needed
            pass

    def _over(self, hosted: _Hosted, error: BaseException | None) -> None:
        """Handle the end of a worker; if Ray only cannot reach its actor now, watch it again. On the pool."""
        with self._guard:
            if self._closed or self._hosts.get(hosted.name) is not hosted:
                return
        if isinstance(error, self.link.ray.exceptions.ActorUnavailableError):
            hosted.heard += 1
            self.agent.clock.after(_AGAIN_S, partial(self._submit, partial(self._watch, hosted)))
            return
        text = "" if error is None else _words(error)
        self._kill(hosted)  # the Ray actor of a worker that has left still exists, and holds resources of Ray
        self._forget(hosted)
        if not hosted.pooled:
            self.ended(hosted.name, DeathReport(worker=hosted.name, stderr=tuple(text.splitlines())))
        elif text:
            self._failed[hosted.name] = text
            _log.warning("worker %r has ended for good; Ray's message: %s", hosted.name, text)

    # -- stopping ------------------------------------------------------------------------------------------

    def stop(self, worker: str) -> None:
        """See :class:`LaunchedEngine`. Ray does not restart a worker of the pool that was stopped."""
        with self._guard:
            hosted = self._hosts.get(worker)
        if hosted is not None:
            self._kill(hosted)
            self._forget(hosted)
        self.ended(worker)

    def attach(self, agent: Agent) -> None:
        """See :class:`LaunchedEngine`."""
        super().attach(agent)
        agent.on_peer_end.append(self._disconnected)

    def _disconnected(self, peer: Peer) -> None:
        """Ask Ray to restart a worker of the pool some seconds after its connection has ended, if its process still runs."""
        with self._guard:
            hosted = self._hosts.get(peer.name)
        if hosted is not None and hosted.pooled:
            look = partial(self._submit, partial(self._renew, hosted, hosted.heard))
            self.agent.clock.after(_STAYS_S, look)

    def _renew(self, hosted: _Hosted, heard: int) -> None:
        back = hosted.name in {record.name for record in self._joined()}
        if not (back or hosted.stopped or hosted.heard != heard or self._closed):
            _log.warning(
                "worker %r does not answer, and has not ended: Ray is asked to restart it", hosted.name
            )
            self._kill(hosted, restart=True)

    def _kill(self, hosted: _Hosted, restart: bool = False) -> None:
        hosted.stopped = not restart
        if hosted.actor is not None:
            try:
                self.link.ray.kill(hosted.actor, no_restart=not restart)
            except Exception as error:
                _log.info("Ray could not end worker %r: %s", hosted.name, error)

    def _forget(self, hosted: _Hosted) -> None:
        with self._guard:
            if self._hosts.get(hosted.name) is hosted:
                del self._hosts[hosted.name]
                if hosted.bundle is not None:
                    self._free.append(hosted.bundle)
                    self._free.sort()

    def end(self, graceful: bool, timeout: float) -> None:
        """See :class:`LaunchedEngine`. Workers of the pool, which the cluster has asked to leave, get time to leave."""
        until = _time.now() + timeout
        if graceful:
            with self._guard:
                waiting = [each.waiting for each in self._hosts.values() if each.waiting is not None]
            self._await(waiting, min(_LEFT_S, 0.75 * timeout) if timeout else _LEFT_S)
        super().end(graceful, max(_LOOK_S, until - _time.now()) if timeout else timeout)

    def _await(self, waiting: list[Any], timeout: float) -> None:
        try:
            if waiting:
                self.link.ray.wait(waiting, num_returns=len(waiting), timeout=timeout)
        except Exception as error:
            _log.info("Ray does not say whether its actors have ended: %s", error)

    def close(self) -> None:
        """End all workers, remove the placement group, and disconnect if this engine has connected. Idempotent; bounded."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            hosts = list(self._hosts.values())
            self._hosts.clear()
        ray = self.link.ray
        try:
            for hosted in hosts:
                self._kill(hosted)
            self._await([each.waiting for each in hosts if each.waiting is not None], _GONE_S)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        except Exception as error:
            _log.warning("workers or the placement group may remain in Ray: %s", error)
        finally:
            self.link.close()
            keys.sweep()  # removes the files of workers that were killed on this host


def make(address: str | None = None, **options: Any) -> RayEngine:
    """Return an engine that is connected to Ray.

    Raises:
        ConfigError: an option is unknown or wrong, or Ray is not installed.
        RendezvousError, PlacementError: see :class:`RayEngine`.
    """
    known = RayEngine.__init__.__kwdefaults__ or {}
    for option in options:
        if option not in known:
            raise ConfigError(f"engine 'ray' has no option {option!r}; there are: {', '.join(sorted(known))}")
    return RayEngine(address, **options)


_amount = partial(number, error=WrongTypeError)


def _shape(num_cpus: float, num_gpus: float, resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources that a worker books, by Ray's names, without amounts of 0."""
    found = {"CPU": _amount("num_cpus", num_cpus), "GPU": _amount("num_gpus", num_gpus)}
    found.update(amounts("resources", resources, error=WrongTypeError))
    return {name: float(amount) for name, amount in found.items() if amount}


def _words(error: BaseException) -> str:
    """Return the last lines of Ray's message about the end of an actor, or the remedy if actorrpc is missing there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("class_name:", "actor_id:", "namespace:"))]
    if any("No module named 'actorrpc'" in line for line in lines):
        return (
            "actorrpc cannot be imported by Ray's processes there: install it on every node, or send it with "
            "runtime_env={'py_modules': [...]} or {'pip': [...]}"
        )
    text = "\n".join(kept[-6:])
    return text if len(text) <= 4 * _TEXT else text[:_TEXT] + " ... " + text[-3 * _TEXT :]


class Host:
    """Makes the process of a Ray actor a worker of the cluster, as long as the process lives. Thread-safe.

    When Ray restarts the actor, it makes a :class:`Host` again in a new process, which joins as a new incarnation of the same
    worker. The constructor starts a thread that serves, so that a restart needs no call. The main thread, in which Ray runs the
    actor's methods, waits in :meth:`wait` for the end.

    Args:
        environment: environment variables for this process, including the address to join, the worker's name and the key.
        directory: its working directory; None to stay where Ray has put it.
        num_cpus, num_gpus, resources: its resources, as the driver books them. Its labels are the labels of Ray's node.
        timeout: how long joining may take, in seconds.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        directory: str | None,
        num_cpus: float,
        num_gpus: float,
        resources: Mapping[str, float],
        timeout: float,
    ) -> None:
        os.environ.update(environment)
        if directory is not None:
            os.chdir(directory)
        self._means = JoinedResources(
            num_cpus=num_cpus, num_gpus=num_gpus, resources=resources, labels=labels_here()
        )
        self._timeout = timeout
        self._over = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._serve, name="actorrpc-host", daemon=True).start()

    def wait(self) -> None:
        """Return when this worker has left its group.

        Raises:
            RpcError: this worker could not join.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
        try:
            member = self._join()
            os.environ.pop("ACTORRPC_KEY", None)  # so that processes that actors start do not inherit the key
            try:
                member.wait()
            finally:
                api.shutdown(False)
            if not member.graceful:
                # This worker has lost the driver. Ray may restart it if it belongs to the pool; then it joins again.
                if member.driver_lost:
                    sys.stderr.write(f"{describe_loss(member, os.environ['ACTORRPC_JOIN'])}\n")
                    sys.stderr.flush()
                os._exit(_LOST)
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def _join(self) -> Any:
        """Join the cluster; if that fails, try again: the driver may still consider this worker's last incarnation alive."""
        until = time.monotonic() + self._timeout
        while True:
            try:
                return join(
                    os.environ["ACTORRPC_JOIN"],
                    name=os.environ["ACTORRPC_WORKER_NAME"],
                    means=self._means,
                    timeout=max(0.1, until - time.monotonic()),
                )
            except RendezvousError:
                if time.monotonic() + _REJOIN_S >= until:
                    raise
            time.sleep(_REJOIN_S)
