"""Reentrant calls (A -> B -> A): which calls may run while an actor waits, and detection of deadlocks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import rpc
from tests.actors.e2e.kit import Gate, open_gate, pass_gate, row_of, until
from tests.layers import rest_is_slow
from tests.migration.rows import row

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(20)]


# -- cycles ------------------------------------------------------------------------------------------------------


async def _await(ref: Any) -> Any:
    return await ref


async def _gather(ref: Any) -> Any:
    return (await asyncio.gather(_await(ref), asyncio.sleep(0)))[0]


async def _to_thread(ref: Any) -> Any:
    return await asyncio.to_thread(actorrpc.get, ref)


async def _get(ref: Any) -> Any:
    return actorrpc.get(ref)


WAITS: dict[str, Callable[[Any], Any]] = {
    "get": actorrpc.get,
    "await": lambda ref: asyncio.run(_await(ref)),
    "to_thread": lambda ref: asyncio.run(_to_thread(ref)),
    "future": lambda ref: ref.future().result(),
    "wait": lambda ref: actorrpc.get(actorrpc.wait([ref])[0][0]),
    "as_completed": lambda ref: actorrpc.get(next(actorrpc.as_completed([ref]))),
    "gather": lambda ref: asyncio.run(_gather(ref)),
    "get within a loop": lambda ref: asyncio.run(_get(ref)),
}


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
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                raise AssertionError("the event loop of a method below is not this method's")
            here = threading.get_ident() == self.home
            if not way:
                return [here]
            head, *rest = way
            if style == "sync":
                found = head.rpc_sync().visit(rest, style)
            elif style == "async":
                found = head.rpc_async().visit(rest, style).wait()
            else:
                found = WAITS[style](head.visit.remote(rest, style))
            return [here, *found]
        finally:
            self.depth -= 1

    def note(self, line: Any) -> Any:
        self.log.append(line)
        return line

    def peak(self) -> int:
        return self.deepest

    def items(self) -> Iterator[bool]:
        for _ in range(3):
            yield threading.get_ident() == self.home

    def grad(self, way: list[Any]) -> bool:
        return bool(actorrpc.get(way[0].grad.remote(way[1:]))) if way else torch.is_grad_enabled()

    def grad_under_no_grad(self, way: list[Any]) -> bool:
        with torch.no_grad():
            return self.grad(way)

    def leave_grad_off(self) -> None:
        torch.set_grad_enabled(False)

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


@pytest.mark.parametrize("style", rest_is_slow(["sync", *WAITS, "async"], quick=3))
@row("an actor that calls back into one that waits for it", "from-ray")
def test_calls_back_to_a_waiting_actor_run_on_its_own_thread(style: str) -> None:
    a, b = Node.remote(), Node.remote()
    assert actorrpc.get(a.visit.remote([b, a], style)) == [True] * 3
    assert actorrpc.get(a.visit.remote([a], style)) == [True] * 2
    assert actorrpc.get(a.visit.remote([a, a, a, b, b, a], style)) == [True] * 7
    assert actorrpc.get(a.peak.remote()) == 5


def test_without_reentrancy_a_call_back_raises_deadlock_error() -> None:
    styles = ("get", "await", "get within a loop")
    firsts = [Node.options(reentrant=False, name=f"first {style}").remote() for style in styles]
    others = [Node.remote() for _ in styles]
    for ways in ([[b, a] for a, b in zip(firsts, others, strict=True)], [[a] for a in firsts]):
        calls = [a.visit.remote(way, style) for a, way, style in zip(firsts, ways, styles, strict=True)]
        for call in calls:
            with pytest.raises(actorrpc.DeadlockError, match="first"):
                actorrpc.get(call, timeout=15)
    assert actorrpc.get([a.visit.remote([]) for a in firsts], timeout=10)


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


# -- async and threaded actors in a chain ----------------------------------------------------------------------


@actorrpc.remote
class AsyncNode:
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


def test_an_async_actor_with_max_concurrency_1_is_not_reentrant_if_disabled() -> None:
    closed, other = (
        AsyncNode.options(max_concurrency=1, reentrant=False, name="closed").remote(),
        AsyncNode.remote(),
    )
    for first, way in ((closed, [closed]), (other, [closed, other, closed])):
        with pytest.raises(actorrpc.DeadlockError, match="closed"):
            actorrpc.get(first.visit.remote(way), timeout=15)
    assert actorrpc.get(closed.visit.remote([other])) == 2


def test_calls_come_back_through_threaded_actors() -> None:
    t, s = Counting.options(max_concurrency=2).remote(), Counting.remote()
    refs = [t.visit.remote([s, t, s, t, t]) for _ in range(12)] + [t.visit.remote([t, s]) for _ in range(12)]
    assert actorrpc.get(refs) == [6] * 12 + [3] * 12


# -- threads of serial actors --------------------------------------------------------------------------------------


def test_streams_and_functions_of_a_serial_actor_run_on_its_thread() -> None:
    node = Node.remote()
    assert list(node.items.remote().values()) == [True] * 3
    assert actorrpc.get(actorrpc.call(node, lambda node: node.home == threading.get_ident())) is True


def test_grad_mode_of_a_serial_actor_is_not_inherited_from_callers() -> None:
    a, b = Node.remote(), Node.remote()
    assert actorrpc.get([a.grad_under_no_grad.remote(way) for way in ([b], [b, a])]) == [True, True]
    # A mode that a serial actor sets stays set, as on any thread: inference servers disable gradients in their
    # constructors.
    actorrpc.get(a.leave_grad_off.remote())
    assert actorrpc.get([a.grad.remote([]), b.grad.remote([]), a.grad.remote([b, a])]) == [False, True, False]
