"""Objects in shared memory: written once, read by any number of processes of the host, each of which may change what it reads.

A *segment* is nameless memory (a ``memfd``), or, where memory is full and a directory is given for that, an unlinked file. The
process that makes it, its writer, maps it for writing, and seals it: nobody else ever can. Readers get a descriptor that is open
for reading only, over a Unix socket, and map it privately: copy-on-write, so that each has tensors and arrays of its own.

The kernel counts the readers. A lease for writing is granted to a descriptor if and only if no other description of that file is
open for reading: none in another process, none in flight in a socket, none behind a mapping, none that a forked child has
inherited. The writer keeps such a descriptor, its *probe*, and asks. So no message says that an object is no longer used, and
none can be lost: whichever process dies, the answer is right. A segment that nobody reads is filled again, as memory that was
used before is several times faster to fill, or goes back to the system. After its writer's death a segment lives as long as
somebody reads it.

Objects below 8 MiB share segments, in ranges that begin at pages; a segment is used again as a whole only.

One lock, ``ObjectStore._lock``, guards the tables. No user code runs under it, and no memory is copied. It is re-entrant for one
case only: a finaliser that the collector runs in the middle of a section, and that makes an object itself; ``_busy`` turns it
away.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from actorrpc import _time
from actorrpc.errors import LimitError, ObjectStoreFullError, ProtocolError
from actorrpc.transport.buffers import Loans, is_sealed, reserve, size_class, size_classes
from actorrpc.transport.object_accounts import Holding, ObjectAccounts

__all__ = ["Allocation", "ObjectStore", "Segment", "StoreStats", "StoredRange"]

SEGMENT_ID_SIZE: Final = 16
OWN_SEGMENT: Final = 8 << 20
"""Objects of so many bytes have a segment to themselves."""

_SHARED_SIZE: Final = (
    64 << 20
)  # of a segment that objects share: pages that nobody has written take no memory
_PAGE: Final = mmap.PAGESIZE
_KEEP_S: Final = 1.0  # a segment that nobody reads is kept for so long, warm, to be filled again
_LOOK_S: Final = 0.1  # how long what all processes hold is taken for what it was
_WAIT_S: Final = 0.01  # between two looks whether there is room
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x10  # F_SEAL_FUTURE_WRITE
_MFD_FLAGS: Final = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
_MFD_NOEXEC_SEAL: Final = 0x8
_F_SETLEASE: Final = getattr(fcntl, "F_SETLEASE", 1024)
_DONTNEED: Final = 4
_madvise: Final = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


class _Descriptor:
    """A descriptor for reading, which is closed when its segment is gone.

    Not the segment itself: an object that has a finaliser can be had from a weak reference while that runs.
    """

    __slots__ = ("fd", "pid", "segment_id", "store")

    def __init__(self, store: ObjectStore, fd: int, segment_id: bytes) -> None:
        self.store = store
        self.fd = fd
        self.segment_id = segment_id
        self.pid = os.getpid()

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if self.pid == os.getpid():
            self.close()
            self.store.hear_let_go(self.segment_id)


class Segment:
    """A segment as one process holds it: a descriptor for reading, as long as anything here needs it.

    Attributes:
        id: names what it is filled with now, in all processes.
        size: in bytes.
        label: what is in it, in words; of several, the latest.
        site: where that was made.
    """

    __slots__ = ("__weakref__", "_descriptor", "_given", "_store", "_whole", "id", "label", "site", "size")

    def __init__(
        self, store: ObjectStore, fd: int, segment_id: bytes, size: int, label: str, site: str
    ) -> None:
        self._store = store
        self._descriptor = _Descriptor(store, fd, segment_id)
        self.id = segment_id
        self.size = size
        self.label = label
        self.site = site
        self._whole: tuple[mmap.mmap, int] | None = None
        self._given: set[int] = set()  # offsets of ranges of ``_whole`` whose views live

    @property
    def fd(self) -> int:
        """The descriptor; -1 in a fork of the process that holds it."""
        return self._descriptor.fd

    def range(self, offset: int, nbytes: int) -> StoredRange:
        """Return one object's place in it.

        Raises:
            ProtocolError: nothing begins there, or it is not long enough.
        """
        if offset < 0 or nbytes < 0 or offset % _PAGE or offset + nbytes > self.size:
            raise ProtocolError(f"{nbytes} bytes at {offset} are no object in a segment of {self.size}")
        return StoredRange(self, offset, nbytes)

    def close(self) -> None:
        """Close the descriptor; what is mapped stays."""
        self._descriptor.close()


class StoredRange:
    """One object's bytes in a segment. It holds the segment here: dropping the last one lets go. Never changes. Thread-safe.

    Attributes:
        segment: the segment.
        offset: where it begins, a multiple of the page size.
        nbytes: its length.
    """

    __slots__ = ("nbytes", "offset", "segment")

    def __init__(self, segment: Segment, offset: int, nbytes: int) -> None:
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes

    def fileno(self) -> int:
        """Return the descriptor to be sent to a reader.

        Raises:
            OSError: this is a fork of the process that holds it.
        """
        if self.segment.fd < 0:
            raise OSError(errno.EBADF, "an object in shared memory is not held by a fork")
        return self.segment.fd

    def map(self) -> memoryview:
        """Return the bytes as writable memory: each time anew, and nobody sees what is written to it.

        Raises:
            LimitError: there is no address space for it, or this is a fork.
        """
        return self.segment._store.map(self)

    def __repr__(self) -> str:
        return f"<StoredRange of {self.nbytes} bytes>"


class Allocation:
    """Room for one object, while one thread fills it.

    Attributes:
        address: where to write.
        nbytes: how much.
    """

    __slots__ = ("_range", "_store", "_written", "address", "nbytes")

    def __init__(self, store: ObjectStore, written: _Written, stored: StoredRange) -> None:
        self._store = store
        self._written = written
        self._range = stored
        self.address = written.address + stored.offset
        self.nbytes = stored.nbytes

    def finish(self) -> StoredRange:
        """Return the range; from here on nobody may write to it."""
        self._store.finished(self._written)
        return self._range

    def discard(self) -> None:
        """Give the room back unused."""
        self._store.finished(self._written)


@dataclass(slots=True, eq=False)
class _Written:
    """A segment on its writer's side. ``used_at``: when it was last seen in use."""

    fd: int
    probe: int
    memory: mmap.mmap
    address: int
    size: int
    used: int = 0  # where the next object begins
    touched: int = 0  # bytes that have ever been written: so much memory it takes
    used_at: float = 0.0
    filling: int = 0
    free: bool = False
    spilled: bool = False

    def close(self) -> None:
        """Let go of it: it lives as long as it has readers."""
        self.memory.close()
        for fd in (self.fd, self.probe):
            if fd >= 0:
                os.close(fd)
        self.fd = self.probe = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What a process has to do with objects in shared memory.

    Attributes:
        held: what each segment that is held here has in it.
        held_bytes: the size of those.
        free_bytes: of segments that are kept to be filled again.
        host_bytes: of all processes of the group on this host.
        limit_bytes: how much those may be.
    """

    held: tuple[Holding, ...]
    held_bytes: int
    free_bytes: int
    host_bytes: int
    limit_bytes: int


class ObjectStore:
    """Writes objects, and holds those of others, for one process.

    Args:
        accounts: what all processes of the group on this host hold, together.
        limit_bytes: how much that may be.
        spill_dir: a directory for what finds no room; None: those who write wait for room.
        clock: seconds.
        on_let_go: hears, in a finaliser, that a segment is no longer held here: :meth:`trim` is to be called.
    """

    def __init__(
        self,
        accounts: ObjectAccounts,
        *,
        limit_bytes: int,
        spill_dir: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_let_go: Callable[[], None] | None = None,
    ) -> None:
        self._on_let_go = on_let_go
        self.let_go: deque[bytes] = deque()
        self._accounts = accounts
        self._limit = limit_bytes
        self._spill_dir = spill_dir
        self._clock = clock
        self._lock = threading.RLock()
        self._busy = False
        self._closed = False
        self._held: weakref.WeakValueDictionary[bytes, Segment] = weakref.WeakValueDictionary()
        self._written: list[_Written] = []
        self._shared: _Written | None = None  # the segment in which the next small object goes
        self._shared_segment: weakref.ref[Segment] | None = None
        self._views: Loans[tuple[weakref.ref[Segment] | None, int, int, int]] = Loans()
        self._recycles = True  # unless the system grants no leases
        # What the group held when it was last looked at, when that was, and what was written here since.
        self._total, self._looked_at, self._spent = 0, float("-inf"), 0

    def hear_let_go(self, segment_id: bytes) -> None:
        """Note that a segment is held here no more. Runs in a finaliser: takes no lock."""
        first = not self.let_go
        self.let_go.append(segment_id)
        if first and self._on_let_go is not None:
            self._on_let_go()

    # -- writing -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, label: str, site: str = "", until: float = 0.0) -> Allocation | None:
        """Return room for an object of ``nbytes``; None where the system gives no memory for segments, or it is closed.

        Thread-safe. Waits where there is no room, in steps, and at most until ``until`` on the monotonic clock.

        Raises:
            ObjectStoreFullError: there is no room, and none has become free; who holds what is in the message.
        """
        while True:
            with self._lock:
                if self._busy or self._closed:
                    return None
                self._busy = True
                dropped: list[_Written] = []
                try:
                    self._settle()
                    found = self._find(nbytes, label, site, dropped)
                except OSError:
                    return None  # no descriptors, no memory: the object stays where it is
                finally:
                    self._busy = False
            for each in dropped:
                each.close()
            if found is not None:
                return found
            if _time.now() >= until:
                raise self._full(nbytes, label)
            _time.sleep(_WAIT_S)

    def _find(self, nbytes: int, label: str, site: str, dropped: list[_Written]) -> Allocation | None:
        """Return room; None where the limit leaves none. Under the lock."""
        small = nbytes < OWN_SEGMENT
        if small and (found := self._beside(nbytes, label, site)) is not None:
            return found
        size = _SHARED_SIZE if small else size_class(_pages(nbytes))
        written = self._reusable(size)
        fresh = _pages(nbytes) - (written.touched if written is not None else 0)
        spilled = False
        if fresh > 0 and not self._has_room(fresh, dropped):
            if self._spill_dir is None:
                if written is not None:
                    written.free = True
                return None
            if written is not None:
                written.free = True
            written, spilled, size = None, True, _pages(nbytes)
        if written is None:
            written = self._make(size, spilled)
            self._written.append(written)
        return self._begin(written, nbytes, label, site, shared=small and not spilled)

    def _beside(self, nbytes: int, label: str, site: str) -> Allocation | None:
        """Return room in the segment that small objects share at present, if there is any."""
        shared = self._shared
        if shared is None:
            return None
        segment = self._shared_segment() if self._shared_segment is not None else None
        if segment is None or shared.used + nbytes > shared.size:
            self._shared = None
            return None
        if max(0, shared.used + nbytes - shared.touched) and not self._has_room(nbytes, []):
            return None
        return self._begin(shared, nbytes, label, site, segment=segment)

    def _begin(
        self,
        written: _Written,
        nbytes: int,
        label: str,
        site: str,
        *,
        shared: bool = False,
        segment: Segment | None = None,
    ) -> Allocation:
        if segment is None:
            written.used = 0
            fd = os.open(f"/proc/self/fd/{written.fd}", os.O_RDONLY | os.O_CLOEXEC)
            segment = Segment(self, fd, os.urandom(SEGMENT_ID_SIZE), written.size, label, site)
            self._held[segment.id] = segment
            if shared:
                self._shared, self._shared_segment = written, weakref.ref(segment)
        segment.label, segment.site = label, site
        stored = StoredRange(segment, written.used, nbytes)
        written.used += _pages(nbytes)
        written.touched = max(written.touched, written.used)
        written.used_at = self._clock()
        written.filling += 1
        written.free = False
        self._accounts.hold(segment.id, written.touched if not written.spilled else 0, label, site)
        return Allocation(self, written, stored)

    def finished(self, written: _Written) -> None:
        """Hear that an object has been written."""
        with self._lock:
            written.filling -= 1
            drop = (
                (written.spilled or not self._recycles)
                and not written.filling
                and written is not self._shared
            )
            if drop and written in self._written:
                self._written.remove(written)
        if drop:
            written.close()

    def _reusable(self, size: int) -> _Written | None:
        """Return a segment that nobody reads, of that size up to double of it: the one that was used last, as it is warmest."""
        fitting = size_classes(size)
        for written in reversed(self._written):
            if written.size in fitting and written is not self._shared and self._is_free(written):
                self._written.remove(written)
                self._written.append(written)
                return written
        return None

    def _is_free(self, written: _Written) -> bool:
        """Ask the kernel whether anybody reads a segment."""
        if written.free:
            return True
        if written.spilled or not self._recycles:
            return False
        try:
            fcntl.fcntl(written.probe, _F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                self._recycles = False
            return False
        fcntl.fcntl(written.probe, _F_SETLEASE, fcntl.F_UNLCK)
        written.free = True
        written.filling = 0  # who filled it has let go of it without a word
        written.used_at = self._clock()
        return True

    def _has_room(self, nbytes: int, dropped: list[_Written]) -> bool:
        """Whether so many bytes more are within the limit, if need be in the place of segments that are kept to be used again."""
        self._spent += nbytes
        now = self._clock()
        if now < self._looked_at + _LOOK_S and self._total + self._spent <= self._limit // 2:
            return True  # far from the limit a moment ago: to look at all accounts takes a while
        self._total, self._looked_at, self._spent = self._accounts.total(), now, nbytes
        while self._accounts.total() + self._kept() + nbytes > self._limit:
            idle = [each for each in self._written if each is not self._shared and self._is_free(each)]
            if not idle:
                return False
            oldest = min(idle, key=lambda each: each.used_at)
            self._written.remove(oldest)
            dropped.append(oldest)
        return True

    def _kept(self) -> int:
        return sum(each.touched for each in self._written if each.free)

    def _make(self, size: int, spilled: bool) -> _Written:
        fd = probe = -1
        memory: mmap.mmap | None = None
        try:
            if spilled:
                fd, path = tempfile.mkstemp(dir=self._spill_dir, prefix="actorrpc-object-")
                os.unlink(path)
                try:
                    os.posix_fallocate(fd, 0, size)
                except OSError as error:
                    raise ObjectStoreFullError(
                        f"an object of {size >> 20} MiB finds no room in {self._spill_dir!r}: {error.strerror}. "
                        "Nothing was stored: make room there, or keep fewer objects"
                    ) from error
                memory, address = reserve(size, fd)
                return _Written(fd, -1, memory, address, size, spilled=True)
            try:
                fd = os.memfd_create("actorrpc-object", _MFD_FLAGS | _MFD_NOEXEC_SEAL)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                fd = os.memfd_create("actorrpc-object", _MFD_FLAGS)  # kernels before 6.3
            os.ftruncate(fd, size)
            memory, address = reserve(size, fd)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            probe = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            return _Written(fd, probe, memory, address, size)
        except BaseException:
            if memory is not None:
                memory.close()
            for each in (fd, probe):
                if each >= 0:
                    os.close(each)
            raise

    def _full(self, nbytes: int, label: str) -> ObjectStoreFullError:
        rows = sorted(self._accounts.rows(), key=lambda row: -row.nbytes)
        most = "; ".join(map(str, rows[:5])) or "nothing is held"
        more = f"; and {len(rows) - 5} more" if len(rows) > 5 else ""
        return ObjectStoreFullError(
            f"{label}, of {_amount(nbytes)}, finds no room: the objects of this group on this host take "
            f"{_amount(sum(row.nbytes for row in rows))} of {_amount(self._limit)}. Nothing was stored. Let go of references and "
            f"values, raise object_memory=, or give spill_dir= a directory on a disk. Held: {most}{more}"
        )

    # -- reading -----------------------------------------------------------------------------------

    def adopt(self, fd: int, segment_id: bytes, size: int, label: str = "", site: str = "") -> Segment:
        """Return the segment of a descriptor that came from another process; it is this store's from here on. Thread-safe.

        Raises:
            ProtocolError: it is not memory that stays as it is.
        """
        kept = False
        try:
            with self._lock:
                segment = self._held.get(segment_id)
                if segment is None:
                    if not _never_shrinks(fd, size):
                        raise ProtocolError("the peer shares memory that it could take away again")
                    segment = Segment(self, fd, segment_id, size, label, site)
                    kept = True
                    self._held[segment_id] = segment
                    taken = 512 * os.fstat(fd).st_blocks if _is_memory(fd) else 0
                    self._accounts.hold(segment_id, taken, label, site)
                elif segment.size != size:
                    raise ProtocolError("two segments of shared memory have one name")
            return segment
        finally:
            if not kept:
                os.close(fd)

    def map(self, stored: StoredRange) -> memoryview:
        """See :meth:`StoredRange.map`."""
        segment, offset, nbytes = stored.segment, stored.offset, stored.nbytes
        if not nbytes:
            return memoryview(bytearray())
        try:
            with self._lock:
                self._clean()
                fd = stored.fileno()
                if nbytes < OWN_SEGMENT and segment.size > OWN_SEGMENT:
                    # Once for all objects that share it: a process may have 65 530 mappings.
                    if segment._whole is None:
                        segment._whole = reserve(segment.size, fd, private=True)
                    if offset not in segment._given:
                        segment._given.add(offset)
                        memory, base = segment._whole
                        # When its last view dies, the pages that were written to go, and the range is as it was: see _clean.
                        tag = weakref.ref(segment), offset, base + offset, nbytes
                        return self._lend(memory, base + offset, nbytes, tag)
                memory, address = reserve(_pages(nbytes), fd, private=True, offset=offset)
                return self._lend(memory, address, nbytes, (None, 0, 0, 0))
        except OSError as error:
            raise LimitError(
                f"an object of {_amount(nbytes)} in shared memory cannot be mapped here: {error.strerror or error}"
            ) from error

    def _lend(self, memory: mmap.mmap, address: int, nbytes: int, tag: Any) -> memoryview:
        return self._views.lend(memory, address, size_class(nbytes), tag)[:nbytes]

    def _clean(self) -> None:
        """Make ranges of shared mappings whose views have died what they were: their pages are the segment's again."""
        returned = self._views.returned
        while returned:
            try:
                found, offset, address, nbytes = returned.popleft()
            except IndexError:
                return
            segment = None if found is None else found()
            if segment is not None:
                _madvise(address, _pages(nbytes), _DONTNEED)
                segment._given.discard(offset)

    # -- giving back ------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Take segments off the accounts that nobody here holds any more."""
        while self.let_go:
            try:
                segment_id = self.let_go.popleft()
            except IndexError:
                return
            if segment_id not in self._held:
                self._accounts.let_go(segment_id)

    def trim(self) -> None:
        """Give segments back that nobody has read for a while; call it about once a second while :attr:`writes` says so."""
        dropped: list[_Written] = []
        with self._lock:
            if self._busy or self._closed:
                return
            self._busy = True
            try:
                self._settle()
                self._clean()
                now = self._clock()
                crowded = self._accounts.total() + self._kept() > self._limit
                for each in list(self._written):
                    if each is self._shared and (
                        self._shared_segment is None or self._shared_segment() is not None
                    ):
                        continue
                    was_free = each.free
                    if self._is_free(each) and was_free and (crowded or now - each.used_at >= _KEEP_S):
                        if each is self._shared:
                            self._shared = None
                        self._written.remove(each)
                        dropped.append(each)
            finally:
                self._busy = False
        for each in dropped:
            each.close()

    @property
    def writes(self) -> bool:
        """Whether there are segments of this process, which are to be given back one day."""
        return bool(self._written)

    def stats(self) -> StoreStats:
        """Return what is held here and on this host. Thread-safe."""
        self.trim()
        with self._lock:
            held = tuple(
                Holding(os.getpid(), each.id, self._accounts.bytes_of(each.id), each.label, each.site)
                for each in list(self._held.values())
            )
            return StoreStats(
                held=held,
                held_bytes=sum(each.nbytes for each in held),
                free_bytes=self._kept(),
                host_bytes=self._accounts.total(),
                limit_bytes=self._limit,
            )

    def close(self) -> None:
        """Let go of what is written here; what others, or values here, use stays as long as they do. Idempotent."""
        with self._lock:
            self._closed = True
            written, self._written, self._shared = self._written, [], None
        for each in written:
            each.close()
        self._accounts.close()

    def abandon(self) -> None:
        """Give everything up in a forked child: what it has mapped stays, and the kernel counts it."""
        self._lock = threading.RLock()
        self._busy = False
        self._closed = True
        for segment in list(self._held.values()):
            segment.close()
        written, self._written, self._shared = self._written, [], None
        for each in written:
            each.close()
        self._accounts.abandon()


def _is_memory(fd: int) -> bool:
    """Say whether a descriptor is of memory, not of a file on a disk."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def _never_shrinks(fd: int, size: int) -> bool:
    """Say whether memory is sealed, or an unlinked file that is open for reading only."""
    if _is_memory(fd):
        return is_sealed(fd, size)
    status = os.fstat(fd)
    reads_only = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    return stat.S_ISREG(status.st_mode) and not status.st_nlink and status.st_size >= size and reads_only


def _amount(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB" if nbytes >= 1 << 20 else f"{nbytes} bytes"
