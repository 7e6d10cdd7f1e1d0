"""Devices that need no GPU: their memory is in files that several processes map."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from actorrpc.agent.agent import Agent
from actorrpc.agent.context import current_worker

__all__ = ["FakeMemory", "memory_here", "share_memory"]


class _Block:
    def __init__(self, home: FakeMemory, path: Path, size: int, own: bool) -> None:
        if not path.exists():
            raise FileNotFoundError(path)  # from_file() would create the file
        self.tensor = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        self.size, self.handle = size, [str(path), size]
        self._home, self._own = home, own
        home.blocks.add(self)

    def close(self) -> None:
        self._home.blocks.discard(self)
        if self._own:
            Path(self.handle[0]).unlink(missing_ok=True)


class FakeMemory:
    """The memory of GPUs. CPU tensors are the tensors of the first GPU.

    Attributes:
        blocks: the blocks that this process has allocated or opened, and neither closed nor dropped.
        room: bytes that :meth:`allocate` has left.
        spare: the most bytes of tensors that :meth:`read` makes.
        during_read: is called by :meth:`read` before it copies.
        reads, waits: the numbers of calls of :meth:`read` and :meth:`synchronize`.
        shared: the storages of tensors that :meth:`export` has shared and that have not been freed.
    """

    _numbers = itertools.count()

    def __init__(self, folder: Path, *gpus: str) -> None:
        self._folder, self._gpus = folder, list(gpus or ("GPU-0",))
        self.blocks: WeakSet[_Block] = WeakSet()
        self.room = self.spare = 1 << 40
        self.during_read: Callable[[], object] = dict
        self.reads = self.waits = 0
        self.shared: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def uuid(self, device: torch.device) -> str:
        return self._gpus[device.index or 0] if device.type == "cpu" else ""

    def uuids(self) -> list[str]:
        return self._gpus

    def allocate(self, device: torch.device, size: int) -> Any:
        if size > self.room:
            raise MemoryError(f"{device} has no {size} bytes")
        path = self._folder / f"{os.getpid()}.{next(self._numbers)}"
        path.write_bytes(b"")
        os.truncate(path, size)
        return _Block(self, path, size, True)

    def open(self, uuid: str, handle: list[Any]) -> Any:
        assert uuid in self._gpus
        return _Block(self, Path(handle[0]), handle[1], False)

    def export(self, tensor: torch.Tensor) -> list[Any]:
        """Move a tensor into a file, because only memory of files can be opened by other processes."""
        path = self._folder / f"{os.getpid()}.{next(self._numbers)}"
        moved = torch.from_file(str(path), shared=True, size=tensor.nbytes, dtype=torch.uint8)
        tensor.data = moved.view(tensor.dtype).view(tensor.shape).copy_(tensor.data)
        self.shared.add(tensor.untyped_storage())
        return [str(path), tensor.nbytes]

    def attach(self, uuid: str, handle: list[Any]) -> torch.UntypedStorage:
        if uuid not in self._gpus:
            raise OSError(f"no GPU {uuid}")
        return torch.from_file(handle[0], shared=True, size=handle[1], dtype=torch.uint8).untyped_storage()

    def synchronize(self, device: torch.device) -> None:
        self.waits += 1

    def fill(self, block: Any, offsets: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        for offset, tensor in zip(offsets, tensors, strict=True):
            block.tensor[offset : offset + tensor.nbytes] = tensor

    def read(
        self, block: Any, offsets: Sequence[int], sizes: Sequence[int], targets: Sequence[str]
    ) -> list[torch.Tensor]:
        if sum(sizes) > self.spare:
            raise MemoryError("out of memory")
        self.reads += 1
        self.during_read()
        found = [block.tensor[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
        return [each.to(device, copy=True) for each, device in zip(found, targets, strict=True)]


def share_memory(folder: Path, agent: Agent | None = None) -> FakeMemory:
    """Let an agent (default: this process's) send CPU tensors to its known peers from device to device, and accept them."""
    if agent is None:
        worker = current_worker()
        assert worker is not None
        agent = worker.agent
    agent.device_memory = memory = FakeMemory(folder)
    for peer in agent.peers():
        peer.device_map = peer.answer_map = {"cpu": "cpu:0"}
    return memory


def memory_here() -> FakeMemory:
    """Return the memory that :func:`share_memory` has made in this process."""
    worker = current_worker()
    assert worker is not None
    assert isinstance(worker.agent.device_memory, FakeMemory)
    return worker.agent.device_memory
