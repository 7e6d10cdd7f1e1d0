"""Reuse of memory: the common parts of all pools and lenders, and the pool for bytes that are received from sockets.

Fresh pages are several times slower to fill than pages that were used before. Therefore memory is reused after the last tensor,
array or memoryview on it has died. This is detected by a *loan*: a small ctypes object over a raw address, to which all objects
built on the memory refer. Loans are hidden from the cyclic garbage collector. Otherwise: 1. The collector finds a dead cycle with
a view, and runs the loan's finaliser, so that the memory is lent again. 2. The collector runs a user's finaliser in the same
cycle, which reads or revives the view.

Everything here except :class:`ForkGuard` is thread-safe, and nothing here calls user code. The finaliser of a loan appends to a
deque and calls a function that takes re-entrant locks only; in a forked child it does nothing.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import stat
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from actorrpc import _time
from actorrpc._exceptions import undo_on_error
from actorrpc.transport.signals import uninterruptible

__all__ = [
    "SMALL",
    "BlockLender",
    "BufferPool",
    "Closable",
    "ForkGuard",
    "LentBlock",
    "Loans",
    "MemoryBlock",
    "MemoryRange",
    "MemoryStats",
    "Recycler",
    "copy",
    "drained",
    "is_sealed",
    "layout",
    "reserve",
    "sealed_memfd",
    "size_class",
    "untouched",
]

SMALL = 64 << 10
"""Requests below this many bytes get an ordinary ``bytearray``, which is not recycled."""

_SMALLEST_CLASS = 64
_LARGEST_CLASS = 1 << 47
_HUGE_PAGE = 2 << 20
# Copies up to this size keep the GIL: they are short, and acquiring the GIL again may take a switch interval (5 ms).
_COPY_WITH_GIL = 128 << 10
_MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MAP_FIXED = 0x10
_MFD_SEALABLE = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
_MFD_NOEXEC_SEAL = 0x8
_CANNOT_SHRINK = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_KEEP_S = 30.0  # how long a free block is kept
_ALIGNMENT = 64
_MAX_BLOCKS = 128  # the most blocks of one lender; Linux permits 65 530 mappings in a process
_KEEP_OVER_HALF_S = 3.0  # how long a free block is kept if more than half of the limit is free
_nbytes = attrgetter("nbytes")

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
# A new function object, because other code may set the argtypes of the shared object ctypes.pythonapi.PyObject_GC_UnTrack.
_untrack = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyObject_GC_UnTrack", ctypes.pythonapi))


def size_class(nbytes: int) -> int:
    """Return the smallest size class of at least ``nbytes``. There are four classes per octave, so at most 25 % is wasted.

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
    """Map ``size`` bytes; return an object that keeps them mapped, and their address.

    Without ``fd``, the memory is anonymous and private, so a forked child gets its own copy. With ``fd``, the file is mapped from
    ``offset`` on: shared, or copy-on-write if ``private``. Unlike ``mmap.mmap``, this keeps no duplicate of the descriptor. Large
    memory starts at a multiple of 2 MiB, unless ``private``. The memory is unmapped when the returned object is closed or dies.

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
            pass  # kernels without huge pages refuse this advice
    return memory, address


def untouched(size: int) -> mmap.mmap:
    """Return zeroed memory whose pages the kernel provides when they are first written. Most connections use few of them."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def sealed_memfd(size: int, name: str = "actorrpc", more_seals: int = fcntl.F_SEAL_SEAL) -> int:
    """Return the descriptor of ``size`` bytes of anonymous memory that can neither shrink nor grow.

    Args:
        name: the name of the memory in ``/proc``.
        more_seals: further seals; by default, the seal against adding seals.

    Raises:
        OSError: the system provides no memory or no descriptor.
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
    """Return whether ``fd`` is memory of ``size`` bytes that can neither shrink nor grow.

    Raises:
        OSError: ``fd`` is not a memfd.
    """
    # Read the seals before the size: if the memory is sealed, the size cannot change any more.
    sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _CANNOT_SHRINK == _CANNOT_SHRINK
    status = os.fstat(fd)
    return sealed and stat.S_ISREG(status.st_mode) and status.st_size == size


class MemoryRange(Protocol):
    """Memory that is sent. The sender keeps it alive meanwhile."""

    address: int
    nbytes: int


def copy(address: int, span: MemoryRange) -> None:
    """Copy ``span`` to ``address``, without the GIL unless the copy is short."""
    if span.nbytes > _COPY_WITH_GIL:
        ctypes.memmove(address, span.address, span.nbytes)
    elif span.nbytes:
        _memmove_with_gil(address, span.address, span.nbytes)


class _Loan(ctypes.Array[ctypes.c_ubyte]):
    """A loan of memory; when this object dies, it appends ``tag`` to ``home.returned``."""

    _type_ = ctypes.c_ubyte
    _length_ = 0
    __slots__ = ("home", "memory", "tag")
    home: Loans[Any]
    memory: object
    tag: Any

    def __del__(self) -> None:
        home = self.home
        try:
            if home.pid == os.getpid():
                home.returned.append(self.tag)
                if home.on_return is not None:
                    home.on_return()
        except AttributeError:  # the interpreter is shutting down
            pass


# ctypes never frees its array types, so there is one type for each size class and not for each size.
_loan_types: dict[int, type[_Loan]] = {}


class Loans(Generic[T]):
    """Lends memory, and detects when a loan is no longer used. Thread-safe without a lock: operations of a deque are atomic.

    Attributes:
        returned: the tags of dead loans, in the order of their deaths. The thread that drops a loan's last reference appends.
        on_return: called in each loan's finaliser, after its tag was appended; must take only re-entrant locks and not raise.
    """

    __slots__ = ("on_return", "pid", "returned")

    def __init__(self, on_return: Callable[[], None] | None = None) -> None:
        self.pid = os.getpid()
        self.returned: deque[T] = deque()
        self.on_return = on_return

    def lend(self, memory: object, address: int, size: int, tag: T) -> memoryview:
        """Return a writable view of ``size`` bytes at ``address``; when the last object on it dies, ``returned`` gets ``tag``.

        ``size`` must be a size class. The loan keeps ``memory`` alive. Neither ``memory`` nor ``tag`` may refer to the loan,
        because the garbage collector does not find such a cycle.
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
        """Discard returned tags, and ignore tags that are returned later. The memory of a live loan stays valid until it dies."""
        self.returned = deque(maxlen=0)


