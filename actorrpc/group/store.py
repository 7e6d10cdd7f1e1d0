"""Opens the store in which workers meet, as named by an ``init_method``.

``env://`` (also under torchrun, whose agent serves the store), ``tcp://host:port`` and ``file:///path`` are
opened by this module rather than by torch's helpers. Torch's helpers wait for all workers inside C++, where Ctrl-C has
no effect and the missing workers are not known, and they exceed their time-out. Other schemes are passed to the handlers
that were registered with torch.

The caller's thread does all the work, except that separate threads make torch's store object and call it: torch waits without
limit for a server that does not answer. So every wait is bounded and can be interrupted. :func:`attempts`, :func:`poll` and
:func:`wait_until` are also used for other waits.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, urlsplit

from torch.distributed import FileStore, PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from actorrpc import _time
from actorrpc._exceptions import is_of_handler
from actorrpc.agent.daemon_threads import Daemon
from actorrpc.errors import ConfigError, RendezvousError, RpcError
from actorrpc.transport.signals import checkpoint
from actorrpc.validation import is_host

__all__ = [
    "StoreMeeting",
    "addresses_towards",
    "attempts",
    "first_line",
    "open_store",
    "poll",
    "remaining",
    "some",
    "use_store",
    "wait_until",
]

_log = logging.getLogger("actorrpc.cluster")  # only wait_until() logs, and only clusters call wait_until()
T = TypeVar("T")
_SHOWN: Final = 10
_ANSWER_S: Final = 5.0  # a store may take this long to answer, even if the caller's time-out ends earlier
#: A :func:`wait_until` that takes longer than this, in seconds, is logged.
SOON_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMeeting:
    """Where a group meets, and the rank of this worker, according to an ``init_method``.

    Attributes:
        kind: ``tcp``, ``file``, or the scheme of a handler that was registered with torch.
        rank: -1 if it is not given.
        world_size: None for a dynamic group.
        hosts: whether this process starts the store's server.
        libuv: whether torch's server uses libuv.
    """

    url: str
    kind: str
    rank: int = -1
    world_size: int | None = None
    host: str = ""
    port: int = 0
    path: str = ""
    hosts: bool = False
    libuv: bool = True

    @classmethod
    def parse(cls, init_method: str, rank: int | None = None, world_size: int | None = None) -> StoreMeeting:
        """Read ``env://``, ``tcp://host:port`` or ``file:///path``, with or without ``?rank=&world_size=``.

        Raises:
            ConfigError: ``init_method`` cannot be parsed, or two sources of a number contradict each other.
        """
        url = urlsplit(init_method) if isinstance(init_method, str) else None
        if url is None or not url.scheme:
            raise ConfigError(f"init_method must be an env://, tcp:// or file:// URL, not {init_method!r}")
        query, environment = dict(parse_qsl(url.query)), os.environ if url.scheme == "env" else {}

        def number(name: str, given: int | None) -> int | None:
            said = {"the argument": given, "the URL": query.get(name), "the environment": None}
            if given in (None, -1) and name not in query:
                said = {"the environment": environment.get(name.upper())}
            try:
                found = {place: int(value) for place, value in said.items() if value not in (None, "")}
            except ValueError:
                raise ConfigError(f"{name} must be a number: {init_method!r}, {said}") from None
            found = {place: value for place, value in found.items() if value != -1}
            if len(set(found.values())) > 1:
                raise ConfigError(f"{name} is given twice, with different values: {found} ({init_method!r})")
            return next(iter(found.values()), None)

        own, size = number("rank", rank), number("world_size", world_size)
        size = size or None
        if size is not None and (own is None or not 0 <= own < size):
            raise ConfigError(
                f"a group of {size} needs a rank of 0..{size - 1} in each worker, not {own} ({init_method!r})"
            )
        rest: dict[str, Any] = {"url": init_method, "rank": -1 if own is None else own, "world_size": size}
        if url.scheme == "file":
            if url.netloc not in ("", "localhost") or len(url.path) < 2:
                raise ConfigError(
                    f"a file URL has three slashes and a path, file:///path, not {init_method!r}"
                )
            return cls(kind="file", path=url.path, **rest)
        if url.scheme not in ("env", "tcp"):
            return cls(kind=url.scheme, **rest)
        try:
            host, port = url.hostname or "", -1 if url.port is None else url.port
            if url.scheme == "env":
                host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or -1)
        except ValueError:
            host, port = "", -1
        hosts = own == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if not is_host(host) or not (1 <= port <= 65535 or (port == 0 and hosts)):
            wanted = "MASTER_ADDR and MASTER_PORT" if url.scheme == "env" else "tcp://host:port"
            raise ConfigError(f"{init_method!r} needs {wanted}; found host {host!r} and port {port}")
        libuv = query.get("use_libuv", os.environ.get("USE_LIBUV", "1")) == "1"
        return cls(kind="tcp", host=host, port=port, hosts=hosts, libuv=libuv, **rest)

    def open(self, timeout: float) -> Store:
        """Open the store.

        Raises:
            RendezvousError: the store cannot be reached within ``timeout`` seconds.
        """
        deadline = _time.now() + timeout
        if self.kind == "file":
            folder = os.path.dirname(self.path)
            if not os.access(folder, os.W_OK | os.X_OK) or os.path.isdir(self.path):
                raise RendezvousError(
                    f"the file {self.path!r}, where the workers meet, cannot be made: its directory must exist, and be writable"
                )
        elif self.kind == "tcp" and not self.hosts:
            self._wait_for_server(deadline)
        limit = timedelta(seconds=remaining(deadline))

        def connect() -> Store:
            if self.kind == "file":
                return FileStore(self.path, self.world_size or -1)
            if self.kind == "tcp":
                # TCPStore must not wait for workers: it would ignore Ctrl-C, and its error would not name missing workers.
                return TCPStore(
                    self.host,
                    self.port,
                    None,
                    self.hosts,
                    limit,
                    False,
                    multi_tenant=True,
                    use_libuv=self.libuv,
                )
            found: Store = next(rendezvous(self.url, self.rank, self.world_size or -1))[0]
            return found

        try:
            store = _apart(connect, deadline)
        except Exception as error:
            if is_of_handler(error):
                raise
            why = first_line(error)
            if isinstance(error, TimeoutError):
                why = "it accepts connections but does not answer; is it a store of torch's?"
            raise RendezvousError(f"{self._where()} cannot be opened: {why}") from error
        store.set_timeout(timedelta(seconds=max(1.0, timeout)))
        return PrefixStore("actorrpc", store)

    def _where(self) -> str:
        if self.kind == "tcp":
            return f"the store at {self.host}:{self.port}"
        return f"the store in {self.path!r}" if self.kind == "file" else f"the store {self.url!r}"

    def _wait_for_server(self, deadline: float) -> None:
        # torch's client of the store exceeds its time-out, prints stacks and ignores Ctrl-C.
        problem: list[OSError] = []

        def reachable() -> bool:
            limit = min(2.0, max(0.05, deadline - _time.now()))
            try:
                socket.create_connection((self.host, self.port), limit).close()
            except OSError as error:
                problem[:] = [error]
                return False
            return True

        if not poll(reachable, deadline):
            why = problem[0] if problem else "no answer"
            raise RendezvousError(
                f"{self._where()} cannot be reached: {why}. Rank 0 (or torchrun) serves it: is it running, "
                "and do all workers name the same address and port?"
            )


def open_store(
    init_method: str, rank: int | None, world_size: int | None, timeout: float
) -> tuple[Store, int, int | None]:
    """Open the store that ``init_method`` names; return the store, and the rank and world size in force.

    The rank is -1 if no rank was given; the world size is None for a dynamic group.

    Raises:
        ConfigError: the arguments are not valid.
        RendezvousError: the store cannot be reached within ``timeout`` seconds.
    """
    meeting = StoreMeeting.parse(init_method, rank, world_size)
    return meeting.open(timeout), meeting.rank, meeting.world_size


def addresses_towards(host: str, port: int = 1) -> Iterator[str]:
    """Yield the addresses of this host from which packets to ``host`` are sent. Sends no packet to ``host``."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                own = probe.getsockname()
            text = str(own[0])
            if len(own) == 4 and own[3] and "%" not in text:
                text = f"{text}%{socket.if_indextoname(own[3])}"
            is_usable = not ipaddress.ip_address(text).is_unspecified
        except (OSError, ValueError):
            continue
        if is_usable:
            yield text


