"""Names of places; torch's class for them is the oracle for what both know."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.remote_device import _remote_device

from actorrpc import WorkerInfo
from actorrpc.errors import ConfigError, RpcError
from actorrpc.nn.remote_module import device_of, place_of

_GOOD = [
    *("w", "w/cpu", "w/cuda:0", "w/cuda", "w-1_x/meta", "rank:0", "rank:1/cpu", "rank:12/cuda:3"),
    *("cpu", "cuda:1", "meta"),
]
_BAD = [
    *(
        "",
        "/",
        "/cpu",
        "w/",
        "w/foo",
        "w/cpu2",
        "w/cuda:0/cuda:1",
        "w//cpu",
        "rank:/cpu",
        "rank:x",
        "rank:-1/cpu",
    ),
    *("rank:1/", "rank:1/foo"),
]


@pytest.mark.parametrize("text", _GOOD)
def test_as_torch_reads_them(text: str) -> None:
    theirs = _remote_device(text)
    worker = theirs.rank() if theirs.rank() is not None else theirs.worker_name()
    assert place_of(text) == (worker, str(theirs.device()))
    assert place_of(theirs) == place_of(text)


@pytest.mark.parametrize("text", _BAD)
def test_what_torch_refuses(text: str) -> None:
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        _remote_device(text)
    with pytest.raises(ConfigError) as ours:
        place_of(text)
    assert isinstance(ours.value, type(theirs.value))
    first = str(theirs.value).splitlines()[0].partition(":")[0]
    assert first in str(ours.value)


def test_what_torch_does_not_know() -> None:
    assert place_of(WorkerInfo("w", 3)) == ("w", "cpu")
    assert place_of(3) == (3, "cpu")
    assert place_of(torch.device("cuda:2")) == (None, "cuda:2")
    assert place_of("host:7/cpu") == ("host:7", "cpu")  # a name that this package allows, and torch does not


@pytest.mark.parametrize("value", [None, 1.5, True, ("w", "cpu"), b"w/cpu"])
def test_what_is_no_name(value: object) -> None:
    with pytest.raises(TypeError, match=r"Invalid type for remote_device.*such as 'worker1/cpu'"):
        place_of(value)


def test_devices() -> None:
    assert device_of(torch.device("cpu")) == "cpu"
    with pytest.raises(RpcError, match="given as the device 'nowhere'"):
        device_of("nowhere")
    with pytest.raises(ConfigError, match="given as the device None"):
        device_of(None)
