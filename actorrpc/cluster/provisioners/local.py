"""The embedded engine: it forks the processes of the cluster on this machine, and kills them.

:class:`LocalCluster` sends commands to a fork server, whose messages about the processes are handled in a pool thread.
Starting the fork server and the short sends to it happen under the engine's lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from actorrpc import _limits
from actorrpc._exceptions import undo_on_error
from actorrpc.actors.spec.actor_spec import DeathReport, ProcessSpec
from actorrpc.cluster.driver import Reception
from actorrpc.cluster.logs import LogFile, Logs, Output, pipes
from actorrpc.cluster.provisioners.base import Engine, LaunchRequest, Node, StartedWorker, not_started
from actorrpc.cluster.provisioners.fork_client import ForkServer, arguments, import_path
from actorrpc.cluster.scheduler import Devices
from actorrpc.errors import ConfigError, PeerDiedError, PlacementError, RpcError, RpcTimeoutError
from actorrpc.transport.signals import uninterruptible
from actorrpc.validation import variables
from actorrpc.wire import keys
from actorrpc.wire.identity import WorkerRecord

__all__ = ["LocalCluster", "Process"]

_log = logging.getLogger("actorrpc.cluster")
# How long the fork server may take to import torch and ``preload``; then it is killed.
_IMPORT_S: Final = 120.0
_START_S: Final = 60.0  # how long a forked process may take to join
# How long close() should take, in seconds, so that close() and the end of the agent together take less than 2 s.
_FORCED_S: Final = 1.0
_AT_LEAST_S: Final = 0.1
_LOGS_S: Final = 1.0  # how long a death report waits, at most, for the last lines of output


class Process(StartedWorker):
    """One process, from its request to its end.

    Attributes:
        pipes: the reading ends of its output pipes, until they are passed to the logs' thread; then None.
        server: the fork server that got the fork command; None before the command.
        pid: the process id; 0 until the process was forked.
        over: whether the process has ended; its death report may still wait for the last lines of output.
    """

    def __init__(self, order: LaunchRequest) -> None:
        super().__init__(order)
        self.pipes: tuple[int, int] | None = None
        self.server: ForkServer | None = None
        self.output: Output | None = None
        self.pid = 0
        self.begun = 0.0
        self.over = False


def _threads_of(given: Mapping[str, str]) -> int:
    """Return the number of threads that the user has set with OMP_NUM_THREADS; 0 if there is no such number."""
    text = given.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if text == "1" and "TORCHELASTIC_RUN_ID" in given:
        return 0  # torchrun has set it, without regard to the number of CPUs
    return int(text) if text.isdecimal() else 0


class LocalCluster(Engine):
    """The processes of one embedded cluster. Thread-safe; only :meth:`end` blocks.

    Args:
        num_cpus: the CPUs of this machine that actors may book.
        num_gpus: how many devices can be assigned; None: all that are visible.
        resources, labels: further resources and labels of this machine.
        log_to_driver: whether the output of the processes is shown.
        preload: the modules that the fork server imports, for all processes.
        log_file: the file to which the output of the processes is appended.
    """

    name = "local"
    _entry = Process
    _workers: dict[str, Process]  # type: ignore[assignment]

    def __init__(
        self,
        *,
        num_cpus: float,
        num_gpus: int | None,
        resources: Mapping[str, float],
        labels: Mapping[str, str],
        log_to_driver: bool,
        preload: Sequence[str] = (),
        log_file: LogFile | None = None,
    ) -> None:
        super().__init__()
        self.num_cpus = num_cpus
        self.devices = Devices(num_gpus)
        self.logs = Logs(log_to_driver, file=log_file)
        self.server: ForkServer | None = None
        self._resources = resources
        self._labels = labels
        self._preload = tuple(preload)
        #: The reason why the fork server could not import a module of ``preload``.
        self._not_preloaded: ConfigError | None = None
        self._server_output: Output | None = None

    def open(self, reception: Reception, joined: Callable[[], list[WorkerRecord]]) -> None:
        """Start the logs' thread and the fork server; does not wait for the server.

        Raises:
            OSError: the fork server cannot be started.
        """
        self.logs.start()
        with self._lock:
            self._running_server()

    def nodes(self) -> list[Node]:
        """Return this machine."""
        gpus = float(self.devices.total)
        host = socket.gethostname()
        return [
            Node(
                host=host,
                num_cpus=self.num_cpus,
                num_gpus=gpus,
                resources=self._resources,
                labels=self._labels,
            )
        ]

    # -- starting ------------------------------------------------------------------------------------------

    def launch(self, order: LaunchRequest) -> None:
        """Command the fork server to fork a process, with the environment variables that the driver has now."""
        with self._lock:
            process = self._workers[order.name]
            message = self._prepare(process)
            self._assign_devices(process, message)
            self._fork(process, message)

    def has_room(self, spec: ProcessSpec) -> bool:
        """Say whether the CUDA devices for a process are free now."""
        with self._lock:
            return spec.num_gpus is None or self.devices.has_room(spec.num_gpus)

    def _prepare(self, process: Process) -> dict[str, Any]:
        """Return the command for the fork server, with all environment variables of the process."""
        spec = process.order.spec
        own = variables("env", spec.env)
        threads = _threads_of(own) or _threads_of(os.environ) or max(1, int(spec.num_cpus or 1))
        path = import_path()
        directory = spec.working_dir
        if directory is not None:
            if not os.path.isdir(directory):
                raise ConfigError(f"working_dir {spec.working_dir!r} of {spec.label!r} is not a directory")
            directory = os.path.abspath(directory)
            path.insert(0, directory)
        else:
            with contextlib.suppress(OSError):  # the directory was removed: stay in the fork server's
                directory = os.getcwd()
        return {
            "id": process.order.name,
            "name": process.order.name,
            "rank": process.order.rank,
            "label": spec.label,
            "threads": threads,
            "path": path,
            "arguments": arguments(),
            "directory": directory,
            "set": {**os.environ, "OMP_NUM_THREADS": str(threads), **own},
        }

    def _assign_devices(self, process: Process, message: dict[str, Any]) -> None:
        spec = process.order.spec
        if spec.num_gpus is None:
            return
        devices = self.devices.allocate(process.order.name, spec.num_gpus)
        if devices is None:
            raise PlacementError(
                f"{spec.label!r} needs num_gpus={spec.num_gpus:g}, and of {self.devices.total} CUDA devices not enough are free"
            )
        if "CUDA_VISIBLE_DEVICES" not in spec.env:
            message["set"]["CUDA_VISIBLE_DEVICES"] = ",".join(devices)

    @uninterruptible
    def _fork(self, process: Process, message: dict[str, Any]) -> None:
        server = process.server = self._running_server()
        before, now = server.environment, message["set"]
        message["set"] = {name: value for name, value in now.items() if before.get(name) != value}
        message["unset"] = [name for name in before if name not in now]
        try:
            stdout, out, stderr, err = pipes()
        except OSError as error:
            raise not_started(process, _limits.explain_descriptors(error)) from error
        process.pipes = (stdout, stderr)
        self._expect(process, _IMPORT_S + _START_S)
        server.fork(message, (out, err))

    @uninterruptible
    def _running_server(self) -> ForkServer:
        """Return the fork server; start a new server if there is no server or the last server has ended."""
        if self.server is not None and not self.server.is_gone:
            return self.server
        self._not_preloaded = None
        record, reception = self.agent.record, self.reception
        hello = {
            "driver": record.to_bytes(),
            "socket": record.unix_path or "",
            "key": reception.secret.encode(),
            "settings": reception.settings,
            "namespace": reception.namespace,
            "timeout": reception.timeout,
        }
        server = ForkServer(
            self.agent.pool, hello, self._preload, self._heard, lambda: self._server_ended(server)
        )
        stdout, out, stderr, err = pipes()
        try:
            with undo_on_error(partial(os.close, stdout), partial(os.close, stderr)):
                server.start(out, err)
        finally:
            os.close(out)
            os.close(err)
        self.server = server
        self._server_output = Output("fork server", server.pid, stdout, stderr)
        self.logs.add(self._server_output)
        self.agent.clock.after(_IMPORT_S, partial(self._too_slow, server))
        return server

    @staticmethod
    def _too_slow(server: ForkServer) -> None:
        if not server.is_ready and not server.is_gone and server.pid:
            os.kill(server.pid, signal.SIGKILL)

    def _late(self, known: StartedWorker, seconds: float) -> RpcError:
        assert isinstance(known, Process)
        name = known.order.name
        who = f"(pid {known.pid})" if known.pid else "(the fork server has not made it)"
        return RpcTimeoutError(
            f"the process of {name!r} {who} has not joined the cluster within {seconds:g} s",
            maybe_executed=False,
            worker=name,
        )

    # -- messages of the fork server ---------------------------------------------------------------------------

    def _heard(self, message: dict[str, Any]) -> None:
        kind = message["is"]
        if kind == "not_preloaded":
            self._not_preloaded = ConfigError(
                f"init(preload=): the module {message['module']!r} cannot be preloaded, therefore no process was started. "
                f"{message['why']}. Leave the module out, or make it importable with the sys.path of this process"
            )
        process = self._workers.get(message.get("id", ""))
        if process is None:
            return
        if kind == "forked":
            self._forked(process, message["pid"])
        elif kind == "failed":
            error = PeerDiedError(f"{process.future.label}: {message['why']}", maybe_executed=False)
            self._fail(process, error)
            self.ended(process.order.name)
        elif kind == "ended":
            self._exited(process, message)

    def _forked(self, process: Process, pid: int) -> None:
        with self._lock:
            process.pid = pid
            process.begun = time.monotonic()
            assert process.pipes is not None
            process.output = Output(process.order.spec.label, pid, *process.pipes, process.order.name)
            process.pipes = None
            self.logs.add(process.output)
            if process.killed or self._closing:
                assert process.server is not None
                process.server.kill(pid)
            if not process.joined:
                self._expect(process, _START_S)

    def _exited(self, process: Process, message: dict[str, Any]) -> None:
        """Release the devices of an ended process. A pool thread reports the end after the last lines of output were read."""
        name = process.order.name
        with self._lock:
            if process.over:
                return
            process.over = True
            self.devices.give_back(name)
        if not process.joined:
            self.agent.submit(keys.sweep)
        over = partial(self.agent.submit, partial(self._reported, process, message))
        if process.output is not None:
            self.logs.finish(process.output, over)
            # If the terminal is stopped, the logs' thread may be blocked: do not wait longer than _LOGS_S.
            self.agent.clock.after(_LOGS_S, over)
        else:
            over()

    def _reported(self, process: Process, message: dict[str, Any]) -> None:
        name = process.order.name
        report = DeathReport(
            worker=name,
            pid=message["pid"],
            exit_code=message["code"],
            signal=message["signal"],
            stderr=tuple(process.output.tail) if process.output is not None else (),
            peak_memory=message["memory"],
            uptime=message["uptime"],
        )
        self.ended(name, report)

    def _server_ended(self, server: ForkServer) -> None:
        """Record that the fork server has ended, and its children with it."""
        with self._lock:
            failed, output = self._not_preloaded, self._server_output
            lost = [each for each in self._workers.values() if each.server is server and not each.over]
        if self._closing:
            why = "the cluster is shutting down"
        elif failed is not None:
            why = str(failed)
            _log.error("%s", failed)
        else:
            why = "the fork server that starts processes has ended"
            _log.error(
                "the fork server (pid %d) has ended, and with it the processes that it had started; a new "
                "fork server is started for the next actor",
                server.pid,
            )
        unborn = [each for each in lost if not each.pid]
        for process in lost:
            if process.pid:
                message = {
                    "pid": process.pid,
                    "code": None,
                    "signal": int(signal.SIGKILL),
                    "memory": 0,
                    "uptime": time.monotonic() - process.begun,
                }
                self._exited(process, message)

        def fail() -> None:
            tail = "\n    ".join(output.tail) if output is not None else ""
            said = f"; its last lines on stderr:\n    {tail}" if tail else ""
            for process in unborn:
                self._fail(process, failed or not_started(process, why + said))
                self.ended(process.order.name)

        if output is not None:
            self.logs.finish(output, partial(self.agent.submit, fail))
        else:
            fail()

    # -- ends --------------------------------------------------------------------------------------------------

    def stop(self, worker: str) -> None:
        """Kill a worker's process and its process group (SIGKILL). Children that have left the group survive."""
        with self._lock:
            process = self._workers.get(worker)
            if process is not None and process.pid and process.server is not None:
                process.server.kill(process.pid)

    def ended(self, worker: str, report: DeathReport | None = None) -> None:
        """See :class:`Engine`."""
        with self._lock:
            process = self._workers.get(worker)
            if process is None:
                return
            self.devices.give_back(worker)
            ends, process.pipes = process.pipes, None
            for fd in ends or ():
                os.close(fd)
        super().ended(worker, report)

    def end(self, graceful: bool, timeout: float) -> None:
        """End all processes and the fork server, and show all their output; see :class:`Engine`.

        Processes that have not ended by themselves are killed, which may take a second.
        """
        super().end(graceful and self._has_forked(), timeout)

    def _has_forked(self) -> bool:
        """Say whether the fork server may have children: while it still imports modules, it has none."""
        return self.server is not None and self.server.is_ready

    @uninterruptible
    def close(self) -> None:
        """End the fork server and the logs' thread. Takes about a second at most; Ctrl-C does not interrupt it."""
        until = time.monotonic() + _FORCED_S
        if self._has_forked():
            self._gone.wait(_FORCED_S / 2)
        if self.server is not None:
            self.server.close(max(_AT_LEAST_S, until - time.monotonic() - _FORCED_S / 4))
        self.logs.close(max(_AT_LEAST_S, until - time.monotonic()))
        for worker in list(self._workers):
            self.ended(worker)

    def abandon(self) -> None:
        """Close the descriptors in a forked child of the driver. Takes no lock."""
        if self.server is not None:
            self.server.abandon()
        self.logs.abandon()
        for process in list(self._workers.values()):
            for fd in process.pipes or ():
                with contextlib.suppress(OSError):
                    os.close(fd)
