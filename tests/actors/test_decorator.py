"""``remote`` as a decorator of classes and functions, as torch's function, and its errors."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.rpc

import actorrpc
from actorrpc import RRef, WorkerInfo
from actorrpc.actors.client.actor_class import ActorClass
from actorrpc.actors.library.tasks import RemoteFunction
from actorrpc.actors.spec.options import ActorOptions, TaskOptions
from actorrpc.errors import ConfigError
from actorrpc.serialization import codec
from tests.actors import things
from tests.actors.alone import alone

Remote: Any = actorrpc.remote


@pytest.fixture
def one_worker(tmp_path: Path) -> Iterator[None]:
    with alone(tmp_path):
        yield


# -- as a decorator ------------------------------------------------------------------------------------------------


class Plain:
    pass


def plain(a: int, b: int = 2) -> int:
    """Add."""
    return a + b


def test_remote_makes_actor_classes_of_classes_and_tasks_of_callables() -> None:
    assert isinstance(Remote(Plain), ActorClass)
    assert isinstance(Remote(plain), RemoteFunction)
    assert isinstance(Remote(lambda: 1), RemoteFunction)
    assert isinstance(Remote(len), RemoteFunction)
    assert isinstance(Remote(partial(plain, 1)), RemoteFunction)


def test_options_of_remote_are_set_and_combined() -> None:
    assert Remote(num_cpus=2, name="x")(Plain)._actorrpc_options == ActorOptions(num_cpus=2, name="x")
    assert Remote(max_retries=1)(plain)._options == TaskOptions(max_retries=1)
    assert Remote(timeout=3)(Remote(num_cpus=1)(Plain))._actorrpc_options == ActorOptions(
        num_cpus=1, timeout=3
    )
    assert Remote(timeout=3)(Remote(plain))._options == TaskOptions(timeout=3)
    assert Remote(Remote(plain))._options == TaskOptions()


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


def test_rpc_remote_has_the_signature_of_torchs_function() -> None:
    import inspect

    theirs = inspect.signature(torch.distributed.rpc.remote).parameters
    ours = inspect.signature(actorrpc.rpc.remote).parameters
    assert list(theirs) == list(ours) == ["to", "func", "args", "kwargs", "timeout"]


# -- tasks, without a runtime ---------------------------------------------------------------------------------------


def test_a_task_has_the_name_and_docstring_of_its_function() -> None:
    assert (things.add.__name__, things.add.__doc__, things.add.__module__) == (  # type: ignore[attr-defined]
        "add",
        "Add.",
        "tests.actors.things",
    )
    assert repr(things.add) == "<remote function add>"
    assert things.add.__wrapped__(1, 2) == 3


def test_calling_a_task_directly_raises_and_names_remote() -> None:
    with pytest.raises(TypeError, match=r"instead of add\(...\) write add.remote\(...\)"):
        things.add(1, 2)


def test_wrong_arguments_of_a_task_raise_before_anything_is_sent() -> None:
    with pytest.raises(TypeError, match=r"add\(\) missing 1 required positional argument: 'a'"):
        things.add.remote()  # type: ignore[call-arg]
    assert not actorrpc.is_initialized()


def test_options_of_a_task_return_a_new_task() -> None:
    changed = things.add.options(max_retries=0, name="x")
    assert changed is not things.add
    assert changed._options == TaskOptions(max_retries=0, name="x")
    assert things.add._options == TaskOptions()
    with pytest.raises(ConfigError, match="not an option of a task"):
        things.add.options(max_restarts=1)


def test_tasks_are_pickled_by_name_or_value_with_their_options() -> None:
    assert pickle.loads(pickle.dumps(things.add)) is things.add
    changed = codec.loads(codec.dumps(things.add.options(max_retries=7)))
    assert changed._options == TaskOptions(max_retries=7)
    assert changed.__wrapped__ is things.add.__wrapped__
    local = codec.loads(codec.dumps(Remote(lambda x: x + 1)))
    assert local.__wrapped__(1) == 2
