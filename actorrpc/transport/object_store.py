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
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from actorrpc import _time
from actorrpc._undo import undo_on_error
from actorrpc.errors import LimitError, ObjectStoreFullError, ProtocolError
from actorrpc.transport import fd_limits
from actorrpc.transport.buffers import Loans, is_sealed, reserve, sealed_memfd, size_class, size_classes
from actorrpc.transport.object_accounts import Holding, ObjectAccounts, amount
from actorrpc.transport.signals import uninterruptible

__all__ = ["Allocation", "ObjectStore", "Segment", "StoreStats", "StoredRange"]

SEGMENT_ID_SIZE: Final = 16
OWN_SEGMENT: Final = 8 << 20
"""Objects of so many bytes have a segment to themselves."""

# Of a segment that objects share: pages that nobody has written take no memory.
_SHARED_SIZE: Final = 64 << 20
_PAGE: Final = mmap.PAGESIZE
_KEEP_S: Final = 1.0  # a segment that nobody reads is kept for so long, warm, to be filled again
_LOOK_S: Final = 0.1  # how long what all processes hold is taken for what it was
_WAIT_S: Final = 0.01  # between two looks whether there is room
_NAME: Final = "actorrpc-object"
_KEPT: Final = "memory that is kept to be used again"
_F_SEAL_FUTURE_WRITE: Final = 0x10
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

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class _Claim:
    """A use of a segment by this process, by a reference or a mapping: as long as there is one, it is on the accounts."""

    __slots__ = ("pid", "segment_id", "store")

    def __init__(self, store: ObjectStore, segment_id: bytes) -> None:
        self.store = store
        self.segment_id = segment_id
        self.pid = os.getpid()

    def __del__(self) -> None:
        if self.pid == os.getpid():
            self.store.let_go.append(self.segment_id)
            self.store.ring()


class Segment:
    """A segment as one process holds it: a descriptor for reading, as long as anything here needs it.

    Attributes:
        id: names what it is filled with now, in all processes.
        size: in bytes.
        store: the process's objects.
        label: what is in it, in words; of several, the latest.
        site: where that was made.
    """

    __slots__ = (
        "__weakref__",
        "_claim",
        "_descriptor",
        "_given",
        "_whole",
        "id",
        "label",
        "site",
        "size",
        "store",
    )

    def __init__(
        self, store: ObjectStore, fd: int, segment_id: bytes, size: int, label: str, site: str
    ) -> None:
        self.store = store
        self._descriptor = _Descriptor(fd)
        self._claim = store.claim(segment_id)
        self.id = segment_id
        self.size = size
        self.label = label
        self.site = site
        self._whole: tuple[object, int] | None = None  # all of it, mapped, and where
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

    def lend(self, offset: int, map_all: Callable[[], tuple[object, int]]) -> tuple[object, int] | None:
        """Return all of it, mapped once, and where, for views of a range; None where such live. Under the store's lock."""
        if self._whole is None:
            self._whole = map_all()
        if offset in self._given:
            return None
        self._given.add(offset)
        return self._whole

    def take_back(self, offset: int) -> None:
        """Record that the views of a range have died. Under the store's lock."""
        self._given.discard(offset)

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
            what = 'a fork holds nothing of its parent: get() the value before the fork, or start the process with "spawn"'
            raise OSError(errno.EBADF, what)
        return self.segment.fd

    def map(self) -> memoryview:
        """Return the bytes as writable memory: each time anew, and nobody sees what is written to it.

        Raises:
            LimitError: there is no address space for it, or this is a fork.
        """
        return self.segment.store.map(self)

    def __repr__(self) -> str:
        return f"<StoredRange of {self.nbytes} bytes>"


class Allocation:
    """Room for one object, while one thread fills it. Dropping it gives the room back.

    Attributes:
        address: where to write.
        nbytes: how much.
    """

    __slots__ = ("_memory", "_range", "address", "nbytes")

    def __init__(self, memory: mmap.mmap, address: int, stored: StoredRange) -> None:
        self._memory: mmap.mmap | None = memory
        self._range: StoredRange | None = stored
        self.address = address
        self.nbytes = stored.nbytes

    def finish(self) -> StoredRange:
        """Return the range; from here on nobody may write to it."""
        stored = self._range
        if stored is None:
            raise RuntimeError("this room was given back")
        self._memory = None
        return stored

    def discard(self) -> None:
        """Give the room back unused."""
        self._memory = self._range = None


