"""PyTorch's own RPC tests on actorrpc, and tests of the harness that runs them."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance import runner, table
from tests.conformance.table import Expectation

ROOT = Path(__file__).resolve().parents[2]
TABLE = table.read()
NIGHTLY = os.environ.get("ACTORRPC_CONFORMANCE") == "nightly"


def wrong(chosen: list[Expectation], **how: Any) -> list[str]:
    """Run tests; return the unexpected outcomes with the output of the ranks."""
    return [
        f"{each.test}: {found}\n{result['said']}"
        for each, result in runner.run(chosen, **{"jobs": 2, **how})
        if (found := runner.verdict(each, result))
    ]


@pytest.mark.limit(240)
def test_the_fast_part_of_torchs_tests_gives_the_expected_outcomes() -> None:
    chosen = [each for each in TABLE if each.fast]
    assert 30 <= len(chosen) <= 50
    assert {each.category for each in chosen} >= {"public-api", "private-api", "dist-autograd", "ddp", "jit"}
    found = wrong(chosen, limit_s=60.0)
    assert not found, "\n\n".join(found)


@pytest.mark.skipif(not NIGHTLY, reason="takes ten minutes: ACTORRPC_CONFORMANCE=nightly")
@pytest.mark.limit(3600)
def test_all_of_torchs_tests_give_the_expected_outcomes() -> None:
    found = wrong(TABLE, limit_s=40.0)
    assert not found, "\n\n".join(found)


@pytest.mark.gpu
@pytest.mark.limit(540)
def test_torchs_gpu_tests_for_the_available_gpus_give_the_expected_outcomes() -> None:
    """In new processes, because a process that has initialized CUDA cannot fork ranks that use it."""
    chosen = [
        each for each in table.read(torch.cuda.device_count()) if each.gpus and each.outcome != "skipped"
    ]
    found = wrong(chosen, jobs=min(6, max(2, (os.cpu_count() or 1) // 4)), limit_s=120.0, spawn=True)
    assert not found, "\n\n".join(found)


# -- the table ------------------------------------------------------------------------------------


def test_the_table_has_no_duplicates_and_gives_a_reason_for_each_unexpected_outcome() -> None:
    names = collections.Counter(each.test for each in TABLE)
    assert not [name for name, number in names.items() if number > 1]
    assert {each.outcome for each in TABLE} <= {"passed", "fails", "skipped", "absent"}
    assert not [each.test for each in TABLE if (each.outcome == "passed") == bool(each.reason)]
    assert not [each.test for each in TABLE if each.fast and each.outcome != "passed"]


def test_gpu_tests_are_expected_to_be_skipped_only_without_enough_gpus() -> None:
    needed = [each.gpus for each in TABLE if each.category == "cuda"]
    assert {0, 1, 2, 4} == set(needed)
    for gpus in (1, 2, 4):
        found = table.read(gpus)
        assert [each.gpus for each in found] == [each.gpus for each in TABLE]
        for each in found:
            if each.gpus:
                assert (each.outcome == "skipped") == (each.gpus > gpus)
                assert (each.outcome == "passed") == (not each.reason)


@pytest.mark.limit(120)
def test_the_table_lists_every_rpc_test_of_torch() -> None:
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the table was made for torch 2.13")
    server = runner.Server()
    try:
        there = set(server.names)
    finally:
        server.close()
    listed = {each.test for each in TABLE if each.outcome != "absent"}
    assert there == listed


# -- the harness --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "outcome", "in_group", "word"),
    [
        ("passed", "passed", True, ""),
        ("passed", "passed", False, "no rank was in a group"),
        ("passed", "hung", True, "expected: passed"),
        ("fails", "failed", True, ""),
        ("fails", "passed", True, "update the table"),
    ],
)
def test_a_result_that_differs_from_the_table_gets_a_verdict(
    expected: str, outcome: str, in_group: bool, word: str
) -> None:
    row = Expectation("Class.test", "public-api", expected, True, True, "")
    found = runner.verdict(row, {"ranks": [0, 1], "outcome": outcome, "group": in_group})
    assert word in found
    assert bool(word) == bool(found)


@pytest.mark.limit(120)
def test_a_rank_that_would_start_torchs_own_agent_exits_with_an_error(tmp_path: Path) -> None:
    code = f"""
import actorrpc.compat
from tests.conformance import suite
actorrpc.compat.uninstall()
rpc = suite.torchs_rpc
options = rpc.TensorPipeRpcBackendOptions(init_method="file://{tmp_path}/store")
rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
print("started")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 97, done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    ("ranks", "outcome"),
    [
        ([0, 98], "passed"),
        ([0, 97], "failed"),
        ([86, 86], "skipped"),
        ([0, 86], "failed"),
    ],
)
def test_the_outcome_of_a_test_depends_on_the_exit_codes_of_all_ranks(ranks: list[int], outcome: str) -> None:
    assert runner.outcome_of(ranks) == outcome
    assert runner.outcome_of(ranks, late=True) == ("hung" if outcome == "failed" else outcome)
