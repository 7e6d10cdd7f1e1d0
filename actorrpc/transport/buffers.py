"""Memory that is used again: for bytes that arrive from sockets, and as the leaf of the tensor lane.

Fresh pages are several times slower to fill than warm ones, so memory that was handed out comes back
when the last tensor, array or memoryview on it has died. That death is seen through a *loan*: a small
ctypes object over a raw address, which everything built on the memory keeps alive. Loans are taken
out of the cyclic collector's sight. Otherwise a dead cycle that holds a view would run the loan's
finaliser first, and a user's finaliser after it could still read, or even revive, memory that already
belongs to somebody else.

Any thread may call anything here. Nothing here calls user code, and the finaliser of a loan does
nothing but append to a deque (nothing at all in a forked child).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from actorrpc import _time
from actorrpc._undo import undo_on_error

__all__ = [
    "SMALL",
    "BufferPool",
    "BufferStats",
    "ForkGuard",
    "Loans",
    "MemorySpan",
    "copy",
    "is_sealed",
    "reserve",
    "sealed_memfd",
    "size_class",
    "size_classes",
    "untouched",
]

SMALL = 64 << 10
"""Requests below this many bytes are not worth recycling: they get an ordinary ``bytearray``."""

_SMALLEST_CLASS = 64
_LARGEST_CLASS = 1 << 47
_HUGE_PAGE = 2 << 20
# Below this a copy is over before another thread could make use of the GIL, and getting it back from a
# busy thread may take a whole switch interval (5 ms): such copies keep it.
_COPY_WITH_GIL = 128 << 10
_MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MAP_FIXED = 0x10
_MFD_SEALABLE = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
_MFD_NOEXEC_SEAL = 0x8
_CANNOT_SHRINK = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

_libc = ctypes.CDLL(None, use_errno=True)
_mmap_over = ctypes.CFUNCTYPE(
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
    use_errno=True,
)(("mmap64" if hasattr(_libc, "mmap64") else "mmap", _libc))
_memmove_address = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
_memmove_with_gil = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    _memmove_address
)
# Made anew rather than taken from ctypes.pythonapi, whose functions (and their argtypes) others share.
_untrack = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyObject_GC_UnTrack", ctypes.pythonapi))


def size_class(nbytes: int) -> int:
    """Return the smallest size class that holds ``nbytes``: four per octave, so at most 25 % is wasted.

    Raises:
        MemoryError: ``nbytes`` is more than any address space holds.
    """
    if nbytes <= _SMALLEST_CLASS:
        return _SMALLEST_CLASS
    if nbytes > _LARGEST_CLASS:
        raise MemoryError(f"cannot allocate {nbytes} bytes")
    shift = (nbytes - 1).bit_length() - 3
    return -(-nbytes >> shift) << shift


def size_classes(nbytes: int) -> tuple[int, ...]:
    """Return the classes worth looking in for a free block of ``nbytes``: from the best fit to double it."""
    first = size_class(nbytes)
    classes = [first]
    while (following := size_class(classes[-1] + 1)) <= 2 * first:
        classes.append(following)
    return tuple(classes)


def reserve(size: int, fd: int = -1, *, private: bool = False, offset: int = 0) -> tuple[mmap.mmap, int]:
    """Map ``size`` bytes and return the object that keeps them mapped and their address.

    Without ``fd`` the memory is anonymous and private, so that a forked child gets its own copy; with
    ``fd`` it is shared memory of that file from ``offset`` on, or, if ``private``, what is written to it stays here. No
    duplicate of the descriptor is kept (``mmap.mmap`` keeps one). Large memory that is not private to a file starts at a
    multiple of 2 MiB. Closing the returned object, or its death, unmaps it.

    Raises:
        OSError: there is not enough address space, or ``fd`` cannot be mapped for writing.
    """
    slack = _HUGE_PAGE if size >= 2 * _HUGE_PAGE and not private else 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, size + slack, flags=flags)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    address = -(-start // _HUGE_PAGE) * _HUGE_PAGE if slack else start
    if fd >= 0:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        kind = mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED
        placed = _mmap_over(address, size, protection, kind | _MAP_FIXED, fd, offset)
        if placed != address:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    if slack and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE, address - start, size)
        except OSError:
            pass  # only advice: kernels without huge pages refuse it
    return memory, address


def untouched(size: int) -> mmap.mmap:
    """Return memory that is taken page by page, as it is written to: most connections see small messages only."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def sealed_memfd(size: int, name: str = "actorrpc", more_seals: int = fcntl.F_SEAL_SEAL) -> int:
    """Return the descriptor of ``size`` bytes of nameless memory that can neither shrink nor grow.

    ``name`` is what the system shows of it; by default, no further seal can be put on it.

    Raises:
        OSError: the system does not give it.
    """
    try:
        fd = os.memfd_create(name, _MFD_SEALABLE | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(name, _MFD_SEALABLE)  # kernels before 6.3
    with undo_on_error(partial(os.close, fd)):
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _CANNOT_SHRINK | more_seals)
    return fd


