"""ObjectRefs: their behaviour as Python objects, sending, pending values, and awaiting."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

from actorrpc import errors, rpc
from actorrpc.actors.refs.object_ref import ObjectRef, put
from actorrpc.actors.refs.snapshot import Snapshot, StoredResult
from actorrpc.actors.refs.wait import get
from actorrpc.futures import Future
from actorrpc.serialization import codec
from tests.actors.bare import alone
from tests.migration.rows import row


@pytest.fixture
def group() -> Iterator[None]:
    """A group of one worker."""
    with alone():
        yield


def _stored(value: Any) -> StoredResult:
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


def test_repr_and_done_show_the_state_of_a_reference() -> None:
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
def test_using_a_reference_like_its_value_raises_and_names_get(
    use: Callable[[Any], Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"actorrpc\.get\(ref\)"):
        use(ObjectRef.of([1]))


def test_a_reference_cannot_be_pickled_outside_a_group_or_with_an_exception() -> None:
    for ref in (ObjectRef.of(1), _pending()[1]):
        with pytest.raises(errors.NotInitializedError):
            pickle.dumps(ref)
        with pytest.raises(errors.SerializationError, match="get"):
            codec.dumps(ref)


def test_references_to_different_results_are_unequal() -> None:
    first, second = ObjectRef.of(1), ObjectRef.of(1)
    assert first != second
    assert len({first, second, first}) == 2
    assert first.hex() != second.hex()
    assert first.__eq__(1) is NotImplemented


# -- pending values ----------------------------------------------------------------------------------------


def test_pending_references_fail_at_shutdown() -> None:
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
def test_each_holder_of_a_pending_reference_gets_a_separate_value(group: None, kind: str) -> None:
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


# -- futures -----------------------------------------------------------------------------------------------


def test_the_future_of_a_reference_works_with_concurrent_futures_and_asyncio(group: None) -> None:
    future, ref = _pending()
    kept: ObjectRef[Any] = ObjectRef.of(_stored(_large()))
    work = [ref.future(), kept.future(), ObjectRef.failed(LookupError("gone")).future()]
    future.set_result(1)
    assert {each.exception() is None for each in concurrent.futures.as_completed(work)} == {True, False}

    async def main() -> Any:
        return await asyncio.wrap_future(ref.future())

    assert asyncio.run(main()) == 1


# -- put ---------------------------------------------------------------------------------------------------


def test_put_refuses_references_and_unpicklable_values(group: None) -> None:
    with pytest.raises(TypeError, match="reference already"):
        put(ObjectRef.of(1))
    with pytest.raises(errors.SerializationError):
        put(threading.Lock())


# -- awaiting ---------------------------------------------------------------------------------


@row("pool.apply_async", "from-multiprocessing")
def test_a_reference_can_be_awaited(group: None) -> None:
    future, ref = _pending()

    async def main() -> tuple[Any, Any, Any]:
        kept: ObjectRef[Any] = ObjectRef.of(_stored(_large()))
        asyncio.get_running_loop().call_soon(future.set_result, 4)
        first, second = await asyncio.gather(ref, kept)
        with pytest.raises(ValueError, match="bad"):
            await ObjectRef.failed(ValueError("bad"))
        return first, second, await ref

    first, second, third = asyncio.run(main())
    assert first == third == 4
    assert torch.equal(second, _large())


# -- copies of values ----------------------------------------------------------------------------------------


def _from_reply(value: Any) -> ObjectRef[Any]:
    """Return an ObjectRef whose result came with a reply."""
    return ObjectRef.of(value)


def test_changing_a_result_does_not_change_later_gets(group: None) -> None:
    ref = _from_reply([1, {"a": torch.ones(2)}])
    get(ref).append(3)
    get([ref])[0][1]["a"].zero_()

    async def wait_for(ref: ObjectRef[Any]) -> Any:
        return await ref

    asyncio.run(wait_for(ref)).clear()
    ref.future().wait().clear()
    found = get(ref)
    assert found[0] == 1
    assert torch.equal(found[1]["a"], torch.ones(2))


@pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="from Python 3.14 on, calls borrow references of variables"
)
def test_the_last_get_of_a_reference_returns_the_value_without_a_copy(group: None) -> None:
    value = [1]

    async def wait_for() -> Any:
        return await _from_reply(value)

    # Not inside assert statements, because pytest keeps their parts.
    found = [
        get(_from_reply(value)),
        get([_from_reply(value)])[0],
        get([[_from_reply(value)]])[0][0],
        asyncio.run(wait_for()),
    ]
    assert all(each is value for each in found)
    kept = _from_reply(value)
    found = [get(kept), get(kept)]
    assert found[0] is not found[1]


def test_a_tensor_with_gradients_is_not_copied_by_get(group: None) -> None:
    ref = _from_reply(torch.ones(2, requires_grad=True) * 2)
    assert get(ref) is get(ref)
