"""Tensors between two processes of one host through shared memory, which both keep mapped and warm.

The sender's :class:`Lender` copies tensors into a free segment (a sealed ``memfd``); the receiver's
:class:`Borrower` gives out views on it, and once the last of them has died says so, through its connection.
A loan is named by (segment, loan number): a hand-back that comes twice frees nothing that was lent again.
Only descriptors travel over the lane's own Unix socket, one message for each new segment, always before the
frame that uses it; frames, hand-backs and retirements travel over the main connection. No descriptor is kept
for a mapped segment. The memory has no name: when both processes are gone, however they went, so is it.

Any thread may call anything here except the fork hooks, and a closed lane refuses quietly. Nothing here calls
user code, copies under a lock, or unmaps memory under a live tensor. Lane memory that a forked child inherits
stays as it was for as long as the child lives, but is shared with the parent: both see writes in place.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import add, attrgetter
from typing import Any, Final, NamedTuple

from actorrpc import _time
from actorrpc._limits import explain_memory
from actorrpc.errors import LimitError, ProtocolError, RpcError
from actorrpc.transport import fd_limits
from actorrpc.transport.buffers import (
    ForkGuard,
    Loans,
    MemorySpan,
    copy,
    is_sealed,
    reserve,
    sealed_memfd,
    size_class,
    size_classes,
)
from actorrpc.transport.object_store import Segment

__all__ = ["Borrower", "LaneStats", "Lender", "Placement", "layout"]

_ALIGNMENT = 64
_MIN_SEGMENT = 256 << 10
_MAX_SEGMENTS = 128  # each is one mapping on both sides, and a process may have 65 530
MOST_SEGMENTS = 4096  # of a peer, which may be hostile, and _MOST_BYTES of theirs
_MOST_BYTES = 1 << 42
_KEEP = 30.0  # a free segment that was not used for so long is retired
_KEEP_OVER_HALF = 3.0  # ... or for so long, where more than half of the limit lies free
_TRIM_EVERY = 1.0
_NO_MEMFD = 1.0  # no new segment for so long after the system refused one
_NO_ROOM = 0.02  # ... or the descriptor socket was full
_ANNOUNCEMENT_WAIT = 1.0
_ANNOUNCEMENT = struct.Struct(
    "<QQ16s64s64s"
)  # number, size; of an object's segment, what names it, its label and its site
_NO_OBJECT = bytes(16)
_PLACEMENT = struct.Struct("<QQI")  # segment, loan, count; the sizes follow
_MAX_SIZE = 1 << 47
_nbytes = attrgetter("nbytes")
_ONE_FD = socket.CMSG_LEN(array("i").itemsize)
# As plain numbers: combining members of an enum takes longer than what is asked of the kernel.
_DONTWAIT: Final = int(socket.MSG_DONTWAIT)
_SEND: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_PEEK: Final = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC | socket.MSG_PEEK)
_CTRUNC: Final = int(socket.MSG_CTRUNC)
_CUT: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


def layout(sizes: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """Return the offset of each buffer and the bytes they need together."""
    offsets = []
    end = 0
    for size in sizes:
        start = (end + _ALIGNMENT - 1) & -_ALIGNMENT
        offsets.append(start)
        end = start + size
    return tuple(offsets), end


class Placement(NamedTuple):
    """Where buffers were placed."""

    segment_id: int
    loan: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def pack(self) -> bytes:
        """Return the placement as bytes; the offsets follow from the sizes."""
        count = len(self.sizes)
        return _PLACEMENT.pack(self.segment_id, self.loan, count) + struct.pack(f"<{count}Q", *self.sizes)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Placement:
        """Read a packed placement.

        Raises:
            ProtocolError: it is not one.
        """
        if len(data) < _PLACEMENT.size:
            raise ProtocolError("a placement in shared memory is too short")
        segment_id, loan, count = _PLACEMENT.unpack_from(data)
        if len(data) != _PLACEMENT.size + 8 * count:
            raise ProtocolError("a placement in shared memory has not the length that it says")
        sizes = struct.unpack_from(f"<{count}Q", data, _PLACEMENT.size)
        offsets, end = layout(sizes)
        if end > _MAX_SIZE:
            raise ProtocolError("a placement in shared memory is larger than any segment")
        return cls(segment_id, loan, offsets, sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStats:
    """What a lender holds, and what it did so far."""

    segments: int
    lent_bytes: int
    free_bytes: int
    placed_bytes: int


@dataclass(slots=True, eq=False)
class _Segment:
    """Shared memory on the lender's side. ``loan`` is 0 while it is free or being filled."""

    number: int
    size: int
    memory: mmap.mmap | None = None
    address: int = 0
    loan: int = 0
    used_at: float = 0.0