def _apart(function: Callable[[], T], deadline: float) -> T:
    """Return ``function()``, which a separate thread calls: a store whose server does not answer blocks that thread.

    Raises:
        TimeoutError: ``function`` has not returned at the time ``deadline``.
        Exception: ``function`` or a signal handler raised it.
    """
    made: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            made.append(function())
        except Exception as error:
            failed.append(error)

    thread = Daemon(run, "actorrpc-store")
    try:
        thread.start()
    except RuntimeError:  # no thread can start: there are too many, or Python 3.12 runs exit handlers
        run()
    latest = max(deadline, _time.now() + 0.1)
    while thread.is_alive() and _time.now() < latest:
        thread.join(min(0.1, max(0.0, latest - _time.now())))
        checkpoint()
    if failed:
        raise failed[0]
    if not made:
        raise TimeoutError("it does not answer")
    return made[0]


def use_store(store: Any, deadline: float, operation: str, *arguments: Any) -> Any:
    """Call a method of a store. The wait for its answer ends at ``deadline``, but not within the first 5 s.

    Raises:
        RendezvousError: the store has failed, or has not answered in time.
    """
    try:
        limit = max(deadline, _time.now() + _ANSWER_S)
        return _apart(lambda: getattr(store, operation)(*arguments), limit)
    except (RuntimeError, TimeoutError) as error:
        if isinstance(error, RpcError) or is_of_handler(error):
            raise
        raise RendezvousError(
            f"the store through which the workers meet failed: {first_line(error)}. The process that "
            "serves it (rank 0, or torchrun) may have ended"
        ) from error


