"""Cancelled and timed-out calls: waiting calls, running methods, coroutines, streams, tasks, and their nested calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import selectors
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import actorrpc
from actorrpc._stacks import top_frames
from actorrpc.agent.calls import CURRENT
from tests.actors.e2e.kit import Gate, open_gate, pass_gate, row_of, until
from tests.layers import rest_is_slow
from tests.migration.rows import row

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(20)]


@actorrpc.remote
class Busy:
    def __init__(self) -> None:
        self.log: list[str] = []

    def spin(self) -> None:
        """Runs Python code."""
        self.log.append("spin")
        try:
            while True:
                pass
        finally:
            self.log.append("out")

    def sleep_repeatedly(self) -> None:
        """Runs C code in short steps."""
        self.log.append("sleep_repeatedly")
        while True:
            time.sleep(0.001)

    def call_repeatedly(self, other: Any) -> None:
        try:
            while True:
                actorrpc.get(other.note.remote("asked"))
        except BaseException as error:
            self.log.append(type(error).__name__)
            raise
        finally:
            for _ in range(20):
                time.sleep(0.001)
            self.log.append("tidied")

    def block_in_c(self, gate: str) -> str:
        """Wait in C code until the gate opens."""
        self.log.append("block_in_c")
        pass_gate(gate)
        for _ in range(1000):
            pass
        self.log.append("passed")
        return "passed"

    def catch_exceptions(self) -> None:
        while True:
            try:
                time.sleep(0.0001)
            except Exception:
                self.log.append("caught")

    def wait_at(self, gate: Any) -> str:
        self.log.append("waiting")
        try:
            return actorrpc.get(gate.wait.remote())
        finally:
            self.log.append("waited")

    def occupy(self, other: Any, data: bytes) -> None:
        actorrpc.get(other.wait.remote(data))

    def wait_deep(self, others: list[Any], gate: Any) -> str:
        if others:
            return actorrpc.get(others[0].wait_deep.remote(others[1:], gate))
        return self.wait_at(gate)

    def note(self, word: str) -> str:
        self.log.append(word)
        return word

    def traced(self) -> list[str]:
        """Trace a function as debuggers and coverage do; return the events."""
        seen: list[str] = []

        def trace(_frame: Any, event: str, _arg: Any) -> Any:
            seen.append(event)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            (lambda: None)()
        finally:
            sys.settrace(before)
        return seen

    def all(self) -> list[str]:
        return self.log

    def stream(self) -> Any:
        try:
            n = 0
            while True:
                yield n
                n += 1
        finally:
            self.log.append("closed")

    @actorrpc.method(interrupt=True)
    def spin_until_the_timeout(self) -> None:
        self.spin()

    def left(self) -> float:
        return left()

    def left_in_a_stream(self) -> Any:
        yield left()

    def nested(self, others: list[Any]) -> float:
        return actorrpc.get(others[0].nested.remote(others[1:])) if others else left()

    def nested_options(self, other: Any) -> float:
        return actorrpc.get(other.left.options(timeout=500).remote())


def left() -> float:
    """Return how many seconds the running call has left."""
    execution = CURRENT.get()
    assert execution is not None
    return execution.deadline - time.monotonic()


@actorrpc.remote
class BusyOnLoop(Busy):
    """Its methods run on an event loop."""

    async def other(self) -> None: ...


@actorrpc.remote
class Async:
    def __init__(self) -> None:
        self.log: list[str] = []

    async def wait(self) -> None:
        self.log.append("wait")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise

    async def wait_at(self, gate: Any) -> str:
        return str(await gate.wait.remote())

    async def occupy(self, other: Any, data: bytes) -> None:
        await other.wait.remote(data)

    async def occupy_in_a_thread(self, other: Any, data: bytes) -> None:
        await asyncio.to_thread(lambda: actorrpc.get(other.wait.remote(data)))

    async def ask(self, other: Any) -> None:
        answer = other.note.remote("asked")
        self.log.append("wait")
        await answer

    async def words_of(self, other: Any) -> list[str]:
        """Return the other actor's log. This call arrives after all earlier calls of this actor."""
        words: list[str] = await other.all.remote()
        return words

    async def clean_up(self, log: Any, gate: Any) -> None:
        try:
            self.log.append("wait")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await log.note.remote("cleaning")
            await gate.wait.remote()
            await log.note.remote("clean")
            raise

    async def suppress_cancellation(self, error: BaseException | None = None) -> str:
        try:
            self.log.append("wait")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if error is not None:
                raise error from None
        return "kept on"

    async def all(self) -> list[str]:
        return self.log

    async def nested(self, others: list[Any]) -> float:
        return await others[0].nested.remote(others[1:]) if others else left()

    async def stream(self) -> Any:
        try:
            n = 0
            while True:
                yield n
                n += 1
                await asyncio.sleep(0)
        finally:
            self.log.append("closed")


