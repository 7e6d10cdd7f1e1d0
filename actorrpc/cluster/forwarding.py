"""Forwards the output of workers that have joined to the driver, and keeps it in a file of the host.

``python -m actorrpc.worker`` forks a *forwarder* before it joins, or before it forks its workers. When a worker has joined, its
standard output and standard error become pipes, and the worker sends the reading ends to the forwarder. The forwarder reads the
pipes as the driver reads those of its own processes (:class:`~actorrpc.cluster.logs.Logs`). The forwarder is a separate process,
so it still reads the last lines of a worker that was killed. It writes the lines to the streams that the worker had before and to
the file, and sends them to the driver as a visitor.

Three threads run in the forwarder. The logs' thread reads the pipes and puts the lines into a queue. It never waits for the
driver: if the queue is full, it drops the oldest lines of the worker with the most lines, and counts them. The main thread takes
batches from the queue, at most ``log_rate`` bytes a second, and sends each until the driver has acknowledged it; the driver
discards batches that arrive twice. The third thread waits for workers, for their ends, and for their messages that they have
joined another driver.

A worker keeps the reading ends of its pipes, too. If the forwarder is killed, the worker copies its output to the streams that it
had before.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
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
_MESSAGE: Final = 64 << 10


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


@dataclass(slots=True, eq=False)
class _Source:
    """A worker, and its lines that are not in a batch yet.

    Attributes:
        about: its first message: its name, process id, host, driver and settings.
        control: the connection to the worker. The forwarder closes it when the last line was sent.
        file: the path of the file that has all lines.
        until: when to give up sending; infinite until all output of the worker was read.
    """

    about: dict[str, Any]
    control: socket.socket
    file: str
    until: float = float("inf")
    lines: deque[tuple[bool, str]] = field(default_factory=deque)
    size: int = 0
    dropped: int = 0
    dropped_bytes: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether all output of the worker was read."""
        return self.until < float("inf")


