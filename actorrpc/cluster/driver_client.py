"""The cluster as its worker processes see it: they ask the driver, by RPC.

No function waits for an answer under a lock. Records of workers are cached until the workers end; the driver's record is known
from the start.
"""

from __future__ import annotations

from typing import Any, Final

from actorrpc.actors.spec.death_report import DeathReport, ProcessSpec
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import CURRENT
from actorrpc.agent.peers import Peer
from actorrpc.cluster import driver_rpc
from actorrpc.errors import PlacementError, RpcError
from actorrpc.futures import WAITING, Future
from actorrpc.group.group import MemberDirectory
from actorrpc.serialization import exceptions
from actorrpc.wire.identity import WorkerInfo, WorkerRecord

__all__ = ["RemoteDirectory", "RemoteSpawner"]

_ASK_S: Final = 30.0


class RemoteDirectory(MemberDirectory):
    """The workers of the cluster, according to the driver.

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

    def _ask(self, method: str, *arguments: Any) -> Any:
        agent = self._agent
        assert agent is not None
        # Do not cancel the request with the call that is running here: other threads use the answer as well.
        token = CURRENT.set(None)
        # Do not count it as a wait of the method that is running here.
        runner, WAITING.runner = WAITING.runner, None
        try:
            peer = agent.peer(self.driver.name)
            return agent.ask(peer, driver_rpc.ask, (method, *arguments), {}, _ASK_S)
        finally:
            WAITING.runner = runner
            CURRENT.reset(token)

    def resolve(self, to: str | int) -> WorkerRecord | None:
        """Return the record of a worker by name or rank; None if there is none.

        Raises:
            RpcError: the driver does not answer.
        """
        found = super().resolve(to)
        if found is None and self._agent is not None:
            packed = self._ask("lookup", to)
            if packed is not None:
                found = WorkerRecord.from_bytes(packed)
                self.add(found)
        return found

    def members(self) -> list[WorkerRecord]:
        """Return the records of all workers.

        Raises:
            RpcError: the driver does not answer.
        """
        return [WorkerRecord.from_bytes(packed) for packed in self._ask("listing")]


class RemoteSpawner:
    """Starts and ends worker processes by asking the driver. Thread-safe; only :meth:`check` blocks."""

    def __init__(self, agent: Agent, driver: str) -> None:
        self._agent = agent
        self._driver = driver

    def _ask(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        token = CURRENT.set(None)
        try:
            peer = self._agent.peer(self._driver)
            self._agent.call(peer, driver_rpc.ask, (method, *arguments), {}, 0.0, future=future)
            self._agent.flush()
        except RpcError as error:
            future.try_fail(error)
        finally:
            CURRENT.reset(token)
        return future

    def _tell(self, method: str, *arguments: Any) -> None:
        # A failure means that the driver has ended, and all its processes with it.
        self._ask(method, *arguments).add_done_callback(Future.acknowledge)

    def spawn(self, spec: ProcessSpec) -> Future[WorkerInfo]:
        """Start a process; the future completes when it has joined the group, or fails with the reason."""
        return self._ask("spawn", spec, self._agent.name)

    def check(self, spec: ProcessSpec) -> None:
        """Ask whether there can be a place for an actor that requests a place, processors, devices or other resources.

        Raises:
            PlacementError: there is no place.
        """
        if spec.wait_s or not (spec.is_picky or spec.num_cpus or spec.num_gpus):
            return
        try:
            self._ask("check", spec).wait(_ASK_S)
        except PlacementError as error:
            raise exceptions.original(error) from None
        except RpcError:  # the driver has ended, or is too busy: making the actor will fail or succeed
            pass

    def release(self, worker: str) -> None:
        """Let a process end by itself, as soon as no value and no actor in it is referenced."""
        self._tell("release", worker)

    def kill(self, worker: str) -> None:
        """End a process at once (SIGKILL)."""
        self._tell("kill", worker)

    def give_back(self, booking: int) -> None:
        """Return a slot."""
        self._tell("give_back", booking)

    def report(self, worker: str) -> Future[DeathReport]:
        """Return a future of the report on a process's end."""
        return self._ask("report", worker)

    def owns(self, worker: str) -> bool:
        """Say whether the cluster has started the worker: true for all but the driver."""
        return worker != self._driver
