"""Device maps: invalid maps, and the devices of arguments, answers and gradients.

The device ``meta`` stands for a GPU: tensors arrive there, but without their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from actorrpc import errors, rpc
from actorrpc.agent.peers import Peer
from actorrpc.group.rendezvous import check_device_maps
from actorrpc.serialization.codec import decode, encode
from actorrpc.wire.identity import WorkerRecord, new_incarnation
from tests.ranks import run_group, unused_path


def record(
    name: str,
    maps: Mapping[str, Mapping[str, str]] | None = None,
    gpus: int = 0,
    devices: tuple[str, ...] = (),
) -> WorkerRecord:
    routes = [(to, source, target) for to, each in (maps or {}).items() for source, target in each.items()]
    return WorkerRecord(
        name=name,
        rank=ord(name),
        incarnation=new_incarnation(),
        host="h",
        gpus=tuple(map(str, range(gpus))),
        devices=devices,
        device_maps=tuple(routes),
    )


# -- invalid maps -----------------------------------------------------------------------------


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
def test_invalid_device_maps_raise_config_error(
    one: dict[str, Any], other: dict[str, Any], text: str
) -> None:
    a, b = record("a", **{"gpus": 2, **one}), record("b", **{"gpus": 2, **other})
    with pytest.raises(errors.ConfigError, match=text) as caught:
        check_device_maps([b, a], {"a": a, "b": b}.get, fixed=True)
    assert isinstance(caught.value, ValueError)  # like torch


def test_valid_device_maps_are_accepted() -> None:
    a = record(
        "a", {"b": {"cuda:0": "cuda:1", "cuda:1": "cpu", "cpu": "cuda:0"}, "a": {"cuda:0": "cuda:1"}}, gpus=2
    )
    b = record("b", {"a": {"cpu": "meta"}}, gpus=2, devices=("cuda:0", "cuda:1", "cpu"))
    check_device_maps([a, b], {"a": a, "b": b}.get, fixed=True)
    # In a dynamic group, maps for unknown workers are not checked.
    check_device_maps([record("a", {"x": {"cpu": "cuda:7"}})], {}.get, fixed=False)


def _join_wrongly(rank: int, world_size: int, path: str) -> str:
    maps = {f"worker{1 - rank}": {"cuda:100": "cuda:0"}}
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", device_maps=maps)
    try:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    except ValueError as error:
        assert not rpc.is_initialized()
        return str(error)
    rpc.shutdown(graceful=False)
    return "no error"


def test_of_several_invalid_maps_init_rpc_reports_the_same_one_on_all_workers() -> None:
    for found in run_group(_join_wrongly, 2, unused_path("maps")):
        assert "Node worker0 has source devices with invalid indices in its device map for worker1" in found


# -- maps of calls and answers -----------------------------------------------------------------------------------


def maps_of(own: WorkerRecord, other: WorkerRecord) -> tuple[Any, Any]:
    peer = Peer(other, own=own, window=1, definitions=None)
    return peer.device_map, peer.answer_map


def test_answers_use_the_inverse_of_the_callers_map() -> None:
    ring = {"cuda:0": "cuda:1", "cuda:1": "cuda:2", "cuda:2": "cuda:0"}
    inverse = {target: source for source, target in ring.items()}
    a, b = record("a", {"b": ring}), record("b")
    assert maps_of(a, b) == (ring, ring)
    # Gradients of arguments are sent in calls in the opposite direction.
    assert maps_of(b, a) == (inverse, inverse)
    both = record("b", {"a": ring})
    assert maps_of(a, both) == maps_of(both, a) == (ring, inverse)
    alone = record("c", {"c": ring})
    assert maps_of(alone, alone) == (ring, inverse)
    assert maps_of(a, record("c")) == (None, None)


def test_workers_of_a_cluster_send_tensors_to_the_same_gpu_if_the_receiver_sees_it() -> None:
    driver = replace(record("d"), gpus=("0", "1", "2", "3"), device_maps=None)
    actor = replace(record("a"), gpus=("2", "3"), device_maps=None)
    elsewhere = replace(actor, host="other")
    there = {"cuda:0": "cuda:0", "cuda:1": "cuda:1", "cuda:2": "cuda:0", "cuda:3": "cuda:1"}
    assert maps_of(driver, actor) == (there, there)
    back = {"cuda:0": "cuda:2", "cuda:1": "cuda:3"}
    assert maps_of(actor, driver) == (back, back)
    # On another host, the same name is another GPU: the numbers count, and the first device stands for numbers that are missing.
    by_number = {"cuda:0": "cuda:0", "cuda:1": "cuda:1", "cuda:2": "cuda:0", "cuda:3": "cuda:0"}
    assert maps_of(driver, elsewhere)[0] == by_number
    assert maps_of(record("x", gpus=1), record("y", gpus=1)) == (
        None,
        None,
    )  # a group of init_rpc has no maps of its own
    with_none = replace(record("n"), device_maps=None)
    for found in maps_of(driver, with_none):
        with pytest.raises(
            errors.SerializationError, match=r"cuda:1 of worker 'd' .* 'n', which sees no CUDA"
        ):
            found["cuda:1"]


def _place_of(*tensors: torch.Tensor) -> list[str]:
    return [each.device.type for each in tensors]


def _made(device: str) -> torch.Tensor:
    return torch.ones(3, device=device)


def _by_map(rank: int, world_size: int) -> None:
    if rank != 0:
        return
    small, large, none = torch.ones(3), torch.ones(9000), torch.ones(0, 4)
    parameter = torch.nn.Parameter(none)
    assert (
        rpc.rpc_sync("worker1", _place_of, (small, large, large[3:], large[::3], none, parameter))
        == ["meta"] * 6
    )
    # The map of worker 0 does not apply to tensors of workers without a map.
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


def test_cpu_tensors_are_sent_to_their_mapped_device() -> None:
    run_group(_start, 3, unused_path("by-map"))


# -- in messages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 3, 9000])
def test_a_missing_target_device_is_named_in_the_error(size: int) -> None:
    encoded = encode(torch.ones(size), device_map={"cpu": "cuda:99"})
    with pytest.raises(errors.SerializationError, match="a tensor cannot be moved to cuda:99"):
        decode(encoded.body, [bytearray(span.view()) for span in encoded.spans], definitions=None)
