"""How workers leave: at SIGTERM, by a drain, and without their driver; and workers that join again (``--retry``)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import actorrpc
from actorrpc import rpc
from actorrpc.cli.commands import main
from actorrpc.cluster import ClusterContext, init
from actorrpc.errors import PlacementError
from tests.cluster.drive import until
from tests.cluster.joiners import CLEAN, DRIVER, KEY, driver_to_end, is_there, joiner, output, wait_for
from tests.cluster.machines import Machines
from tests.faults.hosts import Network, needs_hosts
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.limit(120)]
_ROOT = Path(__file__).resolve().parents[2]
_SIGTERMS = 100 if os.environ.get("ACTORRPC_NIGHTLY") == "1" else 3


@actorrpc.remote
class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count

    def where(self) -> str:
        return rpc.get_worker_info().name

    def checkpoint(self) -> int:
        return self.count

    def restore(self, count: int) -> None:
        self.count = count


@actorrpc.remote
class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)

    def read(self) -> list[str]:
        return self.lines


@actorrpc.remote
class Fixed:
    """An actor without checkpoint(), with a call that ends when another call opens the gate."""

    def __init__(self, log: actorrpc.ActorHandle | None = None) -> None:
        self.gate = threading.Event()
        self.log = log

    def wait(self) -> str:
        self.gate.wait()
        return "finished"

    def open(self) -> None:
        self.gate.set()

    def on_stop(self) -> None:
        if self.log is not None:
            actorrpc.get(self.log.add.remote("stopped"))


@pytest.fixture
def driver() -> Iterator[ClusterContext]:
    with init(listen="tcp://127.0.0.1:0", num_cpus=2) as context:
        yield context


def _next_line(worker: subprocess.Popen[str]) -> str:
    """Return the next line of a worker's standard error."""
    assert worker.stderr is not None
    return worker.stderr.readline()


def test_sigterm_lets_calls_finish_and_moves_actors_with_a_checkpoint(driver: ClusterContext) -> None:
    with joiner(driver.address, "--name", "old") as old, joiner(driver.address, "--name", "new"):
        wait_for("old", "new")
        log = Log.remote()
        fixed = Fixed.options(worker="old", max_concurrency=2).remote(log)
        moving = [Counter.options(worker="old").remote() for _ in range(3)]
        assert actorrpc.get([each.add.remote() for each in moving]) == [1, 1, 1]
        running = fixed.wait.remote()
        until(lambda: any(call.method == "wait" for each in actorrpc.state().actors for call in each.running))
        calls = [each.add.remote() for each in moving for _ in range(20)]
        old.send_signal(signal.SIGTERM)
        assert actorrpc.get(calls) == [*range(2, 22)] * 3
        until(lambda: "old" not in actorrpc.get([each.where.remote() for each in moving]))
        assert old.poll() is None
        actorrpc.get(fixed.open.remote())
        assert actorrpc.get(running) == "finished"
        assert output(old)[0] == 0
        assert actorrpc.get(log.read.remote()) == ["stopped"]
        assert actorrpc.get([each.add.remote() for each in moving]) == [22, 22, 22]


@pytest.mark.prints("drain of 'busy': its calls have not finished within 0.5 s")
@pytest.mark.parametrize("how", ["grace", "second signal"])
def test_a_worker_leaves_after_its_grace_period_or_at_a_second_signal(
    driver: ClusterContext, how: str
) -> None:
    with joiner(driver.address, "--name", "busy", "--grace", "0.5" if how == "grace" else "1000") as worker:
        wait_for("busy")
        fixed = Fixed.options(worker="busy", max_concurrency=2).remote()
        running = fixed.wait.remote()
        until(lambda: any(each.running for each in actorrpc.state().actors))
        worker.send_signal(signal.SIGTERM)
        if how != "grace":
            until(lambda: _is_draining("busy"))
            worker.send_signal(signal.SIGTERM)
        with pytest.raises(actorrpc.errors.ActorError):
            actorrpc.get(running)
        assert output(worker)[0] == 0


def test_a_worker_runs_although_its_launcher_has_closed_the_standard_streams(driver: ClusterContext) -> None:
    command = [sys.executable, "-m", "actorrpc.worker", "--join", driver.address, "--name", "closed"]
    worker = subprocess.Popen(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], env={**CLEAN, "PYTHONPATH": str(_ROOT)}
    )
    try:
        wait_for("closed")
        worker.terminate()
        assert worker.wait() == 0
    finally:
        worker.kill()
        worker.wait()


def _is_draining(worker: str) -> bool:
    cluster = actorrpc.agent.context.current_worker().cluster  # type: ignore[attr-defined]
    return any(each.name == worker and each.draining for each in cluster.resources())


def test_no_call_fails_while_workers_get_sigterm_under_load(driver: ClusterContext) -> None:
    stop = threading.Event()
    seen: list[list[int]] = [[] for _ in range(10)]
    names = (f"worker-{number}" for number in range(_SIGTERMS + 2))

    def call(counter: actorrpc.ActorHandle, results: list[int]) -> None:
        while not stop.is_set():
            results.append(actorrpc.get(counter.add.remote()))

    def start() -> subprocess.Popen[str]:
        worker = stack.enter_context(joiner(driver.address, "--labels", "pool=a", "--name", next(names)))
        assert "has joined" in _next_line(worker)
        return worker

    def end() -> None:
        stop.set()
        for each in callers:
            each.join()

    options = Counter.options(labels={"pool": "a"}, spread=True, placement_timeout=60)
    callers = [threading.Thread(target=call, args=(options.remote(), results)) for results in seen]
    with contextlib.ExitStack() as stack:
        workers = [start(), start()]
        for each in callers:
            each.start()
        stack.callback(end)
        for _ in range(_SIGTERMS):
            until(lambda: all(results[-1:] > [10] for results in seen))
            workers.append(start())
            workers[0].terminate()
            assert output(workers.pop(0))[0] == 0
        end()
    assert all(results == list(range(1, len(results) + 1)) for results in seen)


