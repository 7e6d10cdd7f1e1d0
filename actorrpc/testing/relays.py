"""The network of an in-process cluster: relays through which its workers connect to each other.

Relays run in the event loop of a thread, to which their state belongs. The public methods of :class:`Relays` are thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

__all__ = ["Relays"]

_T = TypeVar("_T")
_Connection = list[asyncio.StreamWriter]  # the writers of the connection's two ends

_CHUNK: Final = 1 << 16
_PATIENCE_S: Final = 10.0
_LINGER: Final = struct.pack("ii", 1, 0)  # close() sends a RST


class _Relay:
    """Relays the connections that one worker makes to another."""

    def __init__(self, target: tuple[str, int], is_open: asyncio.Event) -> None:
        self._target = target
        self._is_open = is_open  # cleared while the two workers are cut apart
        self._connections: list[_Connection] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself keeps only weak references to tasks

    async def listen(self) -> tuple[str, int]:
        """Begin to accept connections; return the address."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
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

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = [writer]
        self._connections.append(connection)
        task = asyncio.get_running_loop().create_task(self._serve(connection, reader))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            connection.append(far_writer)
            if connection not in self._connections:  # reset() was called meanwhile
                raise ConnectionResetError
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, connection[0]))
        except (OSError, asyncio.CancelledError) as error:
            if isinstance(error, ConnectionRefusedError):  # the target worker has shut down for good
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
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="relays", daemon=True)
        self._relays: dict[tuple[str, str], tuple[_Relay, tuple[str, int]]] = {}  # with their addresses
        self._is_open: defaultdict[frozenset[str], asyncio.Event] = defaultdict(_set_event)
        self._killed: set[str] = set()
        self._thread.start()
        self._started.wait()

    def address(self, one: str, other: str, target: tuple[str, int]) -> tuple[str, int]:
        """Return the address at which a worker connects to another, which listens at ``target``."""

        async def find() -> tuple[str, int]:
            way = one, other
            if way not in self._relays:
                relay = _Relay(target, self._is_open[frozenset(way)])
                self._relays[way] = relay, await relay.listen()
                if not self._killed.isdisjoint(way):
                    relay.refuse()
            return self._relays[way][1]

        return self._run(find())

    def cut(self, pair: frozenset[str]) -> None:
        """Hold back all bytes between two workers. New connections are accepted, but no bytes pass."""
        self._call(lambda: self._is_open[pair].clear())

    def heal(self, pair: frozenset[str]) -> None:
        """Deliver the bytes that were held back, and relay again."""
        self._call(lambda: self._is_open[pair].set())

    def reset(self, pair: frozenset[str]) -> int:
        """Break the connections between two workers; return how many."""
        return self._call(
            lambda: sum(relay.reset() for way, (relay, _) in self._relays.items() if pair == set(way))
        )

    def kill(self, name: str) -> None:
        """Break the connections of a worker, and refuse connections to it and from it."""

        def go() -> None:
            self._killed.add(name)
            for way, (relay, _) in self._relays.items():
                if name in way:
                    relay.refuse()
                    relay.reset()

        self._call(go)

    def close(self) -> None:
        """Break all connections, and end the thread."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _call(self, function: Callable[[], _T]) -> _T:
        async def call() -> _T:
            return function()

        return self._run(call())

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_PATIENCE_S)

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        await self._over.wait()
        for relay, _ in self._relays.values():
            relay.refuse()
        for _ in range(3):  # until asyncio has called _accept() for all accepted sockets
            await asyncio.sleep(0)
        for relay, _ in self._relays.values():
            relay.reset()


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
