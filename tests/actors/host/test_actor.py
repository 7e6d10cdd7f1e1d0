"""Calls in one process: in chunks, cancelled, with pending arguments, and of actors that drain or restart."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc import errors, rpc
from actorrpc.actors.client.pending_call import ResultFuture
from actorrpc.actors.context import runtime
from actorrpc.actors.host import registry
from actorrpc.actors.host.mailbox import Mailbox
from actorrpc.actors.host.registry import ActorRegistry
from actorrpc.agent.calls import Call
from actorrpc.agent.context import current_worker
from actorrpc.errors import ActorUnavailableError
from actorrpc.testing import InProcessCluster
from actorrpc.transport.writer import Writer
from tests.actors.alone import alone
from tests.actors.e2e.kit import until
from tests.migration.rows import row


@actorrpc.remote
class Keeper:
    def __init__(self, given: list[float]) -> None:
        self.given = given

    def fill(self, given: list[float]) -> None:
        self.given = given

    def count(self) -> int:
        return len(self.given)


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
        large = [float(each) for each in range(20_000)]  # it is sent in chunks
        with monkeypatch.context() as patch:
            patch.setattr(ActorRegistry, "deliver", delivering)
            keeper = Keeper.options(worker="worker1").remote(large)
            ready = actorrpc.ready(keeper)
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
    _may_end.clear()
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


@row("restarts: a count", "from-ray")
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


# -- calls with pending arguments that end while they are sent --------------------------------------------------

_pickling: list[Callable[[], object]] = []
_values: weakref.WeakSet[Value] = weakref.WeakSet()


class Target:
    def note(self, value: Any, *others: Any) -> Any:
        return value


def test_a_call_with_a_pending_argument_fails_as_not_executed_if_its_connection_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _may_end.clear()
    with InProcessCluster(2, clock="real"):
        source = Source.options(worker="worker0").remote()
        target: Any = actorrpc.remote(Target).options(worker="worker1").remote()
        assert actorrpc.get(target.note.remote(1), timeout=20) == 1
        worker = current_worker()
        assert worker is not None
        agent = worker.agent
        held: list[partial[None]] = []
        closed = threading.Event()

        def hold(conn: Any, error: BaseException | None, lost: Any = agent.lost) -> None:
            held.append(partial(lost, conn, error))
            closed.set()

        monkeypatch.setattr(agent, "lost", hold)
        argument = source.later.remote()
        call = target.note.remote(argument)
        conn = agent.peer("worker1").conn
        assert conn is not None
        conn.close()
        assert closed.wait(20)
        _may_end.set()
        future = call._future
        assert isinstance(future, ResultFuture)
        until(lambda: not isinstance(future.source, Call))
        monkeypatch.undo()
        for lost in held:
            lost()
        with pytest.raises(errors.ActorDiedError) as caught:
            actorrpc.get(call, timeout=20)
        assert caught.value.maybe_executed is False
        del source, target, call, argument


class Pickled:
    """An argument that is pickled when its call is made and again when the call is sent."""

    def __reduce__(self) -> Any:
        for each in _pickling:
            each()
        return Pickled, ()


class Value:
    def __init__(self) -> None:
        _values.add(self)


@pytest.mark.parametrize("where", ["worker0", "worker1"])
def test_a_call_that_is_cancelled_while_it_is_sent_releases_its_arguments(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Thread A encodes the message. 2. Thread B cancels the call. 3. A notices this and does not send. 4. B finishes."""
    _may_end.clear()
    encoding, taken, unsent = threading.Event(), threading.Event(), threading.Event()
    withdraw = Call.withdraw

    def withdraw_later(call: Call) -> bool:
        taken.set()
        assert unsent.wait(20)
        return withdraw(call)

    with InProcessCluster(3, clock="real"):
        source = Source.options(worker="worker2").remote()
        target: Any = actorrpc.remote(Target).options(worker=where).remote()
        assert actorrpc.get(target.note.remote(1), timeout=20) == 1
        value = rpc.remote("worker2", Value)
        worker = current_worker()
        assert worker is not None
        agent = worker.agent
        send = agent.send

        def send_and_note(call: Call, *args: Any) -> None:
            again = call.id != 0  # the call has reserved its place in the order
            try:
                send(call, *args)
            finally:
                if again:
                    unsent.set()

        argument = source.later.remote()
        call = target.note.remote(argument, Pickled(), value)
        monkeypatch.setattr(agent, "send", send_and_note)
        monkeypatch.setattr(Call, "withdraw", withdraw_later)
        _pickling[:] = [encoding.set, partial(taken.wait, 20)]
        _may_end.set()
        assert encoding.wait(20)
        actorrpc.cancel(call)
        monkeypatch.undo()
        _pickling.clear()
        with pytest.raises(errors.CancelledError):
            actorrpc.get(call, timeout=20)
        assert actorrpc.get(target.note.remote(2), timeout=20) == 2
        del value, call
        until(lambda: not _values)
        del source, target, argument