def drained(items: deque[T]) -> Iterator[T]:
    """Remove and yield items until the deque is empty. Other threads and finalisers may remove items at the same time."""
    while items:
        try:
            yield items.popleft()
        except IndexError:
            return


class ForkGuard:
    """Determines which loans of shared memory a forked child may still use.

    A child, and its own children, keep one end of a pipe open, so an end of file on the pipe says that all of them have ended.
    The caller holds the lock of the object that owns the guard, except in the child.

    Attributes:
        epoch: the number of forks so far. A loan records the epoch in which it began; later forks inherit the loan.
    """

    __slots__ = ("_children", "_pipes", "epoch")

    def __init__(self) -> None:
        self.epoch = 0
        self._children: list[tuple[int, int]] = []  # by child: (epoch after the fork, read end of the pipe)
        self._pipes: dict[int, tuple[int, int]] = {}  # forks in progress, by thread: (read end, write end)

    @property
    def forking(self) -> bool:
        """Whether a fork is in progress, so that the child may inherit any loan that lives now."""
        return bool(self._pipes)

    def before(self) -> None:
        """Prepare for a fork by this thread."""
        self.inherited()  # called because it closes the pipes of children that have ended
        try:
            pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            # No descriptor is free. Without a pipe, this process cannot notice the end of the child, so the loans that the
            # child inherits are never released.
            pipe = (-1, -1)
        self._pipes[threading.get_ident()] = pipe

    def after(self, lends: bool) -> None:
        """Finish a fork after :meth:`before`. ``lends``: whether there are loans that the child has inherited."""
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
        """Return an epoch: a live child may still use loans that began before this epoch. 0: there is no live child."""
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
        """Close the pipes: no loan counts as inherited from now on."""
        children, self._children = self._children, []
        for _, fd in children:
            _close(fd)

    def abandon(self) -> None:
        """In the child: close all descriptors except the write ends of pipes, which show the parents that the child lives."""
        for reads, _ in self._pipes.values():
            _close(reads)
        self._pipes = {}
        self.close()


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


