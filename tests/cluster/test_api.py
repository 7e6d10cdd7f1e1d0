"""init() and the end of a cluster by shutdown, by the end of the driver, by force or by Ctrl-C; forks of the driver; scripts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import actorrpc
from actorrpc import rpc
from actorrpc.cluster import ClusterContext, init
from actorrpc.cluster.driver import current_cluster
from actorrpc.errors import ConfigError, NotInitializedError, RpcError, ShutdownError
from tests.actors.e2e.kit import alive
from tests.announced import BETWEEN_STEPS
from tests.cluster import remotes
from tests.cluster.drive import engine, script, until, workers
from tests.cluster.remotes import Counter
from tests.forks import exit_code, fork
from tests.layers import rest_is_slow
from tests.migration.rows import row
from tests.output import check
from tests.ranks import rpc_group


def _finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out, err


# -- starting ------------------------------------------------------------------------------------------


def test_shutdown_ends_the_cluster_and_its_fork_server_and_may_be_repeated() -> None:
    assert not rpc.is_initialized()
    context = init(name="boss", namespace="mine", rpc_timeout=7)
    assert rpc.is_initialized()
    assert (context.name, context.namespace) == ("boss", "mine")
    assert rpc.get_worker_info().name == "boss"
    assert rpc.get_worker_info().id == 0
    assert rpc.get_rpc_timeout() == 7
    assert rpc.rpc_sync("boss", os.getpid) == os.getpid()
    server = engine().server
    assert server is not None
    assert psutil.pid_exists(server.pid)
    with workers(1) as (name,):
        assert rpc.rpc_sync(name, rpc.get_rpc_timeout) == 7
    rpc.shutdown()
    assert not rpc.is_initialized()
    assert not psutil.pid_exists(server.pid)
    assert current_cluster() is None
    rpc.shutdown()
    with pytest.raises(NotInitializedError):
        rpc.rpc_sync("boss", os.getpid)


def test_handles_and_rrefs_of_an_earlier_cluster_raise_shutdown_error() -> None:
    with init():
        handle = Counter.remote()
        assert actorrpc.get(handle.add.remote()) == 1
        ref = rpc.RRef(1)
    with pytest.raises(ShutdownError, match="has shut down"):
        handle.add.remote()
    with init():
        for call in (handle.add.remote, handle.rpc_sync().add):
            with pytest.raises(ShutdownError, match="belongs to an earlier cluster or group of this process"):
                call()
        with pytest.raises(ShutdownError, match="the cluster or group of this RRef or handle was shut down"):
            rpc.rpc_sync("driver", str, (ref,))


def test_a_second_init_raises_or_returns_the_existing_cluster() -> None:
    with init(namespace="first") as context:
        with pytest.raises(
            RpcError, match=r"the driver of an embedded cluster already.*actors can be used at once"
        ):
            init()
        with init(ignore_reinit_error=True) as again:
            assert isinstance(again, ClusterContext)
            assert again.namespace == context.namespace
        assert rpc.is_initialized()  # the inner block has not ended the cluster
        with pytest.raises(RuntimeError, match="already initialized"):
            rpc.init_rpc("worker0", rank=0, world_size=1)
    with init():  # a new cluster
        assert rpc.api.namespace() == ""  # type: ignore[attr-defined]


def _init_in_a_group(rank: int, world_size: int) -> str:
    with pytest.raises(RpcError, match="a worker of an init_rpc group already"):
        init()
    return init(ignore_reinit_error=True).name


def test_init_in_an_init_rpc_group_raises_or_returns_the_group() -> None:
    assert rpc_group(_init_in_a_group, 2) == ["worker0", "worker1"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"address": "auto"}, "tcp://HOST:PORT"),
        ({"include_dashboard": False}, "use dashboard=True"),
        ({"object_store_memory": 10}, "object_memory"),
        ({"local_mode": True}, "to debug, call the class itself"),
        ({"runtime_env": {"pip": ["x"]}}, "use env= for an actor"),
        ({"logging_level": 10}, "configure Python's logging"),
        ({"log_to_drivr": True}, "did you mean log_to_driver"),
        ({"something": 1}, "There are: address, listen"),
        ({"num_cpus": "2"}, "num_cpus must be a number"),
        ({"num_cpus": -1}, "num_cpus"),
        ({"num_gpus": 1.5}, "whole number"),
        ({"namespace": 3}, "namespace must be a str"),
        ({"name": "no spaces"}, "Worker name"),
        ({"rpc_timeout": -3}, "rpc_timeout"),
        ({"transport": "tcp"}, "one machine"),
        ({"heartbeat": 0}, "heartbeat"),
        ({"heartbeat": -1}, "heartbeat"),
        ({"listen": "tcp://a:b"}, "listen="),
        ({"listen": "tcp://127.0.0.1:0", "transport": "unix"}, "contradict"),
        ({"listen": "tcp://127.0.0.1:0", "bind": "0.0.0.0"}, "leave bind="),
        ({"listen": "tcp://127.0.0.1:99999"}, "65535"),
        ({"address": "tcp://127.0.0.1:1", "listen": "tcp://127.0.0.1:2"}, "leave listen="),
        ({"address": "tcp://127.0.0.1:1", "heartbeet": 3}, "did you mean heartbeat"),
        ({"address": "tcp://127.0.0.1:1", "transport": "unix"}, "takes Unix sockets only .* over TCP"),
        ({"engine": "slurm"}, "there is no engine 'slurm'"),
        ({"engine": 5}, "an Engine"),
        ({"labels": ["a"]}, "labels must be"),
        ({"resources": {"GPU": 1}}, "num_gpus"),
        ({"spmd": True}, "RANK"),
        *(({"preload": ["torch", name]}, "no module") for name in ("no_module", "", "__main__", ".relative")),
        *(({"preload": wrong}, "preload must") for wrong in ("torch", 3, [3])),
        ({"address": "tcp://127.0.0.1:1", "preload": ["torch"]}, "leave preload= to its driver"),
    ],
)
@row("init(address=", "from-ray")
def test_init_rejects_wrong_options(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        init(**given)
    assert not rpc.is_initialized()


def test_first_use_of_actors_from_several_threads_starts_one_cluster() -> None:
    with ThreadPoolExecutor(4) as pool:
        handles = list(pool.map(lambda _: Counter.options(num_cpus=0).remote(), range(4)))
    try:
        assert actorrpc.get([each.add.remote() for each in handles]) == [1] * 4
        assert [each.name for each in rpc.workers()].count("driver") == 1
    finally:
        rpc.shutdown()


def test_a_failed_init_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/not/there")
    with pytest.raises(OSError, match="not/there"):
        init()
    assert not rpc.is_initialized()


@contextlib.contextmanager
def _start_hooks(*hooks: Callable[[Any], Any]) -> Iterator[None]:
    found: list[Any] = rpc.api.on_start  # type: ignore[attr-defined]
    found.extend(hooks)
    try:
        yield
    finally:
        del found[-len(hooks) :]


def test_end_functions_of_start_hooks_run_even_after_ctrl_c_or_a_failed_start() -> None:
    events: list[Any] = []

    def start(worker: Any) -> Any:
        events.append(worker.agent.name)
        return lambda graceful: events.append(graceful)

    def interrupted(worker: Any) -> Any:
        def end(graceful: bool) -> None:
            events.append(("interrupted", graceful))
            if graceful:
                raise KeyboardInterrupt

        return end

    with _start_hooks(start, interrupted):
        init()
        with pytest.raises(KeyboardInterrupt):
            rpc.shutdown()
    assert not rpc.is_initialized()
    assert events[-4:] == ["driver", ("interrupted", True), ("interrupted", False), False]

    def fail(worker: Any) -> Any:
        raise KeyError("of this start")

    with _start_hooks(start, fail), pytest.raises(KeyError):
        init()
    assert events[-2:] == ["driver", False]
    assert not rpc.is_initialized()


# -- ending ----------------------------------------------------------------------------------------------


_END = """
how = sys.argv[1]
init()
names = [spawn() for _ in range(2)]
server = current_cluster().engine.server.pid
pids = [rpc.rpc_sync(name, os.getpid) for name in names]
rpc.rpc_sync(names[0], remotes.say, ("the last words",))
pids.append(rpc.rpc_sync(names[0], remotes.sleeper))
future = rpc.rpc_async(names[1], remotes.wait_for_ever, timeout=0)
sys.stdout.flush()
print(os.environ["ACTORRPC_RUNTIME_DIR"], server, *pids, flush=True)
if how == "raise":
    raise KeyError("of the driver")