@actorrpc.remote
class GatedConstructor:
    """Its constructor waits until its gate is opened, each time."""

    def __init__(self, gate: str) -> None:
        pass_gate(gate)
        self.words: list[str] = []

    def note(self, word: str) -> None:
        self.words.append(word)

    def all(self) -> list[str]:
        return self.words


def _wait_until_running(actor: Any, ref: Any) -> None:
    until(lambda: row_of(actor).state == "ALIVE" and row_of(actor).running_calls == 1)
    assert not ref.done()


class Endless:
    """Never ends where it is unpickled."""

    def __init__(self, entered: str) -> None:
        self.entered = entered

    def __setstate__(self, state: dict[str, str]) -> None:
        Path(state["entered"]).touch()
        while True:
            time.sleep(0.001)


def test_unpickling_an_argument_is_interrupted_by_cancel(tmp_path: Path) -> None:
    actor = Busy.remote()
    entered = tmp_path / "entered"
    actorrpc.get(actor.note.remote("made"))
    ref = actor.note.remote(Endless(str(entered)))
    until(entered.exists)
    assert actorrpc.cancel(ref)
    with pytest.raises(actorrpc.CancelledError):
        actorrpc.get(ref)
    assert actorrpc.get(actor.note.remote("alive")) == "alive"


@row("a running sync method cannot be cancelled", "from-ray")
@row("cancel() returns None", "from-ray")
@row("TaskCancelledError; WorkerCrashedError; GetTimeoutError", "from-ray")
@row("process.terminate()", "from-multiprocessing")
def test_cancel_interrupts_a_running_method() -> None:
    actor = Busy.remote()
    for method in ("spin", "sleep_repeatedly", "catch_exceptions"):
        for _ in range(3):
            ref = getattr(actor, method).remote()
            _wait_until_running(actor, ref)
            assert actorrpc.cancel(ref)
            with pytest.raises(actorrpc.CancelledError):
                actorrpc.get(ref)
            assert actorrpc.get(actor.note.remote("alive")) == "alive"
            assert not actorrpc.cancel(ref)
    assert "caught" not in actorrpc.get(actor.all.remote())


@contextlib.contextmanager
def _interrupted(function: Any) -> Iterator[None]:
    """Expect KeyboardInterrupt: SIGINT is sent to the main thread once it runs this function."""
    main = threading.main_thread().ident
    assert main is not None

    def is_in_function() -> bool:
        frame: Any = top_frames()[main]
        while frame is not None and frame.f_code is not function.__code__:
            frame = frame.f_back
        return frame is not None

    def interrupt() -> None:
        until(is_in_function)
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    interrupter.join()


