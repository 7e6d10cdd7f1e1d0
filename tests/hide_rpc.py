"""A plugin for pytest that hides torch's RPC in the tests and in the processes that they start.

    python -m pytest -p tests.hide_rpc tests/actors
    HIDE_RPC=build python -m pytest -p tests.hide_rpc tests/actors   # the modules exist, but torch was built without RPC

tests/without_rpc/sitecustomize.py describes both values of ``HIDE_RPC``.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

_FILE = Path(__file__).with_name("without_rpc") / "sitecustomize.py"

if "HIDE_RPC" not in os.environ or str(_FILE.parent) not in os.environ.get("PYTHONPATH", ""):
    os.environ.setdefault("HIDE_RPC", "modules")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(_FILE.parent), os.environ.get("PYTHONPATH")])
    )
    spec = importlib.util.spec_from_file_location("without_rpc", _FILE)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
