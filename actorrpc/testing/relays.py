"""The network of an in-process cluster: relays through which its workers connect to each other.

Relays run in the event loop of a thread. All of their state belongs to this thread; the methods are thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final, TypeVar

__all__ = ["Relays"]

_T = TypeVar("_T")
_Connection = list[asyncio.StreamWriter]  # the writers of its two ends

_CHUNK: Final = 1 << 16
_PATIENCE_S: Final = 10.0
_LINGER: Final = struct.pack("ii", 1, 0)  # close() sends a RST


class _Relay:
    """Relays the connections that one worker makes to another."""

    def __init__(self, host: str, port: int, is_open: asyncio.Event) -> None:
        self._target = host, port
        self._is_open = is_open  # cleared while the two workers are cut apart
        self._connections: list[_Connection] = []
        self._server: asyncio.Server | None = None

    async def listen(self) -> tuple[str, int]:
        """Begin to accept connections; return the address."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return host, port

    def refuse(self) -> None:
        """Refuse connections from now on."""
        if self._server is not None:
            self._server.close()

    def reset(self) -> int:
        """Abort all connections with a RST to both ends; return how many."""
        broken, self._connections = self._connections, []
        for connection in broken:
            _reset(connection)
        return len(broken)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = [writer]
        self._connections.append(connection)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            connection.append(far_writer)
            if connection not in self._connections:  # reset() was called meanwhile
                raise ConnectionResetError
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):  # the worker has shut down, and does not come back
                self.refuse()
            _reset(connection)
        finally:
            with contextlib.suppress(ValueError):
                self._connections.remove(connection)
            for each in connection:
                each.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            await self._is_open.wait()
            writer.write(data)
            await writer.drain()
        await self._is_open.wait()
        writer.write_eof()


def _reset(connection: _Connection) -> None:
    for writer in connection:
        if not writer.is_closing():
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
            writer.transport.abort()


class Relays:
    """The relays of a cluster. Workers are given by their names, and a pair of workers by a set of two names."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relays", daemon=True)
        self._addresses: dict[tuple[str, str], tuple[str, int]] = {}
        self._relays: dict[tuple[str, str], _Relay] = {}
        self._is_open: dict[frozenset[str], asyncio.Event] = {}
        self._killed: set[str] = set()
        self._thread.start()
        self._started.wait()

    def address(self, one: str, other: str, target: str) -> tuple[str, int]:
        """Return the address at which a worker connects to another, which listens at ``target`` (``host:port``)."""

        async def find() -> tuple[str, int]:
            way = one, other
            if way not in self._relays:
                host, _, port = target.rpartition(":")
                relay = self._relays[way] = _Relay(host, int(port), self._event(frozenset(way)))
                self._addresses[way] = await relay.listen()
                if self._killed & set(way):
                    relay.refuse()
            return self._addresses[way]

        return asyncio.run_coroutine_threadsafe(find(), self._loop).result(_PATIENCE_S)

    def cut(self, pair: frozenset[str]) -> None:
        """Hold back all bytes between two workers. New connections are accepted, but no bytes pass."""
        self._do(lambda: self._event(pair).clear())

    def heal(self, pair: frozenset[str]) -> None:
        """Deliver the bytes that were held back, and relay again."""
        self._do(lambda: self._event(pair).set())

    def reset(self, pair: frozenset[str]) -> int:
        """Break the connections between two workers; return how many."""
        return self._do(lambda: sum(relay.reset() for way, relay in self._relays.items() if pair == set(way)))

    def kill(self, name: str) -> None:
        """Break the connections of a worker, and refuse connections to it and from it."""

        def go() -> None:
            self._killed.add(name)
            for way, relay in self._relays.items():
                if name in way:
                    relay.refuse()
                    relay.reset()

        self._do(go)

    def close(self) -> None:
        """Break all connections, and end the thread."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _event(self, pair: frozenset[str]) -> asyncio.Event:
        if pair not in self._is_open:
            self._is_open[pair] = asyncio.Event()
            self._is_open[pair].set()
        return self._is_open[pair]

    def _do(self, go: Callable[[], _T]) -> _T:
        """Call a function in the thread of the relays, and return its result."""

        async def call() -> _T:
            return go()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(_PATIENCE_S)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._started.set()
        await self._over.wait()
        for relay in self._relays.values():
            relay.refuse()
            relay.reset()
