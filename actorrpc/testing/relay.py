"""One connection through a fault proxy: two streams, each read by one task and written by another.

All of it runs on the proxy's thread, in its event loop; nothing here is thread-safe. What is read goes through the
disturbances into a bounded queue, with the time at which it is due; what strikes a connection goes through the queue as
well, so that it comes behind the bytes that were to pass before it. File descriptors that come over a Unix socket travel
along.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from actorrpc.testing.disturbances import STRIKING, Disturbance

__all__ = ["Relay", "abort"]

_CHUNK: Final = 1 << 16
_QUEUED: Final = 64  # pieces that wait in a stream at most: then its sender is slowed
_MAX_FDS: Final = 64
_SLICE_S: Final = 0.05  # a throttled stream moves about so often
_LINGER: Final = struct.pack("ii", 1, 0)


class _Struck(Exception):
    """The connection is over: ``args[0]`` is "reset" or "cut"."""


class _State:
    """What one disturbance is up to in one stream."""

    __slots__ = ("at", "dice", "disturbance", "done")

    def __init__(self, disturbance: Disturbance, dice: random.Random, position: int) -> None:
        self.disturbance = disturbance
        self.dice = dice
        self.at = position + disturbance.draw(dice)
        self.done = False


class _Stream:
    """One direction of a connection."""

    def __init__(self, relay: Relay, direction: str, source: socket.socket, sink: socket.socket) -> None:
        self._relay = relay
        self._direction = direction
        self._source = source
        self._sink = sink
        self._position = 0
        self._due = 0.0
        self._states: list[_State] = []
        self._added = 0
        self._queue: asyncio.Queue[tuple[float, bytes, list[int], _State | None]] = asyncio.Queue(_QUEUED)

    def add(self, disturbance: Disturbance) -> None:
        """Have a disturbance disturb this stream, from here on, if it concerns it."""
        relay = self._relay
        dice = random.Random(f"{relay.seed}/{relay.number}/{self._direction}/{self._added}")
        self._added += 1
        if disturbance.concerns(relay.number, self._direction, dice):
            self._states.append(_State(disturbance, dice, self._position))

    def remove(self, disturbance: Disturbance) -> None:
        """Take a disturbance off this stream."""
        self._states = [each for each in self._states if each.disturbance is not disturbance]

    # -- reading -----------------------------------------------------------------------------------

    async def read(self) -> None:
        """Read until the end of the stream, or until it is struck so that nothing passes any more."""
        while True:
            for state in self._striking(self._position):
                if not state.disturbance.part and await self._strike(state):
                    await self._swallow()
                    return
            data, fds = await _receive(self._source, self._slice())
            if not data:
                await self._queue.put((0.0, b"", [], None))
                return
            while data or fds:
                passing, struck = self._until_struck(data)
                await self._pass(data[:passing], fds)
                data, fds = data[passing:], []
                if struck is not None and await self._strike(struck):
                    await self._swallow()
                    return

    def _slice(self) -> int:
        rates = [each.disturbance.rate for each in self._states if each.disturbance.rate]
        return max(1, min(_CHUNK, int(min(rates) * _SLICE_S))) if rates else _CHUNK

    def _striking(self, position: int) -> list[_State]:
        found = [
            each
            for each in self._states
            if each.disturbance.action in STRIKING and not each.done and each.at <= position
        ]
        return sorted(found, key=lambda each: each.at)

    def _until_struck(self, data: bytes) -> tuple[int, _State | None]:
        """Return how much of what was read passes before the next disturbance strikes, and which."""
        for state in self._striking(self._position + len(data)):
            ahead = max(0, state.at - self._position)
            part = state.disturbance.part
            if not part:
                return ahead, state
            if ahead < len(data):  # else it strikes what is read next
                return ahead + int((len(data) - ahead) * part), state
        return len(data), None

    async def _pass(self, data: bytes, fds: list[int]) -> None:
        if not data and not fds:
            return
        begin, self._position = self._position, self._position + len(data)
        due = now = asyncio.get_running_loop().time()
        for state in self._states:
            what = state.disturbance
            if what.action == "bit_flips":
                data = self._flipped(data, begin, state)
            elif what.action == "latency":
                due += what.seconds + what.jitter * state.dice.random()
        for state in self._states:
            if state.disturbance.action == "throttle":
                due = max(due, self._due, now) + len(data) / state.disturbance.rate
        self._due = max(due, self._due)
        await self._queue.put((self._due, data, fds, None))

    def _flipped(self, data: bytes, begin: int, state: _State) -> bytes:
        if state.at >= begin + len(data):
            return data
        changed = bytearray(data)
        while state.at < begin + len(data):
            if state.at >= begin:
                changed[state.at - begin] ^= 1 << state.dice.randrange(8)
                self._relay.struck("bit_flips")
            state.at += state.dice.randint(1, 2 * state.disturbance.every - 1)
        return bytes(changed)

    async def _strike(self, state: _State) -> bool:
        """Have a disturbance strike behind what was read so far; say whether nothing passes any more."""
        state.done = True
        if not self._relay.may_strike(state.disturbance):
            return False
        await self._queue.put((self._due, b"", [], state))
        return state.disturbance.action != "stall"

    async def _swallow(self) -> None:
        while True:
            data, fds = await _receive(self._source, _CHUNK)
            _close_all(fds)
            if not data:
                return

    # -- writing -----------------------------------------------------------------------------------

    async def write(self) -> None:
        """Write what is due, until the end of the stream.

        Raises:
            _Struck: the connection is struck.
        """
        loop = asyncio.get_running_loop()
        while True:
            due, data, fds, state = await self._queue.get()
            try:
                wait = due - loop.time()
                if wait > 0:
                    await asyncio.sleep(wait)
                await self._relay.open.wait()
                if state is not None:
                    if await self._struck(state.disturbance):
                        return
                elif not data:
                    self._end()
                    return
                else:
                    await _send(self._sink, data, fds)
                    self._relay.passed(len(data))
            finally:
                _close_all(fds)

    async def _struck(self, what: Disturbance) -> bool:
        """Do what a disturbance does; say whether that is the end of the stream."""
        self._relay.struck(what.action)
        if what.action == "stall":
            await asyncio.sleep(what.seconds if what.seconds != math.inf else 1e9)
            return False
        if what.action == "half_close":
            self._end()
            return True
        raise _Struck(what.action)

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Drop what is still queued."""
        while not self._queue.empty():
            _close_all(self._queue.get_nowait()[2])


