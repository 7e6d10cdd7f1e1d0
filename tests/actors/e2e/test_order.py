"""The order of calls, how many run at a time, and the effect of pending arguments."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import errors
from tests.actors.e2e.kit import open_gate, pass_gate, row_of, until
from tests.layers import rest_is_slow
from tests.migration.rows import row

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(20)]


@actorrpc.remote
class Recorder:
    """Records its arguments in the order of its calls."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, number: Any, payload: Any = None) -> Any:
        self.seen.append(number if payload is None else (number, _size(payload)))
        return number

    def block(self, path: str) -> str:
        return pass_gate(path)

    def all(self) -> list[Any]:
        return self.seen


def _size(payload: Any) -> int:
    return payload.numel() if isinstance(payload, torch.Tensor) else payload


def test_a_failed_argument_does_not_change_the_order_of_the_other_calls(gate: Path) -> None:
    recorder = Recorder.remote()
    refs: list[Any] = []
    for n in range(20):
        refs.append(recorder.note.remote(n, fail.remote()) if n % 5 == 3 else recorder.note.remote(n))
    for n, ref in enumerate(refs):
        if n % 5 == 3:
            with pytest.raises(KeyError):
                actorrpc.get(ref)
        else:
            assert actorrpc.get(ref) == n
    assert actorrpc.get(recorder.all.remote()) == [n for n in range(20) if n % 5 != 3]


@actorrpc.remote
def fail() -> None:
    raise KeyError("of the argument")


@row("Lock(), Value(", "from-multiprocessing")
def test_calls_of_each_thread_run_in_order() -> None:
    recorder = Recorder.remote()

    def call(thread: int) -> list[Any]:
        large = {thread: torch.zeros(300_000), thread + 7: [0.5] * 400_000}  # in shared memory, in chunks
        payloads = [large.get(n % 20, 1) for n in range(60)]
        return actorrpc.get(
            [recorder.note.remote((thread, n), payload) for n, payload in enumerate(payloads)]
        )

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(call, range(6))) == [[(thread, n) for n in range(60)] for thread in range(6)]
    seen = [entry for entry, _ in actorrpc.get(recorder.all.remote())]
    assert len(seen) == 360
    for thread_ in range(6):
        assert [n for t, n in seen if t == thread_] == list(range(60))


@actorrpc.remote
class Sender:
    def send(self, to: Any, name: str, count: int) -> list[int]:
        return [n for _, n in actorrpc.get([to.note.remote((name, n)) for n in range(count)])]


def test_calls_of_each_actor_run_in_order() -> None:
    recorder = Recorder.remote()
    senders = [Sender.remote() for _ in range(4)]
    done = actorrpc.get([s.send.remote(recorder, f"s{n}", 100) for n, s in enumerate(senders)])
    assert done == [list(range(100))] * 4
    seen = actorrpc.get(recorder.all.remote())
    for n in range(4):
        assert [number for name, number in seen if name == f"s{n}"] == list(range(100))


@actorrpc.remote
class Adder:
    def add(self, number: int) -> int:
        return number + 1


@actorrpc.remote
class AsyncAdder:
    async def add(self, number: int) -> int:
        return number + 1


@pytest.mark.limit(60)
@pytest.mark.parametrize("links", rest_is_slow([500, 10_000]))
@pytest.mark.parametrize(
    "kinds",
    [(Adder,), (Adder, Adder), (AsyncAdder.options(allow_out_of_order_execution=False),)],
    ids=["one", "two in turn", "async in order"],
)
def test_a_long_chain_of_dependent_calls_ends_with_the_right_result(kinds: Any, links: int) -> None:
    actors = [kind.remote() for kind in kinds]
    last = actorrpc.put(0)
    for number in range(links):
        last = actors[number % len(actors)].add.remote(last)
    assert actorrpc.get(last, timeout=50) == links


@row("calls have no priorities and no deadlines", "from-ray")
def test_calls_with_a_higher_priority_overtake_waiting_calls(gate: Path) -> None:
    recorder = Recorder.remote()
    busy = recorder.block.remote(str(gate))
    until(lambda: row_of(recorder).state == "ALIVE" and row_of(recorder).running_calls == 1)
    refs = [recorder.note.options(priority=n % 3).remote((n % 3, n)) for n in range(12)]
    until(lambda: row_of(recorder).pending_calls == 12)
    open_gate(gate)
    actorrpc.get([busy, *refs])
    seen = actorrpc.get(recorder.all.remote())
    assert seen == sorted(((n % 3, n) for n in range(12)), key=lambda each: (-each[0], each[1]))


