"""The test classes of the installed torch, created for actorrpc, and a function that runs a rank of one of their tests.

Imported only by processes that run ranks: importing it installs the drop-in.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import logging
import os
import sys
import tempfile
from typing import Any, NoReturn

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import actorrpc.compat
from actorrpc.compat import rpc as ours
from actorrpc.rpc import api as core
from tests.conformance.runner import NO_GROUP
from tests.forks import exit_at_once

__all__ = ["TORCHS_AGENT", "case", "has", "names", "run_rank", "world_size"]

TORCHS_AGENT = 97  # exit code of a rank that started, or was about to start, torch's own agent

_PREFIX = "TensorPipe"
_FAULTY = "Faulty"
_joined = 0


def _trap(*_: Any) -> NoReturn:
    """Replace the function with which torch starts its own agent."""
    os.write(2, b"torch's own agent was about to be started: this test would not have run on actorrpc\n")
    exit_at_once(TORCHS_AGENT)


def _count(_worker: Any) -> Any:
    global _joined
    _joined += 1
    return lambda _graceful: None


# In a spawned rank, the environment must have installed the drop-in already.
assert actorrpc.compat.is_installed() == ("ACTORRPC_DROP_IN" in os.environ)
actorrpc.compat.uninstall()
torchs_rpc: Any = importlib.import_module("torch.distributed.rpc")
_torchs_is_set = torch._C._distributed_rpc._is_current_rpc_agent_set


def _load() -> dict[str, type]:
    assert torchs_rpc is not ours
    for module in (torchs_rpc, torchs_rpc.api):
        module._set_and_start_rpc_agent = _trap
    actorrpc.compat.install()
    core.on_start.append(_count)
    utils: Any = importlib.import_module("torch.testing._internal.distributed.rpc_utils")
    fixtures: Any = importlib.import_module(
        "torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture"
    )
    fixture = fixtures.TensorPipeRpcAgentTestFixture
    tests = [*utils.GENERIC_TESTS, *utils.TENSORPIPE_TESTS]
    tests += [*utils.GENERIC_CUDA_TESTS, *utils.TENSORPIPE_CUDA_TESTS]
    return {
        **utils.generate_tests(_PREFIX, fixture, tests, __name__),
        # With another fixture, because their own one registers a backend, which would affect other tests.
        **utils.generate_tests(_FAULTY, fixture, utils.FAULTY_AGENT_TESTS, __name__),
    }


def _give_faults() -> None:
    """Create the classes of the faulty agent with their own fixture, in a rank that runs one of their tests."""
    utils: Any = importlib.import_module("torch.testing._internal.distributed.rpc_utils")
    fixtures: Any = importlib.import_module(
        "torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture"
    )
    made = utils.generate_tests(
        _FAULTY, fixtures.FaultyRpcAgentTestFixture, utils.FAULTY_AGENT_TESTS, __name__
    )
    _classes.update(made)
    globals().update(made)


_classes = _load()
globals().update(_classes)  # so that they can be unpickled by name


def names() -> list[str]:
    """Return the names of all tests."""
    found = []
    for name, cls in _classes.items():
        found += [f"{name}.{method}" for method in dir(cls) if method.startswith("test_")]
    return sorted(found)


def has(test: str) -> bool:
    """Return whether a test exists."""
    name, _, method = test.partition(".")
    return name in _classes and hasattr(_classes[name], method)


def case(test: str) -> Any:
    """Return the test case of one test, created as by torch's runner for a rank."""
    name, _, method = test.partition(".")
    made: Any = _classes[name](method)
    return made


def world_size(test: str) -> int:
    """Return the number of ranks of a test."""
    return int(case(test).world_size)


def run_rank(test: str, rank: int, file_name: str, limit_s: float) -> NoReturn:
    """Run one rank of a test in this process and end it with the rank's exit code."""
    code = 1
    try:
        faulthandler.enable()
        faulthandler.dump_traceback_later(max(1.0, limit_s - 1.0))
        logging.basicConfig(level=logging.INFO)
        logging.getLogger("actorrpc").setLevel(logging.WARNING)
        if test.startswith(_FAULTY):
            _give_faults()
        made = case(test)
        made.rank, made.file_name = rank, file_name
        mine, its = torch.multiprocessing.Pipe()
        try:
            made.run_test(test.partition(".")[2], its)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        mine.close()
        if _torchs_is_set() or sys.modules["torch.distributed.rpc"] is not ours:
            code = TORCHS_AGENT
        elif code == 0 and not _joined:
            code = NO_GROUP
        atexit._run_exitfuncs()
    except BaseException:
        logging.getLogger(__name__).exception("rank %d", rank)
        code = code or 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        exit_at_once(code)


def fresh_file() -> str:
    """Create the file of the rendezvous of a test's ranks."""
    with tempfile.NamedTemporaryFile(prefix="arpc-conf-", delete=False) as file:
        return file.name