class Closable(Protocol):
    """Memory that ``close`` releases."""

    def close(self) -> None: ...


class MemoryBlock:
    """Memory of one size class, which a :class:`Recycler` lends.

    Attributes:
        size: in bytes.
        memory: the mapping, or the memory of a device; None until it was created.
        address: the address of the mapping.
        used_at: when the block became free.
    """

    __slots__ = ("address", "memory", "size", "used_at")

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory: Closable | None = None
        self.address = 0
        self.used_at = 0.0

    def close(self) -> None:
        """Unmap the block without the GIL. (The finaliser of ``memory`` would hold the GIL.)"""
        if self.memory is not None:
            self.memory.close()


B = TypeVar("B", bound=MemoryBlock)


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """The figures of a pool: the number of its blocks, the bytes in use, and the bytes kept for reuse."""

    segments: int
    lent_bytes: int
    free_bytes: int


class Recycler(Generic[B]):
    """Keeps free blocks of memory for reuse. Each block is either lent or free.

    A subclass creates blocks (``_make``) and puts blocks back that have become free (``_settle``). A free block is released to
    the system after some time, or earlier if too many bytes are free (``_keep_s``).

    One lock guards the tables. Memory is not copied or unmapped under it, and no user code is called. The lock is re-entrant for
    one case only: the garbage collector may run a finaliser while :meth:`_section` runs, and the finaliser may request memory.
    The finaliser then gets None.

    Args:
        limit_bytes: the limit of kept or of lent bytes, depending on the subclass.
        clock: returns the time in seconds.
        on_return: called by finalisers when memory was returned; it must arrange that :meth:`trim` is called soon, and is not
            called again before :meth:`trim` has run.
    """

    def __init__(
        self, limit_bytes: int, clock: Callable[[], float], on_return: Callable[[], None] | None = None
    ) -> None:
        self._limit = limit_bytes
        self._clock = clock
        self._on_return = on_return
        self._trim_requested = self._busy = self._closed = False
        self._lock = _time.RLock()
        self._free: dict[int, deque[B]] = {}  # size -> free blocks, in the order in which they became free
        self._dropped: list[B] = []
        self._count = self._lent_bytes = self._free_bytes = 0

    def request_trim(self) -> None:
        """Request a call of :meth:`trim`. Called in finalisers, so ``on_return`` takes re-entrant locks only."""
        if not self._trim_requested and self._on_return is not None:
            self._trim_requested = True
            self._on_return()

    def trim(self) -> None:
        """Free the returned blocks, and unmap blocks that were free for too long. Call it regularly while a block is free."""
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
                return  # a finaliser that runs in ``_section`` calls close(): blocks are unmapped when this object dies
            dropped, self._free = self._free, {}
            self._count = self._lent_bytes = self._free_bytes = 0
        del dropped  # unmaps the blocks, after the lock was released

    def abandon(self) -> None:
        """Close the pool in a forked child. Mapped blocks stay valid, and are not recycled."""
        self._lock = _time.RLock()  # a thread of the parent may have held the old lock at the fork
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
        """Call :meth:`_put` for the blocks that have become free."""

    def _make(self, size: int) -> B | None:
        """Return a new block without memory; the caller of :meth:`_find` maps it. None: the limit does not permit a new block."""
        return None

    def _add(self, block: B) -> B:
        self._count += 1
        self._lent_bytes += block.size
        return block

    def _remove(self, block: B) -> None:
        self._count -= 1
        self._lent_bytes -= block.size

    def _keep_s(self) -> float:
        """Return how many seconds a free block is kept."""
        return _KEEP_S

    def _find(self, size: int) -> B | None:
        """Lend a block of at least ``size`` bytes; None if no such block is free and no block may be created."""
        self._settle()
        return self._pick(size) or self._make(size)

    def _pick(self, size: int, most: int = 0) -> B | None:
        """Lend the smallest free block of ``size`` to ``most`` bytes (default: twice ``size``); of several, the latest used."""
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
        """Record that a lent block is free."""
        block.used_at = self._clock()
        self._free.setdefault(block.size, deque()).append(block)
        self._lent_bytes -= block.size
        self._free_bytes += block.size

    def _oldest(self) -> B | None:
        """Return the block that has been free for the longest time."""
        stacks = [stack for stack in self._free.values() if stack]
        return min([stack[0] for stack in stacks], key=lambda block: block.used_at) if stacks else None

    def _drop(self, block: B) -> None:
        """Remove a free block; :meth:`_section` unmaps it after it has released the lock."""
        self._free[block.size].remove(block)
        self._free_bytes -= block.size
        self._count -= 1
        self._dropped.append(block)

    def _trim(self) -> None:
        self._trim_requested = False
        self._settle()
        now = self._clock()
        while (block := self._oldest()) is not None and now - block.used_at >= self._keep_s():
            self._drop(block)


