"""Agents that listen on loopback TCP, and raw connections to them."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from actorrpc import _time
from actorrpc.agent.agent import Agent
from actorrpc.transport.tls_socket import TlsSocket
from actorrpc.wire.handshake import Dialler, Purpose
from actorrpc.wire.identity import WorkerRecord, new_incarnation
from actorrpc.wire.keys import Key
from tests.agent.agents import KEY, record, start_agent

__all__ = [
    "WRONG",
    "dialler",
    "door",
    "knock",
    "reset",
    "reset_on_close",
    "secure",
    "tcp_agents",
    "tls_records",
    "until",
]

WRONG = Key.from_text("not the key of these tests")


@contextlib.contextmanager
def tcp_agents(
    count: int,
    key: Key = KEY,
    host: str = "127.0.0.1",
    each: Sequence[dict[str, Any]] | None = None,
    keys: Sequence[Key] = (),
    through: Callable[[tuple[str, int]], tuple[str, int]] = lambda address: address,
    **settings: Any,
) -> Iterator[list[Agent]]:
    """Run agents named a0, a1, ... that call each other over TCP only.

    Args:
        each: settings of the single agents.
        keys: keys of the single agents.
        through: maps the address of each agent to the address that it announces.
    """
    records: dict[str | int, WorkerRecord] = {}
    with contextlib.ExitStack() as stack:
        made: list[Agent] = []
        for rank in range(count):
            listener = socket.create_server((host, 0), backlog=512)
            stack.callback(listener.close)
            mine = replace(record(f"a{rank}", rank), tcp=(through(listener.getsockname()[:2]),))
            own = {**settings, **(each[rank] if each else {})}
            used = keys[rank] if keys else key
            made.append(start_agent(mine, listener, records, used, transport="tcp", **own))
            stack.callback(made[-1].close)
        yield made


def door(agent: Agent) -> tuple[str, int]:
    """Return the address on which an agent listens."""
    return agent.record.tcp[0]


def knock(agent: Agent, source: str = "127.0.0.1", timeout: float = 20.0) -> socket.socket:
    """Connect from a loopback address."""
    return socket.create_connection(door(agent), timeout, (source, 0))


def dialler(agent: Agent, key: Key = KEY, **options: Any) -> Dialler:
    """Return a Dialler for a handshake with an agent."""
    given: dict[str, Any] = {
        "name": "stranger",
        "incarnation": new_incarnation(),
        "purpose": Purpose.MAIN,
        "peer_name": agent.record.name,
        "peer_incarnation": agent.record.incarnation,
    }
    return Dialler(key=key.reveal(), **(given | options))


def secure(agent: Agent, sock: socket.socket) -> TlsSocket:
    """Do the TLS handshake of a dialler that has no certificate."""
    tls = agent.connector.tls
    assert tls is not None
    made = tls.dial(sock, _time.now() + 20.0)
    made.settimeout(20.0)
    return made


def reset_on_close(sock: socket.socket) -> None:
    """Let the end of a connection be a reset, so that its port is free at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def reset(sock: socket.socket) -> None:
    """Close a socket with a reset."""
    reset_on_close(sock)
    sock.close()


def until(sock: socket.socket) -> bytes:
    """Read until the other side closes."""
    data = b""
    while True:
        try:
            more = sock.recv(4096)
        except ConnectionError:
            return data
        if not more:
            return data
        data += more


def tls_records(stream: bytes) -> list[int]:
    """Return the kinds of the TLS records of which a stream consists; fail if it consists of something else."""
    kinds, at = [], 0
    while at < len(stream):
        kind, version, size = struct.unpack_from("!BHH", stream, at)
        assert kind in range(20, 24)  # change_cipher_spec, alert, handshake, application_data
        assert version in (0x0301, 0x0303)
        assert size <= (16 << 10) + 256
        kinds.append(kind)
        at += 5 + size
    assert at == len(stream)
    return kinds
