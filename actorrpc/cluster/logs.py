"""The output of processes: read from their pipes, marked, folded, and shown on the driver's own output.

One thread, ``actorrpc-logs``, reads all pipes. Each line is shown as ``(Counter pid=123) line``; a process may change its
label, here ``Counter``, by writing a line with the new label (:class:`Labels`). A line that another process has shown within the
last second is only counted, and shown once more with ``[repeated 7x across processes]``. The last lines that each process wrote
to its standard error are kept for its death report, and the last lines of all processes in a :class:`History`.

Other threads only append to ``_orders`` (a deque, whose operations are atomic) and wake the thread. So only the history has a
lock, and of this process only the logs' thread blocks if the terminal is stopped.
"""

from __future__ import annotations

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

__all__ = ["History", "Labels", "Logs", "Output", "pipes"]

_LABEL: Final = b"\x1eactorrpc label:"  # followed by the new label, up to the end of the line
_TAIL: Final = 20  # last lines of standard error that are kept for each process
_TAIL_LINE: Final = 500
_LINE: Final = 16 << 10  # greatest number of bytes of one line that are shown
_READ: Final = 1 << 16
HISTORY_BYTES: Final = 8 << 20
"""How much output of all processes together is kept: about this many bytes (each character counts as a byte)."""

_LINE_COST: Final = 100  # bytes of memory that a stored line takes besides its text
_FOLDS: Final = 2_000  # greatest number of lines that are remembered for folding
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
            # The stream is closed, or is an object of the program.
            except (OSError, ValueError, AttributeError):
                pass


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Output:
    """The two pipes of one process.

    Attributes:
        worker: the process's name in the group; empty if the process is not a worker.
        tail: the last lines of the process's standard error.
    """

    def __init__(self, label: str, pid: int, stdout: int, stderr: int, worker: str = "") -> None:
        self.label = label
        self.worker = worker
        self.pid = pid
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self.pipes = {stdout: _Pipe(self, False), stderr: _Pipe(self, True)}
        self.ending: Callable[[], None] = lambda: None
        self.until = float("inf")


class _Pipe:
    """One stream of a process, split into lines: ``rest`` is the incomplete line, of which ``cut`` bytes were discarded."""

    __slots__ = ("cut", "is_error", "label", "output", "rest")

    def __init__(self, output: Output, is_error: bool) -> None:
        self.output = output
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
    """A line that process ``pid`` has shown, how often other processes have written it since, and the ``last`` of them."""

    pid: int
    due: float
    last: int
    count: int = 0


