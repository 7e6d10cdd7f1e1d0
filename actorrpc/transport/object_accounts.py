"""Who holds how much of a host's memory for objects: each process writes what it holds into a file that all of its group read.

A segment counts once, however many hold it, and as long as any process does. A file whose process is gone, which the lock on it
tells, does not count, and the process that finds it removes it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from actorrpc import _time

__all__ = ["Holding", "ObjectAccounts", "amount"]

_TEXT: Final = 104
_ROW: Final = struct.Struct(f"<16sQ{_TEXT}s{_TEXT}s")  # the segment's id and bytes, its label, its site
_NONE: Final = bytes(16)
_SHOWN: Final = 4  # holders of one segment
_OWNER: Final = b"\xff" * 16  # the first row of a file: whose it is stands where others have their label


def amount(nbytes: int) -> str:
    """Return a number of bytes in words."""
    return f"{nbytes / (1 << 20):.0f} MiB" if nbytes >= 1 << 20 else f"{nbytes} bytes"


@dataclass(frozen=True, slots=True)
class Holding:
    """A segment that workers hold.

    Attributes:
        holders: who.
        segment_id: names the segment's content.
        nbytes: how much memory it takes.
        label: what it is, in words; of several objects, the latest.
        site: where that was made, as ``file:line``; may be empty.
    """

    holders: tuple[str, ...]
    segment_id: bytes
    nbytes: int
    label: str
    site: str

    def __str__(self) -> str:
        where = f" made at {self.site}" if self.site else ""
        whose = ", ".join(self.holders[:_SHOWN])
        more = f" and {len(self.holders) - _SHOWN} more" if len(self.holders) > _SHOWN else ""
        return f"{amount(self.nbytes)} of {self.label}{where}, held by {whose}{more}"


class ObjectAccounts:
    """The accounts of one process, and its look at those of the others.

    ``_lock`` guards the table of rows and the file; re-entrant, as ``ObjectStore._lock``, which is taken first where both are.

    The file is empty until its owner has locked it: others lock only what is not, and learn by that whether the owner lives.
    It is read and written, not mapped: on a full disk that is an error, not a signal.

    Args:
        path: this process's file; None keeps the accounts of this process alone.
        suffix: how the files of the group end, which lie beside it.
        worker: the name of this worker.
    """

    def __init__(self, path: str | None, suffix: str = "", worker: str = "") -> None:
        self._lock = _time.RLock()
        self._held: dict[bytes, Holding] = {}
        self._rows: dict[bytes, int] = {}
        self._unused: list[int] = []
        self._row_count = 1
        self._worker = worker
        self._directory = None if path is None else os.path.dirname(path)
        self._name = "" if path is None else os.path.basename(path)
        self._suffix = suffix
        self._path = path
        self._fd = -1

    def hold(self, segment_id: bytes, nbytes: int, label: str, site: str) -> None:
        """Note that a segment is held here, of so many bytes; again where more of it is used."""
        with self._lock:
            known = self._held.get(segment_id)
            most = max(nbytes, known.nbytes if known else 0)
            held = Holding((_named(self._worker, os.getpid()),), segment_id, most, label, site)
            self._held[segment_id] = held
            row = self._rows.get(segment_id)
            if row is None:
                row = self._unused.pop() if self._unused else self._row_count
                self._row_count = max(self._row_count, row + 1)
                self._rows[segment_id] = row
            texts = [text.encode()[:_TEXT] for text in (label, site)]
            self._write(row, _ROW.pack(segment_id, held.nbytes, *texts))

    def let_go(self, segment_id: bytes) -> None:
        """Note that a segment is held here no more."""
        with self._lock:
            self._held.pop(segment_id, None)
            row = self._rows.pop(segment_id, None)
            if row is not None:
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
                os.pwrite(self._fd, _ROW.pack(_OWNER, 0, self._worker.encode()[:_TEXT], b""), 0)
            os.pwrite(self._fd, content, row * _ROW.size)
        except OSError:  # no disk, no descriptors: others do not count this process
            self._remove()

    def own(self) -> list[Holding]:
        """Return what is held here."""
        with self._lock:
            return list(self._held.values())

    def rows(self) -> list[Holding]:
        """Return what the processes of the group hold on this host, each segment once, as who has written it says."""
        with self._lock:
            found = dict(self._held)
        for other in self._others():
            for each in other:
                known = found.get(each.segment_id)
                if known is not None:
                    first, second = (known, each) if known.nbytes >= each.nbytes else (each, known)
                    each = replace(first, holders=first.holders + second.holders)
                found[each.segment_id] = each
        return list(found.values())

    def total(self) -> int:
        """Return how many bytes they hold together."""
        with self._lock:
            found = {segment_id: each.nbytes for segment_id, each in self._held.items()}
        for other in self._others():
            for each in other:
                found[each.segment_id] = max(found.get(each.segment_id, 0), each.nbytes)
        return sum(found.values())

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
                    pass  # removed meanwhile, or no file

    def close(self) -> None:
        """Remove the file: nothing is held here any more, or nothing that counts. Idempotent."""
        with self._lock:
            self._directory = None
            self._remove()

    def abandon(self) -> None:
        """Let go of the file in a forked child: it is the parent's."""
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
            pass  # its process lives
        else:
            os.unlink(path)
            return []
        owner = os.path.basename(path).split("-")[1:2]  # as keys.accounts_path names it
        pid = int(owner[0]) if owner and owner[0].isdecimal() else 0
        data = os.pread(fd, size, 0)
    finally:
        os.close(fd)
    data = data.ljust(-(-len(data) // _ROW.size) * _ROW.size, b"\0")
    rows = list(_ROW.iter_unpack(data))
    worker = next((_text(label) for segment_id, _, label, _ in rows if segment_id == _OWNER), "")
    holder = (_named(worker, pid),)
    return [
        Holding(holder, segment_id, nbytes, _text(label), _text(site))
        for segment_id, nbytes, label, site in rows
        if segment_id not in (_NONE, _OWNER)
    ]


def _named(worker: str, pid: int) -> str:
    return f"{worker!r} (pid {pid})"


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="ignore")
