"""A fault proxy: a relay in front of a worker, which disturbs the worker's connections.

    with FaultProxy(disturbances=[Disturbance("latency", seconds=0.02)], seed=7) as proxy:
        # in the process of the worker that runs behind it:
        rpc.init_rpc("worker1", rank=1, world_size=2,
                     rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=..., **proxy.options))
        ...
        proxy.reset()                         # all its connections break now

It needs no root rights: it relays in user space, in its own thread. Several may run in one process.

A connection through it is a :class:`Relay` of two streams. Each stream has a task that reads and a task that writes. They run in
the event loop of the proxy's thread, and are not thread-safe. The reader applies the disturbances, and puts the bytes into a
bounded queue together with the time at which they are due. A disturbance that stops or breaks the stream is put into the same
queue, so that the bytes before it are written first. File descriptors that are sent over a Unix socket are relayed, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from actorrpc._undo import undo_on_error
from actorrpc.errors import ConfigError
from actorrpc.rpc import api
from actorrpc.validation import integer
from tests.harness.disturbances import STRIKING, Disturbance

__all__ = ["FaultProxy", "Relay", "abort"]

_CHUNK: Final = 1 << 16
_QUEUED: Final = 64  # pieces in a stream's queue; when it is full, the sender is slowed down
_MAX_FDS: Final = 64
_SLICE_S: Final = 0.05  # a throttled stream reads about what it may pass in this time
_LINGER: Final = struct.pack("ii", 1, 0)


class _Struck(Exception):
    """The connection ends: ``args[0]`` is "reset" or "cut"."""


class _ProxyState:
    """The state of one disturbance in one stream."""

    __slots__ = ("at", "disturbance", "done", "rng")

    def __init__(self, disturbance: Disturbance, rng: random.Random, position: int) -> None:
        self.disturbance = disturbance
        self.rng = rng
        self.at = position + disturbance.draw(rng)
        self.done = False


class _RelayedStream:
    """One direction of a connection."""

    def __init__(self, relay: Relay, direction: str, source: socket.socket, sink: socket.socket) -> None:
        self._relay = relay
        self._direction = direction
        self._source = source
        self._sink = sink
        self._position = 0
        self._due = 0.0
        self._states: list[_ProxyState] = []
        self._added = 0
        self._queue: asyncio.Queue[tuple[float, bytes, list[int], _ProxyState | None]] = asyncio.Queue(
            _QUEUED
        )

    def add(self, disturbance: Disturbance) -> None:
        """Apply a disturbance to this stream from the present position, if it selects this stream."""
        relay = self._relay
        rng = random.Random(f"{relay.seed}/{relay.number}/{self._direction}/{self._added}")
        self._added += 1
        if disturbance.concerns(relay.number, self._direction, rng):
            self._states.append(_ProxyState(disturbance, rng, self._position))

    def remove(self, disturbance: Disturbance) -> None:
        """Stop applying a disturbance to this stream."""
        self._states = [each for each in self._states if each.disturbance is not disturbance]

    # -- reading -----------------------------------------------------------------------------------

    async def read(self) -> None:
        """Read until the end of the stream, or until a disturbance ends it."""
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

    def _striking(self, position: int) -> list[_ProxyState]:
        found = [
            each
            for each in self._states
            if each.disturbance.action in STRIKING and not each.done and each.at <= position
        ]
        return sorted(found, key=lambda each: each.at)

    def _until_struck(self, data: bytes) -> tuple[int, _ProxyState | None]:
        """Return how many of the bytes read pass before the next disturbance strikes, and its state."""
        for state in self._striking(self._position + len(data)):
            ahead = max(0, state.at - self._position)
            part = state.disturbance.part
            if not part:
                return ahead, state
            if ahead < len(data):  # otherwise it strikes within the next read
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
                due += what.seconds + what.jitter * state.rng.random()
        for state in self._states:
            if state.disturbance.action == "throttle":
                due = max(due, self._due, now) + len(data) / state.disturbance.rate
        self._due = max(due, self._due)
        await self._queue.put((self._due, data, fds, None))

    def _flipped(self, data: bytes, begin: int, state: _ProxyState) -> bytes:
        if state.at >= begin + len(data):
            return data
        changed = bytearray(data)
        while state.at < begin + len(data):
            if state.at >= begin:
                changed[state.at - begin] ^= 1 << state.rng.randrange(8)
                self._relay.struck("bit_flips")
            state.at += state.rng.randint(1, 2 * state.disturbance.every - 1)
        return bytes(changed)

    async def _strike(self, state: _ProxyState) -> bool:
        """Queue a disturbance behind the bytes read so far; say whether it ends the stream."""
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
        """Write each piece when it is due, until the end of the stream.

        Raises:
            _Struck: a disturbance ends the connection.
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
        """Apply a disturbance; say whether it ends the stream."""
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
        """Discard the pieces that are still queued."""
        while not self._queue.empty():
            _close_all(self._queue.get_nowait()[2])


