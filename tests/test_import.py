"""``import actorrpc`` loads only torch and its own dependencies, and leaves the rest to first use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import actorrpc

_ROOT = Path(__file__).resolve().parent.parent
_PROGRAM = """
import gc, json, sys
import torch, torch.distributed.rpc

def full():
    return gc.get_stats()[2]["collections"]

before, collected = set(sys.modules), full()
import actorrpc

state = [full() - collected, gc.isenabled(), *gc.get_count()[1:], gc.get_freeze_count()]
print(json.dumps([sorted(set(sys.modules) - before), state]))
"""
#: Modules of the package that need extra dependencies or serve a special purpose.
_NOT_LOADED = {
    *("actorrpc.compat", "actorrpc.mypy_plugin", "actorrpc.testing.pytest_plugin", "actorrpc.worker"),
}
_OURS = {"actorrpc", "cloudpickle", "msgpack", "psutil"}


@pytest.mark.slow
def test_the_import_loads_no_optional_module_and_runs_no_full_garbage_collection() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    loaded, state = json.loads(ran.stdout)
    assert not _NOT_LOADED.intersection(loaded)
    packages = {name.partition(".")[0] for name in loaded}
    # The C part of msgpack loads modules named after its Cython version.
    foreign = {name for name in packages - _OURS - sys.stdlib_module_names if "cython" not in name}
    assert not foreign
    # A full collection over torch's objects would double the time of the import, or delay the first calls: the collector is on,
    # has made no full collection, its counters for older generations are 0, and no object is frozen.
    assert state == [0, True, 0, 0, 0]


def test_dir_lists_public_names_only() -> None:
    found: Any = dir(actorrpc)
    assert found == sorted(actorrpc.__all__)
    assert "wire" not in found  # loaded, but private
    assert hasattr(actorrpc, "wire")
