"""Forwards the output of a worker that has joined to the driver, and keeps it in a file of the host.

``python -m actorrpc.worker`` forks a *forwarder* before it joins. When it has joined, its standard output and standard error
become pipes, which the forwarder reads with the class that reads the pipes of the driver's own processes
(:class:`~actorrpc.cluster.logs.Logs`). The forwarder is a separate process, so it still reads the last lines of a worker that was
killed. It writes the lines to the streams that the worker had before and to the file, and sends them to the driver as a visitor.

Three threads run in the forwarder. The logs' thread reads the pipes and puts the lines into a queue. It never waits for the
driver: if the queue is full, it drops the oldest lines, and counts them. The main thread takes batches from the queue, at most
``log_rate`` bytes a second, and sends each until the driver has acknowledged it; the driver discards batches that arrive twice.
The third thread waits for the end of the worker, and for its message that it has joined another driver.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NoReturn

import msgpack

from actorrpc._limits import start_thread
from actorrpc.cluster.logs import LINE_COST, LogFile, Logs, Output, log_directory, pipes
from actorrpc.config import Settings
from actorrpc.errors import ConfigError, RpcError
from actorrpc.transport.visit import Target, Visitor
from actorrpc.wire.identity import WorkerRecord
from actorrpc.wire.keys import Key

__all__ = [
    "DRIVER",
    "KEPT",
    "PRINTED",
    "Batch",
    "begin",
    "enable",
    "own_place",
    "place_of",
    "say",
    "set_own_place",
    "start",
]

PRINTED: Final = "printed"
"""The notice with a batch of lines; the driver answers with KEPT and the number of the batch."""

KEPT: Final = "kept"

DRIVER: Final = "the driver"

_BUFFER: Final = 4 << 20  # the most bytes of lines that wait for the driver
_BATCH: Final = 64 << 10
_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 10.0
_AGAIN_S: Final = 0.5
_IDLE_S: Final = 5.0  # the connection is closed after so long without lines
_FLUSH_S: Final = 3.0  # how long the forwarder tries to send the last lines of an ended worker
_END_S: Final = 4.0  # how long an ending worker waits for its forwarder
_OF_TLS: Final = ("tls", "tls_cert", "tls_key", "tls_ca", "tls_min_version")
_NOT_FORWARDED: Final = "the output of this worker is not forwarded to the driver"
_SIZE: Final = struct.Struct("!I")


class Batch:
    """Lines of a worker that arrive together: ``[is_error, text]``.

    Attributes:
        number: increases by 1 with each batch of the worker.
        is_last: whether the worker has ended, and no more lines follow.
    """

    def __init__(
        self, worker: str, pid: int, host: str, number: int, lines: Sequence[Any], is_last: bool
    ) -> None:
        self.worker, self.pid, self.host, self.number = worker, pid, host, number
        self.lines: list[tuple[bool, str]] = [(is_error, text) for is_error, text in lines]
        self.is_last = is_last

    def to_bytes(self) -> bytes:
        row = [self.worker, self.pid, self.host, self.number, self.lines, self.is_last]
        packed: bytes = msgpack.packb(row, unicode_errors="replace")
        return packed

    @classmethod
    def from_bytes(cls, body: bytes) -> Batch:
        """Read a batch.

        Raises:
            ValueError: the bytes are no batch.
        """
        row = msgpack.unpackb(body, unicode_errors="replace")
        kinds = [str, int, str, int, list, bool]
        if not isinstance(row, list) or [type(each) for each in row] != kinds:
            raise ValueError("no batch of lines")
        if not all(
            isinstance(each, list) and [type(part) for part in each] == [bool, str] for each in row[4]
        ):
            raise ValueError("no lines")
        return cls(*row)


class _Queue:
    """The lines that are not in a batch yet. ``_lock`` guards all attributes; no code that takes another lock runs under it."""

    def __init__(self, where: str, rate: int) -> None:
        self._where, self._rate = where, rate
        self._lock = threading.Lock()
        self._lines: deque[tuple[bool, str]] = deque()
        self._size = self._dropped = self._dropped_bytes = 0
        self.wake = threading.Event()

    def add(self, _output: Output, is_error: bool, lines: list[tuple[str, str]]) -> None:
        """Append lines; drop the oldest if the queue is full."""
        with self._lock:
            for _, text in lines:
                self._lines.append((is_error, text))
                self._size += len(text) + LINE_COST
            while self._size > _BUFFER:
                _, text = self._lines.popleft()
                self._size -= len(text) + LINE_COST
                self._dropped += 1
                self._dropped_bytes += len(text)
        self.wake.set()

    def take(self) -> list[tuple[bool, str]]:
        """Remove and return the first lines, preceded by a line about dropped lines; empty if there is none."""
        found: list[tuple[bool, str]] = []
        size = 0
        with self._lock:
            if self._dropped:
                text = (
                    f"[{self._dropped} lines ({self._dropped_bytes} bytes) were dropped here: they came faster than log_rate="
                    f"{self._rate} bytes a second, or than the driver has taken them. They are {self._where}]"
                )
                found.append((True, text))
                self._dropped = self._dropped_bytes = 0
            while self._lines and size < _BATCH:
                is_error, text = self._lines.popleft()
                size += len(text) + LINE_COST
                found.append((is_error, text))
            self._size -= size
            if not self._lines:
                self.wake.clear()
        return found


# -- in the worker ---------------------------------------------------------------------------------------------


class _Forwarder:
    """The worker's end: its forwarder process, and the streams."""

    def __init__(self, pid: int, control: socket.socket, out: int, err: int) -> None:
        self._owner = os.getpid()
        self._pid = pid
        self._control = control
        self._writers: tuple[int, ...] = (out, err)
        self._saved: tuple[int, ...] = ()
        self._lock = threading.Lock()  # guards _saved: the streams are restored once

    @property
    def launchers_stderr(self) -> int:
        """A descriptor of the standard error that the worker had before."""
        return self._saved[1] if self._saved else 2

    def begin(self, about: dict[str, Any]) -> None:
        """Let the forwarder send to this driver. At the first call, replace the streams by pipes."""
        body = msgpack.packb(about)
        self._control.sendall(_SIZE.pack(len(body)) + body)
        if not self._writers:
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._saved = os.dup(1), os.dup(2)
        for fd, writer in enumerate(self._writers, 1):
            os.dup2(writer, fd)
            os.close(writer)
        self._writers = ()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError):  # the program has replaced it
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        start_thread(threading.Thread(target=self._watch, name="actorrpc-output", daemon=True))

    def _watch(self) -> None:
        """Restore the streams if the forwarder ends first: without a reader, each print would raise an error."""
        self._wait(None)
        self._restore()

    def _wait(self, timeout: float | None) -> None:
        with contextlib.suppress(OSError):
            child = os.pidfd_open(self._pid)
            try:
                poller = select.poll()
                poller.register(child, select.POLLIN)
                poller.poll(None if timeout is None else 1000 * timeout)
            finally:
                os.close(child)

    def _restore(self) -> None:
        with self._lock:
            saved, self._saved = self._saved, ()
            for fd, before in enumerate(saved, 1):
                os.dup2(before, fd)
                os.close(before)

    def finish(self) -> None:
        """Restore the streams, and wait until the forwarder has sent the last lines, or for 4 s."""
        if os.getpid() != self._owner:  # a forked child runs the exit functions of its parent
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the process ends within _END_S in any case
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self._restore()
        for fd in self._writers:
            os.close(fd)
        self._writers = ()
        self._control.close()
        self._wait(_END_S)
        with contextlib.suppress(OSError):
            os.waitpid(self._pid, os.WNOHANG)