class Lender:
    """Places buffers in shared memory for one peer. Never raises for lack of anything: it returns ``None``.

    Two locks, in this order where both are taken: ``_send_lock`` (use of the socket) and ``_lock`` (tables,
    counters). Memory is made, filled and unmapped outside both. ``_lock`` is re-entrant for one case only: a
    finaliser, run by the collector inside a section, that makes a call itself; ``_busy`` turns it away.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        limit_bytes: int,
        threshold: int = 64 << 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.threshold = threshold
        self.retired: deque[int] = deque()
        self._sock = sock
        self._limit = limit_bytes
        self._clock = clock
        self._send_lock = _time.RLock()
        self._lock = _time.RLock()
        self._busy = False
        self._closed = False
        self._segments: dict[int, _Segment] = {}
        self._free: dict[int, deque[_Segment]] = {}
        self._handed_back: deque[tuple[int, int]] = deque()
        self._bytes = 0
        self._free_bytes = 0
        self._next_segment = 1
        self._next_loan = 1
        self._next_trim = clock() + _TRIM_EVERY
        self._no_new_before = 0.0
        self._placed_bytes = 0

    def place(self, spans: Sequence[MemorySpan]) -> Placement | None:
        """Copy ``spans`` into one segment and say where; ``None`` means: send them over the socket.

        The copy is made when this returns. Thread-safe.
        """
        sizes = tuple(map(_nbytes, spans))
        offsets, need = layout(sizes)
        if need < self.threshold or need > self._limit or self._closed:
            return None
        dropped: list[_Segment] = []
        with self._lock:
            if self._busy or self._closed:
                return None
            self._busy = True
            try:
                if self._handed_back:
                    self._settle()
                segment = self._pick(need, dropped)
                if segment is None:
                    return None
                loan = self._next_loan
                self._next_loan += 1
                self._placed_bytes += need
            finally:
                self._busy = False
        if dropped:
            _unmap(dropped)
        if segment.memory is None and not self._create(segment, need):
            return None
        placement = Placement(segment.number, loan, offsets, sizes)
        try:
            for span, offset in zip(spans, offsets, strict=True):
                copy(segment.address + offset, span)
        except BaseException:  # Ctrl-C between two copies
            segment.loan = loan
            self.reclaim([(placement.segment_id, loan)])
            raise
        # Only from here on can it be handed back: a peer that guesses loan numbers must not have a segment
        # unmapped while it is being filled.
        segment.loan = loan
        return placement

    def reclaim(self, loans: Iterable[tuple[int, int]]) -> None:
        """Take back segments by (segment, loan). Loans that are not out are ignored. Thread-safe."""
        self._handed_back.extend(loans)
        self.trim()

    def trim(self) -> None:
        """Retire segments that have been idle, about once a second. Their numbers appear in ``retired``."""
        dropped: list[_Segment] = []
        with self._lock:
            if self._busy:
                return
            self._busy = True
            try:
                self._settle()
                now = self._clock()
                if now >= self._next_trim:
                    self._next_trim = now + _TRIM_EVERY
                    self._trim(now, dropped)
            finally:
                self._busy = False
        _unmap(dropped)

    def drain_retired(self) -> list[int]:
        """Return the segments to tell the peer about: it may unmap them. Thread-safe."""
        numbers = []
        try:
            while True:
                numbers.append(self.retired.popleft())
        except IndexError:
            return numbers

    def stats(self) -> LaneStats:
        """Return what is lent and kept now. Thread-safe."""
        self.trim()
        return LaneStats(
            segments=len(self._segments),
            lent_bytes=self._bytes - self._free_bytes,
            free_bytes=self._free_bytes,
            placed_bytes=self._placed_bytes,
        )

    def close(self) -> None:
        """Close the socket and let go of all memory; what the peer uses stays mapped there. Idempotent."""
        with self._send_lock, self._lock:
            self._closed = True
            self._sock.close()
            if self._busy:
                return  # a finaliser in the middle of a section: the memory goes with this object
            dropped, self._segments, self._free = (self._segments, self._free), {}, {}
            self._bytes = self._free_bytes = 0
            self._handed_back.clear()
            self.retired.clear()
        del dropped  # unmaps, after the locks, except what is being filled at this moment

    def abandon(self) -> None:
        """Give up everything in a forked child, whose parent goes on lending."""
        self._send_lock, self._lock = _time.RLock(), _time.RLock()
        self._busy = False
        self.close()

    # -- under the lock ----------------------------------------------------------------------------

    def _settle(self) -> None:
        """Make free what was handed back."""
        while self._handed_back:
            number, loan = self._handed_back.popleft()
            segment = self._segments.get(number)
            if segment is None or segment.loan != loan or loan == 0:
                continue
            segment.loan = 0
            segment.used_at = self._clock()
            self._free.setdefault(segment.size, deque()).append(segment)
            self._free_bytes += segment.size

    def _pick(self, need: int, dropped: list[_Segment]) -> _Segment | None:
        """Take a free segment, or one to be created, or ``None`` where the limit allows neither."""
        size = size_class(max(need, _MIN_SEGMENT))
        stack = self._free.get(size)
        if not stack and self._free_bytes:
            # Up to twice too large and warm is better than new; far too large is better than nothing.
            stack = next(filter(None, map(self._free.get, size_classes(size))), None)
        if not stack and not self._may_create(size, dropped):
            fitting = [other for other, free in self._free.items() if other >= size and free]
            if not fitting:
                return None
            stack = self._free[min(fitting)]
        if stack:
            segment = stack.pop()
            self._free_bytes -= segment.size
            return segment
        segment = _Segment(self._next_segment, size)
        self._next_segment += 1
        self._segments[segment.number] = segment
        self._bytes += size
        return segment

    def _may_create(self, size: int, dropped: list[_Segment]) -> bool:
        """Whether there is room for one more segment, if need be in the place of idle ones."""
        if size > self._limit or self._clock() < self._no_new_before:
            return False
        in_use = len(self._segments) - sum(map(len, self._free.values()))
        if self._bytes - self._free_bytes + size > self._limit or in_use >= _MAX_SEGMENTS:
            return False
        # A free one that is large enough, even much too large, is used before others go for a new one.
        while self._bytes + size > self._limit or len(self._segments) >= _MAX_SEGMENTS:
            if any(other >= size and free for other, free in self._free.items()):
                return False
            self._retire_oldest(dropped)
        return True

    def _oldest(self) -> deque[_Segment]:
        return min((stack for stack in self._free.values() if stack), key=lambda stack: stack[0].used_at)

    def _retire_oldest(self, dropped: list[_Segment]) -> None:
        segment = self._oldest().popleft()
        self._free_bytes -= segment.size
        self._forget(segment)
        self.retired.append(segment.number)
        dropped.append(segment)

    def _forget(self, segment: _Segment) -> None:
        if self._segments.pop(segment.number, None) is not None:
            self._bytes -= segment.size

    def _trim(self, now: float, dropped: list[_Segment]) -> None:
        while self._free_bytes:
            idle = now - self._oldest()[0].used_at
            if idle <= (_KEEP_OVER_HALF if 2 * self._free_bytes > self._limit else _KEEP):
                return
            self._retire_oldest(dropped)

    # -- outside the lock --------------------------------------------------------------------------

    def _create(self, segment: _Segment, need: int) -> bool:
        """Make the memory of ``segment`` and tell the peer; on failure the segment is gone."""
        pause, fd = _NO_MEMFD, -1
        try:
            fd = sealed_memfd(segment.size)
            memory, segment.address = reserve(segment.size, fd)
            if self._announce(segment, fd):
                segment.memory = memory
                return True
            pause = _NO_ROOM
        except (OSError, MemoryError):
            pass
        finally:
            if fd >= 0:
                os.close(fd)
        with self._lock:
            self._forget(segment)
            self._placed_bytes -= need
            self._no_new_before = self._clock() + pause
        return False

    def share(self, segment: Segment, fd: int) -> int:
        """Send the descriptor of a segment with objects; return the number by which the next frame names it, or 0.

        0: the socket has no room at present, as the peer has not read what is in it. Thread-safe.

        Raises:
            OSError: the socket is closed, or the system does not let more descriptors be on their way.
        """
        with self._lock:
            number = self._next_segment
            self._next_segment += 1
        label, site = segment.label.encode()[:64], segment.site.encode()[-64:]
        if self._tell(_ANNOUNCEMENT.pack(number, segment.size, segment.id, label, site), fd):
            return number
        if self._closed:
            raise OSError(errno.EPIPE, "the connection for shared memory is closed")
        return 0

    def _announce(self, segment: _Segment, fd: int) -> bool:
        return self._tell(_ANNOUNCEMENT.pack(segment.number, segment.size, _NO_OBJECT, b"", b""), fd)

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


@dataclass(slots=True, eq=False)
class _Mapped:
    """Shared memory on the borrower's side. ``loan`` is 0 unless views of that loan may live."""

    number: int
    size: int
    memory: object
    address: int
    loan: int = 0


