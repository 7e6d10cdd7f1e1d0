"""Functions are sent as a number once the peer knows it; the number still means the current function of that name."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from actorrpc.agent.agent import Agent
from actorrpc.agent.peers import Peer
from actorrpc.errors import ProtocolError, RefusedError
from actorrpc.serialization import numbered_functions
from actorrpc.serialization.numbered_functions import NumberedFunctions
from tests.agent.agents import agents


def add(a: int, b: int) -> int:
    return a + b


@pytest.fixture
def pair() -> Iterator[tuple[Agent, Peer, Peer]]:
    """The calling agent, its peer for the called agent, and the peer of the called agent for the caller."""
    with agents(2) as (caller, callee):
        caller.call_sync(caller.peer("a1"), operator.add, (1, 2), {}, 20.0)
        yield caller, caller.peer("a1"), callee.peer("a0")


@pytest.fixture
def module() -> Iterator[Any]:
    """A module with a function ``f``."""
    made = ModuleType("numbered")
    exec("def f():\n    return 'first'\n", made.__dict__)
    sys.modules["numbered"] = made
    yield made
    sys.modules.pop("numbered", None)


def test_only_functions_that_are_sent_by_name_get_numbers(
    pair: tuple[Agent, Peer, Peer], module: Any
) -> None:
    caller, to, _ = pair

    def local() -> int:
        return 1

    @functools.wraps(add)
    def wrapped(a: int, b: int) -> int:
        return a * b

    for function, arguments, value in (
        (local, (), 1),
        (lambda: 2, (), 2),
        (operator.add, (1, 2), 3),
        (functools.partial(add, 1), (3,), 4),
        (int, ("5",), 5),
    ):
        for _ in range(2):
            assert caller.call_sync(to, function, arguments, {}, 20.0) == value
    assert to.functions.numbers == {}
    assert to.functions.introduce(wrapped, False) is wrapped  # type: ignore[arg-type]
    # The name refers to another function now.
    stale = module.f
    exec("def f():\n    return 'second'\n", module.__dict__)
    assert to.functions.introduce(stale, False) is stale


def test_a_number_means_the_current_function_of_the_name_at_the_callee(
    pair: tuple[Agent, Peer, Peer], module: Any
) -> None:
    """Both agents are in this process, so they share the module."""
    caller, to, back = pair
    assert [caller.call_sync(to, module.f, (), {}, 20.0) for _ in range(2)] == ["first", "first"]
    introduced = module.f
    assert to.functions.numbers == {introduced: 0}
    # When the name refers to another function, the caller's function is sent by value, without a number.
    exec("def f():\n    return 'second'\n", module.__dict__)
    assert caller.call_sync(to, introduced, (), {}, 20.0) == "first"
    assert to.functions.numbers == {}
    assert caller.call_sync(to, module.f, (), {}, 20.0) == "second"
    # At each use, the callee looks the name up again.
    assert back.functions.learn((9, "numbered", "f")) is module.f
    module.f = lambda: "third"
    assert back.functions.find(9, "a0")() == "third"


def test_unknown_or_malformed_function_numbers_are_refused(pair: tuple[Agent, Peer, Peer]) -> None:
    caller, to, _ = pair
    caller.call_sync(to, add, (1, 2), {}, 20.0)
    to.functions.numbers[add] = 17
    with pytest.raises(ProtocolError, match="number 17, which it has not introduced"):
        caller.call_sync(to, add, (1, 2), {}, 20.0)
    to.functions.numbers[add] = 0
    assert caller.call_sync(to, add, (1, 2), {}, 20.0) == 3
    table = NumberedFunctions()
    for introduced in (
        (1,),
        ("x", add),
        (True, add),
        (-1, add),
        (2 * numbered_functions.MOST, add),
        (1, add, 2),
    ):
        with pytest.raises(ProtocolError, match="which function"):
            table.learn(introduced)
    assert table.names == {}


def test_data_only_workers_refuse_function_numbers() -> None:
    with agents(2, data_only=True) as (caller, callee):
        to = caller.peer("a1")
        assert to.functions.introduce(add, to.same_main) is add  # type: ignore[arg-type]
        with pytest.raises(RefusedError, match="no numbers here"):
            callee.executor._learn(callee.peer("a0"), (0, __name__, "add"))
