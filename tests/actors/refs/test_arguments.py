"""ObjectRefs as arguments: values at top level, references inside of containers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from actorrpc import rpc
from actorrpc.actors.refs.arguments import has_refs, pack_arguments, resolve
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.results import StoredResult
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.futures import Future
from tests.actors.bare import alone, bare
from tests.ranks import rpc_group
from tests.reports import LAST, Reports


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A group of this process alone."""
    with alone():
        yield


def _kept(value: Any) -> ObjectRef[Any]:
    kept: Any = StoredResult(rpc.RRef(Snapshot.of(value)))
    return ObjectRef.of(kept)


def test_references_at_top_level_are_seen() -> None:
    ref = ObjectRef.of(1)
    assert has_refs((1, ref), {})
    assert has_refs((), {"a": 1, "b": ref})
    assert not has_refs((1, [ref]), {"a": {"b": ref}})
    assert not has_refs((), {})


def test_what_is_here_goes_as_values() -> None:
    ref, inner = ObjectRef.of(1), ObjectRef.of(2)
    assert pack_arguments((0, ref, [inner]), {"a": ref, "b": 3}) == ((0, 1, [inner]), {"a": 1, "b": 3}, False)


def test_what_is_elsewhere_or_pending_stays() -> None:
    future: Future[int] = Future()
    pending, kept = ObjectRef(future), _kept(2)
    assert pack_arguments((pending,), {}) == ((pending,), {}, True)
    assert pack_arguments((), {"a": kept, "b": ObjectRef.of(1)}) == ((), {"a": kept, "b": 1}, True)
    future.set_result(1)
    assert pack_arguments((pending,), {}) == ((1,), {}, False)


def test_one_that_failed_fails_the_call() -> None:
    with pytest.raises(LookupError, match="argument"):
        pack_arguments((1,), {"a": ObjectRef.failed(LookupError("argument"))})


@pytest.mark.parametrize("when", ["before", "later"])
@pytest.mark.prints(LAST)
def test_what_other_arguments_raise_is_known_with_the_first(when: str) -> None:
    with Reports() as reports:
        future: Future[int] = Future()
        if when == "before":
            future.set_exception(ValueError("of the second"))
        with pytest.raises(LookupError, match="argument"):
            pack_arguments((ObjectRef.failed(LookupError("argument")),), {"a": ObjectRef(future)})
        if when == "later":
            future.set_exception(ValueError("of the second"))
        del future
        assert reports.so_far() == []


def test_nothing_to_resolve() -> None:
    assert resolve((1, [ObjectRef.of(1)]), {"a": 2}) is None


def test_everything_is_resolved() -> None:
    future: Future[int] = Future()
    inner = ObjectRef.of("inner")
    resolved = resolve(
        (ObjectRef(future), 1, _kept(2), [inner]), {"a": _kept(3), "b": 4, "c": ObjectRef.of(5)}
    )
    assert resolved is not None
    assert not resolved.done()
    future.set_result(0)
    assert resolved.wait() == ((0, 1, 2, [inner]), {"a": 3, "b": 4, "c": 5})


def test_the_first_failure_ends_it() -> None:
    future: Future[int] = Future()
    resolved = resolve((ObjectRef(Future()), ObjectRef(future)), {})
    assert resolved is not None
    future.set_exception(LookupError("second"))
    with pytest.raises(LookupError, match="second"):
        resolved.wait()


def _apply(args: tuple[Any, ...]) -> Any:
    resolved = resolve(args, {})
    assert resolved is not None
    (left, right), _ = resolved.wait()
    return float((left + right).sum())


def _make(value: float) -> StoredResult:
    return StoredResult(rpc.RRef(Snapshot.of(torch.full((100_000,), value))))


def _pipeline(rank: int, world_size: int) -> Any:
    if rank:
        return None
    with bare():
        left: ObjectRef[Any] = ObjectRef(rpc.rpc_async(1, _make, (1.0,)))
        future: Future[Any] = Future()
        right: ObjectRef[Any] = ObjectRef(future)
        (left_sent, right_sent), _, unresolved = pack_arguments((left, right), {})
        total = rpc.rpc_async(2, _apply, ((left_sent, right_sent),))
        future.set_result(rpc.rpc_sync(1, _make, (2.0,)))
        return unresolved, total.wait()


@pytest.mark.limit(60)
def test_arguments_come_from_several_workers() -> None:
    assert rpc_group(_pipeline, 3)[0] == (True, 300_000.0)
