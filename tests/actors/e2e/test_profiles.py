"""Calls of actors in torch's profiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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


def test_a_torch_profile_has_one_event_for_each_call_of_an_actor_also_if_the_call_outlives_it(
    gate: Path,
) -> None:
    adder = Adder.options(name="adder").remote()
    assert actorrpc.get(adder.add.remote(1)) == 1
    with torch.profiler.profile() as found:
        assert actorrpc.get(adder.add.remote(2)) == 3
        with pytest.raises(LookupError, match="no"):
            actorrpc.get(adder.fail.remote())
        with pytest.raises(TypeError):
            adder.add.remote()
        waiting = adder.wait.remote(gate)
    open_gate(gate)
    assert actorrpc.get(waiting) == "through"
    names = [event.name for event in found.events() if event.name.startswith("actor#")]
    assert sorted(name.partition("(")[0] for name in names) == [
        "actor#Adder.add",
        "actor#Adder.fail",
        "actor#Adder.wait",
    ]
    assert all(name.endswith(" -> Adder('adder'))") for name in names)
