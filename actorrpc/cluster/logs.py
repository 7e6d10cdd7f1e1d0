"""The output of processes: read from their pipes, marked, folded, and shown on the driver's own output.

One thread, ``actorrpc-logs``, reads all pipes. Each line is shown as ``(Counter pid=123) line``; a process may change its
label, here ``Counter``, by writing a line with the new label (:class:`Labels`). A line that another process has shown within the
last second is only counted, and shown once more with ``[repeated 7x across processes]``. The last lines that each process wrote
to its standard error are kept for its death report, and the last lines of all processes in a :class:`History`. Workers that have
joined send their lines (:mod:`~actorrpc.cluster.forwarding`).

Other threads only append to ``_orders`` (a deque, whose operations are atomic) and wake the thread. So only the history has a
lock, and of this process only the logs' thread blocks if the terminal is stopped.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from actorrpc import _limits
from actorrpc._limits import start_thread
from actorrpc.config import Settings
from actorrpc.wire import keys

__all__ = ["LINE_COST", "History", "Labels", "LogFile", "Logs", "Output", "log_directory", "pipes"]

_LABEL: Final = b"\x1eactorrpc label:"  # followed by the new label, up to the end of the line
_TAIL: Final = 20  # last lines of standard error that are kept for each process
_TAIL_LINE: Final = 500
_LINE: Final = 16 << 10  # greatest number of bytes of one line that are shown
_READ: Final = 1 << 16
HISTORY_BYTES: Final = 8 << 20
"""How much output of all processes together is kept: about this many bytes (each character counts as a byte)."""

LINE_COST: Final = 100
"""Bytes of memory that a stored line takes besides its text."""

_FILE_BYTES: Final = 32 << 20  # a file of this size is renamed, and replaces the file that was renamed before
_FOLDS: Final = 2_000  # greatest number of lines that are remembered for folding
_COPY_S: Final = 2.0  # how long the launcher of an ended process may take to read its output
_LOOK_S: Final = 0.1
_REST_S: Final = 0.5  # how long pipes are read after their process has ended, if its children keep them open


def pipes() -> tuple[int, int, int, int]:
    """Return the ends of two pipes for the output of a process: for each pipe, the reading end first.

    Raises:
        OSError: the descriptors cannot be opened; no descriptor is left open.
    """
    first = os.pipe2(os.O_CLOEXEC)
    try:
        second = os.pipe2(os.O_CLOEXEC)
    except OSError:
        for fd in first:
            os.close(fd)
        raise
    _limits.make_room(second[1])  # raise the limit now: many processes may start before the first connects
    return *first, *second


class Labels:
    """Changes the label of this process's output. Must be created before the program can redirect the output."""

    def __init__(self) -> None:
        self._pipes = {fd: _identity(fd) for fd in (1, 2)}

    def change(self, label: str) -> None:
        """Show all later output under another label. Streams that the program has redirected are not changed."""
        data = _LABEL + label.encode("utf-8", "replace") + b"\n"
        for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
            try:
                stream.flush()
                if _identity(fd) == self._pipes[fd]:
                    os.write(fd, data)
            # The program has closed or replaced the stream.
            except (OSError, ValueError, AttributeError):
                pass


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Output:
    """The output of one process: the two pipes from which :class:`Logs` reads it, or none if the process sends its lines.

    Attributes:
        worker: the process's name in the group; empty if the process is not a worker.
        host: the name of the process's host; empty if it is the host of the logs.
        is_shown: whether its lines are shown, unless nothing is shown.
        batch: the number of the last batch of lines, if the process sends its lines.
        tail: the last lines of the process's standard error.

    Args:
        copies: two descriptors to which the bytes of the two streams are written as well.
    """

    def __init__(
        self,
        label: str,
        pid: int,
        stdout: int,
        stderr: int,
        worker: str = "",
        copies: tuple[int, int] = (-1, -1),
    ) -> None:
        self.label = label
        self.worker = worker
        self.pid = pid
        self.host = ""
        self.is_shown = True
        self.batch = 0
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self.pipes = {stdout: _Pipe(self, False, copies[0]), stderr: _Pipe(self, True, copies[1])}
        self.ending: Callable[[], None] = lambda: None
        self.until = self.copies_until = float("inf")

    @classmethod
    def far(cls, worker: str, pid: int, host: str, is_shown: bool) -> Output:
        """Return the output of a worker that sends its lines; it has no pipes here."""
        found = cls(worker, pid, -1, -1, worker)
        found.host, found.is_shown = host, is_shown
        found.pipes.clear()
        return found


