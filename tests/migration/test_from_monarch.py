"""The rows of docs/migration/from-monarch.md that no test elsewhere is marked with."""

from __future__ import annotations

import collections

import pytest

import actorrpc
from actorrpc import get
from tests.actors import things
from tests.migration.rows import row


@pytest.mark.usefixtures("near")
@row("class A(Actor)", "from-monarch")
def test_any_class_can_be_an_actor_with_all_its_methods() -> None:
    counted = actorrpc.remote(collections.Counter).remote("abca")  # a class of another library
    assert get(counted.most_common.remote(1)) == [("a", 2)]
    assert get(things.Counter.remote().add.remote()) == 1  # a decorated class


@pytest.mark.usefixtures("passing")
@row("__supervise__(self, failure)", "from-monarch")
@pytest.mark.prints("it has given up")
def test_an_actor_group_can_be_supervised() -> None:
    group = actorrpc.spawn(2, things.Counter, options={"max_restarts": -1})
    get(group.add.call())
    first, second = group
    supervision = actorrpc.supervise(group, max_restarts=0)
    second.kill(no_restart=False)
    assert isinstance(supervision.monitor().wait(60), actorrpc.SupervisionError)
    assert not first.is_alive()
