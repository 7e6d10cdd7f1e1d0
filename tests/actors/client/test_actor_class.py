"""Actor classes: what the decorator makes of a class, and making actors."""

from __future__ import annotations

import abc
import copy
import gc
import inspect
import pickle
import sys
import typing
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc.actors.client.actor_class import ActorClass
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.spec.options import ActorOptions
from actorrpc.errors import ActorDiedError, ConfigError, NotInitializedError, RemoteError
from actorrpc.serialization import codec
from tests.actors import things
from tests.actors.alone import alone


@pytest.fixture
def here(tmp_path: Path) -> Iterator[None]:
    with alone(tmp_path):
        yield


# -- as a class --------------------------------------------------------------------------------------------------


def test_it_looks_like_its_class() -> None:
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


def test_calling_it_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"instead of Counter\(...\) write Counter.remote\(...\)"):
        things.Counter(1)  # type: ignore[operator]


def test_attributes_are_set_on_the_class() -> None:
    @actorrpc.remote
    class Actor:
        pass

    Actor.x = 3
    assert Actor.__actor_class__.x == 3
    del Actor.x
    assert not hasattr(Actor.__actor_class__, "x")


def test_annotations_with_it() -> None:
    Counter: Any = things.Counter
    plain = Counter.__actor_class__
    assert Counter | None == typing.Optional[plain]  # noqa: UP045
    assert None | Counter == typing.Optional[plain]  # noqa: UP045
    assert list[Counter] is not None
    assert typing.Optional[Counter]  # noqa: UP045


def test_inheritance_between_actor_classes() -> None:
    Counter, Double = things.Counter.__actor_class__, things.DoubleCounter.__actor_class__
    assert Double.__mro__[1] is Counter

    class Plain(things.Counter):  # type: ignore[misc]
        def __init__(self) -> None:
            things.Counter.__init__(self, 7)  # as code of before super() has it

    assert Plain().n == 7
    assert issubclass(Plain, Counter)
    made = ActorClass(Plain)
    assert made.STEP == 1


def test_a_generic_class() -> None:
    Box: Any = things.Box
    alias = Box[int]
    assert isinstance(alias, ActorClass)
    assert alias.__actor_class__ is Box.__actor_class__

    class Ints(alias):  # type: ignore[misc]
        pass

    assert Ints.__mro__[1] is Box.__actor_class__
    assert Ints.__orig_bases__[0] is alias


def test_dataclass_over_it() -> None:
    @dataclass
    @actorrpc.remote
    class Point:
        x: int

    assert isinstance(Point, ActorClass)
    assert Point.__actor_class__(3).x == 3


def test_options_make_another_one() -> None:
    named = things.Counter.options(name="x", max_restarts=2)
    assert named is not things.Counter
    assert named != things.Counter
    assert named == things.Counter.options(name="x", max_restarts=2)
    assert hash(named) == hash(things.Counter)
    assert named._actorrpc_options == ActorOptions(name="x", max_restarts=2)
    assert things.Counter._actorrpc_options == ActorOptions()
    with pytest.raises(ConfigError, match="not an option of an actor"):
        things.Counter.options(nmae="x")


def test_it_is_made_of_classes_only() -> None:
    with pytest.raises(TypeError, match="is made of a class, not of 3"):
        ActorClass(3)  # type: ignore[arg-type]


# -- pickling ----------------------------------------------------------------------------------------------------


def test_pickling_goes_by_name_where_the_module_has_it() -> None:
    assert pickle.loads(pickle.dumps(things.Counter)) is things.Counter
    assert codec.loads(codec.dumps(things.Counter)) is things.Counter
    named = codec.loads(codec.dumps(things.Counter.options(name="x")))
    assert named == things.Counter.options(name="x")
    assert named.__actor_class__ is things.Counter.__actor_class__
    assert copy.copy(things.Counter) is things.Counter
    assert copy.deepcopy(things.Counter) is things.Counter


def test_the_class_goes_by_name_as_well() -> None:
    # A copy of the class would not be the one that the module's functions know.
    opened = Snapshot.of(things.Counter.options(name="x")).open()
    assert opened.__actor_class__ is things.Counter.__actor_class__


def test_a_local_class_goes_by_value() -> None:
    @actorrpc.remote
    class Local:
        def other(self) -> Any:
            return Local  # itself, by the name that it has where it is defined

    arrived = codec.loads(codec.dumps(Local.options(num_cpus=1)))
    assert arrived.__qualname__ == Local.__qualname__
    assert arrived._actorrpc_options == ActorOptions(num_cpus=1)
    opened = Snapshot.of(Local).open().__actor_class__
    assert opened().other().__actor_class__ is opened


