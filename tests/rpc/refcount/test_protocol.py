"""The RRef protocol: groups in the simulator, broken tables that it must catch, and the table on its own."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorrpc.errors import PeerDiedError, ProtocolError, RpcTimeoutError, RRefError, ShutdownError
from actorrpc.rpc.refcount.messages import (
    BATCH,
    ChildAccept,
    ForkAck,
    ForkData,
    ForkId,
    ForkRequest,
    Message,
    RRefId,
    UserDelete,
    pack_message,
    unpack_message,
)
from actorrpc.rpc.refcount.protocol import (
    Effects,
    Handle,
    Leak,
    Outcome,
    Pending,
    ReceivedFork,
    RRefTable,
)
from actorrpc.wire.identity import WorkerKey
from tests.rpc.refcount.simulator import Violation, play

NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"
SCRIPTS = 100_000 if NIGHTLY else 2_000

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
    # the programs must have done something, or they prove nothing
    assert done["shared"] > 10 * SCRIPTS
    assert done["freed"] > 5 * SCRIPTS
    assert done["fetched"] > SCRIPTS
    assert done["failed"] > SCRIPTS / 10
    assert done["deaths"] > SCRIPTS / 10


@given(
    seed=st.integers(0, 1 << 32),
    workers=st.integers(2, 5),
    steps=st.integers(1, 60),
    fifo=st.booleans(),
    twice=st.booleans(),
    repeats=st.sampled_from((0.0, 0.5)),
    losses=st.sampled_from((0.0, 0.5)),
    deaths=st.integers(0, 3),
    tombstones=st.sampled_from((2, 10_000)),
    eager=st.sampled_from((0.0, 0.9)),
    deep=st.just(True),
    shutdown=st.booleans(),
)
def test_any_program_in_any_network(seed: int, **changes: Any) -> None:
    play(seed, **changes)


@pytest.mark.parametrize("seed", range(20))
def test_same_seed_same_program(seed: int) -> None:
    assert play(seed).counters == play(seed).counters


# A test that cannot fail is worthless: each of these tables breaks one rule, and must be caught.


class KeepsNoParent(RRefTable):
    def fork(self, handle: Handle, to: WorkerKey) -> ForkData:
        data = super().fork(handle, to)
        super().rollback([data] if data.owner != self.me else [])
        return data


class KeepsParentsForGood(RRefTable):
    def handle(self, from_: WorkerKey, message: Message) -> Effects:
        return Effects() if isinstance(message, ChildAccept) else super().handle(from_, message)


class AcceptsTooEarly(RRefTable):
    def receive(self, forks: Sequence[ForkData], from_: WorkerKey) -> ReceivedFork:
        received = super().receive(forks, from_)
        for data in forks:
            if data.owner != from_ != self.me:
                received.effects.add(from_, ChildAccept, (data.fork_id,))
        return received


class StartsTooEarly(RRefTable):
    def receive(self, forks: Sequence[ForkData], from_: WorkerKey) -> ReceivedFork:
        return super().receive(forks, from_)._replace(pending=Pending(threading.Lock()))


class IgnoresAcks(RRefTable):
    def handle(self, from_: WorkerKey, message: Message) -> Effects:
        return Effects() if isinstance(message, ForkAck) else super().handle(from_, message)


class KeepsForDeadChildren(RRefTable):
    def worker_died(self, worker: WorkerKey, error: BaseException) -> Effects:
        children, self._children = self._children, {}
        step = super().worker_died(worker, error)
        self._children |= children
        return step


class TrustsDeadOwners(RRefTable):
    def worker_died(self, worker: WorkerKey, error: BaseException) -> Effects:
        held, self._held = self._held, {}
        step = super().worker_died(worker, error)
        self._held |= held
        return step


class KeepsForksOfTheDead(RRefTable):
    def worker_died(self, worker: WorkerKey, error: BaseException) -> Effects:
        owned, self._owned = self._owned, {}
        step = super().worker_died(worker, error)
        self._owned |= owned
        return step


class ReleasesBeforeCreation(RRefTable):
    def _settle_value(self, entry: Any, step: Effects) -> None:
        if not entry.forks and not entry.handles:
            entry.created = True
        super()._settle_value(entry, step)


class DeletesByCount(RRefTable):
    """Takes any fork away where the named one is not there: a repeated delete counts twice."""

    def handle(self, from_: WorkerKey, message: Message) -> Effects:
        if isinstance(message, UserDelete):
            for rref_id, fork_id in message.items:
                forks = self.holders(rref_id)
                if forks and fork_id not in forks:
                    return super().rollback([ForkData(self.me, rref_id, next(iter(forks)))])
        return super().handle(from_, message)


class ChangesItsMind(RRefTable):
    def _finish(self, entry: Any, outcome: Outcome, step: Effects) -> None:
        entry.outcome = None
        super()._finish(entry, outcome, step)


class RemembersNothing(RRefTable):
    def __init__(self, me: WorkerKey, *, tombstones: int) -> None:
        super().__init__(me, tombstones=0)


class RegistersLate(RRefTable):
    """The owner waits to be told by the receiver, who does not: forks from the owner come confirmed."""

    def fork(self, handle: Handle, to: WorkerKey) -> ForkData:
        data = super().fork(handle, to)
        if data.owner == self.me:
            self._owned[data.rref_id].forks.pop(data.fork_id, None)
        return data


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
        (StartsTooEarly, {}),
        (IgnoresAcks, {}),
        (KeepsForDeadChildren, {"deaths": 3}),
        (TrustsDeadOwners, {"deaths": 3}),
        (KeepsForksOfTheDead, {"deaths": 3}),
        (ReleasesBeforeCreation, {"fifo": False}),
        (DeletesByCount, {"twice": True, "repeats": 0.5}),
        (ChangesItsMind, {}),
        (RemembersNothing, {"fifo": False, "repeats": 0.5}),
        (RegistersLate, {}),
        (ForgetsToRollBack, {}),
        (ForgetsToRefuse, {}),
        (SameIdsInEachLife, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_tables_are_caught(broken: Callable[..., RRefTable], changes: dict[str, Any]) -> None:
    def many() -> None:
        for seed in range(500):
            play(seed, broken, **changes)

    with pytest.raises((Violation, ProtocolError)):
        many()


# -- a small group by hand -----------------------------------------------------------------------


class Group:
    """Tables whose messages are carried by hand; each message is handled twice."""

    def __init__(self, *keys: WorkerKey, **options: Any) -> None:
        self.tables = {key: RRefTable(key, **options) for key in keys}
        self.sent: list[tuple[WorkerKey, WorkerKey, Message]] = []

    def __getitem__(self, key: WorkerKey) -> RRefTable:
        return self.tables[key]

    def run(self, key: WorkerKey, effects: Effects) -> list[Message]:
        self.sent += [(key, to, message) for to, message in effects.messages]
        for callback in effects.callbacks:
            callback()
        return [message for _, message in effects.messages]

    def carry(self, kind: type | None = None) -> list[str]:
        """Carry messages (of a kind) until there are none; give the names of those carried."""
        names: list[str] = []
        while True:
            now = [entry for entry in self.sent if kind is None or isinstance(entry[2], kind)]
            if not now:
                return names
            self.sent = [entry for entry in self.sent if entry not in now]
            for source, to, message in now:
                names.append(type(message).__name__)
                self.run(to, self[to].handle(source, unpack_message(pack_message(message))))
                again = self[to].handle(source, message)
                if isinstance(message, ForkRequest):  # asked twice, answered twice
                    assert [type(reply) for _, reply in again.messages] == [ForkAck]
                else:
                    assert not again

    def drop(self, key: WorkerKey, *handles: Handle) -> list[Message]:
        for handle in handles:
            self[key].drop_later(handle)
        return self.run(key, self[key].collect())

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


def test_ids_start_at_zero_and_print_as_in_torch() -> None:
    table = RRefTable(A)
    first = table.create_user(B)
    second = table.create_user(A)
    assert first == Handle(RRefId(0, 0, "a"), ForkId(0, 1, "a"), B)
    assert second == Handle(RRefId(0, 2, "a"), None, A)
    assert str(first.rref_id) == "GloballyUniqueId(created_on=0, local_id=0)"
    assert str(first.fork_id) == "GloballyUniqueId(created_on=0, local_id=1)"


def test_flow_1_creation_by_a_user() -> None:
    group = Group(A, B)
    handle = group[A].create_user(B)
    assert handle.fork_id is not None
    assert not group[A].is_confirmed(handle)
    assert group[A].debug_info()["num_pending_users"] == 1
    assert group.drop(A, handle) == []  # told to the owner only when the owner knows it
    for _ in range(2):
        assert group[B].creation_arrived(handle.rref_id, handle.fork_id, A)
    assert group[B].holders(handle.rref_id) == {handle.fork_id: A}
    assert group[B].known_outcome(handle.rref_id) is None
    group.run(B, group[B].set_value(handle.rref_id, 7))
    outcome = group[B].known_outcome(handle.rref_id)
    assert outcome is not None
    assert outcome.value == 7
    group.run(A, group[A].confirmed(handle))
    assert group.carry() == ["UserDelete"]
    assert group[B].holders(handle.rref_id) is None
    group.assert_empty()


def test_flow_2_user_to_owner_adds_no_fork() -> None:
    group = Group(A, B)
    handle = group.create(A, B)
    data = group[A].fork(handle, B)
    assert group[A].pending_counts().children == 1
    assert group.drop(A, handle) == []  # kept until the owner has it
    received = group[B].receive([data], A)
    assert received.pending.done
    assert received.handles == [Handle(handle.rref_id, None, B)]
    assert group[B].holders(handle.rref_id) == {handle.fork_id: A}
    group.run(B, received.effects)
    assert group.carry() == ["ChildAccept", "UserDelete"]
    assert group[B].holders(handle.rref_id) == {}
    group.drop(B, *received.handles)
    group.assert_empty()


def test_flow_3_owner_to_user_is_registered_early() -> None:
    group = Group(A, B)
    handle = group[A].create_owner("value")
    assert group[A].debug_info()["num_owner_rrefs"] == 0  # not shared yet
    data = group[A].fork(handle, B)
    assert data == ForkData(A, handle.rref_id, ForkId(0, 1, "a"))
    assert group[A].holders(handle.rref_id) == {data.fork_id: B}
    assert group[A].debug_info()["num_owner_rrefs"] == 1
    assert group.drop(A, handle) == []
    received = group[B].receive([data], A)
    assert received.pending.done
    assert not received.effects
    assert group[B].is_confirmed(received.handles[0])
    group.drop(B, *received.handles)
    assert group.carry() == ["UserDelete"]
    group.assert_empty()


def test_flow_3_owner_to_itself() -> None:
    group = Group(A)
    handle = group[A].create_owner("value")
    data = group[A].fork(handle, A)
    group.drop(A, handle)
    assert group[A].holders(handle.rref_id) == {data.fork_id: A}
    received = group[A].receive([data], A)
    assert group[A].holders(handle.rref_id) == {}
    assert received.handles == [handle]
    assert not received.effects
    group.drop(A, *received.handles)
    group.assert_empty()


@pytest.mark.parametrize("parent_first", [False, True])
def test_flow_4_user_to_user(parent_first: bool) -> None:
    group = Group(A, B, C)
    handle = group.create(A, B)
    received = group[C].receive([group[A].fork(handle, C)], A)
    started: list[str] = []
    assert received.pending.when_done(lambda: started.append("function"))
    group.run(C, received.effects)
    if parent_first:
        assert group.drop(A, handle) == []
    assert group.carry(ForkRequest) == ["ForkRequest"]
    assert not started
    assert group.carry(ForkAck) == ["ForkAck"]
    assert started == ["function"]
    assert not received.pending.when_done(lambda: started.append("again"))
    assert group[A].pending_counts().children == 1
    assert group.carry(ChildAccept) == ["ChildAccept"]
    assert group[A].pending_counts().children == 0
    if not parent_first:
        group.drop(A, handle)
    group.carry()
    assert group[B].holders(handle.rref_id) == {received.handles[0].fork_id: C}
    group.drop(C, *received.handles)
    group.carry()
    group.assert_empty()


def test_flow_4_user_to_itself() -> None:
    group = Group(A, B)
    handle = group.create(A, B)
    copy = group.share(handle, A, A)
    assert copy.fork_id != handle.fork_id
    assert group.drop(A, handle) == []
    assert group.carry() == ["ForkRequest", "ForkAck", "UserDelete"]
    group.drop(A, copy)
    group.carry()
    group.assert_empty()


def test_call_to_itself_pins_the_entry_until_it_ends() -> None:
    group = Group(A)
    handle = group[A].create_user(A)
    group.drop(A, handle)
    assert group[A].holders(handle.rref_id) == {ForkId(*handle.rref_id): A}
    group.run(A, group[A].set_value(handle.rref_id, 1))
    group.run(A, group[A].confirmed(handle))
    assert group[A].holders(handle.rref_id) is None
    group.assert_empty()


def test_child_that_overtakes_the_creation() -> None:
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


def test_fetch_that_overtakes_the_creation() -> None:
    group = Group(A, B)
    handle = group[A].create_user(B)
    assert handle.fork_id is not None
    seen: list[object] = []
    given_up: list[object] = []
    assert group[B].fetch(handle.rref_id, lambda outcome: seen.append(outcome.value)) is None
    assert group[B].fetch(handle.rref_id, given_up.append) is None
    assert group[B].creation_arrived(handle.rref_id, handle.fork_id, A)
    late = given_up.append
    assert group[B].fetch(handle.rref_id, late) is None
    group.run(B, group[B].cancel_fetch(handle.rref_id, late))
    effects = group[B].set_value(handle.rref_id, 7)
    assert seen == []  # nobody is called by the table itself
    group.run(B, effects)
    assert seen == [7]
    assert len(given_up) == 1
    now = group[B].fetch(handle.rref_id, seen.append)
    assert now is not None
    assert now.value == 7


def test_fetch_given_up_leaves_nothing() -> None:
    table = RRefTable(B)
    waiter: Callable[[Outcome], None] = [].append
    assert table.fetch(RRefId(0, 5, "a"), waiter) is None
    assert table.pending_counts().owners == 1
    assert not table.cancel_fetch(RRefId(0, 5, "a"), waiter)
    assert table.pending_counts().idle


def test_released_value_gives_errors_not_waits() -> None:
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
    received = group[B].receive([late], A)  # was under way when its sender died
    gone = group[B].known_outcome(handle.rref_id)
    assert gone is not None
    assert isinstance(gone.error, RRefError)
    group.run(B, received.effects)
    group.drop(B, *received.handles)
    group.assert_empty()


def test_one_terminal_state() -> None:
    group = Group(A, B)
    handle = group.create(A, B, value="first")
    assert not group[B].set_value(handle.rref_id, "second")
    assert not group[B].set_error(handle.rref_id, ValueError())
    outcome = group[B].known_outcome(handle.rref_id)
    assert outcome is not None
    assert outcome.value == "first"
    assert outcome.error is None
    assert not group[B].set_value(RRefId(0, 99, "a"), "unknown")


def test_creation_that_timed_out_and_came_later() -> None:
    group = Group(A, B)
    handle = group[A].create_user(B)
    assert handle.fork_id is not None
    error = RpcTimeoutError("RRef creation timed out")
    group.run(A, group[A].creation_failed(handle, error))
    assert group[A].failure(handle) is error
    with pytest.raises(RRefError) as caught:
        group[A].fork(handle, C)
    assert caught.value.__cause__ is error
    assert not group[A].confirmed(handle)  # too late
    assert group[A].failure(handle) is error
    group.drop(A, handle)
    assert group.carry() == ["UserDelete"]
    assert not group[B].creation_arrived(handle.rref_id, handle.fork_id, A)
    group.run(B, group[B].set_value(handle.rref_id, 1))
    assert group.run(A, group[A].confirmed(handle)) == [UserDelete(((handle.rref_id, handle.fork_id),))]
    group.carry()
    group.assert_empty()


@pytest.mark.parametrize("order", ["overtakes", "dropped before", "runs"])
def test_creation_that_fails_on_its_way(order: str) -> None:
    group = Group(A, B)
    handle = group[A].create_user(B)
    assert handle.fork_id is not None
    ids = handle.rref_id, handle.fork_id
    error = ValueError("cannot be opened")
    seen: list[Any] = []
    assert group[B].fetch(handle.rref_id, seen.append) is None
    group.run(A, group[A].creation_failed(handle, error))
    runs = order == "runs" and group[B].creation_arrived(*ids, A)
    if order == "dropped before":
        group.drop(A, handle)
        group.carry()
    group.run(B, group[B].creation_given_up(*ids, A, error))
    if runs:  # its own outcome is what counts
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


def test_creation_that_was_never_sent() -> None:
    group = Group(A, B)
    handle = group[A].create_user(B)
    group.run(A, group[A].creation_failed(handle, ValueError("not picklable"), reached=False))
    assert group.drop(A, handle) == []
    group.assert_empty()


def test_creation_with_foreign_ids_is_refused() -> None:
    with pytest.raises(ProtocolError):
        RRefTable(B).creation_arrived(RRefId(0, 0, "a"), ForkId(2, 0, "c"), A)
    with pytest.raises(ProtocolError):
        RRefTable(B).receive([ForkData(B, RRefId(0, 0, "a"), ForkId(0, 1, "a"))], C)


def test_rollback_and_refusal() -> None:
    group = Group(A, B, C)
    mine = group[A].create_owner("value")
    theirs = group.create(A, B)
    forks = [group[A].fork(handle, to) for handle in (mine, theirs) for to in (A, B, C)]
    before = group[A].pending_counts()
    assert before.children == 3
    assert before.owners == 1
    for _ in range(2):
        assert not group[A].rollback(forks)
    assert group[A].pending_counts().children == 0
    assert group[A].holders(mine.rref_id) == {}

    for to in (A, B, C):
        forks = [group[A].fork(handle, to) for handle in (mine, theirs)]
        for _ in range(2):
            group.run(to, group[to].refuse(forks, A))
        group.carry()
        assert group[A].pending_counts().children == 0
        assert group[A].holders(mine.rref_id) == {}
    group.drop(A, mine, theirs)
    group.carry()
    group.assert_empty()


def test_drops_are_batched() -> None:
    group = Group(A, B)
    handles = [group.create(A, B) for _ in range(2 * BATCH + 1)]
    messages = group.drop(A, *handles)
    assert [len(message.items) for message in messages] == [BATCH, BATCH, 1]
    group.carry()
    group.assert_empty()


def test_late_messages_do_not_bring_forks_back() -> None:
    group = Group(A, B, C)
    handle = group.create(A, B)
    copy = group.share(handle, A, C)
    requests = [entry for entry in group.sent if isinstance(entry[2], ForkRequest)]
    assert len(requests) == 1
    group.carry()
    group.drop(C, copy)
    group.carry()
    group.sent += requests  # comes again, long after
    assert group.carry() == ["ForkRequest", "ForkAck"]
    assert list(group[B].holders(handle.rref_id) or ()) == [handle.fork_id]
    group.drop(A, handle)
    group.carry()
    group.sent += requests
    group.carry()
    group.assert_empty()


def test_forks_brought_back_without_tombstones_are_deleted_again() -> None:
    group = Group(A, B, C, tombstones=0)
    handle = group.create(A, B)
    copy = group.share(handle, A, C)
    request = next(entry for entry in group.sent if isinstance(entry[2], ForkRequest))
    group.carry()
    group.drop(C, copy)
    group.carry()
    group.run(B, group[B].handle(C, request[2]))
    assert len(group[B].holders(handle.rref_id) or ()) == 2
    source, to, ack = group.sent.pop()
    group.run(to, group[to].handle(source, ack))
    group.carry()
    assert len(group[B].holders(handle.rref_id) or ()) == 1


def test_deletes_by_others_than_the_holder_are_ignored() -> None:
    group = Group(A, B, C)
    handle = group.create(A, B)
    assert handle.fork_id is not None
    assert not group[B].handle(C, UserDelete(((handle.rref_id, handle.fork_id),)))
    assert group[B].holders(handle.rref_id) == {handle.fork_id: A}


def test_value_is_released_outside_of_the_table() -> None:
    """A value whose end uses the table from another thread would wait for ever under the lock."""
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


# -- deaths and restarts -------------------------------------------------------------------------


def test_dead_holder() -> None:
    group = Group(A, B, C)
    handle = group.create(A, B)
    copy = group.share(handle, A, C)
    group.carry()
    group.drop(A, handle)
    group.carry()
    assert group[B].holders(handle.rref_id) == {copy.fork_id: C}
    group.run(B, group[B].worker_died(C, DIED))
    assert group[B].holders(handle.rref_id) is None
    assert not group[B].worker_died(C, DIED)
    group.run(B, group[B].handle(C, ForkRequest(((handle.rref_id, ForkId(0, 77, "a")),))))
    group.tables.pop(C)
    group.assert_empty()


def test_dead_owner_fails_users_and_frees_parents() -> None:
    group = Group(A, B, C)
    handle = group.create(A, B)
    pending = group[A].create_user(B)
    copy = group.share(handle, A, C)
    group.sent.clear()  # the request died with the owner
    assert not group[C].is_confirmed(copy)
    group.tables.pop(B)
    assert group.run(C, group[C].worker_died(B, DIED)) == [ChildAccept(((copy.fork_id,),))]
    assert group[C].failure(copy) is DIED
    group.run(A, group[A].worker_died(B, DIED))
    assert group[A].failure(handle) is DIED
    assert group[A].failure(pending) is DIED
    with pytest.raises(RRefError):
        group[A].fork(handle, C)
    later = group[A].create_user(B)
    assert group[A].failure(later) is DIED
    assert group.drop(A, handle, pending, later) == []
    assert group.drop(C, copy) == []
    group.carry()
    group.assert_empty()


def test_dead_child_frees_its_parent() -> None:
    group = Group(A, B, C)
    handle = group.create(A, B)
    group[A].fork(handle, C)
    assert group.drop(A, handle) == []
    group.run(A, group[A].worker_died(C, DIED))
    group[A].create_owner("value")
    group.carry()
    group.assert_empty()


def test_forks_for_a_dead_worker_hold_nothing() -> None:
    group = Group(A, B)
    mine, theirs = group[A].create_owner("value"), group.create(A, B)
    group.run(A, group[A].worker_died(C, DIED))
    forks = [group[A].fork(handle, C) for handle in (mine, theirs)]
    group.run(A, group[A].rollback(forks))
    group.drop(A, mine, theirs)
    group.carry()
    group.assert_empty()


def test_dead_parent_whose_child_comes_too_late() -> None:
    group = Group(A, B, C)
    handle = group.create(A, B)
    copy = group.share(handle, A, C)
    group.run(B, group[B].worker_died(A, DIED))  # before the request
    group.run(C, group[C].worker_died(A, DIED))
    group.tables.pop(A)
    assert group.carry() == ["ForkRequest", "ForkAck"]
    assert isinstance(group[C].failure(copy), RRefError)
    assert group.drop(C, copy) == []
    group.assert_empty()


def test_dead_creator_of_what_others_wait_for() -> None:
    group = Group(A, B, C)
    handle = group[A].create_user(B)
    copy = group.share(handle, A, C)
    group.carry()
    home = group.share(copy, C, B)
    seen: list[object] = []
    assert group[B].fetch(handle.rref_id, lambda outcome: seen.append(outcome.error)) is None
    group.run(B, group[B].worker_died(A, DIED))
    group.tables.pop(A)
    assert seen == [DIED]
    assert handle.fork_id is not None
    assert not group[B].creation_arrived(handle.rref_id, handle.fork_id, A)  # it was late
    group.carry()
    group.drop(C, copy)
    group.drop(B, home)
    group.carry()
    group.assert_empty()


def test_restarted_worker_is_another_one() -> None:
    again = WorkerKey(A.rank, "a2")
    group = Group(A, B, again)
    old = group.create(A, B, value="old")
    kept = group.share(old, A, B)
    new = group.create(again, B, value="new")
    assert (old.rref_id.created_on, old.rref_id.local_id) == (new.rref_id.created_on, new.rref_id.local_id)
    group.run(B, group[B].worker_died(A, DIED))
    group.tables.pop(A)
    values = [group[B].known_outcome(handle.rref_id) for handle in (kept, new)]
    assert [value.value for value in values if value is not None] == ["old", "new"]
    # what the old life owned is dead to the new one, without being told
    mine = ForkData(A, RRefId(0, 9, "a"), ForkId(1, 50, "b"))
    received = group[again].receive([mine], B)
    assert received.pending.done
    assert isinstance(group[again].failure(received.handles[0]), PeerDiedError)


# -- leaving -------------------------------------------------------------------------------------


def test_leaving_deletes_users_those_to_come_too() -> None:
    group = Group(A, B)
    handle = group.create(A, B)
    late = group[A].fork(group[A].create_owner("mine"), B)
    assert group[B].leaks()
    assert group[B].leaks()[0].holder == A
    for key in (A, B):
        group.run(key, group[key].delete_all_users())
    received = group[B].receive([late], A)
    group.run(B, received.effects)
    group.carry()
    for table in group.tables.values():
        assert table.pending_counts().idle
        assert table.leaks() == []
    group.drop(A, handle)
    group.drop(B, *received.handles)
    group.assert_empty()


def test_what_an_owner_that_does_not_answer_has_not_confirmed_is_no_leak_of_the_one_who_leaves() -> None:
    group = Group(A, B, C)
    handle = group.create(A, B)
    data = group[A].fork(handle, C)
    received = group[C].receive([data], A)  # and the owner, B, is stopped: it never reads what C asks
    assert not received.pending.done
    assert group[C].leaks() == [Leak(handle.rref_id, data.fork_id, C)]
    group[C].delete_all_users()
    assert group[C].leaks() == []
    assert not group[C].pending_counts().idle


def test_silent_after_close() -> None:
    group = Group(A, B, C)
    handle = group.create(A, B)
    mine = group[A].create_owner("value")
    woken: list[object] = []
    waiting = group[A].create_user(A)
    assert group[A].fetch(waiting.rref_id, lambda outcome: woken.append(type(outcome.error))) is None
    received = group[A].receive([group[B].fork(group.create(B, C), A)], B)
    assert received.pending.when_done(lambda: woken.append("pending"))
    effects = group[A].close()
    assert effects.messages == []
    group.run(A, effects)
    assert woken == [ShutdownError, "pending"]
    group[A].drop_later(handle)
    group[A].drop_later(mine)
    for silent in (
        group[A].collect(),
        group[A].confirmed(handle),
        group[A].set_value(mine.rref_id, 1),
        group[A].worker_died(B, DIED),
        group[A].delete_all_users(),
        group[A].handle(B, ForkRequest(((mine.rref_id, ForkId(1, 1, "b")),))),
        group[A].refuse([ForkData(B, handle.rref_id, ForkId(1, 2, "b"))], B),
        group[A].close(),
    ):
        assert not silent
    for raising in (lambda: group[A].create_owner(1), lambda: group[A].fork(mine, B)):
        with pytest.raises(ShutdownError):
            raising()
    assert not any(group[A].debug_info().values())


def test_drop_in_a_forked_child_does_nothing() -> None:
    table = RRefTable(A)
    handle = table.create_owner("value")
    table._pid = -1  # as a child sees it
    table.drop_later(handle)
    assert table.pending_counts().drops == 0


# -- threads and the garbage collector -----------------------------------------------------------


def test_garbage_collector_may_enter_again() -> None:
    """Finalisers that use the table run at any allocation, also inside of the table."""
    group = Group(A, B)
    kept: list[Handle] = []
    entered = 0

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            nonlocal entered
            entered += group[A]._lock._is_owned() or group[B]._lock._is_owned()  # type: ignore[attr-defined]
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
                while group.sent:
                    source, to, message = group.sent.pop()
                    group.run(to, group[to].handle(source, message))
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert entered > 10  # it did happen in the middle of a step
    group.drop(A, *kept)
    for _ in range(4):
        for key in (A, B):
            group.run(key, group[key].collect())
        while group.sent:
            source, to, message = group.sent.pop()
            group.run(to, group[to].handle(source, message))
    group.assert_empty()


def test_many_threads() -> None:
    """Threads share, fetch and drop at once; messages are handled by whoever caused them."""
    tables = {key: RRefTable(key) for key in (A, B, C)}
    failures: list[BaseException] = []

    def run(key: WorkerKey, effects: Effects) -> None:
        for to, message in effects.messages:
            run(to, tables[to].handle(key, message))
        for callback in effects.callbacks:
            callback()

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
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
                found = tables[owner].fetch(handle.rref_id, failures.append)  # type: ignore[arg-type]
                assert found is not None
                assert found.value == number
                tables[there].drop_later(received.handles[0])
                run(there, tables[there].collect())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for table in tables.values():
        assert not any(table.debug_info().values())
