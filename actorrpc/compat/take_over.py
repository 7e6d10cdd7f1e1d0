"""Replaces ``torch.distributed.rpc``, and the modules of torch that build on it, by actorrpc.

The replacements are modules of this package, under torch's names. torch's own modules may have been imported before. But a name
that a program has bound before (``from torch.distributed.rpc import RRef``) stays bound to torch's object: call :func:`install`
first, or use ``python -m actorrpc.compat``. This also works if torch was built without RPC, or has no such modules.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn, TypeVar

import torch
import torch.distributed
import torch.futures

from actorrpc._torch import distributed_rpc, node_class
from actorrpc.autograd.graph import RecvFunction
from actorrpc.compat import autograd, profiling, remote_module, rpc, translate
from actorrpc.compat.imports import after_import, alias, forget
from actorrpc.compat.rpc.references import RRef
from actorrpc.nn import RemoteModule
from actorrpc.optim import DistributedOptimizer
from actorrpc.rpc import rref as rrefs

__all__ = [
    "VARIABLE",
    "check_launch",
    "drop_in",
    "install",
    "is_installed",
    "launch",
    "uninstall",
    "with_ray",
]

T = TypeVar("T")
VARIABLE: Final = "ACTORRPC_DROP_IN"
_SITE: Final = str(Path(__file__).with_name("site"))


def _path(environment: Mapping[str, str]) -> list[str]:
    return [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each and each != _SITE]


def drop_in(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with which programs of torch's RPC run on actorrpc."""
    return {VARIABLE: "1", "PYTHONPATH": os.pathsep.join([_SITE, *_path(environment)])}


def with_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with which ``import ray`` imports :mod:`actorrpc.compat.ray`."""
    return {"ACTORRPC_RAY": "1", "PYTHONPATH": os.pathsep.join([_SITE, *_path(environment)])}


# -- starting a program ----------------------------------------------------------------------------


def check_launch(name: str) -> None:
    """Exit with a message if ``python -m name`` has no program among its arguments, or has options that it cannot support."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: python -m {name} (script.py | -m module) [arguments]")
    if sys.flags.ignore_environment or sys.flags.no_site:
        sys.exit(
            f"python -m {name} does not work with -E, -I and -S, because it changes the program by PYTHONPATH"
        )


def launch(changes: Mapping[str, str]) -> NoReturn:
    """Replace this process, ``python -m name program ...``, by the program, with changed environment variables."""
    # Python's own options: the arguments before `-m name`.
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) - 1]
    os.environ.update(changes)
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *options, *sys.argv[1:]])


# -- in a program that runs ------------------------------------------------------------------------

_MISSING: Final = object()
_MODULES: Final[dict[str, ModuleType]] = {
    "torch.distributed.rpc": rpc,
    "torch.distributed.rpc.api": rpc.api,
    "torch.distributed.rpc.backend_registry": rpc.backend_registry,
    "torch.distributed.rpc.constants": rpc.constants,
    "torch.distributed.rpc.functions": rpc.functions,
    "torch.distributed.rpc.internal": rpc.internal,
    "torch.distributed.rpc.options": rpc.options,
    "torch.distributed.rpc.server_process_global_profiler": rpc.server_process_global_profiler,
    "torch.distributed.autograd": autograd,
    "torch.distributed.nn.api.remote_module": remote_module,
}
_LATE: Final = dict.fromkeys(
    ("torch.distributed.rpc._testing", "torch.distributed.rpc._testing.faulty_agent_backend_registry"),
    "actorrpc.compat.rpc._testing",
)
_lock = threading.Lock()  # guards _undo
_undo: ExitStack | None = None  # undoes all replacements, in reverse order; None: not installed


def _put(place: Any, name: str, value: Any) -> None:
    before = getattr(place, name, _MISSING)
    assert _undo is not None
    if before is _MISSING:
        _undo.callback(delattr, place, name)
    else:
        _undo.callback(setattr, place, name, before)
    setattr(place, name, value)


