"""What the server that ranks are forked from imports, once. It must start no thread and open nothing.

A module that cannot be imported is left to the rank that needs it, whose error says why.
"""

from __future__ import annotations

import contextlib
import importlib

for _name in [
    "torch",
    "torch._dynamo",
    "numpy",
    "hypothesis",
    "pytest",
    "actorrpc",
    "actorrpc.rpc",
    "tests.ranks",
]:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
