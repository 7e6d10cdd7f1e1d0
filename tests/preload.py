"""Imports of the server from which ranks are forked. It must start no thread and open no file.

If a module cannot be imported, the rank that needs it raises the error.
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