# -- execution out of order --------------------------------------------------------------------------------------


@actorrpc.remote
class AsyncRecorder(Recorder):
    async def other(self) -> None:
        """Makes the actor async."""


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Recorder, {"allow_out_of_order_execution": True}),
        pytest.param(Recorder, {"max_concurrency": 2}, marks=pytest.mark.slow),
        pytest.param(AsyncRecorder, {}, marks=pytest.mark.slow),
    ],
    ids=["serial", "threads", "async"],
)
def test_a_call_with_a_pending_argument_is_overtaken_if_order_is_not_required(
    gate: Path, cls: Any, options: dict[str, Any]
) -> None:
    recorder = cls.options(**options).remote()
    slow = recorder.note.remote(later.remote(str(gate), "slow"))
    assert actorrpc.get([recorder.note.remote(n) for n in range(10)]) == list(range(10))
    open_gate(gate)
    assert actorrpc.get(slow) == "slow"
    assert actorrpc.get(recorder.all.remote())[-1] == "slow"


def test_a_threaded_actor_can_be_told_to_keep_the_order(gate: Path) -> None:
    recorder = Recorder.options(max_concurrency=2, allow_out_of_order_execution=False).remote()
    slow = recorder.note.remote(later.remote(str(gate), "slow"))
    fast = recorder.note.remote("fast")
    until(lambda: row_of(recorder).state == "ALIVE" and row_of(recorder).pending_calls == 2)
    open_gate(gate)
    assert actorrpc.get([slow, fast]) == ["slow", "fast"]


# -- order of each caller ----------------------------------------------------------------------------------------


@actorrpc.remote
class Caller:
    """Calls another actor."""

    def inner(self, to: Any) -> Any:
        return actorrpc.get(to.note.remote("inner"))

    def outer(self, to: Any, through: Any) -> Any:
        return actorrpc.get(to.note.remote(through.inner.remote(to)))

    def start_pending(self, to: Any, path: str) -> Any:
        """Make a call with a pending argument and do not wait for it."""
        return [to.note.remote(later.remote(path, "first"))]

    def follow(self, to: Any) -> Any:
        return actorrpc.get(to.note.remote("second"))


def test_actors_of_one_worker_are_separate_callers() -> None:
    recorder, first = Recorder.remote(), Caller.remote()
    second = Caller.options(worker=first).remote()
    assert actorrpc.get(first.outer.remote(recorder, second)) == "inner"
    assert actorrpc.get(second.outer.remote(recorder, first)) == "inner"


def test_calls_from_different_methods_of_an_actor_run_in_order(gate: Path) -> None:
    recorder, caller = Recorder.remote(), Caller.remote()
    (left,) = actorrpc.get(caller.start_pending.remote(recorder, str(gate)))
    second = caller.follow.remote(recorder)
    until(lambda: row_of(recorder).pending_calls == 2)
    open_gate(gate)
    assert actorrpc.get([left, second]) == ["first", "second"]
    assert actorrpc.get(recorder.all.remote()) == ["first", "second"]


@actorrpc.remote
def call_a_new_actor_from_a_thread(path: str) -> Any:
    recorder, argument = Recorder.remote(), later.remote(path, "first")
    with ThreadPoolExecutor(1) as pool:
        # The actor's process does not exist yet, so both calls, the first ones of their thread, are queued here.
        return recorder, pool.submit(
            lambda: [recorder.note.remote(argument), recorder.note.remote("second")]
        ).result()


def test_calls_of_a_tasks_thread_to_an_actor_that_is_starting_run_in_order(gate: Path) -> None:
    recorder, refs = actorrpc.get(call_a_new_actor_from_a_thread.remote(str(gate)))
    until(lambda: row_of(recorder).pending_calls == 2)
    open_gate(gate)
    assert actorrpc.get(refs) == ["first", "second"]
    assert actorrpc.get(recorder.all.remote()) == ["first", "second"]


