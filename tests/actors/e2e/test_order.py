"""In which order calls run, how many at a time, and what pending arguments change."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import errors
from tests.actors.e2e.kit import open_gate, pass_gate, row_of, until
from tests.layers import rest_is_slow

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(20)]


@actorrpc.remote
class Recorder:
    """Writes down what it is given, in the order of its calls."""

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


def test_a_call_whose_argument_failed_is_left_out_and_the_order_of_the_others_is_kept(gate: Path) -> None:
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


def test_large_tensors_among_small_calls_keep_the_order() -> None:
    recorder = Recorder.remote()
    seed = random.Random(3)
    sizes = [seed.choice([1, 1, 10, 5_000, 60_000, 700_000, 3_000_000]) for _ in range(80)]
    refs = [recorder.note.remote(n, torch.zeros(size)) for n, size in enumerate(sizes)]
    actorrpc.get(refs)
    assert actorrpc.get(recorder.all.remote()) == list(enumerate(sizes))


def test_each_thread_that_calls_keeps_its_order() -> None:
    recorder = Recorder.remote()

    def call(thread: int) -> None:
        refs = []
        for n in range(60):
            payload = torch.zeros(300_000) if n % 20 == thread else 1
            refs.append(recorder.note.remote((thread, n), payload))
        assert actorrpc.get(refs) == [(thread, n) for n in range(60)]

    threads = [threading.Thread(target=call, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = [entry for entry, _ in actorrpc.get(recorder.all.remote())]
    assert len(seen) == 360
    for thread_ in range(6):
        assert [n for t, n in seen if t == thread_] == list(range(60))


@actorrpc.remote
class Sender:
    def send(self, to: Any, name: str, count: int) -> list[int]:
        return [n for _, n in actorrpc.get([to.note.remote((name, n)) for n in range(count)])]


def test_each_actor_that_calls_keeps_its_order() -> None:
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
def test_each_of_many_calls_takes_the_result_of_the_one_before(kinds: Any, links: int) -> None:
    actors = [kind.remote() for kind in kinds]
    last = actorrpc.put(0)
    for number in range(links):
        last = actors[number % len(actors)].add.remote(last)
    assert actorrpc.get(last, timeout=50) == links


def test_priorities_overtake_what_waits(gate: Path) -> None:
    recorder = Recorder.remote()
    busy = recorder.block.remote(str(gate))
    until(lambda: row_of(recorder).state == "ALIVE" and row_of(recorder).running_calls == 1)
    refs = [recorder.note.options(priority=n % 3).remote((n % 3, n)) for n in range(12)]
    until(lambda: row_of(recorder).pending_calls == 12)
    open_gate(gate)
    actorrpc.get([busy, *refs])
    seen = actorrpc.get(recorder.all.remote())
    assert seen == sorted(((n % 3, n) for n in range(12)), key=lambda each: (-each[0], each[1]))


# -- out of order ------------------------------------------------------------------------------------------------


def test_out_of_order_execution(gate: Path) -> None:
    recorder = Recorder.options(allow_out_of_order_execution=True).remote()
    slow = recorder.note.remote(later.remote(str(gate), "slow"))
    assert actorrpc.get([recorder.note.remote(n) for n in range(10)]) == list(range(10))
    open_gate(gate)
    assert actorrpc.get(slow) == "slow"
    assert actorrpc.get(recorder.all.remote()) == [*range(10), "slow"]


@pytest.mark.parametrize("kind", ["threads", "async"])
def test_where_several_run_at_a_time_whatever_is_ready_runs(gate: Path, kind: str) -> None:
    actor: Any = Recorder.options(max_concurrency=2).remote() if kind == "threads" else AsyncRecorder.remote()
    slow = actor.note.remote(later.remote(str(gate), "slow"))
    assert actorrpc.get([actor.note.remote(n) for n in range(10)]) == list(range(10))
    open_gate(gate)
    assert actorrpc.get(slow) == "slow"


@actorrpc.remote
class AsyncRecorder:
    async def note(self, number: Any) -> Any:
        return number


def test_several_at_a_time_are_kept_in_order_where_that_is_wanted(gate: Path) -> None:
    recorder = Recorder.options(max_concurrency=2, allow_out_of_order_execution=False).remote()
    slow = recorder.note.remote(later.remote(str(gate), "slow"))
    fast = recorder.note.remote("fast")
    until(lambda: row_of(recorder).state == "ALIVE" and row_of(recorder).pending_calls == 2)
    open_gate(gate)
    assert actorrpc.get([slow, fast]) == ["slow", "fast"]


# -- who keeps an order ------------------------------------------------------------------------------------------


@actorrpc.remote
class Caller:
    """Calls another one."""

    def inner(self, to: Any) -> Any:
        return actorrpc.get(to.note.remote("inner"))

    def outer(self, to: Any, through: Any) -> Any:
        return actorrpc.get(to.note.remote(through.inner.remote(to)))

    def leave(self, to: Any, path: str) -> Any:
        """Make a call whose argument comes later, and do not wait for it."""
        return [to.note.remote(later.remote(path, "first"))]

    def follow(self, to: Any) -> Any:
        return actorrpc.get(to.note.remote("second"))


def test_actors_that_share_a_worker_do_not_stand_in_each_others_way() -> None:
    recorder, first = Recorder.remote(), Caller.remote()
    second = Caller.options(worker=first).remote()
    assert actorrpc.get(first.outer.remote(recorder, second)) == "inner"
    assert actorrpc.get(second.outer.remote(recorder, first)) == "inner"


def test_the_calls_of_one_actor_keep_their_order_from_method_to_method(gate: Path) -> None:
    recorder, caller = Recorder.remote(), Caller.remote()
    (left,) = actorrpc.get(caller.leave.remote(recorder, str(gate)))
    second = caller.follow.remote(recorder)
    until(lambda: row_of(recorder).pending_calls == 2)
    open_gate(gate)
    assert actorrpc.get([left, second]) == ["first", "second"]
    assert actorrpc.get(recorder.all.remote()) == ["first", "second"]


@pytest.mark.slow
def test_a_call_behind_one_that_waits_for_it_is_a_deadlock_and_said_so() -> None:
    """``inner`` runs while ``outer`` waits: what it calls comes after what ``outer`` has called, which needs its result."""
    recorder, caller = Recorder.remote(), Caller.remote()
    with pytest.raises(actorrpc.DeadlockError, match=r"note\(\).*inner\(\).*earlier call of the same caller"):
        actorrpc.get(caller.outer.remote(recorder, caller))
    assert actorrpc.get(recorder.note.remote("alive")) == "alive"
    free = Recorder.options(allow_out_of_order_execution=True).remote()
    assert actorrpc.get(caller.outer.remote(free, caller)) == "inner"


# -- calls that are made again -------------------------------------------------------------------------------------


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
def test_a_call_that_is_made_again_goes_before_what_waits_for_it(how: dict[str, Any]) -> None:
    moody = Moody.options(**how).remote()
    for turn in (30, 60):
        work = moody.work.options(retry_exceptions=True, max_task_retries=5).remote()
        uses = [moody.use.remote(work) for _ in range(3)]
        assert actorrpc.get(uses) == [turn] * 3


@actorrpc.remote(concurrency_groups={"io": 1})
class Held:
    def __init__(self) -> None:
        self.released = threading.Event()

    def work(self) -> None:
        assert self.released.wait(60)
        raise ValueError("not yet")

    @actorrpc.method(concurrency_group="io")
    def release(self) -> None:
        self.released.set()

    def wait_for(self, refs: list[Any]) -> Any:
        return actorrpc.get(refs[0])


@pytest.mark.slow
def test_a_call_that_is_to_be_made_again_within_one_that_waits_for_it_is_a_deadlock() -> None:
    held = Held.remote()
    work = held.work.options(retry_exceptions=True, max_task_retries=5).remote()
    waits = held.wait_for.remote([work])
    actorrpc.get(held.release.remote())  # it comes behind the call that waits
    with pytest.raises(actorrpc.DeadlockError, match="wait_for"):
        actorrpc.get(waits)


# -- threads and groups --------------------------------------------------------------------------------------------


@actorrpc.remote(max_concurrency=4)
class Threaded:
    def __init__(self) -> None:
        self.barrier = threading.Barrier(4)
        self.inside = 0
        self.most = 0
        self.lock = threading.Lock()

    def meet(self) -> int:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.barrier.wait(30)
        with self.lock:
            self.inside -= 1
        return threading.get_ident()

    def peak(self) -> int:
        return self.most


def test_threaded_actors_run_as_many_calls_as_they_say() -> None:
    actor = Threaded.remote()
    idents = actorrpc.get([actor.meet.remote() for _ in range(16)])
    assert len(set(idents)) == 4
    assert actorrpc.get(actor.peak.remote()) == 4


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


def test_concurrency_groups_do_not_wait_for_each_other() -> None:
    actor = Grouped.remote()
    computing = [actor.compute.remote() for _ in range(3)]
    assert actorrpc.get([actor.io.remote() for _ in range(4)]) == ["io"] * 4
    assert actorrpc.get(actor.release.remote()) == "released"
    assert actorrpc.get(computing) == [True] * 3
    # A call may choose another group than the method's own.
    assert actorrpc.get(actor.release.options(concurrency_group="io").remote()) == "released"
    with pytest.raises(ValueError, match=r"no concurrency group 'oi'.*'io', 'compute'"):
        actor.release.options(concurrency_group="oi")


# -- async actors ----------------------------------------------------------------------------------------------------


@actorrpc.remote
class Async:
    def __init__(self) -> None:
        self.here = 0
        self.event: asyncio.Event | None = None
        self.threads: set[int] = set()

    async def gather(self, count: int) -> int:
        """Return when ``count`` calls are in here at a time."""
        if self.event is None:
            self.event = asyncio.Event()
        self.threads.add(threading.get_ident())
        self.here += 1
        if self.here == count:
            self.event.set()
        await self.event.wait()
        return self.here

    async def loops(self) -> int:
        return len(self.threads)

    @actorrpc.method(thread=True)
    def block(self, path: str) -> str:
        return pass_gate(path)


def test_thousands_of_awaits_at_a_time() -> None:
    actor = Async.options(max_concurrency=2500).remote()
    refs = [actor.gather.remote(2000) for _ in range(2000)]
    assert actorrpc.get(refs) == [2000] * 2000
    assert actorrpc.get(actor.loops.remote()) == 1


# -- calls whose arguments are results that are not there yet ------------------------------------------------


@actorrpc.remote
def later(path: str, value: Any) -> Any:
    pass_gate(path)
    if isinstance(value, BaseException):
        raise value
    return value


class Notes:
    """Writes down its arguments in the order of its calls."""

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


def test_the_failure_of_an_argument_is_the_failure_of_the_call(gates: Callable[[], Path]) -> None:
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


def test_a_cancelled_call_whose_argument_is_pending_has_not_run(gate: Path) -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    call = notes.note.remote(later.remote(str(gate), 1))
    after = notes.note.remote("after")
    assert actorrpc.cancel(call)
    with pytest.raises(errors.CancelledError) as caught:
        actorrpc.get(call)
    assert caught.value.maybe_executed is False
    assert actorrpc.get(after) == 1
    open_gate(gate)
    assert actorrpc.get(notes.all.remote()) == [("after",)]


def test_a_call_whose_argument_comes_too_late_has_not_run(gate: Path) -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    call = notes.note.options(timeout=0.2).remote(later.remote(str(gate), 1))
    after = notes.note.remote("after")
    with pytest.raises(errors.RpcTimeoutError) as caught:
        actorrpc.get(call)
    assert caught.value.maybe_executed is False
    assert actorrpc.get(after) == 1
    open_gate(gate)
    assert actorrpc.get(notes.all.remote()) == [("after",)]


def test_a_killed_actor_has_not_run_the_calls_whose_arguments_were_pending(gate: Path) -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    call = notes.note.remote(later.remote(str(gate), 1))
    actorrpc.get(notes.pid.options(allow_out_of_order=True).remote())
    actorrpc.kill(notes)
    with pytest.raises(errors.ActorDiedError) as caught:
        actorrpc.get(call)
    assert caught.value.maybe_executed is False
    open_gate(gate)


def test_a_restarted_actor_gets_the_calls_whose_arguments_were_pending(gate: Path) -> None:
    notes: Any = actorrpc.remote(Notes).options(max_restarts=1).remote()
    actorrpc.get(notes.pid.remote())
    call = notes.note.remote(later.remote(str(gate), 7), more=[1])
    actorrpc.kill(notes, no_restart=False)
    # Answered by the next life only: before that, the message might leave for the one that was killed.
    actorrpc.get(notes.pid.options(allow_out_of_order=True, max_task_retries=-1).remote())
    open_gate(gate)
    assert actorrpc.get(call) == 1
    assert actorrpc.get(notes.all.remote()) == [(7, [1])]


def test_the_other_arguments_are_taken_as_of_the_call(gate: Path) -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    others, tensor = [1, 2], torch.ones(3)
    call = notes.note.remote(later.remote(str(gate), 1), others, named=tensor)
    others.append(3)
    tensor.zero_()
    open_gate(gate)
    actorrpc.get(call)
    ((value, numbers, sent),) = actorrpc.get(notes.all.remote())
    assert (value, numbers, sent.tolist()) == (1, [1, 2], [1, 1, 1])


def test_an_argument_that_cannot_be_sent_is_refused_at_once(gate: Path) -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    pending = later.remote(str(gate), 1)
    with pytest.raises(errors.SerializationError):
        notes.note.remote(pending, threading.Lock())
    open_gate(gate)
    assert actorrpc.get(notes.note.remote(pending)) == 1


def test_a_failure_ends_all_calls_that_depend_on_it() -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    ref = notes.add.remote("no number")
    for _ in range(1000):
        ref = notes.add.remote(ref)
    with pytest.raises(TypeError):
        actorrpc.get(ref)
    assert actorrpc.get(notes.add.remote(1)) == 2


def test_an_actor_calls_its_own_process_with_pending_arguments() -> None:
    class Parent:
        def run(self) -> int:
            child = actorrpc.remote(Notes).options(worker=actorrpc.rpc.get_worker_info().name).remote()
            ref = actorrpc.put(0)
            for _ in range(100):
                ref = child.add.remote(ref)
            return actorrpc.get(ref)

    assert actorrpc.get(actorrpc.remote(Parent).remote().run.remote()) == 100