def is_sealed(fd: int, size: int) -> bool:
    """Whether ``fd`` is memory of ``size`` bytes for ever.

    Raises:
        OSError: it is no memory at all.
    """
    # The seals first: once it cannot shrink, its size holds.
    sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _CANNOT_SHRINK == _CANNOT_SHRINK
    status = os.fstat(fd)
    return sealed and stat.S_ISREG(status.st_mode) and status.st_size == size


class _Loan(ctypes.Array[ctypes.c_ubyte]):
    """Memory lent out; its death is the memory's return."""

    _type_ = ctypes.c_ubyte
    _length_ = 0
    __slots__ = ("home", "memory", "tag")
    home: Loans[Any]
    memory: object
    tag: Any

    def __del__(self) -> None:
        home = self.home
        if home.pid == os.getpid():
            home.returned.append(self.tag)
            if home.ring is not None:
                home.ring()


class _Window(ctypes.Array[ctypes.c_ubyte]):
    """Memory that belongs to another object, which is kept alive."""

    _type_ = ctypes.c_ubyte
    _length_ = 0
    __slots__ = ("keep",)
    keep: object


# ctypes types are never freed once cached, hence one per size class and not one per size.
_loan_types: dict[int, type[_Loan]] = {}
_window_types: dict[int, type[_Window]] = {}


def _sized(base: type[T], size: int) -> type[T]:
    make: Any = type(base)
    kind: type[T] = make(f"{base.__name__}{size}", (base,), {"_length_": size, "__slots__": ()})
    return kind


class Loans(Generic[T]):
    """Lends memory and hears of its return.

    ``returned`` receives the tag of each loan, in the order in which they died, from whatever thread
    dropped the last reference. Thread-safe without a lock: appending to and popping from a deque are atomic.
    """

    __slots__ = ("pid", "returned", "ring")

    def __init__(self, ring: Callable[[], None] | None = None) -> None:
        self.pid = os.getpid()
        self.returned: deque[T] = deque()
        #: called after each return, where a finaliser runs: it may take no lock and must not raise
        self.ring = ring

    def lend(self, memory: object, address: int, size: int, tag: T) -> memoryview:
        """Return a writable view of ``size`` bytes at ``address``; its last user's death returns ``tag``.

        ``size`` must be a size class. ``memory`` is kept alive as long as the loan; neither it nor
        ``tag`` may refer back to the loan, for the collector cannot see such a cycle.
        """
        kind = _loan_types.get(size)
        if kind is None:
            kind = _loan_types.setdefault(size, _sized(_Loan, size))
        loan = kind.from_address(address)
        loan.tag = tag
        loan.memory = memory
        loan.home = self
        _untrack(loan)
        return memoryview(loan).cast("B")

    def close(self) -> None:
        """Forget what was returned and what will be; loans that live stay valid until they die."""
        self.returned = deque(maxlen=0)


@dataclass(slots=True)
class _Pin(Generic[K]):
    """Loans that lived at a fork, until every process that has the pipe's other end is gone."""

    fd: int
    loans: set[K]
    dead: list[K] = field(default_factory=list)