class BufferPool(Recycler[MemoryBlock]):
    """Lends writable memory of this process, without limit. :meth:`trim` releases free memory beyond ``limit_bytes``."""

    def __init__(
        self,
        limit_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_return: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(limit_bytes, clock, on_return)
        self._loans: Loans[MemoryBlock] = Loans(self.request_trim)

    def allocate(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` of writable memory with undefined content.

        Memory of at least 64 KiB starts at a page boundary. Smaller memory, and all memory after :meth:`close` or for a finaliser
        that interrupts the pool, is a ``bytearray``, which is aligned to 16 bytes.

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
        """Unmap free blocks; a block in use is unmapped when its last view dies. Afterwards, ``allocate`` returns bytearrays."""
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


# -- memory that is lent to a peer ---------------------------------------------------------------


class _Sized(Protocol):
    nbytes: int


R = TypeVar("R", bound=_Sized)


def layout(sizes: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """Return the offset of each buffer, and the total size."""
    offsets = []
    end = 0
    for size in sizes:
        start = (end + _ALIGNMENT - 1) & -_ALIGNMENT
        offsets.append(start)
        end = start + size
    return tuple(offsets), end


class LentBlock(MemoryBlock):
    """A block on the lender's side. ``loan``: the number of the loan; 0 while the block is free or being filled."""

    __slots__ = ("loan", "number")

    def __init__(self, number: int, size: int) -> None:
        super().__init__(size)
        self.number = number
        self.loan = 0


class BlockLender(Recycler[LentBlock], Generic[R]):
    """Copies buffers into blocks of memory that one peer can read. A subclass creates the memory and copies.

    A sender copies the buffers of a message into a free block: a *loan*. The message names the block and the number of the loan.
    The peer reports the loan as freed when it no longer uses the memory; then the block is lent again. A report that arrives
    twice does not free a block that was lent again, because it names the earlier loan. The numbers of released blocks are also
    sent to the peer, which then releases the memory, too.

    Args:
        limit_bytes: the most bytes of all blocks.
        threshold: buffers of fewer bytes are not placed.
        smallest: the size of the smallest block.
        first: the number of the first block.

    Attributes:
        retired: the numbers of released blocks, which the peer may release, too.
        placed_bytes: the total of copied bytes; not exact, because threads update it without a lock.
    """

    def __init__(
        self, limit_bytes: int, threshold: int, clock: Callable[[], float], smallest: int, first: int = 1
    ) -> None:
        super().__init__(limit_bytes, clock)
        self.placed_bytes = 0
        self._threshold = threshold
        self._smallest = smallest
        self._blocks: dict[int, LentBlock] = {}
        self._numbers, self._loans = itertools.count(first), itertools.count(1)
        self._handed_back: deque[tuple[int, int]] = deque()
        self.retired: deque[int] = deque()
        self._no_new_before = 0.0

    @abstractmethod
    def _create(self, block: LentBlock) -> float:
        """Set the memory of a new block. If there is none, return for how many seconds no block is created."""

    @abstractmethod
    def _fill(self, block: LentBlock, offsets: Sequence[int], ranges: Sequence[R]) -> None:
        """Copy each range to its offset in the block."""

    def place(self, ranges: Sequence[R]) -> tuple[int, int] | None:
        """Copy ``ranges`` into one block; return the numbers of the block and of the loan. None: send them in another way.

        The caller may change the buffers afterwards. Thread-safe.
        """
        offsets, need = layout(map(_nbytes, ranges))
        if need < self._threshold or need > self._limit:
            return None
        block = self._section(self._find, size_class(max(need, self._smallest)))
        if block is None:
            return None
        if block.memory is None and (pause := self._create(block)):
            self._no_new_before = self._clock() + pause
            self._section(self._remove, block)
            return None
        loan = next(self._loans)
        try:
            self._fill(block, offsets, ranges)
        except BaseException:  # Ctrl-C between two copies
            block.loan = loan
            self.reclaim([(block.number, loan)])
            raise
        # ``loan`` is set after copying: until then, reports that name this loan are ignored. Therefore a peer that guesses loan
        # numbers cannot cause a block to be released while the block is being filled.
        block.loan = loan
        self.placed_bytes += need
        return block.number, loan

    def reclaim(self, loans: Iterable[tuple[int, int]]) -> None:
        """Free loans, given as (block number, loan number). Unknown loans are ignored. Thread-safe."""
        self._handed_back.extend(loans)

    def drain_retired(self) -> list[int]:
        """Remove and return the numbers of blocks that the peer may release. Thread-safe."""
        return list(drained(self.retired))

    def close(self) -> None:
        """Release all memory. Idempotent."""
        super().close()
        self._blocks = {}  # a thread that is filling a block has a reference to it
        self._handed_back, self.retired = deque(maxlen=0), deque(maxlen=0)

    # -- in a section ------------------------------------------------------------------------------

    def _settle(self) -> None:
        handed_back = self._handed_back
        while handed_back:
            number, loan = handed_back.popleft()
            block = self._blocks.get(number)
            if block is not None and block.loan == loan != 0:
                block.loan = 0
                self._put(block)

    def _make(self, size: int) -> LentBlock | None:
        free = sum(map(len, self._free.values()))
        may_create = (
            self._clock() >= self._no_new_before
            and self._lent_bytes + size <= self._limit
            and self._count - free < _MAX_BLOCKS
        )
        if not may_create or self._is_over(size):
            # Use any free block that is large enough, even a much larger one, rather than release blocks to create another.
            larger = self._pick(size, self._limit)
            if larger is not None or not may_create:
                return larger
        while self._is_over(size) and (oldest := self._oldest()) is not None:
            self._drop(oldest)
        block = self._add(LentBlock(next(self._numbers), size))
        self._blocks[block.number] = block
        return block

    def _is_over(self, size: int) -> bool:
        return self._lent_bytes + self._free_bytes + size > self._limit or self._count >= _MAX_BLOCKS

    def _remove(self, block: LentBlock) -> None:
        super()._remove(block)
        del self._blocks[block.number]

    def _drop(self, block: LentBlock) -> None:
        super()._drop(block)
        del self._blocks[block.number]
        self.retired.append(block.number)

    def _keep_s(self) -> float:
        return _KEEP_OVER_HALF_S if 2 * self._free_bytes > self._limit else super()._keep_s()
