"""The rows of docs/migration/from-monarch.md that no test elsewhere is marked with."""

from __future__ import annotations

import collections
from typing import Any

import pytest

import actorrpc
from actorrpc import get
from tests.actors import things
from tests.actors.e2e.kit import until
from tests.cluster.joiners import is_there, joiner
from tests.migration.rows import row


class Worker:
    """A class without decorator."""

    def __init__(self, base: int = 0) -> None:
        self.base = base
        self.rank = actorrpc.current_rank()["gpus"]

    def add(self, x: int) -> int:
        return int(self.base + self.rank + x)


@pytest.mark.usefixtures("near")
@row("class A(Actor)", "from-monarch")
def test_any_class_can_be_an_actor_with_all_its_methods() -> None:
    counted = actorrpc.remote(collections.Counter).remote("abca")  # a class of another library
    assert get(counted.most_common.remote(1)) == [("a", 2)]
    assert get(things.Counter.remote().add.remote()) == 1  # a decorated class


@pytest.mark.usefixtures("passing")
@row("__supervise__(self, failure)", "from-monarch")
@pytest.mark.prints("it has given up")
def test_monitors_and_on_failure_are_called_once() -> None:
    log: list[Any] = []
    group = actorrpc.spawn({"gpus": 2}, Worker, options={"max_restarts": -1})
    first, second = group
    get(group.add.call(1))
    actorrpc.monitor(second, log.append)
    given_up: list[Any] = []
    supervision = actorrpc.supervise(group, max_restarts=1, on_failure=given_up.append)
    first.kill(no_restart=False)
    get(first.add.remote(1))
    first.kill(no_restart=False)
    assert isinstance(supervision.monitor().wait(60), actorrpc.SupervisionError)
    until(lambda: given_up and log)
    [error] = given_up
    assert str(error).count("it was killed with kill()") >= 2
    assert [type(each) for each in log] == [actorrpc.ActorDiedError]


@pytest.mark.slow
@row("setup of hosts by HostMesh", "from-monarch")
def test_a_worker_joins_by_a_command() -> None:
    with (
        actorrpc.init(listen="tcp://127.0.0.1:0") as context,
        joiner(context.address, "--name", "there"),
    ):
        until(lambda: is_there("there"))
        actor = things.Counter.options(worker="there").remote()
        assert get(actor.add.remote()) == 1
        del actor
