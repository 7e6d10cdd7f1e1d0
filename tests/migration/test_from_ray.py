"""The rows of docs/migration/from-ray.md that no test elsewhere is marked with."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import get
from actorrpc.testing import InProcessCluster
from tests.actors.e2e.kit import Gate, open_gate, pass_gate, row_of, until
from tests.announced import LAST_WORDS, PROFILER
from tests.migration.rows import row

_tries: list[Any] = []  # records of methods, which run in this process


@pytest.fixture(autouse=True)
def _clean() -> None:
    _tries.clear()


@actorrpc.remote
class Worker:
    def __init__(self) -> None:
        self.n = 0

    def count(self) -> int:
        self.n += 1
        return self.n

    def thread(self) -> int:
        return threading.get_ident()

    def call_after(self, gate: Any, other: Any) -> Any:
        get(gate.wait.remote())
        return get(other.thread.remote())

    def wait_for(self, gate: Any) -> Any:
        return get(gate.wait.remote())

    def large(self) -> bytes:
        return bytes(1 << 20)

    def puts(self) -> list[Any]:
        return [actorrpc.put("small")]

    def fails_in_between(self) -> Iterator[int]:
        _tries.append(len(_tries))
        yield 1
        if len(_tries) == 1:
            raise ValueError("once")
        yield 2

    def fails_at_first(self) -> Iterator[int]:
        _tries.append(len(_tries))
        if len(_tries) == 1:
            raise ValueError("once")
        yield 2


@actorrpc.remote
class Stopping:
    def __init__(self, word: str) -> None:
        self.word = word

    def leave(self) -> None:
        actorrpc.exit_actor()

    def work(self) -> str:
        return "done"

    def on_stop(self) -> None:
        _tries.append(self.word)


@row("actors live in worker processes", "from-ray")
def test_actors_can_be_placed_in_a_worker_or_with_another_actor(near: InProcessCluster) -> None:
    actor = Worker.options(worker="worker0").remote()
    together = Worker.options(worker=actor).remote()
    others = Worker.remote()
    get([actorrpc.ready(each) for each in (actor, together, others)])
    assert [row_of(each).worker for each in (actor, together, others)] == ["worker0", "worker0", "worker1"]


@pytest.mark.usefixtures("passing")
@row("actors that wait for each other in a circle", "from-ray")
def test_a_deadlock_error_names_all_actors_of_the_cycle() -> None:
    gate, one, two = Gate.remote(), Worker.options(name="one").remote(), Worker.options(name="two").remote()
    calls = [one.call_after.remote(gate, two), two.call_after.remote(gate, one)]  # two chains of calls
    until(lambda: get(gate.count.remote()) == 2)
    get(gate.open.remote())
    actorrpc.wait(calls, num_returns=2)
    found = [call.future().exception() for call in calls]
    errors = [str(each) for each in found if isinstance(each, actorrpc.DeadlockError)]
    assert errors
    assert all("one" in each and "two" in each for each in errors)
    alone = Worker.options(name="alone", reentrant=False).remote()
    with pytest.raises(actorrpc.DeadlockError, match="alone"):
        get(alone.call_after.remote(gate, alone))


@pytest.mark.usefixtures("near")
@row("generators that are made again", "from-ray")
def test_generators_are_retried_only_before_their_first_item() -> None:
    actor = Worker.remote()
    retried = {"retry_exceptions": True, "max_task_retries": 2}
    assert list(actor.fails_at_first.options(**retried).remote().values()) == [2]
    _tries.clear()
    stream = actor.fails_in_between.options(**retried).remote().values()
    assert next(stream) == 1
    with pytest.raises(ValueError, match="once"):
        next(stream)
    assert len(_tries) == 1


@pytest.mark.usefixtures("near")
@row("actor.__ray_terminate__.remote()", "from-ray")
def test_an_exit_sent_by_call_runs_after_waiting_calls() -> None:
    actor, gate = Worker.remote(), Gate.remote()
    held = actor.wait_for.remote(gate)
    left = actorrpc.call(actor, _leave)
    get(gate.open.remote())
    assert get(held) == "open"
    with pytest.raises(actorrpc.ActorDiedError):
        get(left)


def _leave(_: Any) -> None:
    actorrpc.exit_actor()


@pytest.mark.usefixtures("near")
@row("__ray_shutdown__() of the class", "from-ray")
@row("__cleanup__", "from-monarch")
def test_on_stop_runs_after_exit_drop_and_kill() -> None:
    actor = Stopping.remote("left")
    with pytest.raises(actorrpc.ActorDiedError):
        get(actor.leave.remote())
    until(lambda: _tries == ["left"])
    actor = Stopping.remote("dropped")
    assert get(actor.work.remote()) == "done"
    del actor
    until(lambda: _tries == ["left", "dropped"])
    actor = Stopping.remote("killed")
    assert get(actor.work.remote()) == "done"
    actorrpc.kill(actor)
    until(lambda: len(_tries) == 3)


@pytest.mark.usefixtures("near")
@pytest.mark.prints(PROFILER)
@row("cluster_resources(), nodes()", "from-ray")
def test_workers_actors_resources_and_profiles_can_be_listed() -> None:
    actor = Worker.remote()
    with torch.profiler.profile() as found:
        get(actor.count.remote())
    assert any("Worker.count" in event.name for event in found.events())
    assert [each.name for each in actorrpc.workers()] == ["worker0", "worker1"]
    assert [each.class_name for each in actorrpc.list_actors()] == ["Worker"]
    assert [each.class_name for each in actorrpc.state(30).actors] == ["Worker"]
    assert actorrpc.cluster_resources()["CPU"] == sum(each["Resources"]["CPU"] for each in actorrpc.nodes())


@pytest.mark.parametrize(
    "name", ["scheduling_strategy", "memory", "accelerator_type", "placement_group", "max_calls"]
)
@row("scheduling_strategy, memory", "from-ray")
def test_unsupported_options_of_actors_and_tasks_are_refused(name: str) -> None:
    task = actorrpc.remote(_leave)
    for each in (task, Worker):
        with pytest.raises(ValueError, match=name) as caught:
            each.options(**{name: {"a": 1}})
        assert "not an option" not in str(caught.value)


@pytest.mark.usefixtures("near")
@row("exit_actor() in a task", "from-ray")
def test_exit_actor_outside_of_an_actor_raises() -> None:
    with pytest.raises(RuntimeError):
        get(actorrpc.remote(actorrpc.exit_actor).remote())
    with pytest.raises(RuntimeError):
        actorrpc.exit_actor()


def _spin(seen: Any) -> None:
    try:
        _tries.append("runs")
        while True:
            time.sleep(0.001)
    except BaseException as error:
        _tries.append(type(error))
        raise


@pytest.mark.usefixtures("near")
@row("cancel(ref) of a running task", "from-ray")
def test_cancel_interrupts_a_running_task() -> None:
    call = actorrpc.remote(_spin).remote(None)
    until(lambda: _tries)
    assert actorrpc.cancel(call)
    with pytest.raises(actorrpc.CancelledError):
        get(call)
    until(lambda: len(_tries) == 2)
    assert issubclass(_tries[1], KeyboardInterrupt)


@pytest.mark.usefixtures("near")
@row("ref.future().cancel()", "from-ray")
def test_cancelling_a_future_cancels_the_call() -> None:
    gate = Gate.remote()
    held, other = gate.wait.remote(), gate.wait.remote()

    async def waits() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(held, 0.01)

    asyncio.run(waits())
    assert other.future().cancel()
    with pytest.raises(actorrpc.CancelledError):
        get(other)
    get(gate.open.remote())
    assert get(held) == "open"


@row("the large result of an actor outlives it", "from-ray")
@row("a small value that was put", "from-ray")
def test_only_unfetched_large_results_are_lost_with_their_process(passing: InProcessCluster) -> None:
    actor = Worker.options(worker="worker1").remote()
    large = actor.large.remote()
    [small] = get(actor.puts.remote())
    fetched = actor.large.remote()
    assert len(get(fetched)) == 1 << 20
    actorrpc.wait([large], fetch_local=False)
    passing.kill("worker1")
    with pytest.raises(
        actorrpc.PeerDiedError, match=r"the result of Worker\.large .*is lost: the call was executed"
    ):
        get(large)
    assert len(get(fetched)) == 1 << 20
    assert get(small) == "small"


def _stream(given: int, gate: str) -> Iterator[int]:
    for number in range(2):
        if number == given and os.path.exists(gate):
            pass_gate(gate)  # wait until the caller has read the items
            os.unlink(gate)
            os.kill(os.getpid(), signal.SIGKILL)
        yield number


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
@pytest.mark.prints(LAST_WORDS)  # may be printed during a later test
class TestProcesses:
    @row("a task's stream whose process dies", "from-ray")
    @pytest.mark.prints("died", "not finished", "made again", "restarted")
    def test_a_stream_of_a_task_is_retried_only_before_its_first_item(self, tmp_path: Path) -> None:
        for given in (0, 1):
            gate = tmp_path / f"gate{given}"
            os.mkfifo(gate)
            stream = actorrpc.remote(max_retries=1)(_stream).remote(given, str(gate)).values()
            assert [next(stream) for _ in range(given)] == [0] * given
            open_gate(gate)
            if given:
                with pytest.raises(actorrpc.PeerDiedError):
                    next(stream)
            else:
                assert list(stream) == [0, 1]
            assert not gate.exists()


@pytest.mark.slow
@row("init(num_cpus=0): actors and tasks", "from-ray")
def test_without_cpus_only_actors_and_tasks_that_need_none_run() -> None:
    with actorrpc.init(num_cpus=0):
        for make in (Worker, Worker.options(placement_timeout=60)):
            with pytest.raises(actorrpc.PlacementError, match=r"needs CPU 1; there are .*new processes on"):
                make.remote()
        with pytest.raises(actorrpc.PlacementError):
            get(actorrpc.remote(os.getpid).remote())
        assert get(Worker.options(num_cpus=0).remote().count.remote()) == 1
