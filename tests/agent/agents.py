"""Several agents in one process, without a rendezvous, and :class:`Stranger`, a peer that speaks to them in raw bytes."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from actorrpc import _time
from actorrpc.agent.agent import Agent
from actorrpc.config import Settings
from actorrpc.wire import keys
from actorrpc.wire.frames import INTRO, Frame, FrameReader, pack_frame
from actorrpc.wire.handshake import Dialler, Purpose
from actorrpc.wire.identity import WorkerRecord, host_identity, new_incarnation
from actorrpc.wire.keys import Key
from tests import certificates

KEY = Key.from_text("the key of these tests")
__all__ = ["KEY", "Stranger", "agents", "record", "start_agent"]


def record(name: str, rank: int, path: str | None = None) -> WorkerRecord:
    """Describe a worker of this process."""
    return WorkerRecord(
        name=name,
        rank=rank,
        incarnation=new_incarnation(),
        host=host_identity(),
        unix_path=path,
        pid=os.getpid(),
    )


def start_agent(
    mine: WorkerRecord,
    listener: socket.socket,
    records: dict[str | int, WorkerRecord],
    key: Key = KEY,
    **settings: Any,
) -> Agent:
    """Enter a worker into ``records``, in which its agent finds all workers, and start this agent."""
    records[mine.rank] = records[mine.name] = mine
    agent = Agent(
        mine,
        settings=Settings(**settings),
        key=key,
        resolve=records.get,
        members=lambda: [each for name, each in records.items() if isinstance(name, str)],
    )
    agent.start([listener])
    return agent


@contextlib.contextmanager
def agents(count: int, key: Key = KEY, *, unix: bool = True, **settings: Any) -> Iterator[list[Agent]]:
    """Run agents named a0, a1, ... that can call each other and listen on Unix sockets or on TCP."""
    records: dict[str | int, WorkerRecord] = {}
    made: list[Agent] = []
    with contextlib.ExitStack() as stack:
        for rank in range(count):
            if certificates.OVER_TLS:
                settings = {"transport": "tcp", **certificates.OPTIONS, **settings}
            over_tcp = certificates.OVER_TLS or not unix
            path = None if over_tcp else keys.socket_path(keys.runtime_directory())
            if path is None:
                listener = socket.create_server(("127.0.0.1", 0))
            else:
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
                listener.bind(path)
                listener.listen(16)
            mine = record(f"a{rank}", rank, path)
            if path is None:
                mine = replace(mine, tcp=(listener.getsockname()[:2],))
            mine = replace(mine, data_only=settings.get("data_only", False))
            made.append(start_agent(mine, listener, records, key, **settings))
            stack.callback(made[-1].close)
        yield made


class Stranger:
    """A peer that connects to an agent over a raw socket, with the right or a wrong key."""

    def __init__(self, to: Agent, key: Key = KEY, name: str = "stranger", **dialler: Any) -> None:
        path = to.record.unix_path
        self._binding = b""
        self.sock: Any
        if path is None:
            sock = socket.create_connection(to.record.tcp[0])
            if to.connector.tls is not None:
                self.sock = to.connector.tls.dial(sock, _time.now() + 10)
                self.sock.settimeout(None)
                self._binding = self.sock.binding
            else:
                self.sock = sock
        else:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.connect(path)
        self.record = record(name, 77)
        self._reader = FrameReader(max_frame=1 << 22, max_chunk=1 << 20)
        options: dict[str, Any] = {
            "name": name,
            "incarnation": self.record.incarnation,
            "purpose": Purpose.MAIN,
            "attach": secrets.token_bytes(16),  # the token of this connection
            "peer_name": to.record.name,
            "peer_incarnation": to.record.incarnation,
        }
        self._dialler = Dialler(key=key.reveal(), **(options | dialler))

    def shake_hands(self) -> None:
        """Do the handshake; raise its error."""
        data = self._dialler.start(self._binding)
        while True:
            if data:
                self.sock.sendall(data)
            if self._dialler.done:
                return
            received = self.sock.recv(self._dialler.wanted)
            if not received:
                raise ConnectionResetError("closed during the handshake")
            data = self._dialler.feed(received)

    def introduce(self) -> None:
        """Send the INTRO frame."""
        self.sock.sendall(pack_frame(INTRO, body=self.record.to_bytes()))

    def frames(self) -> list[Frame]:
        """Read until a frame is complete. Return an empty list at the end of the connection."""
        while True:
            target = self._reader.target()
            try:
                data = self.sock.recv(len(target[0]))
                count = len(data)
                target[0][:count] = data
            except ConnectionError:
                return []
            if not count:
                return []
            found = self._reader.fed(count)
            if found:
                return found

    def read_to_the_end(self) -> list[Frame]:
        """Read until the other side has closed."""
        read: list[Frame] = []
        while found := self.frames():
            read += found
        return read

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()