class Relay:
    """One connection.

    Args:
        struck: called with the kind of each disturbance that has struck.
        passed: called with the number of bytes after each write.
        may_strike: returns whether a disturbance may strike again, and counts the call.
        open: cleared while all connections are stalled.
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
        self._streams: list[_RelayedStream] = []
        self._how = "cut"
        self._task: asyncio.Task[Any] | None = None
        self._ended = False

    def add(self, disturbance: Disturbance) -> None:
        """Apply a disturbance to this connection from now on."""
        for stream in self._streams:
            stream.add(disturbance)

    def remove(self, disturbance: Disturbance) -> None:
        """Stop applying a disturbance to this connection."""
        for stream in self._streams:
            stream.remove(disturbance)

    def end(self, how: str) -> None:
        """End the connection now, by ``"reset"`` or ``"cut"``. Does nothing if it is ending already."""
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
        """Relay until the connection ends.

        Args:
            unreachable: called with the error if the target cannot be reached, before the client's connection is reset.
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
                _RelayedStream(self, "to", self._client, server),
                _RelayedStream(self, "from", server, self._client),
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
                    self._how = "reset"  # one end is lost: the other end gets a RST, as without a proxy
                elif failure is not None:
                    raise failure
        except asyncio.CancelledError:
            pass  # end() was called; this task does nothing more
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
    """Close a socket with a RST; a Unix socket is just closed."""
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


_T = TypeVar("_T")
_BACKLOG: Final = 128
_REFUSES_S: Final = 0.1  # if the target refuses a connection, the proxy refuses connections for this time
_START_S: Final = 10.0


