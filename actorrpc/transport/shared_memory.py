"""Sends tensors between two processes of one host through shared memory, which both processes keep mapped for reuse.

The sender's :class:`Lender` copies the tensors of a message into a free segment (a sealed ``memfd``): a *loan*. The receiver's
:class:`Borrower` returns views of the segment, and reports the loan as freed when the last view has died. A report names the
segment and the number of the loan, so a report that arrives twice does not free a segment that was lent again. The descriptor of
each new segment is sent over a Unix socket of the connection's :class:`Lane`, before the frame that uses the segment. Frames,
reports of freed loans and retirements of segments are sent over the main connection. After a segment was mapped, its descriptor
is closed. A segment has no name, so its memory is freed when both processes have ended, for whatever reason.

Everything here is thread-safe except the fork hooks. User code is not called, memory is not copied under a lock, and memory is
not unmapped while a tensor uses it. If a forked child inherits a loan, the memory keeps its content while the child lives, but
the child and the parent share the memory, including later writes.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from actorrpc import _time
from actorrpc._limits import explain_memory, explain_missing
from actorrpc.errors import LimitError, ProtocolError, RpcError
from actorrpc.transport.buffers import (
    BlockLender,
    ForkGuard,
    LentBlock,
    Loans,
    MemoryRange,
    copy,
    drained,
    is_sealed,
    layout,
    reserve,
    sealed_memfd,
    size_class,
)
from actorrpc.transport.device_memory import FIRST_BLOCK, DeviceLane, DeviceLender, DeviceMemory
from actorrpc.transport.object_store import Segment
from actorrpc.wire.frames import LANE_DEVICES, LANE_FREE, LANE_RETIRE, pack_frame

__all__ = ["Borrower", "Lane", "Lender"]

_MIN_SEGMENT = 256 << 10
MOST_SEGMENTS = 4096  # the most segments that a borrower accepts from a peer, which may be hostile
_MOST_BYTES = 1 << 42  # the most bytes of all segments that a borrower accepts from a peer
_NO_MEMFD = 1.0  # how long no segment is created after the system has refused one
_NO_ROOM = 0.02  # how long no segment is created after the descriptor socket was full
_ANNOUNCEMENT_WAIT = 1.0  # how long to wait for the descriptor of a segment that a frame uses
# Number and size of a segment; for a segment with objects also its id, label and site.
_ANNOUNCEMENT = struct.Struct("<QQ16s64s64s")
_NO_OBJECT = bytes(16)
_FREED = struct.Struct("<QQ")  # the numbers of a segment and of its loan
_RETIRED = struct.Struct("<Q")
_AGAIN_S = 10.0  # time between two attempts to open the descriptor socket
_MAX_SIZE = 1 << 47
_ONE_FD = socket.CMSG_LEN(array("i").itemsize)
# Plain integers, because combining enum members takes longer than the system calls.
_DONTWAIT: Final = int(socket.MSG_DONTWAIT)
_SEND: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_PEEK: Final = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC | socket.MSG_PEEK)
_CTRUNC: Final = int(socket.MSG_CTRUNC)
_CUT: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


class Lender(BlockLender[MemoryRange]):
    """Copies buffers into shared memory for one peer. Without memory or descriptors, :meth:`place` returns ``None``.

    ``_send_lock`` guards the use of the socket. It is taken before the recycler's lock.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        limit_bytes: int,
        threshold: int = 64 << 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(limit_bytes, threshold, clock, _MIN_SEGMENT)
        self._sock = sock
        self._send_lock = _time.RLock()

    def close(self) -> None:
        """Close the socket and release all memory. Memory that the peer uses stays mapped in the peer. Idempotent."""
        with self._send_lock:
            self._sock.close()
            super().close()

    def abandon(self) -> None:
        """Close the socket and unmap the memory in a forked child. The lender of the parent is not affected."""
        self._send_lock = _time.RLock()
        super().abandon()

    def _fill(self, block: LentBlock, offsets: Sequence[int], ranges: Sequence[MemoryRange]) -> None:
        for offset, each in zip(offsets, ranges, strict=True):
            copy(block.address + offset, each)

    def _create(self, block: LentBlock) -> float:
        """Create the memory of ``block``, and send its descriptor."""
        fd = -1
        try:
            fd = sealed_memfd(block.size)
            memory, block.address = reserve(block.size, fd)
            if not self._tell(_ANNOUNCEMENT.pack(block.number, block.size, _NO_OBJECT, b"", b""), fd):
                return _NO_ROOM
            block.memory = memory
        except (OSError, MemoryError):
            return _NO_MEMFD
        finally:
            if fd >= 0:
                os.close(fd)
        return 0.0

    def share(self, segment: Segment, fd: int) -> int:
        """Send the descriptor of a segment with objects; return the number by which the next frame names the segment, or 0.

        0: the socket is full, because the peer has not read it. Thread-safe.

        Raises:
            OSError: the socket is closed, or the system limits the number of descriptors in sockets.
        """
        number = next(self._numbers)
        label, site = segment.label.encode()[:64], segment.site.encode()[-64:]
        if self._tell(_ANNOUNCEMENT.pack(number, segment.size, segment.id, label, site), fd):
            return number
        if self._closed:
            raise OSError(errno.EPIPE, "the connection for shared memory is closed")
        return 0

    def _tell(self, announcement: bytes, fd: int) -> bool:
        message = [announcement]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))]
        with self._send_lock:
            if self._closed:
                return False
            try:
                return self._sock.sendmsg(message, rights, _SEND) > 0
            except BlockingIOError:
                return False


