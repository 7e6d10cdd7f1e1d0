"""``actorrpc.Actor``: a class that inherits from it is what one below ``@remote`` is, and stays a class."""

from __future__ import annotations

import abc
import inspect
import pickle
import pydoc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import cloudpickle
import pytest
import torch

import actorrpc
from actorrpc.actors.client.actor_class import ActorClass
from actorrpc.actors.client.handle import ActorMethod
from actorrpc.actors.spec.class_info import ClassInfo
from actorrpc.actors.spec.options import ActorOptions
from actorrpc.errors import ConfigError
from tests.actors.alone import alone

T = TypeVar("T")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[None]:
    with alone(tmp_path):
        yield


class Counter(actorrpc.Actor, num_cpus=1, name="one", get_if_exists=True):
    """Counts."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    @actorrpc.method
    def add(self, k: int = 1, *, times: int = 1) -> int:
        """Add it."""
        self.count += k * times
        return self.count

    @actorrpc.method(num_returns=2)
    def two(self) -> tuple[int, int]:
        return self.count, self.count + 1

    @actorrpc.method
    def stream(self, n: int) -> Iterator[int]:
        for _ in range(n):
            yield self.add()

    @staticmethod
    def static(x: int) -> int:
        return 2 * x

    def plain(self) -> str:
        return "plain"


class More(Counter, max_restarts=2):
    @actorrpc.method
    def add(self, k: int = 1, *, times: int = 1, more: int = 0) -> int:
        return super().add(k, times=times) + more


@dataclass(slots=True)
class Point(actorrpc.Actor, timeout=7):
    x: int
    y: int = 1

    @actorrpc.method
    def sum(self) -> int:
        return self.x + self.y


class Model(actorrpc.Actor, torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found


class Box(actorrpc.Actor, Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    @actorrpc.method
    def get(self) -> T:
        return self.value


@actorrpc.remote
class Decorated:
    @actorrpc.method(priority=3)
    def value(self) -> int:
        return 1


class Based(Decorated, actorrpc.Actor):  # type: ignore[misc, valid-type, unused-ignore]
    @actorrpc.method
    def twice(self) -> int:
        return 2 * self.value()


@actorrpc.remote(num_cpus=2)
class Above(Counter):
    @actorrpc.method
    def own(self) -> int:
        return self.add(5)


def options(cls: Any) -> ActorOptions:
    found: ActorOptions = ActorClass(cls)._actorrpc_options
    return found


# -- as a class ----------------------------------------------------------------------------------------------------


def test_it_is_a_class_whose_instances_are_plain_objects() -> None:
    counter = Counter(3)
    assert isinstance(counter, Counter)
    assert counter.add(2, times=2) == 7
    assert list(counter.stream(2)) == [8, 9]
    assert More(1).add(1, more=5) == 7
    assert Point(1) == Point(1, 1)
    assert Model(2)(torch.zeros(2)).shape == (1,)


def test_what_is_a_remote_method_of_it() -> None:
    assert set(ClassInfo.of(Counter).methods) == {"add", "two", "stream", "static", "plain"}
    assert ClassInfo.of(Counter).methods["two"].options.num_returns == 2
    assert set(ClassInfo.of(Point).methods) >= {"sum"}
    assert not {"remote", "options", "group"} & set(ClassInfo.of(Model).methods)

    class Named:
        def group(self) -> int:
            return 1

    class Below(actorrpc.Actor, Named):
        pass

    class Beside(Named, actorrpc.Actor):
        pass

    assert "group" not in ClassInfo.of(Below).methods  # on an instance that is the base's
    assert "group" in ClassInfo.of(Beside).methods


def test_options_of_the_class() -> None:
    assert options(Counter) == ActorOptions(num_cpus=1, name="one", get_if_exists=True)
    # A name is that of one actor, and not of those of another class.
    assert options(More) == ActorOptions(num_cpus=1, max_restarts=2)
    assert options(Point) == ActorOptions(timeout=7)
    assert options(Model) == ActorOptions()
    made: Any = Counter.options(num_cpus=3)
    assert isinstance(made, ActorClass)
    assert made._actorrpc_options == ActorOptions(num_cpus=3, name="one", get_if_exists=True)
    assert actorrpc.remote(Counter) == Counter.options()
    again: Any = actorrpc.remote(num_cpus=3)(Counter)
    assert again == made


def test_wrong_options_are_refused_where_the_class_is_made() -> None:
    with pytest.raises(ConfigError, match=r"'num_cpu' is not an option of an actor.*num_cpus"):

        class Wrong(actorrpc.Actor, num_cpu=1):
            pass

    with pytest.raises(ConfigError, match="num_cpus must be"):

        class Bad(actorrpc.Actor, num_cpus="1"):
            pass


@pytest.mark.parametrize("name", ["remote", "options"])
def test_names_that_it_needs_itself(name: str) -> None:
    with pytest.raises(TypeError, match=f"Odd has a '{name}' of its own.*give it another name"):
        type("Odd", (actorrpc.Actor,), {name: lambda self: 1})
    with pytest.raises(TypeError, match=name):
        type("Odd", (type("Old", (), {name: 1}), actorrpc.Actor), {})


def test_wrong_arguments_are_found_before_anything_is_sent() -> None:
    with pytest.raises(TypeError, match=r"Counter.__init__\(\) got an unexpected keyword argument 'stop'"):
        Counter.remote(stop=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        Counter.options(name="x").remote(1, 2)  # type: ignore[call-arg]

    class Abstract(actorrpc.Actor, abc.ABC):
        @abc.abstractmethod
        def f(self) -> None: ...

    with pytest.raises(TypeError, match="abstract"):
        Abstract.remote()
    assert not actorrpc.is_initialized()


# -- pickling --------------------------------------------------------------------------------------------------------


def test_pickling() -> None:
    assert pickle.loads(pickle.dumps(Counter)) is Counter
    made = pickle.loads(pickle.dumps(Counter.options(num_cpus=3)))
    assert made == Counter.options(num_cpus=3)


def test_a_local_class_goes_by_value_with_its_options() -> None:
    class Local(actorrpc.Actor, num_cpus=2):
        def one(self) -> int:
            return 1

    copied = pickle.loads(cloudpickle.dumps(Local))
    assert copied is Local  # cloudpickle knows its own
    there = cloudpickle.dumps(Local)
    cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()
    copied = pickle.loads(there)
    assert copied is not Local
    assert issubclass(copied, actorrpc.Actor)
    assert options(copied) == ActorOptions(num_cpus=2)
    assert set(ClassInfo.of(copied).methods) == {"one"}


# -- actors --------------------------------------------------------------------------------------------------------


def test_actors_of_it(here: None) -> None:
    counter: Any = Counter.remote(10)
    assert isinstance(counter, actorrpc.ActorHandle)
    assert actorrpc.get(counter.add.remote(2)) == 12
    assert actorrpc.get(counter.add.remote(counter.add.remote(1), times=2)) == 39
    assert actorrpc.get(counter.two.remote()) == [39, 40]
    assert list(counter.stream.remote(2).values()) == [40, 41]
    assert actorrpc.get([counter.static.remote(4), counter.plain.remote()]) == [8, "plain"]
    with pytest.raises(TypeError, match=r"write handle.add.remote\(...\)"):
        counter.add(2)
    assert Counter.remote(99) == counter  # its name, and get_if_exists
    assert actorrpc.get_actor("one") == counter
    assert actorrpc.get(actorrpc.call(counter, Counter.add, 1)) == 42
    actorrpc.kill(counter)


def test_kinds_of_classes(here: None) -> None:
    more = More.remote(1)
    assert actorrpc.get(more.add.remote(1, more=3)) == 5
    assert actorrpc.get(Point.remote(2).sum.remote()) == 3
    assert actorrpc.get(Box[int].remote(3).get.remote()) == 3
    model: Any = Model.remote(2)
    assert model(torch.zeros(2)).shape == (1,)
    assert set(model.state_dict()) == {"layer.weight", "layer.bias"}
    group: Any = Point.group(2, 4)
    assert list(actorrpc.get(group.sum.call())) == [5, 5]


def test_a_decorated_and_a_based_class_inherit_from_each_other(here: None) -> None:
    assert ClassInfo.of(Based).methods["value"].options.priority == 3
    assert actorrpc.get(Based.remote().twice.remote()) == 2
    above: Any = Above
    assert above._actorrpc_options == ActorOptions(num_cpus=2)
    assert actorrpc.get(above.remote(1).own.remote()) == 6
    assert actorrpc.get(above.options(num_cpus=1).remote(1).own.remote()) == 6


# -- what is shown of methods ----------------------------------------------------------------------------------------


def test_a_method_of_a_handle_shows_the_docstring_and_the_signature(here: None) -> None:
    counter: Any = Counter.remote(1)
    for shown in (counter.add, counter.add.options(timeout=3), counter.add.remote):
        assert shown.__doc__ == "Add it."
        assert inspect.getdoc(shown) == "Add it."
        assert str(inspect.signature(shown)) == "(k: 'int' = 1, *, times: 'int' = 1) -> 'int'"
        assert shown.__name__ == "add"
    assert counter.plain.__doc__ is None
    assert str(inspect.signature(counter.static)) == "(x: 'int') -> 'int'"
    text = pydoc.render_doc(counter.add, renderer=pydoc.plaintext)
    assert "add(k: 'int' = 1, *, times: 'int' = 1) -> 'int'\n    Add it." in text
    assert {"add", "two", "stream", "kill"} <= set(dir(counter))
    assert "add" in dir(counter.rpc_sync())
    assert "remote" in dir(counter.add)
    # The class itself is documented as ever.
    assert (ActorMethod.__doc__ or "").startswith("A method of an actor")


def test_where_the_class_is_not_known_the_names_are_shown() -> None:
    info = pickle.loads(pickle.dumps(ClassInfo.of(Counter)))
    assert info is not ClassInfo.of(Counter)
    assert info.function("add") is vars(Counter)["add"]  # by its module
    assert pickle.loads(pickle.dumps(ClassInfo.of(Above.__actor_class__))).function("own").__name__ == "own"  # type: ignore[attr-defined]
    info.module = "nowhere"
    assert info.function("add") is None
    method = info.methods["add"]
    assert str(method.shown(info.function("add"))) == "(k=Ellipsis, *, times=Ellipsis)"


def test_remote_of_a_method_travels(here: None) -> None:
    counter: Any = Counter.remote(1)
    assert actorrpc.get(counter.add.remote(1)) == 2
    kept = counter.add.remote
    assert repr(kept) == f"<remote of {counter.add!r}>"
    again, args = kept.__reduce__()
    assert again(*args).__signature__ == kept.__signature__