class FaultProxy:
    """A relay in front of one worker, or of any other listening socket. Thread-safe.

    It listens from :meth:`start` (or the beginning of its block) to :meth:`close` (the end of its block), which cuts the
    connections. If no process listens behind it, it refuses connections, too.

    Args:
        target: the address behind it: ``(host, port)``, or the path of a Unix socket, which the proxy replaces for connections
            that are made from then on (see :meth:`before`). By default, the proxy reserves a free port for a worker: start
            the worker with :attr:`options` or :attr:`environment`.
        disturbances: disturbances of every connection.
        seed: the seed of all random numbers: the same seed disturbs the same bytes.
        host: the address on which the proxy listens, and on which it reserves the worker's port.

    Raises:
        ConfigError: an argument cannot be used, or no port is free.
    """

    def __init__(
        self,
        target: tuple[str, int] | str | None = None,
        *,
        disturbances: Iterable[Disturbance] = (),
        seed: int = 0,
        host: str = "127.0.0.1",
    ) -> None:
        self._disturbances = list(disturbances)
        self.seed: int = integer("seed", seed)
        self._host = host
        self._kept: list[
            socket.socket
        ] = []  # bound but not listening, so that no other process gets these ports
        self._is_for_worker = target is None
        self._family, self._target, self._place = self._find(target)
        self._address: Any = self._target if self._place else self._keep()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._error: BaseException | None = None
        # Guards the counters below; a leaf.
        self._lock = threading.Lock()
        self._struck: Counter[str] = Counter()
        self._count = 0
        self._bytes = 0
        # The attributes below belong to the loop's thread.
        self._strikes: dict[int, int] = {}
        self._relays: set[Relay] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._refusing = False
        self._over: asyncio.Event | None = None
        self._open: asyncio.Event | None = None

    @classmethod
    def before(cls, worker: str, **given: Any) -> FaultProxy:
        """Return a proxy in front of the Unix socket of a running worker of this process's group on the same host.

        Existing connections do not pass it, so the worker's peers must not have called the worker before. The keywords
        are those of the class.

        Raises:
            ConfigError: the worker has no Unix socket that this process can reach.
            UnknownWorkerError, NotInitializedError: there is no such worker, or no group.
        """
        agent = api.group().agent
        peer = agent.peer(worker)
        path = peer.record.unix_path
        if path is None or peer.record.host != agent.record.host:
            raise ConfigError(
                f"worker {worker!r} has no Unix socket here: start it with the options of a FaultProxy"
            )
        return cls(path, **given)

    def _find(self, target: Any) -> tuple[int, Any, str]:
        """Return the family and address of the target, and the path of the Unix socket that the proxy replaces, if any."""
        if target is None:
            return self._family_of(self._host), self._keep(), ""
        if isinstance(target, str):
            return socket.AF_UNIX, f"{target}~", target
        try:
            host, port = target
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (TypeError, ValueError, OSError) as error:
            raise ConfigError(
                f"target must be (host, port) or the path of a Unix socket, not {target!r}: {error}"
            ) from error
        return found[0][0], found[0][4], ""

    @staticmethod
    def _family_of(host: str) -> int:
        return socket.AF_INET6 if ":" in host else socket.AF_INET

    def _keep(self) -> Any:
        """Reserve a free port, and return its address."""
        sock = socket.socket(self._family_of(self._host), socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._kept.append(sock)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((self._host, 0))
        except OSError as error:
            for each in self._kept:
                each.close()
            raise ConfigError(f"no port is free on {self._host!r}: {error}") from error
        return sock.getsockname()

    # -- addresses ------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where it listens: ``host:port`` (``[host]:port`` for IPv6), or the path of its Unix socket."""
        if self._place:
            return self._place
        host, port = self._address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def options(self) -> dict[str, Any]:
        """Keywords for the options of ``init_rpc`` that put a worker behind the proxy.

        Raises:
            ConfigError: the proxy was made with a ``target``.
        """
        if not self._is_for_worker:
            raise ConfigError(
                f"this proxy stands before {self._target}: for a worker, make a proxy without target"
            )
        host, port = self._target[:2]
        return {"transport": "tcp", "bind": host, "port": port, "advertise": self.address}

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that put a worker behind the proxy; errors as for :attr:`options`."""
        return {f"ACTORRPC_{name.upper()}": str(value) for name, value in self.options.items()}

    # -- start and end --------------------------------------------------------------------------------------

    def start(self) -> FaultProxy:
        """Begin to listen and relay.

        Raises:
            RuntimeError: it was started before.
            OSError: the Unix socket that it should replace does not exist.
        """
        if self._thread is not None:
            raise RuntimeError("a FaultProxy can be started once")
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()
        if not self._started.wait(_START_S):
            raise RuntimeError("the thread of a FaultProxy did not start")
        if self._error is not None:
            self._thread.join()
            self._release()
            raise self._error
        return self

    def close(self) -> None:
        """Cut all connections and stop listening. Idempotent."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._do(self._finish)
            thread.join()
        self._release()

    def _release(self) -> None:
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
            for relay in self._relays:
                relay.add(disturbance)

        self._do(go)

    def remove(self, disturbance: Disturbance) -> None:
        """Stop applying a disturbance; bytes that it has delayed stay delayed. Unknown disturbances are ignored."""

        def go() -> None:
            self._disturbances[:] = [each for each in self._disturbances if each is not disturbance]
            for relay in self._relays:
                relay.remove(disturbance)

        self._do(go)

    def reset(self) -> int:
        """Abort all connections at once, with a RST to both ends; return how many."""
        return self._do(lambda: self._end_all("reset"))

    def cut(self) -> int:
        """Close all connections at once, at both ends; return how many."""
        return self._do(lambda: self._end_all("cut"))

    def stall(self) -> None:
        """Hold back all bytes until :meth:`resume`. New connections are accepted, but no bytes pass."""
        self._do(lambda: self._opened().clear())

    def resume(self) -> None:
        """Pass the bytes that were held back, and accept connections again."""

        def go() -> None:
            self._refusing = False
            if self._listener is None:
                self._listen()
            self._opened().set()

        self._do(go)

    def refuse(self) -> None:
        """Refuse new connections until :meth:`resume`. Existing connections stay: end them with :meth:`reset`."""

        def go() -> None:
            self._refusing = True
            self._shut()

        self._do(go)

    # -- counters --------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """How many connections were made."""
        with self._lock:
            return self._count

    @property
    def live(self) -> int:
        """How many connections there are now."""
        return self._do(lambda: len(self._relays))

    @property
    def relayed(self) -> int:
        """How many bytes have passed, in both directions."""
        with self._lock:
            return self._bytes

    @property
    def struck(self) -> Counter[str]:
        """How often each kind of disturbance has struck (a copy), including :meth:`reset` and :meth:`cut`."""
        with self._lock:
            return Counter(self._struck)

    # -- on its thread -----------------------------------------------------------------------------------

    def _do(self, go: Callable[[], _T]) -> _T:
        """Run a function in the proxy's thread, and return its result."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            raise RuntimeError("this FaultProxy does not run: call start(), or use it as a with block")

        async def call() -> _T:
            return go()

        return asyncio.run_coroutine_threadsafe(call(), loop).result(_START_S)

    def _run(self) -> None:
        loop = self._loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            loop.close()
            self._started.set()

    async def _serve(self) -> None:
        self._over, self._open = asyncio.Event(), asyncio.Event()
        self._open.set()
        if self._place:
            os.rename(self._place, self._target)
        try:
            self._listen()
            self._started.set()
            await self._over.wait()
        finally:
            self._shut()
            if self._place:
                _give_place_back(self._place, self._target)
            self._end_all("cut")
            while self._tasks:
                await asyncio.wait(list(self._tasks))

    def _finish(self) -> None:
        assert self._over is not None
        self._over.set()

    def _opened(self) -> asyncio.Event:
        assert self._open is not None
        return self._open

    def _listen(self) -> None:
        family = socket.AF_UNIX if self._place else self._family_of(self._host)
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with undo_on_error(sock.close):
            sock.setblocking(False)
            if self._place:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._place)
                sock.bind(self._place)
                os.chmod(self._place, 0o600)
            else:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(self._address)
            sock.listen(_BACKLOG)
        self._listener = sock
        asyncio.get_running_loop().add_reader(sock.fileno(), self._accept)

    def _shut(self) -> None:
        sock, self._listener = self._listener, None
        if sock is not None:
            asyncio.get_running_loop().remove_reader(sock.fileno())
            sock.close()

    def _open_again(self) -> None:
        assert self._over is not None
        if self._listener is None and not self._refusing and not self._over.is_set():
            self._listen()

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            client.setblocking(False)
            with self._lock:
                number, self._count = self._count, self._count + 1
            relay = Relay(
                number,
                self.seed,
                client,
                struck=self._strikes_again,
                passed=self._passed,
                may_strike=self._may_strike,
                open=self._opened(),
            )
            self._relays.add(relay)
            task = asyncio.ensure_future(self._relay(relay))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _relay(self, relay: Relay) -> None:
        try:
            await relay.run(self._family, self._target, lambda: self._disturbances, self._unreachable)
        finally:
            self._relays.discard(relay)

    def _unreachable(self, error: OSError) -> None:
        if isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
            self._shut()
            asyncio.get_running_loop().call_later(_REFUSES_S, self._open_again)

    def _end_all(self, how: str) -> int:
        relays = list(self._relays)
        for relay in relays:
            relay.end(how)
        over = self._over is not None and self._over.is_set()
        if relays and not over:
            with self._lock:
                self._struck[how] += len(relays)
        return len(relays)

    def _may_strike(self, disturbance: Disturbance) -> bool:
        done = self._strikes.get(id(disturbance), 0)
        self._strikes[id(disturbance)] = done + 1
        return disturbance.times is None or done < disturbance.times

    def _strikes_again(self, action: str) -> None:
        with self._lock:
            self._struck[action] += 1

    def _passed(self, count: int) -> None:
        with self._lock:
            self._bytes += count

    def __repr__(self) -> str:
        return f"<FaultProxy on {self.address} before {self._target}>"


def _give_place_back(place: str, behind: str) -> None:
    try:
        os.unlink(place)
        os.rename(behind, place)
    except FileNotFoundError:  # the worker has ended, and has removed the proxy's socket instead of its own
        with contextlib.suppress(FileNotFoundError):
            os.unlink(behind)
