"""``ObjectRef.read_into`` copies a referenced tensor into a tensor of the reader."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import rpc
from actorrpc.actors.refs import offers
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.pull import CHUNK
from tests.actors.two_hosts import run

_ROWS = 1 << 10  # rows of 1024 floats: 4 MiB
_gate = threading.Event()
_withdrawn = threading.Event()


def _value(rows: int = _ROWS) -> torch.Tensor:
    return torch.arange(rows * 1024, dtype=torch.float32).view(rows, 1024)


@actorrpc.remote(max_concurrency=2)
class Maker:
    def make(self, rows: int = _ROWS) -> torch.Tensor:
        return _value(rows)

    def transposed(self) -> torch.Tensor:
        return _value().t().contiguous().t()

    def later(self) -> torch.Tensor:
        _hold()
        return _value()

    def fail(self) -> torch.Tensor:
        raise KeyError("no tensor")

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def _targets() -> list[torch.Tensor]:
    return [
        torch.zeros(_ROWS, 1024),
        torch.zeros(1024, _ROWS).t(),
        torch.zeros(_ROWS, 3, 1024)[:, 1],
        torch.nn.Parameter(torch.zeros(_ROWS, 1024)),
    ]


def _check_reads(ref: ObjectRef[torch.Tensor]) -> None:
    for target in _targets():
        assert ref.read_into(target, timeout=30) is target
        assert torch.equal(target, _value())
        assert target.grad_fn is None
    ref.read_into(target).detach().zero_()
    assert torch.equal(actorrpc.get(ref), _value())


def _check_errors(maker: Any) -> None:
    ref = maker.make.remote()
    target = torch.zeros(_ROWS, 1024)
    for wrong, message in [
        (torch.zeros(1024), r"torch\.float32 tensor of shape \(1024, 1024\).* shape \(1024,\)"),
        (torch.zeros(_ROWS, 1024, dtype=torch.int32), r"a torch\.float32 tensor .* a torch\.int32 tensor"),
        (torch.zeros(1).expand(_ROWS, 1024), "elements of it may share memory"),
        (torch.zeros(_ROWS, 1024, device="meta"), "on the CPU or on a CUDA device, not .* on meta"),
        (torch.zeros(_ROWS, 1024).to_sparse(), "strided"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            ref.read_into(wrong)
    with pytest.raises(TypeError, match="is a list, and cannot be read into"):
        maker.run.remote(list, b"several").read_into(target)
    with pytest.raises(KeyError, match="no tensor"):
        maker.fail.remote().read_into(target)
    assert not target.any()


def _check_all_kinds(worker: str) -> None:
    maker = Maker.options(worker=worker).remote()
    _check_reads(actorrpc.put(_value()))
    _check_reads(maker.make.remote())
    _check_reads(maker.transposed.remote())
    (put,) = actorrpc.get(maker.run.remote(_put_in_list))
    _check_reads(put)
    _check_errors(maker)
    assert maker.make.remote(0).read_into(torch.zeros(0, 1024)).shape == (0, 1024)
    assert torch.equal(maker.make.remote(1).read_into(torch.zeros(1, 1024)), _value(1))  # small: in the reply
    later, target = maker.later.remote(), torch.zeros(_ROWS, 1024)
    with pytest.raises(actorrpc.GetTimeoutError, match=r"Maker\.later.* was not complete within 0 s"):
        later.read_into(target, timeout=0)
    read = threading.Thread(target=later.read_into, args=(target,))
    read.start()
    actorrpc.get(maker.run.remote(_open))
    read.join()
    assert torch.equal(target, _value())


def _open() -> None:
    _gate.set()


def _put_in_list() -> list[ObjectRef[torch.Tensor]]:
    return [actorrpc.put(_value())]


@pytest.mark.usefixtures("one_worker")
def test_values_of_the_same_process_are_read() -> None:
    _gate.clear()
    _check_all_kinds("w0")


def _check_two_hosts() -> None:
    _check_all_kinds("worker1")
    ref = (
        Maker.options(worker="worker1").remote().make.remote()
    )  # worker 2 shares the memory of worker 1, and worker 0 does not
    rpc.rpc_sync("worker2", _check_reads_of, ([ref],))


def _check_reads_of(refs: list[ObjectRef[torch.Tensor]]) -> None:
    _check_reads(refs[0])


def test_values_of_another_host_are_read() -> None:
    run(_check_two_hosts, 3)


def _check_memory() -> None:
    rows = 1 << 16  # 256 MiB
    target = torch.ones(rows, 1024)
    ref = Maker.options(worker="worker1").remote().make.remote(rows)
    actorrpc.wait([ref], fetch_local=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ref.read_into(target)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (5 * CHUNK) >> 10
    assert target[-1, -1] == rows * 1024 - 1


def test_a_reader_needs_memory_for_a_few_chunks() -> None:
    run(_check_memory, 2)


def _patch_third_chunk(act: Callable[[], Any]) -> None:
    chunk = offers.chunk

    def patched(lease: Any, start: int, stop: int) -> torch.Tensor:
        if start * 4 == 2 * CHUNK:  # the reader has copied the first chunk
            act()
        return chunk(lease, start, stop)

    offers.chunk = patched


def _hold() -> None:
    assert _gate.wait(30.0)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _check_third_chunk() -> None:
    rows = 1 << 14  # 64 MiB
    for act, worker, error, message in (
        (_hold, "worker1", actorrpc.GetTimeoutError, "from worker 'worker1' within 2 s"),
        (_die, "worker2", actorrpc.PeerDiedError, "its owner, worker 'worker2', has ended"),
    ):
        maker = Maker.options(worker=worker).remote()
        actorrpc.get(maker.run.remote(_patch_third_chunk, act))
        ref = maker.make.remote(rows)
        actorrpc.wait([ref], fetch_local=False)
        with pytest.raises(error, match=rf"{message}: \d+ of {rows * 4096} bytes were read, .* partly"):
            ref.read_into(torch.zeros(rows, 1024), timeout=2 if act is not _die else None)
        if act is not _die:
            actorrpc.get(maker.run.remote(_open))


def test_errors_in_the_middle_name_the_owner_and_the_bytes() -> None:
    run(_check_third_chunk, 3, may_die=(2,))


# -- registered transports --------------------------------------------------------------------------------------------


class Files:
    """A transport whose registered memory is a file."""

    name = "files"

    def supports(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def offer(self, tensor: torch.Tensor) -> bytes:
        assert tensor.is_contiguous()
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(tensor.numpy().tobytes())
        return file.name.encode()

    def read(
        self, descriptor: bytes, target: torch.Tensor, timeout: float | None, check: Callable[[], None]
    ) -> None:
        act(check)
        target.view(-1).copy_(
            torch.frombuffer(bytearray(Path(descriptor.decode()).read_bytes()), dtype=target.dtype)
        )

    def withdraw(self, descriptor: bytes) -> None:
        os.unlink(descriptor)
        _withdrawn.set()


act: Callable[[Callable[[], None]], Any] = lambda check: check()  # noqa: E731


def _poll(check: Callable[[], None]) -> None:
    while True:
        check()


def _read(refs: list[ObjectRef[torch.Tensor]], what: Any, timeout: float | None = None) -> bool:
    global act
    act = what
    return torch.equal(refs[0].read_into(torch.zeros(_ROWS, 1024), timeout=timeout), _value())


def _check_transport() -> None:
    refs = [actorrpc.put(_value())]

    def read(*args: Any, worker: str = "worker1") -> Any:
        _withdrawn.clear()
        try:
            return rpc.rpc_sync(worker, _read, (refs, *args))
        finally:
            assert _withdrawn.wait(30)

    assert read(lambda check: check())
    with pytest.raises(
        actorrpc.GetTimeoutError,
        match=r"from worker 'worker0' within 0\.1 s: the transport 'files' had begun",
    ):
        read(_poll, 0.1)
    with pytest.raises(
        actorrpc.RpcError,
        match=r"'worker1' could not read .*'worker0': .*'files' .* partly .*ZeroDivisionError",
    ):
        read(lambda check: 1 / 0)
    with pytest.raises(actorrpc.PeerDiedError):
        read(lambda check: _die(), worker="worker2")
    rpc.rpc_sync("worker1", actorrpc.unregister_tensor_transport, ("files",))
    assert rpc.rpc_sync("worker1", _read, (refs, None))  # over the connection


def test_a_transport_withdraws_a_tensor_when_its_reader_has_finished_or_died() -> None:
    run(_check_transport, 3, prepare=_register, may_die=(2,))


def _register() -> None:
    actorrpc.register_tensor_transport(Files())


def test_transports_are_checked_when_they_are_registered() -> None:
    with pytest.raises(TypeError, match="lacks the methods supports, offer, read, withdraw"):
        actorrpc.register_tensor_transport(Path("/x"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no transport 'nixl' is registered; registered are: none"):
        actorrpc.unregister_tensor_transport("nixl")
