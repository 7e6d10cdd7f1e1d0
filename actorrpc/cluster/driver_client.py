"""The cluster in a worker process: :class:`RemoteDirectory` queries the driver, by RPC.

No function waits for an answer under a lock. Records that ``resolve()`` has returned are cached until the workers end; the
driver's record is known from the start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from actorrpc.actors.spec.death_report import DeathReport, ProcessSpec
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import CURRENT
from actorrpc.agent.peers import Peer
from actorrpc.cluster.driver import serve
from actorrpc.errors import PlacementError, RpcError
from actorrpc.futures import WAITING, Future
from actorrpc.group.group import MemberDirectory
from actorrpc.serialization import exceptions
from actorrpc.wire.identity import WorkerInfo, WorkerRecord

__all__ = ["RemoteDirectory"]

_QUERY_S: Final = 30.0
_LEAVE_S: Final = 4.0


@contextlib.contextmanager
def _detached() -> Iterator[None]:
    """Separate the requests of the ``with`` block from the call that this thread runs.

    A request is not cancelled with the call, because other threads also use its answer, nor counted as a wait of its method.
    """
    token = CURRENT.set(None)
    runner, WAITING.runner = WAITING.runner, None
    try:
        yield
    finally:
        WAITING.runner = runner
        CURRENT.reset(token)


class RemoteDirectory(MemberDirectory):
    """The driver's list of workers, and the :class:`~actorrpc.actors.spec.death_report.Spawner`, for a worker process.

    Thread-safe. Spawner methods other than :meth:`check` do not block.

    Attributes:
        driver: the driver's record.
    """

    def __init__(self, driver: WorkerRecord) -> None:
        super().__init__()
        self.driver = driver
        self.add(driver)
        self._agent: Agent | None = None

    def attach(self, agent: Agent) -> None:
        """Send requests through this agent from now on."""
        self._agent = agent
        self.add(agent.record)
        agent.on_peer_end.append(self._ended)

    def _ended(self, peer: Peer) -> None:
        if peer.name != self.driver.name:
            self.remove(peer.record)

    @property
    def _own(self) -> Agent:
        assert self._agent is not None
        return self._agent

    def _query(self, method: str, *arguments: Any, limit: float = _QUERY_S) -> Any:
        """Call a method of the driver's cluster, and wait for the answer."""
        with _detached():
            peer = self._own.peer(self.driver.name)
            return self._own.call_sync(peer, serve, (method, *arguments), {}, limit)

    def _request(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the driver's cluster; return a future of the answer."""
        future: Future[Any] = Future()
        try:
            with _detached():
                peer = self._own.peer(self.driver.name)
                self._own.call(peer, serve, (method, *arguments), {}, 0.0, future=future)
                self._own.flush()
        except RpcError as error:
            future.try_fail(error)
        return future

    def _tell(self, method: str, *arguments: Any) -> None:
        # A failure means that the driver has ended, and all its processes with it.
        self._request(method, *arguments).add_done_callback(Future.acknowledge)

    # -- membership ------------------------------------------------------------------------------------------

    def register(self, facts: dict[str, Any] | None, limit: float) -> None:
        """Tell the driver that this worker has joined; the arguments are as for ``worker_process.enter``.

        Raises:
            RpcError: the driver refuses this worker, or does not answer.
        """
        self._query("register", self._own.record.to_bytes(), facts, limit=limit)

    def announce_leaving(self) -> None:
        """Tell the driver that this worker begins to leave by itself."""
        # If the query fails, the driver has ended or is very busy. This process ends in any case.
        with contextlib.suppress(RpcError):
            self._query("leaving", self._own.name, limit=_LEAVE_S)

    def resolve(self, to: str | int) -> WorkerRecord | None:
        """Return the record of a worker by name or rank; None if there is none.

        Raises:
            RpcError: the driver does not answer.
        """
        found = super().resolve(to)
        if found is None and self._agent is not None:
            packed = self._query("lookup", to)
            if packed is not None:
                found = WorkerRecord.from_bytes(packed)
                self.add(found)
        return found

    def members(self) -> list[WorkerRecord]:
        """Return the records of all workers.

        Raises:
            RpcError: the driver does not answer.
        """
        return [WorkerRecord.from_bytes(packed) for packed in self._query("listing")]

    # -- Spawner -----------------------------------------------------------------------------------------------

    def spawn(self, spec: ProcessSpec) -> Future[WorkerInfo]:
        """Request a place for an actor, as ``Cluster.spawn``; the future completes with the worker, or fails with the reason."""
        return self._request("spawn", spec, self._own.name)

    def check(self, spec: ProcessSpec) -> None:
        """Ask the driver whether a machine or worker could hold an actor that requests a place or resources.

        Raises:
            PlacementError: no machine and no worker could hold the actor.
        """
        if spec.wait_s or not (spec.is_picky or spec.num_cpus or spec.num_gpus):
            return
        try:
            self._request("check", spec).wait(_QUERY_S)
        except PlacementError as error:
            raise exceptions.original(error) from None
        except RpcError:  # the driver has ended or is too busy: creating the actor will report problems
            pass

    def release(self, worker: str) -> None:
        """Ask a process, through the driver, to end as soon as no value and no actor in it is referenced."""
        self._tell("release", worker)

    def kill(self, worker: str) -> None:
        """Kill the process of a worker, if the engine has started it."""
        self._tell("kill", worker)

    def give_back(self, booking: int) -> None:
        """Release the booking of an actor."""
        self._tell("give_back", booking)

    def report(self, worker: str) -> Future[DeathReport]:
        """Return a future of the report on a process's end."""
        return self._request("report", worker)

    def owns(self, worker: str) -> bool:
        """Return True for all workers but the driver: this process does not know which workers the engine has started."""
        return worker != self.driver.name