@pytest.mark.slow
def test_a_call_ordered_behind_a_call_that_needs_its_result_raises_deadlock_error() -> None:
    """``inner`` runs while ``outer`` waits. Its call is ordered behind that of ``outer``, which needs the result of ``inner``."""
    recorder, caller = Recorder.remote(), Caller.remote()
    with pytest.raises(actorrpc.DeadlockError, match=r"note\(\).*inner\(\).*earlier call of the same caller"):
        actorrpc.get(caller.outer.remote(recorder, caller))
    assert actorrpc.get(recorder.note.remote("alive")) == "alive"
    free = Recorder.options(allow_out_of_order_execution=True).remote()
    assert actorrpc.get(caller.outer.remote(free, caller)) == "inner"


# -- retried calls -------------------------------------------------------------------------------------------------


@actorrpc.remote
class Moody:
    def __init__(self) -> None:
        self.tries = 0

    def work(self) -> int:
        self.tries += 1
        if self.tries % 3:
            raise ValueError("not yet")
        return self.tries

    def use(self, number: int) -> int:
        return 10 * number


@pytest.mark.parametrize("how", [{}, {"max_concurrency": 2}], ids=str)
def test_a_retried_call_runs_before_the_calls_that_need_its_result(how: dict[str, Any]) -> None:
    moody = Moody.options(**how).remote()
    for turn in (30, 60):
        work = moody.work.options(retry_exceptions=True, max_task_retries=5).remote()
        uses = [moody.use.remote(work) for _ in range(3)]
        assert actorrpc.get(uses) == [turn] * 3


# -- threads and groups --------------------------------------------------------------------------------------------


@actorrpc.remote(max_concurrency=4)
class Threaded:
    def __init__(self) -> None:
        self.barrier = threading.Barrier(4)

    def meet(self) -> int:
        self.barrier.wait(30)
        return threading.get_ident()


def test_a_threaded_actor_runs_max_concurrency_calls_at_a_time() -> None:
    actor = Threaded.remote()
    idents = actorrpc.get([actor.meet.remote() for _ in range(16)])
    assert len(set(idents)) == 4


@actorrpc.remote(concurrency_groups={"io": 2, "compute": 1})
class Grouped:
    def __init__(self) -> None:
        self.event = threading.Event()
        self.both = threading.Barrier(2)

    @actorrpc.method(concurrency_group="io")
    def io(self) -> str:
        self.both.wait(30)
        return "io"

    @actorrpc.method(concurrency_group="compute")
    def compute(self) -> bool:
        return self.event.wait(30)

    def release(self) -> str:
        self.event.set()
        return "released"

    def fail_after_release(self) -> None:
        assert self.event.wait(60)
        raise ValueError("not yet")

    def wait_for(self, refs: list[Any]) -> Any:
        return actorrpc.get(refs[0])


def test_concurrency_groups_do_not_wait_for_each_other() -> None:
    actor = Grouped.remote()
    computing = [actor.compute.remote() for _ in range(3)]
    assert actorrpc.get([actor.io.remote() for _ in range(4)]) == ["io"] * 4
    assert actorrpc.get(actor.release.remote()) == "released"
    assert actorrpc.get(computing) == [True] * 3
    # A call can select another group than that of its method.
    assert actorrpc.get(actor.release.options(concurrency_group="io").remote()) == "released"
    with pytest.raises(ValueError, match=r"no concurrency group 'oi'.*'io', 'compute'"):
        actor.release.options(concurrency_group="oi")


@pytest.mark.slow
def test_a_retry_behind_a_running_call_that_waits_for_it_raises_deadlock_error() -> None:
    actor = Grouped.remote()
    work = actor.fail_after_release.options(retry_exceptions=True, max_task_retries=5).remote()
    waits = actor.wait_for.remote([work])
    actorrpc.get(actor.release.options(concurrency_group="io").remote())  # runs after wait_for() has started
    with pytest.raises(actorrpc.DeadlockError, match="wait_for"):
        actorrpc.get(waits)


# -- async actors ----------------------------------------------------------------------------------------------------


@actorrpc.remote
class Async:
    def __init__(self) -> None:
        self.here = 0
        self.event = asyncio.Event()

    async def gather(self, count: int) -> int:
        """Return the thread when ``count`` calls run at the same time."""
        self.here += 1
        if self.here == count:
            self.event.set()
        await self.event.wait()
        return threading.get_ident()


def test_an_async_actor_runs_thousands_of_coroutines_at_a_time() -> None:
    actor = Async.options(max_concurrency=2500).remote()
    refs = [actor.gather.remote(2000) for _ in range(2000)]
    assert len(set(actorrpc.get(refs))) == 1