elif how == "exit":
    sys.exit(3)
elif how == "os._exit":
    os._exit(4)
elif how == "wait":
    threading.Event().wait()
elif how == "thread":
    threading.Thread(target=rpc.shutdown).start()
"""


@pytest.mark.parametrize(
    "how", rest_is_slow(["end", "raise", "exit", "os._exit", "thread", "kill", "interrupt", "terminate"], 1)
)
def test_workers_and_files_are_gone_however_the_driver_ends(tmp_path: Path, how: str) -> None:
    runtime_directory = tmp_path / "run"
    runtime_directory.mkdir(mode=0o700)
    signals = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "terminate": signal.SIGTERM}
    argument = "wait" if how in signals else how
    with script(
        tmp_path,
        _END,
        argument,
        prints=[
            r"threads of 'Counter-\d' are still in user code after shutdown",  # a call that blocks forever
            *{"raise": ["Traceback.*KeyError"], "interrupt": ["Traceback.*KeyboardInterrupt"]}.get(how, ()),
        ],
        env={"ACTORRPC_RUNTIME_DIR": str(runtime_directory)},
        process_group=0,
    ) as process:
        assert process.stdout is not None
        line = ""
        while not line.startswith(str(runtime_directory)):
            line = process.stdout.readline()
            assert line or process.poll() is None
        pids = [int(word) for word in line.split()[1:]]
        assert len(pids) == 4
        if how in signals:
            os.killpg(process.pid, signals[how])  # like Ctrl-C in a terminal
        code, _, err = _finish(process)
        # The fork server may outlive the driver by a moment.
        until(lambda: not any(alive(pid) for pid in pids))
        until(lambda: not list(runtime_directory.iterdir()))
    expected = {"raise": 1, "exit": 3, "os._exit": 4, "kill": -9, "interrupt": -2, "terminate": -15}
    assert code == expected.get(how, 0)
    assert ("KeyError: 'of the driver'" in err) == (how == "raise"), err
    assert "Fatal" not in err
    assert "BrokenPipe" not in err
    if how != "interrupt":
        assert err.count("Traceback") == (how == "raise"), err


_INTERRUPTED = """
from actorrpc._stacks import top_frame

