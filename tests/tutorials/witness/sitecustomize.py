"""Runs at the start of each interpreter of a tutorial's program, and records which agent the program starts.

It writes a line of JSON to a file per process in the folder ``RPC_WITNESS``: the classes of the current agent and of the agent
that it wraps, and whether torch's C++ agent is current.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_PLACES = {"torch.distributed.rpc.api", "actorrpc.compat.rpc.api"}  # both have `_init_rpc_states(agent)`


def _class_of(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _is_torchs_in_force() -> bool:
    try:
        sys.modules["torch"]._C._distributed_rpc._get_current_rpc_agent()
    except RuntimeError:
        return False
    return True


def _watch(api: Any) -> None:
    init_rpc_states = api._init_rpc_states

    def noting(agent: Any) -> None:
        init_rpc_states(agent)
        seen = {
            "agent": _class_of(agent),
            "behind": _class_of(getattr(agent, "agent", None)),
            "torchs": _is_torchs_in_force(),
            "worker": agent.get_worker_info().name,
        }
        with open(os.path.join(os.environ["RPC_WITNESS"], str(os.getpid())), "a", encoding="utf-8") as file:
            file.write(json.dumps(seen) + "\n")

    api._init_rpc_states = noting


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _watch(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _PLACES:
            return None
        _PLACES.remove(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if "RPC_WITNESS" in os.environ:
    sys.meta_path.insert(0, _Finder())
