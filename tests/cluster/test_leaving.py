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
from concurrent.futures import ThreadPoolExecutor

import pytest

import actorrpc
from actorrpc.cli.commands import main
from actorrpc.cluster import ClusterContext, init
from actorrpc.errors import PlacementError
from tests.cluster.drive import environment, python, until
from tests.cluster.joiners import DRIVER, KEY, driver_to_end, is_there, joiner, output, wait_for
from tests.cluster.machines import Machines
from tests.cluster.remotes import Counter, Fixed
from tests.faults.hosts import Network, needs_hosts
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.limit(120)]
_GROUPS, _GROUP = 20 if os.environ.get("ACTORRPC_NIGHTLY") == "1" else 6, 5


@pytest.fixture
def driver() -> Iterator[ClusterContext]:
    with init(listen="tcp://127.0.0.1:0", num_cpus=2) as context:
        yield context


def _next_line(worker: subprocess.Popen[str]) -> str:
    """Return the next line of a worker's standard error."""
    assert worker.stderr is not None
    return worker.stderr.readline()


def test_sigterm_lets_running_calls_finish_and_runs_on_stop(driver: ClusterContext) -> None:
    with joiner(driver.address, "--name", "old") as old:
        wait_for("old")
        ends = Counter.remote()
        fixed = Fixed.options(worker="old").remote(ends)
        running = fixed.wait.remote()
        until(lambda: any(call.method == "wait" for each in actorrpc.state().actors for call in each.running))
        for _ in range(3):  # Slurm and systemd may send a signal several times
            old.send_signal(signal.SIGTERM)
        until(lambda: _is_draining("old"))
        actorrpc.get(fixed.open.remote())
        assert actorrpc.get(running) == "finished"
        assert output(old)[0] == 0
        assert actorrpc.get(ends.add.remote()) == 2


@pytest.mark.prints(
    "drain of 'busy': its calls have not finished within 0.5 s", "abandons calls: 1 of Fixed#"
)
@pytest.mark.parametrize("how", ["grace", "second signal"])
def test_a_worker_leaves_after_its_grace_period_or_at_a_second_signal(
    driver: ClusterContext, how: str
) -> None:
    grace = "0.5" if how == "grace" else "1000"
    prints = "abandons calls: 1 of Fixed#"
    with joiner(driver.address, "--name", "busy", "--grace", grace, prints=prints) as worker:
        wait_for("busy")
        fixed = Fixed.options(worker="busy").remote()
        running = fixed.wait.remote()
        until(lambda: any(each.running for each in actorrpc.state().actors))
        worker.send_signal(signal.SIGTERM)
        if how != "grace":
            until(lambda: _is_draining("busy"))
            threading.Event().wait(1.1)  # a signal within 1 s after the first one is taken for its repetition
            worker.terminate()
        with pytest.raises(actorrpc.errors.ActorError):
            actorrpc.get(running)
        code, err = output(worker)
        assert code == 0
        assert prints in err


def test_a_worker_runs_although_its_launcher_has_closed_the_standard_streams(driver: ClusterContext) -> None:
    command = [sys.executable, "-m", "actorrpc.worker", "--join", driver.address, "--name", "closed"]
    worker = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], env=environment())
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


@pytest.mark.limit(300)
@pytest.mark.prints(r"\(pid \d+\): drain", "it has left$")
def test_no_call_fails_while_workers_get_sigterm_and_a_host_is_drained(driver: ClusterContext) -> None:
    """Thirty workers (nightly: a hundred), started in groups, get SIGTERM in turn; then the host of the last group is drained."""
    seen: list[list[int]] = [[] for _ in range(10)]
    stop = threading.Event()

    def call(counter: actorrpc.ActorHandle, results: list[int]) -> None:
        while not stop.is_set():
            results.append(actorrpc.get(counter.add.remote()))

    def make_progress() -> None:
        before = [len(results) for results in seen]
        until(
            lambda: (
                all(len(results) > count for results, count in zip(seen, before, strict=True))
                or any(each.done() for each in calls)
            )  # a call has failed
        )

    def start(name: str, address: str = "127.0.0.2") -> subprocess.Popen[str]:
        options = ("--labels", "pool=a", "--name", name, "--count", str(_GROUP))
        group = stack.enter_context(joiner(driver.address, *options, ACTORRPC_BIND=address))
        wait_for(*(f"{name}-{number}" for number in range(_GROUP)))
        return group

    on_workers = Counter.options(labels={"pool": "a"}, spread=True, placement_timeout=60)
    with contextlib.ExitStack() as stack:
        group = start("group0")
        pool = stack.enter_context(ThreadPoolExecutor(len(seen)))
        stack.callback(stop.set)
        calls = [pool.submit(call, on_workers.remote(), results) for results in seen]
        for number in range(_GROUPS):
            following = start(f"group{number + 1}")
            workers = [each for each in actorrpc.workers() if each.name.startswith(f"group{number}-")]
            for worker in workers:
                make_progress()
                os.kill(worker.pid, signal.SIGTERM)
                until(lambda name=worker.name: not is_there(name))  # type: ignore[misc]
            assert output(group)[0] == 0
            group = following
        start("last", "127.0.0.1")
        make_progress()
        assert main(["drain", "--pid", str(os.getpid()), "127.0.0.2"]) == 0
        assert output(group)[0] == 0
        make_progress()
        stop.set()
        for each in calls:
            each.result()
    assert all(results == list(range(1, len(results) + 1)) for results in seen)


@pytest.mark.prints(r"\(pid \d+\): drain", "it has left$", "have not finished within 0.3 s")
def test_the_drain_command_says_which_workers_have_left_within_the_grace(
    driver: ClusterContext, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("drain", "--pid", str(os.getpid()))
    with joiner(driver.address, "--name", "one") as worker:
        wait_for("one")
        fixed = Fixed.options(worker="one").remote()
        running = fixed.wait.remote()
        until(lambda: any(each.running for each in actorrpc.state().actors))
        assert main([*where, "one", "--grace", "0.3"]) == 1
        assert "worker one has not left within 0.3 s" in capsys.readouterr().out
        with pytest.raises(PlacementError, match=r"worker 'one'; there are .* leaving"):
            Fixed.options(worker="one").remote()
        actorrpc.get(fixed.open.remote())
        assert main([*where, "127.0.0.1"]) == 0
        assert capsys.readouterr().out == "worker one has left\n"
        assert output(worker)[0] == 0
        assert actorrpc.get(running) == "finished"
        assert main([*where, "nowhere"]) == 2
        assert "or the host 'nowhere'" in capsys.readouterr().err


_SCRIPT = """
import actorrpc, os, sys
from actorrpc import rpc
with actorrpc.init(sys.argv[1], name="script"):
    sys.stdin.readline()
    print(rpc.rpc_sync("driver", os.getpid), flush=True)
"""


def test_a_drained_process_that_runs_its_own_script_continues(driver: ClusterContext) -> None:
    with python("-c", _SCRIPT, driver.address, stdin=subprocess.PIPE, stderr=None) as script:
        wait_for("script")
        counter = Counter.options(worker="script").remote()
        assert actorrpc.get(counter.where.remote()) == "script"
        actorrpc.drain("script")
        assert actorrpc.get(counter.where.remote()) != "script"
        assert is_there("script")
        leaving = [each.what for each in actorrpc.state().findings if "'script'" in each.what]
        assert len(leaving) == 1
        assert "it is drained: nothing new is placed on it" in leaving[0]
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
