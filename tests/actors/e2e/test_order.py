"""In which order calls run, and how many at a time."""

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
from tests.actors.e2e.kit import Gate, open_gate, pass_gate, row_of, until
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


@actorrpc.remote
def later(path: str, value: Any) -> Any:
    pass_gate(path)
    return value


@pytest.mark.slow
def test_calls_with_unresolved_arguments_keep_their_place(gates: Callable[[], Path]) -> None:
    recorder = Recorder.remote()
    gate, second = gates(), gates()
    pending = later.remote(str(gate), 0)
    refs = [recorder.note.remote(pending)] + [recorder.note.remote(n) for n in range(1, 50)]
    refs.append(recorder.note.remote(50, later.remote(str(second), 7)))
    refs += [recorder.note.remote(n) for n in range(51, 60)]
    open_gate(second)
    open_gate(gate)
    assert actorrpc.get(refs) == list(range(60))
    seen = actorrpc.get(recorder.all.remote())
    assert seen == [(n, 7) if n == 50 else n for n in range(60)]


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


def test_calls_made_before_the_actor_is_there_keep_their_order() -> None:
    for _ in range(5):
        recorder = Recorder.remote()
        refs = [recorder.note.remote(n) for n in range(40)]
        actorrpc.get(refs)
        assert actorrpc.get(recorder.all.remote()) == list(range(40))


def test_a_chain_of_refs_from_actor_to_actor() -> None:
    recorders = [Recorder.remote() for _ in range(3)]
    ref: Any = 0
    for n in range(30):
        ref = recorders[n % 3].note.remote(ref)
    assert actorrpc.get(ref) == 0
    assert [len(x) for x in actorrpc.get([r.all.remote() for r in recorders])] == [10, 10, 10]


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


def test_arguments_are_taken_as_they_are_at_the_call(gate: Path) -> None:
    recorder = Recorder.remote()
    tensor, numbers = torch.zeros(4), [1]
    actorrpc.get(recorder.all.remote())
    busy = recorder.block.remote(str(gate))
    small = recorder.note.remote(numbers)
    numbers.append(2)
    open_gate(gate)
    assert actorrpc.get([busy, small]) == ["go", [1]]
    assert tensor.sum() == 0


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


@actorrpc.remote
class AsyncCaller:
    async def inner(self, to: Any) -> Any:
        return await to.note.remote("inner")

    async def outer(self, to: Any, through: Any) -> Any:
        return await to.note.remote(through.inner.remote(to))


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
@pytest.mark.parametrize("kind", [Caller, pytest.param(AsyncCaller, marks=pytest.mark.slow)])
def test_a_call_behind_one_that_waits_for_it_is_a_deadlock_and_said_so(kind: Any) -> None:
    """``inner`` runs while ``outer`` waits: what it calls comes after what ``outer`` has called, which needs its result."""
    recorder, caller = Recorder.remote(), kind.remote()
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

    def wait_for(self, refs: list[Any]) -> Any:
        return actorrpc.get(refs[0])


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

    def ident(self) -> int:
        return threading.get_ident()

    async def ping(self) -> str:
        return "pong"


def test_thousands_of_awaits_at_a_time() -> None:
    actor = Async.options(max_concurrency=2500).remote()
    refs = [actor.gather.remote(2000) for _ in range(2000)]
    assert actorrpc.get(refs) == [2000] * 2000
    assert actorrpc.get(actor.loops.remote()) == 1


def test_a_method_on_a_thread_does_not_block_the_loop(gate: Path) -> None:
    actor = Async.remote()
    blocked = actor.block.remote(str(gate))
    assert actorrpc.get([actor.ping.remote() for _ in range(20)]) == ["pong"] * 20
    ready, _ = actorrpc.wait([blocked], timeout=0)
    assert not ready
    open_gate(gate)
    assert actorrpc.get(blocked) == "go"
    assert len(set(actorrpc.get([actor.ident.remote() for _ in range(8)]))) == 1


def test_async_calls_of_one_caller_start_in_order() -> None:
    actor = Starts.remote()
    refs = [actor.step.remote(n) for n in range(200)]
    actorrpc.get(refs)
    assert actorrpc.get(actor.all.remote()) == list(range(200))


@actorrpc.remote
class Starts:
    def __init__(self) -> None:
        self.seen: list[int] = []

    async def step(self, number: int) -> None:
        self.seen.append(number)
        await asyncio.sleep(0)

    async def all(self) -> list[int]:
        return self.seen


def test_an_async_actor_with_one_call_at_a_time() -> None:
    actor = OneAtATime.options(max_concurrency=1).remote()
    assert actorrpc.get([actor.step.remote() for _ in range(30)]) == [1] * 30


@actorrpc.remote
class OneAtATime:
    def __init__(self) -> None:
        self.inside = 0

    async def step(self) -> int:
        self.inside += 1
        await asyncio.sleep(0)
        found = self.inside
        self.inside -= 1
        return found


# -- control while it is busy ------------------------------------------------------------------------------------------


def test_control_is_not_stuck_behind_work(gate: Path) -> None:
    actor = Recorder.remote()
    busy = actor.block.remote(str(gate))
    waiting = [actor.note.remote(n) for n in range(5)]
    assert actorrpc.is_alive(actor)
    until(lambda: row_of(actor).state == "ALIVE" and row_of(actor).pending_calls == 5)
    found = row_of(actor)
    assert (found.running_calls, found.class_name, found.restarts) == (1, "Recorder", 0)
    assert found.pid > 0
    assert actorrpc.cancel(waiting[2])
    with pytest.raises(actorrpc.CancelledError):
        actorrpc.get(waiting[2])
    until(lambda: row_of(actor).pending_calls == 4)
    open_gate(gate)
    assert actorrpc.get(busy) == "go"
    assert actorrpc.get([waiting[n] for n in (0, 1, 3, 4)]) == [0, 1, 3, 4]
    assert actorrpc.get(actor.all.remote()) == [0, 1, 3, 4]


@pytest.mark.slow
def test_kill_while_it_is_busy_in_c(gate: Path) -> None:
    actor = Recorder.remote()
    busy = actor.block.remote(str(gate))
    waiting = actor.note.remote(1)
    fd = os.open(gate, os.O_WRONLY)  # returns when it is in there
    actorrpc.kill(actor)
    for ref in (busy, waiting, actor.note.remote(2)):
        with pytest.raises(actorrpc.ActorDiedError, match="killed"):
            actorrpc.get(ref)
    assert not actorrpc.is_alive(actor)
    os.close(fd)
    actorrpc.kill(actor)  # idempotent


def test_many_callers_and_a_gate() -> None:
    gate = Gate.remote()
    waits = [gate.wait.remote() for _ in range(300)]
    until(lambda: actorrpc.get(gate.count.remote()) == 300)
    gate.open.remote()
    assert actorrpc.get(waits) == ["open"] * 300