class _Borrowed:
    """Shared memory on the borrower's side.

    Attributes:
        fd: the descriptor, until the segment is mapped; then -1.
        loan: the number of the loan that may have live views; 0: there is no such loan.
    """

    __slots__ = ("address", "fd", "loan", "memory", "number", "size")

    def __init__(self, number: int, size: int, fd: int) -> None:
        self.number, self.size, self.fd = number, size, fd
        self.memory: object = None
        self.address = self.loan = 0

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Borrower:
    """Returns views of the shared memory of one peer.

    Two locks, never taken together: ``_socket_lock`` guards reading the socket, and mapping and removing segments; it may be held
    for a second if the peer does not send a descriptor. ``_lock`` guards ``drain_freed`` and the fork hooks. Both are re-entrant,
    because the garbage collector may run finalisers under a lock. Reading the table of segments needs no lock, as each access is
    atomic.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        max_buffers: int = 10_000,
        max_segments: int = MOST_SEGMENTS,
        on_freed: Callable[[], None] | None = None,
        adopt: Callable[[int, bytes, int, str, str], Segment] | None = None,
    ) -> None:
        self._sock = sock
        self._max_buffers = max_buffers
        self._max_segments = max_segments
        self._socket_lock = _time.RLock()
        self._lock = _time.RLock()
        self._segments: dict[int, _Borrowed] = {}
        self._unseen: set[int] = set()  # segments that were retired before their descriptors were received
        self._adopt = adopt
        self._objects: dict[int, Segment | LimitError] = {}  # by number: received, not used by a frame yet
        self._loans: Loans[tuple[int, int, int]] = Loans(on_freed)  # segment, loan, epoch of the fork guard
        self._closed = False
        self._forks = ForkGuard()
        #: total of bytes received through shared memory; not exact, as threads update it without a lock
        self.taken_bytes = 0

    @property
    def freed(self) -> bool:
        """Whether :meth:`drain_freed` may have loans to return."""
        return bool(self._loans.returned)

    @property
    def held_bytes(self) -> int:
        """Bytes of the peer's memory that this process uses; a segment counts as a whole."""
        return sum(segment.size for segment in list(self._segments.values()) if segment.loan)

    def views(self, segment_id: int, loan: int, sizes: Sequence[int]) -> list[memoryview]:
        """Return writable views of the buffers of a loan. To refuse the buffers, call this and drop the views.

        Thread-safe. Blocks for at most a second, and only if the descriptor of the segment has not arrived.

        Raises:
            ProtocolError: the segment or its descriptor is not valid, its earlier loan is in use, or the buffers exceed it.
            LimitError: there is no descriptor or no address space for the segment at present.
        """
        if len(sizes) > self._max_buffers or min(sizes, default=0) < 0:
            raise ProtocolError(
                f"a message has too many buffers in shared memory ({len(sizes)}), or a buffer of negative size"
            )
        offsets, end = layout(sizes)
        segment = self._segments.get(segment_id)
        if segment is None or segment.memory is None:
            try:
                segment = self._fetch(segment_id)
            except LimitError:  # return the loan unused
                self._loans.returned.append((segment_id, loan, self._forks.epoch))
                raise
        if end > segment.size:
            raise ProtocolError(f"buffers of {end} bytes are not within a segment of {segment.size}")
        if loan <= 0 or segment.loan:
            raise ProtocolError(
                f"loan {loan} of segment {segment_id} is invalid, or loan {segment.loan} is still in use"
            )
        segment.loan = loan
        self.taken_bytes += sum(sizes)
        tag = segment_id, loan, self._forks.epoch
        whole = self._loans.lend(segment.memory, segment.address, segment.size, tag)
        return [whole[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]

    def claim_objects(self, numbers: Iterable[Any]) -> list[Segment | RpcError]:
        """Return the object segments that a frame uses: for each number, the segment, or the error of receiving its descriptor.

        Thread-safe. Does not wait for descriptors. Call this once for each frame; each segment is returned once.

        Raises:
            ProtocolError: the peer sent something invalid over the descriptor socket.
        """
        found: list[Segment | RpcError] = []
        with self._socket_lock:
            for number in numbers:
                if type(number) is not int:
                    raise ProtocolError(
                        f"the number of an object must be an int, not a {type(number).__name__}"
                    )
                while number not in self._objects and not self._closed and self._receive():
                    pass
                missing = ProtocolError(
                    f"the object {number} of a message was never announced, or came twice"
                )
                found.append(self._objects.pop(number, missing))
        return found

    def drain_freed(self) -> list[tuple[int, int]]:
        """Remove and return the loans whose views have died, which are then reported to the peer. Thread-safe."""
        if not self.freed:
            return []
        freed: list[tuple[int, int]] = []
        held = []
        with self._lock:
            # During a fork, no loan is reported as freed, because the child may inherit any loan.
            if self._forks.forking:
                return []
            inherited = self._forks.inherited()
            for number, loan, epoch in drained(self._loans.returned):
                if epoch < inherited:
                    held.append((number, loan, epoch))
                    continue
                freed.append((number, loan))
                if segment := self._segments.get(number):
                    segment.loan = 0
            self._loans.returned.extend(held)
        return freed

    def retire(self, segment_ids: Iterable[int]) -> None:
        """Remove segments; each is unmapped when its last view has died. Thread-safe.

        Raises:
            ProtocolError: the peer sent something invalid over the descriptor socket.
        """
        with self._socket_lock:
            for number in segment_ids:
                segment = self._segments.pop(number, None)
                if segment is not None:
                    segment.close()
                elif len(self._unseen) < self._max_segments:
                    self._unseen.add(number)  # its descriptor was not received yet
            if self._unseen:
                self.gather()

    def gather(self) -> None:
        """Receive all descriptors in the socket, so that the peer can send more. Thread-safe.

        Raises:
            ProtocolError: the peer sent something invalid over the descriptor socket.
        """
        with self._socket_lock:
            try:
                while not self._closed and self._receive():
                    pass
            except LimitError:
                pass  # there is no free descriptor; the announcement stays in the socket

    def close(self) -> None:
        """Close the socket and remove all segments; each is unmapped when its last view has died.

        Idempotent. Wakes threads in :meth:`views`.
        """
        self._closed = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        with self._socket_lock:
            self._give_up()
        with self._lock:
            self._forks.close()

    def _give_up(self) -> None:
        self._sock.close()
        self._loans.close()
        segments, self._segments = self._segments, {}
        for segment in segments.values():
            segment.close()

    # -- around a fork -----------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Called in the parent before a fork: the current loans must not be reported as freed while the child lives."""
        if self._segments and not self._closed:
            with self._lock:
                self._forks.before()

    def after_fork_in_parent(self) -> None:
        """Called in the parent after a fork, even if it failed, by the thread that forked."""
        with self._lock:
            self._forks.after(any(segment.loan for segment in list(self._segments.values())))

    def abandon(self) -> None:
        """Close the socket and remove all segments in a forked child. Inherited views stay valid; the child never reports loans.

        One descriptor per fork stays open on purpose: when it is closed, the parent learns that the child has ended.
        """
        self._socket_lock, self._lock = _time.RLock(), _time.RLock()
        self._closed = True
        self._give_up()  # without shutdown(), which would shut down the parent's socket as well
        self._forks.abandon()

    # -- the descriptor socket; under its lock -----------------------------------------------------

    def _fetch(self, wanted: int) -> _Borrowed:
        """Receive descriptors until the segment ``wanted`` is known, and map it."""
        deadline = _time.now() + _ANNOUNCEMENT_WAIT
        with self._socket_lock:
            while (segment := self._segments.get(wanted)) is None:
                if self._closed:
                    raise ProtocolError("the connection for shared memory is closed")
                if self._receive():
                    continue
                remaining = deadline - _time.now()
                if remaining <= 0:
                    raise ProtocolError(f"segment {wanted} of shared memory was never announced")
                poll = _time.poll()
                poll.register(self._sock, select.POLLIN)
                poll.poll(1000 * remaining)
            if segment.memory is None:
                self._map(segment)
            return segment

    def _receive(self) -> bool:
        """Receive one announcement (a message with a segment's descriptor); return False if none has arrived.

        Raises:
            LimitError: this process has no free descriptor. The announcement stays in the socket. (For a segment with objects,
                the error is stored for the frame that uses it instead, and the announcement is removed.)
            ProtocolError: the message is not an announcement.
        """
        try:
            # Peek first: if this process has no free descriptor, the message can be received later.
            data, ancillary, state, _ = self._sock.recvmsg(_ANNOUNCEMENT.size, _ONE_FD, _PEEK)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ProtocolError(f"the connection for shared memory failed: {error}") from error
        fds = array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        try:
            if not data and not fds:
                raise ProtocolError("the peer closed the connection for shared memory")
            is_short = bool(state & _CTRUNC) and not fds
            if len(data) != _ANNOUNCEMENT.size or (not is_short and (len(fds) != 1 or state & _CUT)):
                raise ProtocolError("not an announcement of shared memory")
            number, size, segment_id, label, site = _ANNOUNCEMENT.unpack(data)
            short = None
            if is_short:
                why = explain_missing()
                short = LimitError(f"{size >> 20} MiB of shared memory cannot be taken here: {why}")
                if segment_id == _NO_OBJECT:
                    raise short
            self._sock.recv(_ANNOUNCEMENT.size, _DONTWAIT)
            if segment_id != _NO_OBJECT:
                if self._adopt is None or len(self._objects) >= self._max_segments:
                    raise ProtocolError(
                        "the peer sends objects in shared memory that this worker cannot use, or too many"
                    )
                # An error is stored for the message that uses this segment, so that later messages are not affected.
                self._objects[number] = short or self._adopt(
                    fds.pop(), segment_id, size, _text(label), _text(site)
                )
            elif number in self._unseen:
                self._unseen.discard(number)
            else:
                self._check(number, size)
                self._segments[number] = _Borrowed(number, size, fds.pop())
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _check(self, number: int, size: int) -> None:
        if number in self._segments or len(self._segments) >= self._max_segments:
            raise ProtocolError(
                f"segment {number} of shared memory is known already, or exceeds the limit of {self._max_segments}"
            )
        if not _MIN_SEGMENT <= size <= _MAX_SIZE or size != size_class(size):
            raise ProtocolError(f"a segment of shared memory cannot have {size} bytes")
        if size + sum([segment.size for segment in self._segments.values()]) > _MOST_BYTES:
            raise ProtocolError(f"the peer lends more than {_MOST_BYTES} bytes of shared memory")

    @staticmethod
    def _map(segment: _Borrowed) -> None:
        """Map a segment, and close the descriptor. Without address space, the descriptor is kept for another attempt."""
        try:
            if not is_sealed(segment.fd, segment.size):
                raise ProtocolError("the peer lends memory that it could take away again")
            segment.memory, segment.address = reserve(segment.size, segment.fd)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise LimitError(
                    f"{segment.size >> 20} MiB of shared memory cannot be mapped here: {explain_memory()}"
                ) from error
            raise ProtocolError(f"the peer's shared memory cannot be mapped: {error}") from error
        segment.close()


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="ignore")


