"""Actor classes made by ``@remote`` or by inheriting from ``actorrpc.Actor``: attributes, options, pickling, creation."""

from __future__ import annotations

import abc
import copy
import gc
import inspect
import pickle
import pydoc
import sys
import typing
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest
import torch

import actorrpc
from actorrpc.actors import context as runtimes
from actorrpc.actors.client.actor_class import ActorClass
from actorrpc.actors.client.handle import ActorMethod
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.spec.class_info import ClassInfo
from actorrpc.actors.spec.options import ActorOptions
from actorrpc.errors import ConfigError, NotInitializedError
from actorrpc.serialization import codec
from tests.actors import things
from tests.migration.rows import row

# -- as a class --------------------------------------------------------------------------------------------------


def test_an_actor_class_shows_the_attributes_of_the_decorated_class() -> None:
    Counter = things.Counter
    assert isinstance(Counter, ActorClass)
    assert (Counter.__name__, Counter.__qualname__, Counter.__module__) == (
        "Counter",
        "Counter",
        "tests.actors.things",
    )
    assert Counter.__doc__ == "Counts."
    assert repr(Counter) == "<actor class Counter>"
    assert inspect.isclass(Counter.__actor_class__)
    assert Counter.STEP == 1
    assert Counter.static(3) == 6
    assert Counter.made(4) == "Counter4"
    assert "add" in dir(Counter)
    assert "remote" in dir(Counter)
    with pytest.raises(AttributeError, match="nothing"):
        _ = Counter.nothing
    assert isinstance(Counter.__actor_class__(1), Counter)  # type: ignore[misc, arg-type]
    assert not isinstance(1, Counter)  # type: ignore[misc, arg-type]
    assert issubclass(things.DoubleCounter, Counter)  # type: ignore[misc, arg-type]
    assert not issubclass(Counter, things.DoubleCounter)  # type: ignore[misc, arg-type]


def test_calling_an_actor_class_directly_raises_and_names_remote() -> None:
    with pytest.raises(TypeError, match=r"instead of Counter\(...\) write Counter.remote\(...\)"):
        things.Counter(1)  # type: ignore[operator]


def test_setting_an_attribute_of_an_actor_class_sets_it_on_the_decorated_class() -> None:
    @actorrpc.remote
    class Actor:
        pass

    Actor.x = 3
    assert Actor.__actor_class__.x == 3
    del Actor.x
    assert not hasattr(Actor.__actor_class__, "x")


def test_an_actor_class_can_be_used_in_annotations() -> None:
    Counter: Any = things.Counter
    plain = Counter.__actor_class__
    assert Counter | None == typing.Optional[plain]  # noqa: UP045
    assert None | Counter == typing.Optional[plain]  # noqa: UP045
    assert list[Counter] is not None
    assert typing.Optional[Counter]  # noqa: UP045


def test_a_generic_actor_class_can_be_subscripted_and_subclassed() -> None:
    Box: Any = things.Box
    alias = Box[int]
    assert isinstance(alias, ActorClass)
    assert alias.__actor_class__ is Box.__actor_class__

    class Ints(alias):  # type: ignore[misc]
        pass

    assert Ints.__mro__[1] is Box.__actor_class__
    assert Ints.__orig_bases__[0] is alias


def test_options_return_a_new_actor_class() -> None:
    named = things.Counter.options(name="x", max_restarts=2)
    assert named is not things.Counter
    assert named != things.Counter
    assert named == things.Counter.options(name="x", max_restarts=2)
    assert hash(named) == hash(things.Counter)
    assert options(named) == ActorOptions(name="x", max_restarts=2)
    assert options(things.Counter) == ActorOptions()
    with pytest.raises(ConfigError, match="not an option of an actor"):
        things.Counter.options(nmae="x")
    with pytest.raises(TypeError, match="is made of a class, not of 3"):
        ActorClass(3)  # type: ignore[arg-type]


# -- pickling ----------------------------------------------------------------------------------------------------


def test_an_actor_class_of_a_module_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(things.Counter)) is things.Counter
    assert pickle.loads(pickle.dumps(Counter)) is Counter
    assert codec.loads(codec.dumps(things.Counter)) is things.Counter
    named = codec.loads(codec.dumps(things.Counter.options(name="x")))
    assert named == things.Counter.options(name="x")
    assert named.__actor_class__ is things.Counter.__actor_class__
    assert copy.copy(things.Counter) is things.Counter
    assert copy.deepcopy(things.Counter) is things.Counter


def test_a_local_actor_class_is_pickled_by_value() -> None:
    @actorrpc.remote
    class Local:
        def other(self) -> Any:
            return Local  # refers to itself by its local name

    arrived = codec.loads(codec.dumps(Local.options(num_cpus=1)))
    assert arrived.__qualname__ == Local.__qualname__
    assert options(arrived) == ActorOptions(num_cpus=1)
    opened = Snapshot.of(Local).open().__actor_class__
    assert opened().other().__actor_class__ is opened


