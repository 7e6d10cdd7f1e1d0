"""The rows of docs/migration/from-ray.md."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import pytest
import torch

import actorrpc
from actorrpc import get
from actorrpc.testing import InProcessCluster
from tests.actors.e2e.kit import Gate, open_gate, pass_gate, row_of, until
from tests.announced import LAST_WORDS, PROFILER
from tests.migration import test_from_monarch, test_from_multiprocessing
from tests.migration.rows import check, row


def test_each_row_of_the_page_has_a_test() -> None:
    check("from-ray.md", globals(), test_from_monarch, test_from_multiprocessing)


class Wrong(ValueError):
    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


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

    def back(self, other: Any) -> Any:
        return get(other.thread.remote())

    def call_and_be_called_back(self, other: Any) -> tuple[int, int]:
        return threading.get_ident(), get(other.back.remote(actorrpc.current_actor()))

    def call_and_be_called_back_in_a_loop(self, other: Any) -> tuple[int, int]:
        async def asks() -> Any:
            return await other.back.remote(actorrpc.current_actor())

        return threading.get_ident(), asyncio.run(asks())

    def wrong(self) -> None:
        raise Wrong("no", 3)

    def spin(self) -> None:
        while True:
            time.sleep(0.001)

    def call_after(self, gate: Any, other: Any) -> Any:
        get(gate.wait.remote())
        return get(other.thread.remote())

    def wait_for(self, gate: Any) -> Any:
        return get(gate.wait.remote())

    def change(self, array: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
        array += 1
        return array

    def echo(self, value: Any) -> Any:
        return value

    def large(self) -> bytes:
        return bytes(1 << 20)

    def puts(self) -> list[Any]:
        return [actorrpc.put("small")]

    def leave(self) -> None:
        actorrpc.exit_actor()

    def steps(self, n: int = 3) -> Iterator[int]:
        yield from range(n)

    def fails_in_between(self) -> Iterator[int]:
        _tries.append(len(_tries))
        yield 1
        if len(_tries) == 1:
            raise Wrong("once", 1)
        yield 2

    def fails_at_first(self) -> Iterator[int]:
        _tries.append(len(_tries))
        if len(_tries) == 1:
            raise Wrong("once", 1)
        yield 2


@actorrpc.remote
class Kept:
    """An actor that keeps its state over restarts."""

    def __init__(self) -> None:
        self.n = 0

    def checkpoint(self) -> int:
        return self.n

    def restore(self, n: int) -> None:
        self.n = n

    def count(self) -> int:
        self.n += 1
        return self.n


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
        if os.path.isabs(self.word):
            Path(self.word).touch()


# -- additional and different features ------------------------------------------------------------------------------


@row("actors live in worker processes")
def test_actors_can_be_placed_in_a_worker_or_with_another_actor(near: InProcessCluster) -> None:
    actor = Worker.options(worker="worker0").remote()
    together = Worker.options(worker=actor).remote()
    others = Worker.remote()
    get([actorrpc.ready(each) for each in (actor, together, others)])
    assert [row_of(each).worker for each in (actor, together, others)] == ["worker0", "worker0", "worker1"]


@pytest.mark.usefixtures("near")
@row("tensors go through pickle")
def test_tensors_are_not_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a tensor is pickled")

    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", refuse)
    [found] = get(Worker.remote().echo.remote([{"x": torch.ones(3)}]))
    assert torch.equal(found["x"], torch.ones(3))


@pytest.mark.usefixtures("near")
@row("an actor that calls back into one that waits for it")
@pytest.mark.parametrize("method", ["call_and_be_called_back", "call_and_be_called_back_in_a_loop"])
def test_a_waiting_actor_is_called_back_on_its_own_thread(method: str) -> None:
    one, two = Worker.remote(), Worker.remote()
    waiting, back = get(getattr(one, method).remote(two))
    assert waiting == back


@pytest.mark.usefixtures("passing")
@row("actors that wait for each other in a circle")
def test_a_deadlock_error_names_all_actors_of_the_cycle() -> None:
    one = Worker.options(name="one", reentrant=False).remote()
    two = Worker.options(name="two", reentrant=False).remote()
    with pytest.raises(actorrpc.DeadlockError, match=r"(?s)(one.*two|two.*one)"):
        get(one.call_and_be_called_back.remote(two))
    gate, one, two = Gate.remote(), Worker.options(name="a").remote(), Worker.options(name="b").remote()
    calls = [one.call_after.remote(gate, two), two.call_after.remote(gate, one)]  # two chains of calls
    until(lambda: get(gate.count.remote()) == 2)
    get(gate.open.remote())
    actorrpc.wait(calls, num_returns=2)
    found = [call.future().exception() for call in calls]
    assert any(isinstance(each, actorrpc.DeadlockError) for each in found)


@pytest.mark.usefixtures("near")
@row("a running sync method cannot be cancelled")
@row("process.terminate()", "from-multiprocessing.md")
def test_cancel_interrupts_a_running_method() -> None:
    actor = Worker.remote()
    call = actor.spin.remote()
    until(lambda: row_of(actor).running_calls)
    assert actorrpc.cancel(call)
    with pytest.raises(actorrpc.CancelledError):
        get(call)
    assert get(actor.count.remote()) == 1


@pytest.mark.usefixtures("passing")
@row("timeouts of the wait")
def test_the_time_out_of_a_call_applies_to_nested_calls() -> None:
    actor, gate = Worker.remote(), Gate.remote()
    call = actor.wait_for.options(timeout=5.0).remote(gate)
    with pytest.raises(actorrpc.RpcTimeoutError):
        get(call)
    until(lambda: get(gate.count.remote()) == 0)  # the nested call was cancelled, too
    assert get(actor.count.remote()) == 1


@pytest.mark.usefixtures("passing")
@row("restarts: a count")
def test_restarts_are_limited_within_a_time_window_and_keep_state(passing: InProcessCluster) -> None:
    actor = Kept.options(max_restarts=1, restart_window_s=60.0).remote()
    for lived in range(3):
        assert get(actor.count.remote()) == lived + 1
        passing.clock.advance(100.0)
        actor.kill(no_restart=False)
    assert get(actor.count.remote()) == 4
    actor.kill(no_restart=False)
    with pytest.raises(actorrpc.ActorDiedError):
        get(actor.count.remote())


@row("calls while an actor restarts")
def test_calls_wait_for_a_restart(near: InProcessCluster) -> None:
    actor = Worker.options(max_restarts=-1, restart_backoff_s=60.0).remote()
    for _ in range(2):  # the second consecutive restart is delayed
        get(actor.count.remote())
        actor.kill(no_restart=False)
    until(lambda: row_of(actor).state == "RESTARTING")
    waits = actor.count.remote()
    with pytest.raises(actorrpc.ActorUnavailableError):
        get(actor.count.options(max_task_retries=0).remote())
    near.clock.advance(120.0)
    assert get(waits) == 1


@pytest.mark.usefixtures("near")
@row("generators that are made again")
def test_generators_are_retried_only_before_their_first_item() -> None:
    actor = Worker.remote()
    retried = {"retry_exceptions": True, "max_task_retries": 2}
    assert list(actor.fails_at_first.options(**retried).remote().values()) == [2]
    _tries.clear()
    stream = actor.fails_in_between.options(**retried).remote().values()
    assert next(stream) == 1
    with pytest.raises(Wrong):
        next(stream)
    assert len(_tries) == 1


@pytest.mark.usefixtures("passing")
@row("calls have no priorities and no deadlines")
def test_calls_have_priorities_and_actors_can_be_monitored() -> None:
    actor, gate = Worker.remote(), Gate.remote()
    held = actor.wait_for.remote(gate)
    until(lambda: get(gate.count.remote()))
    later = [actor.count.remote(), actor.count.options(priority=1).remote()]
    get(gate.open.remote())
    assert get([held, *later]) == ["open", 2, 1]
    deaths: list[Any] = []
    ended = actorrpc.monitor(actor, deaths.append)
    actorrpc.kill(actor)
    actorrpc.kill(actor)
    assert isinstance(ended.wait(20), actorrpc.ActorDiedError)
    until(lambda: deaths)
    assert len(deaths) == 1


@pytest.mark.usefixtures("near")
@row("no API of torch's RPC")
def test_actors_can_be_called_in_the_style_of_torch_rpc() -> None:
    actor = Worker.remote()
    assert actor.rpc_sync().count() == 1
    assert actor.rpc_async().count().wait() == 2
    assert actor.rref.rpc_sync().count() == 3


class Typed(actorrpc.Actor):
    def double(self, x: int) -> int:
        return 2 * x


@pytest.mark.usefixtures("near")
@row(".remote is Any to a type checker")
def test_a_class_may_inherit_from_actor_for_type_checkers() -> None:
    """Checked with type checkers in tests/actors/typing."""
    typed = Typed.remote()
    found: int = get(typed.double.remote(1))
    assert found == 2


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("near")
@row("ray.util.ActorPool")
def test_actor_pool_queue_and_exit_actor_are_top_level_names() -> None:
    pool = actorrpc.ActorPool([Worker.remote(), Worker.remote()])
    assert list(pool.map(lambda actor, value: actor.echo.remote(value), range(3))) == [0, 1, 2]
    assert actorrpc.Queue(maxsize=1).empty()
    with pytest.raises(actorrpc.ActorDiedError):
        get(Worker.remote().leave.remote())


@pytest.mark.usefixtures("near")
@row("RayTaskError, also an instance of the user's type")
def test_errors_have_the_users_type_and_are_remote_errors() -> None:
    with pytest.raises(Wrong) as caught:
        get(Worker.remote().wrong.remote())
    error: Any = caught.value
    assert isinstance(error, actorrpc.RemoteError)
    assert error.code == 3
    assert "raise Wrong" in str(error.__cause__)


@row("TaskCancelledError; WorkerCrashedError; GetTimeoutError")
@pytest.mark.prints("the call of Gate.wait on 'worker0' failed and its error was never retrieved")
def test_time_outs_cancellations_and_deaths_of_workers_have_their_own_errors(
    passing: InProcessCluster,
) -> None:
    gate = Gate.remote()
    held = gate.wait.remote()
    with pytest.raises(actorrpc.GetTimeoutError) as late:
        get(held, timeout=5)
    assert isinstance(late.value, TimeoutError)
    actorrpc.cancel(held)
    with pytest.raises(actorrpc.CancelledError):
        get(held)
    running = actorrpc.remote(max_retries=0)(_kills_its_worker).remote()
    passing.clock.advance(0.0)
    passing.kill("worker1")
    with pytest.raises(actorrpc.PeerDiedError):
        get(running)


def _kills_its_worker() -> Any:
    return get(Gate.remote().wait.remote())


@pytest.mark.usefixtures("near")
@row("actor.__ray_ready__.remote()")
def test_ready_and_call_replace_rays_special_methods() -> None:
    actor = Worker.remote()
    assert get(actorrpc.ready(actor)) is None
    assert get(actorrpc.call(actor, getattr, "n")) == 0
    with pytest.raises(AttributeError):
        _ = actor.__ray_ready__


@pytest.mark.usefixtures("near")
@row("actor.__ray_terminate__.remote()")
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
@row("__ray_shutdown__() of the class")
@row("__cleanup__", "from-monarch.md")
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
@row("cluster_resources(), nodes()")
def test_workers_actors_resources_and_profiles_can_be_listed() -> None:
    actor = Worker.remote()
    with torch.profiler.profile() as found:
        get(actor.count.remote())
    assert any("Worker.count" in event.name for event in found.events())
    assert [each.name for each in actorrpc.workers()] == ["worker0", "worker1"]
    assert [each.class_name for each in actorrpc.list_actors()] == ["Worker"]
    assert [each.class_name for each in actorrpc.state(30).actors] == ["Worker"]
    assert actorrpc.cluster_resources()["CPU"] == sum(each["Resources"]["CPU"] for each in actorrpc.nodes())


# -- start and placement ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"address": "auto"}, "it must be tcp://HOST:PORT"),
        ({"local_mode": True}, "to debug, call the class itself"),
        ({"include_dashboard": False}, "use dashboard=True"),
        ({"object_store_memory": 1}, "object_memory"),
        ({"runtime_env": {"pip": ["x"]}}, "use env= for an actor"),
        ({"logging_level": 10}, "configure Python's logging"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
@row("init(address=")
def test_unsupported_options_of_init_are_refused_with_advice(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        actorrpc.init(**given)
    assert not actorrpc.is_initialized()


@pytest.mark.parametrize(
    "name", ["scheduling_strategy", "memory", "accelerator_type", "placement_group", "max_calls"]
)
@row("scheduling_strategy, memory")
def test_unsupported_options_of_actors_and_tasks_are_refused(name: str) -> None:
    task = actorrpc.remote(_leave)
    for each in (task, Worker):
        with pytest.raises(ValueError, match=name) as caught:
            each.options(**{name: {"a": 1}})
        assert "not an option" not in str(caught.value)


@row("drivers without namespace=")
def test_names_are_found_in_one_default_namespace(near: InProcessCluster) -> None:
    actor = Worker.options(name="one").remote()
    assert near["worker1"].run(actorrpc.get_actor, "one") == actor


# -- calls ---------------------------------------------------------------------------------------------------------


async def _coroutine() -> str:
    await asyncio.sleep(0)
    return "done"


@pytest.mark.usefixtures("near")
@row("an async def task is refused")
def test_a_coroutine_function_can_be_a_task() -> None:
    assert get(actorrpc.remote(_coroutine).remote()) == "done"


@pytest.mark.usefixtures("near")
@row("exit_actor() in a task")
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
@row("cancel(ref) of a running task")
def test_cancel_interrupts_a_running_task() -> None:
    call = actorrpc.remote(_spin).remote(None)
    until(lambda: _tries)
    assert actorrpc.cancel(call)
    with pytest.raises(actorrpc.CancelledError):
        get(call)
    until(lambda: len(_tries) == 2)
    assert issubclass(_tries[1], KeyboardInterrupt)


@pytest.mark.usefixtures("near")
@row("cancel(ref, recursive=False)")
@row("cancel() returns None")
def test_cancel_refuses_recursive_false_and_returns_whether_it_cancelled() -> None:
    gate = Gate.remote()
    held = gate.wait.remote()
    with pytest.raises(ValueError, match="recursive"):
        actorrpc.cancel(held, recursive=False)
    assert actorrpc.cancel(held) is True
    assert actorrpc.cancel(held) is False
    with pytest.raises(actorrpc.CancelledError):
        get(held)


@pytest.mark.usefixtures("near")
@row("ref.future().cancel()")
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


@pytest.mark.usefixtures("near")
@row("a generator with num_returns=3")
def test_num_returns_takes_the_first_items_of_a_generator() -> None:
    actor = Worker.remote()
    first, second = actor.steps.options(num_returns=2).remote(1 << 30)
    assert get(first) == 0  # while the generator is still running
    assert get(second) == 1


@pytest.mark.usefixtures("near")
@row('a generator with num_returns="dynamic"')
@row("get(generator), and generators in as_completed")
def test_a_generator_can_be_iterated_or_used_as_one_result() -> None:
    actor = Worker.remote()
    a, b, c = actor.steps.remote()
    assert get([a, b, c]) == [0, 1, 2]
    stream = actor.steps.options(num_returns="dynamic").remote()
    assert get([stream, actorrpc.put(3)]) == [[0, 1, 2], 3]
    assert sorted(map(get, actorrpc.as_completed([actor.steps.remote(), actorrpc.put(3)]))) == [0, 1, 2, 3]
    first = next(actor.steps.options(max_buffered_items=1).remote(1 << 30))
    assert get(first) == 0


# -- objects -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("near")
@row("numpy arrays come read-only")
def test_numpy_arrays_are_writable_copies() -> None:
    array = numpy.zeros(1 << 15)
    found = get(Worker.remote().change.remote(array))
    found += 1
    assert found[0] == 2
    assert array[0] == 0


@row("the large result of an actor outlives it")
@row("a small value that was put")
def test_only_unfetched_large_results_are_lost_with_their_process(passing: InProcessCluster) -> None:
    actor = Worker.options(worker="worker1").remote()
    large = actor.large.remote()
    [small] = get(actor.puts.remote())
    fetched = actor.large.remote()
    assert len(get(fetched)) == 1 << 20
    actorrpc.wait([large], fetch_local=False)
    passing.kill("worker1")
    with pytest.raises(actorrpc.PeerDiedError) as caught:
        get(large)
    assert "lost" in str(caught.value)
    assert len(get(fetched)) == 1 << 20
    assert get(small) == "small"


def _error_of_loading(data: bytes) -> str:
    try:
        return f"nothing: {pickle.loads(data)!r}"
    except actorrpc.errors.RRefError as error:
        return str(error)


@pytest.mark.usefixtures("passing")
@row("an ObjectRef or a handle that the program pickles")
@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_references_and_handles_can_be_pickled_by_the_program(dumps: Any) -> None:
    actor = Worker.remote()
    ref = actorrpc.put(1)
    assert pickle.loads(dumps([ref, actor])) == [ref, actor]
    lost = dumps(actorrpc.put(2))
    gc.collect()
    until(lambda: "keep the reference itself" in _error_of_loading(lost))
    assert get(actorrpc.remote(lambda: get(ref)).remote()) == 1
    [inside] = get(actor.echo.remote([{"deep": ref}]))
    assert get(inside["deep"]) == 1
    assert get(actorrpc.remote(lambda: get(actor.count.remote())).remote()) == 1


# -- rows that need processes ------------------------------------------------------------------------------------------


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
    @row("a task's stream whose process dies")
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
@row("init(num_cpus=2): a third")
@row("init(num_cpus=0): actors and tasks")
def test_actors_wait_for_cpus_that_others_have_and_more_than_exist_are_refused() -> None:
    with actorrpc.init(num_cpus=2):
        first = Worker.options(num_cpus=2).remote()
        assert get(first.count.remote()) == 1
        second = Worker.options(num_cpus=2).remote()
        waits = second.count.remote()
        assert actorrpc.wait([waits], timeout=0)[0] == []
        actorrpc.kill(first)
        assert get(waits) == 1
        with pytest.raises(actorrpc.PlacementError):
            Worker.options(num_cpus=3).remote()
        del first, second
    with actorrpc.init(num_cpus=0):
        for make in (Worker, Worker.options(placement_timeout=60)):
            with pytest.raises(actorrpc.PlacementError, match=r"needs CPU 1; there are .*new processes on"):
                make.remote()
        with pytest.raises(actorrpc.PlacementError):
            get(actorrpc.remote(os.getpid).remote())
        assert get(Worker.options(num_cpus=0).remote().count.remote()) == 1
