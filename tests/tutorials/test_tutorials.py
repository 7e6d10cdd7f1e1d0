"""The tutorials of torch's RPC run unchanged on actorrpc, and print the same as on torch.

The output on torch is recorded in ``expected.json``. Each change runs half of the programs on actorrpc, and one on torch; the
nightly run (``ACTORRPC_NIGHTLY=1``) runs all on both. A witness in every process of a program (``witness/``) records which agent
it has started.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.announced import PROFILER
from tests.tutorials.kit import EXPECTED, NIGHTLY, PROGRAMS, Program, Run, run

EXPECTATIONS = json.loads(EXPECTED.read_text())
QUICK_ON_TORCH = {"rnn"}
# Similar programs are among the others, or tests/examples runs them with actorrpc's names.
NIGHTLY_ON_ACTORRPC = {"async_functions", "batch_reinforce", "ddp_hybrid", "pipeline", "reinforce", "rrefs"}
# Replaced by the variable alone, or after the import of torch's module.
OTHER_WAYS = {"rnn": "variable", "remote_modules": "late"}
NEEDS = {
    "batch_reinforce": "gymnasium",
    "reinforce": "gymnasium",
    "parameter_server": "sklearn",
    "batch_parameter_server": "sklearn",
}
LIMIT = pytest.mark.limit(180)  # several interpreters that import torch, each


def check_agents(done: Run, workers: int, way: str) -> None:
    """Check that all agents were actorrpc's, or all torch's."""
    times = 2 if way == "torch" else 1  # torch registers each agent twice
    assert len(done.agents) == workers * times
    for each in done.agents:
        name = each.pop("worker")
        if way == "torch":
            assert each == {
                "agent": "torch._C._distributed_rpc.TensorPipeAgent",
                "behind": "builtins.NoneType",
                "torchs": True,
            }, name
        else:
            assert each == {
                "agent": "actorrpc.compat.rpc.agent.TensorPipeAgent",
                "behind": "actorrpc.agent.agent.Agent",
                "torchs": False,
            }, name


def alike(found: Any, expected: Any) -> bool:
    """Compare outputs of programs: numbers approximately, everything else exactly."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            alike(found[name], expected[name]) for name in expected
        )
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(alike, found, expected))
    if isinstance(expected, float):
        return bool(found == pytest.approx(expected, rel=1e-4, abs=1e-6))
    return bool(found == expected)


def check(folder: Path, program: Program, *arguments: str, way: str) -> None:
    if program.name in NEEDS:
        pytest.importorskip(NEEDS[program.name], reason="it needs pip install 'actorrpc[examples]'")
    done = run(folder, program, *arguments, way=way)
    assert done.status == 0, done.errors
    check_agents(done, program.workers, way)
    for found, expected in zip(done.lines, EXPECTATIONS[program.name], strict=True):
        assert alike(found, expected), (found, expected)


@LIMIT
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_prints_the_same_on_actorrpc_as_on_torch(tmp_path: Path, name: str) -> None:
    if name in NIGHTLY_ON_ACTORRPC and not NIGHTLY:
        pytest.skip("nightly")
    check(tmp_path, PROGRAMS[name], *PROGRAMS[name].on_actorrpc, way=OTHER_WAYS.get(name, "command"))


@LIMIT
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_prints_the_recorded_output_on_torch(tmp_path: Path, name: str) -> None:
    if name not in QUICK_ON_TORCH and not NIGHTLY:
        pytest.skip("torch's side: nightly")
    check(tmp_path, PROGRAMS[name], way="torch")


# -- profiles ------------------------------------------------------------------------------------

PROFILING = Program("profiling", 2, prints=(PROFILER,))
OPERATORS = ("add", "empty", "mul", "rand", "uniform_")  # of its user-defined function


def names_of(call: str, *operators: str) -> set[str]:
    """Return the names of a call and of its remote operators in a profile."""
    name = f"{call}(worker0 -> worker1)"
    return {name, *(f"{name}#remote_op: aten::{operator}" for operator in operators)}


SECTIONS = {
    "builtin functions": names_of("rpc_async#aten::add", "add") | names_of("rpc_async#aten::mul", "mul"),
    "user-defined function": names_of("rpc_async#udf_with_ops", *OPERATORS),
    "remote": names_of("rpc_remote#udf_with_ops", *OPERATORS) | {"to_here#(worker0)->(worker1)"},
    "sync, in a range": names_of("rpc_sync#aten::add", "add") | {"my_work"},
}


