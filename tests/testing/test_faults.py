"""Fault objects without workers: the messages that they match, how often, invalid arguments, and faults as text."""

from __future__ import annotations

import operator
import pickle
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actorrpc import testing
from actorrpc.errors import ConfigError
from actorrpc.testing import Fault, delay, drop
from actorrpc.testing.faults import from_environment
from actorrpc.testing.message_types import MESSAGES, Message
from actorrpc.wire.identity import WorkerInfo


def step() -> None:
    """Stand for a function of the user's."""


class Trainer:
    def step(self) -> None:
        """Stand for a method."""


def message(type: str = "call", called: Any = step, to: str = "worker1", contents: bytes = b"") -> Message:
    peer: Any = SimpleNamespace(name=to, record=SimpleNamespace(rank=int(to[-1])))
    return Message(type, peer, called, (contents,))


@pytest.mark.parametrize("names", [("calls",), ("call", "x*"), ()])
def test_unknown_message_types_are_refused_and_the_known_types_are_listed(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        drop(*names)
    assert all(name in str(caught.value) for name in MESSAGES)


@pytest.mark.parametrize(
    "make",
    [
        lambda: drop(1),  # type: ignore[arg-type]
        lambda: drop("call", times=-2),
        lambda: drop("call", times=1.5),  # type: ignore[arg-type]
        lambda: drop("call", total=True),
        lambda: drop("call", probability=1.1),
        lambda: drop("call", probability="often"),  # type: ignore[arg-type]
        lambda: drop("call", seed="x"),  # type: ignore[arg-type]
        lambda: drop("call", to=1.0),
        lambda: drop("call", function=3),
        lambda: drop("call", on=1),  # type: ignore[arg-type]
        lambda: delay("call", seconds=-1),
        lambda: delay("call", seconds=float("inf")),
        lambda: delay("call", seconds=None),  # type: ignore[arg-type]
        lambda: testing.FaultyRpcBackendOptions(faults=["drop call"]),  # type: ignore[list-item]
        lambda: testing.FaultyRpcBackendOptions(faults=[], colour="red"),
    ],
)
def test_invalid_fault_arguments_raise_config_error(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_times_limits_the_losses_of_each_message_separately() -> None:
    fault = drop("call", times=2)
    assert [fault.takes(message(contents=b"a")) for _ in range(3)] == [True, True, False]
    assert fault.takes(message(contents=b"b"))
    assert fault.takes(message(contents=b"a", to="worker2"))
    # The first message was sent after its losses; an equal message counts as a new message.
    assert [fault.takes(message(contents=b"a")) for _ in range(3)] == [True, True, False]
    assert fault.count == 6


def test_total_limits_all_matching_messages_together() -> None:
    fault = drop("call", "remote", total=3)
    taken = [fault.takes(message(type, contents=b"%d" % n)) for n, type in enumerate(["call", "remote"] * 3)]
    assert taken == [True] * 3 + [False] * 3
    assert fault.counts == Counter(call=2, remote=1)
    fault.counts["call"] = 100  # a copy
    assert fault.count == 3
    for nothing in ({"times": 0}, {"total": 0}, {"probability": 0.0}):
        assert not drop("call", **nothing).takes(message())


@pytest.mark.parametrize(
    ("to", "taken"),
    [
        ("worker1", True),
        ("worker2", False),
        ("work*", True),
        (1, True),
        (2, False),
        (["worker2", "worker1"], True),
        (WorkerInfo("worker1", 7), True),
        ((), False),
    ],
)
def test_to_matches_names_patterns_and_ranks_of_workers(to: Any, taken: bool) -> None:
    assert drop("call", to=to).takes(message()) is taken


def local() -> Any:
    def step() -> None:
        """A function with the same name."""

    return step


@pytest.mark.parametrize(
    ("function", "called", "taken"),
    [
        ("step", step, True),
        (step, step, True),
        (f"{__name__}.step", step, True),
        ("st*", step, True),
        ("stop", step, False),
        (["stop", "step"], step, True),
        (local(), step, False),
        ("step", local(), True),
        ("step", Trainer.step, True),
        ("Trainer.step", Trainer.step, True),
        (Trainer.step, Trainer.step, True),
        (Trainer.step, step, False),
        ("Trainer.step", "Trainer.step", True),  # of an actor's method, only the name is known
        ("step", "Trainer.step", True),
        (Trainer.step, "Trainer.step", True),
        (step, "Trainer.step", False),
        (step, partial(step), True),
        (torch.add, torch.add, True),
        ("add", torch.add, True),
        (operator.add, operator.add, True),
        ("step", None, False),
        ("*", None, False),
    ],
)
def test_function_matches_functions_methods_and_name_patterns(
    function: Any, called: Any, taken: bool
) -> None:
    assert drop("call", function=function).takes(message(called=called)) is taken


def test_the_same_seed_drops_the_same_messages() -> None:
    def taken(seed: int) -> list[bool]:
        fault = drop("call", probability=0.5, seed=seed)
        return [fault.takes(message()) for _ in range(200)]

    assert taken(1) == taken(1) != taken(2)
    assert 50 < sum(taken(1)) < 150


def test_a_fault_can_be_started_before_init_rpc_but_only_once_at_a_time() -> None:
    fault = drop("call")
    assert not fault.active
    with fault as same:
        assert same is fault
        assert fault.active
        with pytest.raises(RuntimeError, match="started already"):
            fault.start()
    assert not fault.active
    fault.stop()
    with fault:
        assert fault.active


def test_a_fault_is_pickled_without_its_counters() -> None:
    fault = delay(
        "call", "rref_*", seconds=2, times=3, to=[1], function=step, probability=0.5, seed=4, on="w*"
    )
    assert drop("call").takes(message())
    copy = pickle.loads(pickle.dumps(fault))
    assert isinstance(copy, Fault)
    assert repr(copy) == repr(fault)
    assert copy.seconds == 2
    assert copy.count == 0


# -- faults as text, such as in the variable ACTORRPC_FAULT ----------------------------------------------


def test_faults_are_parsed_from_text() -> None:
    text = """
        drop call,remote times=2 to=worker1,2 on=worker0;
        delay answer seconds=0.5 function=step,Trainer.* probability=0.1 seed=7;;
        drop rref_* total=3 at_once=1
    """
    expected = [
        drop("call", "remote", times=2, to=["worker1", "2"], on="worker0"),
        delay("answer", seconds=0.5, function=["step", "Trainer.*"], probability=0.1, seed=7),
        drop("rref_*", total=3, at_once=True),
    ]
    assert [repr(fault) for fault in testing.faults_of(text)] == [repr(fault) for fault in expected]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("drop", "'drop'"),
        ("lose call", "'lose'"),
        ("drop calls", "rref_delete"),
        ("drop call soon", "'soon'"),
        ("drop call when=now", "'when=now'"),
        ("drop call times=often", "'times=often'"),
        ("drop call times=-3", "times"),
        ("drop call at_once=perhaps", "'at_once=perhaps'"),
        ("drop call seconds=1", "'drop call seconds=1'"),
        ("delay call", "seconds="),
        ("delay call seconds=1 at_once=1", "'at_once=1'"),
        ("drop call; delay x seconds=1", "'x'"),
    ],
)
def test_an_unreadable_part_of_the_text_is_named_in_the_error(
    text: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as caught:
        testing.faults_of(text)
    assert named in str(caught.value)
    monkeypatch.setenv("ACTORRPC_FAULT", text)
    with pytest.raises(ConfigError, match="ACTORRPC_FAULT="):
        from_environment()
