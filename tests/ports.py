"""TCP ports that nobody else takes before a test does."""

from __future__ import annotations

import random
import socket
from pathlib import Path

__all__ = ["free_port"]

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_dice = random.Random()  # not the one that tests seed


def free_port() -> int:
    """Return a port of this host that nobody uses.

    Not one that the kernel gives to whoever asks for any: tests run side by side, and such a port would be taken by the next
    connection of another one before the process that it is meant for has started.
    """
    first = int(_RANGE.read_text().split()[0])
    while True:
        port = _dice.randrange(min(12_000, first // 2), first)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
