"""Shutdown of a cluster: all workers share one time-out, and interrupted or failed starts leave nothing behind."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from actorrpc.actors.spec.actor_spec import ProcessSpec
from actorrpc.cluster import LaunchedEngine, LaunchRequest, Node, init
from actorrpc.cluster.driver import Cluster, Reception
from actorrpc.errors import ConfigError, PeerDiedError, RpcTimeoutError, ShutdownError
from actorrpc.futures import Future
from actorrpc.group.group import MemberDirectory
from actorrpc.wire.identity import WorkerRecord, new_incarnation
from tests.cluster.drive import cluster, engine, until, workers
from tests.ports import free_port


class _Agent:
    """An agent whose calls are never answered."""

    name = "driver"

    def __init__(self) -> None:
        self.state = "alive"  # of its peers
        self.on_peer_end: list[Callable[[Any], None]] = []
        self.on_notice: dict[str, Any] = {}
        self.called: list[str] = []
        self.clock = self
        self.tasks: list[Callable[[], Any]] | None = None

    def submit(self, task: Callable[[], Any]) -> None:
        if self.tasks is None:
            task()
        else:
            self.tasks.append(task)

    def after(self, _seconds: float, _task: Callable[[], Any]) -> Any:
        return self

    def cancel(self) -> None:
        """Do nothing, as a timer."""

    def peer(self, worker: str) -> SimpleNamespace:
        return SimpleNamespace(name=worker, state=self.state)

    def call(self, peer: SimpleNamespace, *_: object, future: Future[Any]) -> None:
        self.called.append(peer.name)

    def flush(self) -> None:
        """Do nothing: no call is queued."""


class _Engine:
    """An engine that records with which time-out it is ended."""

    name = "test"

    def __init__(self) -> None:
        self.given: list[tuple[bool, float]] = []

    def attach(self, agent: Any) -> None:
        """Do nothing: this engine makes no calls."""

    def owns(self, worker: str) -> bool:
        return False

    def end(self, graceful: bool, timeout: float) -> None:
        self.given.append((graceful, timeout))


_FACTS = {"hosts": ["far"], "totals": {"CPU": 1.0}, "labels": {}, "launch_rank": None}


def _cluster(engine: Any) -> tuple[Any, Any]:
    """Return a cluster that two workers have joined, and its agent."""
    agent: Any = _Agent()
    made = Cluster(agent, MemberDirectory(), engine, Reception(settings={}, namespace="", timeout=1.0))
    for rank, name in enumerate(("one", "other"), 1):
        record = WorkerRecord(name=name, rank=rank, incarnation=new_incarnation(), host=name)
        made.register(record.to_bytes(), _FACTS)
    return made, agent


@pytest.mark.parametrize("timeout", [2.0, 0.4])
def test_joined_workers_and_workers_of_the_engine_share_the_time_out_of_shutdown(timeout: float) -> None:
    engine = _Engine()
    ending, agent = _cluster(engine)
    ending.shut_down(True, timeout)
    assert agent.called == ["one", "other"]
    ((graceful, left),) = engine.given
    assert graceful
    # The joined workers have not left within their share; some time remains for the engine's workers.
    assert timeout / 20 <= left <= timeout / 2


def test_shutdown_does_not_wait_for_a_worker_that_died_while_joining() -> None:
    """Its death was reported before it was registered, and will not be reported again."""
    made, agent = _cluster(_Engine())
    agent.state = "dead"
    record = WorkerRecord(name="late", rank=3, incarnation=new_incarnation(), host="far")
    with pytest.raises(PeerDiedError, match="'late' has died while it was joining"):
        made.register(record.to_bytes(), _FACTS)
    assert "late" not in made.book.workers
    made.shut_down(True, 0.4)
    assert "late" not in agent.called


def test_only_workers_that_a_launcher_has_started_count_as_ranks() -> None:
    made, _ = _cluster(_Engine())
    for number, name, launch_rank in ((3, "gpu-1", None), (4, "late", 2)):
        record = WorkerRecord(name=name, rank=number, incarnation=new_incarnation(), host=name)
        made.register(record.to_bytes(), {**_FACTS, "launch_rank": launch_rank})
    assert made.launched == {2}


# -- engines that launch workers through other systems ----------------------------------------------


class _Launches(LaunchedEngine):
    """An engine that launches nothing, and records its calls."""

    def __init__(self, agent: Any) -> None:
        super().__init__()
        self.attach(agent)
        self.calls: list[str] = []
        self.during: Callable[[], None] = lambda: None
        self.stops: Callable[[str], None] = lambda _: None

    def nodes(self) -> list[Node]:
        return []

    def launch(self, order: LaunchRequest) -> None:
        self.calls.append(f"launch {order.name}")
        self.during()

    def stop(self, worker: str) -> None:
        self.calls.append(f"stop {worker}")
        self.stops(worker)

    def close(self) -> None:
        self.calls.append("close")

    def begin(self, name: str) -> Future[Any]:
        """Start a worker."""
        return self.start(LaunchRequest(name=name, address="", spec=ProcessSpec(label=name)))


def test_ctrl_c_while_the_engine_stops_a_worker_still_stops_all_workers() -> None:
    engine = _Launches(_Agent())
    futures = [engine.begin(name) for name in ("a", "b", "c")]

    def stops(worker: str) -> None:
        if worker == "a":
            raise KeyboardInterrupt

    engine.stops = stops
    with pytest.raises(KeyboardInterrupt):
        engine.end(False, 0.0)
    assert engine.calls[3:] == ["stop a", "stop b", "stop c", "close"]
    for future in futures:
        with pytest.raises(ShutdownError):
            future.result()


def test_a_worker_launched_during_shutdown_is_stopped() -> None:
    engine = _Launches(_Agent())
    engine.during = lambda: engine.end(False, 0.0)
    engine.begin("late")
    # The first `end` did not know this worker.
    assert engine.calls == ["launch late", "stop late", "close", "stop late"]


@pytest.mark.parametrize("how", ["end", "kill"])
def test_a_queued_start_is_not_launched_after_shutdown_or_kill(how: str) -> None:
    agent: Any = _Agent()
    agent.tasks = []
    engine = _Launches(agent)
    future = engine.begin("late")
    if how == "end":
        engine.end(False, 0.0)
    else:
        engine.kill("late")
    for task in agent.tasks:
        task()
    assert "launch late" not in engine.calls
    with pytest.raises(ShutdownError if how == "end" else PeerDiedError):
        future.result()


def _open_descriptors() -> list[str]:
    """Return the targets of the descriptors of this process."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