def remaining(deadline: float) -> float:
    """Return the seconds until a time, at least 0.1."""
    return max(0.1, deadline - _time.now())


def attempts(deadline: float, slowest: float = 0.05) -> Iterator[None]:
    """Yield at once, and then after growing pauses of at most ``slowest`` seconds, until ``deadline`` has passed."""
    pause = 0.001
    while True:
        yield
        left = deadline - _time.now()
        if left <= 0:
            return
        _time.pause(min(pause, left))
        checkpoint()
        pause = min(pause * 1.5, slowest)


def poll(done: Callable[[], bool], deadline: float, slowest: float = 0.05) -> bool:
    """Call ``done`` with growing pauses until it returns True, or until ``deadline``; return its last result."""
    return any(done() for _ in attempts(deadline, slowest))


def some(names: Iterable[object]) -> str:
    """Return the first 10 names as text, and how many more there are."""
    texts = [str(each) for each in names]
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def wait_until(
    done: Callable[[], bool], deadline: float, who: str, what: Callable[[], str], slowest: float = 0.05
) -> bool:
    """Call ``done`` repeatedly until it returns True, or until ``deadline``; return its last result.

    Args:
        who: the name, for the user, of the waiting function: ``scale()``.
        what: returns the description of the awaited event; only called if the wait is long, and may take some milliseconds.
        slowest: the longest pause between two calls of ``done``, in seconds.
    """
    late_at = _time.now() + SOON_S
    for _ in attempts(deadline, slowest):
        if done():
            return True
        if _time.now() >= late_at:
            late_at = math.inf
            _log.warning("%s waits for %s", who, what())
    return False


def first_line(error: BaseException) -> str:
    # torch appends the C++ stack to its messages.
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