class ForkGuard(Generic[K]):
    """Holds back loans of shared memory that a forked child may still see.

    The child keeps one end of a pipe for as long as it lives, and so do its own children: end of file says
    that none of them is left. The owner's lock must be held for every call, except in the child.
    """

    __slots__ = ("_pins", "_pipes", "holds")

    def __init__(self) -> None:
        self._pins: list[_Pin[K]] = []
        self._pipes: dict[int, tuple[int, int]] = {}  # by the thread that forks
        #: whether any loan that died is held back
        self.holds = False

    @property
    def forking(self) -> bool:
        """Whether a fork is under way, so that it cannot be said yet what the child inherits."""
        return bool(self._pipes)

    def before(self) -> None:
        """Prepare for a fork by this thread."""
        try:
            pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            pipe = (-1, -1)  # no descriptors left: what lives now will be held for ever
        self._pipes[threading.get_ident()] = pipe

    def after(self, loans: set[K]) -> None:
        """Hold ``loans`` back from now on; a no-op where ``before`` was not called."""
        pipe = self._pipes.pop(threading.get_ident(), None)
        if pipe is None:
            return
        _close(pipe[1])
        if loans:
            self._pins.append(_Pin(pipe[0], loans))
        else:
            _close(pipe[0])

    def hold(self, loan: K) -> bool:
        """Keep a loan that died here if a child may still see it; ``release`` returns it one day."""
        for pin in self._pins:
            if loan in pin.loans:
                pin.dead.append(loan)
                self.holds = True
                return True
        return False

    def release(self) -> list[K]:
        """Return the loans held for children that are gone; others may have to be held for the rest."""
        poll = _time.poll()
        for pin in self._pins:
            if pin.fd >= 0:
                poll.register(pin.fd, 0)
        gone = {fd for fd, _ in poll.poll(0)} if self._pins else set()
        if not gone:
            return []
        ended = [pin for pin in self._pins if pin.fd in gone]
        self._pins = [pin for pin in self._pins if pin.fd not in gone]
        self.holds = any(pin.dead for pin in self._pins)
        for pin in ended:
            _close(pin.fd)
        return [loan for pin in ended for loan in pin.dead]

    def close(self) -> None:
        """Hold nothing back any more."""
        pins, self._pins, self.holds = self._pins, [], False
        for pin in pins:
            _close(pin.fd)

    def abandon(self) -> None:
        """In the child: keep open only what tells the parents that it lives."""
        for theirs, _ in self._pipes.values():
            _close(theirs)
        self._pipes = {}
        self.close()


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """Memory about to be sent: where it is and what keeps it there."""

    address: int
    nbytes: int
    keep: object = field(repr=False, compare=False)

    def view(self) -> memoryview:
        """Return the memory as a read-only view that keeps ``keep`` alive."""
        size = size_class(self.nbytes)
        kind = _window_types.get(size)
        if kind is None:
            kind = _window_types.setdefault(size, _sized(_Window, size))
        window = kind.from_address(self.address)
        window.keep = self.keep
        # The type is that of the size class: what lies past nbytes is not ours and is cut off at once.
        return memoryview(window).cast("B")[: self.nbytes].toreadonly()


def copy(address: int, span: MemorySpan) -> None:
    """Copy ``span`` to ``address``, without the GIL unless the copy is short."""
    if span.nbytes > _COPY_WITH_GIL:
        ctypes.memmove(address, span.address, span.nbytes)
    elif span.nbytes:
        _memmove_with_gil(address, span.address, span.nbytes)


@dataclass(slots=True, eq=False)
class _Block:
    memory: mmap.mmap
    address: int
    size: int
    order: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """What a pool holds at one moment."""

    lent_bytes: int
    free_bytes: int
    misses: int


