"""Detects peers that are silent, and inspects their processes.

The silence of a peer is the time since its last byte arrived. After 0.75 to 1 heartbeats of silence, the peer is sent a PING.
After two heartbeats, it is *suspect*. After ``misses`` - 0.5 heartbeats, it is *lost*, so that a loss is detected within
``heartbeat * misses`` seconds. The caller decides about a lost peer: if its process can be inspected and runs, it is only busy (C
code that holds the GIL, an overloaded machine) and stays suspect; otherwise, or if the process is stopped or a zombie, it is
dead.

Time in which the clock of this process itself did not run (because the process was stopped or busy) does not count as silence of
peers. Only the clock thread calls :meth:`FailureDetector.look`, to which it passes the time. The functions may be called on any
thread; :func:`process_state` and :func:`is_direct` read ``/proc``.
"""

from __future__ import annotations

import array
import fcntl
import math
import os
import socket
import struct
from typing import Final, NamedTuple

from actorrpc.config import Settings

__all__ = ["FailureDetector", "Look", "holds_back", "is_direct", "process_state", "set_up_tcp"]

# A PING may be sent after this part of a heartbeat. It is less than 1, so that one wake-up can serve several peers.
_PING_AFTER: Final = 0.75
_PID: Final = struct.Struct("=i")  # the first field of the result of SO_PEERCRED
_OUTQNSD: Final = 0x894B  # the ioctl SIOCOUTQNSD: bytes in the send queue that were not sent yet
_MOST_S: Final = 32767  # the kernel's maximum for keep-alive times
_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")


class Look(NamedTuple):
    """The result of a check of a peer.

    Attributes:
        ping_due: whether the caller has to send a PING.
        state: "alive", "suspect" or "lost".
        wait: the time until the next check, in seconds.
    """

    ping_due: bool
    state: str
    wait: float


class FailureDetector:
    """The failure detector of one peer. Not thread-safe.

    Attributes:
        last_received: the time at which the latest byte arrived, as of the last check.
        silent: seconds of silence, as of the last check.
        direct: whether the connection ends at the peer's process, without a relay (:func:`is_direct`); None: not known yet.
    """

    __slots__ = ("_excused", "_pinged_at", "direct", "last_received", "silent")

    def __init__(self) -> None:
        self.last_received = self._pinged_at = float("-inf")
        self.silent = 0.0
        self.direct: bool | None = None
        self._excused = 0.0

    def look(
        self,
        now: float,
        last_received: float,
        *,
        heartbeat: float,
        misses: int,
        late: float = 0.0,
        receiving: bool = False,
    ) -> Look:
        """Check the peer; the caller sends a PING if the result says so.

        Args:
            now: the time, in seconds.
            last_received: the time at which the latest byte arrived.
            heartbeat: seconds of silence after which the peer is sent a PING.
            misses: the peer is lost after half a heartbeat less than this many heartbeats of silence; at least 2.
            late: by how many seconds this check is late, because this process did not run.
            receiving: whether a message was received in part. On a slow network, the rest of the message may take long, and until
                then this worker may send nothing. Therefore it sends a PING although the peer is not silent, so that the peer
                does not consider it silent.
        """
        if last_received > self.last_received:
            self.last_received = last_received
            self._excused = min(late, now - last_received)
        else:
            self._excused += late
        since = self.last_received + self._excused
        self.silent = silent = now - since
        suspect, lost = 2 * heartbeat, (misses - 0.5) * heartbeat
        ping_due = (
            silent >= _PING_AFTER * heartbeat or receiving
        ) and now - self._pinged_at >= _PING_AFTER * heartbeat
        if ping_due:
            self._pinged_at = now
        # Unless a limit is near, wait for at least a quarter of a heartbeat, so that many peers with different times do not cause
        # too many checks.
        wait = max(max(since, self._pinged_at) + heartbeat - now, heartbeat / 4)
        for limit in (suspect, lost):
            if silent < limit:
                wait = min(wait, limit - silent + heartbeat / 1000)  # after the limit, despite rounding
        if silent < min(suspect, lost):
            return Look(ping_due, "alive", wait)
        # Check again soon, as the peer may answer.
        return Look(ping_due, "suspect" if silent < lost else "lost", min(wait, heartbeat / 2))


def set_up_tcp(sock: socket.socket, settings: Settings) -> None:
    """Set TCP_NODELAY, and let the kernel close a connection that acknowledges nothing for too long.

    The time is ``heartbeat * misses``. The kernel also closes a connection whose peer does not read for so long. A peer at a
    loopback address may only be busy, so only :class:`FailureDetector` checks such connections.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if str(sock.getpeername()[0]).removeprefix("::ffff:").startswith(("127.", "::1")):
        return
    bound = settings.heartbeat * settings.heartbeat_misses
    idle = max(1, min(math.ceil(settings.heartbeat), _MOST_S))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, min(settings.heartbeat_misses, 127))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(min(bound, _MOST_S) * 1e3))


def holds_back(sock: socket.socket) -> bool:
    """Return whether the kernel's send queue has bytes that were not sent yet; False if that cannot be determined.

    If the socket is closed while the other side still writes, the kernel sends a reset, and these bytes are lost.
    """
    count = array.array("i", [0])
    try:
        fcntl.ioctl(sock.fileno(), _OUTQNSD, count)
    except (OSError, ValueError):
        return False
    return count[0] > 0


def process_state(pid: int) -> str:
    """Return the state of a process of this host: "running" (also if it waits), "stopped" or "gone" (also for a zombie)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field, the name of the process in parentheses, may itself contain spaces and parentheses.
            state = file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    if state in (b"T", b"t"):
        return "stopped"
    return "gone" if state in (b"Z", b"X", b"x") else "running"


def is_direct(sock: socket.socket, pid: int) -> bool:
    """Return whether the other end of a connection is a socket of the process ``pid`` on this host.

    False if a relay, a tunnel or a forwarded port lies between the two processes: the relay may fail while the peer's process
    runs, so the state of the process does not explain the silence of the peer.
    """
    try:
        if sock.family == socket.AF_UNIX:
            (other_end,) = _PID.unpack_from(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return bool(other_end == pid)
        own, other = sock.getsockname()[1], sock.getpeername()[1]
        inodes = {f"socket:[{inode}]" for table in _TABLES for inode in _ends(table, other, own)}
        if not inodes:
            return False
        with os.scandir(f"/proc/{pid}/fd") as descriptors:
            return any(_target(each.path) in inodes for each in descriptors)
    except OSError:
        return False


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # the descriptor was closed meanwhile
        return ""


def _ends(table: str, local: int, remote: int) -> list[str]:
    """Return the inodes of TCP sockets with these two ports, in this network namespace. ``table``: a file of ``_TABLES``."""
    ends = f":{local:04X}", f":{remote:04X}"
    try:
        with open(table, encoding="ascii") as file:
            # The test of the line is quick: a busy host has many thousands of lines.
            rows = [line.split() for line in file if f"{ends[0]} " in line and f"{ends[1]} " in line]
    except OSError:  # the file does not exist, for example without IPv6
        return []
    return [row[9] for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1])]
