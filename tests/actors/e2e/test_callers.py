"""Callers of actors: asyncio, threads, actors, tasks, and forked processes, which cannot call."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import rpc
from tests.actors.e2e.kit import Gate, until
from tests.forks import exit_code, fork

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(30)]


@actorrpc.remote
class Adder:
    def __init__(self, base: int = 0) -> None:
        self.base = base
        self.children: list[Any] = []

    def add(self, n: int) -> int:
        return self.base + n

    def big(self) -> Any:
        return torch.ones(1 << 18)

    def boom(self) -> None:
        raise ValueError("boom")

    def child(self, depth: int) -> int:
        """Create a chain of actors of a given depth."""
        if not depth:
            return 1
        self.children.append(Adder.remote(depth))
        return 1 + actorrpc.get(self.children[-1].child.remote(depth - 1))

    def get_ref(self, refs: list[Any]) -> Any:
        assert isinstance(refs[0], actorrpc.ObjectRef)
        return actorrpc.get(refs[0])

    def hand_out(self, other: Any) -> list[Any]:
        return [other.add.remote(5), actorrpc.put(torch.ones(100_000))]

    def thread(self) -> tuple[int, int]:
        return os.getpid(), threading.get_ident()

    def threads_of(self, other: Any) -> list[tuple[int, int]]:
        """Return the threads on which another actor runs calls through its RRef, also made on its worker and by itself."""
        return [
            other.rpc_sync().thread(),
            other.rpc_async().thread().wait(),
            other.remote().thread().to_here(),
            rpc.rpc_sync(other.owner(), other.rpc_sync().thread),
            rpc.rpc_sync(other.owner(), _thread_of, (other,)),
        ]


def _thread_of(rref: Any) -> Any:
    return rref.rpc_sync().thread()


# -- asyncio -------------------------------------------------------------------------------------------------------


def test_asyncio_coroutines_can_await_calls_of_actors() -> None:
    actor = Adder.remote(100)

    async def main() -> None:
        assert await actor.add.remote(1) == 101
        assert await asyncio.gather(*(actor.add.remote(n) for n in range(100))) == list(range(100, 200))
        assert (await actor.big.remote()).sum() == 1 << 18
        with pytest.raises(ValueError, match="boom"):
            await actor.boom.remote()
        assert await asyncio.wait_for(actor.rpc_async().add(2), 20) == 102

    asyncio.run(main())


def test_an_actor_still_answers_after_asyncio_timeouts_and_cancellation() -> None:
    gate = Gate.remote()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(gate.wait.remote(), 0.05)
        task = asyncio.ensure_future(gate.wait.remote())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await gate.open.remote() is None
        assert await gate.wait.remote() == "open"

    asyncio.run(main())


# -- threads -----------------------------------------------------------------------------------------------------------


def test_many_threads_can_get_the_same_reference() -> None:
    gate = Gate.remote()
    ref = gate.wait.remote()
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(actorrpc.get, ref) for _ in range(8)]
        actorrpc.get(gate.open.remote())
        assert [each.result() for each in found] == ["open"] * 8


# -- actors that create actors -------------------------------------------------------------------------------------------


def test_actors_can_create_actors() -> None:
    actor = Adder.remote()
    assert actorrpc.get(actor.child.remote(4)) == 5


def test_references_can_be_passed_between_actors() -> None:
    a, b = Adder.remote(1), Adder.remote(2)
    assert actorrpc.get(a.get_ref.remote([b.add.remote(1)])) == 3
    gate = Gate.remote()
    pending = gate.wait.remote()
    waiting = a.get_ref.remote([pending])
    until(lambda: actorrpc.get(gate.count.remote()) == 1)
    actorrpc.get(gate.open.remote())
    assert actorrpc.get(waiting) == "open"
    small, large = actorrpc.get(a.hand_out.remote(b))
    del a
    assert actorrpc.get(small) == 7
    assert actorrpc.get(b.get_ref.remote([large])).numel() == 100_000
    with pytest.raises(ValueError, match="boom"):
        actorrpc.get(b.get_ref.remote([b.boom.remote()]))


def test_calls_through_an_rref_run_on_the_actors_thread_from_any_worker() -> None:
    a, b = Adder.remote(1), Adder.remote(2)
    thread, rref = actorrpc.get(b.thread.remote()), b.rref
    assert actorrpc.get(a.threads_of.remote(rref)) == [thread] * 5
    assert actorrpc.get(b.threads_of.remote(rref)) == [thread] * 5
    del b  # the RRef keeps the actor
    assert rref.rpc_sync().thread() == thread


# -- forks -----------------------------------------------------------------------------------------------------------------


def _in_fork(work: Callable[[], Any]) -> str:
    """Return what ``work`` returns in a fork of this process, or the error that it raises, as text."""
    reads, writes = os.pipe()

    def report() -> None:
        try:
            outcome = str(work())
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(writes, outcome.encode())

    pid = fork(report)
    os.close(writes)
    with open(reads) as file:
        outcome = file.read()
    assert exit_code(pid) == 0
    return outcome


async def _await(ref: Any) -> Any:
    return await ref


def _items(gate: Any) -> Any:
    yield 1
    actorrpc.get(gate.wait.remote())
    yield 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_waiting_in_a_fork_for_results_of_its_parent_raises() -> None:
    actor, gate = Adder.remote(1), Gate.remote()
    over = actor.add.remote(1)
    assert actorrpc.get(over) == 2
    pending = [gate.wait.remote(), gate.wait.remote()]
    stream = actorrpc.remote(_items).remote(gate)
    assert actorrpc.get(next(stream)) == 1
    future = gate.rpc_async().wait()
    until(lambda: actorrpc.get(gate.count.remote()) == 4)
    for wait in (
        lambda: actorrpc.get(pending[0]),
        lambda: actorrpc.get(pending[0], timeout=60),
        lambda: actorrpc.get(pending),
        lambda: actorrpc.get([over, pending[0]]),
        lambda: actorrpc.wait(pending),
        lambda: list(actorrpc.as_completed(pending)),
        lambda: asyncio.run(_await(pending[0])),
        lambda: pending[0].future().exception(),
        lambda: future.then(str),
        lambda: future.wait(),
        lambda: next(stream),
    ):
        messages = _in_fork(wait)
        assert re.match(
            r"NotInitializedError: .* was not over when this process was forked .*'spawn'", messages
        ), messages
    assert _in_fork(lambda: actorrpc.get([over, over])) == "[2, 2]"
    # The parent process receives all results.
    actorrpc.get(gate.open.remote())
    assert [*actorrpc.get(pending), future.wait(), actorrpc.get(next(stream))] == ["open", "open", "open", 2]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_calls_in_a_fork_raise_at_once() -> None:
    actor = Adder.remote(1)
    assert actorrpc.get(actor.add.remote(0)) == 1
    for call in (lambda: actor.add.remote(1), lambda: actor.rpc_sync().add(1)):
        assert re.match("NotInitializedError: .*fork", _in_fork(call))
    assert actorrpc.get(actor.add.remote(1)) == 2


def _with_a_group_of_its_own(folder: Path) -> int:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
    rpc.init_rpc("fork", rank=0, world_size=1, rpc_backend_options=options)
    actor = Adder.options(worker="fork").remote(1)
    found = [actorrpc.get(actor.add.remote(1)), *actorrpc.get([actor.add.remote(2), actor.add.remote(3)])]
    del actor
    rpc.shutdown()
    return sum(found)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_that_joins_its_own_group_can_make_calls(tmp_path: Path) -> None:
    actorrpc.get(Adder.remote(1).add.remote(1))
    assert _in_fork(partial(_with_a_group_of_its_own, tmp_path)) == "9"


@actorrpc.remote
class Forks:
    """Methods that fork and go on in both processes; the child ends as it is told."""

    @actorrpc.method(thread=True)
    def end(self, how: str) -> int:
        return _fork_and_end(how)

    async def end_on_the_event_loop(self, how: str) -> int:
        return _fork_and_end(how)


@actorrpc.remote
def forks(how: str) -> int:
    return _fork_and_end(how)


def _fork_and_end(how: str) -> int:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if how == "raise":
        raise ValueError("in the child")
    if how == "exit":
        sys.exit(4)
    return 1


@pytest.mark.prints("failed in a fork of .*ValueError: in the child")
def test_a_forked_child_exits_when_the_method_or_task_that_forked_it_ends() -> None:
    actor = Forks.remote()
    for how, status in {"return": 0, "raise": 1, "exit": 4}.items():
        for method in (actor.end, actor.end_on_the_event_loop, forks):
            assert actorrpc.get(method.remote(how)) == status
