"""The RRef protocol: random programs in the simulator, broken tables that it must detect, and single tables."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from actorrpc.errors import PeerDiedError, ProtocolError, RRefError
from actorrpc.rpc.refcount import messages as msg
from actorrpc.rpc.refcount.protocol import (
    Effects,
    Handle,
    Leak,
    ReceivedFork,
    RRefTable,
)
from actorrpc.wire.identity import WorkerKey
from tests.rpc.refcount.simulator import Violation, play

NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"
SCRIPTS = 100_000 if NIGHTLY else 1_000

A = WorkerKey(0, "a")
B = WorkerKey(1, "b")
C = WorkerKey(2, "c")
DIED = PeerDiedError("died")


# -- whole groups --------------------------------------------------------------------------------


@pytest.mark.limit(3600 if NIGHTLY else 60)
def test_random_programs_neither_leak_nor_free_early() -> None:
    done: dict[str, int] = {}
    for seed in range(SCRIPTS):
        for name, count in play(seed).counters.items():
            done[name] = done.get(name, 0) + count
    # The programs must have done enough, or the test has checked nothing.
    assert done["shared"] > 10 * SCRIPTS
    assert done["freed"] > 5 * SCRIPTS
    assert done["fetched"] > SCRIPTS
    assert done["failed"] > SCRIPTS / 10
    assert done["deaths"] > SCRIPTS / 10


# Each of these tables breaks one rule. The simulator must detect it.


class KeepsNoParent(RRefTable):
    def fork(self, handle: Handle, to: WorkerKey) -> msg.ForkData:
        data = super().fork(handle, to)
        super().rollback([data] if data.owner != self.me else [])
        return data


class KeepsParentsForGood(RRefTable):
    def handle(self, from_: WorkerKey, message: msg.Message) -> Effects:
        return Effects() if isinstance(message, msg.ChildAccept) else super().handle(from_, message)


class AcceptsTooEarly(RRefTable):
    def receive(self, forks: Sequence[msg.ForkData], from_: WorkerKey) -> ReceivedFork:
        received = super().receive(forks, from_)
        for data in forks:
            if data.owner != from_ != self.me:
                received.effects.add(from_, msg.ChildAccept, (data.fork_id,))
        return received


class IgnoresAcks(RRefTable):
    def handle(self, from_: WorkerKey, message: msg.Message) -> Effects:
        return Effects() if isinstance(message, msg.ForkAck) else super().handle(from_, message)


class TrustsDeadOwners(RRefTable):
    def worker_died(self, worker: WorkerKey, error: BaseException) -> Effects:
        held, self._held = self._held, {}
        step = super().worker_died(worker, error)
        self._held |= held
        return step


class RemembersNothing(RRefTable):
    def __init__(self, me: WorkerKey, *, tombstones: int) -> None:
        super().__init__(me, tombstones=0)


class ForgetsToRollBack(RRefTable):
    def rollback(self, forks: Any) -> Effects:
        return Effects()


class ForgetsToRefuse(RRefTable):
    def refuse(self, forks: Any, from_: WorkerKey) -> Effects:
        return Effects()


class SameIdsInEachLife(RRefTable):
    def __init__(self, me: WorkerKey, **options: Any) -> None:
        super().__init__(WorkerKey(me.rank, "life"), **options)


@pytest.mark.parametrize(
    ("broken", "changes"),
    [
        (KeepsNoParent, {}),
        (KeepsParentsForGood, {}),
        (AcceptsTooEarly, {}),
        (IgnoresAcks, {}),
        (TrustsDeadOwners, {"deaths": 3}),
        (RemembersNothing, {"fifo": False, "repeats": 0.5}),
        (ForgetsToRollBack, {}),
        (ForgetsToRefuse, {}),
        (SameIdsInEachLife, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_simulator_detects_faulty_rref_tables(
    broken: Callable[..., RRefTable], changes: dict[str, Any]
) -> None:
    def many() -> None:
        for seed in range(500):
            play(seed, broken, **changes)

    with pytest.raises((Violation, ProtocolError)):
        many()


# -- a small group without the simulator ---------------------------------------------------------


class Group:
    """Tables whose messages the test delivers."""

    def __init__(self, *keys: WorkerKey, **options: Any) -> None:
        self.tables = {key: RRefTable(key, **options) for key in keys}
        self.sent: list[tuple[WorkerKey, WorkerKey, msg.Message]] = []

    def __getitem__(self, key: WorkerKey) -> RRefTable:
        return self.tables[key]

    def run(self, key: WorkerKey, effects: Effects) -> None:
        self.sent += [(key, to, message) for to, message in effects.messages]
        for callback in effects.callbacks:
            callback()

    def carry(self) -> None:
        """Deliver messages, each of them twice, until none is left."""
        while self.sent:
            now, self.sent = self.sent, []
            for source, to, message in now:
                self.run(to, self[to].handle(source, msg.unpack_message(msg.pack_message(message))))
                again = self[to].handle(source, message)
                if isinstance(message, msg.ForkRequest):  # a repeated request is answered again
                    assert [type(reply) for _, reply in again.messages] == [msg.ForkAck]
                else:
                    assert not again

    def carry_once(self) -> None:
        """Deliver messages once each, the newest first, until none is left."""
        while self.sent:
            source, to, message = self.sent.pop()
            self.run(to, self[to].handle(source, message))

    def drop(self, key: WorkerKey, *handles: Handle) -> None:
        for handle in handles:
            self[key].drop_later(handle)
        self.run(key, self[key].collect())

    def create(self, creator: WorkerKey, owner: WorkerKey, value: object = "value") -> Handle:
        handle = self[creator].create_user(owner)
        if handle.fork_id is not None:
            assert self[owner].creation_arrived(handle.rref_id, handle.fork_id, creator)
        self.run(owner, self[owner].set_value(handle.rref_id, value))
        self.run(creator, self[creator].confirmed(handle))
        return handle

    def share(self, handle: Handle, source: WorkerKey, to: WorkerKey) -> Handle:
        received = self[to].receive([self[source].fork(handle, to)], source)
        self.run(to, received.effects)
        return received.handles[0]

    def assert_empty(self) -> None:
        assert self.sent == []
        for table in self.tables.values():
            assert not any(table.debug_info().values())
            assert table.pending_counts().idle
            assert table.leaks() == []


def test_a_forked_rref_may_reach_the_owner_before_the_request_that_creates_it() -> None:
    group = Group(A, B, C)
    handle = group[A].create_user(B)
    assert handle.fork_id is not None
    copy = group.share(handle, A, C)
    group.carry()  # the owner knows the child, but not yet the creation
    group.drop(C, copy)
    group.carry()
    assert group[B].holders(handle.rref_id) is None
    assert group[B].creation_arrived(handle.rref_id, handle.fork_id, A)
    assert group[B].holders(handle.rref_id) == {handle.fork_id: A}
    group.run(B, group[B].set_value(handle.rref_id, 1))
    group.run(A, group[A].confirmed(handle))
    group.drop(A, handle)
    group.carry()
    group.assert_empty()


def test_fetching_a_released_value_gives_an_error_instead_of_waiting() -> None:
    group = Group(A, B, C)
    handle = group.create(A, B)
    home = group.share(handle, A, B)
    late = group[A].fork(handle, B)
    group.run(B, group[B].worker_died(A, DIED))
    group.tables.pop(A)
    group.sent.clear()
    group.drop(B, home)
    outcome = group[B].fetch(handle.rref_id, lambda _: None)
    assert outcome is not None
    assert isinstance(outcome.error, RRefError)
    with pytest.raises(RRefError, match="released"):
        group[B].fork(home, C)
    received = group[B].receive([late], A)  # in flight when its sender died
    gone = group[B].known_outcome(handle.rref_id)
    assert gone is not None
    assert isinstance(gone.error, RRefError)
    group.run(B, received.effects)
    group.drop(B, *received.handles)
    group.assert_empty()


def test_a_creation_on_an_earlier_incarnation_of_this_worker_fails_as_not_executed() -> None:
    table = RRefTable(WorkerKey(A.rank, "restarted"))
    error = table.failure(table.create_user(A))
    assert isinstance(error, PeerDiedError)
    assert not error.maybe_executed


@pytest.mark.parametrize("order", ["overtakes", "dropped", "runs", "dropped, runs"])
def test_a_creation_that_fails_before_it_runs_fails_its_waiters(order: str) -> None:
    group = Group(A, B)
    handle = group[A].create_user(B)
    assert handle.fork_id is not None
    ids = handle.rref_id, handle.fork_id
    error = ValueError("cannot be opened")
    seen: list[Any] = []
    assert group[B].fetch(handle.rref_id, seen.append) is None
    group.run(A, group[A].creation_failed(handle, error))
    if order.startswith("dropped"):
        group.drop(A, handle)
        group.carry()
    runs = order.endswith("runs") and group[B].creation_arrived(*ids, A)
    group.run(B, group[B].creation_given_up(*ids, A, error))
    if runs:  # the outcome of the function counts
        assert not seen
        group.run(B, group[B].set_value(handle.rref_id, 1))
        assert [outcome.value for outcome in seen] == [1]
    else:
        assert [outcome.error for outcome in seen] == [error]
        assert not group[B].creation_arrived(*ids, A)  # too late
    with pytest.raises(ProtocolError):
        group[B].creation_given_up(*ids, C, error)
    group.drop(A, handle)
    group.carry()
    group.assert_empty()


def test_a_creation_with_ids_of_another_worker_is_refused() -> None:
    with pytest.raises(ProtocolError):
        RRefTable(B).creation_arrived(msg.RRefId(0, 0, "a"), msg.ForkId(2, 0, "c"), A)
    with pytest.raises(ProtocolError):
        RRefTable(B).receive([msg.ForkData(B, msg.RRefId(0, 0, "a"), msg.ForkId(0, 1, "a"))], C)


def test_deletes_by_others_than_the_holder_are_ignored() -> None:
    group = Group(A, B, C)
    handle = group.create(A, B)
    assert handle.fork_id is not None
    assert not group[B].handle(C, msg.UserDelete(((handle.rref_id, handle.fork_id),)))
    assert group[B].holders(handle.rref_id) == {handle.fork_id: A}


def test_a_value_is_freed_without_the_lock_of_the_table() -> None:
    """A finaliser that waits for another thread which uses the table would otherwise deadlock."""
    table = RRefTable(A)

    class Value:
        def __del__(self) -> None:
            thread = threading.Thread(target=lambda: seen.append(table.leaks()))
            thread.start()
            thread.join(10)

    seen: list[object] = []
    table.drop_later(table.create_owner(Value()))
    effects = table.collect()
    assert seen == []
    del effects
    assert seen == [[]]


# -- leaving -------------------------------------------------------------------------------------


def test_forks_unconfirmed_by_an_unresponsive_owner_are_no_leak_of_a_leaving_worker() -> None:
    group = Group(A, B, C)
    handle = group.create(A, B)
    data = group[A].fork(handle, C)
    received = group[C].receive([data], A)  # the owner, B, is stopped, and never reads the request of C
    assert not received.pending.done
    assert group[C].leaks() == [Leak(handle.rref_id, data.fork_id, C)]
    group[C].delete_all_users()
    assert group[C].leaks() == []
    assert not group[C].pending_counts().idle


# -- threads and the garbage collector -----------------------------------------------------------


def test_finalisers_may_run_during_operations_on_the_rref_table() -> None:
    """The collector may run finalisers at any allocation, also inside of the table."""
    group = Group(A, B)
    kept: list[Handle] = []
    entered = 0

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            nonlocal entered
            entered += 1
            handle = group.create(A, B, value=None)
            data = group[A].fork(handle, B)
            received = group[B].receive([data], A)
            group.run(B, received.effects)
            group[B].drop_later(received.handles[0])
            group[A].drop_later(handle)

    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(3, 2, 2)
        for number in range(300):
            Cycle()
            kept.append(group.create(A, B))
            kept.append(group.share(kept[-1], A, A))
            if number % 3 == 0:
                group.drop(A, kept.pop(0))
                group.run(B, group[B].collect())
                group.carry_once()
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert entered > 10  # finalisers did run during operations of the table
    group.drop(A, *kept)
    for _ in range(4):
        for key in (A, B):
            group.run(key, group[key].collect())
        group.carry_once()
    group.assert_empty()


def test_threads_may_share_fetch_and_drop_rrefs_at_the_same_time() -> None:
    """Each message is handled by the thread that caused it."""
    tables = {key: RRefTable(key) for key in (A, B, C)}

    def run(key: WorkerKey, effects: Effects) -> None:
        for to, message in effects.messages:
            run(to, tables[to].handle(key, message))
        for callback in effects.callbacks:
            callback()

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(60):
            here, owner, there = (rng.choice((A, B, C)) for _ in range(3))
            handle = tables[here].create_user(owner)
            if handle.fork_id is not None:
                assert tables[owner].creation_arrived(handle.rref_id, handle.fork_id, here)
            run(owner, tables[owner].set_value(handle.rref_id, number))
            run(here, tables[here].confirmed(handle))
            received = tables[there].receive([tables[here].fork(handle, there)], here)
            run(there, received.effects)
            tables[here].drop_later(handle)
            run(here, tables[here].collect())
            assert received.pending.done
            found = tables[owner].fetch(handle.rref_id, lambda _: None)
            assert found is not None
            assert found.value == number
            tables[there].drop_later(received.handles[0])
            run(there, tables[there].collect())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))  # raises the errors of the threads
    for table in tables.values():
        assert not any(table.debug_info().values())
