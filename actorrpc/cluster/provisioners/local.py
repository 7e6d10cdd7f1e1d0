"""The worker processes of the cluster, as the driver knows them: it starts, releases and kills them.

:class:`LocalCluster` is the embedded engine. What becomes of the processes it hears from the fork server, on a pool
thread; futures are completed on the pool. The functions at the end are called by the workers, by RPC.

``_lock`` guards the tables and each process's state. It is re-entrant, because the collector may run a finaliser that
spawns or releases on the thread that has it. Starting the fork server and the short sends to it happen under it, no
user code, and no wait for a worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from actorrpc.actors.spec.death_report import DeathReport, ProcessSpec
from actorrpc.agent.agent import Agent
from actorrpc.cluster.driver import Directory
from actorrpc.cluster.exit import leave, leave_when_idle
from actorrpc.cluster.gpus import Devices
from actorrpc.cluster.logs import Logs, Output, pipes
from actorrpc.cluster.provisioners.base import LaunchRequest, Node
from actorrpc.cluster.provisioners.fork_client import ForkServer, arguments, import_path
from actorrpc.errors import (
    ConfigError,
    PeerDiedError,
    RpcError,
    RpcTimeoutError,
    ShutdownError,
    UnknownWorkerError,
)
from actorrpc.futures import Future
from actorrpc.transport import fd_limits
from actorrpc.transport.signals import uninterruptible
from actorrpc.validation import variables
from actorrpc.wire import keys
from actorrpc.wire.identity import MAX_NAME, WorkerInfo, WorkerRecord

__all__ = ["LocalCluster", "Process"]


class Process:
    """One process, from the wish for it to its end. Guarded by its cluster's lock.

    Attributes:
        creator: the worker that asked for it.
        future: completes when it has joined.
        pipes: the reading ends of its output, until the logs have them.
        doomed: it is to be killed as soon as it is there.
        over: it has ended; its report is still to come.
        asked: each is completed with the report.
    """

    def __init__(self, id: int, name: str, rank: int, spec: ProcessSpec, creator: str) -> None:
        self.id = id
        self.name = name
        self.rank = rank
        self.spec = spec
        self.creator = creator
        self.future: Future[WorkerInfo] = Future()
        self.future.label = f"the start of {name!r}"
        self.message: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        self.pipes: tuple[int, int] | None = None
        self.server: ForkServer | None = None
        self.output: Output | None = None
        self.pid = 0
        self.begun = 0.0
        self.record: WorkerRecord | None = None
        self.timer: Any = None
        self.doomed = False
        self.over = False
        self.report: DeathReport | None = None
        self.asked: list[Future[DeathReport]] = []

    def killed(self) -> RpcError:
        """Return the error of a start that a kill has ended."""
        return PeerDiedError(
            f"{self.future.label}: it was killed before it had joined",
            maybe_executed=False,
            worker=self.name,
        )

    def not_started(self, why: str) -> RpcError:
        """Return the error of a start that has failed."""
        return PeerDiedError(
            f"the process for {self.spec.label!r} could not be started: {why}",
            maybe_executed=False,
            worker=self.name,
        )


_log = logging.getLogger("actorrpc.cluster")
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_:-]+", re.ASCII)
_IMPORT_S: Final = 120.0  # how long the fork server may take to import torch
_START_S: Final = 60.0  # how long a forked process may take to join
_LEAVE_S: Final = 5.0  # how long a process may take to end once it has begun to
# How long it all may take from then on where an end is by force: with the agent's, less than 2 s.
_FORCED_S: Final = 1.0
_AT_LEAST_S: Final = 0.1
_DEVICES_S: Final = 10.0  # how long a process waits for devices of others, which may be ending
_LOGS_S: Final = 1.0  # how long a report waits for the last lines
_KEPT: Final = 1000  # reports of processes that have ended


class LocalCluster:
    """The processes of one embedded cluster. Thread-safe; only :meth:`end` waits.

    Args:
        agent: the driver's.
        directory: the list of workers that it answers for.
        hello: what every child is told (key, settings, names).
        num_cpus: what one process may ask for at most.
        num_gpus: how many devices there are to give; None: all that are visible.
        log_to_driver: whether the output of the processes is shown.
        preload: the modules that the fork server imports, for all processes.
    """

    def __init__(
        self,
        agent: Agent,
        directory: Directory,
        hello: dict[str, Any],
        *,
        num_cpus: float,
        num_gpus: int | None,
        log_to_driver: bool,
        preload: Sequence[str] = (),
    ) -> None:
        self.agent = agent
        self.directory = directory
        self.num_cpus = num_cpus
        self.devices = Devices(num_gpus)
        self.logs = Logs(log_to_driver)
        self._hello = hello
        self._preload = tuple(preload)
        #: why the fork server could not import a module that was to be preloaded
        self._not_preloaded: ConfigError | None = None
        self._lock = threading.RLock()
        self._count = 0
        self._processes: dict[int, Process] = {}
        self._names: dict[str, Process] = {}
        self._ended: dict[str, DeathReport] = {}
        self._waiting: list[Process] = []
        self.server: ForkServer | None = None
        self._server_output: Output | None = None
        self._closing = False
        self._gone: Future[None] | None = None
        self._pid = os.getpid()

    name = "local"

    @uninterruptible
    def open(self) -> None:
        """Start the thread of the logs and the fork server; does not wait for it.

        Raises:
            OSError: it cannot be started.
        """
        self.logs.start()
        with self._lock:
            self._server()

    # -- Engine ------------------------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        """Return this machine."""
        return [Node(host=socket.gethostname(), num_cpus=self.num_cpus, num_gpus=float(self.devices.total))]

    def specs(self) -> list[ProcessSpec]:
        """Return what the processes that there are were asked for."""
        with self._lock:
            return [each.spec for each in self._processes.values()]

    def start(self, order: LaunchRequest, creator: str = "") -> Future[WorkerInfo]:
        """Start a process; see :class:`~actorrpc.cluster.provisioners.base.Engine`. It is named here."""
        return self.spawn(order.spec, creator)

    def forsaken(self, creator: str) -> None:
        """End the processes that a worker has asked for that is gone."""
        for name in [each.name for each in list(self._processes.values()) if each.creator == creator]:
            self.kill(name)

    def spawn(self, spec: ProcessSpec, creator: str = "") -> Future[WorkerInfo]:
        """Start a process; the future completes when it has joined the group, or fails saying why.

        ``creator`` is the worker that asked for it, and with which it ends; default the driver.
        """
        rank = self.directory.new_rank()
        label = _NOT_IN_NAMES.sub("_", spec.label)[: MAX_NAME - 12] or "worker"
        with self._lock:
            self._count += 1
            process = Process(self._count, f"{label}-{rank}", rank, spec, creator or self.agent.name)
            try:
                if self._closing:
                    raise ShutdownError("the cluster is shutting down", maybe_executed=False)
                self._prepare(process)
                self._processes[process.id] = process
                self._names[process.name] = process
                self._try_devices(process)
            except (RpcError, OSError) as error:
                self._forget(process)
                self._fail(process, error)
        return process.future

    def release(self, worker: str) -> None:
        """Let a process end by itself, once nothing that lives in it is referenced any more."""
        self.agent.submit(partial(self._ask, worker, leave_when_idle))

    def kill(self, worker: str) -> None:
        """End a process at once (SIGKILL), and what it has started."""
        with self._lock:
            process = self._names.get(worker)
            if process is None:
                return
            process.doomed = True
            if process.pid:
                if process.server is not None:
                    process.server.kill(process.pid)
            elif process in self._waiting:
                self._forget(process)
                self._fail(process, process.killed())

    def report(self, worker: str) -> Future[DeathReport]:
        """Return how a process ended; completes when it has. Fails with UnknownWorkerError if it is not ours."""
        future: Future[DeathReport] = Future()
        future.label = f"the death report of {worker!r}"
        with self._lock:
            process = self._names.get(worker)
            found = self._ended.get(worker)
            if found is None and process is not None:
                process.asked.append(future)
                return future
        if found is not None:
            future.set_result(found)
        else:
            future.set_exception(
                UnknownWorkerError(f"{worker!r} is no process that this cluster has started")
            )
            future.acknowledge()
        return future

    def owns(self, worker: str) -> bool:
        """Say whether this cluster has started the worker."""
        return worker in self._names or worker in self._ended

    # -- starting ------------------------------------------------------------------------------------------

    def _prepare(self, process: Process) -> None:
        """Write down how things are at the moment of the wish."""
        spec = process.spec
        cpus = 1.0 if spec.num_cpus is None else spec.num_cpus
        if cpus < 0 or cpus > self.num_cpus:
            raise ConfigError(
                f"num_cpus={cpus:g} was asked for {spec.label!r}, but this cluster has {self.num_cpus:g}: ask for "
                "less, or say init(num_cpus=...)"
            )
        threads = max(1, int(cpus))
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **variables("env", spec.env)}
        path = import_path()
        directory = spec.working_dir
        if directory is not None:
            if not os.path.isdir(directory):
                raise ConfigError(f"working_dir {spec.working_dir!r} of {spec.label!r} is not a directory")
            directory = os.path.abspath(directory)
            path.insert(0, directory)
        else:
            with contextlib.suppress(OSError):  # the driver's own was removed: then that of the server
                directory = os.getcwd()
        process.environment = environment
        process.message = {
            "id": process.id,
            "name": process.name,
            "rank": process.rank,
            "label": spec.label,
            "threads": threads,
            "path": path,
            "arguments": arguments(),
            "directory": directory,
        }

    def _try_devices(self, process: Process) -> None:
        """Give a process its devices and launch it, or let it wait for them."""
        wanted = process.spec.num_gpus
        if wanted is not None:
            devices = self.devices.take(process.name, wanted)
            if devices is None:
                if process not in self._waiting:
                    self._waiting.append(process)
                    late = partial(self._no_devices, process)
                    process.timer = self.agent.clock.after(_DEVICES_S, partial(self.agent.submit, late))
                return
            if "CUDA_VISIBLE_DEVICES" not in process.spec.env:
                process.environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if process in self._waiting:
            self._waiting.remove(process)
            process.timer.cancel()
        self._launch(process)

    def _no_devices(self, process: Process) -> None:
        with self._lock:
            if process not in self._waiting:
                return
            holders = ", ".join(self.devices.holders())
            self._forget(process)
            self._fail(
                process,
                ConfigError(
                    f"no process for {process.spec.label!r} with num_gpus={process.spec.num_gpus:g}: of "
                    f"{self.devices.total} CUDA devices not enough are free. They are held by: {holders}"
                ),
            )

    @uninterruptible
    def _launch(self, process: Process) -> None:
        server = self._server()
        process.server = server
        before, now = server.environment, process.environment
        message = {
            **process.message,
            "set": {name: value for name, value in now.items() if before.get(name) != value},
            "unset": [name for name in before if name not in now],
        }
        process.environment = {}
        try:
            stdout, out, stderr, err = pipes()
        except OSError as error:
            raise process.not_started(fd_limits.explain(error)) from error
        process.pipes = (stdout, stderr)
        late = partial(self.agent.submit, partial(self._not_joined, process, _IMPORT_S + _START_S))
        process.timer = self.agent.clock.after(_IMPORT_S + _START_S, late)
        server.fork(message, (out, err))

    def _server(self) -> ForkServer:
        """Return the fork server; start one if there is none (any more)."""
        if self.server is not None and not self.server.is_gone:
            return self.server
        self._not_preloaded = None
        server = ForkServer(
            self.agent.pool, self._hello, self._preload, self._heard, lambda: self._server_ended(server)
        )
        stdout, out, stderr, err = pipes()
        try:
            server.start(out, err)
        except BaseException:
            os.close(stdout)
            os.close(stderr)
            raise
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

    def _not_joined(self, process: Process, seconds: float) -> None:
        with self._lock:
            if process.record is None and process.report is None and not process.future.done():
                who = f"(pid {process.pid})" if process.pid else "(the fork server has not made it)"
                self._fail(
                    process,
                    RpcTimeoutError(
                        f"the process of {process.name!r} {who} has not joined the cluster within {seconds:g} s",
                        maybe_executed=False,
                        worker=process.name,
                    ),
                )
                self.kill(process.name)

    def register(self, record: WorkerRecord) -> None:
        """Take up a process that has joined."""
        with self._lock:
            process = self._names.get(record.name)
            if process is None or process.rank != record.rank or self._closing or process.doomed:
                raise ShutdownError(f"nobody waits for {record.name!r} any more", maybe_executed=False)
            process.record = record
            if process.timer is not None:
                process.timer.cancel()
            self.directory.add(record)
        process.future.try_complete(record.info, self.agent.submit)

    # -- what the fork server says ---------------------------------------------------------------------------

    def _heard(self, message: dict[str, Any]) -> None:
        kind = message["is"]
        with self._lock:
            if kind == "not_preloaded":
                self._not_preloaded = ConfigError(
                    f"init(preload=): the module {message['module']!r} cannot be preloaded, therefore no process was started. "
                    f"{message['why']}. Leave the module out, or have it importable by the path of this process"
                )
            process = self._processes.get(message.get("id", 0))
            if process is None:
                return
            if kind == "forked":
                self._forked(process, message["pid"])
            elif kind == "failed":
                self._forget(process)
                self._fail(
                    process, PeerDiedError(f"{process.future.label}: {message['why']}", maybe_executed=False)
                )
            elif kind == "ended":
                self._exited(process, message)

    def _forked(self, process: Process, pid: int) -> None:
        process.pid = pid
        process.begun = time.monotonic()
        assert process.pipes is not None
        process.output = Output(process.spec.label, pid, *process.pipes, process.name)
        process.pipes = None
        self.logs.add(process.output)
        if process.doomed or self._closing:
            assert process.server is not None
            process.server.kill(pid)
        if process.timer is not None:
            process.timer.cancel()
        if process.record is None:
            late = partial(self.agent.submit, partial(self._not_joined, process, _START_S))
            process.timer = self.agent.clock.after(_START_S, late)

    def _exited(self, process: Process, message: dict[str, Any]) -> None:
        """Forget a process at once, and report on it when its last lines have been read."""
        if process.over:
            return
        process.over = True
        self.directory.remove(process.name)
        self.devices.give_back(process.name)
        if process.record is not None and process.record.unix_path is not None:
            keys.remove_file(process.record.unix_path)
        else:
            self.agent.submit(keys.sweep)
        if process.output is not None:
            over = partial(self.agent.submit, partial(self._reported, process, message))
            self.logs.end(process.output, over)
            # The terminal may be stopped, and the thread of the logs with it.
            self.agent.clock.after(_LOGS_S, over)
        else:
            self._reported(process, message)
        for other in list(self._processes.values()):
            if other.creator == process.name:  # nobody looks after it any more
                if message["code"] == 0:
                    self.release(other.name)  # it may be at its end already: some seconds for that
                    self.leaving(other.name)
                else:
                    self.kill(other.name)
        for other in list(self._waiting):
            try:
                self._try_devices(other)
            except (RpcError, OSError) as error:
                self._forget(other)
                self._fail(other, error)

    def _reported(self, process: Process, message: dict[str, Any]) -> None:
        with self._lock:
            if process.report is not None:
                return
            report = process.report = DeathReport(
                worker=process.name,
                pid=process.pid,
                exit_code=message["code"],
                signal=message["signal"],
                stderr=tuple(process.output.tail) if process.output is not None else (),
                peak_memory=message["memory"],
                uptime=message["uptime"],
            )
            self._ended[process.name] = report
            if len(self._ended) > _KEPT:
                del self._ended[next(iter(self._ended))]
            self._forget(process)
            if not process.future.done():
                why = process.killed() if process.doomed else process.not_started(report.describe())
                self._fail(process, why)
            asked, process.asked = process.asked, []
        for future in asked:
            future.try_complete(report, self.agent.submit)

    def _server_ended(self, server: ForkServer) -> None:
        """Record that the fork server is gone, and with it all that it had forked."""
        with self._lock:
            failed = self._not_preloaded
            if self._closing:
                why = "the cluster is shutting down"
            elif failed is not None:
                why = str(failed)
                _log.error("%s", failed)
            else:
                _log.error(
                    "the fork server (pid %d) has ended, and with it the processes that it had started; the next "
                    "actor process starts another one",
                    server.pid,
                )
                why = "the fork server that starts processes has ended"
            output, now = self._server_output, time.monotonic()
            lost = [process for process in self._processes.values() if process.server is server]
            for process in lost:
                if process.pid:
                    self._exited(
                        process,
                        {
                            "code": None,
                            "signal": int(signal.SIGKILL),
                            "memory": 0,
                            "uptime": now - process.begun,
                        },
                    )
                else:
                    self._forget(process)
            unborn = [process for process in lost if not process.pid]

        def fail() -> None:
            tail = "\n    ".join(output.tail) if output is not None else ""
            said = f"; its last lines on stderr:\n    {tail}" if tail else ""
            for process in unborn:
                self._fail(process, failed or process.not_started(why + said))

        if output is not None:
            self.logs.end(output, partial(self.agent.submit, fail))
        else:
            fail()

    # -- ends --------------------------------------------------------------------------------------------------

    def _forget(self, process: Process) -> None:
        """Take a process out of all tables."""
        self._processes.pop(process.id, None)
        self._names.pop(process.name, None)
        self.devices.give_back(process.name)
        self.directory.remove(process.name)
        if process in self._waiting:
            self._waiting.remove(process)
        if process.timer is not None:
            process.timer.cancel()
        if process.pipes is not None:
            for fd in process.pipes:
                os.close(fd)
            process.pipes = None
        if not self._processes and self._gone is not None:
            self._gone.try_complete(None, self.agent.submit)

    def _fail(self, process: Process, error: BaseException) -> None:
        asked, process.asked = process.asked, []
        process.future.try_fail(error, self.agent.submit)
        if isinstance(error, ShutdownError):
            process.future.acknowledge()  # the one that shut down knows
        for future in asked:
            future.try_complete(DeathReport(worker=process.name), self.agent.submit)

    def _ask(self, worker: str, what: Callable[[], None]) -> None:
        """Ask a process to leave; if it does not hear, kill it. Runs on the pool."""
        with self._lock:
            process = self._names.get(worker)
            if process is None:
                return
            if process.record is None:
                self.kill(worker)
                return
        asked: Future[None] = Future()

        def answered(done: Future[None]) -> None:
            if done.error is not None:
                done.acknowledge()
                self.kill(worker)

        try:
            self.agent.call(self.agent.peer(worker), what, (), {}, _LEAVE_S, future=asked)
        except RpcError:
            self.kill(worker)
        else:
            asked.add_done_callback(answered)
            self.agent.flush()

    def leaving(self, worker: str) -> None:
        """Record that a process has begun to leave: it gets some seconds for it."""
        self.agent.clock.after(_LEAVE_S, partial(self.agent.submit, partial(self.kill, worker)))

    def end(self, graceful: bool, timeout: float) -> None:
        """End all processes and the fork server, and show all that they have written. Bounded; idempotent.

        What has not gone by itself is killed; that may take a second.

        Args:
            graceful: ask the processes first.
            timeout: how long they may take, in seconds; 0 for 5 s.
        """
        running = self._begin_end()
        if running is None:
            return
        try:
            if graceful and self._has_forked(running):
                for process in running:
                    self.agent.submit(partial(self._ask, process.name, leave))
                self._wait_gone(timeout or _LEAVE_S)
        finally:
            until = time.monotonic() + _FORCED_S
            try:
                for process in running:
                    self.kill(process.name)
                if self._has_forked(running):
                    self._wait_gone(_FORCED_S / 2)
            finally:
                self._close_down(until)

    def _has_forked(self, running: list[Process]) -> bool:
        """Say whether there is anybody to wait for: a server that is still importing has forked nobody."""
        return bool(running) and self.server is not None and self.server.is_ready

    @uninterruptible
    def _begin_end(self) -> list[Process] | None:
        """Start no more; return what runs, or None where the end has begun before. From here on, Ctrl-C leaves nothing."""
        with self._lock:
            if self._closing:
                return None
            self._closing = True
            for process in list(self._waiting):
                self._forget(process)
                self._fail(process, ShutdownError("the cluster is shutting down", maybe_executed=False))
            self._gone = Future()
            running = list(self._processes.values())
            if not running:
                self._gone.set_result(None)
            return running

    @uninterruptible
    def _close_down(self, until: float) -> None:
        """Take down what is left. Ctrl-C waits for it: it takes a second at most."""
        if self.server is not None:
            self.server.close(max(_AT_LEAST_S, until - time.monotonic() - _FORCED_S / 4))
        self.logs.close(max(_AT_LEAST_S, until - time.monotonic()))
        with self._lock:
            for process in list(self._processes.values()):
                self._forget(process)
                self._fail(process, ShutdownError("the cluster has shut down", maybe_executed=False))

    def _wait_gone(self, timeout: float) -> None:
        assert self._gone is not None
        with contextlib.suppress(RpcTimeoutError):
            self._gone.wait(timeout)

    def abandon(self) -> None:
        """Close the descriptors in a forked child of the driver. Takes no lock."""
        if self.server is not None:
            self.server.abandon()
        self.logs.abandon()
        for process in list(self._processes.values()):
            for fd in process.pipes or ():
                with contextlib.suppress(OSError):
                    os.close(fd)
