"""A visitor is a connection to one worker from a process, or a thread, that has no agent. This module does not import torch.

The visitor does the same handshake as a peer, which proves the key, and then sends a record of itself with a rank from the range
of visitors. After that, both sides may send notices. A visitor is not a member of the group: other workers do not learn of the
visitor, and the worker deletes its data about the visitor when the connection ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from actorrpc._exceptions import undo_on_error
from actorrpc.config import Settings
from actorrpc.errors import AuthenticationError, ProtocolError, RpcError
from actorrpc.transport.failure_detector import process_state
from actorrpc.transport.signals import checkpoint
from actorrpc.transport.tls import AnySocket, Tls, authenticate
from actorrpc.transport.tls_socket import TlsSocket
from actorrpc.wire import frames
from actorrpc.wire.frames import Frame, FrameReader, pack_frame, pack_header, unpack_header
from actorrpc.wire.handshake import Dialler, Session
from actorrpc.wire.identity import FIRST_VISITOR, WorkerRecord, host_identity, new_incarnation
from actorrpc.wire.keys import Key

__all__ = ["Target", "Visitor"]

_SLICE_S: Final = 0.1  # seconds between two checks whether the worker's process on this host runs
_MAX_FRAME: Final = 16 << 20
_SAY_EVERY: Final = 1 << 20  # received bytes after which the visitor sends an acknowledgement


@dataclass(slots=True, kw_only=True)
class Target:
    """The address of a worker, and what a visitor needs to connect to it.

    Attributes:
        record: the worker's record; None if only its address is known.
        incarnation: the expected incarnation (run) of the worker; None: any. Ignored if ``record`` is given, which contains it.
        addresses: where the worker listens: paths of Unix sockets, or ``(host, port)``.
        key: the key of the group; None if the group has none.
        settings: the settings of TLS.
    """

    record: WorkerRecord | None = None
    incarnation: str | None = None
    addresses: list[str | tuple[str, int]]
    key: Key | None
    settings: Settings = field(default_factory=Settings)

    @classmethod
    def of(cls, record: WorkerRecord, key: Key | None, settings: Settings) -> Target:
        """Return the target that a record describes."""
        addresses: list[str | tuple[str, int]] = list(record.tcp)
        if record.unix_path and record.host == host_identity():
            addresses = [record.unix_path]
        return cls(record=record, addresses=addresses, key=key, settings=settings)

    @property
    def local_pid(self) -> int:
        """The process id of the worker if it is on this host, else 0."""
        record = self.record
        return record.pid if record is not None and record.host == host_identity() else 0


class Visitor:
    """A connection of a visitor to one worker. Not thread-safe.

    Args:
        target: the worker.
        until: the time limit for connecting, on the monotonic clock.
        name: the beginning of the visitor's name.
        silence: seconds without a byte from the worker after which a wait, or the attempt to connect, fails.

    Attributes:
        target: the argument ``target``.
        silence: the argument ``silence``; may be changed.

    Raises:
        OSError: there is no connection (TimeoutError: not in time).
        AuthenticationError, VersionError, ProtocolError: the handshake has failed.
        LimitError: the worker has no descriptor for the connection.
        ConfigError: the certificates in the settings of TLS cannot be used.
    """

    def __init__(
        self, target: Target, until: float, *, name: str = "visitor-", silence: float = float("inf")
    ) -> None:
        self.silence = silence
        self._received = self._said = 0
        self.target = target
        self._pid = target.local_pid
        if not target.addresses:
            raise OSError("it listens on no address that this process can reach")
        problem: OSError | None = None
        for address in target.addresses:
            try:
                self._sock, result = self._connect(address, until, name)
                break
            except OSError as error:
                if isinstance(error, RpcError):
                    raise
                problem = error
        else:
            assert problem is not None
            raise problem
        self.name = result.peer_name
        self.incarnation = result.peer_incarnation
        self._reader = FrameReader(max_frame=_MAX_FRAME, max_chunk=_MAX_FRAME)
        own = WorkerRecord(
            name=self._own,
            rank=FIRST_VISITOR + secrets.randbits(29),
            incarnation=self._incarnation,
            host=f"visitor-{secrets.token_hex(8)}",
            pid=os.getpid(),
        )
        self._send(pack_frame(frames.INTRO, body=own.to_bytes()))

    def _connect(self, address: str | tuple[str, int], until: float, name: str) -> tuple[AnySocket, Session]:
        """Connect and perform the handshake; return the socket and the session."""
        target = self.target
        self._own = name + secrets.token_hex(6)
        self._incarnation = new_incarnation()
        tls = None
        if isinstance(address, str):
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            with undo_on_error(plain.close):
                plain.settimeout(_remaining(until))
                plain.connect(address)
        else:
            # With transport="unix", Tls.load() would return None.
            tls = Tls.load(replace(target.settings, transport="tcp"))
            limit = min(until, time.monotonic() + self.silence)
            plain = socket.create_connection(address, _remaining(limit))
        record = target.record
        dialler = Dialler(
            name=self._own,
            incarnation=self._incarnation,
            key=b"" if target.key is None else target.key.reveal(),
            peer_name=None if record is None else record.name,
            peer_incarnation=target.incarnation if record is None else record.incarnation,
            insecure=target.key is None,
        )
        try:
            wait = partial(self._wait, until)
            return authenticate(plain, tls, dialler, until, f"the worker at {address}", wait)
        except AuthenticationError as error:
            # Another run of the worker answers. Neither side has proved yet that it has the key.
            if dialler.replaced:
                raise ConnectionRefusedError(str(error)) from error
            raise

    def _wait(self, until: float, sock: AnySocket) -> None:
        """Wait until the socket is readable.

        Raises:
            TimeoutError: no byte arrived before ``until`` or within ``silence`` seconds, or the worker runs on this host and its
                process is stopped or has ended.
        """
        if isinstance(sock, TlsSocket) and sock.pending:
            return
        pid = self._pid
        until = min(until, time.monotonic() + self.silence)
        poller = select.poll()
        poller.register(sock.fileno(), select.POLLIN)
        while not poller.poll(1000 * min(_SLICE_S, _remaining(until))):
            if time.monotonic() >= until or (pid and process_state(pid) != "running"):
                raise TimeoutError("it has not answered in time")
            checkpoint()

    def _send(self, frame: bytes) -> None:
        self._sock.settimeout(1.0)
        self._sock.sendall(frame)

    def tell(self, notice: str, body: bytes) -> None:
        """Send a notice. Raises OSError if the connection has ended."""
        self._send(pack_frame(frames.NOTICE, body=body, extra=pack_header({"notice": notice})))

    def hear(self, notice: str, until: float) -> list[bytes]:
        """Wait until frames arrive, and return the bodies of the notices with this name among these frames.

        The list is empty if only other frames arrived, or if no frame arrived before ``until`` or within ``silence`` seconds.

        Raises:
            OSError: the connection has ended.
        """
        try:
            return self._notices(notice, until)
        except TimeoutError:
            return []

    def _notices(self, notice: str, until: float) -> list[bytes]:
        return [
            bytes(frame.body)
            for frame in self._frames(until)
            if frame.kind == frames.NOTICE and unpack_header(frame.extra).get("notice") == notice
        ]

    def _frames(self, until: float) -> list[Frame]:
        """Wait for frames and return them, after answering pings and acknowledging what was received."""
        while True:
            self._wait(until, self._sock)
            try:
                count = self._sock.recvmsg_into(self._reader.target(), 0, socket.MSG_DONTWAIT)[0]
            except BlockingIOError:
                continue
            if not count:
                raise ConnectionResetError("the worker has closed the connection")
            found = self._reader.fed(count)
            self._received += count
            for frame in found:
                if frame.kind == frames.PING:
                    self._answer(frames.PONG, frame.id)
                elif frame.kind == frames.GOODBYE and frame is found[0]:
                    # If frames came before GOODBYE, return the frames. The next call finds that the stream has ended.
                    raise ConnectionResetError("the worker has left")
            if self._received - self._said >= _SAY_EVERY:
                self._said = self._received
                self._answer(frames.ACK, self._received)
            if found:
                return found

    def _answer(self, kind: int, number: int) -> None:
        # If the worker has closed the connection, its last frames must be read all the same; then the stream ends.
        with contextlib.suppress(OSError):
            self._send(pack_frame(kind, number))

    def close(self) -> None:
        """Send GOODBYE and close the socket. Idempotent."""
        with contextlib.suppress(OSError, ProtocolError):
            self._send(pack_frame(frames.GOODBYE))
        with contextlib.suppress(OSError):
            self._sock.close()


def _remaining(until: float) -> float:
    return max(0.001, until - time.monotonic())
