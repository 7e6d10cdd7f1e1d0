"""Device maps: what is refused, which way tensors go, and that answers and gradients come back the other way.

The device ``meta`` stands for a GPU where there is none: what a map sends there arrives there, but for its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from actorrpc import errors, rpc
from actorrpc.agent.peers import Peer
from actorrpc.group import device_maps
from actorrpc.serialization.codec import decode, encode
from actorrpc.wire.identity import WorkerRecord, new_incarnation
from tests.ranks import run_group, unused_path


def record(
    name: str,
    maps: Mapping[str, Mapping[str, str]] | None = None,
    gpus: int = 0,
    devices: tuple[str, ...] = (),
) -> WorkerRecord:
    routes = [(to, here, there) for to, each in (maps or {}).items() for here, there in each.items()]
    return WorkerRecord(
        name=name,
        rank=ord(name),
        incarnation=new_incarnation(),
        host="h",
        cuda_devices=gpus,
        devices=devices,
        device_maps=tuple(routes),
    )


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ({"maps": {"c": {"cuda:0": "cuda:0"}}}, {}, "Node a has invalid target node names .*'c'"),
        (
            {"maps": {"b": {"cuda:2": "cuda:0"}}},
            {},
            "Node a has source devices with invalid indices in its device map for b: cuda:2, but a sees 2",
        ),
        (
            {"maps": {"b": {"cuda:0": "cuda:1"}}},
            {"gpus": 1},
            "Node a has target devices with invalid indices in its device map for b: cuda:1, but b sees 1",
        ),
        (
            {"maps": {"b": {"cuda:0": "cuda:0", "cuda:1": "cuda:0"}}},
            {},
            "Node a has duplicated target devices in its device map for b",
        ),
        ({"devices": ("cuda:0", "cuda:0")}, {}, "Node a has duplicated devices"),
        ({"devices": ("cuda:2",)}, {}, "Node a has devices with invalid indices: cuda:2"),
        (
            {"maps": {"b": {"cuda:0": "cuda:0"}}, "devices": ("cuda:1",)},
            {},
            "Node a has unexpected source devices in its device map for b: cuda:0 .* of a allow",
        ),
        (
            {"maps": {"b": {"cuda:0": "cuda:1"}}},
            {"devices": ("cuda:0",)},
            "Node a has unexpected target devices in its device map for b: cuda:1 .* of b allow",
        ),
    ],
)
def test_maps_that_cannot_be(one: dict[str, Any], other: dict[str, Any], text: str) -> None:
    a, b = record("a", **{"gpus": 2, **one}), record("b", **{"gpus": 2, **other})
    with pytest.raises(errors.ConfigError, match=text) as caught:
        device_maps.check([b, a], {"a": a, "b": b}.get, fixed=True)
    assert isinstance(caught.value, ValueError)  # as torch


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_all_workers_say_the_same_of_several_that_cannot_be(order: tuple[int, int]) -> None:
    both = [record("a", {"b": {"cuda:0": "cpu"}}), record("b", {"a": {"cuda:0": "cpu"}})]
    found = {each.name: each for each in both}
    with pytest.raises(errors.ConfigError, match="Node a has source devices"):
        device_maps.check([both[at] for at in order], found.get, fixed=True)


def test_maps_that_can_be() -> None:
    a = record(
        "a", {"b": {"cuda:0": "cuda:1", "cuda:1": "cpu", "cpu": "cuda:0"}, "a": {"cuda:0": "cuda:1"}}, gpus=2
    )
    b = record("b", {"a": {"cpu": "meta"}}, gpus=2, devices=("cuda:0", "cuda:1", "cpu"))
    device_maps.check([a, b], {"a": a, "b": b}.get, fixed=True)
    # Of whom nothing is known yet, in a group that workers join as they like, nothing is checked.
    device_maps.check([record("a", {"x": {"cpu": "cuda:7"}})], {}.get, fixed=False)


def _join_wrongly(rank: int, world_size: int, path: str) -> str:
    maps = {"worker1": {"cuda:100": "cuda:0"}} if rank == 0 else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", device_maps=maps)
    try:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    except ValueError as error:
        assert not rpc.is_initialized()
        return str(error)
    rpc.shutdown(graceful=False)
    return "no error"


def test_all_workers_of_a_group_hear_of_a_map_that_cannot_be() -> None:
    for found in run_group(_join_wrongly, 2, unused_path("maps")):
        assert "Node worker0 has source devices with invalid indices in its device map for worker1" in found


# -- which way -----------------------------------------------------------------------------------


def ways(own: WorkerRecord, other: WorkerRecord) -> tuple[Any, Any]:
    peer = Peer(other, own=own, window=1, definitions=None)
    return peer.device_map, peer.answer_map


def test_answers_come_back_the_other_way() -> None:
    ring = {"cuda:0": "cuda:1", "cuda:1": "cuda:2", "cuda:2": "cuda:0"}
    back = {there: here for here, there in ring.items()}
    a, b = record("a", {"b": ring}), record("b")
    assert ways(a, b) == (ring, ring)
    # Gradients of what came with a call go back in calls.
    assert ways(b, a) == (back, back)
    both = record("b", {"a": ring})
    assert ways(a, both) == ways(both, a) == (ring, back)
    alone = record("c", {"c": ring})
    assert ways(alone, alone) == (ring, back)
    assert ways(a, record("c")) == (None, None)


def test_what_is_on_the_cpu_moves_only_by_the_map_that_is_meant() -> None:
    a, b = record("a", {"b": {"cpu": "cuda:0"}}), record("b")
    assert ways(a, b) == ({"cpu": "cuda:0"}, None)
    assert ways(b, a) == ({"cuda:0": "cpu"}, {"cuda:0": "cpu"})
    a = record("a", {"b": {"cuda:0": "cpu"}})
    assert ways(a, b) == ({"cuda:0": "cpu"}, {"cuda:0": "cpu"})
    assert ways(b, a) == (None, {"cpu": "cuda:0"})


def _place_of(*tensors: torch.Tensor) -> list[str]:
    return [each.device.type for each in tensors]


def _made(device: str) -> torch.Tensor:
    return torch.ones(3, device=device)


def _by_map(rank: int, world_size: int) -> None:
    if rank != 0:
        return
    small, large, none = torch.ones(3), torch.ones(9000), torch.ones(0, 4)
    assert rpc.rpc_sync("worker1", _place_of, (small, large, large[3:], large[::3], none)) == ["meta"] * 5
    # The map of worker 0 does not count for what others send without one.
    assert rpc.rpc_sync("worker1", _call_back) == ["cpu"]
    assert rpc.rpc_sync("worker1", _made, ("cpu",)).device.type == "cpu"
    assert rpc.rpc_sync("worker2", _place_of, (small,)) == ["cpu"]
    rref = rpc.remote("worker1", _identity, (large,))
    assert rpc.rpc_sync("worker1", _place_of_value, (rref,)) == "meta"


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _place_of_value(rref: rpc.RRef[torch.Tensor]) -> str:
    return rref.local_value().device.type


def _call_back() -> list[str]:
    return rpc.rpc_sync("worker0", _place_of, (torch.ones(3),))


def _start(rank: int, world_size: int, path: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    if rank == 0:
        options.set_device_map("worker1", {"cpu": "meta:0"})
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    _by_map(rank, world_size)
    rpc.shutdown()


def test_tensors_of_the_cpu_by_a_map() -> None:
    run_group(_start, 3, unused_path("by-map"))


# -- in messages ---------------------------------------------------------------------------------


def _trip(value: Any, device_map: Mapping[str, str]) -> Any:
    encoded = encode(value, device_map=device_map)
    return decode(encoded.body, [bytearray(span.view()) for span in encoded.spans], definitions=None)


def test_what_has_no_elements_arrives_where_the_map_says() -> None:
    none = torch.empty(0, 3)
    for made in (none, none.clone().requires_grad_(), torch.nn.Parameter(none)):
        arrived = _trip(made, {"cpu": "meta"})
        assert (arrived.device.type, arrived.shape, arrived.requires_grad) == (
            "meta",
            made.shape,
            made.requires_grad,
        )
        assert type(arrived) is type(made)
        assert _trip(made, {"cpu": "cpu"}).device.type == "cpu"


@pytest.mark.parametrize("size", [0, 3, 9000])
def test_a_device_that_is_not_there_is_named(size: int) -> None:
    with pytest.raises(errors.SerializationError, match="a tensor for cuda:99 cannot be put there"):
        _trip(torch.ones(size), {"cpu": "cuda:99"})