# -- interrupted and failed starts ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.limit(90)
def test_ctrl_c_at_the_start_of_shutdown_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    context = init()
    cluster().start(ProcessSpec(label="Counter", num_gpus=1)).wait(60)
    server = engine().server
    assert server is not None
    waiting = cluster().spawn(ProcessSpec(label="Waits", num_gpus=1))  # there is only one device
    # Shutdown fails queued starts before it ends anything else.
    waiting.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        context.shutdown()
    with pytest.raises(ShutdownError):
        waiting.result()
    assert server.is_gone
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


@pytest.mark.slow
@pytest.mark.limit(90)
def test_the_start_of_a_worker_times_out_if_the_fork_server_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with init(), workers():
        server = engine().server
        assert server is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with monkeypatch.context() as patch:
                patch.setattr("actorrpc.cluster.provisioners.local._IMPORT_S", 0.0)
                patch.setattr("actorrpc.cluster.provisioners.local._START_S", 0.05)
                future = cluster().start(ProcessSpec(label="Late"))
            with pytest.raises(
                RpcTimeoutError, match=r"'Late-\d+' \(the fork server has not made it\) has not joined"
            ):
                future.wait(60)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        # The late process is started after all, and ended at once.
        until(lambda: len(psutil.Process(server.pid).children()) == 1)


@pytest.mark.slow
@pytest.mark.limit(90)
def test_a_start_without_free_descriptors_names_the_limit_and_leaks_no_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with init(), workers():
        pipe2, made = os.pipe2, []

        def second_fails(flags: int) -> tuple[int, int]:
            if made:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            ends = pipe2(flags)
            made.append(f"pipe:[{os.fstat(ends[0]).st_ino}]")
            return ends

        with monkeypatch.context() as patch:
            patch.setattr(os, "pipe2", second_fails)
            future = cluster().start(ProcessSpec(label="Counter"))
        with pytest.raises(
            PeerDiedError, match=r"process for 'Counter' could not be started.*RLIMIT_NOFILE.*ulimit"
        ):
            future.result()
        assert made[0] not in _open_descriptors()
        with workers():
            pass  # the next start has descriptors again


def test_a_rank_0_that_fails_to_start_a_cluster_removes_its_key_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("ACTORRPC_KEY", "ACTORRPC_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {**variables, "ACTORRPC_RUNTIME_DIR": str(tmp_path / "run")}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="leave bind="):
        init(bind="0.0.0.0")
    assert not list(tmp_path.glob("run/*"))
