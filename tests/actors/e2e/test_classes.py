"""Classes of actors: shadowed methods, reprs, and local and large definitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

import actorrpc

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(20)]


@actorrpc.remote
class Shadowed:
    def __init__(self) -> None:
        self.__dict__.update(plain=5, static=6, of_class=7, coroutine=8, items=9)
        self.called = lambda: "the instance's"

    def plain(self) -> Any:
        return self.__dict__["plain"]

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    async def coroutine(self) -> str:
        return "coroutine"

    def items(self) -> Iterator[int]:
        yield 1

    def called(self) -> str:
        return "the class's"


def test_methods_are_called_even_if_attributes_shadow_them() -> None:
    actor = Shadowed.remote()
    calls = [actor.plain, actor.static, actor.of_class, actor.coroutine, actor.called]
    found = actorrpc.get([each.remote() for each in calls])
    assert found == [5, "static", "Shadowed", "coroutine", "the instance's"]
    assert list(actor.items.remote().values()) == [1]


class Fails:
    def fail(self) -> None:
        raise ValueError("no")


@dataclass
@actorrpc.remote
class WithRepr(Fails):
    number: int


@actorrpc.remote
class LinearModule(Fails, nn.Linear):
    pass


@actorrpc.remote
class BrokenRepr(Fails):
    def __repr__(self) -> str:
        raise SystemExit(3)


def test_a_remote_traceback_shows_the_repr_of_the_actor() -> None:
    for actor, expected in (
        (WithRepr.remote(3), ", actor WithRepr(number=3):\n"),
        (LinearModule.remote(2, 2), ":\nTraceback"),
        (BrokenRepr.remote(), ":\nTraceback"),
    ):
        with pytest.raises(ValueError, match="no") as caught:
            actorrpc.get(actor.fail.remote())
        assert isinstance(caught.value, actorrpc.RemoteError)
        assert caught.value.traceback.startswith(f"On worker {caught.value.worker}{expected}")
        del caught


def test_a_local_class_is_sent_by_value_even_if_it_is_larger_than_a_frame() -> None:
    table = b"t" * 6_000_000

    class Plain:
        rows = table

        def length(self) -> int:
            return len(self.rows)

    @actorrpc.remote
    class Large:
        rows = table

        def length(self, of: Any = None) -> int:
            return len((of or self).rows)

        def make(self, cls: Any) -> Any:
            return cls()

    actor = Large.remote()
    for _ in range(2):
        assert actorrpc.get(actor.length.remote(Plain())) == len(table)
        assert type(actorrpc.get(actor.make.remote(Plain))) is Plain
    assert actorrpc.get(actorrpc.remote(Plain.length).remote(Plain())) == len(table)
    assert type(actorrpc.get(actorrpc.put(Plain()))) is Plain
    assert actorrpc.rpc_sync(actorrpc.get_worker_info().name, Plain.length, (Plain(),)) == len(table)