class BufferPool:
    """Lends writable memory and uses it again once everything built on it has died.

    Kept for reuse: never more than ``limit_bytes``, nor more than twice what was lent at the busiest
    moment of the last one to two ``window`` seconds. What is lent is not limited here.

    One lock guards the free lists and the counters; memory is mapped and unmapped outside it. It is
    re-entrant for one case only: a finaliser, run by the collector in the middle of a section, that
    needs memory itself. It gets memory that is not pooled.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        window: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        excess: Callable[[], None] | None = None,
    ) -> None:
        self._limit = limit_bytes
        self._excess = excess
        self._window = window
        self._clock = clock
        self._loans: Loans[_Block] = Loans(None if excess is None else self._ring)
        self._lock = _time.RLock()
        self._busy = False
        self._closed = False
        self._free: dict[int, deque[_Block]] = {}
        self._free_bytes = 0
        self._lent_bytes = 0
        self._peak = 0
        self._peak_before = 0
        self._window_end = clock() + window
        self._order = 0
        self._misses = 0

    def take(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` of writable memory with undefined content.

        From 64 KiB on it starts at a page boundary; smaller memory is a ``bytearray`` (16 bytes).

        Raises:
            MemoryError: the system has no memory left.
        """
        if nbytes < SMALL or self._closed:
            return memoryview(bytearray(nbytes))
        size = size_class(nbytes)
        with self._lock:
            if self._busy:
                return memoryview(bytearray(nbytes))
            self._busy = True
            try:
                self._collect()
                block = self._pick(size)
                if block is None:
                    self._misses += 1
                else:
                    size = block.size
                self._lent_bytes += size
                self._peak = max(self._peak, self._lent_bytes)
                surplus = self._surplus()
            finally:
                self._busy = False
        for old in surplus:
            old.memory.close()
        if block is None:
            try:
                block = _Block(*reserve(size), size)
            except OSError as error:
                with self._lock:
                    self._lent_bytes -= size
                raise MemoryError(f"cannot map {size} bytes") from error
        return self._loans.lend(block.memory, block.address, size, block)[:nbytes]

    def _ring(self) -> None:
        """Say that there is more than may be kept, where that may be so: what has been returned is not counted yet."""
        if (
            self._excess is not None
            and self._lent_bytes + self._free_bytes > self._limit
            and not self._closed
        ):
            self._excess()

    def trim(self) -> None:
        """Take in what has been returned and unmap the surplus; call it now and then when idle."""
        surplus: list[_Block] = []
        with self._lock:
            if not self._busy:
                self._busy = True
                try:
                    self._collect()
                    surplus = self._surplus()
                finally:
                    self._busy = False
        for old in surplus:
            old.memory.close()

    def stats(self) -> BufferStats:
        """Return what the pool holds now."""
        with self._lock:
            if not self._busy:
                self._busy = True
                try:
                    self._collect()
                finally:
                    self._busy = False
            return BufferStats(
                lent_bytes=self._lent_bytes,
                free_bytes=self._free_bytes,
                misses=self._misses,
            )

    def close(self) -> None:
        """Unmap what is free; memory still in use goes when it dies. ``take`` then gives plain memory."""
        with self._lock:
            self._closed = True
            self._loans.close()
            if self._busy:
                return  # a finaliser in the middle of a section: the memory goes with this object
            dropped, self._free = self._free, {}
            self._free_bytes = self._lent_bytes = 0
        del dropped  # unmaps, after the lock

    def abandon(self) -> None:
        """Give up the pool in a forked child: inherited tensors stay valid, nothing is recycled here."""
        self._lock = _time.RLock()  # the parent's may have been held at the fork
        self._busy = False
        self.close()

    # -- under the lock ------------------------------------------------------------------------

    def _collect(self) -> None:
        """Put what was returned on the free lists."""
        returned = self._loans.returned
        while returned:
            block = returned.popleft()
            self._order += 1
            block.order = self._order
            stack = self._free.get(block.size)
            if stack is None:
                stack = self._free[block.size] = deque()
            stack.append(block)
            self._free_bytes += block.size
            self._lent_bytes -= block.size

    def _pick(self, size: int) -> _Block | None:
        """Take the free block that fits best; of one size the warmest, which came back last."""
        stack = self._free.get(size)
        if not stack:
            if not self._free_bytes:
                return None
            stack = next(filter(None, map(self._free.get, size_classes(size))), None)
            if stack is None:
                return None
        block = stack.pop()
        self._free_bytes -= block.size
        return block

    def _surplus(self) -> list[_Block]:
        """Take off the free lists, oldest first, what is more than may be kept."""
        now = self._clock()
        if now >= self._window_end:
            idle = now >= self._window_end + self._window
            self._peak_before = self._lent_bytes if idle else self._peak
            self._peak = self._lent_bytes
            self._window_end = now + self._window
        keep = min(self._limit, 2 * max(self._peak, self._peak_before))
        surplus: list[_Block] = []
        while self._free_bytes > keep:
            oldest = min((stack for stack in self._free.values() if stack), key=lambda stack: stack[0].order)
            block = oldest.popleft()
            self._free_bytes -= block.size
            surplus.append(block)
        return surplus
