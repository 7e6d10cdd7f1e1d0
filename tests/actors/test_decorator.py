"""``remote`` as a decorator of classes and functions, as torch's function, and its errors."""

from __future__ import annotations

import operator
import pickle
from typing import Any

import pytest

import actorrpc
from actorrpc import RRef, WorkerInfo
from actorrpc.errors import ConfigError
from actorrpc.serialization import codec
from tests.actors import things

Remote: Any = actorrpc.remote


# -- as a decorator ------------------------------------------------------------------------------------------------


class Plain:
    pass


def plain(a: int, b: int = 2) -> int:
    """Add."""
    return a + b


def test_options_of_an_actor_class_are_set_and_combined() -> None:
    assert Remote(num_cpus=2, name="x")(Plain) == Remote(Plain).options(num_cpus=2, name="x") != Remote(Plain)
    assert Remote(timeout=3)(Remote(num_cpus=1)(Plain)) == Remote(Plain).options(num_cpus=1, timeout=3)


@actorrpc.remote
def pair(a: int) -> tuple[int, int]:
    return a, a + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda task: Remote(num_returns=2)(task.__wrapped__),
        lambda task: Remote(num_returns=2)(task),
        lambda task: Remote(task.options(num_returns=2)),
        lambda task: task.options(timeout=30).options(num_returns=2),
        lambda task: codec.loads(codec.dumps(task.options(num_returns=2))),
    ],
    ids=["remote", "remote of a task", "remote without options", "options", "pickle"],
)
def test_options_of_a_task_apply_to_a_new_task(one_worker: None, change: Any) -> None:
    first, second = change(pair).remote(3)
    assert actorrpc.get([first, second]) == [3, 4]
    assert actorrpc.get(pair.remote(3)) == (3, 4)


def test_wrong_options_of_remote_raise_at_once() -> None:
    with pytest.raises(ConfigError, match="'nam' is not an option"):
        Remote(nam="x")
    with pytest.raises(ConfigError, match="makes no sense here"):
        Remote(memory=1 << 30)
    with pytest.raises(ConfigError, match="num_cpus must be"):
        Remote(num_cpus="2")
    with pytest.raises(ConfigError, match=r"'labels' places actors.*method of an actor.*worker="):
        Remote(labels={"zone": "a"})(plain)
    # Options of the other kind raise when the object is known.
    with pytest.raises(ConfigError, match=r"not an option of a task.* option of an actor"):
        Remote(max_restarts=1)(plain)
    with pytest.raises(ConfigError, match=r"not an option of an actor.* option of a task"):
        Remote(max_retries=1)(Plain)
    with pytest.raises(ConfigError, match="not an option of a task"):
        things.add.options(max_restarts=1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Remote(), "needs a class or a function"),
        (lambda: Remote(Plain, num_cpus=1), r"options go into remote\(num_cpus=...\)\(Plain\)"),
        (lambda: Remote(Plain, 3), "takes nothing else"),
        (lambda: Remote(3.5), "is for classes and functions, not for 3.5"),
        (lambda: Remote(num_cpus=1)(3.5), "is for classes and functions, not for 3.5"),
        (lambda: Remote(staticmethod(plain)), "is for classes and functions"),
        (lambda: Remote(num_cpus=1)(staticmethod(plain)), "is for classes and functions"),
        (lambda: Remote("w1"), "give the function to call there.*remote"),
        (lambda: Remote(0), "give the function to call there.*remote"),
        (lambda: Remote(WorkerInfo("w", 0)), "give the function to call there.*remote"),
        (lambda: Remote(func=len), "no worker to call it on"),
    ],
)
def test_wrong_uses_of_remote_raise_with_advice(call: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()


# -- as torch's function ---------------------------------------------------------------------------------------------


def test_remote_with_a_worker_calls_a_function_as_in_torch(one_worker: None) -> None:
    info = actorrpc.get_worker_info()
    for to in ("w0", 0, info):
        rref = Remote(to, operator.add, (1, 2))
        assert isinstance(rref, RRef)
        assert rref.to_here() == 3
    assert Remote("w0", plain, (1,), {"b": 5}, 10).to_here() == 6
    assert Remote(to="w0", func=plain, args=(1,), kwargs={"b": 4}, timeout=5).to_here() == 5
    assert Remote("w0", func=plain, args=(1,)).to_here() == 3
    # As in torch, a class can be called like a function.
    assert Remote("w0", dict, (), {"a": 1}).to_here() == {"a": 1}


# -- tasks, without a runtime ---------------------------------------------------------------------------------------


def test_a_task_looks_like_its_function_and_is_called_with_remote_only() -> None:
    assert (things.add.__name__, things.add.__doc__, things.add.__module__) == (  # type: ignore[attr-defined]
        "add",
        "Add.",
        "tests.actors.things",
    )
    assert repr(things.add) == "<remote function add>"
    assert things.add.__wrapped__(1, 2) == 3
    with pytest.raises(TypeError, match=r"instead of add\(...\) write add.remote\(...\)"):
        things.add(1, 2)
    with pytest.raises(TypeError, match=r"add\(\) missing 1 required positional argument: 'a'"):
        things.add.remote()  # type: ignore[call-arg]
    assert not actorrpc.is_initialized()


def test_tasks_are_pickled_by_name_or_value() -> None:
    assert pickle.loads(pickle.dumps(things.add)) is things.add
    assert codec.loads(codec.dumps(Remote(lambda x: x + 1))).__wrapped__(1) == 2
