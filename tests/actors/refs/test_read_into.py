"""``ObjectRef.read_into`` copies a referenced tensor into a tensor of the reader."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import rpc
from actorrpc.actors.refs import offers
from actorrpc.actors.refs.object_ref import ObjectRef
from tests.actors.two_hosts import run
from tests.devices import DEVICES

_ROWS = 1 << 10  # of 4 KiB
_gate = threading.Event()
_withdrawn = threading.Event()


@actorrpc.remote(max_concurrency=2)
class Runner:
    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return function(*args, **options)


def _runner(worker: str) -> Callable[..., Any]:
    """Return a function that runs a function on a worker and returns an ObjectRef."""
    return Runner.options(worker=worker).remote().run.remote  # type: ignore[no-any-return]


def _value(rows: int = _ROWS) -> torch.Tensor:
    return torch.arange(rows * 1024, dtype=torch.float32).view(rows, 1024)


def _transposed() -> torch.Tensor:
    return _value().t().contiguous().t()


def _hold() -> torch.Tensor:
    assert _gate.wait(30.0)
    return _value()


def _open() -> None:
    _gate.set()


def _start_holding() -> tuple[ObjectRef[torch.Tensor], Any]:
    """Return a pending result that belongs to this worker, and its actor."""
    _gate.clear()
    actor = Runner.options(worker=rpc.get_worker_info().name).remote()
    return actor.run.remote(_hold), actor


def _fail() -> None:
    raise KeyError("no tensor")


def _put() -> list[ObjectRef[torch.Tensor]]:
    return [actorrpc.put(_value())]


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _check_reads(refs: list[ObjectRef[torch.Tensor]], device: str) -> None:
    (ref,) = refs
    for target in (
        torch.zeros(_ROWS, 1024, device=device),
        torch.zeros(1024, _ROWS, device=device).t(),
        torch.zeros(_ROWS, 3, 1024, device=device)[:, 1],
        torch.nn.Parameter(torch.zeros(_ROWS, 1024, device=device)),
    ):
        assert ref.read_into(target, timeout=30) is target
        assert torch.equal(target.cpu(), _value())
        target.detach().zero_()
    assert torch.equal(actorrpc.get(ref), _value())


def _check_errors(run: Callable[..., Any]) -> None:
    ref, target = run(_value), torch.zeros(_ROWS, 1024)
    for wrong, message in [
        (torch.zeros(1024), r"torch\.float32 tensor of shape \(1024, 1024\).* shape \(1024,\)"),
        (torch.zeros(_ROWS, 1024, dtype=torch.int32), r"a torch\.float32 tensor .* a torch\.int32 tensor"),
        (torch.zeros(1).expand(_ROWS, 1024), "elements of it may share memory"),
        (torch.zeros(_ROWS, 1024, device="meta"), "on the CPU or on a CUDA device, not .* on meta"),
        (torch.zeros(_ROWS, 1024).to_sparse(), "strided"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            ref.read_into(wrong)
    for value, name in (
        (run(list, b"several"), "list"),
        (run(torch.zeros, 8, device="meta"), r"torch\.float32 meta tensor of shape \(8,\)"),
        (run(_nested), "nested tensor"),
    ):
        with pytest.raises(TypeError, match=f"is a {name}, and cannot be read into"):
            value.read_into(target)
    with pytest.raises(KeyError, match="no tensor"):
        run(_fail).read_into(target)
    assert not target.any()


def _check_all_kinds(worker: str, device: str) -> None:
    run = _runner(worker)
    for refs in (_put(), [run(_value)], [run(_transposed)], actorrpc.get(run(_put))):
        _check_reads(refs, device)
    _check_errors(run)
    for rows in (0, 1):
        assert torch.equal(run(_value, rows).read_into(torch.zeros(rows, 1024)), _value(rows))
    for start in (lambda: (run(_hold), run), lambda: actorrpc.get(run(_start_holding))):
        (later, _actor), target = start(), torch.zeros(_ROWS, 1024)
        with pytest.raises(actorrpc.GetTimeoutError, match=r"Runner\.run.* was not complete within 0 s"):
            later.read_into(target, timeout=0)
        read = threading.Thread(target=later.read_into, args=(target,))
        read.start()
        actorrpc.get(run(_open))
        read.join()
        assert torch.equal(target, _value())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("one_worker")
def test_values_of_the_same_process_are_read(device: str) -> None:
    _gate.clear()
    _check_all_kinds("w0", device)


def _check_two_hosts(device: str) -> None:
    _check_all_kinds("worker1", device)
    refs = [_runner("worker1")(_value)]  # worker 2 shares the memory of worker 1
    rpc.rpc_sync("worker2", _check_reads, (refs, device))


def _shorten_chunks() -> None:
    offers.CHUNK = 300_004  # begins and ends within rows


@pytest.mark.parametrize("device", DEVICES)
def test_values_of_another_host_are_read(device: str) -> None:
    run(partial(_check_two_hosts, device), 3, prepare=_shorten_chunks)


def _check_chunks() -> None:
    rows = 1 << 16  # 256 MiB
    target, refs = torch.ones(rows, 1024), [_runner(f"worker{each}")(_value, rows) for each in (1, 2)]
    actorrpc.wait(refs, num_returns=2, fetch_local=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refs[0].read_into(target)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (5 * offers.CHUNK) >> 10
    assert target[-1, -1] == rows * 1024 - 1
    for ref, act, timeout, error, message in (
        (refs[0], _hold, 2, actorrpc.GetTimeoutError, "from worker 'worker1' within 2 s"),
        (refs[1], _die, None, actorrpc.PeerDiedError, "its owner, worker 'worker2', has ended"),
    ):
        rpc.rpc_sync(message.split("'")[1], _patch_third_chunk, (act,))
        with pytest.raises(error, match=rf"{message}: \d+ of {rows * 4096} bytes were read, .* partly"):
            ref.read_into(target, timeout=timeout)
    rpc.rpc_sync("worker1", _open)


def _patch_third_chunk(act: Callable[[], Any]) -> None:
    chunk = offers.chunk

    def patched(lease: Any, start: int, stop: int) -> torch.Tensor:
        if start * 4 == 2 * offers.CHUNK:  # the reader has copied the first chunk
            act()
        return chunk(lease, start, stop)

    offers.chunk = patched


def test_a_reader_needs_memory_for_a_few_chunks_and_names_owner_and_bytes_if_it_fails() -> None:
    run(_check_chunks, 3, may_die=(2,))


# -- registered transports --------------------------------------------------------------------------------------------


class Files:
    """A transport whose registered memory is a file."""

    name = "files"
    during_read: Callable[[Callable[[], None]], Any]

    def supports(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def offer(self, tensor: torch.Tensor) -> bytes:
        if len(tensor) != _ROWS:
            raise OSError("no room")
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(tensor.numpy().tobytes())
        return file.name.encode()

    def read(self, descriptor: bytes, target: torch.Tensor, timeout: Any, check: Callable[[], None]) -> None:
        Files.during_read(check)
        content = bytearray(Path(descriptor.decode()).read_bytes())
        target.view(-1).copy_(torch.frombuffer(content, dtype=target.dtype))

    def withdraw(self, descriptor: bytes) -> None:
        os.unlink(descriptor)
        _withdrawn.set()


def _poll(check: Callable[[], None]) -> None:
    while True:
        check()


def _read(refs: list[ObjectRef[torch.Tensor]], act: Any, timeout: Any = None, rows: int = _ROWS) -> bool:
    Files.during_read = act
    return torch.equal(refs[0].read_into(torch.zeros(rows, 1024), timeout=timeout), _value(rows))


def _check_transport() -> None:
    refs = _put()

    def read(*args: Any, worker: str = "worker1") -> Any:
        _withdrawn.clear()
        try:
            return rpc.rpc_sync(worker, _read, (refs, *args))
        finally:
            assert _withdrawn.wait(30)

    assert read(lambda check: check())
    late = r"from worker 'worker0' within 0\.1 s: the transport 'files' had begun, .* partly"
    with pytest.raises(actorrpc.GetTimeoutError, match=late):
        read(_poll, 0.1)
    broken = r"'worker1' could not read .*'worker0': .*'files' .* partly .*ZeroDivisionError"
    with pytest.raises(actorrpc.RpcError, match=broken):
        read(lambda check: 1 / 0)
    with pytest.raises(actorrpc.PeerDiedError):
        read(lambda check: _die(), worker="worker2")
    full = r"'worker0' cannot offer .* to worker 'worker1' by the transport 'files': OSError: no room"
    with pytest.raises(actorrpc.RpcError, match=full):
        rpc.rpc_sync("worker1", _read, ([actorrpc.put(_value(512))], None, None, 512))
    rpc.rpc_sync("worker1", actorrpc.unregister_tensor_transport, ("files",))
    assert rpc.rpc_sync("worker1", _read, (refs, None))  # over the connection


def _register() -> None:
    actorrpc.register_tensor_transport(Files())


def test_a_transport_withdraws_a_tensor_when_its_reader_has_finished_or_died() -> None:
    run(_check_transport, 3, prepare=_register, may_die=(2,))


def test_transports_are_checked_when_they_are_registered() -> None:
    with pytest.raises(TypeError, match="lacks the methods supports, offer, read, withdraw"):
        actorrpc.register_tensor_transport(Path("/x"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="register an object, and not the class Files"):
        actorrpc.register_tensor_transport(Files)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no transport 'nixl' is registered; registered are: none"):
        actorrpc.unregister_tensor_transport("nixl")