@LIMIT
def test_profiles_show_calls_and_their_remote_operators(tmp_path: Path) -> None:
    """Each of torch's profilers shows the names that torch's own RPC shows in the legacy profiler."""
    kinds = ("autograd", "torch", "legacy")
    done = run(tmp_path, PROFILING, "--profiler", *kinds, way="command")
    assert done.status == 0, done.errors
    check_agents(done, PROFILING.workers, "command")
    wanted = [(kind, section) for kind in kinds for section in SECTIONS]
    for line, (kind, section) in zip(done.lines, wanted, strict=True):
        assert (line["profiler"], line["section"]) == (kind, section)
        found = {name for name in line["names"] if not name.startswith("aten::")}
        there = {name for name in found if "#remote_op" in name}
        if section == "remote" and not there:
            # Remote operators arrive with the answer to remote(), which may come after the value, too late for this profile.
            assert found == {name for name in SECTIONS[section] if "#remote_op" not in name}
            continue
        assert found == SECTIONS[section]
        assert set(line["remote"]) == there
        assert line["nodes"] == [1]
        assert line["traced"]
        assert line["in table"]


@LIMIT
@pytest.mark.skipif(not NIGHTLY, reason="torch's side: nightly")
def test_only_the_legacy_profiler_shows_calls_on_torch(tmp_path: Path) -> None:
    """On torch, only the legacy profiler shows calls; the newer profilers, which the tutorial uses, do not."""
    done = run(tmp_path, PROFILING, "--profiler", "legacy", "autograd", "torch", way="torch")
    assert done.status == 0, done.errors
    for line, section in zip(done.lines, [*SECTIONS] * 3, strict=True):
        names = set(line["names"])
        if line["profiler"] == "legacy":
            assert names <= SECTIONS[section]  # operators may come too late for the profile
            assert {name for name in SECTIONS[section] if "#remote_op" not in name} <= names
        else:
            assert not [name for name in names if name.startswith("rpc_")]


# -- programs with different results ---------------------------------------------------------------


def in_one_process() -> list[dict[str, Any]]:
    """Return the expected output of ``ddp_around.py``, computed without RPC and DDP."""
    found, gradients = [], []
    for rank in range(2):
        factor = torch.full((4,), 2.0, requires_grad=True)
        torch.manual_seed(2)
        local = nn.Linear(4, 2)
        dice = torch.Generator().manual_seed(rank)
        x, target = torch.randn(8, 4, generator=dice), torch.randint(2, (8,), generator=dice)
        loss = nn.functional.cross_entropy(local(x * factor), target)
        loss.backward()
        assert factor.grad is not None
        assert local.weight.grad is not None
        gradients.append(local.weight.grad)
        found.append({"rank": rank, "loss": loss.item(), "remote": factor.grad.tolist()})
    averaged = (sum(gradients) / len(gradients)).flatten().tolist()  # type: ignore[union-attr]
    return [{**each, "averaged": averaged} for each in found]


@LIMIT
def test_ddp_around_a_remote_module_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    done = run(tmp_path, Program("ddp_around", 3), way="command")
    assert done.status == 0, done.errors
    check_agents(done, 3, "command")
    assert alike(done.lines, in_one_process())


@LIMIT
@pytest.mark.skipif(not NIGHTLY, reason="torch's side: nightly")
def test_ddp_around_a_remote_module_is_refused_by_torch(tmp_path: Path) -> None:
    done = run(tmp_path, Program("ddp_around", 3), way="torch")
    assert done.status != 0
    assert "Method ``named_modules`` not supported for RemoteModule" in done.errors


@LIMIT
def test_a_worker_that_ends_with_an_error_does_not_block_the_others(tmp_path: Path) -> None:
    """With torch's own RPC, the other workers never end."""
    prints = (r"^Process Process-\d:\nTraceback.*ValueError: a bug", "worker2 died before; the others go on$")
    done = run(tmp_path, Program("losing_a_worker", 3, prints=prints), way="command")
    assert done.lines == [{"found": [2.0, 2.0]}, {"exits": [0, 0, 1]}], done.errors
    check_agents(done, 3, "command")
    assert "ValueError: a bug in the user's code" in done.errors
