"""The agent of ``torch.distributed.rpc``, a view of this process's agent; its options, and the constants of torch's API."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from actorrpc.agent.agent import Agent
from actorrpc.compat.translate import reword
from actorrpc.errors import UnknownWorkerError, WrongTypeError
from actorrpc.rpc import api, options
from actorrpc.wire.identity import WorkerInfo

__all__ = [
    "CONSTANTS",
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "RpcAgent",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "debug_info_of_references",
    "enable_gil_profiling",
]

DEFAULT_SHUTDOWN_TIMEOUT: Final = 0.0
#: the contents of ``torch.distributed.rpc.constants``
CONSTANTS: Final = {
    "DEFAULT_RPC_TIMEOUT_SEC": options.DEFAULT_RPC_TIMEOUT_SEC,
    "DEFAULT_INIT_METHOD": options.DEFAULT_INIT_METHOD,
    "DEFAULT_SHUTDOWN_TIMEOUT": DEFAULT_SHUTDOWN_TIMEOUT,
    "DEFAULT_NUM_WORKER_THREADS": options.DEFAULT_NUM_WORKER_THREADS,
    "DEFAULT_PROCESS_GROUP_TIMEOUT": timedelta(milliseconds=2**31 - 1),
    "UNSET_RPC_TIMEOUT": options.UNSET_RPC_TIMEOUT,
}
_gil_profiling = False


def enable_gil_profiling(flag: bool) -> None:
    """Add the time that threads wait for the interpreter to the debug information. The time is not measured: it is always 0."""
    global _gil_profiling
    _gil_profiling = flag


class TensorPipeRpcBackendOptions(options.TensorPipeRpcBackendOptions):
    """As :class:`actorrpc.TensorPipeRpcBackendOptions`."""

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except WrongTypeError as error:
            raise WrongTypeError(f"incompatible constructor arguments: {error}") from error


class RpcAgent:
    """Base of agents."""


class TensorPipeAgent(RpcAgent):
    """A view of the agent of this process, under torch's name. Thread-safe.

    Args:
        agent: the agent.
        options: the options whose ``num_worker_threads`` the debug information contains.
    """

    def __init__(self, agent: Agent, options: TensorPipeRpcBackendOptions) -> None:
        self.agent = agent
        self.options = options

    @property
    def name(self) -> str:
        """This worker's name."""
        return self.agent.name

    def get_worker_info(self, worker: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """Return the WorkerInfo of a worker; of this one by default.

        Raises:
            UnknownWorkerError: there is no such worker.
        """
        try:
            return self.agent.record.info if worker is None else self.agent.peer(worker).record.info
        except UnknownWorkerError as error:
            reword(error)
            raise

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return the WorkerInfo of every worker."""
        return api.get_worker_infos()

    def get_debug_info(self) -> dict[str, str]:
        """Return counters of this worker, as text, under torch's names."""
        calls = sum(len(peer.pending) for peer in self.agent.peers())
        info = {
            "agent.thread_pool_size": self.options.num_worker_threads,
            "agent.num_pending_requests": len(self.agent.pool.queue),
            "agent.client_active_calls": calls,
        }
        if _gil_profiling:
            info["agent.gil_average_wait_time_us"] = 0
        return {name: str(value) for name, value in info.items()}


def debug_info_of_references() -> dict[str, str]:
    """Return counters of the RRefs of this worker, as text, under torch's names."""
    return {name: str(count) for name, count in api.references().table.debug_info().items()}