_enabled = False
_forwarder: _Forwarder | None = None
_place = ""


def set_own_place(text: str) -> None:
    """Set the text about where the output of this process goes, which ``actorrpc logs`` shows."""
    global _place
    _place = text


def place_of(settings: Settings, host: str) -> str:
    """Return the text for output that goes to the driver and to the file of ``host``."""
    return f"{DRIVER} and {LogFile.path_in(log_directory(settings), host)}"


def own_place() -> str:
    """Return where the output of this process goes: "the driver", "the driver and FILE", or the targets of its streams."""
    return _place or " and ".join(dict.fromkeys(map(_target, (1, 2))))


def _target(fd: int) -> str:
    try:
        found = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "no open stream"
    return "a pipe of the process that started it" if found.startswith(("pipe:", "socket:")) else found


def enable() -> None:
    """Allow :func:`start` in this process and its forks: the process runs no other program than a worker.

    Opens /dev/null as each standard stream that the launcher has closed: otherwise, other descriptors would get its number.
    """
    global _enabled
    _enabled = True
    for fd in range(3):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            continue
        os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
        os.set_inheritable(fd, True)
    for fd, name in enumerate(("stdout", "stderr"), 1):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w", closefd=False))


def start() -> None:
    """Fork the forwarder of this process, unless ``ACTORRPC_LOG_FORWARD=0``. Must be called before other threads are started."""
    global _forwarder
    if not _enabled:
        return
    try:
        if not Settings.from_environment().log_forward:
            return
    except ConfigError:  # joining will raise it
        return
    try:
        stdout, out, stderr, err = pipes()
        control, own = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other threads: C threads, which hold no locks
            pid = os.fork()
    except OSError as error:
        say(f"{_NOT_FORWARDED}: {error}")
        return
    if pid == 0:
        for fd in (out, err, control.detach()):
            os.close(fd)
        _run(own, stdout, stderr)
    for fd in (stdout, stderr, own.detach()):
        os.close(fd)
    _forwarder = _Forwarder(pid, control, out, err)
    atexit.register(
        _forwarder.finish
    )  # functions that are registered later are called earlier, so they may print


