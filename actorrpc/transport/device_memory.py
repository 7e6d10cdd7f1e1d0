"""Sends tensors between two processes of one host from device to device, without host memory.

1. The receiver lists its devices once: it sends a LANE_DEVICES frame with their UUIDs after it has opened a message with buffers
   from the peer and has used CUDA. Before that, tensors are sent through host memory.
2. The sender's :class:`DeviceLender` copies the tensors of a message into a block on their device. If the receiver does not see
   their device, the block is on the target device; if the sender does not see the target device, the tensors are sent through
   host memory. The sender waits for the copies. Only then is the frame sent. Therefore the bytes are complete when the frame
   arrives, even if the sender is killed afterwards.
3. The header of the frame has one row per device: the UUID, the numbers of block and loan, the block's handle, and the position,
   size and target device of each tensor. The receiver opens the handle of each block once.
4. The receiver's :class:`DeviceBorrower` copies the tensors into fresh memory of their target devices, so values stay values.
   When the copies are complete, it reports the loan as freed.
5. When the sender retires a block, the receiver closes the handle and reports loan 0 of the block. Then the sender releases the
   memory. (What happens if memory is freed that another process has open is undefined in CUDA.)

Reports and retirements are sent in the frames that segments of host memory use (LANE_FREE, LANE_RETIRE); the numbers of device
blocks begin at ``FIRST_BLOCK``. If the sender has no memory for a block, it sends through host memory. If the receiver has no
memory for the tensors, it refuses the message with a LimitError and frees the loan. A worker that takes data only never lists its
devices, because the handle of a hostile peer could describe memory that does not exist.

When a connection ends, the receiver refuses messages whose blocks it has not read, and closes the blocks that no thread reads.
The sender releases the blocks without loans. The receiver may still read a lent block. Therefore the sender keeps lent blocks
allocated for 30 s more (``Scheduler.keep_lent``): memory that is reused too early would change the tensors of the receiver.

Thread-safe. Nothing here imports CUDA: :class:`DeviceMemory` is the interface to the devices (``cuda_memory.py``; tests have a
fake).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, cast

import torch

from actorrpc import _time
from actorrpc._exceptions import undo_on_error
from actorrpc.errors import LimitError, PeerDiedError, ProtocolError, RpcError, SerializationError
from actorrpc.transport.buffers import BlockLender, Closable, LentBlock, layout

__all__ = ["FIRST_BLOCK", "DeviceBlock", "DeviceLane", "DeviceMemory", "DeviceRange"]

FIRST_BLOCK: Final = 1 << 48
_POSITIONS: Final = 4  # the index, in a row of the header, of the list of its tensors' positions
_SMALLEST: Final = 2 << 20  # the size of CUDA's pages
_NO_ROOM_S: Final = 1.0  # how long no block is created after a device had no memory for a block
_MOST_BLOCKS: Final = 4096  # the most blocks that a borrower keeps open for a peer, which may be hostile


class DeviceRange(Protocol):
    """The bytes of a tensor that is sent: a tensor of uint8 with one dimension, and the receiver's device for it."""

    nbytes: int
    tensor: torch.Tensor
    target: str


class DeviceBlock(Closable, Protocol):
    """Memory of a device, in the process that allocated it or in a process that opened it. ``handle`` is sent to open it."""

    size: int
    handle: list[Any]