def test_a_class_of_main_is_not_confused_with_a_later_class_of_the_same_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def define() -> ActorClass[Any, Any]:
        made = type("Model", (), {"__module__": "__main__", "__qualname__": "Model"})
        monkeypatch.setattr(sys.modules["__main__"], "Model", made, raising=False)
        return ActorClass(made)

    first, second = define(), define()
    before = Snapshot.of(second)
    third = define()
    assert before.open() == second
    for each in (first, second, third):
        assert Snapshot.of(each).open() == each
    gone = weakref.ref(third.__actor_class__)
    monkeypatch.undo()
    del each, third
    gc.collect()
    assert gone() is None


# -- making actors -------------------------------------------------------------------------------------------------


def test_an_async_checkpoint_method_is_refused() -> None:
    @actorrpc.remote
    class Keeps:
        async def checkpoint(self) -> int:
            return 1

        def restore(self, state: int) -> None:
            pass

    with pytest.raises(TypeError, match=r"checkpoint\(\) and restore\(state\) must be plain methods"):
        Keeps.remote()


def test_contradictory_actor_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs a name="):
        things.Counter.options(get_if_exists=True).remote()
    with pytest.raises(ConfigError, match="process of the actor's own"):
        things.Counter.options(worker="w", env={"A": "1"}).remote()
    with pytest.raises(ConfigError, match="'io' is not one of concurrency_groups, which are: 'cpu'"):
        things.Counter.options(concurrency_group="io", concurrency_groups={"cpu": 1}).remote()
    with pytest.raises(ConfigError, match=r"Chatty.io is in the concurrency group 'io'"):
        things.Chatty.options(concurrency_groups={"cpu": 1}).remote()


def test_remote_and_put_without_init_raise_if_autostart_is_off() -> None:
    start = runtimes.set_autostart(None)
    try:
        for call in (things.Counter.remote, lambda: actorrpc.put(1)):
            with pytest.raises(NotInitializedError, match=r"call actorrpc.init\(\)"):
                call()
    finally:
        runtimes.set_autostart(start)


# -- classes that inherit from actorrpc.Actor ----------------------------------------------------------------

T = TypeVar("T")


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
    found: ActorOptions = (cls if isinstance(cls, ActorClass) else ActorClass(cls))._actorrpc_options
    return found


# -- as a class ----------------------------------------------------------------------------------------------------


def test_remote_methods_of_an_actor_subclass_do_not_include_those_of_actor() -> None:
    assert set(ClassInfo.of(Counter).methods) == {"add", "two", "stream", "static", "plain"}
    assert ClassInfo.of(Counter).methods["two"].options.num_returns == 2
    assert set(ClassInfo.of(Point).methods) >= {"sum"}
    assert not {"remote", "options", "group"} & set(ClassInfo.of(Model).methods)


def test_class_keywords_set_options_and_are_inherited_except_the_name() -> None:
    assert options(Counter) == ActorOptions(num_cpus=1, name="one", get_if_exists=True)
    # A subclass does not inherit name and get_if_exists: a name belongs to one actor.
    assert options(More) == ActorOptions(num_cpus=1, max_restarts=2)
    assert options(Point) == ActorOptions(timeout=7)
    assert options(Model) == ActorOptions()
    made: Any = Counter.options(num_cpus=3)
    assert isinstance(made, ActorClass)
    assert options(made) == ActorOptions(num_cpus=3, name="one", get_if_exists=True)
    assert actorrpc.remote(Counter) == Counter.options()
    again: Any = actorrpc.remote(num_cpus=3)(Counter)
    assert again == made


def test_wrong_class_keywords_raise_at_the_class_definition() -> None:
    with pytest.raises(ConfigError, match=r"'num_cpu' is not an option of an actor.*num_cpus"):

        class Wrong(actorrpc.Actor, num_cpu=1):
            pass


@pytest.mark.parametrize("name", ["remote", "options"])
def test_a_method_or_attribute_called_remote_or_options_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"Odd has a '{name}' of its own.*give it another name"):
        type("Odd", (actorrpc.Actor,), {name: lambda self: 1})
    with pytest.raises(TypeError, match=name):
        type("Odd", (type("Old", (), {name: 1}), actorrpc.Actor), {})


def test_wrong_constructor_arguments_raise_before_anything_is_sent() -> None:
    for counter in (Counter, things.Counter):
        with pytest.raises(
            TypeError, match=r"Counter.__init__\(\) got an unexpected keyword argument 'stop'"
        ):
            counter.remote(stop=1)  # type: ignore[call-arg, attr-defined]
    with pytest.raises(TypeError, match="positional"):
        Counter.options(name="x").remote(1, 2)  # type: ignore[call-arg]

    class Abstract(actorrpc.Actor, abc.ABC):
        @abc.abstractmethod
        def f(self) -> None: ...

    with pytest.raises(TypeError, match="abstract"):
        Abstract.remote()
    assert not actorrpc.is_initialized()


