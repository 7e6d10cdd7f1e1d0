"""What ``import actorrpc`` loads beside torch, and what it leaves to first use."""

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

print(json.dumps([sorted(set(sys.modules) - before), full() - collected, gc.isenabled()]))
"""
#: Of the package what needs more than its dependencies, or serves one purpose; and all that others install.
_NOT_LOADED = {
    *("actorrpc.compat", "actorrpc.mypy_plugin", "actorrpc.testing.pytest_plugin", "actorrpc.worker"),
}
_OURS = {"actorrpc", "cloudpickle", "msgpack", "psutil"}


@pytest.mark.slow
def test_what_the_import_loads() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    loaded, collections, enabled = json.loads(ran.stdout)
    assert not _NOT_LOADED.intersection(loaded)
    packages = {name.partition(".")[0] for name in loaded}
    # The C part of msgpack says by which Cython it was made.
    foreign = {name for name in packages - _OURS - sys.stdlib_module_names if "cython" not in name}
    assert not foreign
    # It costs as long as the whole import to look through what torch has left.
    assert (collections, enabled) == (0, True)


def test_a_shell_offers_public_names_only() -> None:
    found: Any = dir(actorrpc)
    assert found == sorted(actorrpc.__all__)
    assert "wire" not in found  # it is loaded, and nobody's to use
    assert hasattr(actorrpc, "wire")
