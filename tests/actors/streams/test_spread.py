"""Generators with a number of results: n ObjectRefs of the first items, whatever becomes of the generator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from actorrpc import errors
from actorrpc.actors.context import Runtime
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.wait import get, wait
from actorrpc.actors.streams.spread import spread
from tests.actors.bare import alone, ended, here

_open = threading.Event()
_log: list[Any] = []


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """A group of this process alone."""
    _open.clear()
    _log.clear()
    with alone() as made:
        yield made


def _until_empty(runtime: Runtime) -> None:
    """Return when it is known that no stream is wanted any more: the end of one may be on its way."""
    while len(runtime.streams):
        threading.Event().wait(0.001)


def steps(n: int, *, fails: bool = False) -> Iterator[int]:
    try:
        for number in range(n):
            if number == 1:
                assert _open.wait(20)
            yield number
        if fails:
            raise LookupError(f"after {n}")
        _log.append("over")
    except GeneratorExit:
        _log.append("closed")
        raise


def failing(n: int) -> Iterator[int]:
    return steps(n, fails=True)


def test_each_is_complete_when_its_item_is_there(runtime: Runtime) -> None:
    first, second, third = refs = spread(here(steps, 0, 3), 3)
    assert {type(ref) for ref in refs} == {ObjectRef}
    assert get(first) == 0
    assert wait([second, third], timeout=0) == ([], [second, third])
    assert repr(second) == "ObjectRef(value 1 of steps, pending)"
    _open.set()
    assert get(refs) == [0, 1, 2]
    ended()
    assert _log == ["over"]  # not closed at its last yield
    _until_empty(runtime)


def test_one_that_gives_too_few_raises_in_those_that_are_left(runtime: Runtime) -> None:
    _open.set()
    *given, missing, last = spread(here(steps, 0, 2), 4)
    assert get(given) == [0, 1]
    for each in (missing, last):
        with pytest.raises(ValueError, match=r"steps must yield 4 values \(num_returns\), but yielded 2"):
            get(each)
    ended()


def test_one_that_gives_too_many_is_closed(runtime: Runtime) -> None:
    _open.set()
    assert get(spread(here(steps, 1, 1 << 30), 2)) == [0, 1]
    ended()
    assert _log == ["closed"]
    _until_empty(runtime)


def test_what_it_raises(runtime: Runtime) -> None:
    _open.set()
    given, missing, last = spread(here(failing, 0, 1), 3)
    assert get(given) == 0
    for each in (missing, last):
        with pytest.raises(LookupError, match="after 1"):
            get(each)
    ended()


@pytest.mark.prints("failing has given 2 values .*, and then raised LookupError")
def test_what_it_raises_behind_its_values_is_logged(runtime: Runtime) -> None:
    _open.set()
    assert get(spread(here(failing, 0, 2), 2)) == [0, 1]
    ended()


def test_giving_one_up_gives_up_the_call(runtime: Runtime) -> None:
    first, second, third = spread(here(steps, 0, 3), 3)
    assert get(first) == 0
    assert third.cancel()
    _open.set()
    for each in (second, third):
        with pytest.raises(errors.CancelledError, match="steps was cancelled"):
            get(each)
    assert not second.cancel()
    assert get(first) == 0
    ended()
    _until_empty(runtime)


def test_the_end_of_the_group(runtime: Runtime) -> None:
    stream = here(steps, 0, 2)
    first, second = spread(stream, 2)
    assert get(first) == 0
    runtime.streams.close()
    _open.set()
    with pytest.raises(errors.RpcError):
        get(second)


def _gated(_: int) -> Iterator[int]:
    yield from range(2)
    assert _open.wait(20)
    yield 2


def test_the_end_of_the_group_behind_its_values_is_not_logged(runtime: Runtime) -> None:
    assert get(spread(here(_gated, 0, 0), 2)) == [0, 1]
    runtime.streams.close()
    _open.set()
