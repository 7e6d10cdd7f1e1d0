"""compat.install() replaces torch's modules by actorrpc's, and uninstall() restores them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.autograd
import torch.distributed.rpc
import torch.nn.parallel.distributed

from actorrpc import compat
from actorrpc.compat import autograd, remote_module, rpc
from actorrpc.nn import RemoteModule
from actorrpc.optim import DistributedOptimizer
from actorrpc.rpc import rref as rrefs
from tests.migration.rows import row

NATIVE: Any = torch._C._distributed_rpc
TORCHS = torch.distributed.rpc
PLACES = [
    (torch.distributed, "rpc"),
    (torch.distributed, "autograd"),
    (torch._jit_internal, "RRef"),
    (torch.nn.parallel.distributed, "RRef"),
    (NATIVE, "_is_current_rpc_agent_set"),
    (NATIVE, "PyRRef"),
    (torch.futures, "wait_all"),
    (torch.futures, "collect_all"),
]


@pytest.fixture
def installed() -> Iterator[None]:
    """Install the drop-in in this process for one test."""
    compat.install()
    yield
    compat.uninstall()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "name",
    [
        "",
        ".api",
        ".functions",
        ".backend_registry",
        ".internal",
        ".constants",
        ".options",
        ".server_process_global_profiler",
    ],
)
def test_every_module_of_torch_rpc_is_replaced(name: str) -> None:
    ours = importlib.import_module(f"actorrpc.compat.rpc{name}")
    assert importlib.import_module(f"torch.distributed.rpc{name}") is ours
    assert not name or getattr(torch.distributed.rpc, name[1:]) is ours


@pytest.mark.usefixtures("installed")
def test_torchs_autograd_nn_and_optim_classes_are_replaced() -> None:
    assert torch.distributed.rpc is rpc  # type: ignore[comparison-overlap]
    assert torch.distributed.autograd is sys.modules["torch.distributed.autograd"] is autograd  # type: ignore[comparison-overlap]
    package = importlib.import_module("torch.distributed.nn")
    assert package.RemoteModule is RemoteModule
    assert package.api.remote_module is sys.modules["torch.distributed.nn.api.remote_module"] is remote_module
    optim = importlib.import_module("torch.distributed.optim")
    assert optim.DistributedOptimizer is optim.optimizer.DistributedOptimizer is DistributedOptimizer
    assert optim.ZeroRedundancyOptimizer.__module__.startswith("torch.")


def test_uninstall_restores_torchs_modules() -> None:
    before = [getattr(place, name) for place, name in PLACES]
    environment, finders = dict(os.environ), list(sys.meta_path)
    compat.install()
    compat.install()  # a second call has no effect
    assert compat.is_installed()
    inside = [getattr(place, name) for place, name in PLACES]
    compat.uninstall()
    assert not compat.is_installed()
    assert [getattr(place, name) for place, name in PLACES] == before
    assert all(ours is not torchs for ours, torchs in zip(inside, before, strict=True))
    assert sys.modules["torch.distributed.rpc"] is TORCHS
    assert dict(os.environ) == environment
    assert sys.meta_path == finders
    assert rrefs._made is rrefs.RRef


@row("import torch.distributed.rpc as rpc", "from-torch-rpc")
def test_every_public_name_of_torch_rpc_exists() -> None:
    for theirs, ours in (
        (TORCHS, rpc),
        (TORCHS.api, rpc.api),
        (TORCHS.backend_registry, rpc.backend_registry),
    ):
        missing = [name for name in theirs.__all__ if not hasattr(ours, name)]
        assert missing == [name for name in missing if name in ("method_factory", "new_method")]


@pytest.mark.usefixtures("installed")
def test_users_can_register_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = rpc.backend_registry
    monkeypatch.setattr(registry, "BackendType", registry.BackendType)
    made = registry.register_backend("OTHER", lambda **given: given, lambda *args, **kwargs: kwargs)
    assert made is registry.BackendType.OTHER
    assert repr(made) == "BackendType.OTHER"
    assert registry.backend_registered("OTHER")
    assert registry.construct_rpc_backend_options(made, init_method="x")["init_method"] == "x"
    assert registry.init_backend(made, name="a") == {"name": "a"}
    with pytest.raises(RuntimeError, match="already registered"):
        registry.register_backend("OTHER", None, None)  # type: ignore[arg-type]


def test_options_of_wrong_types_raise_torchs_message() -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        rpc.TensorPipeRpcBackendOptions(rpc_timeout="soon")


def test_calls_before_init_rpc_raise_torchs_message() -> None:
    for call in (lambda: rpc.rpc_sync("a", len), rpc.get_worker_info, rpc._get_debug_info, rpc.shutdown):
        with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
            call()
    with pytest.raises(RuntimeError, match="Current RPC agent is not set"):
        rpc.RRef(1)