class Relay:
    """One connection.

    Args:
        struck: told of every disturbance that has struck.
        passed: told how many bytes have been handed on.
        may_strike: asked whether a disturbance may strike once more; counts.
        open: not set while all connections are stalled.
    """

    def __init__(
        self,
        number: int,
        seed: int,
        client: socket.socket,
        *,
        struck: Callable[[str], None],
        passed: Callable[[int], None],
        may_strike: Callable[[Disturbance], bool],
        open: asyncio.Event,
    ) -> None:
        self.number = number
        self.seed = seed
        self.struck = struck
        self.passed = passed
        self.may_strike = may_strike
        self.open = open
        self._client = client
        self._streams: list[_Stream] = []
        self._how = "cut"
        self._task: asyncio.Task[Any] | None = None
        self._ended = False

    def add(self, disturbance: Disturbance) -> None:
        """Have a disturbance disturb this connection from here on."""
        for stream in self._streams:
            stream.add(disturbance)

    def remove(self, disturbance: Disturbance) -> None:
        """Take a disturbance off this connection."""
        for stream in self._streams:
            stream.remove(disturbance)

    def end(self, how: str) -> None:
        """End the connection now, by ``"reset"`` or ``"cut"``; where it ends already, nothing changes."""
        if not self._ended:
            self._ended, self._how = True, how
            if self._task is not None:
                self._task.cancel()

    async def run(
        self,
        family: int,
        address: Any,
        disturbances: Callable[[], Sequence[Disturbance]],
        unreachable: Callable[[OSError], None],
    ) -> None:
        """Relay until the connection is over.

        Args:
            unreachable: told why the target cannot be reached, before the client can know.
        """
        if self._ended:
            abort(self._client)
            return
        self._task = asyncio.current_task()
        server = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        server.setblocking(False)
        tasks: list[asyncio.Task[None]] = []
        try:
            try:
                await asyncio.get_running_loop().sock_connect(server, address)
            except OSError as error:
                self._how = "reset"
                unreachable(error)
                return
            for sock in (self._client, server):
                if sock.family != socket.AF_UNIX:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._streams = [
                _Stream(self, "to", self._client, server),
                _Stream(self, "from", server, self._client),
            ]
            for disturbance in disturbances():
                self.add(disturbance)
            for stream in self._streams:
                tasks += [asyncio.ensure_future(stream.read()), asyncio.ensure_future(stream.write())]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                failure = task.exception()
                if isinstance(failure, _Struck):
                    self._how = failure.args[0]
                elif isinstance(failure, OSError):
                    self._how = "reset"  # one end has gone: the other hears of it as it would without a proxy
                elif failure is not None:
                    raise failure
        except asyncio.CancelledError:
            pass  # ended from outside: this task does nothing else
        finally:
            self._ended = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in self._streams:
                stream.close()
            for sock in (self._client, server):
                if self._how == "reset":
                    abort(sock)
                else:
                    sock.close()


def abort(sock: socket.socket) -> None:
    """Close a socket with a RST; a Unix socket just closes."""
    if sock.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
    sock.close()


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


async def _receive(sock: socket.socket, most: int) -> tuple[bytes, list[int]]:
    while True:
        try:
            if sock.family != socket.AF_UNIX:
                return sock.recv(most), []
            data, fds, _, _ = socket.recv_fds(sock, most, _MAX_FDS)
            return data, list(fds)
        except BlockingIOError:
            await _ready(sock, False)


async def _send(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    rest = memoryview(data)
    while rest:
        try:
            if fds:
                count = socket.send_fds(sock, [rest], fds)
                _close_all(fds)
            else:
                count = sock.send(rest, socket.MSG_NOSIGNAL)
            rest = rest[count:]
        except BlockingIOError:
            await _ready(sock, True)


async def _ready(sock: socket.socket, writable: bool) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    add, remove = (loop.add_writer, loop.remove_writer) if writable else (loop.add_reader, loop.remove_reader)
    add(sock.fileno(), wake)
    try:
        await ready
    finally:
        remove(sock.fileno())
