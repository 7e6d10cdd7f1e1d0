"""Backward passes of random programs in the simulator, without faults and with faults."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch

from actorrpc.errors import PeerDiedError, RpcError, RpcTimeoutError
from tests.autograd.programs import Program, compare, expected, generate
from tests.autograd.simulator import KINDS, TYPES, Fault, Network, World
from tests.migration.rows import row

NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"
PROGRAMS = 10_000 if NIGHTLY else 500
FAULTS = 300 if NIGHTLY else 12  # programs for each kind and type of message

nightly = pytest.mark.limit(3600 if NIGHTLY else 60)


def _world(program: Program, seed: int, fault: Fault | None = None) -> World:
    # In half of the worlds, passes have to discover where messages lead to.
    forget = bool(seed % 2) or (fault is not None and fault.type == "Discover")
    return World(program, Network(seed, program.workers, fault), forget=forget)


def _leave(world: World) -> None:
    world.network.settle()
    world.check_quiet()
    world.leave()


# -- without faults ----------------------------------------------------------------------------------------------


@nightly
def test_random_programs_have_the_gradients_of_local_autograd() -> None:
    done: Counter[str] = Counter()
    for seed in range(PROGRAMS):
        program = generate(seed)
        world = _world(program, seed)
        world.backward()
        want = expected(program)
        compare(program, world.gradients(), want)
        done.update(world.network.counts)
        done["leaves"] += len(want)
        done["revisits"] += world.network.revisits
        _leave(world)
    # the programs must have done something, or they prove nothing
    assert done["leaves"] > 2 * PROGRAMS
    assert done["Gradient"] > PROGRAMS
    assert done["Run"] > PROGRAMS
    assert done["Discover"] > PROGRAMS / 2
    assert done["revisits"] > PROGRAMS / 4


@nightly
def test_passes_over_a_retained_graph_are_equal_to_the_last_bit() -> None:
    for seed in range(PROGRAMS // 5):
        program = generate(seed)
        world = _world(program, seed)
        world.backward(retain_graph=True)
        first = {name: each.clone() for name, each in world.gradients().items()}
        discovered = world.network.counts["Discover"]
        world.backward(retain_graph=True)  # messages arrive in another order
        assert world.network.counts["Discover"] == discovered  # known graphs are not discovered again
        second = world.gradients()
        assert second.keys() == first.keys()
        for name, each in first.items():
            assert torch.equal((each + each).to_dense(), second[name].to_dense()), (seed, name)
        _leave(world)


@nightly
def test_gradients_with_create_graph_equal_local_autograd() -> None:
    for seed in range(PROGRAMS // 10):
        program = generate(seed)
        if any(leaf.hooks or leaf.shape == (5, 3) for leaf in program.leaves):
            continue  # create_graph runs only tensor hooks, and sparse gradients have no history
        world = _world(program, seed)
        world.backward(create_graph=True)
        compare(program, {name: g.detach() for name, g in world.gradients().items()}, expected(program))
        _leave(world)


def test_accumulate_grad_adds_to_the_grad_of_leaves() -> None:
    for seed in range(40):
        program = generate(seed)
        want = expected(program)
        world = _world(program, seed)
        world.backward(accumulate="grad", retain_graph=True)
        assert world.gradients() == {}
        found = {name: each.grad for name, (_, each) in world.leaves.items() if each.grad is not None}
        compare(program, found, want)
        first = {name: each.clone() for name, each in found.items()}
        world.backward(accumulate="grad")
        world.network.settle()
        for name, each in first.items():
            assert torch.equal((each + each).to_dense(), world.leaves[name][1].grad.to_dense())  # type: ignore[union-attr]
        _leave(world)


# -- with faults --------------------------------------------------------------------------------------------


def _run_with_fault(program: Program, seed: int, fault: Fault, want: dict[int, Any], **options: Any) -> str:
    """Run a program with a fault; return the outcome of the pass."""
    world = _world(program, seed, fault)
    network = world.network
    error = world.failure(retain_graph=True, **options)
    outcome = "right"
    if isinstance(error, (PeerDiedError, RpcTimeoutError)):
        outcome = "died" if isinstance(error, PeerDiedError) else "late"
    elif error is not None:
        assert isinstance(error, RpcError), repr(error)
        names_death = "PeerDied" in str(error) or "was lost during a backward pass" in str(error)
        assert fault.kind == "release" or (fault.kind.startswith("kill") and names_death), repr(error)
        assert fault.kind != "release" or "released" in str(error), repr(error)
        outcome = "released"
    found = world.gradients()
    network.faultless = True
    if not network.worker(0).alive:
        outcome = "origin died"
        assert found == {}
    elif fault.kind == "release" and fault.hit:
        assert found == {}
    elif outcome == "right":
        alive = {leaf.name for leaf in program.leaves if network.worker(leaf.worker).alive}
        compare(
            program,
            {k: v for k, v in found.items() if k in alive},
            {k: v for k, v in want.items() if k in alive},
        )
    else:
        assert found == {}, f"{outcome}, but gradients of {sorted(found)}"
    if outcome == "late":
        world.check_quiet()
        world.backward()  # repeat the pass with the retained graph
        compare(program, world.gradients(), want)
    world.network.settle()
    world.check_quiet()
    world.leave()
    return outcome


@nightly
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("kind", KINDS)
@row("a worker dies in a pass", "from-torch-rpc")
def test_a_pass_with_a_fault_ends_with_right_gradients_or_an_error_without_gradients(
    kind: str, type: str
) -> None:
    outcomes: Counter[str] = Counter()
    hit = 0
    for seed in range(FAULTS):
        program = generate(1000 + seed, workers=3 + seed % 3, steps=15)
        want = expected(program)
        for nth in range(3):
            fault = Fault(kind, type, nth)
            outcomes[_run_with_fault(program, seed, fault, want)] += 1
            hit += fault.hit
    assert hit > FAULTS / 2
    if kind in ("duplicate", "delay"):
        assert outcomes.keys() == {"right"}


@nightly
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "release"])
def test_a_release_with_a_fault_leaves_no_context(kind: str) -> None:
    for seed in range(FAULTS):
        program = generate(2000 + seed, workers=3 + seed % 3, steps=15)
        for nth in range(2):
            fault = Fault(kind, "Release", nth)
            world = _world(program, seed, fault)
            world.backward()
            _leave(world)
            assert fault.hit


def test_50_simultaneous_passes_leave_nothing_behind() -> None:
    program = generate(7, workers=3, steps=10)
    network = Network(0, program.workers)
    worlds = [World(program, network) for _ in range(50)]
    futures = [world.start() for world in worlds]  # all at the same time
    network.settle(lambda: all(future.done() for future in futures))
    want = expected(program)
    for world, future in zip(worlds, futures, strict=True):
        future.value()
        compare(program, world.gradients(), want)
        world.origin.participant.release(world.context)
    for world in worlds:
        _leave(world)