def begin(worker: str, driver: WorkerRecord, key: Key, settings: Settings) -> bool:
    """Forward the output of this worker from now on; return False if it has no forwarder, or if the driver keeps no output."""
    if _forwarder is None or not settings.log_forward:
        return False
    host = socket.gethostname()
    try:
        about = {
            "worker": worker,
            "pid": os.getpid(),
            "host": host,
            "driver": driver.to_bytes(),
            "key": key.reveal(),
            "directory": log_directory(settings),
            "rate": settings.log_rate,
            "settings": {name: getattr(settings, name) for name in _OF_TLS},
        }
        _forwarder.begin(about)
    except (ConfigError, OSError) as error:  # there is no directory, or the forwarder was killed
        say(f"{_NOT_FORWARDED}: {error}")
        return False
    set_own_place(place_of(settings, host))
    return True


def say(text: str) -> None:
    """Write a line for the launcher of this worker to its standard error; it is not forwarded."""
    fd = 2 if _forwarder is None else _forwarder.launchers_stderr
    with contextlib.suppress(OSError):
        os.write(fd, f"{text}\n".encode())


# -- the forwarder ---------------------------------------------------------------------------------------------


def _run(control: socket.socket, stdout: int, stderr: int) -> NoReturn:
    """Run the forwarder, and end the process."""
    try:
        gc.freeze()
        # The forwarder ends after the worker, so signals to the worker's process group or terminal must not end it.
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTOU):
            signal.signal(number, signal.SIG_IGN)
        parent = os.pidfd_open(os.getppid())
        about = _receive(control)
        if about is not None:
            _forward(about, parent, control, stdout, stderr)
    except Exception as error:
        with contextlib.suppress(OSError):
            os.write(2, f"the forwarder of this worker's output has failed: {error!r}\n".encode())
    finally:
        os._exit(0)


def _receive(control: socket.socket) -> dict[str, Any] | None:
    """Receive where to send the output from now on; None: the worker ends."""
    head = control.recv(_SIZE.size, socket.MSG_WAITALL)
    if len(head) < _SIZE.size:
        return None
    about: dict[str, Any] = msgpack.unpackb(control.recv(_SIZE.unpack(head)[0], socket.MSG_WAITALL))
    return about


