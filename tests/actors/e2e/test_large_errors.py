"""Exceptions that are longer than one chunk of a message (1 MiB), by every way of calling an actor or a task."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import actorrpc

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(30)]

_LONG = 3 << 20
_OVER_THE_LIMIT = 20 << 20


class Big(Exception):
    """A user's exception."""

    def __init__(self, *args: object, **attributes: object) -> None:
        super().__init__(*args)
        self.__dict__.update(attributes)


def _made(kind: str) -> BaseException:
    if kind == "text":
        return Big("x" * _LONG)
    if kind == "attribute":
        return Big("short", data=np.arange(_LONG // 8))
    if kind == "group":
        return ExceptionGroup("several", [Big(b"y" * _LONG), ValueError(1)])
    if kind == "note":
        error = Big("short")
        error.add_note("z" * _LONG)
        return error
    return Big("x" * _OVER_THE_LIMIT)


def _check(kind: str, error: BaseException) -> None:
    """Assert that ``error`` is what :func:`_made` gives."""
    if kind == "text":
        assert error.args == ("x" * _LONG,)
    elif kind == "attribute":
        assert np.array_equal(error.data, np.arange(_LONG // 8))  # type: ignore[attr-defined]
    elif kind == "group":
        assert isinstance(error, ExceptionGroup)
        big, plain = error.exceptions
        assert isinstance(big, Big)
        assert big.args == (b"y" * _LONG,)
        assert isinstance(plain, ValueError)
    elif kind == "note":
        assert error.__notes__ == ["z" * _LONG]
    else:
        assert len(str(error)) < 10_000
        assert "characters left out" in str(error)
        assert error.__notes__[0].endswith("as it cannot be sent whole: args[0]")
    assert isinstance(error, ExceptionGroup if kind == "group" else Big)


@actorrpc.remote
class Failing:
    def plain(self, kind: str) -> None:
        raise _made(kind)

    async def coroutine(self, kind: str) -> None:
        raise _made(kind)

    def stream(self, kind: str) -> Iterator[int]:
        yield 1
        raise _made(kind)

    async def async_stream(self, kind: str) -> AsyncIterator[int]:
        yield 1
        raise _made(kind)


@actorrpc.remote
class NeverMade:
    def __init__(self, kind: str) -> None:
        raise _made(kind)

    def ping(self) -> None: ...


@actorrpc.remote
def task(kind: str) -> None:
    raise _made(kind)


def _drained(stream: Any) -> None:
    for ref in stream:
        actorrpc.get(ref)


@pytest.mark.parametrize("kind", ["text", "attribute", "group", "note", "over the limit"])
def test_long_exceptions_keep_their_class_and_contents(kind: str) -> None:
    actor = Failing.remote()
    ways: list[Callable[[], object]] = [
        lambda: actorrpc.get(task.remote(kind)),
        lambda: actorrpc.get(actor.plain.remote(kind)),
        lambda: actorrpc.get(actor.coroutine.remote(kind)),
        lambda: actor.rpc_sync().plain(kind),
        lambda: actor.rpc_async().plain(kind).wait(),
        lambda: _drained(actor.stream.remote(kind)),
        lambda: _drained(actor.async_stream.remote(kind)),
    ]
    for way in ways:
        with pytest.raises(actorrpc.RemoteError) as caught:
            way()
        _check(kind, caught.value)
    never = NeverMade.remote(kind)
    with pytest.raises(actorrpc.ActorDiedError) as died:
        actorrpc.get(never.ping.remote())
    assert died.value.cause is not None
    _check(kind, died.value.cause)
    del caught, died, ways