class DeviceMemory(Protocol):
    """Memory of the devices that this process sees. Thread-safe."""

    def uuid(self, device: torch.device) -> str:
        """Return the UUID of a device; empty if its memory cannot be shared."""
        ...

    def uuids(self) -> list[str]:
        """Return the UUIDs of all devices whose memory can be shared; empty until this process has used a device."""
        ...

    def allocate(self, device: torch.device, size: int) -> DeviceBlock:
        """Allocate a block that another process can open.

        Raises:
            MemoryError: the device has no memory, or its memory cannot be shared.
        """
        ...

    def open(self, uuid: str, handle: list[Any]) -> DeviceBlock:
        """Open the block of another process.

        Raises:
            OSError: the block cannot be opened.
        """
        ...

    def export(self, tensor: torch.Tensor) -> list[Any]:
        """Return a handle with which other processes open the memory of a tensor. The handle does not keep the memory allocated.

        Raises:
            MemoryError: the memory cannot be shared.
        """
        ...

    def attach(self, uuid: str, handle: list[Any]) -> torch.UntypedStorage:
        """Open the memory of another process's tensor.

        The caller must ensure that the owner keeps the memory allocated while the returned storage is used.

        Raises:
            OSError: the memory cannot be opened.
        """
        ...

    def synchronize(self, device: torch.device) -> None:
        """Wait until the work of the current stream of a device has completed."""
        ...

    def fill(self, block: DeviceBlock, offsets: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Copy tensors into a block, after the work of the current streams; return when the copies are complete."""
        ...

    def read(
        self, block: DeviceBlock, offsets: Sequence[int], sizes: Sequence[int], targets: Sequence[str]
    ) -> list[torch.Tensor]:
        """Copy ranges of a block into new tensors on the target devices; return when the copies are complete.

        Does not wait for the work of the current streams.

        Raises:
            MemoryError: a device has no memory for its tensors; nothing was copied.
            RuntimeError: there is no such device.
        """
        ...


class DeviceLender(BlockLender[DeviceRange]):
    """Lends memory of one device to one peer. :meth:`place` returns ``None`` if the device has no memory."""

    def __init__(
        self,
        memory: DeviceMemory,
        device: torch.device,
        *,
        limit_bytes: int,
        threshold: int,
        first: int = FIRST_BLOCK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(limit_bytes, threshold, clock, _SMALLEST, first)
        self._memory = memory
        self._device = device
        # Retired blocks that the peer has not yet reported as closed.
        self._retiring: dict[int, LentBlock] = {}

    def handle(self, number: int) -> list[Any] | None:
        """Return the handle of a block; None if the block was retired or released."""
        block = self._blocks.get(number)
        return None if block is None else cast(DeviceBlock, block.memory).handle

    def reclaim(self, loans: Iterable[tuple[int, int]]) -> None:
        """Free loans; loan 0 says that the peer has closed a retired block. Thread-safe."""
        for number, loan in loans:
            if loan:
                super().reclaim([(number, loan)])
            elif (block := self._retiring.pop(number, None)) is not None:
                block.close()

    def close(self) -> None:
        """Lend no more, and release the blocks without loans. Idempotent."""
        self._limit = 0
        self.trim()
        self.reclaim([(number, 0) for number in list(self._retiring)])

    def release(self) -> None:
        """Release all memory. Idempotent."""
        self.close()
        blocks = list(self._blocks.values())
        super().close()
        for block in blocks:
            block.close()

    def abandon(self) -> None:
        """Keep references to the memory in a forked child, whose finalisers must not use the devices of its parent."""
        _inherited.append((self._blocks, self._retiring))

    def _create(self, block: LentBlock) -> float:
        try:
            block.memory = self._memory.allocate(self._device, block.size)
        except MemoryError:
            return _NO_ROOM_S
        if self._closed:  # release() may have seen the block without its memory
            block.close()
            return _NO_ROOM_S
        return 0.0

    def _fill(self, block: LentBlock, offsets: Sequence[int], ranges: Sequence[DeviceRange]) -> None:
        self._memory.fill(cast(DeviceBlock, block.memory), offsets, [each.tensor for each in ranges])

    def _drop(self, block: LentBlock) -> None:
        self._retiring[block.number] = block  # before the peer can learn that the block is retired
        super()._drop(block)
        self._dropped.remove(block)

    def _keep_s(self) -> float:
        return super()._keep_s() if self._limit else 0.0


_inherited: Final[list[Any]] = []  # in a forked child: objects whose finalisers would use a device


class DeviceBorrower:
    """Copies tensors out of the device memory of one peer. ``_lock`` guards the tables; no memory is copied under it."""

    def __init__(self, memory: DeviceMemory, on_freed: Callable[[], None]) -> None:
        self._memory = memory
        self._on_freed = on_freed
        self._lock = _time.RLock()
        self._blocks: dict[int, DeviceBlock] = {}
        self._reading: set[int] = set()  # numbers of blocks that threads read now
        self._freed: list[tuple[int, int]] = []
        self._closed = False
        #: whether a block could not be opened, so the peer has to send through host memory
        self.cannot_open = False

    def read(
        self, uuid: str, number: int, loan: int, handle: list[Any], sizes: list[int], targets: list[str]
    ) -> list[torch.Tensor]:
        """Return copies of the tensors of a loan, which is then freed. Thread-safe.

        Raises:
            LimitError: there is no memory for the tensors, or the block cannot be opened.
            PeerDiedError: the connection has ended.
            ProtocolError: the peer sent an invalid loan.
            SerializationError: there is no such device.
        """
        offsets, end = layout(sizes)
        where = " and ".join(sorted(set(targets)))
        with self._lock:
            if self._closed:
                raise PeerDiedError(
                    f"{end} bytes for {where} in a message cannot be read, because they were in device memory of a worker that "
                    "has ended",
                    maybe_executed=True,
                )
            if number in self._reading:
                raise ProtocolError(f"device block {number} is still in use")
            self._reading.add(number)
        try:
            block = self._open(uuid, number, handle)
            if end > block.size:
                raise ProtocolError(f"tensors of {end} bytes are not within a device block of {block.size}")
            return self._memory.read(block, offsets, sizes, targets)
        except RpcError:
            raise
        except MemoryError as error:
            raise LimitError(
                f"there is no memory on {where} for tensors of {end} bytes in a message: {error}. Free memory of the device, or "
                "send fewer tensors at once"
            ) from error
        except OSError as error:
            self.cannot_open = True
            raise LimitError(
                f"tensors of {end} bytes for {where} cannot be read from device memory of the sender: {error}. Later tensors on "
                "this connection are sent through host memory; device_lane_bytes=0 does that from the beginning"
            ) from error
        except RuntimeError as error:
            raise SerializationError(f"tensors of {end} bytes cannot be moved to {where}: {error}") from error
        finally:
            with self._lock:
                self._reading.discard(number)
            if self._closed:
                self.close()
            self._free(number, loan)

    def refuse(self, number: int, loan: int) -> None:
        """Free a loan whose tensors are not read. Thread-safe."""
        if number not in self._reading:
            self._free(number, loan)

    def drain_freed(self) -> list[tuple[int, int]]:
        """Remove and return the loans whose tensors have been copied, and loan 0 of closed blocks. Thread-safe."""
        with self._lock:
            freed, self._freed = self._freed, []
        return freed

    def retire(self, numbers: Iterable[int]) -> None:
        """Close blocks, and report that they are closed. Thread-safe."""
        for number in numbers:
            with self._lock:
                block = self._blocks.pop(number, None)
            if block is not None:
                block.close()
            with self._lock:  # not earlier: the sender releases the memory as soon as it has the report
                self._freed.append((number, 0))
        self._on_freed()

    def close(self) -> None:
        """Refuse later reads, and close the blocks; a block that a thread reads is closed by that thread. Idempotent."""
        with self._lock:
            self._closed, self._freed = True, []
            unused = [self._blocks.pop(number) for number in self._blocks.keys() - self._reading]
        for block in unused:
            block.close()

    def abandon(self) -> None:
        """Keep references to the memory in a forked child, whose finalisers must not use the devices of its parent."""
        _inherited.append(self._blocks)

    def _open(self, uuid: str, number: int, handle: list[Any]) -> DeviceBlock:
        block = self._blocks.get(number)
        if block is None:
            if len(self._blocks) >= _MOST_BLOCKS:
                raise ProtocolError(f"the peer lends more than {_MOST_BLOCKS} device blocks")
            block = self._memory.open(uuid, handle)
            with self._lock:  # if the connection has ended meanwhile, read() closes the block
                self._blocks[number] = block
        return block

    def _free(self, number: int, loan: int) -> None:
        with self._lock:
            self._freed.append((number, loan))
        self._on_freed()


class DeviceLane:
    """Sends tensors to and from the devices of a peer: a lender for each device of this process, and one borrower. Thread-safe.

    Attributes:
        borrower: reads the peer's blocks; None until this worker has listed its devices.
        is_open: whether this worker or the peer has listed its devices.
        peer_uuids: the devices whose memory the peer can open, in the order of the peer's numbers.
        taken_bytes: the total of received bytes; not exact, because threads update it without a lock.
    """

    __slots__ = ("_lenders", "_lock", "borrower", "is_open", "peer_uuids", "taken_bytes")

    def __init__(self) -> None:
        self._lock = _time.Lock()  # guards the creation of lenders and borrower
        self._lenders: dict[torch.device, DeviceLender] = {}
        self.borrower: DeviceBorrower | None = None
        self.is_open = False
        self.peer_uuids: tuple[str, ...] = ()
        self.taken_bytes = 0

    def lenders(self) -> list[DeviceLender]:
        """Return the lenders of all devices."""
        return list(self._lenders.values())

    @property
    def is_lending(self) -> bool:
        """Whether a block has a loan that the peer has not yet reported as freed."""
        return any(lender.stats().lent_bytes for lender in self.lenders())

    # -- listing devices -----------------------------------------------------------------------------

    def listing(self, memory: DeviceMemory, on_freed: Callable[[], None]) -> bytes:
        """Return the body of the LANE_DEVICES frame; empty if there is nothing to list, or after the first time."""
        with self._lock:
            uuids = memory.uuids() if self.borrower is None else []
            if not uuids:
                return b""
            self.borrower, self.is_open = DeviceBorrower(memory, on_freed), True
        return "\n".join(uuids).encode()

    def on_listing(self, body: bytes) -> None:
        """Handle a LANE_DEVICES frame of the peer."""
        self.is_open = True
        self.peer_uuids = tuple(filter(None, body.decode(errors="replace").split("\n")))

    # -- sending -------------------------------------------------------------------------------------

    def place(
        self,
        memory: DeviceMemory,
        ranges: Iterable[tuple[int, DeviceRange]],
        limit_bytes: int,
        threshold: int,
    ) -> tuple[list[list[Any]], set[int]]:
        """Copy tensors to blocks; return the rows of the header, and the positions of the copied tensors.

        The other tensors are sent through host memory.

        Args:
            ranges: position in the message, and tensor.
        """
        groups: dict[torch.device, list[tuple[int, DeviceRange]]] = {}
        for position, each in ranges:
            device = self._block_device(memory, each.tensor.device, torch.device(each.target))
            if device is not None:
                groups.setdefault(device, []).append((position, each))
        rows: list[list[Any]] = []

        def free() -> None:
            for lender in self.lenders():
                lender.reclaim([(row[1], row[2]) for row in rows])

        with undo_on_error(free):
            for device, group in groups.items():
                lender = self._lender(memory, device, limit_bytes, threshold)
                loan = lender.place([each for _, each in group])
                handle = lender.handle(loan[0]) if loan is not None else None
                if loan is not None and handle is not None:
                    sizes, targets = [each.nbytes for _, each in group], [each.target for _, each in group]
                    rows.append([memory.uuid(device), *loan, handle, [at for at, _ in group], sizes, targets])
        return rows, {at for row in rows for at in row[_POSITIONS]}

    def _block_device(
        self, memory: DeviceMemory, source: torch.device, target: torch.device
    ) -> torch.device | None:
        """Return the device for the block of a tensor: its own if the receiver sees it, or the target device if this process sees
        it; otherwise None.
        """
        if source.type != target.type:
            return None
        if memory.uuid(source) in self.peer_uuids:
            return source
        at, here = target.index or 0, memory.uuids()
        uuid = self.peer_uuids[at] if at < len(self.peer_uuids) else ""
        return torch.device(source.type, here.index(uuid)) if uuid in here else None

    def _lender(
        self, memory: DeviceMemory, device: torch.device, limit_bytes: int, threshold: int
    ) -> DeviceLender:
        lender = self._lenders.get(device)
        if lender is None:
            with self._lock:
                lender = self._lenders.get(device)
                if lender is None:
                    first = FIRST_BLOCK * (1 + len(self._lenders))
                    lender = self._lenders[device] = DeviceLender(
                        memory, device, limit_bytes=limit_bytes, threshold=threshold, first=first
                    )
        return lender

    # -- receiving -----------------------------------------------------------------------------------

    def read(self, rows: Any, buffers: Sequence[Any]) -> list[Any]:
        """Return the buffers of a message: the tensors of ``rows`` at the positions that they name, and ``buffers`` elsewhere.

        Raises:
            ProtocolError: the rows are invalid.
            RpcError: as :meth:`DeviceBorrower.read`. All loans are freed.
        """
        borrower, parsed = self._checked(rows)
        found: dict[int, torch.Tensor] = {}
        unread = iter(parsed)
        try:
            for uuid, number, loan, handle, positions, sizes, targets in unread:
                found.update(
                    zip(positions, borrower.read(uuid, number, loan, handle, sizes, targets), strict=True)
                )
                self.taken_bytes += sum(sizes)
        finally:
            for row in unread:
                borrower.refuse(row[1], row[2])
        rest = iter(buffers)
        count = len(buffers) + sum(len(row[_POSITIONS]) for row in parsed)
        try:
            merged = [found.pop(at) if at in found else next(rest) for at in range(count)]
        except StopIteration:
            raise ProtocolError("the positions of a message's tensors in device memory are invalid") from None
        return merged

    def refuse(self, rows: Any) -> None:
        """Free the loans of a message that is not opened."""
        borrower, parsed = self._checked(rows)
        for row in parsed:
            borrower.refuse(row[1], row[2])

    def _checked(self, rows: Any) -> tuple[DeviceBorrower, list[Any]]:
        if self.borrower is None:
            raise ProtocolError("a message names device memory, but this worker has not listed its devices")
        if not isinstance(rows, list) or not all(map(_is_row, rows)):
            raise ProtocolError("the device memory that a message names cannot be read")
        return self.borrower, rows

    # -- notices about freed memory ------------------------------------------------------------------

    def withdraws(self) -> bool:
        """Return, once after a block could not be opened, that the list of devices is withdrawn by an empty list."""
        borrower = self.borrower
        if borrower is None or not borrower.cannot_open:
            return False
        borrower.cannot_open = False
        return True

    def drain(self, freed: list[tuple[int, int]], retired: list[int]) -> None:
        """Append the freed loans, and the numbers of retired blocks."""
        if self.borrower is not None:
            freed += self.borrower.drain_freed()
        for lender in self.lenders():
            retired += lender.drain_retired()

    def retire(self, numbers: Iterable[int]) -> None:
        """Close blocks that the peer has retired."""
        if self.borrower is not None:
            self.borrower.retire(numbers)

    def _sides(self) -> Iterator[DeviceLender | DeviceBorrower]:
        yield from self.lenders()
        if self.borrower is not None:
            yield self.borrower

    def close(self) -> None:
        """Close both sides. Blocks that are lent stay allocated until :meth:`release`."""
        self.peer_uuids = ()
        for side in self._sides():
            side.close()

    def release(self) -> None:
        """Release all memory that is lent."""
        for lender in self.lenders():
            lender.release()

    def abandon(self) -> None:
        """Close both sides in a forked child."""
        for side in self._sides():
            side.abandon()


def _is_row(row: Any) -> bool:
    match row:
        case [str(), int(number), int(loan), list(), list(positions), list(sizes), list(targets)]:
            return (
                number >= FIRST_BLOCK
                and loan > 0
                and len(positions) == len(sizes) == len(targets) > 0
                and all(isinstance(at, int) for at in positions)
                and all(isinstance(size, int) and size > 0 for size in sizes)
                and all(isinstance(target, str) for target in targets)
            )
    return False
