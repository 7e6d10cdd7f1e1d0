"""A fault proxy: stands before a worker and disturbs what others send it and what it answers.

    with testing.FaultProxy(disturbances=[testing.latency(0.02, jitter=0.01)], seed=7) as proxy:
        # in the process of the worker that is to stand behind it:
        rpc.init_rpc("worker1", rank=1, world_size=2,
                     rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=..., **proxy.options))
        ...
        proxy.reset()                         # all its connections break, now

It needs no root: it is a relay in user space, with one thread of its own. Several may run in one process.

A connection through it is a :class:`Relay`: two streams, each read by one task and written by another. All of it runs on the
proxy's thread, in its event loop; nothing here is thread-safe. What is read goes through the disturbances into a bounded queue,
with the time at which it is due; what strikes a connection goes through the queue as well, so that it comes behind the bytes
that were to pass before it. File descriptors that come over a Unix socket travel along.
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
from actorrpc.errors import ConfigError, WrongTypeError
from actorrpc.rpc import api
from actorrpc.testing.network.disturbances import STRIKING, Disturbance
from actorrpc.validation import integer

__all__ = ["FaultProxy", "Relay", "abort"]

_CHUNK: Final = 1 << 16
_QUEUED: Final = 64  # pieces that wait in a stream at most: then its sender is slowed
_MAX_FDS: Final = 64
_SLICE_S: Final = 0.05  # a throttled stream moves about so often
_LINGER: Final = struct.pack("ii", 1, 0)


class _Struck(Exception):
    """The connection is over: ``args[0]`` is "reset" or "cut"."""


class _ProxyState:
    """What one disturbance is up to in one stream."""

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
        """Have a disturbance disturb this stream, from here on, if it concerns it."""
        relay = self._relay
        rng = random.Random(f"{relay.seed}/{relay.number}/{self._direction}/{self._added}")
        self._added += 1
        if disturbance.concerns(relay.number, self._direction, rng):
            self._states.append(_ProxyState(disturbance, rng, self._position))

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

    def _striking(self, position: int) -> list[_ProxyState]:
        found = [
            each
            for each in self._states
            if each.disturbance.action in STRIKING and not each.done and each.at <= position
        ]
        return sorted(found, key=lambda each: each.at)

    def _until_struck(self, data: bytes) -> tuple[int, _ProxyState | None]:
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
        self._streams: list[_RelayedStream] = []
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


_T = TypeVar("_T")
_BACKLOG: Final = 128
_REFUSES_S: Final = 0.1  # for so long it refuses, too, where nobody listens behind it
_START_S: Final = 10.0


class FaultProxy:
    """A relay before one worker, or before anything else that listens. Thread-safe.

    It listens from :meth:`start` (or the beginning of its block) to :meth:`close` (the end of it); what is connected then is
    cut. Where nobody listens behind it, it refuses connections, too.

    Args:
        target: what it stands before: ``(host, port)``, or the path of a Unix socket, whose place it takes for
            connections that are made from then on (see :meth:`before`). By default a free port that is kept for a worker:
            start that one with :attr:`options` or :attr:`environment`.
        disturbances: what it does to every connection, made with :func:`latency`, :func:`throttle`, :func:`bit_flips`,
            :func:`stall`, :func:`half_close`, :func:`reset` and :func:`cut`.
        seed: of all random numbers: the same seed disturbs the same bytes.
        host: the address to listen on, and of the port that is kept for a worker.

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
        for each in self._disturbances:
            _check(each)
        self.seed: int = integer("seed", seed)
        self._host = host
        self._kept: list[socket.socket] = []  # bound, never listening: nobody else gets these ports
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
        # What follows belongs to the loop's thread.
        self._strikes: dict[int, int] = {}
        self._relays: set[Relay] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._refusing = False
        self._over: asyncio.Event | None = None
        self._open: asyncio.Event | None = None

    @classmethod
    def before(cls, worker: str, **given: Any) -> FaultProxy:
        """Return a proxy before a running worker of this process's group on the same host: before its Unix socket.

        Connections that exist stay as they are: the worker's peers must not have called it before. The keywords are
        those of the class.

        Raises:
            ConfigError: it has no Unix socket that this process can reach.
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
        """Return the family and address of what is behind it, and the Unix socket whose place it takes, if any."""
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
        """Choose a free port and keep it for those who ask for it by number."""
        sock = socket.socket(self._family_of(self._host), socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._kept.append(sock)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((self._host, 0))
        except OSError as error:
            for each in self._kept:
                each.close()
            raise ConfigError(f"no port to be had on {self._host!r}: {error}") from error
        return sock.getsockname()

    # -- how to get at it ------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where it listens: ``host:port`` (``[host]:port`` for IPv6), or the path of its Unix socket."""
        if self._place:
            return self._place
        host, port = self._address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def options(self) -> dict[str, Any]:
        """Keywords for the options of ``init_rpc`` that put a worker behind it.

        Raises:
            ConfigError: it stands before something else.
        """
        if not self._is_for_worker:
            raise ConfigError(
                f"this proxy stands before {self._target}: make one without target for a worker"
            )
        host, port = self._target[:2]
        return {"transport": "tcp", "bind": host, "port": port, "advertise": self.address}

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that put a worker behind it, where options cannot be given; errors as for :attr:`options`."""
        return {f"ACTORRPC_{name.upper()}": str(value) for name, value in self.options.items()}

    # -- its life --------------------------------------------------------------------------------------

    def start(self) -> FaultProxy:
        """Listen and relay from now on.

        Raises:
            RuntimeError: it was started before.
            OSError: the Unix socket before which it is to stand is not there.
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
        """Cut all connections and listen no more. Idempotent."""
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

    # -- what it does, from now on -----------------------------------------------------------------------

    def add(self, disturbance: Disturbance) -> None:
        """Disturb all connections, those that exist from where they are."""
        _check(disturbance)

        def go() -> None:
            self._disturbances.append(disturbance)
            for relay in self._relays:
                relay.add(disturbance)

        self._do(go)

    def remove(self, disturbance: Disturbance) -> None:
        """Disturb no connection in that way any more; what it has delayed already stays so. Unknown ones are ignored."""

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
        """Let nothing pass, until :meth:`resume`. New connections are accepted, and stall."""
        self._do(lambda: self._fault_filter().clear())

    def resume(self) -> None:
        """Let pass what has been stalled, and accept connections that were refused."""

        def go() -> None:
            self._refusing = False
            if self._listener is None:
                self._listen()
            self._fault_filter().set()

        self._do(go)

    def refuse(self) -> None:
        """Refuse new connections, until :meth:`resume`. Those that exist stay: end them with :meth:`reset`."""

        def go() -> None:
            self._refusing = True
            self._shut()

        self._do(go)

    # -- what it has done --------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """How many connections there have been."""
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
        """How often each kind of disturbance has struck (a copy); those by :meth:`reset` and :meth:`cut`, too."""
        with self._lock:
            return Counter(self._struck)

    # -- on its thread -----------------------------------------------------------------------------------

    def _do(self, go: Callable[[], _T]) -> _T:
        """Have its thread do something, and return the result."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            raise RuntimeError("this FaultProxy does not run: it is started with start(), or by its block")

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

    def _fault_filter(self) -> asyncio.Event:
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
                open=self._fault_filter(),
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
    except FileNotFoundError:  # the worker has ended, and has removed what it takes for its socket
        with contextlib.suppress(FileNotFoundError):
            os.unlink(behind)


def _check(disturbance: Any) -> None:
    if not isinstance(disturbance, Disturbance):
        raise WrongTypeError(
            f"disturbances are made with latency(), throttle(), bit_flips(), stall(), half_close(), reset() and cut(), "
            f"not {disturbance!r}"
        )
