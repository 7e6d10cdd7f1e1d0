"""Ports for tests are free and outside the ephemeral range."""

from __future__ import annotations

import socket

from tests.ports import _RANGE, free_port


def test_ports_are_free_and_outside_the_ephemeral_range() -> None:
    first, last = map(int, _RANGE.read_text().split())
    for _ in range(20):
        port = free_port()
        assert not first <= port <= last
        with socket.create_server(("127.0.0.1", port)):
            pass
