"""Objects in shared memory: written once, read by any number of processes of the host, each of which may change what it reads.

A *segment* is nameless memory (a ``memfd``), or, where memory is full and a directory is given for that, an unlinked file. The
process that makes it, its writer, maps it for writing and seals it, so that no other process can. Readers get a descriptor
that is open for reading only, over a Unix socket, and map it privately: copy-on-write, so that each has tensors and arrays of
its own.

The kernel counts the readers. A lease for writing is granted to a descriptor if and only if no other description of that file is
open for reading: none in another process, none in a socket, none behind a mapping, none that a forked child has
inherited. The writer keeps such a descriptor, its *probe*, and asks for a lease. So no message says that an object is no longer
used, and none can be lost: whichever process dies, the answer is right. A segment without readers is filled again, as memory
that was used before is several times faster to fill, or goes back to the system. After its writer's death a segment lives as
long as it has readers.

Objects below 8 MiB share segments, in ranges that begin at pages; a segment is used again as a whole only.
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

from actorrpc import _time
from actorrpc._undo import undo_on_error
from actorrpc.errors import LimitError, ObjectStoreFullError, ProtocolError
from actorrpc.transport import fd_limits
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
"""Objects of so many bytes have a segment to themselves."""

# Of a segment that objects share: pages that nobody has written take no memory.
_SHARED_SIZE: Final = 64 << 20
_PAGE: Final = mmap.PAGESIZE
_KEEP_S: Final = 1.0  # a segment without readers is kept for so long, warm, to be filled again
_LOOK_S: Final = 0.1  # how long a sum over the accounts of all processes is relied on
_WAIT_S: Final = 0.01  # between two looks whether there is room
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
    """One use of a segment by this process: by a :class:`Segment`, which keeps its descriptor here, or by a mapping.

    It is no part of the Segment, because a weak reference may revive an object whose finaliser runs.
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
        self.close()
        if self.pid == os.getpid():
            self.store.ended.append(self.segment_id)
            self.store.ring()


class Segment:
    """A segment as one process holds it: a descriptor for reading, as long as anything here needs it.

    Attributes:
        store: the process's objects, whose lock guards ``whole`` and ``given``.
        id: names its present content, in all processes.
        size: in bytes.
        label: what its content is, in words; of several objects, the latest.
        site: where that was made.
        whole: what keeps all of it mapped, and where; None before the first object of many is read.
        given: the offsets of the objects of which views on ``whole`` live.
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
        """The descriptor; -1 in a fork of the process that holds it."""
        return self._use.fd

    def range(self, offset: int, nbytes: int) -> StoredRange:
        """Return one object's place in it.

        Raises:
            ProtocolError: no object can begin there, or it would end behind the segment.
        """
        if offset < 0 or nbytes < 0 or offset % _PAGE or offset + nbytes > self.size:
            raise ProtocolError(f"{nbytes} bytes at {offset} are no object in a segment of {self.size}")
        return StoredRange(self, offset, nbytes)

    def close(self) -> None:
        """Close the descriptor; mappings stay."""
        self._use.close()


@dataclass(frozen=True, slots=True, eq=False)
class StoredRange:
    """One object's bytes in a segment, which it holds. Thread-safe.

    Attributes:
        segment: the segment.
        offset: where it begins, a multiple of the page size.
        nbytes: its length.
    """

    segment: Segment
    offset: int
    nbytes: int

    def fileno(self) -> int:
        """Return the descriptor to be sent to a reader.

        Raises:
            OSError: this is a fork of the process that holds it.
        """
        if self.segment.fd < 0:
            what = 'a fork holds nothing of its parent: get() the value before the fork, or start the process with "spawn"'
            raise OSError(errno.EBADF, what)
        return self.segment.fd

    def map(self) -> memoryview:
        """Return the bytes as writable memory: each time anew, and writes to it are visible to its users only.

        Raises:
            LimitError: there is no address space for it, or this is a fork.
        """
        return self.segment.store.map(self)


class Allocation(NamedTuple):
    """Room for one object, while one thread fills it. Dropping it, before others get ``stored``, gives the room back.

    Attributes:
        address: where to write.
        stored: the object's place.
        memory: keeps it mapped for writing.
    """

    address: int
    stored: StoredRange
    memory: object


class _Written(MemoryBlock):
    """A segment on its writer's side.

    Attributes:
        probe: a descriptor for reading, for :meth:`ObjectStore._is_unread`.
        name: the id of its present content.
        used: where the next object begins.
        touched: how many bytes have ever been written: so much memory it takes.
        is_free: it has no readers, and waits to be filled again.
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
    """The use of shared memory for objects: the segments that are written here, and in general.

    Attributes:
        held: the segments that references or values of this process hold.
        held_bytes: how much memory these segments take.
        host_bytes: how much memory all segments of the group take on this host.
        limit_bytes: the limit of ``host_bytes``.
    """

    held: tuple[Holding, ...]
    held_bytes: int
    host_bytes: int
    limit_bytes: int