def test_all_calls_behind_a_pending_argument_start_when_it_is_ready(gate: Path) -> None:
    actor = Async.options(max_concurrency=100, allow_out_of_order_execution=False).remote()
    refs = [actor.gather.remote(later.remote(str(gate), 100)), *(actor.gather.remote(100) for _ in range(99))]
    until(lambda: row_of(actor).state == "ALIVE" and row_of(actor).pending_calls == 100)
    open_gate(gate)
    assert len(set(actorrpc.get(refs))) == 1


# -- calls with pending arguments ----------------------------------------------------------------------------


@actorrpc.remote
def later(path: str, value: Any) -> Any:
    pass_gate(path)
    if isinstance(value, BaseException):
        raise value
    return value


class Notes:
    """Records its arguments in the order of its calls."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, *values: Any, **named: Any) -> int:
        self.seen.append((*values, *named.values()))
        return len(self.seen)

    def add(self, value: int) -> int:
        return value + 1

    def all(self) -> list[Any]:
        return self.seen

    def pid(self) -> int:
        return os.getpid()


def test_a_call_fails_with_the_error_of_its_argument(gates: Callable[[], Path]) -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    fails, never = gates(), gates()
    call = notes.note.remote(
        later.remote(str(never), 1), more=later.remote(str(fails), LookupError("no such row"))
    )
    after = notes.note.remote("after")
    open_gate(fails)
    with pytest.raises(LookupError, match="no such row"):
        actorrpc.get(call)
    assert actorrpc.get(after) == 1
    open_gate(never)
    assert actorrpc.get(notes.all.remote()) == [("after",)]


@pytest.mark.parametrize("error", [errors.CancelledError, errors.RpcTimeoutError])
def test_a_call_that_is_cancelled_or_times_out_before_its_argument_is_ready_has_not_run(
    gate: Path, error: type[errors.RpcError]
) -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    timeout = 0.2 if error is errors.RpcTimeoutError else 0
    call = notes.note.options(timeout=timeout).remote(later.remote(str(gate), 1))
    after = notes.note.remote("after")
    if not timeout:
        assert actorrpc.cancel(call)
    with pytest.raises(error) as caught:
        actorrpc.get(call)
    assert caught.value.maybe_executed is False
    assert actorrpc.get(after) == 1
    open_gate(gate)
    assert actorrpc.get(notes.all.remote()) == [("after",)]


def test_calls_with_pending_arguments_have_not_run_if_the_actor_is_killed(gate: Path) -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    call = notes.note.remote(later.remote(str(gate), 1))
    actorrpc.get(notes.pid.options(allow_out_of_order=True).remote())
    actorrpc.kill(notes)
    with pytest.raises(errors.ActorDiedError) as caught:
        actorrpc.get(call)
    assert caught.value.maybe_executed is False
    open_gate(gate)


def test_calls_with_pending_arguments_run_on_the_restarted_actor(gate: Path) -> None:
    notes: Any = actorrpc.remote(Notes).options(max_restarts=1).remote()
    actorrpc.get(notes.pid.remote())
    call = notes.note.remote(later.remote(str(gate), 7), more=[1])
    actorrpc.kill(notes, no_restart=False)
    # Wait for an answer of the restarted actor: earlier, the call might be sent to the killed incarnation.
    actorrpc.get(notes.pid.options(allow_out_of_order=True, max_task_retries=-1).remote())
    open_gate(gate)
    assert actorrpc.get(call) == 1
    assert actorrpc.get(notes.all.remote()) == [(7, [1])]


def test_the_other_arguments_of_a_pending_call_are_copied_at_the_call(gate: Path) -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    others, tensor = [1, 2], torch.ones(3)
    call = notes.note.remote(later.remote(str(gate), 1), others, named=tensor)
    others.append(3)
    tensor.zero_()
    open_gate(gate)
    actorrpc.get(call)
    ((value, numbers, sent),) = actorrpc.get(notes.all.remote())
    assert (value, numbers, sent.tolist()) == (1, [1, 2], [1, 1, 1])


def test_a_failure_fails_a_long_chain_of_dependent_calls() -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    ref = notes.add.remote("no number")
    for _ in range(1000):
        ref = notes.add.remote(ref)
    with pytest.raises(TypeError):
        actorrpc.get(ref)
    assert actorrpc.get(notes.add.remote(1)) == 2
