"""Memory of CUDA devices that two processes of one host share, for :mod:`actorrpc.transport.device_memory`.

A block is a tensor whose storage torch exports once. torch counts the processes that use an exported storage, and does not free
the storage while the count is above 0; a killed process never lowers the count. Therefore the receiver opens storages without a
counter, and the sender lowers the count when it closes a block: the lender knows when the peer has closed the block.

Not used for memory that torch does not get from ``cudaMalloc`` (expandable segments, ``backend:cudaMallocAsync``), which cannot
be exported in most containers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Final

import torch

from actorrpc import _torch
from actorrpc.transport.device_memory import DeviceBlock, DeviceMemory, Done

__all__ = ["cuda_memory", "visible_gpus"]

_log = logging.getLogger(__name__)
# The name of a file that does not exist. torch ignores that it cannot open the file.
_NO_COUNTER: Final = b"/actorrpc-has-no-counter"


class _Block:
    def __init__(self, tensor: torch.Tensor, handle: list[Any], counter: tuple[bytes, int] | None) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.size = tensor.nbytes
        self.handle = handle
        self._counter = counter

    def close(self) -> None:
        tensor, self.tensor = self.tensor, None
        if tensor is not None and self._counter is not None:
            _torch.release_counter(*self._counter)


class _Events:
    """One event for each device to which tensors were copied."""

    def __init__(self, devices: set[torch.device]) -> None:
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def query(self) -> bool:
        try:
            return all(event.query() for event in self._events)
        except RuntimeError:  # an earlier error of the device, which its next user gets, too
            return True


class _CudaMemory:
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
            with torch.inference_mode(False), torch.cuda.device(device):
                tensor = torch.empty(size, dtype=torch.uint8, device=device)
                handle, counter = _export(tensor)
        except (RuntimeError, MemoryError) as error:
            _log.info("tensors on %s are sent through host memory: %s", device, error)
            raise MemoryError(str(error)) from error
        return _Block(tensor, handle, counter)

    def open(self, uuid: str, handle: list[Any]) -> DeviceBlock:
        storage = self._import(uuid, handle)
        with torch.inference_mode(False):
            tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return _Block(tensor, handle, None)

    def share(self, tensor: torch.Tensor) -> list[Any]:
        try:
            with torch.cuda.device(tensor.device):
                handle, counter = _export(tensor)
                _torch.release_counter(*counter)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        return handle

    def attach(self, uuid: str, handle: list[Any]) -> torch.UntypedStorage:
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:  # AssertionError: no driver
            raise OSError(f"CUDA cannot be used: {error}") from error
        return self._import(uuid, handle)

    def _import(self, uuid: str, handle: list[Any]) -> torch.UntypedStorage:
        """Open memory that another process has exported, without torch's counter.

        Raises:
            OSError: this process does not see the GPU, or the memory cannot be opened.
        """
        uuids = self.uuids()
        if uuid not in uuids:
            raise OSError(f"this process does not see GPU {uuid}")
        index = uuids.index(uuid)
        try:
            data, size, offset = handle
            # Without an event, because the sender has waited for its copies.
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
    ) -> tuple[list[torch.Tensor], Done]:
        source: torch.Tensor | None = block.tensor
        if source is None:
            raise OSError("the connection was closed")
        with torch.inference_mode(False), torch.no_grad():
            try:
                made = [
                    torch.empty(size, dtype=torch.uint8, device=target)
                    for size, target in zip(sizes, targets, strict=True)
                ]
            except torch.OutOfMemoryError as error:
                raise MemoryError(str(error)) from error
            for tensor, offset in zip(made, offsets, strict=True):
                tensor.copy_(source[offset : offset + tensor.nbytes], non_blocking=True)
        return made, _Events({tensor.device for tensor in made})


def _export(tensor: torch.Tensor) -> tuple[list[Any], tuple[bytes, int]]:
    """Export the storage of a tensor; return the handle that opens it, and torch's counter of the processes that use it.

    Raises:
        MemoryError: the tensor is in an expandable segment.
        RuntimeError: CUDA cannot export the memory.
    """
    if _is_expandable(tensor):
        raise MemoryError(
            "other processes cannot open memory of expandable segments: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False before the process uses CUDA"
        )
    storage = tensor.untyped_storage()
    _, handle, _, offset, name, number, *_ = _torch.export_storage(storage)
    return [handle, storage.nbytes(), offset], (name, number)


def _is_expandable(tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr()
    return any(
        segment.get("is_expandable", False)
        and segment["address"] <= address < segment["address"] + segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
    )


def cuda_memory() -> DeviceMemory | None:
    """Return the memory of the CUDA devices of this process; None if this torch cannot share it."""
    return _CudaMemory() if torch.version.cuda is not None and _torch.import_storage is not None else None


def visible_gpus(count: int | None = None) -> list[str]:
    """Return the names of the CUDA devices that this process sees, in the order of their numbers.

    The names are those in ``CUDA_VISIBLE_DEVICES``. If it is not set, they are the numbers below ``count``, by default all.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(torch.cuda.device_count() if count is None else count)]
    names = [name.strip() for name in visible.split(",")]
    if "-1" in names:  # CUDA ignores the names from -1 on
        names = names[: names.index("-1")]
    return [name for name in names if name][:count]
