"""A fault proxy: a relay in front of a worker, which disturbs the worker's connections.

    with FaultProxy(disturbances=[Disturbance("cut", after=(500, 60_000))], seed=7) as proxy:
        # in the process of the worker that runs behind it:
        rpc.init_rpc("worker1", rank=1, world_size=2,
                     rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=..., **proxy.options))
        ...
        proxy.reset()                         # all its connections break now

A connection has two streams: ``"to"`` the worker behind the proxy, and ``"from"`` it. A position is counted in bytes from the
stream's beginning (or from where the stream was when the disturbance was added). It is drawn from random numbers that depend
only on the seed, the connection's number, the direction and the disturbance: the same seed disturbs the same bytes, however
the kernel splits the stream. All state, but for counters, belongs to the event loop of the proxy's thread.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

__all__ = ["Disturbance", "FaultProxy"]

_T = TypeVar("_T")
_CHUNK: Final = 1 << 16
_LINGER: Final = struct.pack("ii", 1, 0)  # close() sends a RST
_REFUSES_S: Final = 0.1  # if the target refuses a connection, the proxy refuses connections for this time
_PATIENCE_S: Final = 10.0
_STRIKING: Final = ("stall", "half_close", "reset", "cut")


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """One way in which a proxy disturbs streams.

    Attributes:
        action: ``"bit_flips"`` flips one bit in ``every`` bytes on average; ``"stall"`` holds back all bytes from then on;
            ``"half_close"`` ends one stream of a connection and keeps the other; ``"reset"`` aborts a connection with a RST to
            both ends; ``"cut"`` closes it at both ends.
        after: the number of bytes after which it strikes, or the least and the greatest: then a number is drawn for each stream.
        part: when it strikes, this fraction of the next read still passes: with 0.5 and small messages, it strikes in the middle
            of a frame.
        direction: the streams that it applies to.
        connections: the numbers of the connections that it applies to, in the order in which they are made, from 0; None: all.
        probability: the probability that it applies to a stream.
        times: the greatest number of streams that it strikes; None: all.
    """

    action: Literal["bit_flips", "stall", "half_close", "reset", "cut"] = field(kw_only=False)
    every: int = 0
    after: int | tuple[int, int] = 0
    part: float = 0.0
    direction: Literal["to", "from", "both"] = "both"
    connections: Collection[int] | None = None
    probability: float = 1.0
    times: int | None = None


class _Ended(Exception):
    """A disturbance ends the connection: ``args[0]`` is "reset" or "cut"."""


class _State:
    """The state of one disturbance in one stream."""

    def __init__(self, what: Disturbance, dice: random.Random, position: int) -> None:
        self.what = what
        self.dice = dice
        least, most = what.after if isinstance(what.after, tuple) else (what.after, what.after)
        self.at = position + dice.randint(least, most)


class _Stream:
    """One direction of a connection."""

    def __init__(self, proxy: FaultProxy, number: int, direction: str) -> None:
        self._proxy = proxy
        self._number = number
        self._direction = direction
        self._position = 0
        self._states: list[_State] = []
        self._added = 0

    def add(self, what: Disturbance) -> None:
        dice = random.Random(f"{self._proxy.seed}/{self._number}/{self._direction}/{self._added}")
        self._added += 1
        lucky = dice.random() < what.probability
        chosen = what.connections is None or self._number in what.connections
        if lucky and chosen and what.direction in ("both", self._direction):
            self._states.append(_State(what, dice, self._position))

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(0)  # drain() waits until the kernel has all bytes
        while data := await reader.read(_CHUNK):
            while data:
                count, state = self._until_struck(data)
                await self._proxy.is_open.wait()
                writer.write(self._flipped(data[:count]))
                await writer.drain()
                self._position += count
                data = data[count:]
                if state is not None and await self._strike(state, writer):
                    while await reader.read(_CHUNK):
                        pass
                    return
        await self._proxy.is_open.wait()
        writer.write_eof()

    def _until_struck(self, data: bytes) -> tuple[int, _State | None]:
        """Return how many of the bytes read pass before the next disturbance strikes, and its state."""
        for state in sorted(self._states, key=lambda each: each.at):
            ahead, part = max(0, state.at - self._position), state.what.part
            if state.what.action in _STRIKING and ahead <= len(data) - bool(part):
                return ahead + int((len(data) - ahead) * part), state
        return len(data), None

    def _flipped(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for state in self._states:
            while state.what.action == "bit_flips" and state.at < self._position + len(data):
                changed[state.at - self._position] ^= 1 << state.dice.randrange(8)
                state.at += state.dice.randint(1, 2 * state.what.every - 1)
                self._proxy.struck["bit_flips"] += 1
        return bytes(changed)

    async def _strike(self, state: _State, writer: asyncio.StreamWriter) -> bool:
        """Apply a disturbance; return whether the other bytes of the stream are lost."""
        self._states.remove(state)
        if not self._proxy.may_strike(state.what):
            return False
        await self._proxy.is_open.wait()
        self._proxy.struck[state.what.action] += 1
        if state.what.action == "stall":
            await asyncio.Event().wait()
        if state.what.action != "half_close":
            raise _Ended(state.what.action)
        writer.write_eof()
        return True


class _Connection:
    def __init__(self, proxy: FaultProxy, number: int, writer: asyncio.StreamWriter) -> None:
        self.streams = [_Stream(proxy, number, direction) for direction in ("to", "from")]
        self._writers = [writer]
        self.is_over = False

    async def run(self, reader: asyncio.StreamReader, target: tuple[str, int]) -> None:
        """Relay until the connection ends. Raises OSError if the target cannot be reached."""
        try:
            far_reader, far_writer = await asyncio.open_connection(*target)
        except OSError:
            self.end("reset")
            raise
        self._writers.append(far_writer)
        to, back = self.streams
        try:
            if not self.is_over:
                await asyncio.gather(to.copy(reader, far_writer), back.copy(far_reader, self._writers[0]))
        except _Ended as error:
            self.end(error.args[0])
        except OSError:
            self.end("reset")  # one end is lost: the other end gets a RST, as without a proxy
        except asyncio.CancelledError:
            pass  # the proxy is closed
        finally:
            self.is_over = True
            for each in self._writers:
                each.close()

    def end(self, how: str) -> None:
        """End the connection at both ends, by ``"reset"`` or ``"cut"``."""
        self.is_over = True
        for each in self._writers:
            if how == "reset" and not each.is_closing():
                each.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
            each.transport.abort()


class FaultProxy:
    """A relay in front of one worker, or of any other listening socket. Its methods are thread-safe.

    It listens from :meth:`start` (or the beginning of its block) to :meth:`close` (the end of its block), which cuts the
    connections. If no process listens behind it, it refuses connections, too.

    Args:
        target: the address behind it. By default, the proxy reserves a free port for a worker: start the worker with
            :attr:`options`.
        disturbances: disturbances of every connection.
        seed: the seed of all random numbers: the same seed disturbs the same bytes.

    Attributes:
        connections: how many connections were made.
        struck: how often each kind of disturbance has struck, including :meth:`reset` and :meth:`cut`.
    """

    def __init__(
        self,
        target: tuple[str, int] | None = None,
        *,
        disturbances: Iterable[Disturbance] = (),
        seed: int = 0,
    ) -> None:
        self.seed = seed
        self.connections = 0
        self.struck: Counter[str] = Counter()
        self._disturbances = list(disturbances)
        # Bound but not listening, so that no other process gets these ports.
        self._kept = [_reserved(), _reserved()]
        self._own: tuple[str, int] = self._kept[0].getsockname()
        self._target: tuple[str, int] = target or self._kept[1].getsockname()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fault-proxy")
        self._thread.daemon = True
        self._strikes: Counter[int] = Counter()
        self._live: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself keeps no reference to a task
        self._server: asyncio.Server | None = None
        self._refuses = False

    @property
    def address(self) -> str:
        """Where it listens: ``host:port``."""
        return "{}:{}".format(*self._own)

    @property
    def options(self) -> dict[str, Any]:
        """Keywords for the options of ``init_rpc`` that put a worker behind the proxy."""
        host, port = self._target
        return {"transport": "tcp", "bind": host, "port": port, "advertise": self.address}

    def start(self) -> FaultProxy:
        """Begin to listen and relay."""
        self._thread.start()
        self._started.wait()
        return self

    def close(self) -> None:
        """Cut all connections and stop listening. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()
        for sock in self._kept:
            sock.close()

    def __enter__(self) -> FaultProxy:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- disturbing -----------------------------------------------------------------------

    def add(self, disturbance: Disturbance) -> None:
        """Apply a disturbance to all connections; to those that exist, from their present position."""

        def go() -> None:
            self._disturbances.append(disturbance)
            for each in self._live:
                for stream in each.streams:
                    stream.add(disturbance)

        self._call(go)

    def reset(self) -> int:
        """Abort all connections at once, with a RST to both ends; return how many."""
        return self._call(lambda: self._end_all("reset"))

    def cut(self) -> int:
        """Close all connections at once, at both ends; return how many."""
        return self._call(lambda: self._end_all("cut"))

    def stall(self) -> None:
        """Hold back all bytes until :meth:`resume`. New connections are accepted, but no bytes pass."""
        self._call(lambda: self.is_open.clear())

    def refuse(self) -> None:
        """Refuse new connections until :meth:`resume`. Existing connections stay: end them with :meth:`reset`."""

        def go() -> None:
            self._refuses = True
            self._shut()

        self._call(go)

    def resume(self) -> None:
        """Pass the bytes that were held back, and accept connections again."""

        async def go() -> None:
            self._refuses = False
            await self._listen()
            self.is_open.set()

        asyncio.run_coroutine_threadsafe(go(), self._loop).result(_PATIENCE_S)

    # -- in its thread -------------------------------------------------------------------------

    def may_strike(self, disturbance: Disturbance) -> bool:
        """Return whether a disturbance may strike again, and count the call."""
        self._strikes[id(disturbance)] += 1
        return disturbance.times is None or self._strikes[id(disturbance)] <= disturbance.times

    def _call(self, function: Callable[[], _T]) -> _T:
        async def call() -> _T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(_PATIENCE_S)

    async def _serve(self) -> None:
        self._loop, self._over, self.is_open = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self.is_open.set()
        await self._listen()
        self._started.set()
        await self._over.wait()
        self._refuses = True
        self._shut()
        for _ in range(3):  # until asyncio has called _accept() for all accepted sockets
            await asyncio.sleep(0)
        for each in self._live:
            each.end("cut")

    async def _listen(self) -> None:
        if self._server is None and not self._refuses:
            self._server = await asyncio.start_server(self._accept, *self._own)

    def _shut(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self, self.connections, writer)
        self.connections += 1
        self._live.add(connection)
        for disturbance in self._disturbances:
            for stream in connection.streams:
                stream.add(disturbance)
        task = self._loop.create_task(self._relay(connection, reader))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        try:
            await connection.run(reader, self._target)
        except OSError:
            self._shut()
            self._loop.call_later(_REFUSES_S, lambda: asyncio.ensure_future(self._listen()))
        finally:
            self._live.discard(connection)

    def _end_all(self, how: str) -> int:
        ended = [each for each in self._live if not each.is_over]
        for each in ended:
            each.end(how)
        self.struck[how] += len(ended)
        return len(ended)


def _reserved() -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock
