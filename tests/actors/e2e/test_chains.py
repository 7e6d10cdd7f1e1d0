"""Reentrant calls (A -> B -> A): which calls may run while an actor waits, and detection of deadlocks."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import rpc
from tests.actors.e2e.kit import Gate, open_gate, pass_gate, row_of, until

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(20)]


# -- cycles ------------------------------------------------------------------------------------------------------


@actorrpc.remote
class Node:
    """Forwards a call along a list of actors."""

    def __init__(self) -> None:
        self.home = threading.get_ident()
        self.depth = 0
        self.deepest = 0
        self.log: list[Any] = []

    def visit(self, way: list[Any], style: str = "get") -> list[bool]:
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)
        try:
            here = threading.get_ident() == self.home
            if not way:
                return [here]
            head, *rest = way
            if style == "get":
                return [here, *actorrpc.get(head.visit.remote(rest, style))]
            if style == "sync":
                return [here, *head.rpc_sync().visit(rest, style)]
            if style == "async":
                return [here, *head.rpc_async().visit(rest, style).wait()]
            raise ValueError(style)
        finally:
            self.depth -= 1

    def note(self, line: Any) -> Any:
        self.log.append(line)
        return line

    def all(self) -> list[Any]:
        return self.log

    def peak(self) -> int:
        return self.deepest

    def begin(self, other: Any, me: Any, gate: Any) -> list[Any]:
        """Wait at the gate, while other calls arrive."""
        self.log.append("begin")
        actorrpc.get(gate.wait.remote())
        self.log.append("end")
        return self.log

    def through_worker(self, worker: str, me: Any) -> Any:
        return rpc.rpc_sync(worker, call_back, (me, "back"))

    def through_rref(self, worker: str, me: Any) -> Any:
        return rpc.remote(worker, call_back, (me, "back")).to_here()

    def through_task(self, me: Any) -> Any:
        return actorrpc.get(task_back.remote(me, "task"))

    def through_argument(self, other: Any, me: Any) -> Any:
        """The call back to this actor is an argument of the call that it waits for."""
        return actorrpc.get(other.note.remote(other.note.remote(me.note.remote("argument"))))

    def through_call(self, me: Any) -> Any:
        return actorrpc.get(actorrpc.call(me, Node.__actor_class__.note, "called"))

    def through_thread(self, me: Any) -> Any:
        """Call back from a thread to which the context was copied: other threads are not part of the chain."""
        import contextvars

        found: list[Any] = []
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=lambda: context.run(lambda: found.append(actorrpc.get(me.note.remote("thread"))))
        )
        thread.start()
        future = actorrpc.Future()
        done = threading.Thread(target=lambda: (thread.join(), future.set_result(found)))
        done.start()
        future.wait()
        done.join()
        return found

    def through_queue(self, queue: Any, other: Any, me: Any) -> Any:
        ref = other.put.remote(queue, me)
        found = queue.get(timeout=20)
        actorrpc.get(ref)
        return found

    def put(self, queue: Any, other: Any) -> None:
        queue.put(actorrpc.get(other.note.remote("queued")))


def call_back(node: Any, line: Any) -> Any:
    return actorrpc.get(node.note.remote(line))


@actorrpc.remote
def task_back(node: Any, line: Any) -> Any:
    return actorrpc.get(node.note.remote(line))


@pytest.mark.parametrize("style", ["sync", "async"])
def test_calls_back_to_a_waiting_actor_run_on_its_own_thread(style: str) -> None:
    a, b = Node.remote(), Node.remote()
    assert actorrpc.get(a.visit.remote([b, a], style)) == [True] * 3
    assert actorrpc.get(a.visit.remote([a], style)) == [True] * 2
    assert actorrpc.get(a.visit.remote([a, a, a, b, b, a], style)) == [True] * 7
    assert actorrpc.get(a.peak.remote()) == 5


def test_too_deep_recursion_raises_and_does_not_crash() -> None:
    node = Node.remote()
    with pytest.raises(RecursionError):
        actorrpc.get(node.visit.remote([node] * 300))
    assert actorrpc.get(node.note.remote("alive")) == "alive"


def test_calls_come_back_through_workers_tasks_queues_arguments_and_threads() -> None:
    node, other = Node.remote(), Node.remote()
    me = actorrpc.get_worker_info().name
    assert actorrpc.get(node.through_worker.remote(me, node)) == "back"
    assert actorrpc.get(node.through_rref.remote(me, node)) == "back"
    queue = actorrpc.Queue()
    assert actorrpc.get(node.through_queue.remote(queue, other, node)) == "queued"
    queue.shutdown()
    assert actorrpc.get(node.through_task.remote(node)) == "task"
    assert actorrpc.get(node.through_argument.remote(other, node)) == "argument"
    assert actorrpc.get(node.through_call.remote(node)) == "called"
    assert actorrpc.get(node.through_thread.remote(node)) == ["thread"]


# -- which calls may run -----------------------------------------------------------------------------------------


def test_calls_outside_the_chain_wait_until_the_method_ends() -> None:
    node, other, gate = Node.remote(), Node.remote(), Gate.remote()
    outer = node.begin.remote(other, node, gate)
    until(lambda: actorrpc.get(gate.count.remote()) == 1)
    late = node.note.remote("later")
    foreign = other.visit.remote([node])
    until(lambda: row_of(node).pending_calls == 2)
    gate.open.remote()
    assert actorrpc.get(outer) == ["begin", "end"]
    assert actorrpc.get(late) == "later"
    assert actorrpc.get(foreign) == [True, True]


@actorrpc.remote
class Siblings:
    """Checks that calls of one chain neither overlap nor interrupt each other."""

    def __init__(self) -> None:
        self.inside = 0
        self.overlap = False
        self.log: list[str] = []

    def start(self, me: Any, others: list[Any]) -> Any:
        refs = [each.call_many.remote(me, name) for each, name in zip(others, "ab", strict=True)]
        actorrpc.get(refs)
        return self.overlap, sorted(self.log)

    def touch(self, name: str) -> None:
        self.inside += 1
        self.overlap |= self.inside > 1
        for _ in range(200):
            self.log.append(name)
            self.log.pop()
        self.log.append(name)
        self.inside -= 1


@actorrpc.remote
class Caller:
    def call_many(self, target: Any, name: str) -> None:
        actorrpc.get([target.touch.remote(name) for _ in range(20)])


def test_nested_calls_of_one_chain_run_one_at_a_time() -> None:
    target, others = Siblings.remote(), [Caller.remote(), Caller.remote()]
    assert actorrpc.get(target.start.remote(target, others)) == (False, ["a"] * 20 + ["b"] * 20)


@actorrpc.remote
class Branch:
    """A -> B and A -> C -> B: the second call does not descend from the first and must wait for it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def root(self, b: Any, c: Any, paths: list[str], gate: Any) -> Any:
        first = b.hold.remote(paths, gate)
        second = c.relay.remote(b)
        actorrpc.get(gate.wait.remote())
        return actorrpc.get([first, second])

    def hold(self, paths: list[str], gate: Any) -> None:
        self.log.append("hold")
        pass_gate(paths[0])
        actorrpc.get(gate.open.remote())
        pass_gate(paths[1])
        self.log.append("held")

    def relay(self, b: Any) -> Any:
        return actorrpc.get(b.note.remote("relayed"))

    def note(self, word: str) -> list[str]:
        self.log.append(word)
        return list(self.log)


