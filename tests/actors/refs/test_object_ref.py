"""ObjectRefs: what they are for Python, how they travel, and where their values come from."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import gc
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

from actorrpc import errors, rpc
from actorrpc.actors import context as runtimes
from actorrpc.actors.refs.object_ref import SMALL, ObjectRef, keep_large, put
from actorrpc.actors.refs.results import StoredResult
from actorrpc.actors.refs.snapshot import LARGE, Snapshot
from actorrpc.actors.refs.wait import get, wait
from actorrpc.agent.context import current_worker
from actorrpc.futures import Future
from actorrpc.rpc import rref as rrefs
from actorrpc.serialization import codec
from tests.actors.bare import alone, bare
from tests.ranks import rpc_group


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone."""
    with alone():
        yield


def _kept(value: Any) -> StoredResult:
    return StoredResult(rpc.RRef(Snapshot.of(value)))


def _large() -> torch.Tensor:
    return torch.arange(100_000.0)


def _pending(label: str = "work") -> tuple[Future[Any], ObjectRef[Any]]:
    future: Future[Any] = Future()
    return future, ObjectRef(future, label=label)


def _echo(*things: Any) -> Any:
    return things[0] if len(things) == 1 else things


def _send(*things: Any) -> Any:
    return rpc.rpc_sync(0, _echo, things)


# -- as objects ----------------------------------------------------------------------------------------------


