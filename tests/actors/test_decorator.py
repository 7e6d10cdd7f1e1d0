"""``remote``: which of its meanings is meant, and what is said where none is."""

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
def here(tmp_path: Path) -> Iterator[None]:
    with alone(tmp_path):
        yield


# -- a decorator ---------------------------------------------------------------------------------------------------


class Plain:
    pass


def plain(a: int, b: int = 2) -> int:
    """Add."""
    return a + b


def test_on_classes_and_functions() -> None:
    assert isinstance(Remote(Plain), ActorClass)
    assert isinstance(Remote(plain), RemoteFunction)
    assert isinstance(Remote(lambda: 1), RemoteFunction)
    assert isinstance(Remote(len), RemoteFunction)
    assert isinstance(Remote(partial(plain, 1)), RemoteFunction)


def test_with_options() -> None:
    assert Remote(num_cpus=2, name="x")(Plain)._actorrpc_options == ActorOptions(num_cpus=2, name="x")
    assert Remote(max_retries=1)(plain)._options == TaskOptions(max_retries=1)
    assert Remote(timeout=3)(Remote(num_cpus=1)(Plain))._actorrpc_options == ActorOptions(
        num_cpus=1, timeout=3
    )
    assert Remote(timeout=3)(Remote(plain))._options == TaskOptions(timeout=3)
    assert Remote(Remote(plain))._options == TaskOptions()


def test_wrong_options_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="'nam' is not an option"):
        Remote(nam="x")
    with pytest.raises(ConfigError, match="makes no sense here"):
        Remote(memory=1 << 30)
    with pytest.raises(ConfigError, match="num_cpus must be"):
        Remote(num_cpus="2")
    with pytest.raises(ConfigError, match=r"'labels' places actors.*method of an actor.*worker="):
        Remote(labels={"zone": "a"})(plain)
    # Of the one or the other: known when it is seen what it is for.
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
def test_what_it_is_not_for(call: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()


# -- torch's function ------------------------------------------------------------------------------------------------


def test_torchs_remote(here: None) -> None:
    info = actorrpc.get_worker_info()
    for to in ("w0", 0, info):
        rref = Remote(to, operator.add, (1, 2))
        assert isinstance(rref, RRef)
        assert rref.to_here() == 3
    assert Remote("w0", plain, (1,), {"b": 5}, 10).to_here() == 6
    assert Remote(to="w0", func=plain, args=(1,), kwargs={"b": 4}, timeout=5).to_here() == 5
    assert Remote("w0", func=plain, args=(1,)).to_here() == 3
    # A class is a function as any other, to torch.
    assert Remote("w0", dict, (), {"a": 1}).to_here() == {"a": 1}


def test_torchs_signature_is_still_there() -> None:
    import inspect

    theirs = inspect.signature(torch.distributed.rpc.remote).parameters
    ours = inspect.signature(actorrpc.rpc.remote).parameters
    assert list(theirs) == list(ours) == ["to", "func", "args", "kwargs", "timeout"]


# -- tasks, as far as nothing runs ----------------------------------------------------------------------------------


def test_a_task_looks_like_its_function() -> None:
    assert (things.add.__name__, things.add.__doc__, things.add.__module__) == (  # type: ignore[attr-defined]
        "add",
        "Add.",
        "tests.actors.things",
    )
    assert repr(things.add) == "<remote function add>"
    assert things.add.__wrapped__(1, 2) == 3


def test_calling_it_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"instead of add\(...\) write add.remote\(...\)"):
        things.add(1, 2)


def test_wrong_arguments_of_a_task_are_found_before_anything_is_sent() -> None:
    with pytest.raises(TypeError, match=r"add\(\) missing 1 required positional argument: 'a'"):
        things.add.remote()  # type: ignore[call-arg]
    assert not actorrpc.is_initialized()


def test_options_of_a_task() -> None:
    changed = things.add.options(max_retries=0, name="x")
    assert changed is not things.add
    assert changed._options == TaskOptions(max_retries=0, name="x")
    assert things.add._options == TaskOptions()
    with pytest.raises(ConfigError, match="not an option of a task"):
        things.add.options(max_restarts=1)


def test_tasks_travel() -> None:
    assert pickle.loads(pickle.dumps(things.add)) is things.add
    changed = codec.loads(codec.dumps(things.add.options(max_retries=7)))
    assert changed._options == TaskOptions(max_retries=7)
    assert changed.__wrapped__ is things.add.__wrapped__
    local = codec.loads(codec.dumps(Remote(lambda x: x + 1)))
    assert local.__wrapped__(1) == 2