main = threading.main_thread().ident
inside = sys.argv[1].split(",")
stop = threading.Event()

def interrupt():
    while not stop.is_set():
        frame = top_frame(main)
        while frame is not None:
            if frame.f_code.co_name in inside and ("actorrpc" in frame.f_code.co_filename):
                print("sent", flush=True)
                signal.pthread_kill(main, signal.SIGINT)
                return
            frame = frame.f_back
        stop.wait(0.0005)

thread = threading.Thread(target=interrupt)
thread.start()
try:
    with init():
        current_cluster().spawn(ProcessSpec(label="Counter")).wait(60)
        current_cluster().spawn(ProcessSpec(label="Counter")).wait(60)
        rpc.shutdown()
except KeyboardInterrupt:
    print("interrupted")
finally:
    stop.set()
    thread.join()
assert not rpc.is_initialized()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert [t.name for t in threading.enumerate()] == ["MainThread"], threading.enumerate()
with init():
    assert rpc.rpc_sync(spawn(), operator.add, (1, 2)) == 3
"""


_ALWAYS = ["install,enter", "spawn,wait", "shut_down"]
_MORE_AT_NIGHT = ["start", "park", "_end_process", "close"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "inside", _ALWAYS + _MORE_AT_NIGHT if os.environ.get("ACTORRPC_NIGHTLY") == "1" else _ALWAYS
)
def test_after_ctrl_c_in_init_or_shutdown_a_new_cluster_can_start(tmp_path: Path, inside: str) -> None:
    with script(tmp_path, _INTERRUPTED, inside) as process:
        code, out, err = _finish(process)
    assert code == 0, err
    assert "sent" in out
    check(err, BETWEEN_STEPS)


# -- forks of the driver ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_forked_child_of_the_driver_has_no_cluster() -> None:
    with init(), workers(1) as (name,):

        def check_child() -> None:
            assert not rpc.is_initialized()
            assert current_cluster() is None
            with pytest.raises(NotInitializedError):
                rpc.rpc_sync(name, os.getpid)

        assert exit_code(fork(check_child)) == 0
        assert rpc.rpc_sync(name, remotes.names) == ["driver", name]


_FORK = """
init()
names = [spawn() for _ in range(2)]
pids = [rpc.rpc_sync(name, os.getpid) for name in names] + [current_cluster().engine.server.pid]
child = os.fork()
if child == 0:
    # This child outlives the driver.
    sys.stdout.close()
    os.close(1)
    os.close(2)
    threading.Event().wait()
print(child, *pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_end_with_a_killed_driver_even_if_its_forked_child_survives(tmp_path: Path) -> None:
    with script(tmp_path, _FORK) as process:
        _, out, _ = _finish(process)
        child, *pids = map(int, out.split())
        try:
            until(lambda: not any(alive(pid) for pid in pids))
            assert alive(child)
        finally:
            os.kill(child, signal.SIGKILL)
