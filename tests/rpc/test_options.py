"""Backend options, and errors of `init_rpc` for invalid arguments."""

from __future__ import annotations

import inspect
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc

from actorrpc import errors, rpc
from tests.ranks import run_group, unused_path

_BOTH = [rpc.RpcBackendOptions, rpc.TensorPipeRpcBackendOptions]


# -- the same as torch's -------------------------------------------------------------------------


def test_parameters_and_defaults_of_options_equal_torchs() -> None:
    theirs = inspect.signature(torch_rpc.TensorPipeRpcBackendOptions.__init__).parameters
    ours = inspect.signature(rpc.TensorPipeRpcBackendOptions.__init__).parameters
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)
    # The base class of torch is written in C++.
    base = list(inspect.signature(rpc.RpcBackendOptions.__init__).parameters.values())[1:]
    assert [(each.name, each.default) for each in base[:2]] == [
        ("rpc_timeout", 60.0),
        ("init_method", "env://"),
    ]
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in base[2:])


@pytest.mark.parametrize(
    "keywords",
    [
        {"rpc_timeout": -1},
        {"rpc_timeout": "5"},
        {"rpc_timeout": None},
        {"num_worker_threads": 0},
        {"num_worker_threads": "4"},
        {"init_method": 3},
        {"device_maps": {"worker1": {"cuda:0": "cuda:0", "cuda:1": "cuda:0"}}},
        {"device_maps": {"worker1": {"nonsense": "cuda:0"}}},
        {"devices": ["nonsense"]},
        {"unknown": 1},
    ],
)
def test_options_that_torch_refuses_raise_torchs_type_and_config_error(keywords: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as theirs:
        torch_rpc.TensorPipeRpcBackendOptions(**keywords)
    with pytest.raises(theirs.type) as ours:
        rpc.TensorPipeRpcBackendOptions(**keywords)
    assert isinstance(ours.value, errors.ConfigError)  # is also a RuntimeError and a ValueError


def test_device_maps_are_merged_as_in_torch() -> None:
    ours, theirs = rpc.TensorPipeRpcBackendOptions(), torch_rpc.TensorPipeRpcBackendOptions()
    for each in (ours, theirs):
        each.set_device_map("worker1", {"cuda:0": "cuda:1"})
        each.set_device_map("worker1", {"cuda:1": "cuda:2"})
        each.set_device_map("worker2", {"cuda:0": "cuda:0"})
        each.set_devices(["cuda:0", "cuda:1"])
    assert ours.device_maps == theirs.device_maps
    assert ours.devices == theirs.devices
    for each in (ours, theirs):
        with pytest.raises(ValueError, match="only supports 1-to-1 mapping"):
            each.set_device_map("worker1", {"cuda:0": "cuda:3"})
        with pytest.raises(ValueError, match="only supports 1-to-1 mapping"):
            each.set_device_map("worker3", {"cuda:0": "cuda:0", "cuda:1": "cuda:0"})
    assert ours.device_maps == theirs.device_maps
    # Unlike torch's options, these also accept other accelerators and the CPU.
    ours.set_devices(["cpu"])
    assert ours.devices == [torch.device("cpu")]


def test_invalid_devices_and_device_maps_raise_config_error() -> None:
    options = rpc.TensorPipeRpcBackendOptions()
    for to, wrong in (
        (3, {}),
        *(
            ("worker1", each)
            for each in (3, ["cuda:0"], {"cuda:0": 1.5}, {"cuda": "cuda:0"}, {"cuda:0": "cuda"})
        ),
    ):
        with pytest.raises(errors.ConfigError):
            options.set_device_map(to, wrong)  # type: ignore[arg-type]
    for devices in (3, "cuda:0", [None], None):
        with pytest.raises(errors.ConfigError):
            options.set_devices(devices)  # type: ignore[arg-type]


# -- options of actorrpc -------------------------------------------------------------------------


@pytest.mark.parametrize("cls", _BOTH)
def test_options_of_actorrpc_are_checked_and_shown_in_repr_except_the_key(cls: Any) -> None:
    """test_config.py has the values of each option; the key is no setting."""
    made = cls(port="7100-7199", lane=None, key="sixteen characters")
    assert "port='7100-7199'" in repr(made)
    assert "key" not in repr(made)
    with pytest.raises(errors.ConfigError, match="port"):
        cls(port=-1)
    for wrong in (b"sixteen characters", 3, "", "too secret"):
        with pytest.raises(errors.ConfigError, match="key") as caught:
            cls(key=wrong)
        assert "too secret" not in str(caught.value)


@pytest.mark.parametrize("cls", _BOTH)
def test_rpc_timeout_and_init_method_are_checked_whenever_they_are_set(cls: Any) -> None:
    for value, kept in [(0, 0.0), (1.5, 1.5), (float("inf"), 0.0), (torch.tensor(2).numpy()[()], 2.0)]:
        assert cls(rpc_timeout=value).rpc_timeout == kept
    made = cls()
    for value in (-1, "1", None, float("nan"), True, [1]):
        with pytest.raises(errors.ConfigError, match="rpc_timeout"):
            cls(rpc_timeout=value)
        with pytest.raises(errors.ConfigError, match="rpc_timeout"):
            made.rpc_timeout = value
    for value in ("", "localhost:1234", 3, None, b"env://"):
        with pytest.raises(errors.ConfigError, match="init_method"):
            cls(init_method=value)
        with pytest.raises(errors.ConfigError, match="init_method"):
            made.init_method = value
    made.rpc_timeout = 3
    made.init_method = "tcp://localhost:1"
    assert (made.rpc_timeout, made.init_method) == (3.0, "tcp://localhost:1")
    assert "3.0" in repr(made)


def test_an_unknown_option_raises_an_error_that_lists_the_known_options() -> None:
    with pytest.raises(errors.ConfigError, match=r"'heartbeats'.*heartbeat"):
        rpc.TensorPipeRpcBackendOptions(heartbeats=1)


# -- init_rpc ------------------------------------------------------------------------------------


def _refusals(path: str) -> list[tuple[str, tuple[Any, ...], dict[str, Any], type[BaseException], str]]:
    group = {"rank": 0, "world_size": 1}
    good = {**group, "rpc_backend_options": rpc.RpcBackendOptions(init_method=f"file://{path}")}

    def meeting(init_method: str) -> dict[str, Any]:
        return {**group, "rpc_backend_options": rpc.RpcBackendOptions(init_method=init_method)}

    return [
        ("name is a number", (3,), good, ValueError, "name"),
        ("name is empty", ("",), good, ValueError, "name"),
        ("name is None", (None,), good, ValueError, "name"),
        ("name has a space", ("a b",), good, ValueError, "name"),
        ("name is too long", ("n" * 128,), good, ValueError, "name"),
        ("rank is a str", ("a",), {**good, "rank": "0"}, TypeError, "rank"),
        ("rank is None", ("a",), {**good, "rank": None}, TypeError, "rank"),
        ("rank is a bool", ("a",), {**good, "rank": True}, TypeError, "rank"),
        ("rank is too large", ("a",), {**good, "rank": 1}, ValueError, "rank"),
        ("rank is negative", ("a",), {**good, "rank": -2}, ValueError, "rank"),
        ("world_size is a str", ("a",), {**good, "world_size": "1"}, TypeError, "world_size"),
        ("world_size is a float", ("a",), {**good, "world_size": 1.0}, TypeError, "world_size"),
        ("world_size is negative", ("a",), {**good, "world_size": -3}, ValueError, "world_size"),
        ("backend is a str", ("a", "gloo"), good, TypeError, "BackendType"),
        (
            "options are a dict",
            ("a",),
            {**group, "rpc_backend_options": {}},
            TypeError,
            "rpc_backend_options",
        ),
        ("no such scheme", ("a",), meeting("carrier://pigeon"), RuntimeError, "carrier"),
        ("no port", ("a",), meeting("tcp://localhost"), RuntimeError, "port"),
        ("no environment", ("a",), meeting("env://"), RuntimeError, "MASTER_ADDR"),
    ]


def _join_wrongly(rank: int, world_size: int, path: str) -> None:
    os.environ.pop("MASTER_ADDR", None)
    before = threading.active_count()
    for name, arguments, keywords, kind, text in _refusals(path):
        with pytest.raises(kind, match=text):
            rpc.init_rpc(*arguments, **keywords)
        assert not rpc.is_initialized(), name
        assert threading.active_count() == before, name
    # Joining still works afterwards.
    rpc.init_rpc(
        "a", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{path}")
    )
    rpc.shutdown()


def test_init_rpc_refuses_invalid_arguments_and_leaves_nothing_running() -> None:
    run_group(_join_wrongly, 1, unused_path("wrong"))


def _join_with_torchs_options(rank: int, world_size: int, path: str) -> None:
    theirs = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=12)
    rpc.init_rpc(f"w{rank}", torch_rpc.BackendType.TENSORPIPE, rank, world_size, theirs)
    assert rpc.get_rpc_timeout() == 12.0
    assert rpc.rpc_sync(1 - rank, max, (1, 2)) == 2
    rpc.shutdown()


def test_init_rpc_accepts_torchs_own_options() -> None:
    run_group(_join_with_torchs_options, 2, unused_path("options"))
