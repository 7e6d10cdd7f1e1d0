"""TCP ports for servers that tests start."""

from __future__ import annotations

import random
import socket
from pathlib import Path

__all__ = ["free_port"]

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_dice = random.Random()  # independent of the global generator, which pytest-randomly seeds


def free_port() -> int:
    """Return an unused port of this host.

    It is outside the kernel's range of ephemeral ports: a connection of another test that runs at the same time could
    take an ephemeral port before the server for which it is meant has started.
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