# -- actors --------------------------------------------------------------------------------------------------------


@row(".remote is Any to a type checker", "from-ray")
def test_actors_of_an_actor_subclass_answer_all_kinds_of_calls(one_worker: None) -> None:
    counter: Any = Counter.remote(10)
    assert isinstance(counter, actorrpc.ActorHandle)
    assert actorrpc.get(counter.add.remote(2)) == 12
    assert actorrpc.get(counter.add.remote(counter.add.remote(1), times=2)) == 39
    assert actorrpc.get(counter.two.remote()) == [39, 40]
    assert list(counter.stream.remote(2).values()) == [40, 41]
    assert actorrpc.get([counter.static.remote(4), counter.plain.remote()]) == [8, "plain"]
    with pytest.raises(TypeError, match=r"write handle.add.remote\(...\)"):
        counter.add(2)
    assert Counter.remote(99) == counter  # because of name= and get_if_exists=
    assert actorrpc.get_actor("one") == counter
    assert actorrpc.get(actorrpc.call(counter, Counter.add, 1)) == 42
    actorrpc.kill(counter)


def test_dataclasses_generics_and_modules_that_inherit_from_actor_run_as_actors(one_worker: None) -> None:
    more = More.remote(1)
    assert actorrpc.get(more.add.remote(1, more=3)) == 5
    double = things.DoubleCounter.remote(10)
    assert actorrpc.get([double.twice.remote(), double.is_one.remote()]) == [14, (True, True)]
    assert actorrpc.get(double.made.remote(4)) == "DoubleCounter4"
    assert actorrpc.get(things.Pair.remote(1).sum.remote()) == 3
    assert actorrpc.get(Point.remote(2).sum.remote()) == 3
    assert actorrpc.get(Box[int].remote(3).get.remote()) == 3
    model: Any = Model.remote(2)
    assert model(torch.zeros(2)).shape == (1,)
    assert set(model.state_dict()) == {"layer.weight", "layer.bias"}
    group: Any = Point.group(2, 4)
    assert list(actorrpc.get(group.sum.call())) == [5, 5]


def test_decorated_classes_and_actor_subclasses_can_inherit_from_each_other(one_worker: None) -> None:
    assert ClassInfo.of(Based).methods["value"].options.priority == 3
    assert actorrpc.get(Based.remote().twice.remote()) == 2
    above: Any = Above
    assert options(above) == ActorOptions(num_cpus=2)
    assert actorrpc.get(above.remote(1).own.remote()) == 6
    assert actorrpc.get(above.options(num_cpus=1).remote(1).own.remote()) == 6


# -- docstrings and signatures of methods ----------------------------------------------------------------------------


def test_a_method_of_a_handle_shows_the_docstring_and_the_signature(one_worker: None) -> None:
    counter: Any = Counter.remote(1)
    for shown in (counter.add, counter.add.options(timeout=3), counter.add.remote):
        assert shown.__doc__ == "Add it."
        assert inspect.getdoc(shown) == "Add it."
        assert str(inspect.signature(shown)) == "(k: 'int' = 1, *, times: 'int' = 1) -> 'int'"
        assert shown.__name__ == "add"
    assert counter.plain.__doc__ is None
    assert str(inspect.signature(counter.static)) == "(x: 'int') -> 'int'"
    text = pydoc.render_doc(counter.add, renderer=pydoc.plaintext)
    text = text.replace("'", "")  # from Python 3.14 on, pydoc shows annotations without quotes
    assert "add(k: int = 1, *, times: int = 1) -> int\n    Add it." in text
    assert {"add", "two", "stream", "kill"} <= set(dir(counter))
    assert "add" in dir(counter.rpc_sync())
    assert "remote" in dir(counter.add)
    # ActorMethod keeps its own docstring.
    assert (ActorMethod.__doc__ or "").startswith("A method of an actor")


def test_a_signature_shows_parameter_names_where_the_class_cannot_be_imported() -> None:
    info = pickle.loads(pickle.dumps(ClassInfo.of(Counter)))
    assert info is not ClassInfo.of(Counter)
    assert info.function("add") is vars(Counter)["add"]  # imported from its module
    assert pickle.loads(pickle.dumps(ClassInfo.of(Above.__actor_class__))).function("own").__name__ == "own"  # type: ignore[attr-defined]
    info.module = "nowhere"
    assert info.function("add") is None
    method = info.methods["add"]
    assert str(method.shown(info.function("add"))) == "(k=Ellipsis, *, times=Ellipsis)"
