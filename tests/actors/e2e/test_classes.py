"""What may be an actor, and how its parts are reached."""

from __future__ import annotations

import abc
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn

import actorrpc
from tests.actors.e2e import kit

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(20)]

T = TypeVar("T")


@actorrpc.remote
class Model(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(size, 2)

    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def norm(self) -> float:
        return float(sum(p.detach().norm() for p in self.parameters()))

    def options(self) -> str:
        return "the class's own"


@actorrpc.remote
@dataclass
class Point:
    x: int
    y: int = 2
    tags: list[str] = field(default_factory=list)

    def total(self) -> int:
        return self.x + self.y


@actorrpc.remote
class Box(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    def get(self) -> T:
        return self.value


class Base:
    kind = "base"

    def __init__(self, name: str) -> None:
        self.name = name

    def who(self) -> str:
        return f"{type(self).__name__} {self.name}"

    @classmethod
    def made_of(cls) -> str:
        return cls.__name__

    @staticmethod
    def plus(a: int, b: int = 1) -> int:
        return a + b

    @property
    def upper(self) -> str:
        return self.name.upper()


@actorrpc.remote(max_concurrency=2)
class Derived(Base):
    kind = "derived"

    def __init__(self, name: str) -> None:
        super().__init__(name + "!")
        self.items = list(range(5))

    def __call__(self, x: int) -> int:
        return x * 2

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, n: int) -> int:
        return self.items[n]

    def __contains__(self, n: int) -> bool:
        return n in self.items


@actorrpc.remote
class Further(Derived):
    def who(self) -> str:
        return "further " + super().who()


@actorrpc.remote
class Abstract(abc.ABC):
    @abc.abstractmethod
    def go(self) -> int: ...


class Plain:
    def ping(self) -> str:
        return "plain"


def test_modules() -> None:
    model = Model.remote(8)
    assert actorrpc.get(model.forward.remote(torch.ones(3, 8))).shape == (3, 2)
    assert actorrpc.get(model.norm.remote()) > 0
    state = actorrpc.get(model.state_dict.remote())
    assert set(state) == {"layer.weight", "layer.bias"}
    local = Model.__actor_class__(8)
    local.load_state_dict(state)
    x = torch.randn(5, 8)
    torch.testing.assert_close(actorrpc.get(model.forward.remote(x)), local(x))
    assert actorrpc.get(model.options.remote()) == "the class's own"
    assert actorrpc.get(model.eval.remote()) is not None
    assert model.rpc_sync().training is False


def test_dataclasses_and_generics() -> None:
    point = Point.remote(3, tags=["a"])
    assert actorrpc.get(point.total.remote()) == 5
    assert point.rpc_sync().tags == ["a"]
    assert actorrpc.get(Box[int].remote(3).get.remote()) == 3
    assert actorrpc.get(Box.remote("x").get.remote()) == "x"
    with pytest.raises(TypeError, match="missing"):
        Point.remote()


def test_inheritance() -> None:
    actor, further = Derived.remote("name"), Further.remote("name")
    assert actorrpc.get(actor.who.remote()) == "Derived name!"
    assert actorrpc.get(further.who.remote()) == "further Further name!"
    assert actorrpc.get([actor.made_of.remote(), further.made_of.remote()]) == ["Derived", "Further"]
    assert actorrpc.get(actor.plus.remote(1)) == 2
    assert actorrpc.get(actor.plus.remote(1, b=5)) == 6
    assert Derived.plus(2, 3) == 5
    assert Derived.kind == "derived"


def test_special_methods() -> None:
    actor = Derived.remote("x")
    assert actorrpc.get(actor.__call__.remote(4)) == 8
    assert actorrpc.get(actor.__len__.remote()) == 5
    assert actorrpc.get(actor.__getitem__.remote(3)) == 3
    assert actorrpc.get(actor.__contains__.remote(9)) is False


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


def test_an_attribute_that_has_the_name_of_a_method() -> None:
    actor = Shadowed.remote()
    calls = [actor.plain, actor.static, actor.of_class, actor.coroutine, actor.called]
    found = actorrpc.get([each.remote() for each in calls])
    assert found == [5, "static", "Shadowed", "coroutine", "the instance's"]
    assert list(actor.items.remote().values()) == [1]


@dataclass
@actorrpc.remote
class Shown:
    number: int

    def fail(self) -> None:
        raise ValueError("no")


@actorrpc.remote
class Unshown(nn.Linear):
    def fail(self) -> None:
        raise ValueError("no")


@actorrpc.remote
class Unsayable:
    def __repr__(self) -> str:
        raise SystemExit(3)

    def fail(self) -> None:
        raise ValueError("no")


def test_the_repr_of_an_actor_is_in_its_tracebacks() -> None:
    for actor, said in (
        (Shown.remote(3), ", actor Shown(number=3):\n"),
        (Unshown.remote(2, 2), ":\nTraceback"),
        (Unsayable.remote(), ":\nTraceback"),
    ):
        with pytest.raises(ValueError, match="no") as caught:
            actorrpc.get(actor.fail.remote())
        assert isinstance(caught.value, actorrpc.RemoteError)
        assert caught.value.traceback.startswith(f"On worker {caught.value.worker}{said}")
        del caught


def test_attributes_and_functions_inside() -> None:
    actor = Derived.remote("x")
    assert actorrpc.get(actorrpc.call(actor, getattr, "upper")) == "X!"
    assert actor.rpc_sync().upper == "X!"
    assert actor.rpc_sync().items == [0, 1, 2, 3, 4]
    actorrpc.get(actorrpc.call(actor, setattr, "name", "new"))
    assert actor.rpc_sync().who() == "Derived new"
    assert actor.rpc_async().who().wait() == "Derived new"
    assert actorrpc.get(actor.remote().who()) == "Derived new"
    assert actorrpc.get(actorrpc.call(actor, lambda self, n: self.items[n], 2)) == 2
    with pytest.raises(AttributeError, match="nothing"):
        actorrpc.get(actorrpc.call(actor, getattr, "nothing"))
    assert actor.rref.to_here().name == "new"


def test_remote_as_a_function() -> None:
    made = actorrpc.remote(Plain)
    assert actorrpc.get(made.remote().ping.remote()) == "plain"
    assert actorrpc.get(actorrpc.remote(max_concurrency=2)(Plain).remote().ping.remote()) == "plain"
    assert actorrpc.get(actorrpc.remote(os.path.basename).remote("/a/b")) == "b"
    me = actorrpc.get_worker_info().name
    assert actorrpc.remote(me, torch.add, args=(torch.ones(2), 1)).to_here().tolist() == [2, 2]
    with pytest.raises(TypeError, match="go"):
        Abstract.remote()


def test_classes_of_functions_travel_by_value() -> None:
    factor = 3

    @actorrpc.remote
    class Local:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def times(self, n: int) -> int:
            with self.lock:
                return n * factor

    assert actorrpc.get(Local.remote().times.remote(4)) == 12


def test_a_definition_that_is_larger_than_a_frame_is_sent() -> None:
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
        assert actorrpc.get(actor.length.remote()) == len(table)
        assert actorrpc.get(actor.length.remote(Plain())) == len(table)
        assert type(actorrpc.get(actor.make.remote(Plain))) is Plain
    assert actorrpc.get(actorrpc.remote(Plain.length).remote(Plain())) == len(table)
    assert actorrpc.get(actorrpc.remote(lambda: Plain().length()).remote()) == len(table)
    assert type(actorrpc.get(actorrpc.put(Plain()))) is Plain
    me = actorrpc.get_worker_info().name
    assert actorrpc.rpc_sync(me, Plain.length, (Plain(),)) == len(table)


def test_contexts() -> None:
    actor = Contexts.options(name="contexts").remote()
    found = actorrpc.get(actor.look.remote())
    assert found == (actor.actor_id, "contexts", actorrpc.get_worker_info().name)
    assert actorrpc.get(actor.me.remote()) == actor
    with pytest.raises(RuntimeError, match="outside"):
        actorrpc.current_actor()
    with pytest.raises(RuntimeError, match="outside"):
        actorrpc.exit_actor()
    assert actorrpc.get_runtime_context().actor_id is None
    assert actorrpc.get(actor.later.remote()) == actor


@actorrpc.remote
class Contexts:
    def look(self) -> Any:
        context = actorrpc.get_runtime_context()
        assert context.caller is not None
        return context.actor_id, context.actor_name, context.caller.name

    def me(self) -> Any:
        return actorrpc.current_actor()

    async def later(self) -> Any:
        return actorrpc.current_actor()


def test_pending_calls_are_limited() -> None:
    gate = kit.Gate.options(max_pending_calls=3).remote()
    waiting = [gate.wait.remote() for _ in range(3)]
    with pytest.raises(actorrpc.PendingCallsLimitExceeded, match="max_pending_calls=3"):
        gate.wait.remote()
    for ref in waiting:
        actorrpc.cancel(ref)
    actorrpc.get(gate.open.remote())
    assert actorrpc.get(gate.wait.remote()) == "open"
