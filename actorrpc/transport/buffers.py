"""Memory that is used again: the parts of all pools, and the pool for bytes that arrive from sockets.

Fresh pages are several times slower to fill than warm pages, so memory that was handed out comes back
when the last tensor, array or memoryview on it has died. That death is seen through a *loan*: a small
ctypes object over a raw address, which everything built on the memory keeps alive. Loans are hidden from
the cyclic collector. Otherwise a dead cycle that holds a view would run the loan's finaliser first, and a
user's finaliser after it could still read, or even revive, memory that already has another user.

Any thread may call anything here. Nothing here calls user code. The finaliser of a loan appends to a deque
and calls a function that takes no lock; in a forked child it does nothing.
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
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from actorrpc import _time
from actorrpc._undo import undo_on_error
from actorrpc.transport.signals import uninterruptible

__all__ = [
    "SMALL",
    "BufferPool",
    "ForkGuard",
    "Loans",
    "MemoryBlock",
    "MemoryRange",
    "MemoryStats",
    "Recycler",
    "copy",
    "drained",
    "is_sealed",
    "reserve",
    "sealed_memfd",
    "size_class",
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

_KEEP_S = 30.0  # a free block that was not used for so long is given back

T = TypeVar("T")

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


class MemoryRange(Protocol):
    """Memory that is about to be sent. The sender keeps it alive."""

    address: int
    nbytes: int


def copy(address: int, span: MemoryRange) -> None:
    """Copy ``span`` to ``address``, without the GIL unless the copy is short."""
    if span.nbytes > _COPY_WITH_GIL:
        ctypes.memmove(address, span.address, span.nbytes)
    elif span.nbytes:
        _memmove_with_gil(address, span.address, span.nbytes)


class _Loan(ctypes.Array[ctypes.c_ubyte]):
    """Memory that is lent; when this object dies, the memory comes back."""

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


# ctypes never frees its types, hence there is one for each size class and not one for each size.
_loan_types: dict[int, type[_Loan]] = {}


class Loans(Generic[T]):
    """Lends memory. Thread-safe without a lock: appending to and popping from a deque are atomic.

    Attributes:
        returned: the tags of the loans that have died, in that order; the thread that drops the last reference appends.
        ring: called after each return, where a finaliser runs: it may take no lock and must not raise.
    """

    __slots__ = ("pid", "returned", "ring")

    def __init__(self, ring: Callable[[], None] | None = None) -> None:
        self.pid = os.getpid()
        self.returned: deque[T] = deque()
        self.ring = ring

    def lend(self, memory: object, address: int, size: int, tag: T) -> memoryview:
        """Return a writable view of ``size`` bytes at ``address``; when its last user dies, ``tag`` is returned.

        ``size`` must be a size class. ``memory`` is kept alive as long as the loan; neither ``memory`` nor
        ``tag`` may refer to the loan, because the collector cannot see such a cycle.
        """
        kind = _loan_types.get(size)
        if kind is None:
            make: Any = type(_Loan)
            made = make(f"_Loan{size}", (_Loan,), {"_length_": size, "__slots__": ()})
            kind = _loan_types.setdefault(size, made)
        loan = kind.from_address(address)
        loan.tag, loan.memory, loan.home = tag, memory, self
        _untrack(loan)
        return memoryview(loan).cast("B")

    def close(self) -> None:
        """Forget what was returned, and ignore later returns; the memory of live loans stays valid until they die."""
        self.returned = deque(maxlen=0)


def drained(items: deque[T]) -> Iterator[T]:
    """Take items out until there are none; another thread, or a finaliser, may take some at the same time."""
    while items:
        try:
            yield items.popleft()
        except IndexError:
            return


class ForkGuard:
    """Tells which loans of shared memory a forked child may still see.

    The child, and its own children, keep one end of a pipe open: end of file says that all of them have ended. The
    owner's lock must be held for every call, except in the child.

    Attributes:
        epoch: the number of forks so far. A loan notes it when it begins: later forks inherit the loan.
    """

    __slots__ = ("_children", "_pipes", "epoch")

    def __init__(self) -> None:
        self.epoch = 0
        self._children: list[tuple[int, int]] = []  # (epoch after the fork, read end of its pipe)
        self._pipes: dict[int, tuple[int, int]] = {}  # of the forks in progress, by thread

    @property
    def forking(self) -> bool:
        """Whether a fork is in progress, so that the child may inherit any loan that lives now."""
        return bool(self._pipes)

    def before(self) -> None:
        """Prepare for a fork by this thread."""
        self.inherited()  # closes the pipes of children that have ended
        try:
            pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            pipe = (-1, -1)  # no descriptors left: the present loans are never released
        self._pipes[threading.get_ident()] = pipe

    def after(self, lends: bool) -> None:
        """End what ``before`` began, if it was called; ``lends``: there are loans for the child to inherit."""
        pipe = self._pipes.pop(threading.get_ident(), None)
        if pipe is None:
            return
        _close(pipe[1])
        self.epoch += 1
        if lends:
            self._children.append((self.epoch, pipe[0]))
        else:
            _close(pipe[0])

    def inherited(self) -> int:
        """Return an epoch: a child that lives may see the loans that began in earlier epochs."""
        if not self._children:
            return 0
        poll = _time.poll()
        for _, fd in self._children:
            if fd >= 0:
                poll.register(fd, 0)
        ended = {fd for fd, _ in poll.poll(0)}
        for fd in ended:
            os.close(fd)
        self._children = [each for each in self._children if each[1] not in ended]
        return max([epoch for epoch, _ in self._children], default=0)

    def close(self) -> None:
        """Forget all children."""
        children, self._children = self._children, []
        for _, fd in children:
            _close(fd)

    def abandon(self) -> None:
        """In the child: keep only the ends open that tell the parents that it lives."""
        for reads, _ in self._pipes.values():
            _close(reads)
        self._pipes = {}
        self.close()


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


class MemoryBlock:
    """Memory of one size class, for a :class:`Recycler`.

    Attributes:
        size: in bytes.
        memory: keeps it mapped; None until it is mapped.
        address: where it is mapped.
        used_at: when it became free.
    """

    __slots__ = ("address", "memory", "size", "used_at")

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory: mmap.mmap | None = None
        self.address = 0
        self.used_at = 0.0

    def close(self) -> None:
        """Unmap it, without the GIL (the death of ``memory`` would unmap it with the GIL held)."""
        if self.memory is not None:
            self.memory.close()


B = TypeVar("B", bound=MemoryBlock)


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """What a pool holds at one moment: the number of its blocks, the bytes in use, and the bytes kept for reuse."""

    segments: int
    lent_bytes: int
    free_bytes: int


class Recycler(Generic[B]):
    """Keeps free blocks of memory and uses them again. Each block is either lent or free.

    A subclass makes blocks (``_make``) and puts those back that have become free (``_settle``). A free block is given back to
    the system after some time, or earlier if there is too much (``_keep_s``).

    One lock guards the tables. No thread copies or unmaps memory or runs user code under it. It is re-entrant for one
    case only: a finaliser that the collector runs in the middle of a section, and that needs memory itself, is refused.

    Args:
        limit_bytes: how many bytes may be kept or lent; the subclass says which.
        clock: seconds.
        on_return: called from finalisers when something has come back: :meth:`trim` is due soon. Not called again until then.
    """

    def __init__(
        self, limit_bytes: int, clock: Callable[[], float], on_return: Callable[[], None] | None = None
    ) -> None:
        self._limit = limit_bytes
        self._clock = clock
        self._on_return = on_return
        self._rung = self._busy = self._closed = False
        self._lock = _time.RLock()
        self._free: dict[int, deque[B]] = {}  # by size, each in the order in which the blocks became free
        self._dropped: list[B] = []
        self._count = self._lent_bytes = self._free_bytes = 0

    def ring(self) -> None:
        """Ask for :meth:`trim`. Runs in finalisers: takes no lock."""
        if not self._rung and self._on_return is not None:
            self._rung = True
            self._on_return()

    def trim(self) -> None:
        """Take back returned blocks, and unmap blocks that are not kept. Call it about once a second while a block is free."""
        self._section(self._trim)

    def stats(self) -> MemoryStats:
        """Return the present figures."""
        self.trim()
        return MemoryStats(self._count, self._lent_bytes, self._free_bytes)

    def close(self) -> None:
        """Unmap free blocks; a block in use is unmapped when its last view dies. Idempotent."""
        with self._lock:
            self._closed = True
            if self._busy:
                return  # called by a finaliser in the middle of a section: the memory goes with this object
            dropped, self._free = self._free, {}
            self._count = self._lent_bytes = self._free_bytes = 0
        del dropped  # unmaps, after the lock

    def abandon(self) -> None:
        """Give up the memory in a forked child: mapped blocks stay valid, and no block is recycled here."""
        self._lock = _time.RLock()  # a thread of the parent may have held it at the fork
        self._busy = False
        self.close()

    @uninterruptible
    def _section(self, work: Callable[..., T], *args: object) -> T | None:
        """Run ``work`` under the lock; return None, without running it, within another section and after :meth:`close`."""
        dropped: list[B] = []
        try:
            with self._lock:
                if self._busy or self._closed:
                    return None
                self._busy = True
                try:
                    return work(*args)
                finally:
                    self._busy = False
                    dropped, self._dropped = self._dropped, []
        finally:
            for block in dropped:
                block.close()

    # -- in a section ------------------------------------------------------------------------------

    @abstractmethod
    def _settle(self) -> None:
        """Put blocks back that have become free."""

    def _make(self, size: int) -> B | None:
        """Return a new block, of which the caller of :meth:`_find` makes the memory; None where the limit forbids it."""
        return None

    def _add(self, block: B) -> B:
        self._count += 1
        self._lent_bytes += block.size
        return block

    def _remove(self, block: B) -> None:
        self._count -= 1
        self._lent_bytes -= block.size

    def _keep_s(self) -> float:
        """Return after how many seconds a free block is given back."""
        return _KEEP_S

    def _find(self, size: int) -> B | None:
        """Return a block of ``size`` bytes or more, which is lent from now on; None if there is none."""
        self._settle()
        return self._pick(size) or self._make(size)

    def _pick(self, size: int, most: int = 0) -> B | None:
        """Lend a free block of up to double the size, or up to ``most`` bytes: the best fit, and of these the warmest."""
        stack = self._free.get(size)
        if not stack and self._free_bytes:
            most = most or 2 * size
            fitting = [each for each, blocks in self._free.items() if blocks and size <= each <= most]
            stack = self._free[min(fitting)] if fitting else None
        if not stack:
            return None
        block = stack.pop()
        self._free_bytes -= block.size
        self._lent_bytes += block.size
        return block

    def _put(self, block: B) -> None:
        """Record that a block that was lent is free."""
        block.used_at = self._clock()
        self._free.setdefault(block.size, deque()).append(block)
        self._lent_bytes -= block.size
        self._free_bytes += block.size

    def _oldest(self) -> B | None:
        """Return the block that has been free for longest."""
        stacks = [stack for stack in self._free.values() if stack]
        return min([stack[0] for stack in stacks], key=lambda block: block.used_at) if stacks else None

    def _drop(self, block: B) -> None:
        """Give a free block up; it is unmapped after the section."""
        self._free[block.size].remove(block)
        self._free_bytes -= block.size
        self._count -= 1
        self._dropped.append(block)

    def _trim(self) -> None:
        self._rung = False
        self._settle()
        now = self._clock()
        while (block := self._oldest()) is not None and now - block.used_at >= self._keep_s():
            self._drop(block)


class BufferPool(Recycler[MemoryBlock]):
    """Lends writable memory of this process; at most ``limit_bytes`` of it are kept for reuse. What is lent is not limited."""

    def __init__(
        self,
        limit_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_return: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(limit_bytes, clock, on_return)
        self._loans: Loans[MemoryBlock] = Loans(self.ring)

    def take(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` of writable memory with undefined content.

        From 64 KiB on it starts at a page boundary; smaller memory is a ``bytearray`` (16 bytes).

        Raises:
            MemoryError: the system has no memory left.
        """
        block = self._section(self._find, size_class(nbytes)) if nbytes >= SMALL else None
        if block is None:
            return memoryview(bytearray(nbytes))
        if block.memory is None:
            try:
                block.memory, block.address = reserve(block.size)
            except OSError as error:
                self._section(self._remove, block)
                raise MemoryError(f"cannot map {block.size} bytes") from error
        return self._loans.lend(block.memory, block.address, block.size, block)[:nbytes]

    def close(self) -> None:
        """Unmap free blocks; a block in use is unmapped when its last view dies. ``take`` then gives plain memory."""
        self._loans.close()
        super().close()

    def _make(self, size: int) -> MemoryBlock:
        return self._add(MemoryBlock(size))

    def _settle(self) -> None:
        returned = self._loans.returned
        while returned:
            self._put(returned.popleft())

    def _keep_s(self) -> float:
        return 0.0 if self._free_bytes > self._limit else _KEEP_S
