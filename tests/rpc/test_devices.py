"""GPU tensors in calls, RRefs and gradients, with a device map between two workers on one GPU.

The same programs also run on the CPU, with maps of the CPU.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
import actorrpc.autograd as dist_autograd
from actorrpc import errors, rpc
from actorrpc.agent.agent import Agent
from actorrpc.agent.context import current_worker
from tests import certificates
from tests.actors.e2e.kit import until
from tests.announced import ODD_TENSORS
from tests.devices import DEVICES
from tests.fake_devices import share_memory
from tests.ranks import rpc_group

pytestmark = pytest.mark.limit(120)

_LONG = 200_000_000  # GPU clock cycles: a tenth of a second, long enough to reveal a copy that does not wait


def between(device: str) -> dict[str, Any]:
    """Return options with which workers 0 and 1 exchange tensors of a device; only worker 0 has a map."""
    return {"device_maps": {"worker1": {device: device}}}


def run(program: Any, device: str, *args: Any, size: int = 2, options: Any = None) -> list[Any]:
    return rpc_group(
        _on_rank_0,
        size,
        program,
        device,
        *args,
        timeout=100.0,
        options=options if options is not None else between(device),
    )


def _on_rank_0(rank: int, world_size: int, program: Any, *args: Any) -> Any:
    return program(*args) if rank == 0 else None


def delay(device: torch.device | str) -> None:
    """Queue a slow kernel on the current stream, so that later work on the stream is delayed."""
    if torch.device(device).type == "cuda":
        torch.cuda._sleep(_LONG)


# -- calls ---------------------------------------------------------------------------------------


def _facts(tensor: torch.Tensor) -> tuple[str, float]:
    return str(tensor.device), tensor.double().sum().item()


def _echo(value: Any) -> Any:
    return value


def _various(device: str) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    found = [(f"of {n}", torch.randn(n, device=device)) for n in (0, 1, 1000, 100_000)]
    base = torch.randn(300, 300, device=device)
    found += [
        ("transposed", base.t()),
        ("strided", base[::3, 1::2]),
        ("a column", base[:, 1]),
        ("whole", base[1]),
        ("half", base.half()),
        ("bfloat16", base.bfloat16()),
        ("bool", base > 0),
        ("complex", torch.randn(9, dtype=torch.complex64, device=device).conj()),
        ("sparse", (base * (base > 1)).to_sparse()),
        ("empty sparse", (base * 0).to_sparse()),
        ("csr", (base[:5] * (base[:5] > 1)).to_sparse_csr()),
        ("parameter", torch.nn.Parameter(base[:2].clone())),
        ("empty parameter", torch.nn.Parameter(base[:0].clone())),
    ]
    return found


def _calls(device: str) -> None:
    for name, tensor in _various(device):
        back = rpc.rpc_sync("worker1", _echo, (tensor,))
        assert str(back.device) == device, name
        assert (back.dtype, back.layout, back.shape, type(back)) == (
            tensor.dtype,
            tensor.layout,
            tensor.shape,
            type(tensor),
        ), name
        assert torch.equal(back.detach().to_dense(), tensor.detach().to_dense()), name
        if tensor.layout is torch.strided:
            wanted = tensor.abs() if tensor.is_complex() else tensor
            assert rpc.rpc_sync("worker1", _facts, (wanted.detach(),))[0] == device, name
    whole = torch.arange(50_000.0, device=device)
    first, second, on_cpu = rpc.rpc_sync("worker1", _echo, ((whole, whole[7:], torch.ones(3)),))
    first[7] = -1.0
    assert second[0].item() == -1.0  # the two tensors still share memory
    assert on_cpu.device.type == "cpu"
    model = rpc.rpc_sync("worker1", _echo, (torch.nn.Linear(3, 3).to(device),))
    assert {str(each.device) for each in model.parameters()} == {device}


def _made_there(device: str) -> None:
    # The caller's map also applies, reversed, to answers.
    made = rpc.rpc_sync("worker1", torch.ones, (3,), {"device": device})
    assert str(made.device) == device


def _mapped(here: str, there: str) -> None:
    tensor = torch.ones(5000, device=here)
    assert rpc.rpc_sync("worker1", _facts, (tensor,)) == (there, 5000.0)
    back = rpc.rpc_sync("worker1", _echo, (tensor,))
    assert back.device == tensor.device
    assert torch.equal(back, tensor)


@pytest.mark.gpu
@pytest.mark.parametrize(("here", "there"), [("cpu", "cuda:0"), ("cuda:0", "cpu")])
def test_a_device_map_moves_arguments_and_maps_results_back(here: str, there: str) -> None:
    run(_mapped, here, there, options={"device_maps": {"worker1": {here: there}}})


def _unmapped(device: str) -> None:
    with pytest.raises(errors.SerializationError, match=r"only supports CPU tensors.*set_device_map.*cuda:0"):
        rpc.rpc_sync("worker1", _echo, (torch.ones(1, device=device),))
    with pytest.raises(errors.SerializationError, match=r"set_device_map.*cuda:0"):
        rpc.rpc_sync("worker1", torch.ones, (1,), {"device": device})
    assert rpc.rpc_sync("worker1", _echo, (3,)) == 3


@pytest.mark.gpu
def test_gpu_tensors_without_a_device_map_raise_serialization_error() -> None:
    run(_unmapped, "cuda:0", options={})


# -- errors --------------------------------------------------------------------------------------


def _too_much(device: str) -> Any:
    if device == "cpu":
        raise torch.OutOfMemoryError("made up: out of memory")
    return torch.empty(1 << 50, dtype=torch.uint8, device=device)


def _out_of_memory(device: str) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught:
        rpc.rpc_sync("worker1", _too_much, (device,))
    assert isinstance(caught.value, errors.RemoteError)
    assert rpc.rpc_sync("worker1", _facts, (torch.ones(2, device=device),)) == (device, 2.0)


# -- streams -------------------------------------------------------------------------------------


def _slow_ones(device: str, size: int) -> torch.Tensor:
    made = torch.zeros(size, device=device)
    delay(device)
    return made.add_(1.0)


class _OtherStream:
    """Makes a new stream the current stream; has no effect on the CPU."""

    def __init__(self, device: str) -> None:
        self._context: Any = None
        if torch.device(device).type == "cuda":
            self._context = torch.cuda.stream(torch.cuda.Stream(device))

    def __enter__(self) -> None:
        if self._context is not None:
            self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._context is not None:
            self._context.__exit__(*error)


def _slow_on_another_stream(device: str, size: int) -> Any:
    """Return a future that is completed before its tensor has been computed on another stream."""
    future: Any = rpc.Future(devices=None if device == "cpu" else [device])
    with _OtherStream(device):
        future.set_result(_slow_ones(device, size))
    return future


@rpc.functions.async_execution
def _async_on_another_stream(device: str, size: int) -> Any:
    return _slow_on_another_stream(device, size)


@rpc.functions.async_execution
def _async_on_a_thread(device: str, size: int) -> Any:
    future: Any = rpc.Future(devices=None if device == "cpu" else [device])

    def work() -> None:
        with _OtherStream(device):
            future.set_result(_slow_ones(device, size))

    threading.Thread(target=work).start()
    return future


def _ordered(device: str) -> None:
    size = 300_000
    ones = torch.ones(size, device=device)
    for _ in range(3):
        with _OtherStream(device):
            mine = _slow_ones(device, size)
            assert rpc.rpc_sync("worker1", _facts, (mine,)) == (device, size)
            future = rpc.rpc_async("worker1", _echo, (_slow_ones(device, size),))
            assert torch.equal(future.wait(), ones)
        assert torch.equal(rpc.rpc_sync("worker1", _slow_ones, (device, size)), ones)
        for function in (_async_on_another_stream, _async_on_a_thread):
            assert torch.equal(rpc.rpc_sync("worker1", function, (device, size)), ones)
        # Changing the argument after the call must not change the sent tensor.
        argument = _slow_ones(device, size)
        future = rpc.rpc_async("worker1", _echo, (argument,))
        argument.zero_()
        if device != "cpu":  # on the CPU, the change may be sent
            assert torch.equal(future.wait(), ones)
        future.wait()


@pytest.mark.parametrize("device", DEVICES)
def test_waiting_for_a_future_synchronizes_with_the_stream_that_completed_it(device: str) -> None:
    size = 300_000
    wanted = torch.ones(size, device=device)
    for _ in range(3):
        future = _slow_on_another_stream(device, size)
        with _OtherStream(device):
            assert torch.equal(future.wait(), wanted)
        chained = _slow_on_another_stream(device, size).then(lambda done: done.value().clone() + 1)
        with _OtherStream(device):
            assert torch.equal(chained.wait(), wanted + 1)


# -- references ----------------------------------------------------------------------------------


def _references(device: str) -> None:
    rref = rpc.remote("worker1", torch.ones, (3, 4), {"device": device})
    assert rpc.rpc_sync("worker1", _facts_of, (rref,)) == (device, 12.0)
    assert str(rref.to_here().device) == device
    assert rref.rpc_sync().sum().item() == 12.0
    assert str(rref.rpc_sync().add(1).device) == device
    for _ in range(3):
        with _OtherStream(device):
            mine = rpc.RRef(_slow_ones(device, 300_000))
        assert rpc.rpc_sync("worker1", _facts_of_fetched, (mine,)) == (device, 300_000.0)
    del rref, mine


def _facts_of(rref: Any) -> tuple[str, float]:
    return _facts(rref.local_value())


def _facts_of_fetched(rref: Any) -> tuple[str, float]:
    return _facts(rref.to_here())


# -- gradients -----------------------------------------------------------------------------------


def _product(x: torch.Tensor, rref: Any) -> torch.Tensor:
    return torch.tanh(x @ rref.local_value())


def _weight(device: str) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(4, 4).to(device).requires_grad_()


def _gradient_there(context: int, rref: Any) -> torch.Tensor:
    return dist_autograd.get_gradients(context)[rref.local_value()]


def _gradients(device: str) -> None:
    torch.manual_seed(5)
    x = torch.randn(6, 4).to(device).requires_grad_()
    local_x, local_w = x.detach().clone().requires_grad_(), _weight(device).detach().requires_grad_()
    torch.tanh(local_x @ local_w).mul(2).sum().backward()
    rref = rpc.remote("worker1", _weight, (device,))
    for _ in range(2):
        with dist_autograd.context() as context:
            out = rpc.rpc_sync("worker1", _product, (x, rref))
            assert str(out.device) == device
            dist_autograd.backward(context, [out.mul(2).sum()])
            mine = dist_autograd.get_gradients(context)[x]
            there = rpc.rpc_sync("worker1", _gradient_there, (context, rref))
            assert str(mine.device) == str(there.device) == device
            torch.testing.assert_close(mine, local_x.grad)
            torch.testing.assert_close(there, local_w.grad)
    del rref


def _all(device: str) -> None:
    _calls(device)
    _made_there(device)
    _out_of_memory(device)
    _ordered(device)
    _references(device)
    _gradients(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.prints("UserWarning: Sparse CSR tensor support is in beta state", *ODD_TENSORS)
def test_device_tensors_arrive_equal_in_calls_rrefs_and_gradients_from_any_stream(device: str) -> None:
    run(_all, device)


def current_agent() -> Agent:
    worker = current_worker()
    assert worker is not None
    return worker.agent


def _through_device_memory(device: str) -> None:
    _all(device)
    conn: Any = current_agent().peer("worker1").conn
    (lender,) = conn.lane.devices.lenders()
    assert lender.placed_bytes > 0
    until(lambda: not conn.lane.devices.is_lending)


@pytest.mark.gpu
def test_tensors_of_a_gpu_arrive_equal_in_calls_rrefs_and_gradients_through_its_memory() -> None:
    rpc_group(
        _on_rank_0,
        2,
        _through_device_memory,
        "cuda:0",
        timeout=100.0,
        options=between("cuda:0"),
        env={"ACTORRPC_DEVICE_LANE_BYTES": str(256 << 20)},
    )


def _share_memory(folder: Path) -> None:
    share_memory(folder)


def _through_fake_devices(folder: Path) -> None:
    rpc.rpc_sync("worker1", _share_memory, (folder,))
    memory = share_memory(folder)
    while not memory.reads:
        rpc.rpc_sync("worker1", _echo, (torch.ones(50_000),))
    _all("cpu")
    assert memory.reads > 10
    (seen,) = [each for each in actorrpc.state(30).workers if each.name == "worker0"]
    (connection,) = seen.connections
    assert connection.device_placed > 0
    assert connection.device_taken > 0
    conn: Any = current_agent().peer("worker1").conn
    until(lambda: not conn.lane.devices.is_lending)


@pytest.mark.skipif(certificates.OVER_TLS, reason="device memory is not shared over TLS")
@pytest.mark.prints("UserWarning: Sparse CSR tensor support is in beta state", *ODD_TENSORS)
def test_tensors_arrive_equal_in_calls_rrefs_and_gradients_through_device_memory(tmp_path: Path) -> None:
    env = {"ACTORRPC_DEVICE_LANE_BYTES": str(64 << 20)}
    rpc_group(_on_rank_0, 2, _through_fake_devices, tmp_path, timeout=100.0, env=env)
    assert not list(tmp_path.iterdir())


def _squared(x: torch.Tensor) -> torch.Tensor:
    return x * x


def _mixed(kind: str) -> None:
    x = torch.ones(3, device=kind, requires_grad=True)
    with dist_autograd.context() as context:
        out = rpc.rpc_sync("worker1", _squared, (x,))
        assert out.device == x.device
        dist_autograd.backward(context, [out.sum()])
        assert torch.equal(dist_autograd.get_gradients(context)[x], torch.full((3,), 2.0, device=kind))


@pytest.mark.gpu
@pytest.mark.parametrize(("here", "there"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_gradients_flow_between_cpu_and_gpu(here: str, there: str) -> None:
    run(_mixed, here, options={"device_maps": {"worker1": {here: there}}})
