"""The driver's end of a fork server: starts it, sends it commands, and receives its messages about its children.

Driver and server exchange msgpack maps over a stream socket (:func:`send`, :class:`MessageReader`). The field ``fds`` of a map is
the number of its descriptors, which are sent with its first byte. Both ends are processes of one user on one host, connected by
a private socket pair, so messages are not checked for attacks.

``start()`` does not wait for the server: fork commands are queued in ``_outbox`` until the server is ready. Then at most 4 fork
commands are unanswered at a time, so that sending rarely blocks. One pool thread at a time reads the server's messages.

``_lock`` guards the outbox and the state. It is re-entrant, because the garbage collector may run a finaliser that spawns in
the thread that holds it. Only the short send is called under it.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgpack

from actorrpc._exceptions import undo_on_error
from actorrpc._python import interpreter_options
from actorrpc.agent.threads import Pool
from actorrpc.transport.signals import uninterruptible

__all__ = ["ForkServer", "MessageReader", "arguments", "import_path", "send"]

_WINDOW: Final = 4  # greatest number of fork commands that were sent and not answered yet
_SEND_S: Final = 10.0
_END_S: Final = 2.0
_CHUNK: Final = 1 << 16
_MAX_FDS: Final = 16
# A thread that a library starts when it is imported does not survive a fork, and a forked process cannot use CUDA if its parent
# has opened CUDA. These variables are 1 during the imports. The first three prevent such threads. With the last variable,
# torch.cuda.is_available() does not open CUDA.
_SINGLE: Final = (
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)
# The program of the fork server. `-m` cannot replace it: the process must set the driver's sys.path to find this package.
# Imported modules see the arguments of the driver's script.
_BOOT: Final = f"""
import json, os, sys
def read(size):
    data = b""
    while len(data) < size:
        more = os.read(fd, size - len(data))
        if not more:
            os._exit(0)
        data += more
    return data
fd = int(sys.argv[1])
start = json.loads(read(int.from_bytes(read(4), "big")))
sys.path[:], sys.argv[:] = start["path"], start["arguments"]
names = {_SINGLE!r}
before = {{name: os.environ.get(name) for name in names}}
os.environ.update(dict.fromkeys(names, "1"))
from actorrpc.cluster.provisioners.fork_server import main
main(fd, before, start["preload"])
"""


def import_path() -> list[str]:
    """Return ``sys.path`` for another process: relative entries are made absolute."""
    found = []
    for entry in sys.path:
        if isinstance(entry, str):
            with contextlib.suppress(OSError):  # the entry is relative to a directory that was removed
                found.append(os.path.abspath(entry))
    return found


def arguments() -> list[str]:
    """Return the strings in ``sys.argv``; a program may have put other objects there, which cannot be sent."""
    return [each for each in getattr(sys, "argv", ()) if isinstance(each, str)]


def send(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one whole message.

    Raises:
        OSError: the other end is closed, or accepts nothing within the socket's time-out.
    """
    data = memoryview(msgpack.packb(message, unicode_errors="surrogateescape"))
    # Not socket.send_fds() (nor recv_fds() below), which ignores the flags in Python 3.11.
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
    sock.sendall(data[sent:], socket.MSG_NOSIGNAL)