@pytest.mark.parametrize(
    "wait",
    [
        lambda actor: actorrpc.get(actor.spin.remote(), cancel_on_interrupt=True),
        lambda actor: actorrpc.get(actor.spin.remote(), timeout=60, cancel_on_interrupt=True),
        lambda actor: actorrpc.get(
            [actor.spin.remote(), actor.sleep_repeatedly.remote()], cancel_on_interrupt=True
        ),
        lambda actor: actorrpc.get(actor.spin.remote()),
    ],
    ids=["one", "bounded", "several", "in a notebook"],
)
def test_ctrl_c_in_get_cancels_the_calls_if_requested_or_in_ipython(
    wait: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "notebook" in request.node.name:
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    actor = Busy.remote()
    assert actorrpc.get(actor.note.remote("there")) == "there"
    with _interrupted(actorrpc.get):
        wait(actor)
    assert actorrpc.get(actor.note.remote("alive")) == "alive"  # otherwise the actor would still be busy


async def _await(ref: Any) -> Any:
    return await ref


@pytest.mark.parametrize(
    ("function", "wait"),
    [
        (actorrpc.get, actorrpc.get),
        (actorrpc.wait, lambda ref: actorrpc.wait([ref])),
        (selectors.DefaultSelector.select, lambda ref: asyncio.run(_await(ref))),
    ],
    ids=["get", "wait", "asyncio"],
)
def test_after_ctrl_c_in_a_wait_the_driver_can_go_on(function: Any, wait: Any) -> None:
    gate = Gate.remote()
    assert actorrpc.get(gate.count.remote()) == 0
    ref = gate.wait.remote()
    with _interrupted(function):
        wait(ref)
    actorrpc.get(gate.open.remote())
    assert actorrpc.get(gate.wait.remote()) == "open"


def test_a_method_that_waits_for_a_call_is_interrupted_only_once() -> None:
    """The nested call is cancelled too, but its error must not interrupt the method's clean-up."""
    actor, other, log = Busy.remote(), Busy.remote(), []
    for _ in range(5):
        asked = len(actorrpc.get(other.all.remote()))
        ref = actor.call_repeatedly.remote(other)
        while len(actorrpc.get(other.all.remote())) == asked:
            pass  # a nested call has run since
        assert actorrpc.cancel(ref)
        with pytest.raises(actorrpc.CancelledError):
            actorrpc.get(ref)
        log = actorrpc.get(actor.all.remote())
    assert log == ["Interrupted", "tidied"] * 5


def test_a_cancelled_method_in_c_code_blocks_its_actor_until_it_returns(gate: Path) -> None:
    actor = Busy.remote()
    ref = actor.block_in_c.remote(str(gate))
    _wait_until_running(actor, ref)
    assert actorrpc.cancel(ref)
    with pytest.raises(actorrpc.CancelledError):
        actorrpc.get(ref)
    open_gate(gate)
    assert actorrpc.get(actor.note.remote("after")) == "after"


def test_a_call_that_is_cancelled_in_the_queue_never_runs(gate: Path) -> None:
    actor = Busy.remote()
    busy = actor.block_in_c.remote(str(gate))
    refs = [actor.note.remote(str(n)) for n in range(10)]
    until(lambda: row_of(actor).pending_calls == 10)
    assert actorrpc.cancel(refs[::2])
    until(lambda: row_of(actor).pending_calls == 5)
    open_gate(gate)
    assert actorrpc.get(busy) == "passed"
    assert actorrpc.get(refs[1::2]) == [str(n) for n in range(1, 10, 2)]
    for ref in refs[::2]:
        with pytest.raises(actorrpc.CancelledError):
            actorrpc.get(ref)
    assert actorrpc.get(actor.all.remote())[2:] == [str(n) for n in range(1, 10, 2)]


@pytest.mark.parametrize("cls", [Busy, Async])
def test_cancelling_a_stream_closes_its_generator(cls: Any) -> None:
    actor = cls.remote()
    stream = actor.stream.remote()
    assert [actorrpc.get(next(stream)) for _ in range(40)] == list(range(40))
    actorrpc.cancel(stream)
    assert len(list(stream.values())) < 100  # the stream ends after the items that have already arrived
    until(lambda: "closed" in actorrpc.get(actor.all.remote()))


def test_cancelling_a_call_cancels_its_nested_calls_on_other_actors() -> None:
    actors, gate = [Busy.remote() for _ in range(3)], Gate.remote()
    ref = actors[0].wait_deep.remote(actors[1:], gate)
    until(lambda: actorrpc.get(gate.count.remote()) == 1)
    actorrpc.cancel(ref)
    with pytest.raises(actorrpc.CancelledError):
        actorrpc.get(ref)
    until(lambda: actorrpc.get(gate.count.remote()) == 0)
    assert actorrpc.get([each.note.remote("alive") for each in actors]) == ["alive"] * 3


@pytest.mark.parametrize("cls", [Busy, Async])
def test_killing_an_actor_in_a_shared_process_cancels_its_nested_calls(cls: Any) -> None:
    neighbour, gate = Busy.remote(), Gate.remote()
    actor = cls.options(worker=neighbour).remote()
    ref = actor.wait_at.remote(gate)
    until(lambda: actorrpc.get(gate.count.remote()) == 1)
    actorrpc.kill(actor)
    until(lambda: actorrpc.get(gate.count.remote()) == 0)
    with pytest.raises(actorrpc.ActorDiedError):
        actorrpc.get(ref)
    assert actorrpc.get(neighbour.note.remote("alive")) == "alive"


def test_cancelling_a_coroutine_cancels_its_call_to_an_actor_that_is_starting_or_restarting(
    gate: Path,
) -> None:
    made = GatedConstructor.options(max_restarts=-1).remote(str(gate))
    for state in ("PENDING", "RESTARTING"):
        actor = Async.remote()
        if state == "RESTARTING":
            actorrpc.kill(made, no_restart=False)
            until(lambda: row_of(made).state == "RESTARTING")
        ref = actor.ask.remote(made)
        _wait_until_awaiting(actor, ref)
        assert actorrpc.cancel(ref)
        with pytest.raises(actorrpc.CancelledError):
            actorrpc.get(ref)
        open_gate(gate)
        assert actorrpc.get(actor.words_of.remote(made)) == []


@pytest.mark.parametrize(
    ("caller", "method", "count"),
    rest_is_slow(
        [
            (Busy, "occupy", 60),
            (Async, "occupy_in_a_thread", 60),
            (Busy, "occupy", 4000),
            (Async, "occupy", 4000),
            (Async, "occupy_in_a_thread", 4000),
        ],
        quick=2,
    ),
)
@pytest.mark.limit(300)  # a slow machine takes 35 ms for each call
def test_a_nested_call_that_starts_while_its_caller_is_cancelled_is_cancelled_too(
    caller: Any, method: str, count: int
) -> None:
    actor, other = caller.remote(), Gate.remote()
    rng, data = random.Random(count), bytes(200_000)
    assert actorrpc.get([actor.all.remote(), other.count.remote()]) == [[], 0]
    for _ in range(count):
        ref = getattr(actor, method).remote(other, data)
        actorrpc.wait([ref], timeout=0.006 * rng.random())
        assert actorrpc.cancel(ref)
        with pytest.raises(actorrpc.CancelledError):
            actorrpc.get(ref)
    until(lambda: actorrpc.get(other.count.remote()) == 0)
    actor = other = ref = None
    until(
        lambda: (
            not any(
                each.class_name == "Gate" and each.state == "ALIVE" for each in actorrpc.actors.list_actors()
            )
        )
    )


# -- coroutines that clean up ----------------------------------------------------------------------------------------


def _wait_until_awaiting(actor: Any, ref: Any) -> None:
    until(lambda: actorrpc.get(actor.all.remote()) == ["wait"])
    assert not ref.done()


def test_a_cancelled_coroutine_can_make_calls_while_it_cleans_up() -> None:
    actor, log, gate = Async.remote(), Busy.remote(), Gate.remote()
    ref = actor.clean_up.remote(log, gate)
    _wait_until_awaiting(actor, ref)
    assert actorrpc.cancel(ref)
    until(lambda: actorrpc.get(gate.count.remote()) == 1)
    assert not ref.done()
    assert actorrpc.cancel(ref)  # a second cancellation has no effect
    actorrpc.get(gate.open.remote())
    with pytest.raises(actorrpc.CancelledError):
        actorrpc.get(ref)
    assert actorrpc.get(log.all.remote()) == ["cleaning", "clean"]
    assert not actorrpc.cancel(ref)


def test_a_coroutine_that_times_out_can_make_calls_while_it_cleans_up() -> None:
    actor, log, gate = Async.remote(), Busy.remote(), Gate.remote()
    actorrpc.get([actor.all.remote(), log.all.remote(), gate.open.remote()])
    with pytest.raises(actorrpc.RpcTimeoutError, match="its coroutine is cancelled"):
        actorrpc.get(actor.clean_up.options(timeout=0.2).remote(log, gate))
    until(lambda: actorrpc.get(log.all.remote()) == ["cleaning", "clean"])


def test_a_coroutine_that_suppresses_its_cancellation_still_ends_as_cancelled() -> None:
    suppresses, fails = Async.remote(), Async.remote()
    refs = [
        suppresses.suppress_cancellation.remote(),
        fails.suppress_cancellation.remote(ValueError("while it was cleaning up")),
    ]
    for actor, ref in zip((suppresses, fails), refs, strict=True):
        _wait_until_awaiting(actor, ref)
        assert actorrpc.cancel(ref)
    with pytest.raises(actorrpc.CancelledError):
        actorrpc.get(refs[0])
    with pytest.raises(ValueError, match="while it was cleaning up"):
        actorrpc.get(refs[1])


def test_a_cancelled_call_is_not_retried_after_a_restart() -> None:
    actor, log, gate = (
        Async.options(max_restarts=-1, max_task_retries=-1).remote(),
        Busy.remote(),
        Gate.remote(),
    )
    ref = actor.clean_up.remote(log, gate)
    _wait_until_awaiting(actor, ref)
    assert actorrpc.cancel(ref)
    until(lambda: actorrpc.get(gate.count.remote()) == 1)
    actorrpc.kill(actor, no_restart=False)
    with pytest.raises((actorrpc.ActorUnavailableError, actorrpc.CancelledError)):
        actorrpc.get(ref)
    assert actorrpc.get(actor.all.remote()) == []
    actorrpc.get(gate.open.remote())


def test_functions_can_be_traced_after_a_method_was_interrupted() -> None:
    """CPython 3.11 never enters a traced function while an asynchronous exception is still pending."""
    actor = Busy.remote()
    ref = actor.sleep_repeatedly.remote()
    _wait_until_running(actor, ref)
    assert actorrpc.cancel(ref)
    with pytest.raises(actorrpc.CancelledError):
        actorrpc.get(ref)
    assert actorrpc.get(actor.traced.remote(), timeout=10) == ["call", "line", "return"]


# -- coroutines at random moments ----------------------------------------------------------------------------------


def test_coroutines_that_are_cancelled_at_random_moments_all_end() -> None:
    actor = Async.remote()
    for n in range(100):
        ref = actor.wait.remote()
        if n % 3:
            actorrpc.wait([ref], timeout=0.0005 * (n % 4))
        assert actorrpc.cancel(ref)
        with pytest.raises(actorrpc.CancelledError):
            actorrpc.get(ref)
    until(lambda: row_of(actor).running_calls == 0)
    log = actorrpc.get(actor.all.remote())
    assert log.count("wait") == log.count("cancelled")


# -- deadlines -----------------------------------------------------------------------------------------------


def test_a_call_that_times_out_in_the_queue_is_not_started(gate: Path) -> None:
    actor = Busy.remote()
    busy = actor.block_in_c.remote(str(gate))
    late = actor.note.options(timeout=0.05).remote("late")
    with pytest.raises(actorrpc.RpcTimeoutError) as caught:
        actorrpc.get(late)
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(TimeoutError):
        actor.rpc_sync(timeout=0.05).note("late, too")
    until(lambda: row_of(actor).pending_calls == 0)  # the timeout has arrived
    open_gate(gate)
    assert actorrpc.get([busy, actor.note.remote("in time")]) == ["passed", "in time"]
    assert actorrpc.get(actor.all.remote()) == ["block_in_c", "passed", "in time"]
    del caught


@row("timeouts of the wait", "from-ray")
@row("each call has a deadline of its own", "from-torch-rpc")
def test_nested_calls_inherit_the_remaining_time() -> None:
    a, b, c = Busy.remote(), Async.remote(), Busy.remote()
    assert actorrpc.get(a.nested.remote([b, c])) == float("inf")
    for way in ([], [b], [b, c], [c, b, a]):
        found = actorrpc.get(a.nested.options(timeout=100).remote(way))
        assert 50 < found <= 100
    assert actorrpc.get(a.nested_options.options(timeout=100).remote(c)) <= 100
    assert actorrpc.get(next(a.left_in_a_stream.options(timeout=100).remote())) <= 100


def test_the_timeout_of_a_wait_does_not_end_the_call(gate: Path) -> None:
    actor = Busy.remote()
    actorrpc.get(actor.all.remote())
    ref = actor.block_in_c.remote(str(gate))

    async def wait_for() -> None:
        await asyncio.wait_for(ref, 0.01)

    with pytest.raises(actorrpc.RpcTimeoutError, match="it is still running"):
        actorrpc.get(ref, timeout=0.01)
    with pytest.raises(TimeoutError):
        asyncio.run(wait_for())
    assert actorrpc.wait([ref], timeout=0.01) == ([], [ref])
    open_gate(gate)
    assert actorrpc.get(ref) == "passed"


# -- interrupt=True --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_actor", "method", "of_call"),
    [({}, "spin", {"timeout": 0.2, "interrupt": True}), ({"timeout": 0.2}, "spin_until_the_timeout", {})],
    ids=["by its caller", "by its declaration"],
)
def test_a_method_that_times_out_is_interrupted_if_asked_for(
    of_actor: Any, method: str, of_call: Any
) -> None:
    actor = Busy.options(**of_actor).remote()
    for n in range(3):
        assert actorrpc.get(actor.all.options(timeout=0).remote()) == ["spin", "out"] * n
        with pytest.raises(actorrpc.RpcTimeoutError, match="if it has begun, it is interrupted") as caught:
            actorrpc.get(getattr(actor, method).options(**of_call).remote())
        assert caught.value.maybe_executed
        del caught
    assert actorrpc.get(actor.all.options(timeout=0).remote()) == ["spin", "out"] * 3


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (Busy, {}, "it runs to its end, and other calls wait for that"),
        (BusyOnLoop, {"interrupt": True}, "timed out"),
    ],
)
def test_a_method_that_times_out_runs_to_its_end_by_default_and_on_an_event_loop(
    cls: Any, options: Any, message: str, gate: Path
) -> None:
    actor = cls.remote()
    actorrpc.get(actor.note.remote("before"))
    with pytest.raises(actorrpc.RpcTimeoutError, match=message):
        actorrpc.get(actor.block_in_c.options(timeout=0.1, **options).remote(str(gate)))
    after = actor.note.remote("after")
    assert not after.done()
    open_gate(gate)
    assert actorrpc.get(after) == "after"
    assert actorrpc.get(actor.all.remote()) == ["before", "block_in_c", "passed", "after"]