class Lane:
    """The two directions of sharing memory with a peer, each of which is opened when it is first used. Thread-safe.

    Attributes:
        lender: lends memory to the peer; None until this worker has opened it.
        borrower: uses the peer's memory; None until the peer has opened it.
        devices: sends tensors between devices, without memory of the host.
        is_open: whether at least one direction is open; tested before each send.
        opens_at: the earliest time at which the lender may be opened, after an attempt has failed.
    """

    __slots__ = ("borrower", "devices", "is_open", "lender", "opens_at")

    def __init__(self) -> None:
        self.devices = DeviceLane()
        self.lender: Lender | None = None
        self.borrower: Borrower | None = None
        self.is_open = False
        self.opens_at = 0.0

    def lend(self, lender: Lender) -> None:
        """Lend memory from now on."""
        self.lender, self.is_open = lender, True

    def cannot_lend(self, passes: bool) -> None:
        """Record that the lender could not be opened. ``passes``: whether another attempt may succeed later."""
        self.opens_at = _time.now() + _AGAIN_S if passes else float("inf")

    def borrow(self, borrower: Borrower) -> None:
        """Use the peer's memory from now on."""
        self.borrower, self.is_open = borrower, True

    def lenders(self) -> list[Lender | DeviceLender]:
        """Return the lenders of all kinds of memory."""
        return [*([self.lender] if self.lender is not None else ()), *self.devices.lenders()]

    def borrowed(self) -> Borrower:
        """Return the borrower, for a message with buffers in the peer's memory.

        Raises:
            ProtocolError: the peer has not opened this direction.
        """
        if self.borrower is None:
            raise ProtocolError("a message names shared memory, but there is no descriptor socket")
        return self.borrower

    def list_devices(self, memory: DeviceMemory, on_freed: Callable[[], None], outbox: deque[Any]) -> bool:
        """Put the frame that lists the devices of this worker into the outbox, once; return whether it was put there."""
        body = self.devices.listing(memory, on_freed)
        if body:
            self.is_open = True
            outbox.append(pack_frame(LANE_DEVICES, body=body))
        return bool(body)

    def heard_devices(self, body: bytes) -> None:
        """Send tensors to the devices that the peer has listed from device to device."""
        self.is_open = True
        self.devices.on_listing(body)

    # -- notices about freed memory ------------------------------------------------------------------

    def hand_back(self, outbox: deque[Any]) -> bool:
        """Put notices about freed loans and retired segments into the outbox; return whether there were any."""
        borrower, lender = self.borrower, self.lender
        freed = borrower.drain_freed() if borrower is not None else []
        retired = lender.drain_retired() if lender is not None and lender.retired else []
        if self.devices.is_open:
            self.devices.drain(freed, retired)
            if self.devices.withdraws():
                outbox.append(pack_frame(LANE_DEVICES))
        if freed:
            outbox.appendleft(
                pack_frame(LANE_FREE, body=struct.pack(f"<{2 * len(freed)}Q", *itertools.chain(*freed)))
            )
        if retired:
            outbox.append(pack_frame(LANE_RETIRE, body=struct.pack(f"<{len(retired)}Q", *retired)))
        return bool(freed or retired)

    def heard_freed(self, body: bytes) -> None:
        """Take back memory that the peer no longer uses."""
        for lender in self.lenders():
            lender.reclaim(_rows(_FREED, body))

    def heard_retired(self, body: bytes, submit: Callable[[Callable[[], None]], object]) -> None:
        """Release segments that the peer has retired; if ``body`` is empty, receive the descriptors that the peer has sent.

        Args:
            submit: runs a function on another thread, because closing memory of a device waits for copies out of it.
        """
        numbers = [number for (number,) in _rows(_RETIRED, body)]
        if self.borrower is not None:
            if not body:
                self.borrower.gather()
            self.borrower.retire(number for number in numbers if number < FIRST_BLOCK)
        if of_devices := [number for number in numbers if number >= FIRST_BLOCK]:
            submit(partial(self.devices.retire, of_devices))

    # -- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close both sides."""
        for side in (self.lender, self.borrower, self.devices):
            if side is not None:
                side.close()

    def abandon(self) -> None:
        """Close both sides in a forked child."""
        for side in (self.lender, self.borrower, self.devices):
            if side is not None:
                side.abandon()


def _rows(layout: struct.Struct, body: bytes) -> Iterable[Any]:
    """Return the rows of a frame about segments.

    Raises:
        ProtocolError: the frame does not consist of whole rows.
    """
    if len(body) % layout.size:
        raise ProtocolError(
            f"a frame about shared memory has {len(body)} bytes, and its rows have {layout.size}"
        )
    return layout.iter_unpack(body)