def _forward(about: dict[str, Any], parent: int, control: socket.socket, stdout: int, stderr: int) -> None:
    """Forward until the streams end, or shortly after the worker has closed ``control`` or its process has ended.

    Args:
        parent: a descriptor of the worker's process.
    """
    file = LogFile(about["directory"], about["host"])
    queue = _Queue(f"in {file.path} on host {about['host']!r}", about["rate"])
    logs = Logs(False, keep=queue.add, file=file)
    output = Output(about["worker"], about["pid"], stdout, stderr, about["worker"], copies=(1, 2))
    logs.start()
    logs.add(output)
    ended = threading.Event()
    sender = _Sender(about, queue, ended)

    def watch() -> None:
        poller = select.poll()
        poller.register(parent, select.POLLIN)
        poller.register(control, select.POLLIN)
        while all(fd != parent for fd, _ in poller.poll()):
            later = _receive(control)
            if later is None:
                break
            sender.redirect(later)  # the worker has joined again
        logs.finish(output, all_read)  # children of the worker may keep the streams open

    def all_read() -> None:
        if ended.is_set():
            return
        for fd in (0, 1, 2):  # the launcher may wait for the end of these streams
            os.close(fd)
        ended.set()
        queue.wake.set()

    logs.on_end(output, all_read)
    threading.Thread(target=watch, daemon=True).start()
    sender.run()


class _Sender:
    """Sends the queue to the driver. Runs on the main thread of the forwarder."""

    def __init__(self, about: dict[str, Any], queue: _Queue, ended: threading.Event) -> None:
        self.redirect(about)
        self._batch = partial(Batch, about["worker"], about["pid"], about["host"])
        self._rate = about["rate"]
        self._queue = queue
        self._ended = ended
        self._until = float("inf")  # when to give up, after the end of the worker
        self._visitor: Visitor | None = None
        self._visited = self._target  # the target of the visitor

    def redirect(self, about: dict[str, Any]) -> None:
        """Send to this driver from now on. Any thread may call this."""
        self._target = Target.of(
            WorkerRecord.from_bytes(about["driver"]),
            Key.revealed(about["key"]),
            Settings(**about["settings"]),
        )

    def run(self) -> None:
        """Send until the worker has ended and its last lines are sent, at most for ``_FLUSH_S`` after its end."""
        number, due = 0, time.monotonic()
        while True:
            if not self._ended.is_set() and not self._queue.wake.wait(_IDLE_S):
                self._hang_up()
            is_over = self._ended.is_set()
            lines = self._queue.take()
            if not lines and not is_over:
                continue
            number += 1
            is_last = is_over and not lines
            body = self._batch(number, lines, is_last).to_bytes()
            if not is_over:
                self._ended.wait(max(0.0, due - time.monotonic()))
                due = max(time.monotonic() - 1.0, due) + len(body) / self._rate
            if not self._send(number, body) or is_last:
                break
        self._hang_up()

    def _send(self, number: int, body: bytes) -> bool:
        """Send a batch until the driver has acknowledged it; return False if the worker has ended and the time is over."""
        while True:
            if self._ended.is_set() and self._until == float("inf"):
                self._until = time.monotonic() + _FLUSH_S
            target = self._target
            if self._visited is not target:
                self._hang_up()
            try:
                if self._visitor is None:
                    until = min(self._until, time.monotonic() + _CONNECT_S)
                    self._visitor, self._visited = Visitor(target, until, name="output-"), target
                self._visitor.tell(PRINTED, body)
                until = min(self._until, time.monotonic() + _ANSWER_S)
                while time.monotonic() < until:
                    if str(number).encode() in self._visitor.hear(KEPT, until):
                        return True
            except (OSError, RpcError) as error:
                if self._ended.is_set() and isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
                    return False  # the driver has ended, too
            self._hang_up()
            if time.monotonic() >= self._until:
                return False
            self._ended.wait(_AGAIN_S)
            if self._ended.is_set():
                time.sleep(_AGAIN_S / 5)

    def _hang_up(self) -> None:
        visitor, self._visitor = self._visitor, None
        if visitor is not None:
            visitor.close()