def _put_in(table: MutableMapping[str, T], key: str, value: T | None) -> None:
    """Set the value of a key in a table until :func:`uninstall` restores it; None removes the key."""
    assert _undo is not None
    _undo.callback(_set, table, key, table.get(key))
    _set(table, key, value)


def _set(table: MutableMapping[str, T], key: str, value: T | None) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


def _submodule(package: Any, name: str) -> Any:
    """Return a module of a package of torch, or an empty module in its place if this version of torch does not have it."""
    full = f"{package.__name__}.{name}"
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError as error:
        if error.name != full:
            raise
    made = ModuleType(full)
    _put_in(sys.modules, full, made)
    _put(package, name, made)
    return made


def _bind_nn(package: Any) -> None:
    _put(package, "RemoteModule", RemoteModule)
    _put(_submodule(package, "api"), "remote_module", remote_module)


def _bind_optim(package: Any) -> None:
    _put(package, "DistributedOptimizer", DistributedOptimizer)
    _put(_submodule(package, "optimizer"), "DistributedOptimizer", DistributedOptimizer)


def _bind_annotations() -> None:
    """Define names that torch's compiler of scripts uses where RPC is available, and that builds without RPC do not define."""
    module = importlib.import_module("torch.jit.annotations")
    for name, value in (("RRef", RRef), ("is_rref", lambda _annotation: False)):
        if not hasattr(module, name):
            _put(module, name, value)


def install() -> None:
    """Replace torch's modules by actorrpc's, in this process and in processes that it starts. Idempotent. Thread-safe.

    From now on, torch's names join groups of actorrpc. A group of torch that was joined before is not changed.
    """
    global _undo
    with _lock:
        if _undo is not None:
            return
        _undo = ExitStack()
        for variable, text in drop_in(os.environ).items():
            _put_in(os.environ, variable, text)
        for name, module in _MODULES.items():
            _put_in(sys.modules, name, module)
        _put(torch.distributed, "rpc", rpc)
        _put(torch.distributed, "autograd", autograd)
        # Give the graph node of a received message the name that torch gives it.
        _put(node_class(RecvFunction), "__name__", "torch::distributed::autograd::RecvRpcBackward")
        # With futures of actorrpc, torch's own functions would wait for all futures before they raise the error of one.
        _put(torch.futures, "collect_all", translate.collect_all)
        _put(torch.futures, "wait_all", translate.wait_all)
        # These two modules have imported torch's RRef by name, so the name is replaced there, too.
        _put(importlib.import_module("torch._jit_internal"), "RRef", RRef)
        data_parallel = importlib.import_module("torch.nn.parallel.distributed")
        _put(data_parallel, "RRef", RRef)
        _put(data_parallel, "RPC_AVAILABLE", True)  # False in builds of torch without RPC
        _bind_annotations()
        if distributed_rpc is not None:
            _put(distributed_rpc, "_is_current_rpc_agent_set", rpc.api._is_current_rpc_agent_set)
            _put(distributed_rpc, "PyRRef", RRef)
        for place, name, value in profiling.patches():
            _put(place, name, value)
        rrefs.set_class(RRef)
        _undo.callback(rrefs.set_class, rrefs.RRef)
        # Importing these modules registers a backend, so they are imported only when the program imports them.
        for name in _LATE:
            _put_in(sys.modules, name, None)
        _undo.callback(forget, alias(_LATE))
        # These modules take long to import, and most programs do not use them.
        for name, bind in (("torch.distributed.nn", _bind_nn), ("torch.distributed.optim", _bind_optim)):
            waiting = after_import(name, bind)
            if waiting is not None:
                _undo.callback(forget, waiting)


def uninstall() -> None:
    """Restore torch's modules. Does nothing if actorrpc is not installed. For tests; not while RPC is initialised."""
    global _undo
    with _lock:
        if _undo is not None:
            _undo.close()
            _undo = None


def is_installed() -> bool:
    """Say whether actorrpc replaces torch's modules."""
    return _undo is not None
