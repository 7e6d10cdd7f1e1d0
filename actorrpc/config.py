"""Limits, defaults and ``ACTORRPC_*`` variables: all numbers that can be changed, in one place.

A :class:`Settings` is read from the environment once, when the agent starts. Sizes are bytes, times are seconds unless a name
ends in ``_us``.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from actorrpc.errors import ConfigError, WrongTypeError
from actorrpc.validation import (
    check_fields,
    choice,
    flag,
    integer,
    is_host,
    number,
    option,
    read,
    text,
    wrong,
)

__all__ = ["ENVIRONMENT", "Settings", "host_and_port", "ports_of"]

# Environment variables and their meanings. ACTORRPC_PORT sets Settings.port; a few, like ACTORRPC_KEY, set no field of Settings.
ENVIRONMENT: dict[str, str] = {
    "ACTORRPC_KEY": "the text of the group's shared key; several hosts need this, ACTORRPC_KEY_FILE or ACTORRPC_INSECURE",
    "ACTORRPC_KEY_FILE": "a file, readable by its owner only, that holds the key",
    "ACTORRPC_TRANSPORT": "auto (Unix sockets on one host, TCP between hosts), unix, or tcp",
    "ACTORRPC_BIND": "the address to listen on for TCP (default: this host's address in the connection to the rendezvous)",
    "ACTORRPC_ADVERTISE": "the host, or host:port, that other workers connect to (default: this worker's TCP address)",
    "ACTORRPC_PORT": "the TCP port to listen on (default 0: any), or a range, like 7100-7199: the first free port of it",
    "ACTORRPC_LISTEN": "tcp://HOST:PORT, for init() without listen=, engine= and address=; actorrpc up sets it",
    "ACTORRPC_WORKERS": "the number of workers for which such an init() waits, at most join_timeout; actorrpc up sets it",
    "ACTORRPC_INSECURE": "1 to listen on other addresses than loopback without a key (warns)",
    "ACTORRPC_TLS": "off: do not encrypt TCP connections; for networks whose traffic only you can read and change (default on)",
    "ACTORRPC_TLS_CERT": "the file of this worker's certificate (PEM), if all workers show certificates of one CA",
    "ACTORRPC_TLS_KEY": "the file of the private key of ACTORRPC_TLS_CERT, readable by its owner only",
    "ACTORRPC_TLS_CA": "the file of the CA that must have signed the certificates of all workers",
    "ACTORRPC_TLS_MIN_VERSION": "1.3 (default) or 1.2: the oldest version of TLS that is accepted, with certificates",
    "ACTORRPC_DATA_ONLY": "1 to accept only data, and calls of exposed functions, from peers (see SECURITY.md)",
    "ACTORRPC_SPIN_US": "microseconds for which a thread polls for input before it sleeps (default 100; 0: it sleeps at once)",
    "ACTORRPC_MAX_THREADS": "the most pool threads in one process (default 512)",
    "ACTORRPC_WINDOW": "bytes of calls that a peer may leave unread before further calls to it wait (default 64 MiB)",
    "ACTORRPC_LANE": "0: do not send tensors through shared memory (default 1)",
    "ACTORRPC_LANE_BYTES": "the most bytes of shared memory in which this process sends tensors to one peer (default 1 GiB)",
    "ACTORRPC_DEVICE_LANE_BYTES": "experimental: most bytes of a GPU in which it sends tensors to GPUs of one peer (default 0)",
    "ACTORRPC_OBJECT_MEMORY": "bytes of large objects that all processes of a host may hold (default 0: a quarter of its memory)",
    "ACTORRPC_SPILL_DIR": "a directory on a disk for large objects that do not fit into memory (default: none, the objects wait)",
    "ACTORRPC_HEARTBEAT": "seconds of silence after which a connected peer is sent a ping (default 2)",
    "ACTORRPC_HEARTBEAT_MISSES": "heartbeats of silence after which a peer is declared dead (default 5, at least 2)",
    "ACTORRPC_SESSION_GRACE": "seconds for making (at least 5) or restoring a connection (default 10; 0: none is restored)",
    "ACTORRPC_CONTEXT_TTL": "seconds after which an unused autograd context of another worker is dropped (default 3600)",
    "ACTORRPC_FAULT": "faults to inject, for tests (actorrpc.testing): drop TYPES ...; delay TYPES seconds=...",
    "ACTORRPC_RUNTIME_DIR": "the private directory for sockets and key files",
    "ACTORRPC_RECORDER": "0: do not record the last calls of each worker (default 1: the last 32 768 are recorded)",
    "ACTORRPC_OTEL": "1: each call within a span of OpenTelemetry is a span, too (needs the extra otel; default 0)",
    "ACTORRPC_DEBUG": "0: breakpoint() in calls does not stop them, and debuggers cannot attach (default 1)",
    "ACTORRPC_DEBUG_WAIT": "seconds for which breakpoint() stops a call if no debugger attaches (default 600)",
    "ACTORRPC_LOG_SHOW": "0: the driver keeps the output that joined workers forward, and does not show it (default 1)",
    "ACTORRPC_LOG_FORWARD": "0: workers that join do not forward their output to the driver, or a driver takes none (default 1)",
    "ACTORRPC_LOG_DIR": "the directory of files with the output of workers that join (default: ~/.local/state/actorrpc)",
    "ACTORRPC_LOG_RATE": "bytes of output a second that a forwarder sends to the driver (default 1 MiB); more is dropped",
    "ACTORRPC_REQUIRE_SAME": "1: a driver refuses workers with other versions of actorrpc, Python or torch (default 0: it warns)",
    "ACTORRPC_DUMP_SIGNAL": "the number of the signal at which a worker dumps its stacks (default SIGRTMIN+7; 0: no signal)",
    "ACTORRPC_SWITCH_INTERVAL": "sets sys.setswitchinterval in the worker (default: not changed)",
}


def host_and_port(text: str) -> tuple[str, int | None]:
    """Return host and port of an address: ``host``, ``host:port``, an IPv6 address, or ``[address]:port``.

    Raises:
        ConfigError: ``text`` is not such an address.
    """
    host, sign, port = text, "", ""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ConfigError(f"an IPv6 address with a port is written [address]:port, not {text!r}")
        sign, port = rest[:1], rest[1:]
    elif text.count(":") == 1:
        host, sign, port = text.partition(":")
    if not is_host(host) or (sign and not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535)):
        raise ConfigError(f"an address is a host, or host:port with a port from 1 to 65535, not {text!r}")
    return host, int(port) if sign else None


def _address(name: str, value: Any) -> Any:
    """Check the address that other workers connect to."""
    if text(name, value, none=True) is not None:
        try:
            host_and_port(value)
        except ConfigError as error:
            raise ConfigError(f"{name}={value!r} cannot be used: {error}") from None
    return value


def _host(name: str, value: Any) -> Any:
    """Check the name or address of a host; empty or None: not given."""
    if text(name, value, none=True) and not is_host(value):
        raise wrong(name, value, "the name or the address of a host")
    return value


def ports_of(port: int | str) -> Sequence[int]:
    """Return the ports that a checked value of :attr:`Settings.port` allows, in the order in which they are tried."""
    if isinstance(port, int):
        return (port,)
    first, _, last = port.partition("-")
    return range(int(first), int(last) + 1)


def _port(name: str, value: Any) -> int | str:
    """Check a port, or a range of ports."""
    right = "a port from 0 to 65535, or a range of ports like '7100-7199'"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise wrong(name, value, right, WrongTypeError)
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", value, re.ASCII)
        first = int(match[1]) if match else -1
        last = int(match[2]) if match and match[2] else first
        if (first >= 1 or last == first == 0) and first <= last <= 65535:
            return first if first == last else f"{first}-{last}"
    elif 0 <= value <= 65535:
        return value
    raise wrong(name, value, right)


def _directory(name: str, value: Any) -> Any:
    """Check a directory in which the package will create files."""
    if text(name, value, none=True) is not None and not (os.path.isdir(value) and os.access(value, os.W_OK)):
        raise ConfigError(f"{name} must be a directory that this process can write to, not {value!r}")
    return value


_count = partial(integer, least=0)
_some = partial(integer, least=1)
_several = partial(integer, least=2)
_seconds = partial(number, unit="seconds", kind=(int, float))
_time = partial(_seconds, above=True)
_word = partial(text, none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of an agent. Made by :meth:`from_environment`; options given in code have precedence.

    The meaning of a field is in ENVIRONMENT or, if the field has no variable, in its declaration.

    Raises:
        ConfigError: a value cannot be used; if its type is wrong, :class:`~actorrpc.errors.WrongTypeError`.
    """

    # -- connections -------------------------------------------------------------
    transport: str = option("auto", partial(choice, of=("auto", "unix", "tcp")))
    bind: str | None = option(None, _host)
    advertise: str | None = option(None, _address)
    port: str | int = option(0, _port)
    insecure: bool = option(False, flag)
    tls: bool = option(True, flag)
    tls_cert: str | None = option(None, _word)
    tls_key: str | None = option(None, _word)
    tls_ca: str | None = option(None, _word)
    tls_min_version: str = option("1.3", partial(choice, of=("1.2", "1.3")))
    data_only: bool = option(False, flag)
    require_same: bool = option(False, flag)
    handshake_timeout: float = option(
        5.0, _time, meaning="seconds within which a connection's handshake, including that of TLS, must end"
    )
    max_unauthenticated: int = option(
        64,
        _count,
        meaning="the most open connections whose peers have not proved that they have the key; rank 0 of a fixed group allows at "
        "least `world_size`",
    )
    # -- speed -----------------------------------------------------------------------------
    spin_us: int = option(100, _count)
    cork_frames: int = option(
        64,
        _count,
        meaning="the most frames that are delayed, so that they are written together; 0 or 1: none",
    )
    cork_bytes: int = option(128 << 10, _count, meaning="the most bytes of small frames that are delayed")
    cork_us: int = option(200, _count, meaning="the most microseconds for which small frames are delayed")
    switch_interval: float | None = option(None, partial(_time, none=True))
    # -- inspection --------------------------------------------------------------------
    recorder: bool = option(True, flag)
    otel: bool = option(False, flag)
    debug: bool = option(True, flag)
    debug_wait: float = option(600.0, _seconds)
    log_forward: bool = option(True, flag)
    log_show: bool = option(True, flag)
    log_dir: str | None = option(None, _word)
    log_rate: int = option(1 << 20, _some)
    dump_signal: int = option(signal.SIGRTMIN + 7, partial(integer, least=0, most=64))
    # -- threads ---------------------------------------------------------------------------
    max_threads: int = option(512, _several)
    starvation_s: float = option(
        0.004, _seconds, meaning="seconds that a task may be queued before the pool starts another thread"
    )
    # -- memory ----------------------------------------------------------------------------
    window: int = option(64 << 20, _some)
    lane: bool = option(True, flag)
    lane_threshold: int = option(
        64 << 10, _count, meaning="the fewest bytes of a message whose tensors are sent through shared memory"
    )
    lane_bytes: int = option(1 << 30, _count)
    device_lane_bytes: int = option(0, _count)
    object_memory: int = option(0, _count)
    spill_dir: str | None = option(None, _directory)
    object_wait: float = option(
        30.0,
        _seconds,
        meaning="the most seconds that a large object waits for memory, unless its call ends earlier",
    )
    recycle_bytes: int = option(512 << 20, _count, meaning="the most bytes of free buffers that are kept")
    chunk: int = option(
        1 << 20,
        _some,
        meaning="bytes of a large message that are sent at a time; other messages may be sent in between",
    )
    # -- limits, checked before memory is allocated -------------------------------------------
    max_frame: int = option(
        4 << 20, partial(integer, least=1 << 16), meaning="bytes of the largest frame that is accepted"
    )
    max_message: int = option(
        1 << 40, _count, meaning="bytes of the largest message that is sent or accepted"
    )
    max_buffers: int = option(10_000, _count, meaning="the most tensors and buffers in one message")
    # -- failure ---------------------------------------------------------------------------
    heartbeat: float = option(2.0, _time)
    heartbeat_misses: int = option(5, _several)
    session_grace: float = option(10.0, _seconds)
    context_ttl: float = option(3600.0, _time)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def reach_timeout(self) -> float:
        """Seconds after which a worker to which no connection can be made counts as out of reach."""
        return max(self.session_grace, self.handshake_timeout)

    @classmethod
    def from_environment(cls, **given: Any) -> Settings:
        """Read the ``ACTORRPC_*`` variables; keywords that are not ``None`` have precedence.

        Raises:
            ConfigError: a variable or a keyword has a value that cannot be used.
        """
        values: dict[str, Any] = {}
        for each in fields(cls):
            variable = f"ACTORRPC_{each.name.upper()}"
            said = os.environ.get(variable) if variable in ENVIRONMENT else None
            if said:
                try:
                    value = read(str(each.type), said)
                    values[each.name] = each.metadata["check"](each.name, value)
                except ValueError as error:  # all errors of options are ValueErrors
                    raise ConfigError(
                        f"{variable}={said!r} cannot be used: {ENVIRONMENT[variable]} ({error})"
                    ) from None
        values.update({name: value for name, value in given.items() if value is not None})
        return cls(**values)
