"""CallHooks: when they run during a call, in which order, and the effect of an error in a hook."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import pytest

import actorrpc
from actorrpc import rpc
from actorrpc.agent import hooks
from actorrpc.agent.calls import Call, Execution
from actorrpc.agent.hooks import CallHooks, OutgoingMessage
from actorrpc.futures import Future
from tests.agent.agents import agents
from tests.ranks import rpc_group

_where: ContextVar[str] = ContextVar("where", default="outside")


class Log(CallHooks):
    """Records each hook that runs."""

    def __init__(self, log: list[str], name: str = "") -> None:
        self.log = log
        self.name = name

    def note(self, text: str, error: BaseException | None = None) -> None:
        failed = "" if error is None else f" {type(error).__name__}"
        self.log.append(f"{self.name}{text}{failed}")

    def on_call(self, call: Call, function: Any, args: tuple[Any, ...]) -> None:
        self.note(f"call {call.label}")

    def before_send(self, message: OutgoingMessage) -> None:
        self.note("before answer" if message.is_answer else f"before {message.name}")

    def after_send(self, message: OutgoingMessage) -> None:
        self.note("after answer" if message.is_answer else f"after {message.name}")

    def on_start(
        self, execution: Execution, function: Any, args: tuple[Any, ...]
    ) -> AbstractContextManager[Any] | None:
        self.note(f"start {execution.label}")
        return None

    def on_end(self, execution: Execution, error: BaseException | None) -> None:
        self.note("end", error)

    def on_answer(self, call: Call, error: BaseException | None) -> None:
        self.note(f"answer {call.label}", error)


def fail() -> None:
    raise LookupError("as asked")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_hooks_run_in_order_on_caller_and_callee(mode: str) -> None:
    caller: list[str] = []
    callee: list[str] = []
    with agents(2) as (a, b):
        a.hooks.add(Log(caller))
        b.hooks.add(Log(callee))
        for function, args, failed in ((operator.add, (1, 1), ""), (fail, (), " LookupError")):
            caller.clear()
            callee.clear()
            future: Future[Any] = Future()
            try:
                if mode == "sync":
                    a.call_sync(a.peer("a1"), function, args, {}, 20)
                else:
                    a.call(a.peer("a1"), function, args, {}, 20, future)
                    future.result(20)
            except LookupError:
                assert failed
            name = function.__name__
            assert caller[:3] == [f"call {name}", f"before {name}", f"after {name}"]
            assert len(caller) == 4
            assert caller[3].startswith(f"answer {name} " if failed else f"answer {name}")
            assert callee[:3] == [f"start {name}", f"end{failed}", "before answer"]


def test_hooks_share_header_fields_and_notes_during_a_call() -> None:
    found: list[Any] = []

    class Caller(CallHooks):
        def on_call(self, call: Call, function: Any, args: tuple[Any, ...]) -> None:
            call.fields["color"] = "red"
            call.notes[self] = function, args

        def on_answer(self, call: Call, error: BaseException | None) -> None:
            found.append(call.notes[self])

    class Callee(CallHooks):
        field = "color"

        def on_start(self, execution: Execution, function: Any, args: tuple[Any, ...]) -> None:
            execution.notes[self] = execution.fields["color"]

        def on_end(self, execution: Execution, error: BaseException | None) -> None:
            found.append((execution.notes[self], execution.peer.name))

    with agents(2) as (a, b):
        caller = Caller()
        a.hooks.add(caller)
        b.hooks.add(Callee())
        assert a.call_sync(a.peer("a1"), operator.add, (1, 1), {}, 20) == 2
        assert found == [("red", "a0"), (operator.add, (1, 1))]
        a.hooks.remove(caller)
        assert a.call_sync(a.peer("a1"), operator.add, (1, 1), {}, 20) == 2
        assert len(found) == 2


@pytest.mark.prints("an error cannot be sent to 'a0': ZeroDivisionError")
def test_an_error_in_a_hook_fails_only_its_call() -> None:
    def failing(moment: str) -> CallHooks:
        def refuse(*_: Any) -> Any:
            raise ZeroDivisionError(moment)

        return type("Fails", (CallHooks,), {moment: refuse})()

    with agents(2) as (a, b):
        moments = ((a, "on_call"), (a, "before_send"), (b, "on_start"), (b, "on_end"), (b, "before_send"))
        for agent, moment in moments:
            bad = failing(moment)
            agent.hooks.add(bad)
            for function, args in ((operator.add, (1, 1)), (operator.add, ([], []))):
                with pytest.raises(ZeroDivisionError, match=moment):
                    a.call_sync(a.peer("a1"), function, args, {}, 20)
            agent.hooks.remove(bad)
        assert not a.peer("a1").pending
        assert a.call_sync(a.peer("a1"), operator.add, (1, 1), {}, 20) == 2


@pytest.mark.prints("failed at the end of the call of add")
def test_an_error_in_on_answer_is_logged_and_the_call_succeeds() -> None:
    class Fails(CallHooks):
        def on_answer(self, call: Call, error: BaseException | None) -> None:
            raise ZeroDivisionError

    with agents(2) as (a, _):
        a.hooks.add(Fails())
        assert a.call_sync(a.peer("a1"), operator.add, (1, 1), {}, 20) == 2
        future: Future[int] = Future()
        a.call(a.peer("a1"), operator.add, (1, 1), {}, 20, future)
        assert future.result(20) == 2


# -- executions ----------------------------------------------------------------------------------------------


@contextmanager
def _within(name: str) -> Iterator[None]:
    token = _where.set(name)
    try:
        yield
    finally:
        _where.reset(token)


class _ReusableContext:
    """A context manager that may be entered repeatedly."""

    def __enter__(self) -> None:
        self._block = _within("inside")
        self._block.__enter__()

    def __exit__(self, *_: object) -> None:
        self._block.__exit__(None, None, None)


class Around(Log):
    def on_start(
        self, execution: Execution, function: Any, args: tuple[Any, ...]
    ) -> AbstractContextManager[Any] | None:
        return _ReusableContext()


def _plain() -> str:
    return _where.get()


async def _coroutine() -> str:
    await asyncio.sleep(0)
    return _where.get()


def _generator() -> Iterator[str]:
    yield _where.get()
    yield _where.get()
    raise LookupError("at the end")


async def _async_generator() -> AsyncIterator[str]:
    for item in (_where.get(), _where.get()):
        yield item


def _run(log: list[str], function: Any) -> Any:
    peer: Any = None
    found = hooks.HookSet()
    found.add(Around(log))
    return hooks.run_hooked(found, Execution(None, peer, 1, 20.0, 1), function, (), {})


def test_the_context_manager_of_on_start_surrounds_functions_coroutines_and_generators() -> None:
    log: list[str] = []
    assert _run(log, _plain) == "inside"
    assert asyncio.run(_run(log, _coroutine)) == "inside"
    assert not log  # for these, ``on_end`` runs with the answer
    items = _run(log, _generator)
    assert [next(items), _where.get(), next(items)] == ["inside", "outside", "inside"]
    assert not log
    with pytest.raises(LookupError):
        next(items)
    assert log == ["end LookupError"]
    log.clear()
    items = _run(log, _generator)
    next(items)
    items.close()
    assert log == ["end"]

    async def take() -> list[str]:
        return [f"{item} {_where.get()}" async for item in _run(log, _async_generator)]

    assert asyncio.run(take()) == ["inside outside"] * 2
    assert log == ["end"] * 2


def test_on_end_runs_for_a_stream_closed_before_its_first_item() -> None:
    log: list[str] = []
    _run(log, _generator).close()
    assert log == ["end"]

    async def close() -> None:
        await _run(log, _async_generator).aclose()

    asyncio.run(close())
    assert log == ["end"] * 2


# -- the hooks of a process ----------------------------------------------------------------------------------


class Counts(CallHooks):
    def __init__(self) -> None:
        self.labels: list[str] = []

    def on_answer(self, call: Call, error: BaseException | None) -> None:
        self.labels.append(call.label)


def _add_and_remove_hooks(rank: int, _: int) -> list[str]:
    later, counts = Counts(), Counts()
    if rank == 0:
        actorrpc.add_hooks(counts)
        rpc.rpc_sync("worker1", operator.add, (1, 2))
        actorrpc.add_hooks(later)
        actorrpc.add_hooks(later)
        rpc.rpc_sync("worker1", operator.mul, (1, 2))
        actorrpc.remove_hooks(counts)
        rpc.rpc_sync("worker1", operator.sub, (1, 2))
        actorrpc.remove_hooks(later)
        actorrpc.remove_hooks(later)
        rpc.rpc_sync("worker1", operator.neg, (1,))
    own = [[each for each in found.labels if not each.startswith("actorrpc.")] for found in (counts, later)]
    return [" ".join(each) for each in own]


def test_add_hooks_and_remove_hooks_apply_to_the_process() -> None:
    assert rpc_group(_add_and_remove_hooks, 2)[0] == ["add mul", "mul sub"]
