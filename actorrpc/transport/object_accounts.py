"""Who holds how much of a host's memory for objects: each process writes what it holds into a file that all of its group read.

A segment counts once, however many hold it, and as long as any process does. A file whose process is gone, which the lock on it
tells, does not count, and the process that finds it removes it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["Holding", "ObjectAccounts"]

_ROW: Final = struct.Struct("<16sQ")
_TEXT: Final = 104
_ROW_SIZE: Final = _ROW.size + 2 * _TEXT  # the segment's name and bytes, its label, its site
_ROWS: Final = 4096  # more segments than this are not counted; the file takes memory for rows that are used
_HEAD: Final = struct.Struct("<Q")  # how many rows have ever been used
_SIZE: Final = _HEAD.size + _ROWS * _ROW_SIZE
_NONE: Final = bytes(16)


@dataclass(frozen=True, slots=True)
class Holding:
    """A segment that a process holds.

    Attributes:
        pid: the process.
        segment_id: names the segment's content.
        nbytes: how much memory it takes.
        label: what it is, in words; of several objects, the latest.
        site: where that was made, as ``file:line``; may be empty.
    """

    pid: int
    segment_id: bytes
    nbytes: int
    label: str
    site: str

    def __str__(self) -> str:
        where = f" made at {self.site}" if self.site else ""
        return f"{self.nbytes >> 20} MiB of {self.label}{where}, in process {self.pid}"


class ObjectAccounts:
    """The accounts of one process, and its look at those of the others.

    ``_lock`` guards the table of rows; re-entrant, as ``ObjectStore._lock``, which is taken first where both are.

    Args:
        path: this process's file; None keeps the accounts of this process alone.
        suffix: how the files of the group end, which lie beside it.
    """

    def __init__(self, path: str | None, suffix: str = "") -> None:
        self._lock = threading.RLock()
        self._rows: dict[bytes, int] = {}
        self._held: dict[bytes, Holding] = {}
        self._unused = list(range(_ROWS - 1, -1, -1))
        self._directory = None if path is None else os.path.dirname(path)
        self._name = "" if path is None else os.path.basename(path)
        self._suffix = suffix
        self._path = path
        self._used = 0
        self._file: mmap.mmap | None = None
        self._fd = -1

    def _open(self) -> mmap.mmap | None:
        """Make the file, when there is something to write."""
        if self._file is None and self._path is not None:
            try:
                fd = os.open(
                    self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
                )
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.ftruncate(fd, _SIZE)
                    self._file = mmap.mmap(fd, _SIZE)
                except BaseException:
                    os.close(fd)
                    raise
                self._fd = fd
            except OSError:  # no disk, no descriptors: this process is not counted by others
                self._path = None
        return self._file

    def hold(self, segment_id: bytes, nbytes: int, label: str, site: str) -> None:
        """Note that a segment is held here, of so many bytes; again where more of it is used."""
        with self._lock:
            known = self._held.get(segment_id)
            self._held[segment_id] = Holding(
                os.getpid(), segment_id, max(nbytes, known.nbytes if known else 0), label, site
            )
            file = self._open()
            if file is None:
                return
            row = self._rows.get(segment_id)
            if row is None:
                if not self._unused:
                    return
                row = self._rows[segment_id] = self._unused.pop()
            at = _HEAD.size + row * _ROW_SIZE
            held = self._held[segment_id]
            text = b"".join(_fitting(each) for each in (label, site))
            # The name last: a reader that comes in between sees no row, or the one before.
            file[at + 16 : at + _ROW_SIZE] = struct.pack("<Q", held.nbytes) + text
            file[at : at + 16] = segment_id
            if row >= self._used:
                self._used = row + 1
                file[: _HEAD.size] = _HEAD.pack(self._used)

    def let_go(self, segment_id: bytes) -> None:
        """Note that a segment is held here no more."""
        with self._lock:
            self._held.pop(segment_id, None)
            row = self._rows.pop(segment_id, None)
            if row is not None and self._file is not None:
                at = _HEAD.size + row * _ROW_SIZE
                self._file[at : at + 16] = _NONE
                self._unused.append(row)

    def bytes_of(self, segment_id: bytes) -> int:
        """Return how much memory a segment takes that is held here."""
        held = self._held.get(segment_id)
        return 0 if held is None else held.nbytes

    def rows(self) -> list[Holding]:
        """Return what the processes of the group hold on this host, each segment once."""
        with self._lock:
            found = dict(self._held)
        for other in self._others():
            for each in other:
                known = found.get(each.segment_id)
                if known is None or known.nbytes < each.nbytes:
                    found[each.segment_id] = each
        return list(found.values())

    def total(self) -> int:
        """Return how many bytes they hold together."""
        return sum(each.nbytes for each in self.rows())

    def _others(self) -> Iterator[list[Holding]]:
        if self._directory is None:
            return
        try:
            names = os.listdir(self._directory)
        except OSError:
            return
        for name in names:
            if name.endswith(self._suffix) and name != self._name:
                try:
                    yield _read(os.path.join(self._directory, name))
                except OSError:
                    pass  # removed meanwhile

    def close(self) -> None:
        """Remove the file: nothing is held here any more, or nothing that counts. Idempotent."""
        with self._lock:
            if self._file is not None and self._path is not None:
                try:
                    os.unlink(self._path)
                except OSError:
                    pass
            self._shut()

    def abandon(self) -> None:
        """Let go of the file in a forked child: it is the parent's."""
        self._lock = threading.RLock()
        self._shut()

    def _shut(self) -> None:
        file, self._file, self._path = self._file, None, None
        self._directory = None
        self._rows.clear()
        if file is not None:
            file.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _read(path: str) -> list[Holding]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # its process lives
        else:
            # Between making a file and locking it there is nothing in it yet: one of the right size has no owner any more.
            if os.fstat(fd).st_size == _SIZE:
                os.unlink(path)
            return []
        owner = os.path.basename(path).split("-")[1:2]  # as keys.accounts_path names it
        pid = int(owner[0]) if owner and owner[0].isdecimal() else 0
        found: list[Holding] = []
        if os.fstat(fd).st_size != _SIZE:
            return found  # it is being made
        with mmap.mmap(fd, _SIZE, prot=mmap.PROT_READ) as file:
            (used,) = _HEAD.unpack_from(file, 0)
            for at in range(_HEAD.size, _HEAD.size + min(used, _ROWS) * _ROW_SIZE, _ROW_SIZE):
                segment_id, nbytes = _ROW.unpack_from(file, at)
                if segment_id != _NONE:
                    texts = file[at + _ROW.size : at + _ROW_SIZE]
                    found.append(Holding(pid, segment_id, nbytes, _text(texts[:_TEXT]), _text(texts[_TEXT:])))
        return found
    finally:
        os.close(fd)


def _fitting(text: str) -> bytes:
    return text.encode()[:_TEXT].ljust(_TEXT, b"\0")


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="ignore")