class MessageReader:
    """Reads messages from a socket. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unpacker = msgpack.Unpacker(
            strict_map_key=False, unicode_errors="surrogateescape", max_buffer_size=0
        )
        self._fds: list[int] = []

    def feed(self, flags: int = 0) -> list[tuple[dict[str, Any], list[int]]] | None:
        """Receive once; return the messages that are complete, each with its descriptors.

        ``None``: the other end is closed.

        Raises:
            OSError: receiving failed (BlockingIOError: no data now).
        """
        # The kernel ends a read after the first bytes that have descriptors: one read returns the descriptors of one message.
        data, ancillary, _, _ = self._sock.recvmsg(
            _CHUNK, socket.CMSG_SPACE(_MAX_FDS * 4), flags | socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._fds.extend(received)
        if not data:
            return None
        self._unpacker.feed(data)
        whole: list[tuple[dict[str, Any], list[int]]] = []
        for message in self._unpacker:
            count = message.get("fds", 0)
            taken, self._fds = self._fds[:count], self._fds[count:]
            whole.append((message, taken))
        return whole

    def close(self) -> None:
        """Close descriptors of incomplete messages."""
        while self._fds:
            os.close(self._fds.pop())


class ForkServer:
    """One fork server process. Thread-safe.

    Args:
        pool: its threads read the server's messages.
        hello: the first message to the server (see ``fork_server.main``).
        preload: the modules that the server imports before it forks.
        heard: called with each message of the server, in a pool thread; must not block.
        ended: called once, in a pool thread, if the server has ended before :meth:`close`; must not block.
    """

    def __init__(
        self,
        pool: Pool,
        hello: dict[str, Any],
        preload: Sequence[str],
        heard: Callable[[dict[str, Any]], None],
        ended: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._hello = hello
        self._preload = list(preload)
        self._heard = heard
        self._ended = ended
        self._lock = threading.RLock()
        self._outbox: deque[tuple[dict[str, Any], tuple[int, ...]]] = deque()
        self._unanswered = 0
        self._sending = False
        self._sock: socket.socket | None = None
        self._reader: MessageReader | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.is_ready = False
        self.is_gone = False
        #: The server's environment variables at its start: a fork command contains only the variables that differ from these.
        self.environment: dict[str, str] = {}

    @property
    def pid(self) -> int:
        """The server's process id; 0 before it is started."""
        return 0 if self._process is None else self._process.pid

    def start(self, stdout: int, stderr: int) -> None:
        """Start the process, and do not wait for it.

        Raises:
            OSError: the process cannot be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.closing(theirs), undo_on_error(ours.close, self._end_process):
            ours.settimeout(_SEND_S)
            self.environment = dict(os.environ)
            start = {"path": import_path(), "arguments": arguments(), "preload": self._preload}
            first = json.dumps(start).encode()
            flags = interpreter_options()
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", _BOOT, str(theirs.fileno())],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal is for the driver only
            )
            ours.sendall(len(first).to_bytes(4, "big") + first)
            send(ours, self._hello)
        self._sock = ours
        self._reader = MessageReader(ours)
        self._pool.watch(ours.fileno(), self._read)
        self._pool.epoll.register(ours.fileno(), select.EPOLLIN | select.EPOLLONESHOT)

    # -- sending ----------------------------------------------------------------------------------------

    def fork(self, message: dict[str, Any], fds: tuple[int, ...]) -> None:
        """Queue a fork command. This object closes ``fds`` after they were sent, or when the server has ended."""
        with self._lock:
            self._outbox.append(({**message, "do": "fork", "fds": len(fds)}, fds))
        self._push()

    def kill(self, pid: int) -> None:
        """Command the server, before all queued commands, to kill a child and the child's process group."""
        with self._lock:
            self._outbox.appendleft(({"do": "kill", "pid": pid}, ()))
        self._push()

    @uninterruptible
    def _push(self) -> None:
        with self._lock:
            if self._sending:
                return  # a finaliser has interrupted _push() in this thread; the interrupted call sends the rest
            self._sending = True
            try:
                while self._outbox:
                    message, fds = self._outbox[0]
                    is_fork = message["do"] == "fork"
                    if is_fork and not self.is_gone and (not self.is_ready or self._unanswered >= _WINDOW):
                        break
                    self._outbox.popleft()
                    if self._sock is not None and not self.is_gone:
                        try:
                            send(self._sock, message, fds)
                            self._unanswered += is_fork
                        except OSError:
                            pass  # the server has ended, and _read() handles the closed connection
                    for fd in fds:
                        os.close(fd)
            finally:
                self._sending = False

    # -- receiving ---------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Process the server's messages. Only one thread at a time, because the descriptor is registered as one-shot."""
        sock, reader = self._sock, self._reader
        if sock is None or reader is None:
            return
        try:
            messages = reader.feed(socket.MSG_DONTWAIT)
        except BlockingIOError:
            messages = []
        except OSError:
            messages = None
        if messages is None:
            self._lost()
            return
        for message, _ in messages:
            if message["is"] == "ready":
                self.is_ready = True
            elif message["is"] in ("forked", "failed"):
                self._unanswered -= 1
            self._heard(message)
        try:
            self._pool.epoll.modify(sock.fileno(), select.EPOLLIN | select.EPOLLONESHOT)
        except (OSError, ValueError):
            pass
        if messages:
            self._push()

    def _hang_up(self) -> None:
        with self._lock:
            sock, self._sock = self._sock, None
            self.is_gone = True
        if sock is not None:
            self._pool.forget(sock.fileno())
            sock.close()
        self._push()  # closes the descriptors of messages that were not sent

    def _lost(self) -> None:
        self._hang_up()
        self._pool.submit(partial(self._end_process, _END_S))
        self._ended()

    def _end_process(self, timeout: float = 0.0) -> None:
        """Wait until the server's process has ended, and kill it after the time-out."""
        process = self._process
        if process is None:
            return
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                # Bounded, because the killed process may be in an uninterruptible system call.
                process.wait(_END_S)

    # -- the end ---------------------------------------------------------------------------------------

    def close(self, timeout: float = _END_S) -> None:
        """End the server: it kills its remaining children, and exits. Idempotent.

        If it does not exit within ``timeout`` seconds, it is killed, and the kernel kills its children.
        """
        self._hang_up()
        if self._process is not None:
            # A server that is not ready still imports modules and has no children, so it is killed at once.
            self._end_process(timeout if self.is_ready else 0.0)
        if self._reader is not None:
            self._reader.close()

    def abandon(self) -> None:
        """Close the descriptors in a forked child of the driver."""
        self.is_gone = True
        if self._sock is not None:
            self._sock.close()
        for _, fds in list(self._outbox):
            for fd in fds:
                os.close(fd)
        self._outbox.clear()
        if self._process is not None:
            self._process.returncode = 0  # Popen must not wait: the server is no child of this process