@dataclass(slots=True, eq=False)
class _Written:
    """A segment on its writer's side.

    Attributes:
        name: the id of what is in it now.
        used: where the next object begins.
        touched: how many bytes have ever been written: so much memory it takes.
        free: nobody reads it.
        used_at: when it was filled, or found to be free.
    """

    probe: int
    memory: mmap.mmap = field(repr=False)
    address: int
    size: int
    name: bytes = b""
    used: int = 0
    touched: int = 0
    used_at: float = 0.0
    free: bool = False

    def close(self, *, unmap: bool = True) -> None:
        """Let go of it: it lives as long as it has readers. ``unmap``: now, as nobody fills it."""
        if unmap:
            self.memory.close()  # without the GIL, other than by the object's death
        probe, self.probe = self.probe, -1
        if probe >= 0:
            os.close(probe)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What a process has to do with objects in shared memory.

    Attributes:
        held: what each segment has in it that is held here, by references or by values.
        held_bytes: how much memory those take.
        free_bytes: the same of segments that are kept to be filled again.
        host_bytes: the same of all segments of the group on this host.
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
        on_let_go: hears, in a finaliser, that something was let go of here: :meth:`trim` is to be called soon.
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
        self._rung = False
        #: the segments of claims that have died
        self.let_go: deque[bytes] = deque()
        self._claims: dict[bytes, int] = {}
        self._accounts = accounts
        self._limit = limit_bytes
        self._spill_dir = spill_dir
        self._clock = clock
        self._lock = _time.RLock()
        self._busy = False
        self._closed = False
        self._held: weakref.WeakValueDictionary[bytes, Segment] = weakref.WeakValueDictionary()
        self._written: dict[bytes, _Written] = {}  # by name; what was begun last is the last
        self._shared: _Written | None = None  # where the next small object goes
        self._views: Loans[tuple[weakref.ref[Segment] | None, int, int, int]] = Loans(
            None if on_let_go is None else self.ring
        )
        self._recycles: bool | None = None  # whether the system grants leases; None: not tried yet
        # What the group held when it was last looked at, when that was, and what was written here since.
        self._total, self._looked_at, self._spent = 0, float("-inf"), 0

    def ring(self) -> None:
        """Have :meth:`trim` called, once until it is. Runs in finalisers: takes no lock."""
        if not self._rung and self._on_let_go is not None:
            self._rung = True
            self._on_let_go()

    def claim(self, segment_id: bytes) -> _Claim:
        """Count one more use of a segment here. Under the lock."""
        self._claims[segment_id] = self._claims.get(segment_id, 0) + 1
        return _Claim(self, segment_id)

    # -- writing -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, label: str, site: str = "", until: float = 0.0) -> Allocation | None:
        """Return room for an object of ``nbytes``; None where the system gives no memory for segments, or it is closed.

        Thread-safe. Waits where there is no room, in steps, and at most until ``until`` on the monotonic clock.

        Raises:
            ObjectStoreFullError: there is no room, and none has become free; who holds what is in the message.
        """
        while True:
            try:
                found = self._look(nbytes, label, site)
            except OSError:
                return None  # no descriptors, no memory: the object stays where it is
            if found is not None:
                return found
            if _time.now() >= until or _pages(nbytes) > self._limit:
                raise self._full(nbytes, label)
            _time.sleep(_WAIT_S)

    @uninterruptible
    def _look(self, nbytes: int, label: str, site: str) -> Allocation | None:
        """Return room; None where there is none now.

        Raises:
            OSError: there is no memory to be had here.
        """
        dropped: list[_Written] = []
        try:
            with self._lock:
                if self._busy or self._closed:
                    raise BlockingIOError("a finaliser in the middle of a section, or it is closed")
                self._busy = True
                try:
                    self._settle()
                    return self._find(nbytes, label, site, dropped)
                finally:
                    self._busy = False
        finally:
            for each in dropped:
                each.close()

    def _find(self, nbytes: int, label: str, site: str, dropped: list[_Written]) -> Allocation | None:
        """Return room, within the limit. Under the lock; the caller closes what is dropped for it."""
        small = nbytes < OWN_SEGMENT
        if small and (segment := self._beside(nbytes, dropped)) is not None:
            return self._fill(segment, nbytes, label, site)
        size = _SHARED_SIZE if small else size_class(_pages(nbytes))
        written = self._reusable(size)
        fresh = _pages(nbytes) - (0 if written is None else written.touched)
        if fresh > 0 and not self._has_room(fresh, dropped, written):
            return None if self._spill_dir is None else self._spill(self._spill_dir, nbytes, label, site)
        if written is None:
            written = self._make(size)
        segment = self._begin(written, label, site, dropped)
        if small:
            self._shared = written
        return self._fill(segment, nbytes, label, site)

    def _beside(self, nbytes: int, dropped: list[_Written]) -> Segment | None:
        """Return the segment that small objects share at present, if there is room in it."""
        shared = self._shared
        segment = None if shared is None else self._held.get(shared.name)
        if shared is None or segment is None or shared.used + nbytes > shared.size:
            self._shared = None
            return None
        fresh = shared.used + _pages(nbytes) - shared.touched
        return segment if fresh <= 0 or self._has_room(fresh, dropped, shared) else None

    def _begin(self, written: _Written, label: str, site: str, dropped: list[_Written]) -> Segment:
        """Make a written segment one that readers can have, under a new name."""
        with undo_on_error(partial(self._drop, written, dropped)):
            fd = os.open(f"/proc/self/fd/{written.probe}", os.O_RDONLY | os.O_CLOEXEC)
        fd_limits.make_room(fd)
        segment = Segment(self, fd, os.urandom(SEGMENT_ID_SIZE), written.size, label, site)
        if self._written.pop(written.name, None) is not None:
            self._strike(written.name)
        written.name, written.used, written.free = segment.id, 0, False
        self._written[segment.id] = written
        self._held[segment.id] = segment
        return segment

    def _fill(self, segment: Segment, nbytes: int, label: str, site: str) -> Allocation:
        """Give out the next range of a segment that is written here."""
        written = self._written[segment.id]
        segment.label, segment.site = label, site
        offset = written.used
        written.used += _pages(nbytes)
        written.touched = max(written.touched, written.used)
        written.used_at = self._clock()
        self._accounts.hold(segment.id, written.touched, label, site)
        return Allocation(written.memory, written.address + offset, StoredRange(segment, offset, nbytes))

    def _reusable(self, size: int) -> _Written | None:
        """Return a segment that nobody reads, of that size up to double of it: what was used last, as it is warmest."""
        fitting = size_classes(size)
        for written in reversed(self._written.values()):
            if written.size in fitting and self._is_free(written):
                return written
        return None

    def _is_free(self, written: _Written) -> bool:
        """Ask whether nobody reads a segment: then it may be filled again."""
        if (
            not written.free
            and written.name not in self._held
            and self._recycles
            and self._is_unread(written.probe)
        ):
            written.free, written.used_at = True, self._clock()
            self._accounts.hold(written.name, written.touched, _KEPT, "")
        return written.free

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

    def _may_go(self, written: _Written) -> bool:
        """Whether a segment can be given up: it is not used here, and may not be, or is not to be, filled again."""
        return self._is_free(written) or (not self._recycles and written.name not in self._held)

    def _has_room(self, nbytes: int, dropped: list[_Written], kept: _Written | None) -> bool:
        """Whether so many bytes more are within the limit, if need be in the place of segments that are kept to be used again.

        ``kept`` is not among those: it is to be filled.
        """
        self._spent += nbytes
        now = self._clock()
        recently = now < self._looked_at + _LOOK_S and self._total + self._spent <= self._limit // 2
        if recently and nbytes < OWN_SEGMENT:
            return True  # far from the limit a moment ago: to look at all accounts takes as long as to write something small
        total = self._accounts.total()
        if total + nbytes > self._limit:
            idle = [each for each in self._written.values() if each is not kept and self._may_go(each)]
            for oldest in sorted(idle, key=lambda each: each.used_at):
                self._drop(oldest, dropped)
                total = self._accounts.total()
                if total + nbytes <= self._limit:
                    break
        self._total, self._looked_at, self._spent = total, now, nbytes
        return total + nbytes <= self._limit

    def _drop(self, written: _Written, dropped: list[_Written]) -> None:
        """Give a segment up; the caller closes what is dropped, outside the lock."""
        dropped.append(written)
        if written is self._shared:
            self._shared = None
        if self._written.pop(written.name, None) is not None:
            self._strike(written.name)

    def _make(self, size: int) -> _Written:
        """Make a segment.

        Raises:
            OSError: the system does not give it.
        """
        probe = -1
        fd = sealed_memfd(size, _NAME, 0)
        try:
            memory, address = reserve(size, fd)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
            probe = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            if self._recycles is None:
                self._recycles = self._try_leases(probe)
            fd_limits.make_room(probe)
            return _Written(probe, memory, address, size)
        except BaseException:
            if probe >= 0:
                os.close(probe)
            raise
        finally:
            os.close(fd)

    def _spill(self, directory: str, nbytes: int, label: str, site: str) -> Allocation:
        """Return room in a file without a name: it is gone with its last reader, and never filled again.

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
        segment = Segment(self, reader, os.urandom(SEGMENT_ID_SIZE), size, label, site)
        self._held[segment.id] = segment
        self._accounts.hold(segment.id, 0, label, site)
        return Allocation(memory, address, StoredRange(segment, 0, nbytes))

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
        """Return the segment of a descriptor that came from another process; it is this store's from here on. Thread-safe.

        Raises:
            ProtocolError: it is not memory that stays as it is.
        """
        try:
            with self._lock:
                segment = self._held.get(segment_id)
                if segment is None:
                    taken = _memory_of(fd, size)
                    fd_limits.make_room(fd)
                    segment, fd = Segment(self, fd, segment_id, size, label, site), -1
                    self._held[segment_id] = segment
                    self._accounts.hold(segment_id, taken, label, site)
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
                fd = stored.fileno()
                if nbytes < OWN_SEGMENT and segment.size > OWN_SEGMENT:
                    # Once for all objects that share it: a process may have 65 530 mappings.
                    lent = segment.lend(offset, partial(self._map, segment, fd, segment.size, 0))
                    if lent is not None:
                        memory, base = lent
                        # When its last view dies, the pages that were written to go, and the range is as it was: see _clean.
                        tag = weakref.ref(segment), offset, base + offset, nbytes
                        return self._lend(memory, base + offset, nbytes, tag)
                memory, address = self._map(segment, fd, _pages(nbytes), offset)
                return self._lend(memory, address, nbytes, (None, 0, 0, 0))
        except OSError as error:
            raise LimitError(
                f"an object of {amount(nbytes)} in shared memory cannot be mapped here: {error.strerror or error}"
            ) from error

    def _map(self, segment: Segment, fd: int, nbytes: int, offset: int) -> tuple[object, int]:
        """Map a part of a segment; what is returned keeps it mapped, and on the accounts."""
        memory, address = reserve(nbytes, fd, private=True, offset=offset)
        return (memory, self.claim(segment.id)), address

    def _lend(self, memory: object, address: int, nbytes: int, tag: Any) -> memoryview:
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
                segment.take_back(offset)

    # -- giving back ------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Take segments off the accounts that nothing here uses any more."""
        while self.let_go:
            try:
                segment_id = self.let_go.popleft()
            except IndexError:
                return
            self._claims[segment_id] -= 1
            if not self._claims[segment_id]:
                del self._claims[segment_id]
                self._strike(segment_id)

    def _strike(self, segment_id: bytes) -> None:
        """Take a segment off the accounts, unless it is used here, or kept by its writer: then it takes memory still."""
        if segment_id not in self._claims and segment_id not in self._written:
            self._accounts.let_go(segment_id)

    @uninterruptible
    def trim(self) -> None:
        """Give segments back that nobody has read for a while; call it about once a second while :attr:`writes` says so."""
        dropped: list[_Written] = []
        with self._lock:
            if self._busy or self._closed:
                return
            self._busy = True
            try:
                self._rung = False
                self._settle()
                self._clean()
                now = self._clock()
                crowded = bool(self._written) and self._accounts.total() > self._limit
                for each in list(self._written.values()):
                    was_free = each.free
                    if self._may_go(each) and (
                        not self._recycles or (was_free and (crowded or now - each.used_at >= _KEEP_S))
                    ):
                        self._drop(each, dropped)
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
            held = tuple(each for each in self._accounts.own() if each.segment_id in self._claims)
            return StoreStats(
                held=held,
                held_bytes=sum(each.nbytes for each in held),
                free_bytes=sum(each.touched for each in self._written.values() if each.free),
                host_bytes=self._accounts.total(),
                limit_bytes=self._limit,
            )

    @uninterruptible
    def close(self) -> None:
        """Let go of what is written here; what others, or values here, use stays as long as they do. Idempotent."""
        with self._lock:
            self._closed = True
            written, self._written, self._shared = self._written, {}, None
            # A thread that fills one holds its segment: the memory goes when it is done.
            filled = {name for name in written if name in self._held}
            self._accounts.close()
        for name, each in written.items():
            each.close(unmap=name not in filled)

    def abandon(self) -> None:
        """Give everything up in a forked child: what it has mapped stays, and the kernel counts it."""
        self._lock = _time.RLock()
        self._busy = False
        self._closed = True
        for segment in list(self._held.values()):
            segment.close()
        written, self._written, self._shared = self._written, {}, None
        for each in written.values():
            each.close()
        self._accounts.abandon()


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
