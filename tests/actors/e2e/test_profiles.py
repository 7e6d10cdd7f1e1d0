"""Calls of actors in torch's profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler_legacy

import actorrpc
from tests.actors.e2e.kit import open_gate, pass_gate
from tests.announced import PROFILER

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.prints(PROFILER)]


@actorrpc.remote
class Adder:
    def __init__(self) -> None:
        self.value = 0

    def add(self, more: int) -> int:
        self.value += more
        return self.value

    def fail(self) -> None:
        raise LookupError("no")

    def wait(self, gate: Path) -> str:
        pass_gate(gate)
        return "through"


def names_of(found: Any) -> list[str]:
    events = found.function_events if isinstance(found, profiler_legacy.profile) else found.events()
    return [event.name for event in events if event.name.startswith("actor#")]


def test_a_torch_profile_has_one_event_for_each_call_of_an_actor(gate: Path) -> None:
    adder = Adder.options(name="adder").remote()
    assert actorrpc.get(adder.add.remote(1)) == 1
    with torch.profiler.profile() as found:
        waiting = adder.wait.remote(gate)
        open_gate(gate)
        assert actorrpc.get([waiting, adder.add.remote(2)]) == ["through", 3]
        with pytest.raises(LookupError, match="no"):
            actorrpc.get(adder.fail.remote())
        with pytest.raises(TypeError):
            adder.add.remote()
    assert sorted(name.partition("(")[0] for name in names_of(found)) == [
        "actor#Adder.add",
        "actor#Adder.fail",
        "actor#Adder.wait",
    ]
    assert all(name.endswith(" -> Adder('adder'))") for name in names_of(found))


def test_a_call_that_outlives_the_torch_profile_is_in_it(gate: Path) -> None:
    adder = Adder.remote()
    with torch.profiler.profile() as found:
        waiting = adder.wait.remote(gate)
    open_gate(gate)
    assert actorrpc.get(waiting) == "through"
    assert [name.partition("(")[0] for name in names_of(found)] == ["actor#Adder.wait"]
