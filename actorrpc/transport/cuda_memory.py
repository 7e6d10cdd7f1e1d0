"""Memory of CUDA devices that two processes of one host share, for :mod:`actorrpc.transport.device_memory`.

A handle of the CUDA driver names an allocation. The process that exports memory does not use ``UntypedStorage._share_cuda_`` for
it: that method makes an event and a file, which a killed process leaves, and puts torch's version into the handle. The process
that opens memory does so by torch, without torch's counter of the processes that use a storage: a killed process never lowers
the counter. The receiver reports when it no longer uses a block, and an RRef keeps a shared tensor, so no counter is needed.

The driver does not export memory of expandable segments and of ``backend:cudaMallocAsync``; tensors are then sent through host
memory.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Any, Final

import torch

from actorrpc import _torch
from actorrpc.transport.device_memory import DeviceBlock, DeviceMemory

__all__ = ["cuda_memory"]

_log = logging.getLogger(__name__)
# In place of torch's counter: the name of a file that does not exist. torch ignores that it cannot open the file.
_NO_COUNTER: Final = b"/actorrpc-has-no-counter"
_HANDLE_BYTES: Final = 64  # the size of the driver's CUipcMemHandle, which all versions of torch open


class _Block:
    def __init__(self, tensor: torch.Tensor, handle: list[Any], stream: torch.cuda.Stream | None) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.size = tensor.nbytes
        self.handle = handle
        self._stream = stream  # None: this process has allocated the block

    def close(self) -> None:
        # When memory of another process is closed, torch waits for the current stream, and holds the GIL meanwhile. Only copies
        # out of blocks are queued on this stream, so the wait is short, and does not include the work of the user's streams.
        with torch.cuda.stream(self._stream):
            self.tensor = None


class _CudaMemory:
    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def uuid(self, device: torch.device) -> str:
        if device.type != "cuda":
            return ""
        return str(torch.cuda.get_device_properties(device).uuid)

    def uuids(self) -> list[str]:
        if not torch.cuda.is_initialized():
            return []
        return [self.uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]

    def allocate(self, device: torch.device, size: int) -> DeviceBlock:
        try:
            # Ordinary tensors, which any thread may fill, even if this thread is in inference mode.
            with torch.inference_mode(False):
                tensor = torch.empty(size, dtype=torch.uint8, device=device)
                return _Block(tensor, _export(tensor), None)
        except (RuntimeError, MemoryError) as error:
            _log.info("tensors on %s are sent through host memory: %s", device, error)
            raise MemoryError(str(error)) from error

    def open(self, uuid: str, handle: list[Any]) -> DeviceBlock:
        storage = self.attach(uuid, handle)
        with torch.inference_mode(False):
            tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return _Block(tensor, handle, self._copies(tensor.device))

    def export(self, tensor: torch.Tensor) -> list[Any]:
        return _export(tensor)

    def attach(self, uuid: str, handle: list[Any]) -> torch.UntypedStorage:
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:  # AssertionError: no driver
            raise OSError(f"CUDA cannot be used: {error}") from error
        uuids = self.uuids()
        if uuid not in uuids:
            raise OSError(f"this process does not see GPU {uuid}")
        index = uuids.index(uuid)
        try:
            data, size, offset = handle
            # These arguments name no event, because the owner waits for its own work before it sends the handle.
            parts = (index, data, size, offset, _NO_COUNTER, 0, b"", False)
            with torch.inference_mode(False), torch.cuda.device(index):
                storage: torch.UntypedStorage = _torch.import_storage(*parts)
        except (RuntimeError, TypeError, ValueError) as error:
            raise OSError(f"memory of GPU {uuid} cannot be opened: {error}") from error
        return storage

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.current_stream(device).synchronize()

    def fill(self, block: Any, offsets: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        target: torch.Tensor | None = block.tensor
        if target is None:
            return  # another thread has closed the connection, so the message is not sent
        with torch.inference_mode(False), torch.no_grad():
            for offset, tensor in zip(offsets, tensors, strict=True):
                target[offset : offset + tensor.nbytes].copy_(tensor)
        self.synchronize(target.device)

    def read(
        self, block: Any, offsets: Sequence[int], sizes: Sequence[int], targets: Sequence[str]
    ) -> list[torch.Tensor]:
        source: torch.Tensor | None = block.tensor
        if source is None:
            raise OSError("the connection was closed")
        devices = [torch.device(target) for target in targets]
        if any(device.type != "cuda" for device in devices):
            raise RuntimeError("it is no CUDA device")
        made: list[torch.Tensor] = []
        with torch.inference_mode(False), torch.no_grad():
            try:
                for size, device in zip(sizes, devices, strict=True):
                    # The memory is allocated on the stream of the copies, which does not wait for the work of other streams.
                    with torch.cuda.stream(self._copies(device)):
                        made.append(torch.empty(size, dtype=torch.uint8, device=device))
            except torch.OutOfMemoryError as error:
                raise MemoryError(str(error)) from error
            for tensor, offset in zip(made, offsets, strict=True):
                user = torch.cuda.current_stream(tensor.device)
                # A copy between two devices is queued on streams of both.
                with (
                    torch.cuda.stream(self._copies(source.device)),
                    torch.cuda.stream(self._copies(tensor.device)),
                ):
                    tensor.copy_(source[offset : offset + tensor.nbytes], non_blocking=True)
                # The allocator reuses this memory only after the work that is queued on `user` when the tensor is freed.
                tensor.record_stream(user)
        for device in {*devices, source.device}:
            self._copies(device).synchronize()
        return made

    def _copies(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of the copies to a device."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        return stream


def _export(tensor: torch.Tensor) -> list[Any]:
    """Return the handle with which another process opens the memory of a tensor.

    Raises:
        MemoryError: CUDA cannot export the memory.
    """
    address, base, size = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_uint64(), ctypes.c_size_t()
    data = ctypes.create_string_buffer(_HANDLE_BYTES)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        with torch.cuda.device(tensor.device):
            torch.cuda.current_stream().query()  # makes the context of the device the current one of this thread
            status = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)
            status = status or driver.cuIpcGetMemHandle(data, base)
    except (OSError, RuntimeError) as error:
        raise MemoryError(f"CUDA cannot export the memory: {error}") from error
    if status:
        raise MemoryError(
            f"CUDA cannot export the memory (error {status} of the driver). The driver does not export expandable segments or "
            "memory of cudaMallocAsync: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False before the process uses CUDA"
        )
    return [data.raw, tensor.untyped_storage().nbytes(), address.value - base.value]


@functools.cache
def cuda_memory() -> DeviceMemory | None:
    """Return the memory of the CUDA devices of this process; None if this torch cannot share it."""
    return _CudaMemory() if torch.version.cuda is not None and _torch.import_storage is not None else None