def test_its_states_can_be_told() -> None:
    future, ref = _pending("Counter.add")
    assert repr(ref) == "ObjectRef(Counter.add, pending)"
    assert not ref.done()
    future.set_result(1)
    assert ref.done()
    assert repr(ref) == "ObjectRef(Counter.add, complete)"
    assert repr(ObjectRef.failed(ValueError("x"), label="f")) == "ObjectRef(f, failed: ValueError)"
    future.label = "the call of f"
    assert repr(ObjectRef(future)) == "ObjectRef(the call of f, complete)"


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda ref: list(ref), TypeError),
        (lambda ref: bool(ref), TypeError),
        (lambda ref: ref[0], TypeError),
        (lambda ref: ref.shape, AttributeError),
    ],
    ids=["iteration", "truth", "item", "attribute"],
)
def test_it_is_not_taken_for_its_value(use: Callable[[Any], Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"actorrpc\.get\(ref\)"):
        use(ObjectRef.of([1]))


def test_it_takes_no_attributes_that_it_has_not() -> None:
    with pytest.raises(AttributeError):
        ObjectRef.of(1).valeu = 3  # type: ignore[attr-defined]


def test_it_cannot_be_pickled_outside_of_a_group_or_with_an_exception() -> None:
    for ref in (ObjectRef.of(1), _pending()[1]):
        with pytest.raises(errors.NotInitializedError):
            pickle.dumps(ref)
        with pytest.raises(errors.SerializationError, match="get"):
            codec.dumps(ref)


def test_copies_are_itself() -> None:
    ref = ObjectRef.of(1)
    assert copy.copy(ref) is ref
    assert copy.deepcopy([ref])[0] is ref


def test_different_results_are_different() -> None:
    first, second = ObjectRef.of(1), ObjectRef.of(1)
    assert first != second
    assert len({first, second, first}) == 2
    assert first.hex() != second.hex()
    assert first.__eq__(1) is NotImplemented


# -- small values ------------------------------------------------------------------------------------------


def test_a_complete_one_arrives_complete_and_equal(group: None) -> None:
    ref = ObjectRef.of({"a": torch.ones(3)}, label="f")
    back = _send(ref)
    assert type(back) is ObjectRef
    assert back == ref
    assert hash(back) == hash(ref)
    assert back.done()
    assert repr(back) == "ObjectRef(f, complete)"
    assert torch.equal(get(back)["a"], torch.ones(3))


def test_a_failed_one_arrives_failed(group: None) -> None:
    back = _send(ObjectRef.failed(LookupError("not there")))
    assert back.done()
    with pytest.raises(LookupError, match="not there"):
        get(back)
    with pytest.raises(LookupError, match="not there"):
        back.future().wait()


def test_one_in_a_container_twice_arrives_once(group: None) -> None:
    _, ref = _pending()
    first, second = _send([ref, ref])
    assert first is second


# -- promises ----------------------------------------------------------------------------------------------


def test_a_pending_one_comes_home_and_is_fulfilled(group: None) -> None:
    future, ref = _pending()
    back = _send(ref)
    assert back == ref
    assert not back.done()
    future.set_result("value")
    assert get(back) == "value"
    assert back.done()


def test_a_promise_that_is_broken(group: None) -> None:
    future, ref = _pending()
    back, again = _send(ref), _send(ref)
    future.set_exception(ValueError("no"))
    for each in (back, again, ref):
        with pytest.raises(ValueError, match="no"):
            get(each)


def test_a_broken_promise_that_was_looked_at_is_forgotten(group: None) -> None:
    def use() -> None:
        future, ref = _pending()
        back = _send(ref)
        future.set_exception(ValueError("no"))
        for each in (ref, back):
            with pytest.raises(ValueError, match="no"):
                get(each)  # from here on the error holds this frame, and with it the ObjectRefs

    use()
    for _ in range(2):
        gc.collect()
        rrefs.runtime().collect()
    assert not rrefs.runtime().table._owned


def test_a_promise_of_something_kept(group: None) -> None:
    future, ref = _pending()
    back = _send(ref)
    future.set_result(_kept(_large()))
    assert torch.equal(get(back), _large())
    assert torch.equal(get(ref), _large())


def test_a_promise_that_nobody_holds_is_forgotten(group: None) -> None:
    table = rrefs.runtime().table
    future, ref = _pending()
    back = _send(ref)
    del ref, back
    gc.collect()
    for _ in range(2):  # what the first brings to an end may hold others
        rrefs.runtime().collect()
    assert table.pending_counts().owners == 0
    future.set_result(1)


def test_a_pending_one_can_be_held_in_a_snapshot(group: None) -> None:
    future, ref = _pending()
    back = _send(Snapshot.of((ref,))).open()[0]
    future.set_result(3)
    assert get(back) == 3


def test_promises_end_at_shutdown() -> None:
    with alone():
        future, ref = _pending()
        back = _send(ref)
        waited = back.future()
        future.label = "the work"
    with pytest.raises(errors.ShutdownError):
        waited.wait()


_MUTABLE: dict[str, Callable[[], Any]] = {
    "list": lambda: [1, 2],
    "tensor": lambda: torch.ones(3),
    "leaf": lambda: torch.ones(3, requires_grad=True),
    "array": lambda: numpy.ones(3),
    "dict": lambda: {"list": [1, 2], "tensor": torch.ones(3)},
}


def _change(value: Any) -> None:
    if isinstance(value, dict):
        _change(value["tensor"])
        value["list"].append(3)
    elif isinstance(value, list):
        value.append(3)
    else:
        torch.as_tensor(value).detach().zero_()


@pytest.mark.parametrize("kind", _MUTABLE)
def test_each_reader_of_a_promise_has_a_value_of_its_own(group: None, kind: str) -> None:
    make = _MUTABLE[kind]
    future, ref = _pending()
    came_home = _send(ref)
    future.set_result(make())
    sent_later = _send(ref)
    for each in (ref, came_home, sent_later):
        value = get(each)
        assert repr(value) == repr(make())
        _change(value)
    for each in (ref, came_home, sent_later):
        assert repr(get(each)) == repr(make())


# -- kept values -------------------------------------------------------------------------------------------


def test_a_kept_value_is_fetched_once_and_each_get_has_its_own(group: None) -> None:
    ref: ObjectRef[Any] = ObjectRef.of(_kept(_large()))
    assert ref.done()
    assert "elsewhere" in repr(ref)
    value = get(ref)
    assert torch.equal(value, _large())
    fetched = ref._fetched
    value.zero_()
    assert torch.equal(get(ref), _large())
    assert torch.equal(ref.future().wait(), _large())
    assert ref._fetched is fetched
    assert "fetched" in repr(ref)


def test_a_kept_value_travels_as_a_reference(group: None) -> None:
    ref: ObjectRef[Any] = ObjectRef.of(_kept(_large()))
    mine = get(ref)
    mine.zero_()
    assert torch.equal(get(_send(ref)), _large())


def test_only_large_results_are_kept(group: None) -> None:
    value, here = _large(), current_worker().agent.self_peer
    assert keep_large(value, SMALL, here) is value
    assert (
        keep_large(value, LARGE - 1, here) is value
    )  # its memory goes to a process of this host as that of arguments
    kept = keep_large(value, LARGE, here)
    value.zero_()
    assert torch.equal(get(ObjectRef.of(kept)), _large())


def test_a_future_of_a_pending_one_has_the_value_itself(group: None) -> None:
    future, ref = _pending()
    value = ref.future()
    future.set_result(_kept(_large()))
    value.wait().zero_()
    assert torch.equal(ref.future().wait(), _large())


def test_a_future_of_one_goes_where_the_standard_librarys_go(group: None) -> None:
    future, ref = _pending()
    kept: ObjectRef[Any] = ObjectRef.of(_kept(_large()))
    work = [ref.future(), kept.future(), ObjectRef.failed(LookupError("gone")).future()]
    future.set_result(1)
    assert {each.exception() is None for each in concurrent.futures.as_completed(work)} == {True, False}

    async def main() -> Any:
        return await asyncio.wrap_future(ref.future())

    assert asyncio.run(main()) == 1


@pytest.mark.parametrize("first", [True, False])
def test_one_failure_is_seen_by_one_look(first: bool) -> None:
    """Else it is logged that nobody has looked, which fails the test."""
    future, ref = _pending()
    value = ref.future()
    assert value is not future
    future.set_exception(LookupError("gone"))
    with pytest.raises(LookupError, match="gone"):
        get(ref) if first else value.wait()


def test_references_that_never_end_are_given_up(group: None) -> None:
    rref: rpc.RRef[Any] = rpc.RRef(None)
    kept = StoredResult(rref)
    step: Any = rrefs.runtime().table._owned[rref._handle.rref_id]
    step.outcome = step.outcome.__class__(kept)
    with pytest.raises(errors.RRefError, match="without end"):
        get(ObjectRef.of(kept))
    step.outcome = None


# -- put ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 100_000])
def test_put_takes_the_value_as_it_is(group: None, size: int) -> None:
    value = torch.ones(size)
    ref = put(value)
    value.zero_()
    assert torch.equal(get(ref), torch.ones(size))
    assert torch.equal(get(_send(ref)), torch.ones(size))


def test_put_refuses_references_and_what_cannot_be_sent(group: None) -> None:
    with pytest.raises(TypeError, match="reference already"):
        put(ObjectRef.of(1))
    with pytest.raises(errors.SerializationError):
        put(threading.Lock())


def test_put_needs_a_runtime() -> None:
    start = runtimes.set_autostart(None)
    try:
        with pytest.raises(errors.NotInitializedError):
            put(1)
    finally:
        runtimes.set_autostart(start)


# -- waiting in asyncio, from threads, and giving up ---------------------------------------------------------


def test_it_can_be_awaited(group: None) -> None:
    future, ref = _pending()

    async def main() -> tuple[Any, Any, Any]:
        kept: ObjectRef[Any] = ObjectRef.of(_kept(_large()))
        asyncio.get_running_loop().call_soon(future.set_result, 4)
        first, second = await asyncio.gather(ref, kept)
        with pytest.raises(ValueError, match="bad"):
            await ObjectRef.failed(ValueError("bad"))
        return first, second, await ref

    first, second, third = asyncio.run(main())
    assert first == third == 4
    assert torch.equal(second, _large())


def test_many_threads_get_one_kept_value(group: None) -> None:
    ref: ObjectRef[Any] = ObjectRef.of(_kept(_large()))
    found: list[Any] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        found.append(get(ref))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({value.data_ptr() for value in found}) == 8
    assert all(torch.equal(value, _large()) for value in found)


def test_cancel_ends_it(group: None) -> None:
    future, ref = _pending()
    value = ref.future()
    assert ref.cancel()
    assert not ref.cancel()
    assert future.cancelled()
    with pytest.raises(errors.CancelledError):
        value.wait()
    with pytest.raises(errors.CancelledError):
        get(ref)


def test_cancelling_the_future_of_the_value_cancels_the_call(group: None) -> None:
    future, ref = _pending()
    assert ref.future().cancel()
    assert future.cancelled()


# -- between workers -----------------------------------------------------------------------------------------


def _keeps(value: Any) -> StoredResult:
    return _kept(value)


def _sum_of(ref: ObjectRef[Any]) -> float:
    return float(get(ref).sum())


def _direct(rank: int, world_size: int) -> Any:
    """Worker 0 has 1 keep a value, and 2 fetch it: it never comes to 0."""
    if rank:
        return None
    with bare():
        ref: ObjectRef[Any] = ObjectRef(rpc.rpc_async(1, _keeps, (_large(),)))
        total = rpc.rpc_sync(2, _sum_of, (ref,))
        pending: ObjectRef[Any] = ObjectRef(rpc.rpc_async(1, _keeps, (_large() + 1,)))
        more = rpc.rpc_sync(2, _sum_of, (pending,))
        return total, more, repr(ref), float(get(ref).sum()), wait([pending])[0] == [pending]


@pytest.mark.limit(60)
def test_values_go_straight_to_whoever_wants_them() -> None:
    total, more, shown, mine, ready = rpc_group(_direct, 3)[0]
    assert total == mine == float(_large().sum())
    assert more == float((_large() + 1).sum())
    assert "elsewhere" in shown
    assert ready


def _hold(ref: ObjectRef[Any]) -> None:
    _held.append(ref)


def _held_value() -> Any:
    return get(_held.pop())


_held: list[ObjectRef[Any]] = []


def _promised(rank: int, world_size: int) -> Any:
    if rank:
        return None
    with bare():
        first: Future[Any] = Future()
        second: Future[Any] = Future()
        third: Future[Any] = Future()
        for future in (first, second, third):
            rpc.rpc_sync(1, _hold, (ObjectRef(future),))
        asked = rpc.rpc_async(1, _held_value)
        third.set_result(_kept(_large()))
        kept = float(asked.wait().sum())
        second.set_exception(KeyError("second"))
        with pytest.raises(KeyError, match="second"):
            rpc.rpc_sync(1, _held_value)
        asked = rpc.rpc_async(1, _held_value)
        first.set_result("first")
        return kept, asked.wait()


@pytest.mark.limit(60)
def test_promises_are_kept_across_workers() -> None:
    kept, first = rpc_group(_promised, 2)[0]
    assert kept == float(_large().sum())
    assert first == "first"


def _bounce(ref: ObjectRef[Any]) -> ObjectRef[Any]:
    return ref


def _around(rank: int, world_size: int) -> Any:
    if rank:
        return None
    with bare():
        future, ref = _pending()
        back = rpc.rpc_sync(2, rpc.rpc_sync, (1, _bounce, (ref,)))
        assert back == ref
        assert not back.done()
        future.set_result(_kept(_large()))
        return float(get(back).sum()), float(get(rpc.rpc_sync(1, _bounce, (back,))).sum())


@pytest.mark.limit(60)
def test_they_come_home_from_a_journey() -> None:
    assert rpc_group(_around, 3)[0] == (float(_large().sum()), float(_large().sum()))


def _die() -> None:
    os._exit(0)


def _owner_dies(rank: int, world_size: int) -> Any:
    if rank:
        return None
    with bare():
        ref: ObjectRef[Any] = ObjectRef(rpc.rpc_async(1, _keeps, (_large(),)))
        other: ObjectRef[Any] = ObjectRef(rpc.rpc_async(1, _keeps, (_large(),)))
        get(other)
        ref._ask().wait()
        with pytest.raises(errors.PeerDiedError):
            rpc.rpc_sync(1, _die)
        found: list[Any] = [float(get(other).sum())]
        with pytest.raises((errors.PeerDiedError, errors.RRefError)):
            get(ref)
        arrived = _send_to(0, ref)
        with pytest.raises((errors.PeerDiedError, errors.RRefError)):
            get(arrived)
        return found


def _send_to(to: int, thing: Any) -> Any:
    return rpc.rpc_sync(to, _echo, (thing,))


@pytest.mark.limit(60)
def test_a_value_dies_with_the_worker_that_kept_it() -> None:
    assert rpc_group(_owner_dies, 2, may_die=[1])[0] == [float(_large().sum())]


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    copied: list[object] = []
    of = Snapshot.of

    def counting(obj: object, **more: Any) -> Snapshot:
        copied.append(obj)
        return of(obj, **more)

    monkeypatch.setattr(Snapshot, "of", counting)
    return copied


def _came(value: Any) -> ObjectRef[Any]:
    """An ObjectRef whose result came with a reply."""
    return ObjectRef.of(value)


def test_what_can_be_asked_for_again_is_as_it_was(group: None) -> None:
    ref = _came([1, {"a": torch.ones(2)}])
    get(ref).append(3)
    get([ref])[0][1]["a"].zero_()

    async def wait_for(ref: ObjectRef[Any]) -> Any:
        return await ref

    asyncio.run(wait_for(ref)).clear()
    ref.future().wait().clear()
    found = get(ref)
    assert found[0] == 1
    assert torch.equal(found[1]["a"], torch.ones(2))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="from Python 3.14 on, variables are lent to calls")
