"""Ports for tests: free, and not among those that connections get."""

from __future__ import annotations

import socket

from tests.ports import _RANGE, free_port


def test_ports_are_free_and_not_among_those_that_connections_get() -> None:
    first, last = map(int, _RANGE.read_text().split())
    for _ in range(20):
        port = free_port()
        assert not first <= port <= last
        with socket.create_server(("127.0.0.1", port)):
            pass