class _Queue:
    """The lines of all workers. ``_lock`` guards all attributes; no code that takes another lock runs under it.

    Attributes:
        wake: set when lines were added or a worker has ended; cleared by :meth:`dequeue`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[Output, _Source] = {}  # the worker whose turn is next comes first
        self._closed = False
        self.wake = threading.Event()

    @property
    def is_open(self) -> bool:
        """Whether more lines may come, or some were not dequeued."""
        return not self._closed or bool(self._sources)

    def close(self) -> None:
        """Record that no more workers will come."""
        self._closed = True
        self.wake.set()

    def open(self, output: Output, source: _Source) -> None:
        """Add a worker."""
        with self._lock:
            self._sources[output] = source

    def add(self, output: Output, is_error: bool, lines: list[tuple[str, str]]) -> None:
        """Append lines of a worker; if the queue is full, drop the oldest lines of the worker with the most lines."""
        with self._lock:
            source = self._sources.get(output)
            if source is None:  # the worker has ended, but a child of the worker still prints
                return
            for _, text in lines:
                source.lines.append((is_error, text))
                source.size += len(text) + LINE_COST
            while sum(each.size for each in self._sources.values()) > _BUFFER:
                source = max(self._sources.values(), key=lambda each: each.size)
                _, text = source.lines.popleft()
                source.size -= len(text) + LINE_COST
                source.dropped += 1
                source.dropped_bytes += len(text)
        self.wake.set()

    def finish(self, output: Output) -> None:
        """Record that all output of a worker was read."""
        with self._lock:
            self._sources[output].until = time.monotonic() + _FLUSH_S
        self.wake.set()

    def dequeue(self, only_ended: bool) -> tuple[_Source, list[tuple[bool, str]]] | None:
        """Remove and return the first lines of a worker, preceded by a line about dropped lines; None if there are none.

        Without lines, the worker has ended. Workers that have ended come first; ``only_ended``: ignore all others.
        """
        with self._lock:
            self.wake.clear()
            ready = [
                (each.until, output)
                for output, each in self._sources.items()
                if each.has_ended or (each.lines and not only_ended)
            ]
            if not ready:
                return None
            output = min(ready, key=itemgetter(0))[1]
            source = self._sources.pop(output)
            found: list[tuple[bool, str]] = []
            size = 0
            if source.dropped:
                text = (
                    f"[{source.dropped} lines ({source.dropped_bytes} bytes) were dropped here: they came faster than log_rate="
                    f"{source.about['rate']} bytes a second, or than the driver has taken them. They are in {source.file} on "
                    f"host {source.about['host']!r}]"
                )
                found.append((True, text))
                source.dropped = source.dropped_bytes = 0
            while source.lines and size < _BATCH:
                found.append(source.lines.popleft())
                size += len(found[-1][1]) + LINE_COST
            source.size -= size
            if found:
                self._sources[output] = source
            return source, found


# -- in the worker ---------------------------------------------------------------------------------------------


class _Link:
    """A worker's connection to its forwarder, and the worker's streams, which become pipes.

    Args:
        worker: the name of the worker.
        channel: where the forwarder receives workers.
        message: what the forwarder must know about the worker.

    Raises:
        OSError: the forwarder was killed, or there are too few descriptors.
    """

    def __init__(self, worker: str, channel: socket.socket, message: bytes) -> None:
        self._worker = worker
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdout, out, stderr, err = pipes()
        with theirs:
            socket.send_fds(channel, [message], [stdout, stderr, theirs.fileno()])
        # A forked child closes its copy of the descriptor, so the connection ends when this process ends.
        os.register_at_fork(after_in_child=self._control.close)
        self._lock = threading.Lock()  # guards _saved: the streams are restored once
        self._ended = threading.Event()  # the forwarder has closed the connection
        self._finishing = False
        self._streams = {stdout: 1, stderr: 2}  # by the reading end of the pipe
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._saved: tuple[int, ...] = os.dup(1), os.dup(2)
        for fd, writer in ((1, out), (2, err)):
            os.dup2(writer, fd)
            os.close(writer)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError):  # an object of the program
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        start_thread(threading.Thread(target=self._watch, name="actorrpc-output", daemon=True))
        atexit.register(self.finish)  # functions that are registered later run earlier, and may print

    @property
    def launchers_stderr(self) -> int:
        """A descriptor of the standard error that the worker had before."""
        return self._saved[1] if self._saved else 2

    def redirect(self, message: bytes) -> None:
        """Let the forwarder send to another driver."""
        self._control.sendall(message)

    def _watch(self) -> None:
        """Wait for the end of the forwarder. If it was killed, do a part of its work, so that no print raises or blocks."""
        with contextlib.suppress(OSError):
            self._control.recv(1)
        self._ended.set()
        if self._finishing:
            return
        self._restore()
        say(
            f"worker {self._worker!r} (pid {os.getpid()}): {_NOT_FORWARDED}: its forwarder has ended. Earlier lines are at "
            f"{_place}; later lines are printed here only. To forward them again, drain this worker and start it again"
        )
        set_own_place("")
        # Children of this process may have inherited the pipes: copy until all processes have closed the writing ends.
        while self._streams:
            for reader in select.select(self._streams, (), ())[0]:
                data = os.read(reader, _MESSAGE)
                if not data:
                    del self._streams[reader]
                    os.close(reader)
                with contextlib.suppress(OSError):
                    while data:
                        data = data[os.write(self._streams[reader], data) :]

    def _restore(self) -> None:
        with self._lock:
            saved, self._saved = self._saved, ()
            for fd, before in enumerate(saved, 1):
                os.dup2(before, fd)
                os.close(before)

    def finish(self) -> None:
        """Restore the streams, and wait until the forwarder has sent the last lines, or for 4 s."""
        if self._control.fileno() < 0:  # this is a forked child, which also runs its parent's exit functions
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the process ends within _END_S in any case
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self._finishing = True
        self._restore()
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        self._ended.wait(_END_S)


_enabled = False
_channel: socket.socket | None = None  # until this process has joined
_link: _Link | None = None
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
    """Fork the forwarder of this process and of its forks, unless ``ACTORRPC_LOG_FORWARD=0``.

    Must be called before other threads are started.
    """
    global _channel
    if not _enabled:
        return
    try:
        if not Settings.from_environment().log_forward:
            return
    except ConfigError:  # joining will raise it
        return
    try:
        own, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with warnings.catch_warnings():
            # Python warns that other threads run. They are threads of C libraries, and hold no locks.
            warnings.simplefilter("ignore")
            pid = os.fork()
    except OSError as error:
        say(f"{_NOT_FORWARDED}: {error}")
        return
    if pid == 0:
        channel.close()
        _run(own)
    own.close()
    _channel = channel


def begin(worker: str, driver: WorkerRecord, key: Key, settings: Settings) -> bool:
    """Forward the output of this worker from now on; return False if it has no forwarder, or if the driver keeps no output."""
    global _channel, _link
    if (_channel is None and _link is None) or not settings.log_forward:
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
        message = msgpack.packb(about)
        if _link is not None:
            _link.redirect(message)
        elif _channel is not None:
            _link = _Link(worker, _channel, message)
            _channel.close()  # the forwarder ends when all processes have closed it
            _channel = None
    except (ConfigError, OSError) as error:  # there is no directory, or the forwarder was killed
        say(f"{_NOT_FORWARDED}: {error}")
        return False
    set_own_place(place_of(settings, host))
    return True


def say(text: str) -> None:
    """Write a line for the launcher of this worker to its standard error; it is not forwarded."""
    fd = 2 if _link is None else _link.launchers_stderr
    with contextlib.suppress(OSError):
        os.write(fd, f"{text}\n".encode())


# -- the forwarder ---------------------------------------------------------------------------------------------


def _run(channel: socket.socket) -> NoReturn:
    """Run the forwarder, and end the process."""
    try:
        gc.freeze()
        gc.enable()
        # The forwarder ends after its workers, so signals to their process group or terminal must not end it.
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTOU):
            signal.signal(number, signal.SIG_IGN)
        _Forwarder(channel).run()
    except Exception as error:
        with contextlib.suppress(OSError):
            os.write(2, f"the forwarder of this host's output has failed: {error!r}\n".encode())
    finally:
        os._exit(0)


class _Forwarder:
    """Forwards the output of the workers that arrive on ``channel``, until all processes have closed the channel.

    The main thread runs :meth:`run`, and owns the visitor. All other methods are called by the thread that waits for workers.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._queue = _Queue()
        self._logs = Logs(False, keep=self._queue.add)
        self._look = selectors.DefaultSelector()
        self._look.register(channel, selectors.EVENT_READ, self._receive)
        self._target: Target | None = None
        self._visitor: Visitor | None = None
        self._visited: Target | None = None  # the target of the visitor

    def _watch(self) -> None:
        while self._look.get_map():
            for key, _ in self._look.select():
                key.data()
        self._queue.close()

    def _receive(self) -> None:
        """Receive a worker, with its pipes and a connection."""
        message, fds, _, _ = socket.recv_fds(self._channel, _MESSAGE, 3)
        if not message:
            self._look.unregister(self._channel)
            return
        about = self._redirect(message)
        stdout, stderr, connection = fds
        control = socket.socket(fileno=connection)
        file = self._logs.file = self._logs.file or LogFile(about["directory"], about["host"])
        output = Output(about["worker"], about["pid"], stdout, stderr, about["worker"], copies=(1, 2))
        self._queue.open(output, _Source(about, control, file.path))
        self._logs.add(output)
        self._look.register(control, selectors.EVENT_READ, partial(self._hear, control, output))

    def _hear(self, control: socket.socket, output: Output) -> None:
        message = control.recv(_MESSAGE)
        if message:
            self._redirect(message)  # the worker has joined again
            return
        self._look.unregister(control)
        self._logs.finish(output, partial(self._queue.finish, output))

    def _redirect(self, message: bytes) -> dict[str, Any]:
        """Send to the driver that a worker has joined from now on; return the worker's message."""
        about: dict[str, Any] = msgpack.unpackb(message)
        record, settings = WorkerRecord.from_bytes(about["driver"]), Settings(**about["settings"])
        self._target = Target.of(record, Key.revealed(about["key"]), settings)
        return about

    def run(self) -> None:
        """Send until all workers have ended and their last lines are sent, at most for ``_FLUSH_S`` after their end."""
        self._logs.start()
        threading.Thread(target=self._watch, daemon=True).start()
        number, due = 0, 0.0
        while self._queue.is_open:
            pause = max(0.0, due - time.monotonic())
            found = self._queue.dequeue(only_ended=pause > 0)
            if found is None:
                if not self._queue.wake.wait(pause or _IDLE_S) and not pause:
                    self._hang_up()
                continue
            source, lines = found
            about = source.about
            number += 1
            body = Batch(about["worker"], about["pid"], about["host"], number, lines, not lines).to_bytes()
            due = max(time.monotonic() - 1.0, due) + len(body) / about["rate"]
            self._send(number, body, source)
            if not lines:
                source.control.close()
        self._hang_up()

    def _send(self, number: int, body: bytes, source: _Source) -> None:
        """Send a batch until the driver has acknowledged it, or until ``source.until``."""
        while True:
            target = self._target
            assert target is not None
            if self._visited != target:
                self._hang_up()
            try:
                if self._visitor is None:
                    until = min(source.until, time.monotonic() + _CONNECT_S)
                    self._visitor, self._visited = Visitor(target, until, name="output-"), target
                self._visitor.tell(PRINTED, body)
                until = min(source.until, time.monotonic() + _ANSWER_S)
                while time.monotonic() < until:
                    if str(number).encode() in self._visitor.hear(KEPT, until):
                        return
            except (OSError, RpcError) as error:
                if source.has_ended and isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
                    return  # the driver has ended, too
            self._hang_up()
            if time.monotonic() >= source.until:
                return
            time.sleep(_AGAIN_S / 5 if source.has_ended else _AGAIN_S)

    def _hang_up(self) -> None:
        visitor, self._visitor = self._visitor, None
        if visitor is not None:
            visitor.close()
