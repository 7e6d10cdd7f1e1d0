"""The raw limits: two Python processes with one blocking socket, and one memory copy.

The callee serves its connection on one thread, with blocking calls only; the caller's functions, in
``RAW_SCENARIOS``, run on the worker's main thread and measure like the functions in ``scenarios``. This
module imports neither torch nor an RPC backend.
"""

from __future__ import annotations

import gc
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.series import percentile

__all__ = ["RAW_SCENARIOS", "RawContext", "serve"]

MESSAGE = b"x" * 32
ORDER = struct.Struct("!cQQ")  # what to do, how many times, with how many bytes
SECONDS = struct.Struct("!d")


@dataclass(slots=True)
class RawContext:
    """One end of the pair and its socket."""

    link: socket.socket | None = None
    listener: socket.socket | None = None


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _receive(link: socket.socket, view: memoryview) -> None:
    """Fill ``view``.

    Raises:
        ConnectionError: the other end closed.
    """
    filled = 0
    while filled < len(view):
        count = link.recv_into(view[filled:])
        if count == 0:
            raise ConnectionError("the other end closed")
        filled += count


def _exactly(link: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    _receive(link, memoryview(buffer))
    return bytes(buffer)


def serve(link: socket.socket) -> None:
    """Carry out the caller's orders until it closes the connection."""
    buffer = bytearray()
    with link:
        while True:
            try:
                order, times, size = ORDER.unpack(_exactly(link, ORDER.size))
            except ConnectionError:
                return
            if order == b"p":
                receive, send, length = link.recv, link.send, len(MESSAGE)
                for _ in range(times):
                    send(receive(length))
            elif order == b"c":
                link.sendall(SECONDS.pack(_cpu_seconds()))
            else:
                if len(buffer) != size:
                    buffer = bytearray(size)
                view = memoryview(buffer)
                for _ in range(times):
                    _receive(link, view)
                    link.sendall(view if order == b"e" else b"k")
                view.release()


def listen(context: RawContext, family: str, address: str) -> dict[str, str | int]:
    """Start the callee: listen, and serve a single caller on a thread."""
    if family == "unix":
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(address)
    else:
        listener = socket.create_server(("127.0.0.1", 0))
    listener.listen(1)
    context.listener = listener
    port = 0 if family == "unix" else int(listener.getsockname()[1])

    def accept_and_serve() -> None:
        link, _ = listener.accept()
        listener.close()
        if family != "unix":
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        serve(link)

    threading.Thread(target=accept_and_serve, name="raw-callee", daemon=True).start()
    return {"port": port}


def connect(context: RawContext, family: str, address: str, port: int) -> dict[str, float]:
    """Start the caller: connect to the callee."""
    if family == "unix":
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.connect(address)
    else:
        link = socket.create_connection(("127.0.0.1", port))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    context.link = link
    return {}


def _link(context: RawContext) -> socket.socket:
    if context.link is None:
        raise RuntimeError("not connected")
    return context.link


def _both_cpu(link: socket.socket) -> float:
    link.sendall(ORDER.pack(b"c", 1, 0))
    remote: float = SECONDS.unpack(_exactly(link, SECONDS.size))[0]
    return _cpu_seconds() + remote


def roundtrip(context: RawContext, calls: int, warm: int) -> dict[str, float]:
    """Ping-pong 32 bytes; microseconds per round trip."""
    link = _link(context)
    send, receive, clock, length = link.send, link.recv, time.perf_counter_ns, len(MESSAGE)
    link.sendall(ORDER.pack(b"p", warm, 0))
    for _ in range(warm):
        send(MESSAGE)
        receive(length)
    times = [0] * calls
    gc.collect()
    before = _both_cpu(link)
    link.sendall(ORDER.pack(b"p", calls, 0))
    for number in range(calls):
        start = clock()
        send(MESSAGE)
        receive(length)
        times[number] = clock() - start
    used = _both_cpu(link) - before
    times.sort()
    return {
        "p50": percentile(times, 0.50) / 1e3,
        "p99": percentile(times, 0.99) / 1e3,
        "cpu": used / calls * 1e6,
    }


def tensor(context: RawContext, size: int, repeats: int, direction: str, warm: int) -> dict[str, float]:
    """Send one buffer repeatedly with ``sendall``; the callee receives with ``recv_into`` into one buffer."""
    link, echoed = _link(context), direction == "echo"
    payload, back = bytearray(b"\x07") * size, memoryview(bytearray(size if echoed else 1))
    order = b"e" if echoed else b"a"

    def turns(times: int) -> None:
        link.sendall(ORDER.pack(order, times, size))
        for _ in range(times):
            link.sendall(payload)
            _receive(link, back)

    turns(warm)
    before, start = _both_cpu(link), time.perf_counter()
    turns(repeats)
    elapsed = time.perf_counter() - start
    used = _both_cpu(link) - before
    moved = size * repeats * (2 if echoed else 1)
    return {"rate": moved / elapsed / 1e9, "cpu": used / (moved / 1e9)}


def copy(_context: RawContext, size: int, repeats: int) -> dict[str, float]:
    """Copy one warm buffer into another."""
    source, target = memoryview(bytearray(b"\x07") * size), memoryview(bytearray(size))
    for _ in range(2):
        target[:] = source
    before, start = _cpu_seconds(), time.perf_counter()
    for _ in range(repeats):
        target[:] = source
    elapsed = time.perf_counter() - start
    used = _cpu_seconds() - before
    moved = size * repeats
    return {"rate": moved / elapsed / 1e9, "cpu": used / (moved / 1e9)}


def shutdown(context: RawContext) -> dict[str, float]:
    """Close this end."""
    if context.link is not None:
        context.link.close()
        context.link = None
    return {}


RAW_SCENARIOS: dict[str, Callable[..., dict[str, float]]] = {
    "roundtrip": roundtrip,
    "tensor": tensor,
    "copy": copy,
    "connect": connect,
    "listen": listen,  # type: ignore[dict-item]
    "shutdown": shutdown,
}