def test_what_nobody_can_ask_for_again_is_not_copied(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = _counted(monkeypatch)

    async def wait_for() -> Any:
        return await _came([1])

    # Not in assertions: pytest keeps the parts of those.
    found = [get(_came([1])), get([_came([1])]), get([[_came([1])], _came([1])]), asyncio.run(wait_for())]
    assert found == [[1], [[1]], [[[1]], [1]], [1]]
    assert not copied
    kept = _came([1])
    get(kept)
    assert copied == [[1]]


def test_atoms_are_not_copied(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = _counted(monkeypatch)
    for value in (None, True, 1, 1.5, "text", b"bytes", 1j):
        ref = put(value)
        assert get(ref) is get(ref) is value
    assert not copied


def test_what_gradients_flow_through_is_one_tensor(group: None) -> None:
    ref = _came(torch.ones(2, requires_grad=True) * 2)
    assert get(ref) is get(ref)


@pytest.mark.parametrize("copy", [None, True])
def test_large_values_are_written_to_without_anybody_seeing(group: None, copy: bool | None) -> None:
    ref = put({"a": torch.zeros(1 << 20), "b": [1]})
    first = get(ref, copy=copy)
    first["a"].fill_(1)
    first["b"].append(2)
    second = get(ref)
    assert float(second["a"].sum()) == 0
    assert second["b"] == [1]
    assert float(first["a"].sum()) == 1 << 20


def test_without_a_copy_it_can_only_be_read(group: None) -> None:
    numpy = pytest.importorskip("numpy")
    array = get(put(numpy.arange(1 << 20)), copy=False)
    assert array[-1] == (1 << 20) - 1
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(TypeError, match="copy=False"):
        get(put(torch.zeros(1 << 20)), copy=False)