class _Pipe:
    """One stream of a process, split into lines: ``rest`` is the incomplete line, of which ``cut`` bytes were discarded."""

    __slots__ = ("copy", "cut", "is_error", "label", "output", "rest")

    def __init__(self, output: Output, is_error: bool, copy: int) -> None:
        self.output = output
        self.copy = copy
        self.label = output.label
        self.is_error = is_error
        self.rest = b""
        self.cut = 0

    def feed(self, data: bytes) -> list[tuple[str, str]]:
        """Return the lines that are complete now, each with its label."""
        lines = (self.rest + data).split(b"\n")
        self.rest = lines.pop()
        whole = []
        begun = b""
        for line in lines:
            begun, found, label = (begun + line).partition(_LABEL)
            # A marker that changes the label may follow the beginning of a line. The line continues after the marker.
            if found:
                self.label = label.decode("utf-8", "replace")
                continue
            whole.append((self.label, _text(begun, self.cut)))
            begun, self.cut = b"", 0
        self.rest = begun + self.rest
        if len(self.rest) > _LINE:
            # A progress bar overwrites its line repeatedly: keep only the text that would be visible.
            self.rest = self.rest[self.rest.rfind(b"\r") + 1 :]
            self.cut += max(0, len(self.rest) - _LINE)
            self.rest = self.rest[:_LINE]
        return whole

    def last(self) -> list[tuple[str, str]]:
        """Return the incomplete last line, at the end of the stream, with its label."""
        rest, self.rest = self.rest, b""
        return [(self.label, _text(rest, self.cut))] if rest else []


def _text(line: bytes, cut: int) -> str:
    line = line.rstrip(b"\r")
    line = line[line.rfind(b"\r") + 1 :]
    if len(line) > _LINE:
        cut += len(line) - _LINE
        line = line[:_LINE]
    text = line.decode("utf-8", "replace")
    return f"{text} ... [{cut} bytes more]" if cut else text


@dataclass(slots=True)
class _Fold:
    """A line of ``output`` that was shown. Other processes have written it ``count`` times since; the latest is ``last``."""

    output: Output
    due: float
    last: Output
    count: int = 0