def test_a_class_of_the_main_module_stays_itself_when_its_name_goes_to_another(
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


def test_wrong_arguments_are_found_before_anything_is_sent() -> None:
    # Nothing is started for these: that would be seen as left behind.
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'stat'"):
        things.Counter.remote(stat=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'value'"):
        things.Box.remote()  # type: ignore[call-arg]
    assert not actorrpc.is_initialized()


def test_hooks_that_cannot_be_used_are_refused() -> None:
    @actorrpc.remote
    class Keeps:
        async def checkpoint(self) -> int:
            return 1

        def restore(self, state: int) -> None:
            pass

    with pytest.raises(TypeError, match=r"checkpoint\(\) and restore\(state\) must be plain methods"):
        Keeps.remote()


def test_an_abstract_class_is_refused() -> None:
    @actorrpc.remote
    class Abstract(abc.ABC):
        @abc.abstractmethod
        def m(self) -> None: ...

    with pytest.raises(
        TypeError, match=r"Can't instantiate abstract class .*Abstract with abstract methods m"
    ):
        Abstract.remote()


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs a name="):
        things.Counter.options(get_if_exists=True).remote()
    with pytest.raises(ConfigError, match=r"Chatty.io is in the concurrency group 'io'"):
        things.Chatty.options(concurrency_groups={"cpu": 1}).remote()


def test_kinds_of_classes(here: None) -> None:
    get = actorrpc.get
    assert get(things.Counter.remote(1, step=2).add.remote(3)) == 7
    double = things.DoubleCounter.remote(10)
    assert get(double.twice.remote()) == 14
    assert get(double.is_one.remote()) == (True, True)
    assert get(things.Counter.remote().is_one.remote()) == (True, False)
    assert get(things.Pair.remote(1).sum.remote()) == 3
    assert get(things.Box.remote("x").get.remote()) == "x"
    Box: Any = things.Box
    assert get(Box[int].remote(3).get.remote()) == 3
    aio = things.Aio.remote()
    assert get(aio.add.remote(1, b=3)) == 4
    assert [get(ref) for ref in aio.stream.remote(3)] == [0, 1, 2]
    counter = things.Counter.remote()
    assert get(counter.made.remote(4)) == "Counter4"
    assert get(counter.static.remote(4)) == 8
    net = things.Net.remote(3)
    x = torch.ones(2, 3)
    assert get(net.__call__.remote(x)).shape == (2, 1)
    assert get(net.forward.remote(x)).shape == (2, 1)


def test_a_plain_class_made_remote_by_hand(here: None) -> None:
    class Local:
        def __init__(self, *, x: int) -> None:
            self.x = x

        def get(self) -> int:
            return self.x

    made = actorrpc.remote(Local)
    assert actorrpc.get(made.remote(x=3).get.remote()) == 3
    assert actorrpc.get(actorrpc.remote(num_cpus=1)(Local).remote(x=4).get.remote()) == 4


def test_arguments_are_taken_as_they_are(here: None) -> None:
    parts = [1]
    box = things.Box.remote(parts)
    parts.append(2)
    assert actorrpc.get(box.get.remote()) == [1]
    ref = actorrpc.put("big")
    assert actorrpc.get(things.Box.remote(ref).get.remote()) == "big"


def test_what_the_constructor_raises_is_the_cause_of_every_error(here: None) -> None:
    picky = things.Picky.remote()
    for _ in range(2):
        with pytest.raises(ActorDiedError, match="not today") as caught:
            actorrpc.get(picky.m.remote())
        assert isinstance(caught.value.cause, ValueError)
    with pytest.raises(ActorDiedError):
        actorrpc.get(actorrpc.ready(picky))
    assert actorrpc.get(things.Picky.remote(fail=False).m.remote()) == 1


def test_get_if_exists(here: None) -> None:
    named = things.Counter.options(name="one", get_if_exists=True)
    first = named.remote(3)
    second = named.remote(4)
    assert first == second
    assert actorrpc.get(second.add.remote()) == 4


def test_nothing_runs_and_nothing_can_be_started() -> None:
    from actorrpc.actors import context as runtimes

    start, runtimes._autostart = runtimes._autostart, None
    try:
        with pytest.raises(NotInitializedError, match=r"call actorrpc.init\(\)"):
            things.Counter.remote()
    finally:
        runtimes._autostart = start


def test_errors_keep_their_type(here: None) -> None:
    counter = things.Counter.remote()
    with pytest.raises(KeyError) as caught:
        actorrpc.get(counter.boom.remote())
    assert isinstance(caught.value, RemoteError)
    assert isinstance(caught.value.cause, KeyError)
