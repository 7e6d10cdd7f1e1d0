"""Objects in shared memory, which are written once and read by any number of processes of the host.

A *segment* is anonymous memory (a ``memfd``). If the memory limit is reached and a spill directory is configured, the segment is
an unlinked file in that directory. The process that creates a segment is its writer. It maps the segment for writing and then
seals it, so that no other process can map it for writing. Readers receive a read-only descriptor over a Unix socket and map it
privately (copy-on-write), so each reader may change its tensors and arrays without affecting the others.

The kernel knows whether a segment has readers. It grants a write lease on a descriptor if and only if no other file description
of the file is open for reading: none in another process, in a socket, behind a mapping, or inherited by a forked child. The
writer keeps a descriptor for reading, the *probe*, and requests a lease to find out whether the segment has readers. No message
has to say that an object is no longer used, so the result is right even if a process has died. A segment without readers is kept
for reuse for a short time, because used memory is several times faster to fill, and then released. After the death of its writer,
a segment exists as long as it has readers.

Only the memory of ``actorrpc.share`` is written to after it was sent, by its writer (:meth:`Allocation.view`).

Objects below 8 MiB share segments, in ranges that begin at page boundaries. A segment is only reused as a whole.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import tempfile
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from actorrpc import _limits, _time
from actorrpc._exceptions import undo_on_error
from actorrpc.errors import LimitError, ObjectStoreFullError, ProtocolError
from actorrpc.transport.buffers import (
    Loans,
    MemoryBlock,
    MemoryStats,
    Recycler,
    drained,
    is_sealed,
    reserve,
    sealed_memfd,
    size_class,
)
from actorrpc.transport.object_accounts import Holding, ObjectAccounts, amount
from actorrpc.transport.signals import uninterruptible

__all__ = ["Allocation", "ObjectStore", "Segment", "StoreStats", "StoredRange"]

OWN_SEGMENT: Final = 8 << 20
"""Objects from this size on have a segment of their own."""

# The size of a segment that small objects share. Pages that were never written take no memory.
_SHARED_SIZE: Final = 64 << 20
_PAGE: Final = mmap.PAGESIZE
_KEEP_S: Final = 1.0  # how long a segment without readers is kept for reuse
_WAIT_S: Final = 0.01  # seconds between two checks whether there is room
_ID_SIZE: Final = 16
_NAME: Final = "actorrpc-object"
_KEPT: Final = "memory that is kept to be used again"
_F_SEAL_FUTURE_WRITE: Final = 0x10
_F_SETLEASE: Final = getattr(fcntl, "F_SETLEASE", 1024)
_DONTNEED: Final = 4
_madvise: Final = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


class _Use:
    """One use of a segment by this process: either by a :class:`Segment` (``fd`` is its descriptor), or by a mapping.

    Segment itself has no finaliser: the store has weak references to Segments, and a weak reference may revive an object whose
    finaliser runs.
    """

    __slots__ = ("fd", "pid", "segment_id", "store")

    def __init__(self, store: ObjectStore, segment_id: bytes, fd: int = -1) -> None:
        self.store, self.segment_id, self.fd = store, segment_id, fd
        self.pid = os.getpid()

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        try:
            self.close()
            if self.pid == os.getpid():
                self.store.ended.append(self.segment_id)
                self.store.request_trim()
        except AttributeError:  # the interpreter is shutting down
            pass


class Segment:
    """A segment in one process, with a descriptor for reading.

    Attributes:
        store: the process's object store, whose lock guards ``whole`` and ``given``.
        id: identifies the segment and its current content, in all processes.
        size: in bytes.
        label: describes the object in the segment; if there are several, the latest.
        site: the ``file:line`` where the labelled object was made.
        whole: a mapping of the whole segment, which small objects share, as (object that keeps it mapped, address); None: not
            mapped.
        given: the offsets of the objects that have live views on ``whole``.
    """

    __slots__ = ("__weakref__", "_use", "given", "id", "label", "site", "size", "store", "whole")

    def __init__(
        self, store: ObjectStore, fd: int, segment_id: bytes, size: int, label: str, site: str
    ) -> None:
        self.store, self.id, self.size, self.label, self.site = store, segment_id, size, label, site
        self._use = store.use(segment_id, fd)
        self.whole: tuple[object, int] | None = None
        self.given: set[int] = set()

    @property
    def fd(self) -> int:
        """The descriptor; -1 in a forked child."""
        return self._use.fd

    def range(self, offset: int, nbytes: int) -> StoredRange:
        """Return the range of one object.

        Raises:
            ProtocolError: the offset is not at a page boundary, or the range exceeds the segment.
        """
        if offset < 0 or nbytes < 0 or offset % _PAGE or offset + nbytes > self.size:
            raise ProtocolError(
                f"a segment of {self.size} bytes cannot have an object of {nbytes} bytes at {offset}"
            )
        return StoredRange(self, offset, nbytes)

    def close(self) -> None:
        """Close the descriptor; mappings stay."""
        self._use.close()


@dataclass(frozen=True, slots=True, eq=False)
class StoredRange:
    """The range of one object in a segment. It keeps the segment alive. Thread-safe.

    Attributes:
        segment: the segment.
        offset: the start of the range, a multiple of the page size.
        nbytes: the length of the range.
    """

    segment: Segment
    offset: int
    nbytes: int

    def fileno(self) -> int:
        """Return the descriptor, for sending it to a reader.

        Raises:
            OSError: this is a forked child.
        """
        if self.segment.fd < 0:
            what = 'a fork holds nothing of its parent: get() the value before the fork, or start the process with "spawn"'
            raise OSError(errno.EBADF, what)
        return self.segment.fd

    def map(self) -> memoryview:
        """Return the object's bytes as writable memory. Writes change this view only, and not the object.

        Raises:
            LimitError: there is no address space, or this is a forked child.
        """
        return self.segment.store.map(self)


class Allocation(NamedTuple):
    """Memory for one object, which one thread fills.

    If the Allocation and its views are dropped, and nothing else has ``stored``, the memory is released.

    Attributes:
        address: where to write the object.
        stored: the range of the object.
        memory: keeps the range mapped for writing.
    """

    address: int
    stored: StoredRange
    memory: object

    def view(self) -> memoryview:
        """Return the memory as writable bytes. Readers see the writes, except in pages that they have written themselves.

        The view keeps the memory allocated.
        """
        return self.stored.segment.store.view(self)


class _Written(MemoryBlock):
    """A segment on its writer's side.

    Attributes:
        probe: a descriptor for reading, for :meth:`ObjectStore._is_unread`.
        name: the id of the current content.
        used: the offset at which the next object will be written.
        touched: how many bytes were ever written, and so take memory.
        is_free: whether the segment has no readers and can be reused.
    """

    __slots__ = ("is_free", "name", "probe", "touched", "used")

    def __init__(self, probe: int, memory: mmap.mmap, address: int, size: int) -> None:
        super().__init__(size)
        self.probe, self.memory, self.address = probe, memory, address
        self.name = b""
        self.used = self.touched = 0
        self.is_free = False

    def close(self) -> None:
        super().close()
        probe, self.probe = self.probe, -1
        if probe >= 0:
            os.close(probe)


@dataclass(frozen=True, slots=True)
class StoreStats(MemoryStats):
    """The use of shared memory for objects. The fields of :class:`MemoryStats` are about the segments that this process wrote.

    Attributes:
        held: the segments that references or values of this process use.
        held_bytes: the memory of these segments.
        host_bytes: the memory of all segments of the group on this host.
        limit_bytes: the limit of ``host_bytes``.
    """

    held: tuple[Holding, ...]
    held_bytes: int
    host_bytes: int
    limit_bytes: int


class ObjectStore(Recycler[_Written]):
    """The object store of one process: allocates memory for objects, and maps objects of this and other processes.

    Segments are created and mapped under its lock, but memory is not copied under it.

    Args:
        accounts: the accounts of all processes of the group on this host.
        limit_bytes: the limit of the memory of all processes of the group on this host together.
        spill_dir: a directory for objects that have no room in memory; None: writers wait for room.
        clock: returns the time in seconds.
        reread_s: for how long the last sum over the accounts of all processes may be used, in seconds.
        on_let_go: called in finalisers when an object was released; it must arrange that :meth:`trim` is called soon.

    Attributes:
        ended: the ids of segments, one entry for each use (:class:`_Use`) that has ended and is still counted.
    """

    def __init__(
        self,
        accounts: ObjectAccounts,
        *,
        limit_bytes: int,
        spill_dir: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        reread_s: float = 0.1,
        on_let_go: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(limit_bytes, clock, on_let_go)
        self._reread_s = reread_s
        self.ended: deque[bytes] = deque()
        self._uses: Counter[bytes] = Counter()
        self._accounts = accounts
        self._spill_dir = spill_dir
        self._held: weakref.WeakValueDictionary[bytes, Segment] = weakref.WeakValueDictionary()
        self._written: dict[bytes, _Written] = {}  # by name, in the order in which the contents were begun
        self._shared: _Written | None = None  # the segment for the next small object
        self._views: Loans[tuple[weakref.ref[Segment], int, int, int] | None] = Loans(self.request_trim)
        self._recycles: bool | None = None  # whether the system grants leases; None: not tried yet
        # The group's total when the accounts were last read, the time of reading, and the bytes allocated here since.
        self._total, self._looked_at, self._spent = 0, float("-inf"), 0

    def use(self, segment_id: bytes, fd: int = -1) -> _Use:
        """Count one more use of a segment by this process. Under the lock."""
        self._uses[segment_id] += 1
        return _Use(self, segment_id, fd)

    # -- writing -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, label: str, site: str = "", until: float = 0.0) -> Allocation | None:
        """Return memory for an object of ``nbytes``; None if the system provides no memory, or the store is closed.

        Thread-safe. If the limit is reached, waits for room until the time ``until`` of the monotonic clock.

        Raises:
            ObjectStoreFullError: there is no room. Without a spill directory, the message lists the largest segments and holders.
        """
        while True:
            try:
                return self._section(self._room, nbytes, label, site)
            except OSError:
                return None  # no descriptors or no memory: the caller does not use shared memory
            except ObjectStoreFullError:
                if self._spill_dir is not None or _time.now() >= until or _pages(nbytes) > self._limit:
                    raise
            _time.sleep(_WAIT_S)

    def _room(self, nbytes: int, label: str, site: str) -> Allocation:
        """Return memory for an object, within the limit.

        Raises:
            ObjectStoreFullError: there is no room now.
            OSError: the system provides no memory or no descriptor.
        """
        self._settle()
        is_small = nbytes < OWN_SEGMENT
        segment = self._beside(nbytes) if is_small else None
        if segment is None:
            size = _SHARED_SIZE if is_small else size_class(_pages(nbytes))
            self._find_unread(size, 2 * size)
            written = self._pick(size)
            fresh = _pages(nbytes) - (0 if written is None else written.touched)
            if fresh > 0 and not self._has_room(fresh):
                if written is not None:
                    used_at = written.used_at
                    self._put(written)
                    # Undo _put()'s new time: a thread that waits for room tries again and again, and a new time at each
                    # attempt would delay the release of the free segment.
                    written.used_at = used_at
                if self._spill_dir is None:
                    raise self._full(nbytes, label)
                return self._spill(self._spill_dir, nbytes, label, site)
            segment = self._begin(written or self._add(self._new(size)), label, site)
            if is_small:
                self._shared = self._written[segment.id]
        return self._fill(segment, nbytes, label, site)

    def _beside(self, nbytes: int) -> Segment | None:
        """Return the segment that stores small objects now; None if ``nbytes`` more exceed the segment or the limit."""
        shared = self._shared
        segment = None if shared is None else self._held.get(shared.name)
        if shared is None or segment is None or shared.used + nbytes > shared.size:
            self._shared = None
            return None
        fresh = shared.used + _pages(nbytes) - shared.touched
        return segment if fresh <= 0 or self._has_room(fresh) else None

    def _begin(self, written: _Written, label: str, site: str) -> Segment:
        """Begin new content in the memory of a segment, with a new id; return the :class:`Segment` for readers."""
        with undo_on_error(partial(self._put, written), partial(self._drop, written)):
            fd = os.open(f"/proc/self/fd/{written.probe}", os.O_RDONLY | os.O_CLOEXEC)
        _limits.make_room(fd)
        segment = self._hold(fd, os.urandom(_ID_SIZE), written.size, written.touched, label, site)
        if self._written.pop(written.name, None) is not None:
            self._strike(written.name)
        written.name, written.used, written.is_free = segment.id, 0, False
        self._written[segment.id] = written
        return segment

    def _hold(self, fd: int, segment_id: bytes, size: int, taken: int, label: str, site: str) -> Segment:
        """Create a :class:`Segment`, and enter it into the accounts with ``taken`` bytes."""
        segment = Segment(self, fd, segment_id, size, label, site)
        self._held[segment_id] = segment
        self._accounts.hold(segment_id, taken, label, site)
        return segment

    def _fill(self, segment: Segment, nbytes: int, label: str, site: str) -> Allocation:
        """Allocate the next range of a segment that this process writes."""
        written = self._written[segment.id]
        segment.label, segment.site = label, site
        offset = written.used
        written.used += _pages(nbytes)
        written.touched = max(written.touched, written.used)
        self._accounts.hold(segment.id, written.touched, label, site)
        return Allocation(written.address + offset, StoredRange(segment, offset, nbytes), written.memory)

    def _has_room(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` more are within the limit. If necessary, release free segments that are kept for reuse."""
        self._spent += nbytes
        now = self._clock()
        recently = now < self._looked_at + self._reread_s and self._total + self._spent <= self._limit // 2
        if recently and nbytes < OWN_SEGMENT:
            return True  # the total was far below the limit a moment ago, and reading all accounts takes long
        total = self._accounts.total()
        if total + nbytes > self._limit:
            self._find_unread()
            while total + nbytes > self._limit and (oldest := self._oldest()) is not None:
                self._drop(oldest)
                total = self._accounts.total()
        self._total, self._looked_at, self._spent = total, now, nbytes
        return total + nbytes <= self._limit

    def _new(self, size: int) -> _Written:
        """Create a segment for writing.

        Raises:
            OSError: the system provides no memory or no descriptor.
        """
        fd = sealed_memfd(size, _NAME, 0)
        try:
            memory, address = reserve(size, fd)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
            probe = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            with undo_on_error(partial(os.close, probe)):
                if self._recycles is None:
                    self._recycles = self._try_leases(probe)
            _limits.make_room(probe)
            return _Written(probe, memory, address, size)
        finally:
            os.close(fd)

    def _spill(self, directory: str, nbytes: int, label: str, site: str) -> Allocation:
        """Return memory in an unlinked file, which exists as long as it has readers. The file is not reused.

        Raises:
            ObjectStoreFullError: there is no room on the disk.
            OSError: there are no descriptors, or there is no address space.
        """
        size = _pages(nbytes)
        fd = -1
        try:
            try:
                fd, path = tempfile.mkstemp(dir=directory, prefix=f"{_NAME}-")
                os.unlink(path)
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno in _limits.NO_DESCRIPTOR:
                    raise
                raise ObjectStoreFullError(
                    f"{label}, of {amount(nbytes)}, finds no room in {directory!r}: {error.strerror}. Nothing was stored: make "
                    "room there, or keep fewer objects"
                ) from error
            memory, address = reserve(size, fd)
            reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            if fd >= 0:
                os.close(fd)
        segment = self._hold(reader, os.urandom(_ID_SIZE), size, 0, label, site)
        return Allocation(address, StoredRange(segment, 0, nbytes), memory)

    def _full(self, nbytes: int, label: str) -> ObjectStoreFullError:
        rows = sorted(self._accounts.rows(), key=lambda row: -row.nbytes)
        most = "; ".join(map(str, rows[:5])) or "nothing is held"
        more = f"; and {len(rows) - 5} more" if len(rows) > 5 else ""
        return ObjectStoreFullError(
            f"{label}, of {amount(nbytes)}, finds no room: the objects of this group on this host take "
            f"{amount(sum(row.nbytes for row in rows))} of {amount(self._limit)}. Nothing was stored. Release references and "
            f"values, raise object_memory=, or set spill_dir= to a directory on a disk. Held: {most}{more}"
        )

    # -- reading -----------------------------------------------------------------------------------

    @uninterruptible
    def adopt(self, fd: int, segment_id: bytes, size: int, label: str = "", site: str = "") -> Segment:
        """Return the segment for a descriptor that another process has sent. The store takes over the descriptor. Thread-safe.

        Raises:
            ProtocolError: the memory could be shrunk, or a segment of another size has the same id.
        """
        try:
            with self._lock:
                segment = self._held.get(segment_id)
                if segment is None:
                    taken = _memory_of(fd, size)
                    _limits.make_room(fd)
                    segment, fd = self._hold(fd, segment_id, size, taken, label, site), -1
                elif segment.size != size:
                    raise ProtocolError("two segments of shared memory have one name")
            return segment
        finally:
            if fd >= 0:
                os.close(fd)

    def map(self, stored: StoredRange) -> memoryview:
        """See :meth:`StoredRange.map`."""
        segment, offset, nbytes = stored.segment, stored.offset, stored.nbytes
        if not nbytes:
            return memoryview(bytearray())
        try:
            with self._lock:
                self._clean()
                tag = None
                if nbytes < OWN_SEGMENT and segment.size > OWN_SEGMENT and offset not in segment.given:
                    # One mapping serves all objects in the segment, because a process may have at most 65 530 mappings.
                    if segment.whole is None:
                        segment.whole = self._map(stored, 0, segment.size)
                    memory, address = segment.whole[0], segment.whole[1] + offset
                    segment.given.add(offset)
                    # After the last view has died, _clean discards the pages that were written: the object is restored.
                    tag = weakref.ref(segment), address, offset, nbytes
                else:
                    memory, address = self._map(stored, offset, _pages(nbytes))
                return self._views.lend(memory, address, size_class(nbytes), tag)[:nbytes]
        except OSError as error:
            raise LimitError(
                f"an object of {amount(nbytes)} in shared memory cannot be mapped here: {error.strerror or error}"
            ) from error

    def view(self, room: Allocation) -> memoryview:
        """See :meth:`Allocation.view`."""
        nbytes = room.stored.nbytes
        return self._views.lend(room, room.address, size_class(nbytes), None)[:nbytes]

    def _map(self, stored: StoredRange, offset: int, nbytes: int) -> tuple[object, int]:
        """Map a part of a segment; return an object that keeps it mapped and in the accounts, and the address."""
        memory, address = reserve(nbytes, stored.fileno(), private=True, offset=offset)
        return (memory, self.use(stored.segment.id)), address

    def _clean(self) -> None:
        """Restore objects in shared mappings whose views have died: discard the pages that were written."""
        for tag in drained(self._views.returned):
            segment = None if tag is None else tag[0]()
            if tag is not None and segment is not None:
                _, address, offset, nbytes = tag
                _madvise(address, _pages(nbytes), _DONTNEED)
                segment.given.discard(offset)

    # -- releasing ---------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Remove segments whose last use in this process has ended from the accounts."""
        while self.ended:
            segment_id = self.ended.popleft()
            self._uses[segment_id] -= 1
            if not self._uses[segment_id]:
                del self._uses[segment_id]
                self._strike(segment_id)

    def _strike(self, segment_id: bytes) -> None:
        """Remove a segment from the accounts, unless this process uses it or keeps it as its writer."""
        if segment_id not in self._uses and segment_id not in self._written:
            self._accounts.let_go(segment_id)

    def _find_unread(self, least: int = 0, most: int = 1 << 62) -> None:
        """Find the written segments of these sizes that have no readers, and put them on the free list."""
        for written in list(self._written.values()):
            if written.is_free or written.name in self._held or not least <= written.size <= most:
                continue
            if self._recycles and self._is_unread(written.probe):
                self._put(written)
                self._accounts.hold(written.name, written.touched, _KEPT, "")
            elif not self._recycles:  # the segment may have readers, so it is not reused
                self._put(written)
                self._drop(written)

    def _is_unread(self, probe: int) -> bool:
        """Return whether a segment has no readers: request a write lease on its probe. (See the docstring of the module.)"""
        try:
            fcntl.fcntl(probe, _F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                self._recycles = False
            return False
        fcntl.fcntl(probe, _F_SETLEASE, fcntl.F_UNLCK)
        return True

    def _try_leases(self, probe: int) -> bool:
        """Return whether the system grants a lease without another open description, and refuses the lease with one."""
        if not self._is_unread(probe):
            return False
        other = os.open(f"/proc/self/fd/{probe}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return not self._is_unread(probe)
        finally:
            os.close(other)

    def _put(self, block: _Written) -> None:
        super()._put(block)
        block.is_free = True

    def _drop(self, block: _Written) -> None:
        super()._drop(block)
        if block is self._shared:
            self._shared = None
        if self._written.pop(block.name, None) is not None:
            self._strike(block.name)

    def _keep_s(self) -> float:
        return 0.0 if self._accounts.total() > self._limit else _KEEP_S

    def _trim(self) -> None:
        self._clean()
        self._settle()
        self._find_unread()
        super()._trim()

    @property
    def writes(self) -> bool:
        """Whether this process is the writer of segments, which it has to release later."""
        return bool(self._written)

    def stats(self) -> StoreStats:
        """Return the figures of this process and of the host. Thread-safe."""
        self.trim()
        with self._lock:
            held = tuple(each for each in self._accounts.own() if each.segment_id in self._uses)
            held_bytes = sum(each.nbytes for each in held)
            return StoreStats(
                self._count,
                self._lent_bytes,
                sum(each.touched for each in self._written.values() if each.is_free),
                held,
                held_bytes,
                self._accounts.total(),
                self._limit,
            )

    @uninterruptible
    def close(self) -> None:
        """Release the segments that this process writes. Readers, also of this process, keep their segments. Idempotent."""
        super().close()
        with self._lock:
            written, self._written, self._shared = self._written, {}, None
            self._accounts.close()
        for each in written.values():
            each.memory = None  # unmapped here, unless an Allocation of another thread still has the mapping
            each.close()

    def abandon(self) -> None:
        """Close the descriptors in a forked child. The child's mappings stay, so the kernel counts the child as a reader."""
        for segment in list(self._held.values()):
            segment.close()
        self._accounts.abandon()
        super().abandon()


def _memory_of(fd: int, size: int) -> int:
    """Return how many bytes of memory a segment that a peer has sent takes; 0 for a file on a disk.

    Raises:
        ProtocolError: the segment could be shrunk while this process has mapped it.
    """
    status = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = fcntl.F_SEAL_SEAL  # a file on a disk has no seals; a file in a tmpfs has F_SEAL_SEAL
    else:
        if is_sealed(fd, size):
            return 512 * status.st_blocks
    reads_only = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    is_file = stat.S_ISREG(status.st_mode) and not status.st_nlink and status.st_size >= size
    if seals != fcntl.F_SEAL_SEAL or not is_file or not reads_only:
        raise ProtocolError("the peer shares memory that it could take away again")
    return 0