class Borrower:
    """Gives out views on the shared memory of one peer. It belongs to the process that made it.

    Two locks, never taken together: ``_fetch_lock`` (reading the socket; may be held for a second when the
    peer is broken) and ``_lock`` (``drain_freed`` and the fork hooks). Both are re-entrant, for finalisers
    that the collector runs inside a section. The table of segments needs neither: each access is atomic.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        max_buffers: int = 10_000,
        on_freed: Callable[[], None] | None = None,
        adopt: Callable[[int, bytes, int, str, str], Segment] | None = None,
    ) -> None:
        self._sock = sock
        self._max_buffers = max_buffers
        self._fetch_lock = _time.RLock()
        self._lock = _time.RLock()
        self._segments: dict[int, _Mapped] = {}
        self._unmapped: dict[
            int, tuple[int, int]
        ] = {}  # size and descriptor of those for which there was no memory
        self._unseen: set[int] = set()  # retired before their announcements could be taken
        self._adopt = adopt
        self._objects: dict[int, Segment | LimitError] = {}  # announced, and not named by a frame yet
        self._loans: Loans[tuple[int, int]] = Loans(on_freed)
        self._closed = False
        self._forks: ForkGuard[tuple[int, int]] = ForkGuard()
        #: bytes that were placed for this worker; of two threads that count at the same moment, one may be lost
        self.taken_bytes = 0

    @property
    def freed(self) -> bool:
        """Whether ``drain_freed`` may have something to return."""
        return bool(self._loans.returned) or self._forks.holds

    @property
    def held_bytes(self) -> int:
        """How much of the peer's memory is in use here: all of each segment of which a part is."""
        return sum(segment.size for segment in list(self._segments.values()) if segment.loan)

    def views(
        self, segment_id: int, loan: int, offsets: Sequence[int], sizes: Sequence[int]
    ) -> list[memoryview]:
        """Return writable views of a placement. To refuse a placement, call this and drop the views.

        Thread-safe. Blocks, for a second at most, only where a peer did not announce the segment.

        Raises:
            ProtocolError: the placement makes no sense, or its segment cannot be had.
        """
        if len(sizes) > self._max_buffers or len(offsets) != len(sizes):
            raise ProtocolError(f"{len(sizes)} buffers with {len(offsets)} offsets in shared memory")
        try:
            segment = self._segments.get(segment_id) or self._fetch(segment_id)
        except LimitError:  # what was lent goes back unseen
            self._loans.returned.append((segment_id, loan))
            raise
        ends = list(map(add, offsets, sizes))
        for offset, size, end in zip(offsets, sizes, ends, strict=True):
            if offset < 0 or size < 0 or end > segment.size:
                raise ProtocolError(f"{size} bytes at {offset} are not within a segment of {segment.size}")
        if loan <= 0 or segment.loan:
            raise ProtocolError(f"segment {segment_id} is lent as {loan} while its loan {segment.loan} lives")
        segment.loan = loan
        self.taken_bytes += sum(sizes)
        whole = self._loans.lend(segment.memory, segment.address, segment.size, (segment_id, loan))
        return list(map(whole.__getitem__, map(slice, offsets, ends)))

    def take_objects(self, numbers: Iterable[Any]) -> list[Segment | RpcError]:
        """Return the segments that a frame names: they were announced before it. One that cannot be had is the error.

        Thread-safe. Does not wait. Called once for each frame, so that what nobody opens goes with it.

        Raises:
            ProtocolError: the peer sent nonsense over the descriptor socket.
        """
        found: list[Segment | RpcError] = []
        with self._fetch_lock:
            for number in numbers:
                if type(number) is not int:
                    raise ProtocolError(f"{type(number).__name__} is no number of an object")
                while number not in self._objects and not self._closed and self._receive():
                    pass
                taken = self._objects.pop(number, None)
                found.append(
                    ProtocolError(f"the object {number} of a message was never announced, or came twice")
                    if taken is None
                    else taken
                )
        return found

    def drain_freed(self) -> list[tuple[int, int]]:
        """Return the loans to hand back to the peer. Thread-safe."""
        if not self.freed:
            return []
        with self._lock:
            # During a fork nothing is handed back: it cannot be said yet what the child inherits.
            if self._forks.forking:
                return []
            returned = self._loans.returned
            returned.extend(self._forks.release())
            freed = []
            try:
                while True:
                    loan = returned.popleft()
                    if not self._forks.hold(loan):
                        freed.append(loan)
            except IndexError:
                pass  # rather than a look before: a finaliser run in here may drain as well
            for number, _ in freed:
                if segment := self._segments.get(number):
                    segment.loan = 0
        return freed

    def retire(self, segment_ids: Iterable[int]) -> None:
        """Forget segments; each is unmapped when no view on it lives. Unknown ones are ignored. Thread-safe.

        Raises:
            ProtocolError: the peer sent nonsense over the descriptor socket.
        """
        for number in segment_ids:
            if number not in self._segments and number not in self._unmapped:
                # Announced and never used: its descriptor waits in the socket still.
                if not self._gather(number) and len(self._unseen) < MOST_SEGMENTS:
                    # Its announcement cannot be taken now: that is for the thread that takes the next one.
                    self._unseen.add(number)
            self._segments.pop(number, None)
            self._forget_unmapped(number)

    def gather(self) -> None:
        """Take in what is announced: the peer's next message names more than the socket has room for. Thread-safe.

        Raises:
            ProtocolError: the peer sent nonsense over the descriptor socket.
        """
        self._gather(0)

    def _gather(self, wanted: int) -> bool:
        """Take in what is announced, until a segment is known; False where there is no descriptor for one."""
        with self._fetch_lock:
            try:
                while not self._closed and wanted not in self._segments and self._receive():
                    pass
            except LimitError:
                return False
        return True

    def _forget_unmapped(self, number: int) -> None:
        _, fd = self._unmapped.pop(number, (0, -1))
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Close the socket and forget all segments; each is unmapped when no view on it lives.

        Idempotent; wakes threads in ``views``.
        """
        self._closed = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        with self._fetch_lock:
            self._sock.close()
            for number in list(self._unmapped):
                self._forget_unmapped(number)
        with self._lock:
            self._loans.close()
            self._segments = {}
            self._forks.close()

    # -- around a fork -----------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Run in the parent before a fork: loans that live now must not be handed back under the child."""
        if self._segments and not self._closed:
            with self._lock:
                self._loans.returned.extend(self._forks.release())
                self._forks.before()

    def after_fork_in_parent(self) -> None:
        """Run in the parent after a fork, also after one that failed, in the thread that forked."""
        with self._lock:
            self._forks.after(
                {(held.number, held.loan) for held in list(self._segments.values()) if held.loan}
            )

    def abandon(self) -> None:
        """Give up everything in a forked child; inherited views stay valid and are not handed back.

        One descriptor per fork is left open on purpose: its end is how the parent learns of the child's.
        """
        self._fetch_lock, self._lock = _time.RLock(), _time.RLock()
        self._closed = True
        self._sock.close()  # without shutdown, which would reach the parent
        for number in list(self._unmapped):
            self._forget_unmapped(number)
        self._loans.close()
        self._segments = {}
        self._forks.abandon()

    # -- the descriptor socket ---------------------------------------------------------------------

    def _fetch(self, wanted: int) -> _Mapped:
        """Read announcements until ``wanted`` is known."""
        deadline = _time.now() + _ANNOUNCEMENT_WAIT
        with self._fetch_lock:
            while True:
                segment = self._segments.get(wanted)
                if segment is not None:
                    return segment
                if self._closed:
                    raise ProtocolError("the connection for shared memory is closed")
                if wanted in self._unmapped:
                    size, fd = self._unmapped[wanted]
                    self._segments[wanted] = self._map(wanted, size, fd)
                    del self._unmapped[wanted]
                    os.close(fd)
                    continue
                if self._receive():
                    continue
                remaining = deadline - _time.now()
                if remaining <= 0:
                    raise ProtocolError(f"segment {wanted} of shared memory was never announced")
                poll = _time.poll()
                poll.register(self._sock, select.POLLIN)
                poll.poll(1000 * remaining)

    def _receive(self) -> bool:
        """Take in one announcement if there is one.

        Raises:
            LimitError: there is no descriptor for it; it stays where it is, but for an object's: that is lost.
            ProtocolError: it is not one.
        """
        try:
            # A look does not take it away: one whose descriptor finds no place here can still be taken later.
            data, ancillary, state, _ = self._sock.recvmsg(_ANNOUNCEMENT.size, _ONE_FD, _PEEK)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ProtocolError(f"the connection for shared memory failed: {error}") from error
        fds = array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if len(data) == _ANNOUNCEMENT.size and state & _CTRUNC and not fds:
            number, size, segment_id, _, _ = _ANNOUNCEMENT.unpack(data)
            short = LimitError(
                f"{size >> 20} MiB of shared memory cannot be taken here: {fd_limits.missing()}"
            )
            if segment_id == _NO_OBJECT:
                raise short
            self._sock.recv(_ANNOUNCEMENT.size, _DONTWAIT)
            self._objects[number] = short  # for the message that names it: those behind it can go on
            return True
        try:
            self._sock.recv(_ANNOUNCEMENT.size, _DONTWAIT)
            if not data and not fds:
                raise ProtocolError("the peer closed the connection for shared memory")
            if len(data) != _ANNOUNCEMENT.size or len(fds) != 1 or state & _CUT:
                raise ProtocolError("not an announcement of shared memory")
            number, size, segment_id, label, site = _ANNOUNCEMENT.unpack(data)
            if segment_id != _NO_OBJECT:
                if self._adopt is None or len(self._objects) >= MOST_SEGMENTS:
                    raise ProtocolError("objects in shared memory that no message names")
                fd = fds.pop()
                self._objects[number] = self._adopt(fd, segment_id, size, _text(label), _text(site))
                return True
            if number in self._unseen:
                self._unseen.discard(number)
                return True
            try:
                self._segments[number] = self._map(number, size, fds[0])
            except LimitError:  # there may be memory for it when it is lent again
                self._unmapped[number] = size, fds.pop()
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _map(self, number: int, size: int, fd: int) -> _Mapped:
        if number in self._segments or len(self._segments) >= MOST_SEGMENTS:
            raise ProtocolError(f"segment {number} of shared memory is known already, or one too many")
        if not _MIN_SEGMENT <= size <= _MAX_SIZE or size != size_class(size):
            raise ProtocolError(f"{size} bytes are not a size of a segment of shared memory")
        if size + sum([segment.size for segment in list(self._segments.values())]) > _MOST_BYTES:
            raise ProtocolError(f"the peer lends more than {_MOST_BYTES} bytes of shared memory")
        try:
            if not is_sealed(fd, size):
                raise ProtocolError("the peer lends memory that it could take away again")
            memory, address = reserve(size, fd)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise LimitError(
                    f"{size >> 20} MiB of shared memory cannot be mapped here: {explain_memory()}"
                ) from error
            raise ProtocolError(f"the peer's shared memory cannot be mapped: {error}") from error
        return _Mapped(number, size, memory, address)


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="ignore")


def _unmap(segments: list[_Segment]) -> None:
    """Unmap segments that were free; closing does so without the GIL, other than the object's death."""
    for segment in segments:
        if segment.memory is not None:
            segment.memory.close()
