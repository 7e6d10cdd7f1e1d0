"""Accounts of the shared memory for objects on a host: each process has a file that lists the segments that the process uses.

The processes of a group read each other's files to sum up the memory. A segment that several processes use counts once. A process
holds a lock on its file while it lives. A file without a lock belongs to a dead process: the process that finds the file does not
count it, and removes it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass, replace
from typing import Final

from actorrpc import _time

__all__ = ["Holding", "ObjectAccounts", "amount"]

_TEXT: Final = 104
# Id of the segment, bytes, label, site. The first row of a file names no segment; its label is the worker's name.
_ROW: Final = struct.Struct(f"<16sQ{_TEXT}s{_TEXT}s")
_NONE: Final = bytes(16)
_SHOWN: Final = 4  # the most holders of a segment that a message names


def amount(nbytes: int) -> str:
    """Format a number of bytes."""
    return f"{nbytes / (1 << 20):.0f} MiB" if nbytes >= 1 << 20 else f"{nbytes} bytes"


@dataclass(frozen=True, slots=True)
class Holding:
    """A segment, and the workers that use it.

    Attributes:
        holders: the names and process ids of the workers.
        segment_id: identifies the segment and its current content.
        nbytes: the memory that the segment takes.
        label: describes the object in the segment; if there are several, the latest.
        site: the ``file:line`` where that object was made; may be empty.
    """

    holders: tuple[str, ...]
    segment_id: bytes
    nbytes: int
    label: str
    site: str

    def __str__(self) -> str:
        where = f" made at {self.site}" if self.site else ""
        more = f" and {len(self.holders) - _SHOWN} more" if len(self.holders) > _SHOWN else ""
        return (
            f"{amount(self.nbytes)} of {self.label}{where}, held by {', '.join(self.holders[:_SHOWN])}{more}"
        )


class ObjectAccounts:
    """The account file of one process, and access to the files of other processes. Thread-safe.

    ``_lock`` guards the table of rows and the file. It is re-entrant, and taken after the lock of the ObjectStore.

    A process locks its file before it writes to it. Other processes ignore an empty file. If they can lock a file with content,
    the process that wrote it has ended. The file is not mapped, because a write to a mapping causes a signal if the disk is full.

    Args:
        path: this process's file; None: use no files: this process and the others do not count each other's segments.
        suffix: the suffix of the group's files, which are in the same directory.
        worker: the name of this worker.
    """

    def __init__(self, path: str | None, suffix: str = "", worker: str = "") -> None:
        self._lock = _time.RLock()
        self._held: dict[bytes, tuple[int, Holding]] = {}  # (number of the row, segment)
        self._unused: list[int] = []  # rows
        self._worker = worker
        self._directory = None if path is None else os.path.dirname(path)
        self._suffix = suffix
        self._path = path
        self._fd = -1

    def hold(self, segment_id: bytes, nbytes: int, label: str, site: str) -> None:
        """Record that this process uses ``nbytes`` of a segment; call this again when the process uses more of the segment."""
        with self._lock:
            row, known = self._held.get(segment_id, (0, None))
            if known is not None:
                nbytes = max(nbytes, known.nbytes)
            else:
                row = self._unused.pop() if self._unused else 1 + len(self._held)
            holder = (_named(self._worker, os.getpid()),)
            self._held[segment_id] = row, Holding(holder, segment_id, nbytes, label, site)
            self._write(row, _ROW.pack(segment_id, nbytes, label.encode()[:_TEXT], site.encode()[:_TEXT]))

    def let_go(self, segment_id: bytes) -> None:
        """Record that this process no longer uses a segment."""
        with self._lock:
            row, _ = self._held.pop(segment_id, (0, None))
            if row:
                self._unused.append(row)
                self._write(row, _NONE)

    def _write(self, row: int, content: bytes) -> None:
        if self._path is None:
            return
        try:
            if self._fd < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o600)
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.pwrite(self._fd, _ROW.pack(_NONE, 0, self._worker.encode()[:_TEXT], b""), 0)
            os.pwrite(self._fd, content, row * _ROW.size)
        except OSError:  # disk full, or no descriptors: continue without a file
            self._remove()

    def own(self) -> list[Holding]:
        """Return the segments of this process."""
        with self._lock:
            return [holding for _, holding in self._held.values()]

    def rows(self) -> list[Holding]:
        """Return the segments of all processes of the group on this host, each segment once."""
        found = {each.segment_id: each for each in self.own()}
        for name in self._names():
            try:
                rows = _read(os.path.join(self._directory or "", name))
            except OSError:
                continue  # the file was removed meanwhile, or cannot be opened
            for each in rows:
                known = found.get(each.segment_id)
                if known is not None:
                    first, second = (known, each) if known.nbytes >= each.nbytes else (each, known)
                    each = replace(first, holders=first.holders + second.holders)
                found[each.segment_id] = each
        return list(found.values())

    def _names(self) -> list[str]:
        try:
            names = [] if self._directory is None else os.listdir(self._directory)
        except OSError:
            return []
        own = os.path.basename(self._path or "")
        return [name for name in names if name.endswith(self._suffix) and name != own]

    def total(self) -> int:
        """Return the bytes of all segments of the group on this host."""
        return sum(each.nbytes for each in self.rows())

    def close(self) -> None:
        """Remove the file, so that other processes no longer count this one. Idempotent."""
        with self._lock:
            self._directory = None
            self._remove()

    def abandon(self) -> None:
        """Close the parent's file in a forked child, without removing it."""
        self._lock = _time.RLock()
        self._path = self._directory = None
        self._remove()

    def _remove(self) -> None:
        path, self._path = self._path, None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            if path is not None:
                try:
                    os.unlink(path)
                except OSError:
                    pass
            os.close(fd)


def _read(path: str) -> list[Holding]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if not size:
            return []  # not locked yet
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            data = os.pread(fd, size, 0)  # the owner has the lock, so the owner lives
        else:
            os.unlink(path)
            return []
    finally:
        os.close(fd)
    data = data.ljust(-(-len(data) // _ROW.size) * _ROW.size, b"\0")
    owner, *rows = _ROW.iter_unpack(data)
    pid = os.path.basename(path).split("-")[1:2]  # keys.accounts_path has put the process id into the name
    holder = (_named(_text(owner[2]), int(pid[0]) if pid and pid[0].isdecimal() else 0),)
    return [
        Holding(holder, segment_id, nbytes, _text(label), _text(site))
        for segment_id, nbytes, label, site in rows
        if segment_id != _NONE
    ]


def _named(worker: str, pid: int) -> str:
    return f"{worker!r} (pid {pid})"


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="ignore")
