"""What the silence of a peer means, and what its host can say about it.

Silence is measured from the last byte that came. After one heartbeat of it the peer is asked for a sign of life; after
two it is *suspect*; after ``misses`` of them, less half a one, it is *lost*: found within ``heartbeat * misses`` seconds.
What becomes of a lost peer is decided elsewhere: where its process can be asked, and runs, it is merely busy (C code
that holds the GIL, an overloaded machine) and stays suspect; where it cannot, or is stopped or a zombie, it is dead.

Time in which this process itself did not run (stopped, or busy as above) counts for nobody's silence.
:class:`FailureDetector` is used by the clock's thread only and knows no clock: it is told the time. The functions read
``/proc`` and may be called anywhere.
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

_ASK: Final = 0.75  # of a heartbeat: those who are due soon are asked along with those who are due
_PID: Final = struct.Struct("=i")  # what the kernel's credentials of a peer begin with
_OUTQNSD: Final = 0x894B  # SIOCOUTQNSD, which Python has no name for: bytes that have not left yet
_MOST_S: Final = 32767  # the most that the kernel takes for keep-alives
_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")


class Look(NamedTuple):
    """What a look at a peer has shown.

    Attributes:
        ask: whether it is to be asked for a sign of life.
        state: "alive", "suspect" or "lost".
        wait: how long the next look can wait, in seconds.
    """

    ask: bool
    state: str
    wait: float


class FailureDetector:
    """When a peer was heard and asked last. Not thread-safe.

    Attributes:
        heard: when the last byte came, as of the last look.
        silent: seconds of silence as of the last look.
        direct: whether nothing lies between the connection and the peer's process; None: not known yet.
    """

    __slots__ = ("_asked", "_excused", "direct", "heard", "silent")

    def __init__(self) -> None:
        self.heard = self._asked = float("-inf")
        self.silent = 0.0
        self.direct: bool | None = None
        self._excused = 0.0

    def look(
        self,
        now: float,
        heard: float,
        *,
        heartbeat: float,
        misses: int,
        late: float = 0.0,
        receiving: bool = False,
    ) -> Look:
        """Take a look at the peer; the caller asks it where it is told to.

        Args:
            now: the time, in seconds.
            heard: when the last byte came.
            heartbeat: how long a peer may be silent before it is asked, in seconds.
            misses: how many heartbeats make it lost; at least 2.
            late: how many seconds after its time this look comes: this process did not run meanwhile.
            receiving: whether a message has come in part. The peer that sends it may hear nothing until the rest is here, which
                can take long on a slow network: something is said to it at each look.
        """
        if heard > self.heard:
            self.heard = heard
            self._excused = min(late, now - heard)
        else:
            self._excused += late
        since = self.heard + self._excused
        self.silent = silent = now - since
        suspect, lost = 2 * heartbeat, (misses - 0.5) * heartbeat
        ask = (silent >= _ASK * heartbeat or receiving) and now - self._asked >= _ASK * heartbeat
        if ask:
            self._asked = now
        # Not too often for many peers that were heard at different times.
        wait = max(max(since, self._asked) + heartbeat - now, heartbeat / 4)
        for limit in (suspect, lost):
            if silent < limit:
                wait = min(wait, limit - silent + heartbeat / 1000)  # behind it, however it is rounded
        if silent < min(suspect, lost):
            return Look(ask, "alive", wait)
        # An answer is seen at the next look.
        return Look(ask, "suspect" if silent < lost else "lost", min(wait, heartbeat / 2))


def set_up_tcp(sock: socket.socket, settings: Settings) -> None:
    """Have the kernel send small messages at once, and give up on another host that does not acknowledge anything.

    That takes as long as for a silent peer. It also ends connections whose peer reads nothing for so long; between
    processes of one host, where this one may be merely busy, that is left to :class:`FailureDetector`.
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
    """Whether the kernel has bytes for another host that it may not send yet; False where it cannot say, or has ended.

    They are lost where the socket is closed while the other side still writes: its bytes are answered by a reset.
    """
    count = array.array("i", [0])
    try:
        fcntl.ioctl(sock.fileno(), _OUTQNSD, count)
    except (OSError, ValueError):
        return False
    return count[0] > 0


def process_state(pid: int) -> str:
    """Say what a process of this host is: "running" (or ready to, or waiting for a disk), "stopped" or "gone"."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may itself hold spaces and parentheses.
            state = file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    if state in (b"T", b"t"):
        return "stopped"
    return "gone" if state in (b"Z", b"X", b"x") else "running"


def is_direct(sock: socket.socket, pid: int) -> bool:
    """Say whether the other end of a connection is a socket of a process of this host, with nothing in between.

    A relay, a tunnel or a forwarded port may be in between even where both ends are on one host: then a silent peer may be
    well and the way to it broken, and its process says nothing about that.
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
    except OSError:  # closed meanwhile
        return ""


def _ends(table: str, local: int, remote: int) -> list[str]:
    """Return the inodes of the TCP sockets of this network namespace that have these two ports."""
    ends = f":{local:04X}", f":{remote:04X}"
    try:
        with open(table, encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:  # no IPv6, perhaps
        return []
    return [row[9] for row in rows[1:] if row[1].endswith(ends[0]) and row[2].endswith(ends[1])]