def test_a_call_does_not_run_within_a_waiting_call_that_it_does_not_descend_from(
    gates: Callable[[], Path],
) -> None:
    a, b, c, opener = Branch.remote(), Branch.remote(), Branch.remote(), Gate.remote()
    actorrpc.get([actorrpc.ready(each) for each in (a, b, c)])
    # Two gates: a thread that is still at the first one would also read the second word.
    first, second = gates(), gates()
    found = a.root.remote(b, c, [str(first), str(second)], opener)
    open_gate(first)
    until(lambda: row_of(b).pending_calls == 1)
    open_gate(second)
    assert actorrpc.get(found) == [None, ["hold", "held", "relayed"]]


_MET = threading.Barrier(2)  # for two actors of one process


def _check_that_a_deadlock_is_found(calls: list[Any]) -> None:
    """Check that at least one call fails with DeadlockError and that the others succeed."""
    errors, values = [], []
    for call in calls:
        try:
            values.append(actorrpc.get(call))
        except actorrpc.DeadlockError as error:
            errors.append(error)
    assert errors
    assert values == ["here"] * (len(calls) - len(errors))


@actorrpc.remote
class BlockingMeeting:
    async def meet(self, other: Any) -> Any:
        _MET.wait(20)
        return actorrpc.get(other.answer.remote())  # blocks the event loop

    async def answer(self) -> str:
        return "here"


@pytest.mark.slow
@pytest.mark.prints("blocks all coroutines|has held the event loop")
def test_a_deadlock_between_two_blocked_event_loops_is_found() -> None:
    # Such an execution is registered twice: by its thread and by its asyncio task.
    here = rpc.get_worker_info().name
    first, second = (BlockingMeeting.options(worker=here, max_concurrency=1).remote() for _ in range(2))
    calls = [first.meet.remote(second), second.meet.remote(first)]
    _check_that_a_deadlock_is_found(calls)


@actorrpc.remote
class Giving:
    def give(self, taker: Any, other: Any) -> Any:
        _MET.wait(20)
        return actorrpc.get(taker.take.remote(other.answer.remote()))

    def ask(self, other: Any) -> Any:
        _MET.wait(20)
        return actorrpc.get(other.answer.remote())

    def take(self, value: str) -> str:
        return value

    def answer(self) -> str:
        return "here"


@pytest.mark.slow
def test_a_deadlock_through_a_pending_argument_of_this_process_is_found() -> None:
    here = rpc.get_worker_info().name
    first, second, taker = (Giving.options(worker=here).remote() for _ in range(3))
    calls = [first.give.remote(taker, second), second.ask.remote(first)]
    _check_that_a_deadlock_is_found(calls)