class ObjectStore(Recycler[_Written]):
    """Writes objects, and holds those of others, for one process.

    No memory is copied under its lock; segments are made and mapped under it.

    Args:
        accounts: what all processes of the group on this host hold.
        limit_bytes: how much all of them may hold together.
        spill_dir: a directory for objects without room in memory; None: writers wait for room.
        clock: seconds.
        on_let_go: called from finalisers when something here was released: :meth:`trim` is due soon.

    Attributes:
        ended: the segments of uses that have ended.
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
        super().__init__(limit_bytes, clock, on_let_go)
        self.ended: deque[bytes] = deque()
        self._uses: Counter[bytes] = Counter()
        self._accounts = accounts
        self._spill_dir = spill_dir
        self._held: weakref.WeakValueDictionary[bytes, Segment] = weakref.WeakValueDictionary()
        self._written: dict[bytes, _Written] = {}  # by name; the segment that was begun last is the last
        self._shared: _Written | None = None  # where the next small object goes
        self._views: Loans[tuple[weakref.ref[Segment], int, int, int] | None] = Loans(self.ring)
        self._recycles: bool | None = None  # whether the system grants leases; None: not tried yet
        # The bytes of the group when its accounts were last read, the time of that, and the bytes written here since.
        self._total, self._looked_at, self._spent = 0, float("-inf"), 0

    def use(self, segment_id: bytes, fd: int = -1) -> _Use:
        """Count one more use of a segment here. Under the lock."""
        self._uses[segment_id] += 1
        return _Use(self, segment_id, fd)

    # -- writing -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, label: str, site: str = "", until: float = 0.0) -> Allocation | None:
        """Return room for an object of ``nbytes``; None where the system gives no memory for segments, or it is closed.

        Thread-safe. Waits where there is no room, in steps, and at most until ``until`` on the monotonic clock.

        Raises:
            ObjectStoreFullError: there is no room, and none has become free; the message says who holds how much.
        """
        while True:
            try:
                return self._section(self._room, nbytes, label, site)
            except OSError:
                return None  # no descriptors, no memory: the object stays where it is
            except ObjectStoreFullError:
                if self._spill_dir is not None or _time.now() >= until or _pages(nbytes) > self._limit:
                    raise
            _time.sleep(_WAIT_S)

    def _room(self, nbytes: int, label: str, site: str) -> Allocation:
        """Return room, within the limit.

        Raises:
            ObjectStoreFullError: there is no room now.
            OSError: the system gives no memory.
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
                    written.used_at = used_at  # this wait must not keep it from others who wait for memory
                if self._spill_dir is None:
                    raise self._full(nbytes, label)
                return self._spill(self._spill_dir, nbytes, label, site)
            segment = self._begin(written or self._add(self._new(size)), label, site)
            if is_small:
                self._shared = self._written[segment.id]
        return self._fill(segment, nbytes, label, site)

    def _beside(self, nbytes: int) -> Segment | None:
        """Return the segment that small objects share at present, if there is room in it."""
        shared = self._shared
        segment = None if shared is None else self._held.get(shared.name)
        if shared is None or segment is None or shared.used + nbytes > shared.size:
            self._shared = None
            return None
        fresh = shared.used + _pages(nbytes) - shared.touched
        return segment if fresh <= 0 or self._has_room(fresh) else None

    def _begin(self, written: _Written, label: str, site: str) -> Segment:
        """Make a written segment one that readers can have, under a new name."""
        with undo_on_error(partial(self._put, written), partial(self._drop, written)):
            fd = os.open(f"/proc/self/fd/{written.probe}", os.O_RDONLY | os.O_CLOEXEC)
        fd_limits.make_room(fd)
        segment = self._hold(fd, os.urandom(_ID_SIZE), written.size, written.touched, label, site)
        if self._written.pop(written.name, None) is not None:
            self._strike(written.name)
        written.name, written.used, written.is_free = segment.id, 0, False
        self._written[segment.id] = written
        return segment

    def _hold(self, fd: int, segment_id: bytes, size: int, taken: int, label: str, site: str) -> Segment:
        """Return a new segment of this process, on the accounts with the memory that it takes."""
        segment = Segment(self, fd, segment_id, size, label, site)
        self._held[segment_id] = segment
        self._accounts.hold(segment_id, taken, label, site)
        return segment

    def _fill(self, segment: Segment, nbytes: int, label: str, site: str) -> Allocation:
        """Give out the next range of a segment that is written here."""
        written = self._written[segment.id]
        segment.label, segment.site = label, site
        offset = written.used
        written.used += _pages(nbytes)
        written.touched = max(written.touched, written.used)
        self._accounts.hold(segment.id, written.touched, label, site)
        return Allocation(written.address + offset, StoredRange(segment, offset, nbytes), written.memory)

    def _has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more are within the limit, if need be in the place of segments that are kept to be used again."""
        self._spent += nbytes
        now = self._clock()
        recently = now < self._looked_at + _LOOK_S and self._total + self._spent <= self._limit // 2
        if recently and nbytes < OWN_SEGMENT:
            return True  # far from the limit a moment ago: reading all accounts takes as long as writing something small
        total = self._accounts.total()
        if total + nbytes > self._limit:
            self._find_unread()
            while total + nbytes > self._limit and (oldest := self._oldest()) is not None:
                self._drop(oldest)
                total = self._accounts.total()
        self._total, self._looked_at, self._spent = total, now, nbytes
        return total + nbytes <= self._limit

    def _new(self, size: int) -> _Written:
        """Make a segment.

        Raises:
            OSError: the system does not give it.
        """
        fd = sealed_memfd(size, _NAME, 0)
        try:
            memory, address = reserve(size, fd)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
            probe = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            with undo_on_error(partial(os.close, probe)):
                if self._recycles is None:
                    self._recycles = self._try_leases(probe)
            fd_limits.make_room(probe)
            return _Written(probe, memory, address, size)
        finally:
            os.close(fd)

    def _spill(self, directory: str, nbytes: int, label: str, site: str) -> Allocation:
        """Return room in a file without a name: it ends with its last reader, and is never filled again.

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
                if error.errno in fd_limits.SHORT:
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
            f"{amount(sum(row.nbytes for row in rows))} of {amount(self._limit)}. Nothing was stored. Let go of references and "
            f"values, raise object_memory=, or give spill_dir= a directory on a disk. Held: {most}{more}"
        )

    # -- reading -----------------------------------------------------------------------------------

    @uninterruptible
    def adopt(self, fd: int, segment_id: bytes, size: int, label: str = "", site: str = "") -> Segment:
        """Return the segment of a descriptor that came from another process; the store closes the descriptor. Thread-safe.

        Raises:
            ProtocolError: it is not memory that stays as it is.
        """
        try:
            with self._lock:
                segment = self._held.get(segment_id)
                if segment is None:
                    taken = _memory_of(fd, size)
                    fd_limits.make_room(fd)
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
                    # Once for all objects that share it: a process may have 65 530 mappings.
                    if segment.whole is None:
                        segment.whole = self._map(stored, 0, segment.size)
                    memory, address = segment.whole[0], segment.whole[1] + offset
                    segment.given.add(offset)
                    # When its last view dies, the pages that were written to go, and the range is as it was: see _clean.
                    tag = weakref.ref(segment), address, offset, nbytes
                else:
                    memory, address = self._map(stored, offset, _pages(nbytes))
                return self._views.lend(memory, address, size_class(nbytes), tag)[:nbytes]
        except OSError as error:
            raise LimitError(
                f"an object of {amount(nbytes)} in shared memory cannot be mapped here: {error.strerror or error}"
            ) from error

    def _map(self, stored: StoredRange, offset: int, nbytes: int) -> tuple[object, int]:
        """Map a part of a segment; return what keeps it mapped, and on the accounts, and where it is."""
        memory, address = reserve(nbytes, stored.fileno(), private=True, offset=offset)
        return (memory, self.use(stored.segment.id)), address

    def _clean(self) -> None:
        """Restore ranges of shared mappings whose views have died: the pages that were written to are dropped."""
        for tag in drained(self._views.returned):
            segment = None if tag is None else tag[0]()
            if tag is not None and segment is not None:
                _, address, offset, nbytes = tag
                _madvise(address, _pages(nbytes), _DONTNEED)
                segment.given.discard(offset)

    # -- giving back -------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Take segments off the accounts whose last use here has ended."""
        while self.ended:
            segment_id = self.ended.popleft()
            self._uses[segment_id] -= 1
            if not self._uses[segment_id]:
                del self._uses[segment_id]
                self._strike(segment_id)

    def _strike(self, segment_id: bytes) -> None:
        """Take a segment off the accounts, unless it is used here, or kept by its writer: then it takes memory still."""
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
            elif not self._recycles:  # it has readers perhaps, and is never filled again: they keep it
                self._put(written)
                self._drop(written)

    def _is_unread(self, probe: int) -> bool:
        """Ask the kernel whether no other description is open for reading."""
        try:
            fcntl.fcntl(probe, _F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                self._recycles = False
            return False
        fcntl.fcntl(probe, _F_SETLEASE, fcntl.F_UNLCK)
        return True

    def _try_leases(self, probe: int) -> bool:
        """Say whether the system grants a lease to a descriptor that is alone, and only to such."""
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
        """Whether there are segments of this process, which have to be given back later."""
        return bool(self._written)

    def stats(self) -> StoreStats:
        """Return what is held here and on this host. Thread-safe."""
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
        """Release the objects that were written here; readers, here and elsewhere, keep their segments. Idempotent."""
        super().close()
        with self._lock:
            written, self._written, self._shared = self._written, {}, None
            self._accounts.close()
        for each in written.values():
            each.memory = None  # a thread that fills it keeps it mapped
            each.close()

    def abandon(self) -> None:
        """Give everything up in a forked child: its mappings stay, and the kernel counts them."""
        for segment in list(self._held.values()):
            segment.close()
        self._accounts.abandon()
        super().abandon()


def _memory_of(fd: int, size: int) -> int:
    """Return how much memory a segment takes that a peer has sent: none where it is a file.

    Raises:
        ProtocolError: it could become shorter, under those that have mapped it.
    """
    status = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = fcntl.F_SEAL_SEAL  # a file on a disk; those in a tmpfs say the same
    else:
        if is_sealed(fd, size):
            return 512 * status.st_blocks
    reads_only = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    is_file = stat.S_ISREG(status.st_mode) and not status.st_nlink and status.st_size >= size
    if seals != fcntl.F_SEAL_SEAL or not is_file or not reads_only:
        raise ProtocolError("the peer shares memory that it could take away again")
    return 0
