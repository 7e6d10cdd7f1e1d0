"""Hosted actors: messages that arrive in chunks, the end of a draining actor, and checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc import rpc
from actorrpc.actors.context import runtime
from actorrpc.actors.host import registry
from actorrpc.actors.host.mailbox import Mailbox
from actorrpc.actors.host.registry import ActorRegistry
from actorrpc.errors import ActorUnavailableError
from actorrpc.futures import Future
from actorrpc.rpc.functions import async_execution
from actorrpc.testing import InProcessCluster
from actorrpc.transport.writer import Writer
from tests.actors.alone import alone
from tests.actors.e2e.kit import until


@actorrpc.remote
class Keeper:
    def __init__(self, given: list[float]) -> None:
        self.given = given

    def fill(self, given: list[float]) -> None:
        self.given = given

    def count(self) -> int:
        return len(self.given)

    @async_execution
    def later(self) -> Future[int]:
        return Future()


def test_an_actor_is_created_if_its_large_request_arrives_after_its_thread_has_polled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = threading.Event()
    look, deliver = Mailbox.dequeue, ActorRegistry.deliver

    def looking(mailbox: Mailbox, *given: Any) -> Any:
        found = look(mailbox, *given)
        if found[0] is None:
            looked.set()
        return found

    def delivering(registry: ActorRegistry, *given: Any) -> None:
        assert looked.wait(30)
        deliver(registry, *given)

    monkeypatch.setattr(Mailbox, "dequeue", looking)
    with InProcessCluster(2, clock="real"):
        monkeypatch.setattr(ActorRegistry, "deliver", delivering)
        large = [float(each) for each in range(20_000)]  # it is sent in chunks
        keeper = Keeper.options(worker="worker1").remote(large)
        ready = actorrpc.ready(keeper)
        monkeypatch.setattr(ActorRegistry, "deliver", deliver)
        actorrpc.get(ready, timeout=30)
        assert actorrpc.get(keeper.count.remote(), timeout=30) == 20_000


_sent = threading.Event()


@actorrpc.remote
class Nester:
    async def fill(self, keeper: Any, given: list[float]) -> None:
        def call() -> None:
            filled = keeper.fill.remote(given)
            _sent.set()
            actorrpc.get(filled)

        await asyncio.to_thread(call)  # cancelling the coroutine does not interrupt this thread

    async def count(self, keeper: Any) -> int:
        """Return the keeper's count. This call arrives after all earlier calls of this actor."""
        found: int = await keeper.count.remote()
        return found


def test_a_call_that_is_cancelled_after_its_first_chunk_never_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refs: list[Any] = []
    made, part_is_sent = threading.Event(), threading.Event()
    send_chunk = Writer._send

    def pending() -> int:
        return next(row.pending_calls for row in actorrpc.list_actors() if row.actor_id == keeper.actor_id)

    def give_up() -> None:
        until(lambda: pending() == 1)
        assert made.wait(30)
        actorrpc.cancel(refs[0])
        until(lambda: pending() == 0)

    def give_up_after_the_first(*given: Any) -> bool:
        sent = send_chunk(*given)
        if threading.current_thread().name.startswith("asyncio_") and not part_is_sent.is_set():
            part_is_sent.set()
            Context().run(give_up)  # outside the context of the cancelled call
        return sent

    with InProcessCluster(3, clock="real"):
        keeper, nester = (
            Keeper.options(worker="worker1").remote([]),
            Nester.options(worker="worker2").remote(),
        )
        actorrpc.get([actorrpc.ready(keeper), actorrpc.ready(nester)], timeout=30)
        monkeypatch.setattr(Writer, "_send", give_up_after_the_first)
        refs.append(nester.fill.remote(keeper, [float(each) for each in range(200_000)]))
        made.set()
        with pytest.raises(actorrpc.CancelledError):
            actorrpc.get(refs[0], timeout=30)
        assert part_is_sent.is_set()
        assert _sent.wait(30)
        assert actorrpc.get(nester.count.remote(keeper), timeout=30) == 0


_may_end = threading.Event()


@actorrpc.remote
class Source:
    def later(self) -> list[float]:
        assert _may_end.wait(20)
        return []


def _states() -> list[Any]:
    found: ActorRegistry = runtime().registry
    return list(found.states())


def test_a_draining_actor_ends_when_its_last_call_is_cancelled() -> None:
    with InProcessCluster(2, clock="real"):
        source = Source.options(worker="worker0").remote()
        keeper = Keeper.options(worker="worker1").remote([])
        call = keeper.fill.remote(source.later.remote())  # the call waits in the mailbox for its argument
        until(lambda: [each.waiting for each in rpc.rpc_sync("worker1", _states)] == [1])
        (state,) = rpc.rpc_sync("worker1", _states)
        over = rpc.rpc_async("worker1", registry.stop, (state.instance_id, "drain", "it is not needed"))
        until(lambda: [each.state for each in rpc.rpc_sync("worker1", _states)] == ["ending"])
        actorrpc.cancel(call)
        with pytest.raises(actorrpc.CancelledError):
            actorrpc.get(call, timeout=20)
        over.wait(20)
        _may_end.set()
        del source, keeper, call


_may_add = threading.Event()


@actorrpc.remote(max_restarts=-1)
class _Saved:
    """An actor with checkpoints."""

    def __init__(self) -> None:
        self.count = 0

    def checkpoint(self) -> int:
        return self.count

    def restore(self, count: int) -> None:
        self.count = count

    def add(self, wait: bool = False) -> int:
        assert not wait or _may_add.wait(30)
        self.count += 1
        return self.count

    def stream(self, more: int) -> Iterator[int]:
        for _ in range(more):
            yield self.add()


def _add_after_restart(actor: Any) -> Any:
    while True:
        with contextlib.suppress(ActorUnavailableError):
            return actorrpc.get(actor.add.remote())


def test_a_restarted_actor_has_the_state_of_all_answered_calls_and_streams(tmp_path: Path) -> None:
    with alone(tmp_path):
        actor: Any = _Saved.remote()
        refs = [actor.add.remote(wait=True), *(actor.add.remote() for _ in range(40))]
        _may_add.set()
        assert actorrpc.get(refs) == list(range(1, 42))
        actorrpc.kill(actor, no_restart=False)
        assert _add_after_restart(actor) == 42
        assert [actorrpc.get(each) for each in actor.stream.remote(2)] == [43, 44]
        actorrpc.kill(actor, no_restart=False)
        assert _add_after_restart(actor) == 45
        del actor, refs