class History:
    """The last lines of all processes, including ended ones, for later readers. Thread-safe.

    All lines together take about ``HISTORY_BYTES`` at most. When they take more, the oldest lines of the process with the most
    text are removed, so that a process that prints a lot does not displace the lines of others. ``_lock`` guards all attributes,
    and is a leaf.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[int, deque[tuple[int, float, str, bool, str]]] = {}  # by process id
        self._sizes: dict[int, int] = {}
        self._workers: dict[int, str] = {}
        self._size = 0
        self._next = 1

    def add(self, pid: int, is_error: bool, lines: list[tuple[str, str]], worker: str = "") -> None:
        """Store lines of a process, each with its label; ``worker``: its name in the group, empty if it is no worker."""
        now = time.time()
        with self._lock:
            kept = self._lines.setdefault(pid, deque())
            size = 0
            for label, line in lines:
                kept.append((self._next, now, label, is_error, line))
                self._next += 1
                size += len(line) + _LINE_COST
            self._sizes[pid] = self._sizes.get(pid, 0) + size
            self._workers[pid] = worker
            self._size += size
            while self._size > HISTORY_BYTES:
                self._drop()

    def _drop(self) -> None:
        """Remove the oldest lines of the process whose lines take the most memory. Under the lock."""
        pid = max(self._sizes, key=self._sizes.__getitem__)
        kept, goal = self._lines[pid], self._sizes[pid] - max(1, HISTORY_BYTES // 64)
        while kept and self._sizes[pid] > goal:
            freed = len(kept.popleft()[4]) + _LINE_COST
            self._sizes[pid] -= freed
            self._size -= freed
        if not kept:
            del self._lines[pid], self._sizes[pid], self._workers[pid]

    def workers(self) -> list[tuple[int, str]]:
        """Return the ids and names of the workers whose lines are kept, including ended workers."""
        with self._lock:
            return [(pid, name) for pid, name in self._workers.items() if name]

    def since(self, number: int, most: int, nbytes: int) -> tuple[list[list[Any]], int, bool]:
        """Return lines from a number on, in order: ``[number, time, pid, label, is_error, text]``.

        Args:
            number: the number of the first line; lines that were removed meanwhile are left out.
            most: greatest number of lines; ``nbytes``: approximately their greatest size.

        Returns:
            The lines, the number of the next line, and whether that line exists already.
        """
        with self._lock:
            found: list[Any] = sorted(
                [at, when, pid, label, is_error, text]
                for pid, lines in self._lines.items()
                for at, when, label, is_error, text in lines
                if at >= number
            )
            following = max(number, self._next)
        size = 0
        for place, line in enumerate(found):
            size += len(line[5]) + _LINE_COST
            if place and (place >= most or size > nbytes):
                return found[:place], found[place][0], True
        return found, following, False


class Logs:
    """Shows the output of processes. Thread-safe.

    Args:
        show: whether output is shown; in any case, lines are kept for the history and for death reports.
        fold_s: equal lines of several processes within this time, in seconds, are shown once.
    """

    def __init__(self, show: bool = True, *, fold_s: float = 1.0) -> None:
        self._show = show
        self._fold_s = fold_s
        self.history = History()
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

    def finish(self, output: Output, done: Callable[[], None]) -> None:
        """Call ``done()``, in the logs' thread, after the output of an ended process was read, or after 0.5 s."""

        def order() -> None:
            output.ending = done
            output.until = time.monotonic() + _REST_S
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
        """Close the descriptors where no logs' thread runs, such as in a forked child."""
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
                self._write(pipe, pipe.last())
            self._unfold(float("inf"))
            for output in self._ending:
                output.ending()
        finally:
            for fd in list(self._pipes):
                os.close(fd)
            self._pipes.clear()
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
        for fd, _ in self._epoll.poll(max(0.0, wake - now) if wake >= 0 else -1):
            if fd == self._bell:
                os.eventfd_read(self._bell)
            else:
                self._read(fd)
        # Run the orders after reading: if an order announces the end of a process, its last output was mostly read.
        while self._orders:
            self._orders.popleft()()
        self._see_to_ends()
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
            self._write(pipe, pipe.feed(data))
            return
        self._write(pipe, pipe.last())
        self._epoll.unregister(fd)
        del self._pipes[fd]
        del pipe.output.pipes[fd]
        os.close(fd)

    def _see_to_ends(self) -> None:
        now = time.monotonic()
        for output in list(self._ending):
            if output.pipes and now < output.until:
                continue
            for pipe in output.pipes.values():  # a child keeps the pipes open: show the incomplete line
                self._write(pipe, pipe.last())
            self._ending.remove(output)
            output.ending()

    def _write(self, pipe: _Pipe, lines: list[tuple[str, str]]) -> None:
        output = pipe.output
        if lines:
            self.history.add(output.pid, pipe.is_error, lines, output.worker)
        if pipe.is_error:
            output.tail.extend(
                line if len(line) <= _TAIL_LINE else f"{line[:_TAIL_LINE]} ..." for _, line in lines
            )
        if not self._show or not lines:
            return
        shown = []
        now = time.monotonic()
        for label, line in lines:
            if not line:
                continue
            key = (pipe.is_error, label, line)
            fold = self._folds.get(key)
            if fold is not None and now < fold.due:
                if fold.pid == output.pid:  # the same process has printed the line twice: show it twice
                    shown.append(_marked(label, output.pid, line))
                else:
                    fold.count += 1
                    fold.last = output.pid
                continue
            if fold is not None:
                del self._folds[key]  # insert it again at the end, so that the oldest come first
                if fold.count:
                    shown.append(_repeated(key, fold))
            self._folds[key] = _Fold(output.pid, now + self._fold_s, output.pid)
            shown.append(_marked(label, output.pid, line))
        self._emit(pipe.is_error, shown)

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
            # The stream is closed, has no reader, or is an object of the program that raises: the driver must not fail.
            pass


def _marked(label: str, pid: int, line: str) -> str:
    return f"({label} pid={pid}) {line}\n"


def _repeated(key: tuple[bool, str, str], fold: _Fold) -> str:
    _, label, line = key
    more = "" if fold.count == 1 else f" [repeated {fold.count}x across processes]"
    return _marked(label, fold.last, line + more)