class History:
    """The last lines of all processes, including ended ones, for later readers. Thread-safe.

    All lines together take about ``HISTORY_BYTES`` at most. When they take more, the oldest lines of the process with the most
    text are removed, so that a process that prints a lot does not displace the lines of others. ``_lock`` guards all attributes,
    and is a leaf.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By host, worker and process id.
        self._lines: dict[tuple[str, str, int], deque[tuple[int, float, str, bool, str]]] = {}
        self._sizes: dict[tuple[str, str, int], int] = {}
        self._size = 0
        self._next = 1

    def add(
        self, pid: int, is_error: bool, lines: list[tuple[str, str]], worker: str = "", host: str = ""
    ) -> None:
        """Store lines of a process, each with its label; ``worker`` and ``host`` are as in :class:`Output`."""
        now, key = time.time(), (host, worker, pid)
        with self._lock:
            kept = self._lines.setdefault(key, deque())
            size = 0
            for label, line in lines:
                kept.append((self._next, now, label, is_error, line))
                self._next += 1
                size += len(line) + LINE_COST
            self._sizes[key] = self._sizes.get(key, 0) + size
            self._size += size
            while self._size > HISTORY_BYTES:
                self._drop()

    def _drop(self) -> None:
        """Remove the oldest lines of the process whose lines take the most memory. Under the lock."""
        key = max(self._sizes, key=self._sizes.__getitem__)
        kept, goal = self._lines[key], self._sizes[key] - max(1, HISTORY_BYTES // 64)
        while kept and self._sizes[key] > goal:
            freed = len(kept.popleft()[4]) + LINE_COST
            self._sizes[key] -= freed
            self._size -= freed
        if not kept:
            del self._lines[key], self._sizes[key]

    def workers(self) -> list[tuple[int, str]]:
        """Return the ids and names of the workers whose lines are kept, including ended workers."""
        with self._lock:
            return [(pid, name) for _, name, pid in self._lines if name]

    def since(self, number: int, most: int, nbytes: int) -> tuple[list[list[Any]], int, bool]:
        """Return lines from a number on, in order: ``[number, time, pid, label, is_error, text, worker, host]``.

        Args:
            number: the number of the first line; lines that were removed meanwhile are left out.
            most: greatest number of lines; ``nbytes``: approximately their greatest size.

        Returns:
            The lines, the number of the next line, and whether that line exists already.
        """
        with self._lock:
            found: list[Any] = sorted(
                [at, when, pid, label, is_error, text, worker, host]
                for (host, worker, pid), lines in self._lines.items()
                for at, when, label, is_error, text in lines
                if at >= number
            )
            following = max(number, self._next)
        size = 0
        for place, line in enumerate(found):
            size += len(line[5]) + LINE_COST
            if place and (place >= most or size > nbytes):
                return found[:place], found[place][0], True
        return found, following, False


def log_directory(settings: Settings) -> str:
    """Return the directory of the files with output: ``log_dir``, or ``actorrpc`` in the user's directory for such files."""
    if settings.log_dir:
        return os.path.abspath(settings.log_dir)
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    if os.path.isabs(base) and os.access(os.path.expanduser("~"), os.W_OK):
        return os.path.join(base, "actorrpc")
    return os.path.join(keys.runtime_directory(), "logs")