@actorrpc.remote
def spin_task() -> None:
    while True:
        pass


@actorrpc.remote
def quick_task() -> str:
    return "quick"


def test_a_task_that_times_out_is_interrupted_if_its_caller_asks_for_it() -> None:
    with pytest.raises(actorrpc.RpcTimeoutError):
        actorrpc.get(spin_task.options(timeout=0.3, interrupt=True).remote())
    assert actorrpc.get([quick_task.remote() for _ in range(8)]) == ["quick"] * 8


@actorrpc.remote(concurrency_groups={"aside": 1})
class Recorder:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.holding = threading.Event()

    def hold(self, gate: str) -> None:
        self.holding.set()
        pass_gate(gate)

    def note(self, what: str) -> None:
        self.notes.append(what)

    def noted(self) -> list[str]:
        return self.notes

    @actorrpc.method(concurrency_group="aside")
    def answer(self) -> None:
        """Answer while ``hold`` runs."""
        self.holding.wait(30)


@actorrpc.remote
class Stopping:
    def pid(self) -> int:
        return os.getpid()

    def call_and_stop(self, recorder: Any, seconds: float) -> str:
        """Make a call that waits in the mailbox, and stop this process before it can cancel the call."""
        late = recorder.note.options(timeout=seconds).remote("late")
        actorrpc.get(recorder.answer.remote())  # the call has arrived
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            actorrpc.get(late)
        except actorrpc.RpcTimeoutError:
            return "timed out"
        return "ran"


@pytest.mark.parametrize("place", ["embedded"], indirect=True)
def test_a_call_whose_time_has_passed_does_not_run_although_its_caller_is_stopped(gate: Path) -> None:
    recorder, stopping = Recorder.remote(), Stopping.remote()
    pid = actorrpc.get(stopping.pid.remote())
    held = recorder.hold.remote(str(gate))
    actorrpc.get(recorder.answer.remote())
    called = stopping.call_and_stop.remote(recorder, 0.5)
    try:
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        stopped = time.monotonic()  # the call was made before
        until(lambda: time.monotonic() > stopped + 0.6)
        open_gate(gate)
        actorrpc.get(held)
        assert actorrpc.get(recorder.noted.remote()) == []
    finally:
        os.kill(pid, signal.SIGCONT)
    assert actorrpc.get(called) == "timed out"
    assert actorrpc.get(recorder.noted.remote()) == []
