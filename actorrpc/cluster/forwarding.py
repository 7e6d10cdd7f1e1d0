"""Forwards the output of workers that have joined to the driver, and keeps it in a file of the host.

``python -m actorrpc.worker`` forks a *forwarder* before it joins, or before it forks its workers. When a worker has joined, its
standard output and standard error become pipes, and the worker sends the reading ends to the forwarder. The forwarder reads the
pipes as the driver reads the pipes of its own processes (:class:`~actorrpc.cluster.logs.Logs`). The forwarder is a separate
process, so it still reads the last lines of a worker that was killed. It writes the lines to the streams that the worker had
before and to the file, and sends them to the driver as a visitor.

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
import logging
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
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias

import msgpack

from actorrpc._limits import make_room, start_thread
from actorrpc.agent.agent import Agent
from actorrpc.agent.peers import Peer
from actorrpc.cluster.logs import LINE_COST, LogFile, Logs, Output, log_directory, pipes
from actorrpc.config import Settings
from actorrpc.errors import ConfigError, RpcError
from actorrpc.transport.visit import Target, Visitor
from actorrpc.wire.identity import WorkerRecord
from actorrpc.wire.keys import Key

__all__ = [
    "DRIVER",
    "Outputs",
    "begin",
    "enable",
    "own_place",
    "place_of",
    "say",
    "set_own_place",
    "start",
]

_Key: TypeAlias = tuple[str, int, str]  # the name of a worker, its process id, and the name of its host
_log = logging.getLogger("actorrpc.cluster")
# The driver answers the notice _PRINTED, a batch of lines, with _KEPT and the number of the batch.
_PRINTED: Final = "printed"
_KEPT: Final = "kept"
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


class _Source(Output):
    """A worker, and its lines that are not in a batch yet.

    Attributes:
        about: its first message: its name, process id, host, driver and settings.
        control: the connection to the worker. The forwarder closes it when the last line was sent.
        file: the path of the file that has all lines.
        give_up: when to give up sending; infinite until all output of the worker was read.
    """

    def __init__(
        self, about: dict[str, Any], stdout: int, stderr: int, control: socket.socket, file: str
    ) -> None:
        super().__init__(about["worker"], about["pid"], stdout, stderr, about["worker"], copies=(1, 2))
        self.about, self.control, self.file = about, control, file
        self.give_up = float("inf")
        self.lines: deque[tuple[bool, str]] = deque()
        self.size = self.dropped = self.dropped_bytes = 0

    @property
    def has_ended(self) -> bool:
        """Whether all output of the worker was read."""
        return self.give_up < float("inf")


# -- in the driver ---------------------------------------------------------------------------------------------


def _unpack(body: bytes) -> tuple[_Key, int, list[tuple[bool, str]], bool]:
    """Read a batch: a worker, the number of the batch, lines with whether they are errors, and whether no more lines follow.

    Raises:
        ValueError: the bytes are no batch.
    """
    try:
        worker, pid, host, number, lines, is_last = msgpack.unpackb(body, unicode_errors="replace")
        kinds = [type(each) for each in (worker, pid, host, number, is_last)]
        if kinds == [str, int, str, int, bool] and all(
            list(map(type, each)) == [bool, str] for each in lines
        ):
            return (worker, pid, host), number, lines, is_last
    except TypeError:  # the value, or a line, is no list
        pass
    raise ValueError("no batch of lines")


class Outputs:
    """Adds the lines that forwarders send to the driver's logs. ``_lock`` guards ``_outputs``, and is a leaf. Thread-safe.

    Args:
        logs: None if the driver keeps no output.
        changed: set when a worker no longer forwards.
    """

    def __init__(self, agent: Agent, logs: Logs | None, changed: threading.Event) -> None:
        self._agent, self._logs, self._changed = agent, logs, changed
        self._lock = threading.Lock()
        self._outputs: dict[_Key, Output] = {}
        agent.on_notice[_PRINTED] = self._receive

    @property
    def have_ended(self) -> bool:
        """Whether the last lines of all workers that forward have come, or will never come."""
        return not self._outputs

    def expect(self, record: WorkerRecord) -> None:
        """Record that a worker forwards its output."""
        with self._lock:
            self._output_of((record.name, record.pid, record.hostname))

    def _output_of(self, key: _Key) -> Output:
        """Return the output of a worker, which may be new. Under the lock."""
        return self._outputs.setdefault(key, Output.far(*key, self._agent.settings.log_show))

    def _receive(self, peer: Peer, body: bytes) -> None:
        """Add a batch to the logs, whose thread then acknowledges the batch."""
        try:
            key, number, lines, is_last = _unpack(body)
        except ValueError as error:
            _log.warning("%r has sent output that cannot be read: %s", peer.name, error)
            return
        if self._logs is None:
            return

        def done() -> None:
            self._agent.submit(partial(self._agent.notify, peer, _KEPT, str(number).encode()))
            if is_last:
                self._changed.set()

        with self._lock:
            output = self._output_of(key)
            if is_last:
                del self._outputs[key]
            # A batch arrives again if its acknowledgement was lost with the connection.
            is_new, output.batch = number > output.batch, number
        self._logs.receive(output, lines if is_new else [], done)

    def forget(self, record: WorkerRecord) -> None:
        """Wait no longer for the lines of an ended worker: its forwarder may have been killed, too."""
        with self._lock:
            self._outputs.pop((record.name, record.pid, record.hostname), None)
        self._changed.set()


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
        threading.excepthook = lambda failed: _fail(failed.exc_value)
        _Forwarder(channel).run()
    except Exception as error:
        _fail(error)
    finally:
        os._exit(0)


def _fail(error: BaseException | None) -> NoReturn:
    """End the forwarder. Its workers then print to the streams that they had before."""
    with contextlib.suppress(OSError):
        os.write(2, f"the forwarder of this host's output has failed: {error!r}\n".encode())
    os._exit(0)


class _Forwarder:
    """Forwards the output of the workers that arrive on ``channel``, until all processes have closed the channel.

    The main thread runs :meth:`run`, and owns the visitor. A thread that waits for workers runs ``_watch``, and the logs' thread
    calls ``_add`` and ``_finish``. ``_lock`` guards ``_sources`` and their lines, and is a leaf. ``_wake`` is set when lines were
    added, a worker has ended, or no more workers will come.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._sources: list[_Source] = []  # the worker whose turn is next comes first
        self._closed = False
        self._wake = threading.Event()
        self._logs = Logs(False, keep=self._add)
        self._look = selectors.DefaultSelector()
        self._look.register(channel, selectors.EVENT_READ, self._receive)
        self._target: Target | None = None
        self._visitor: Visitor | None = None
        self._visited: Target | None = None  # the target of the visitor

    def _watch(self) -> None:
        while self._look.get_map():
            for key, _ in self._look.select():
                key.data()
        self._closed = True
        self._wake.set()

    def _receive(self) -> None:
        """Receive a worker, with its pipes and a connection."""
        message, fds, _, _ = socket.recv_fds(self._channel, _MESSAGE, 3)
        if not message:
            self._look.unregister(self._channel)
            return
        if len(fds) < 3:  # no more descriptors are allowed; the worker sees that its connection was closed
            for fd in fds:
                os.close(fd)
            return
        make_room(max(fds))
        about = self._redirect(message)
        stdout, stderr, connection = fds
        file = self._logs.file = self._logs.file or LogFile(about["directory"], about["host"])
        source = _Source(about, stdout, stderr, socket.socket(fileno=connection), file.path)
        with self._lock:
            self._sources.append(source)
        self._logs.add(source)
        self._look.register(source.control, selectors.EVENT_READ, partial(self._hear, source))

    def _hear(self, source: _Source) -> None:
        message = source.control.recv(_MESSAGE)
        if message:
            self._redirect(message)  # the worker has joined again
            return
        self._look.unregister(source.control)
        self._logs.finish(source, partial(self._finish, source))

    def _redirect(self, message: bytes) -> dict[str, Any]:
        """Send to the driver that a worker has joined from now on; return the worker's message."""
        about: dict[str, Any] = msgpack.unpackb(message)
        record, settings = WorkerRecord.from_bytes(about["driver"]), Settings(**about["settings"])
        self._target = Target.of(record, Key.revealed(about["key"]), settings)
        return about

    def _add(self, source: Any, is_error: bool, lines: list[tuple[str, str]]) -> None:
        """Append lines of a worker; if the queue is full, drop the oldest lines of the worker with the most lines."""
        with self._lock:
            if source not in self._sources:  # the worker has ended, but a child of the worker still prints
                return
            for _, text in lines:
                source.lines.append((is_error, text))
                source.size += len(text) + LINE_COST
            while sum(each.size for each in self._sources) > _BUFFER:
                source = max(self._sources, key=lambda each: each.size)
                _, text = source.lines.popleft()
                source.size -= len(text) + LINE_COST
                source.dropped += 1
                source.dropped_bytes += len(text)
        self._wake.set()

    def _finish(self, source: _Source) -> None:
        """Record that all output of a worker was read."""
        with self._lock:
            source.give_up = time.monotonic() + _FLUSH_S
        self._wake.set()

    def _dequeue(self, only_ended: bool) -> tuple[_Source, list[tuple[bool, str]]] | None:
        """Remove and return the first lines of a worker, preceded by a line about dropped lines; None if there are none.

        Without lines, the worker has ended. Workers that have ended come first; ``only_ended``: ignore all others.
        """
        with self._lock:
            self._wake.clear()
            ready = [each for each in self._sources if each.has_ended or (each.lines and not only_ended)]
            if not ready:
                return None
            source = min(ready, key=lambda each: each.give_up)
            self._sources.remove(source)
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
                self._sources.append(source)
            return source, found

    def run(self) -> None:
        """Send until all workers have ended and their last lines are sent, at most for ``_FLUSH_S`` after their end."""
        self._logs.start()
        threading.Thread(target=self._watch, daemon=True).start()
        number, due = 0, 0.0
        while not self._closed or self._sources:
            pause = max(0.0, due - time.monotonic())
            found = self._dequeue(only_ended=pause > 0)
            if found is None:
                if not self._wake.wait(pause or _IDLE_S) and not pause:
                    self._hang_up()
                continue
            source, lines = found
            about = source.about
            number += 1
            row = [about["worker"], about["pid"], about["host"], number, lines, not lines]
            body = msgpack.packb(row, unicode_errors="replace")
            due = max(time.monotonic() - 1.0, due) + len(body) / about["rate"]
            self._send(number, body, source)
            if not lines:
                source.control.close()
        self._hang_up()

    def _send(self, number: int, body: bytes, source: _Source) -> None:
        """Send a batch until the driver has acknowledged it, or until ``source.give_up``."""
        while True:
            target = self._target
            assert target is not None
            if self._visited != target:
                self._hang_up()
            try:
                if self._visitor is None:
                    until = min(source.give_up, time.monotonic() + _CONNECT_S)
                    self._visitor, self._visited = Visitor(target, until, name="output-"), target
                self._visitor.tell(_PRINTED, body)
                until = min(source.give_up, time.monotonic() + _ANSWER_S)
                while time.monotonic() < until:
                    if str(number).encode() in self._visitor.hear(_KEPT, until):
                        return
            except (OSError, RpcError) as error:
                if source.has_ended and isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
                    return  # the driver has ended, too
            self._hang_up()
            if time.monotonic() >= source.give_up:
                return
            time.sleep(_AGAIN_S / 5 if source.has_ended else _AGAIN_S)

    def _hang_up(self) -> None:
        visitor, self._visitor = self._visitor, None
        if visitor is not None:
            visitor.close()