class LogFile:
    """The file with the output of a host's processes. Several processes may append to it; each uses its own object.

    A file that has reached ``most`` bytes is renamed to ``NAME.1``, and replaces the previous ``NAME.1``; a new file is begun.
    Lines that cannot be written, for example because the disk is full, are missing in the file; no error is raised. Not
    thread-safe.

    Attributes:
        path: the path of the file.
    """

    def __init__(self, directory: str, host: str, most: int = _FILE_BYTES) -> None:
        self.path = self.path_in(directory, host)
        self._most = most
        self._fd = -1

    @staticmethod
    def path_in(directory: str, host: str) -> str:
        """Return the path of the file of a host."""
        return os.path.join(directory, f"{host.replace('/', '_') or 'host'}.log")

    def add(self, output: Output, lines: list[tuple[str, str]]) -> None:
        """Append lines, with time, label and process id."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        data = "".join(f"{now} ({label} pid={output.pid}) {text}\n" for label, text in lines)
        try:
            self._open()
            os.write(self._fd, data.encode("utf-8", "replace"))
        except OSError:
            pass  # the disk is full, or the directory is not writable; the caller still shows or sends the lines

    def _open(self) -> None:
        """Open the file, again if another process has renamed it; rename it if it is full."""
        if self._fd >= 0 and self._is_current() and os.fstat(self._fd).st_size < self._most:
            return
        if self._fd < 0:
            os.makedirs(os.path.dirname(self.path), 0o700, exist_ok=True)
        elif self._is_current():
            fcntl.flock(self._fd, fcntl.LOCK_EX)  # of several processes, the first renames the file
            if self._is_current():
                os.replace(self.path, f"{self.path}.1")
        before, self._fd = (
            self._fd,
            os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600),
        )
        if before >= 0:
            os.close(before)

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except OSError:
            return False

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Logs:
    """Shows the output of processes. Thread-safe.

    Args:
        show: whether output is shown; in any case, lines are kept for the history and for death reports.
        fold_s: equal lines of several processes within this time, in seconds, are shown once.
        keep: called with a process, whether the lines were written to standard error, and the lines with their labels; by
            default, the lines are added to the history.
        file: the file to which lines of the processes of this host are appended.
    """

    def __init__(
        self,
        show: bool = True,
        *,
        fold_s: float = 1.0,
        keep: Callable[[Output, bool, list[tuple[str, str]]], None] | None = None,
        file: LogFile | None = None,
    ) -> None:
        self._show = show
        self._fold_s = fold_s
        self.history = History()
        self._keep = keep or self._remember
        self.file = file
        self._orders: deque[Callable[[], None]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)
        self._pipes: dict[int, _Pipe] = {}
        self._ending: list[Output] = []
        self._folds: dict[tuple[bool, str, str], _Fold] = {}
        self._closing = False
        self._closed = False
        self._until = float("inf")
        self._thread = threading.Thread(target=self._run, name="actorrpc-logs", daemon=True)

    def start(self) -> None:
        """Start the thread.

        Raises:
            LimitError: the system cannot start the thread.
        """
        start_thread(self._thread)

    def add(self, output: Output) -> None:
        """Read the pipes of ``output`` from now on. The logs' thread closes them at their end."""

        def order() -> None:
            for fd, pipe in output.pipes.items():
                os.set_blocking(fd, False)
                self._pipes[fd] = pipe
                self._epoll.register(fd, select.EPOLLIN)

        self._order(order)

    def receive(self, output: Output, lines: list[tuple[bool, str]], done: Callable[[], None]) -> None:
        """Add lines that a worker has sent, each with whether it was written to standard error; then call ``done()``.

        Runs on the logs' thread. While the terminal is stopped, that thread is blocked, and the sender waits for ``done()``.
        """

        def order() -> None:
            for is_error, same in itertools.groupby(lines, lambda line: line[0]):
                self._write(output, is_error, [(output.label, text) for _, text in same])
            done()

        self._order(order)

    def _remember(self, output: Output, is_error: bool, lines: list[tuple[str, str]]) -> None:
        self.history.add(output.pid, is_error, lines, output.worker, output.host)

    def finish(self, output: Output, done: Callable[[], None]) -> None:
        """Call ``done()``, in the logs' thread, after the output of an ended process was read, or after 0.5 s."""
        output.copies_until = time.monotonic() + _COPY_S

        def order() -> None:
            output.ending = done
            output.until = time.monotonic() + _REST_S
            if output not in self._ending:
                self._ending.append(output)

        self._order(order)

    def close(self, timeout: float = 2.0) -> None:
        """Show all remaining output, and end the thread; wait at most ``timeout`` seconds for it. Idempotent."""
        if self._closed:
            return
        if self._thread.ident is None:  # start() was not called or failed: no thread closes the descriptors
            self.abandon()
            return

        def order() -> None:
            self._closing = True
            self._until = time.monotonic() + _REST_S

        self._order(order)
        self._thread.join(timeout)
        self._closed = True

    def abandon(self) -> None:
        """Close the descriptors in a process in which the logs' thread does not run, such as a forked child."""
        self._closed = True
        for fd in [*self._pipes, self._bell]:
            try:
                os.close(fd)
            except OSError:
                pass
        self._epoll.close()

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        try:
            os.eventfd_write(self._bell, 1)
        except OSError:  # closed
            pass

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing or (self._pipes and time.monotonic() < self._until):
                self._turn()
            for pipe in list(self._pipes.values()):
                self._write(pipe.output, pipe.is_error, pipe.last())
            self._unfold(float("inf"))
            for output in self._ending:
                output.ending()
        finally:
            for fd in list(self._pipes):
                os.close(fd)
            self._pipes.clear()
            if self.file is not None:
                self.file.close()
            self._epoll.close()
            bell, self._bell = self._bell, -1
            os.close(bell)

    def _turn(self) -> None:
        now = time.monotonic()
        wake = min(
            [fold.due for fold in self._folds.values() if fold.count]
            + [output.until for output in self._ending]
            + ([self._until] if self._closing else []),
            default=-1.0,
        )
        for fd, _ in self._epoll.poll(max(0.0, wake - now) if 0 <= wake < float("inf") else -1):
            if fd == self._bell:
                os.eventfd_read(self._bell)
            else:
                self._read(fd)
        # Run the orders after reading: if an order follows the end of a process, its last output was probably read.
        while self._orders:
            self._orders.popleft()()
        self._finish_ended()
        self._unfold(time.monotonic())

    def _read(self, fd: int) -> None:
        pipe = self._pipes[fd]
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._copy(pipe, data)
            self._write(pipe.output, pipe.is_error, pipe.feed(data))
            return
        self._write(pipe.output, pipe.is_error, pipe.last())
        self._epoll.unregister(fd)
        del self._pipes[fd]
        del pipe.output.pipes[fd]
        os.close(fd)

    def _finish_ended(self) -> None:
        now = time.monotonic()
        for output in list(self._ending):
            if output.pipes and now < output.until:
                continue
            # A child of the ended process keeps the pipes open, so their ends do not come: show the incomplete lines now.
            for pipe in output.pipes.values():
                self._write(pipe.output, pipe.is_error, pipe.last())
            self._ending.remove(output)
            output.ending()

    @staticmethod
    def _copy(pipe: _Pipe, data: bytes) -> None:
        """Write the bytes to the stream that the process had before; give up 2 s after the end of the process."""
        while data and pipe.copy >= 0:
            try:
                if select.select((), (pipe.copy,), (), _LOOK_S)[1]:
                    # A pipe that is writable takes so many bytes without blocking.
                    data = data[os.write(pipe.copy, data[: select.PIPE_BUF]) :]
                elif time.monotonic() > pipe.output.copies_until:
                    pipe.copy = -1
            except BlockingIOError:
                continue
            except OSError:  # the stream is closed, or has no reader
                pipe.copy = -1

    def _write(self, output: Output, is_error: bool, lines: list[tuple[str, str]]) -> None:
        if lines:
            self._keep(output, is_error, lines)
            if self.file is not None and not output.host:
                self.file.add(output, lines)
        if is_error:
            output.tail.extend(
                line if len(line) <= _TAIL_LINE else f"{line[:_TAIL_LINE]} ..." for _, line in lines
            )
        if not self._show or not output.is_shown or not lines:
            return
        shown = []
        now = time.monotonic()
        for label, line in lines:
            if not line:
                continue
            key = (is_error, label, line)
            fold = self._folds.get(key)
            if fold is not None and now < fold.due:
                if fold.output is output:  # the same process has printed the line twice: show it twice
                    shown.append(_marked(label, output, line))
                else:
                    fold.count += 1
                    fold.last = output
                continue
            if fold is not None:
                del self._folds[key]  # the new entry is added at the end, so the dict is ordered by age
                if fold.count:
                    shown.append(_repeated(key, fold))
            self._folds[key] = _Fold(output, now + self._fold_s, output)
            shown.append(_marked(label, output, line))
        self._emit(is_error, shown)

    def _unfold(self, now: float) -> None:
        """Show how often lines were repeated, for the lines that were first shown more than ``fold_s`` ago.

        If more than ``_FOLDS`` lines are remembered, also for the oldest of the others.
        """
        shown: dict[bool, list[str]] = {}
        for key, fold in list(self._folds.items()):
            if fold.due > now and len(self._folds) <= _FOLDS:
                break
            del self._folds[key]
            if fold.count:
                shown.setdefault(key[0], []).append(_repeated(key, fold))
        for is_error, lines in shown.items():
            self._emit(is_error, lines)

    def _emit(self, is_error: bool, lines: list[str]) -> None:
        if not lines:
            return
        stream: Any = sys.stderr if is_error else sys.stdout
        try:
            stream.write("".join(lines))
            stream.flush()
        except BaseException:
            # The stream is closed or has no reader, or the program's own stream object has raised: the driver must not fail.
            pass


def _marked(label: str, output: Output, line: str) -> str:
    host = f", host={output.host}" if output.host else ""
    return f"({label} pid={output.pid}{host}) {line}\n"


def _repeated(key: tuple[bool, str, str], fold: _Fold) -> str:
    _, label, line = key
    more = "" if fold.count == 1 else f" [repeated {fold.count}x across processes]"
    return _marked(label, fold.last, line + more)
