"""Puts actorrpc in the place of ``torch.distributed.rpc`` and of the modules of torch that build on it.

What stands in torch's place are modules of this package, the same objects under torch's names. It makes no difference
whether torch's own were imported before; but a name that a program has bound before (``from torch.distributed.rpc import
RRef``) stays bound to torch's: install first, or use ``python -m actorrpc.compat``.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn

import torch
import torch.distributed
import torch.futures

from actorrpc.autograd.graph import RecvFunction
from actorrpc.compat import autograd, profiling, rpc, translate
from actorrpc.compat.imports import after_import, alias, forget
from actorrpc.compat.nn import remote_module
from actorrpc.compat.nn.remote_module import RemoteModule
from actorrpc.compat.rpc.references import RRef
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
    "without_drop_in",
]

VARIABLE: Final = "ACTORRPC_DROP_IN"
_SITE: Final = str(Path(__file__).with_name("site"))


def _path(environment: Mapping[str, str]) -> list[str]:
    return [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each and each != _SITE]


def drop_in(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set for programs that are to run on actorrpc."""
    return {VARIABLE: "1", "PYTHONPATH": os.pathsep.join([_SITE, *_path(environment)])}


def without_drop_in(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set for programs that are not."""
    return {VARIABLE: "0", "PYTHONPATH": os.pathsep.join(_path(environment))}


def with_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set for programs in which ``import ray`` is to mean :mod:`actorrpc.compat.ray`."""
    return {"ACTORRPC_RAY": "1", "PYTHONPATH": os.pathsep.join([_SITE, *_path(environment)])}


# -- starting a program ----------------------------------------------------------------------------


def check_launch(name: str) -> None:
    """Exit with a line that says why, where the arguments of ``python -m name`` name no program or it could not be told."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: python -m {name} (script.py | -m module) [arguments]")
    if sys.flags.ignore_environment or sys.flags.no_site:
        sys.exit(
            f"python -m {name} does not work with -E, -I and -S: it passes on what is to be done by PYTHONPATH"
        )


def launch(changes: Mapping[str, str]) -> NoReturn:
    """Replace this process, ``python -m name program ...``, by the program, with these variables changed."""
    # Python's own options: what stands before `-m name`.
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) - 1]
    os.environ.update(changes)
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *options, *sys.argv[1:]])


# -- in a program that runs ------------------------------------------------------------------------

_MISSING: Final = object()
_LATE: Final = {
    f"torch.distributed.rpc._testing{name}": f"actorrpc.compat.rpc._testing{name}"
    for name in ("", ".faulty_agent_backend_registry")
}
_lock = threading.Lock()  # guards _before
_before: list[tuple[Any, str, Any]] = []  # what was where, to be put back in reverse order
_modules_before: dict[str, ModuleType | None] = {}
_environment_before: dict[str, str | None] = {}
_waiting: list[Any] = []


def _modules() -> dict[str, ModuleType]:
    """Return what stands in the place of which module of torch."""
    found: dict[str, ModuleType] = {
        "torch.distributed.rpc": rpc,
        "torch.distributed.autograd": autograd,
        "torch.distributed.nn.api.remote_module": remote_module,
    }
    for name in (
        "api",
        "backend_registry",
        "constants",
        "functions",
        "internal",
        "options",
        "server_process_global_profiler",
    ):
        found[f"torch.distributed.rpc.{name}"] = getattr(rpc, name)
    return found


def _put(place: Any, name: str, value: Any) -> None:
    _before.append((place, name, getattr(place, name, _MISSING)))
    setattr(place, name, value)


def _bind_nn(package: Any) -> None:
    """Make the names of ``torch.distributed.nn`` ours."""
    _put(package, "RemoteModule", RemoteModule)
    _put(importlib.import_module("torch.distributed.nn.api"), "remote_module", remote_module)


def _bind_optim(package: Any) -> None:
    """Make the names of ``torch.distributed.optim`` ours."""
    _put(package, "DistributedOptimizer", DistributedOptimizer)
    _put(
        importlib.import_module("torch.distributed.optim.optimizer"),
        "DistributedOptimizer",
        DistributedOptimizer,
    )


def install() -> None:
    """Put actorrpc in the place of torch's modules, in this process and in those that it starts. Idempotent.

    Groups that are joined from now on are actorrpc's, whichever of the two names they are joined by. Thread-safe.
    """
    with _lock:
        if _before:
            return
        for name, value in drop_in(os.environ).items():
            _environment_before[name] = os.environ.get(name)
            os.environ[name] = value
        for name, module in _modules().items():
            _modules_before[name] = sys.modules.get(name)
            sys.modules[name] = module
        _put(torch.distributed, "rpc", rpc)
        _put(torch.distributed, "autograd", autograd)
        # Under this name graphs show the node that stands for a message.
        _put(RecvFunction._backward_cls, "__name__", "torch::distributed::autograd::RecvRpcBackward")
        # torch's cannot see that one of ours has failed before all are complete.
        _put(torch.futures, "collect_all", translate.collect_all)
        _put(torch.futures, "wait_all", translate.wait_all)
        # Those who bound names of torch's own when torch was imported.
        _put(importlib.import_module("torch._jit_internal"), "RRef", RRef)
        _put(importlib.import_module("torch.nn.parallel.distributed"), "RRef", RRef)
        native = getattr(torch._C, "_distributed_rpc", None)
        if native is not None:
            _put(native, "_is_current_rpc_agent_set", rpc.api._is_current_rpc_agent_set)
            _put(native, "PyRRef", RRef)
        for place, name, value in profiling.patches():
            _put(place, name, value)
        rrefs.set_class(RRef)
        # Importing it registers a backend: that is left to those who want it.
        for name in _LATE:
            _modules_before[name] = sys.modules.pop(name, None)
        _waiting.append(alias(_LATE))
        # These take long to import, and most programs do not.
        for name, bind in (("torch.distributed.nn", _bind_nn), ("torch.distributed.optim", _bind_optim)):
            waiting = after_import(name, bind)
            if waiting is not None:
                _waiting.append(waiting)


def uninstall() -> None:
    """Put torch's modules back, if they are not in their places. For tests; not while RPC is initialised."""
    with _lock:
        while _before:
            place, name, value = _before.pop()
            if value is _MISSING:
                delattr(place, name)
            else:
                setattr(place, name, value)
        while _waiting:
            forget(_waiting.pop())
        for variable, text in _environment_before.items():
            if text is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = text
        _environment_before.clear()
        for name, module in _modules_before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
        _modules_before.clear()
        rrefs.set_class(rrefs.RRef)


def is_installed() -> bool:
    """Say whether actorrpc is in the place of torch's modules."""
    return bool(_before)