@pytest.mark.prints(
    r"\(pid \d+\): drain", "it has left$", "have not finished within 0.3 s", "or the host 'nowhere'"
)
def test_the_drain_command_waits_until_all_workers_of_a_host_have_left(
    driver: ClusterContext, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("drain", "--pid", str(os.getpid()))
    with joiner(driver.address, "--name", "one") as one, joiner(driver.address, "--name", "two") as two:
        wait_for("one", "two")
        fixed = Fixed.options(worker="two", max_concurrency=2).remote()
        running = fixed.wait.remote()
        until(lambda: any(each.running for each in actorrpc.state().actors))
        assert main([*where, "one"]) == 0
        assert capsys.readouterr().out == "worker one has left\n"
        assert output(one)[0] == 0
        assert main([*where, "two", "--grace", "0.3"]) == 1
        assert "worker two has not left within 0.3 s" in capsys.readouterr().out
        with pytest.raises(PlacementError, match=r"worker 'two'; there are .* leaving"):
            Fixed.options(worker="two").remote()
        actorrpc.get(fixed.open.remote())
        assert main([*where, "127.0.0.1"]) == 0
        assert "worker two has left" in capsys.readouterr().out
        assert output(two)[0] == 0
        assert actorrpc.get(running) == "finished"
        assert main([*where, "nowhere"]) == 2


_SCRIPT = """
import actorrpc, os, sys
from actorrpc import rpc
with actorrpc.init(sys.argv[1], name="script"):
    sys.stdin.readline()
    print(rpc.rpc_sync("driver", os.getpid), flush=True)
"""


def test_a_drained_process_that_runs_its_own_script_continues(driver: ClusterContext) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, driver.address],
        env={**CLEAN, "PYTHONPATH": str(_ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as script:
        wait_for("script")
        counter = Counter.options(worker="script").remote()
        assert actorrpc.get(counter.where.remote()) == "script"
        actorrpc.drain("script")
        assert actorrpc.get(counter.where.remote()) != "script"
        assert is_there("script")
        assert script.communicate("\n")[0] == f"{os.getpid()}\n"
        assert script.returncode == 0


# -- without a driver ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver_dies", [True, False])
def test_a_worker_without_its_driver_prints_the_reason_and_exits_with_1(driver_dies: bool) -> None:
    with (
        driver_to_end(ACTORRPC_HEARTBEAT="0.2") as (address, process),
        joiner(address, "--name", "far", ACTORRPC_KEY=KEY) as worker,
    ):
        assert "has joined" in _next_line(worker)
        if driver_dies:
            process.kill()
        else:
            worker.send_signal(signal.SIGSTOP)
            assert process.stdout is not None
            assert "far is dead\n" in process.stdout
            worker.send_signal(signal.SIGCONT)
        code, err = output(worker)
        why = "its end of the connection closed" if driver_dies else "it considers this worker dead"
        assert re.fullmatch(
            rf"worker 'far' has lost its driver at {address}: {why}.*\(last message at .*\n", err
        )
        assert code == 1


@pytest.mark.prints(r"'joining-\w+' did not prove to worker 'driver'")
def test_a_worker_with_retry_joins_again_and_ends_only_at_sigterm_or_if_it_is_refused() -> None:
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    with (
        joiner(address, "--name", "far", "--retry", ACTORRPC_KEY=KEY) as worker,
        joiner(address, "--name", "refused", "--retry", ACTORRPC_KEY=KEY[::-1]) as refused,
    ):
        assert "'far' waits for a driver: no driver answers at" in _next_line(worker)
        with driver_to_end(port) as (_, process):
            assert _next_line(worker) == f"worker 'far' has joined {address}\n"
            code, err = output(refused)
            assert (code, "another key" in err) == (3, True)
            process.communicate()  # the driver shuts down
            assert _next_line(worker) == f"worker 'far' has left the cluster at {address}\n"
        assert "waits for a driver" in _next_line(worker)
        with driver_to_end(port) as (_, process):
            assert _next_line(worker) == f"worker 'far' has joined {address}\n"
            process.kill()
            assert f"'far' has lost its driver at {address}" in _next_line(worker)
        assert "waits for a driver" in _next_line(worker)
        worker.terminate()
        assert output(worker) == (0, "")


@needs_hosts
@pytest.mark.prints(r"^worker 'b' has (joined|lost its driver)|^worker 'b' waits for a driver")
def test_a_worker_with_retry_joins_again_after_a_long_break_of_the_network() -> None:
    with Network("a", "b", ipv4=True) as network, Machines(network) as machines:
        address = f"tcp://{network['a'].address}:7777"
        process = machines.start(
            "a", sys.executable, "-c", DRIVER, address, env={"ACTORRPC_HEARTBEAT": "0.3"}
        )
        assert process.expect(address) == ""
        worker = machines.join("b", address, "--retry")
        until(lambda: "has joined" in worker.errors)
        network.split("b")
        until(lambda: "has lost its driver" in worker.errors)
        until(lambda: process.expect("b") == "is dead")
        network.heal()
        until(lambda: worker.errors.count("has joined") == 2)
        worker.process.terminate()
        worker.ends()
        process.ends()
        machines.are_empty("a", "b")