# -- async and threaded actors in a chain ----------------------------------------------------------------------


@actorrpc.remote
class AsyncNode:
    def __init__(self) -> None:
        self.log: list[str] = []

    async def visit(self, way: list[Any]) -> int:
        if not way:
            return 1
        return 1 + int(await way[0].visit.remote(way[1:]))

    @actorrpc.method(thread=True)  # on the loop it would block visit()
    def sync(self, way: list[Any]) -> int:
        return 1 + int(actorrpc.get(way[0].visit.remote(way[1:])))


@actorrpc.remote
class Counting:
    def visit(self, way: list[Any]) -> int:
        return 1 + (int(actorrpc.get(way[0].visit.remote(way[1:]))) if way else 0)


@pytest.mark.slow
def test_calls_come_back_through_async_actors() -> None:
    a, b, s = AsyncNode.remote(), AsyncNode.options(max_concurrency=1).remote(), Counting.remote()
    assert actorrpc.get(a.visit.remote([b, a, b, a])) == 5
    assert actorrpc.get(s.visit.remote([a, s, b, s, a, b, s])) == 8
    assert actorrpc.get(b.visit.remote([s, b])) == 3
    assert actorrpc.get(a.sync.remote([s, a, b, s, a])) == 6
    c = AsyncNode.remote()
    refs = [s.visit.remote([a, c, s]) for _ in range(20)] + [c.visit.remote([s, a, c]) for _ in range(20)]
    assert actorrpc.get(refs) == [4] * 40


def test_calls_come_back_through_threaded_actors() -> None:
    t, s = Counting.options(max_concurrency=2).remote(), Counting.remote()
    refs = [t.visit.remote([s, t, s, t, t]) for _ in range(12)] + [t.visit.remote([t, s]) for _ in range(12)]
    assert actorrpc.get(refs) == [6] * 12 + [3] * 12


# -- threads of serial actors --------------------------------------------------------------------------------------


@actorrpc.remote
class ThreadBound:
    """Uses objects that work on one thread only."""

    def __init__(self) -> None:
        self.home = threading.get_ident()
        self.data = sqlite3.connect(":memory:")
        self.data.execute("create table t (x)")
        self.local = threading.local()
        self.local.mine = True

    def add(self, x: int) -> bool:
        self.data.execute("insert into t values (?)", (x,))
        return self.home == threading.get_ident() and self.local.mine

    def nested(self, other: Any, me: Any, x: int) -> Any:
        return actorrpc.get(other.visit_add.remote(me, x))

    def count(self) -> int:
        return int(self.data.execute("select count(*) from t").fetchone()[0])

    def visit_add(self, other: Any, x: int) -> Any:
        return actorrpc.get(other.add.remote(x))

    def stream(self) -> Any:
        for row in self.data.execute("select x from t order by x"):
            yield row[0], threading.get_ident() == self.home

    def no_grad_nested(self, other: Any, me: Any) -> list[bool]:
        found = [torch.is_grad_enabled()]
        with torch.no_grad():
            found.append(torch.is_grad_enabled())
            found.append(actorrpc.get(other.visit_grad.remote(me)))
            found.append(torch.is_grad_enabled())
        return [*found, torch.is_grad_enabled()]

    def visit_grad(self, other: Any) -> Any:
        return actorrpc.get(other.grad.remote())

    def grad(self) -> bool:
        return torch.is_grad_enabled()

    def leave_grad_off(self) -> None:
        torch.set_grad_enabled(False)


def test_a_serial_actor_runs_everything_on_one_thread() -> None:
    a, b = ThreadBound.remote(), ThreadBound.remote()
    refs = [a.add.remote(n) for n in range(10)]
    refs += [a.nested.remote(b, a, n) for n in range(10, 20)]
    assert actorrpc.get(refs) == [True] * 20
    assert actorrpc.get([b.visit_add.remote(a, n) for n in range(20, 30)]) == [True] * 10
    assert actorrpc.get(a.count.remote()) == 30
    assert [actorrpc.get(ref) for ref in a.stream.remote()] == [(n, True) for n in range(30)]
    assert actorrpc.get(actorrpc.call(a, is_on_home_thread)) is True


def is_on_home_thread(actor: Any) -> bool:
    return bool(actor.home == threading.get_ident())


def test_grad_mode_of_a_serial_actor_is_not_inherited_from_callers() -> None:
    a, b = ThreadBound.remote(), ThreadBound.remote()
    assert actorrpc.get(a.no_grad_nested.remote(b, a)) == [True, False, True, False, True]
    # A mode that a serial actor sets stays set, as on any thread: inference servers disable gradients in their
    # constructors.
    actorrpc.get(a.leave_grad_off.remote())
    assert actorrpc.get(a.grad.remote()) is False
    assert actorrpc.get(b.grad.remote()) is True
    assert actorrpc.get(a.no_grad_nested.remote(b, a)) == [False] * 5
