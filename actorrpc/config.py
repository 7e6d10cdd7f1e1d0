"""Limits, defaults and ``ACTORRPC_*`` variables: every number that can be changed, in one place.

A :class:`Settings` is read once, when the agent starts, from the environment; it knows nothing of
the rest of the package. Sizes are bytes, times are seconds unless a name ends in ``_us``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from typing import Any, Final

from actorrpc.errors import ConfigError, WrongTypeError

__all__ = ["ENVIRONMENT", "Settings", "host_and_port"]

ENVIRONMENT: dict[str, str] = {
    "ACTORRPC_KEY": "the group's shared key (any text); workers on other hosts must be given one",
    "ACTORRPC_KEY_FILE": "a file, readable by its owner only, that holds the key",
    "ACTORRPC_TRANSPORT": "auto (Unix sockets on one host, TCP between hosts), unix, or tcp",
    "ACTORRPC_BIND": "the address to listen on for TCP (default: the one that reached the rendezvous)",
    "ACTORRPC_ADVERTISE": "the host, or host:port, to tell other workers, where it differs from the bound one",
    "ACTORRPC_PORT": "the TCP port to listen on (default 0: any)",
    "ACTORRPC_INSECURE": "1 to listen on other addresses than loopback without a key (warns)",
    "ACTORRPC_INTEGRITY": "1 to seal every frame on TCP, so that what is changed on the way is refused (see SECURITY.md)",
    "ACTORRPC_TLS_CERT": "the file of this worker's certificate (PEM); then TCP connections speak TLS and nothing else",
    "ACTORRPC_TLS_KEY": "the file of that certificate's private key, readable by its owner only",
    "ACTORRPC_TLS_CA": "the file of the CA that must have signed the certificates of all workers",
    "ACTORRPC_TLS_MIN_VERSION": "1.3 (default) or 1.2: the oldest version of TLS that is spoken",
    "ACTORRPC_DATA_ONLY": "1 to take nothing but data from peers, who may call exposed functions only (see SECURITY.md)",
    "ACTORRPC_SPIN_US": "how long a thread may spin before it sleeps (default 100; 0 turns it off)",
    "ACTORRPC_MAX_THREADS": "the most worker threads in one process (default 512)",
    "ACTORRPC_WINDOW": "bytes of calls that a peer may leave unread before callers wait (default 64 MiB)",
    "ACTORRPC_LANE": "0 to turn the shared-memory tensor lane off",
    "ACTORRPC_LANE_BYTES": "most shared memory this process lends to each peer (default 1 GiB)",
    "ACTORRPC_HEARTBEAT": "seconds of silence after which a connected peer is asked for a sign of life (default 2)",
    "ACTORRPC_HEARTBEAT_MISSES": "heartbeats of silence within which a peer is taken for dead (default 5, at least 2)",
    "ACTORRPC_SESSION_GRACE": "seconds within which a broken TCP connection may come back (default 10; 0: its end is a death)",
    "ACTORRPC_CONTEXT_TTL": "seconds after which an unused autograd context of another worker is dropped (default 3600)",
    "ACTORRPC_FAULT": "faults, for tests: drop TYPES ...; delay TYPES seconds=...; kill POINT ... (actorrpc.testing)",
    "ACTORRPC_RUNTIME_DIR": "the private directory for sockets and key files",
    "ACTORRPC_SWITCH_INTERVAL": "sets sys.setswitchinterval in the worker (default: left alone)",
}


_MOST: Final = sys.float_info.max  # no wait can be told a longer time, and infinity and NaN are not up to it


def _env(name: str, default: Any, convert: Any) -> Any:
    text = os.environ.get(name)
    if text is None or text == "":
        return default
    try:
        return convert(text)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name}={text!r} cannot be used: {ENVIRONMENT[name]}") from error


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= _MOST:  # not a number is not, either
        raise ValueError(text)
    return value


def host_and_port(text: str) -> tuple[str, int | None]:
    """Return the parts of an address: ``host``, ``host:port``, an IPv6 address, or one in brackets with ``:port``.

    Raises:
        ConfigError: it cannot be read.
    """
    host, sign, port = text, "", ""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ConfigError(f"an IPv6 address with a port is written [address]:port, not {text!r}")
        sign, port = rest[:1], rest[1:]
    elif text.count(":") == 1:
        host, sign, port = text.partition(":")
    if not host or (sign and not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535)):
        raise ConfigError(f"an address is a host, or host:port with a port from 1 to 65535, not {text!r}")
    return host, int(port) if sign else None


# What a field accepts, by how it is declared. A truth value is no number, though Python has it so.
_ACCEPTED: Final[dict[str, tuple[str, tuple[type, ...]]]] = {
    "bool": ("True or False, of type bool", (bool,)),
    "int": ("a whole number, of type int", (int,)),
    "float": ("a number, of type float or int", (float, int)),
    "str": ("a text, of type str", (str,)),
}
_POSITIVE: Final = frozenset(
    ["handshake_timeout", "connect_timeout", "window", "chunk", "heartbeat", "context_ttl", "switch_interval"]
)


def _check(name: str, declared: str, value: object) -> None:
    """Check one field by itself.

    Raises:
        ConfigError: it does not accept the value.
    """
    kind, _, none = declared.partition(" | ")
    if value is None and none:
        return
    words, types = _ACCEPTED[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
        raise WrongTypeError(f"{name} must be {words}, not {value!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if not 0 <= value <= _MOST:
        raise ConfigError(f"{name} must be a number that is finite and not negative, not {value!r}")
    if value == 0 and name in _POSITIVE:
        raise ConfigError(f"{name} must be positive, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the core runs with. Built by :meth:`from_environment`; options given in code win.

    Raises:
        ConfigError: a value cannot be used; where its type is wrong, :class:`~actorrpc.errors.WrongTypeError`.
    """

    # -- who may talk, and how -------------------------------------------------------------
    transport: str = "auto"
    bind: str | None = None
    advertise: str | None = None
    port: int = 0
    insecure: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    tls_min_version: str = "1.3"
    frame_integrity: bool = False
    data_only: bool = False
    handshake_timeout: float = 5.0
    connect_timeout: float = 20.0
    max_unauthenticated: int = 64
    # -- speed -----------------------------------------------------------------------------
    spin_us: int = 100
    cork_frames: int = 32
    cork_bytes: int = 64 << 10
    cork_us: int = 200
    switch_interval: float | None = None
    # -- threads ---------------------------------------------------------------------------
    max_threads: int = 512
    starvation_s: float = 0.004
    # -- memory ----------------------------------------------------------------------------
    window: int = 64 << 20
    lane: bool = True
    lane_threshold: int = 64 << 10
    lane_bytes: int = 1 << 30
    recycle_bytes: int = 512 << 20
    chunk: int = 1 << 20
    stripe_threshold: int = 16 << 20
    stripes: int = 2
    # -- limits, checked before memory is allocated -------------------------------------------
    max_frame: int = 4 << 20
    max_message: int = 1 << 40
    max_buffers: int = 10_000
    # -- failure ---------------------------------------------------------------------------
    heartbeat: float = 2.0
    heartbeat_misses: int = 5
    session_grace: float = 10.0
    context_ttl: float = 3600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, str(field.type), getattr(self, field.name))
        if self.transport not in ("auto", "unix", "tcp"):
            raise ConfigError(f"transport must be 'auto', 'unix' or 'tcp', not {self.transport!r}")
        if self.tls_min_version not in ("1.2", "1.3"):
            raise ConfigError(f"tls_min_version must be '1.2' or '1.3', not {self.tls_min_version!r}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be 0..65535, not {self.port!r}")
        if self.advertise is not None:
            try:
                host_and_port(self.advertise)
            except ConfigError as error:
                raise ConfigError(f"advertise={self.advertise!r} cannot be used: {error}") from None
        if self.max_threads < 2:
            raise ConfigError(f"max_threads must be at least 2, not {self.max_threads!r}")
        if self.heartbeat_misses < 2:
            raise ConfigError(f"heartbeat_misses must be at least 2, not {self.heartbeat_misses!r}")
        if self.max_frame < 1 << 16:
            raise ConfigError(f"max_frame must be at least 65536, not {self.max_frame!r}")

    @classmethod
    def from_environment(cls, **given: Any) -> Settings:
        """Read the ``ACTORRPC_*`` variables; keywords that are not ``None`` win over them.

        Raises:
            ConfigError: a variable or a keyword has a value that cannot be used.
        """
        values: dict[str, Any] = {
            "transport": _env("ACTORRPC_TRANSPORT", "auto", str),
            "bind": _env("ACTORRPC_BIND", None, str),
            "advertise": _env("ACTORRPC_ADVERTISE", None, str),
            "port": _env("ACTORRPC_PORT", 0, int),
            "insecure": _env("ACTORRPC_INSECURE", False, _flag),
            "tls_cert": _env("ACTORRPC_TLS_CERT", None, str),
            "tls_key": _env("ACTORRPC_TLS_KEY", None, str),
            "tls_ca": _env("ACTORRPC_TLS_CA", None, str),
            "tls_min_version": _env("ACTORRPC_TLS_MIN_VERSION", "1.3", str),
            "frame_integrity": _env("ACTORRPC_INTEGRITY", False, _flag),
            "data_only": _env("ACTORRPC_DATA_ONLY", False, _flag),
            "spin_us": _env("ACTORRPC_SPIN_US", 100, int),
            "max_threads": _env("ACTORRPC_MAX_THREADS", 512, int),
            "window": _env("ACTORRPC_WINDOW", 64 << 20, int),
            "lane": _env("ACTORRPC_LANE", True, _flag),
            "lane_bytes": _env("ACTORRPC_LANE_BYTES", 1 << 30, int),
            "heartbeat": _env("ACTORRPC_HEARTBEAT", 2.0, _seconds),
            "heartbeat_misses": _env("ACTORRPC_HEARTBEAT_MISSES", 5, int),
            "session_grace": _env("ACTORRPC_SESSION_GRACE", 10.0, _seconds),
            "context_ttl": _env("ACTORRPC_CONTEXT_TTL", 3600.0, _seconds),
            "switch_interval": _env("ACTORRPC_SWITCH_INTERVAL", None, _seconds),
        }
        values.update({name: value for name, value in given.items() if value is not None})
        return cls(**values)
