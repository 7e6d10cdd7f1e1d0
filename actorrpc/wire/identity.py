"""The identity of a worker: its name and rank, the incarnation (one run of the worker), and its addresses.

Users get a ``WorkerInfo``. Workers exchange ``WorkerRecord`` through the rendezvous store and in INTRO frames. Other programs may
be able to write to the store, so every field of a record is checked when it is read, and nothing is evaluated, imported or
unpickled.

The classes are immutable and thread-safe.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import msgpack

from actorrpc._exceptions import say
from actorrpc.errors import ConfigError, RendezvousError
from actorrpc.validation import is_host
from actorrpc.wire.keys import boot_id, file_digest

__all__ = [
    "FIRST_VISITOR",
    "MAX_NAME",
    "WorkerInfo",
    "WorkerKey",
    "WorkerRecord",
    "addresses_of_hosts",
    "check_name",
    "host_identity",
    "main_identity",
    "name_part",
    "new_incarnation",
]

MAX_NAME = 127
"""The longest worker name, in characters (torch's limit: names are *shorter than* 128)."""

FIRST_VISITOR = 1 << 30
"""The first rank of visitors: processes that query a worker and are not members of its group."""

_NAME = re.compile(r"[A-Za-z0-9_:-]+", re.ASCII)
_INCARNATION = re.compile(r"[0-9a-f]{32}", re.ASCII)
_DEVICE = re.compile(r"[a-z]{1,32}(:[0-9]{1,5})?", re.ASCII)
_HOST = re.compile(r"[0-9a-zA-Z_.:-]{1,128}", re.ASCII)
_RECORD_FORMAT = 5
_MAX_RECORD = 256 << 10  # bytes: a record has a row of the device map for each worker and device
_MAX_ADDRESSES = 64
# Used if the kernel has no boot id: every process then seems to be on a host of its own.
_UNKNOWN_BOOT = secrets.token_hex(16)


class WorkerKey(NamedTuple):
    """Identifies one run of a worker; a restarted worker has another key."""

    rank: int
    incarnation: str


def check_name(name: object) -> str:
    """Return ``name`` if it is a valid name for a worker.

    Raises:
        ConfigError: ``name`` is not a string of 1 to 127 letters, digits, ``-``, ``_`` and ``:``.
    """
    if isinstance(name, str) and len(name) <= MAX_NAME and _NAME.fullmatch(name):
        return name
    shown = repr(name if not isinstance(name, str) else name[:160])
    raise ConfigError(
        f"Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter than {MAX_NAME + 1} "
        f"chars, but got {shown}"
    )


def name_part(text: str, other: str) -> str:
    """Return the first 103 characters of ``text``, or "worker" if it is empty; ``other`` replaces characters that no name has."""
    return re.sub(r"[^A-Za-z0-9_:-]+", other, text, flags=re.ASCII)[: MAX_NAME - 24] or "worker"


def new_incarnation() -> str:
    """Return a new incarnation: 16 random bytes as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def _namespace(kind: str) -> str:
    try:
        found = os.stat(f"/proc/self/ns/{kind}")
    except OSError:
        return f"no {kind}"
    return f"{found.st_dev}.{found.st_ino}"


def host_identity() -> str:
    """Return a string that two processes share only if they reach each other's Unix sockets and see each other's process ids.

    It is a hash of the boot id, the network, mount, PID and IPC namespaces, and the user id. Processes in two containers (with
    namespaces of their own) on one machine have different strings; two processes of one user in one container have the same. The
    PID namespace is included so that a process id means the same process for all workers of a "host", and the IPC namespace
    because a process can only open memory of a GPU that a process in its own IPC namespace has allocated.
    """
    spaces = [_namespace(kind) for kind in ("net", "mnt", "pid", "ipc")]
    parts = ["actorrpc host", boot_id() or _UNKNOWN_BOOT, *spaces, str(os.getuid())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def main_identity() -> str:
    """Return a string that is equal in two processes that run the same program; otherwise it differs or is empty.

    Functions and classes of the main module can be sent by name between such processes.
    """
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return file_digest(path)[:32] if isinstance(path, str) else ""


@dataclass(frozen=True, slots=True, repr=False)
class WorkerInfo:
    """Identifies a worker of the group by ``name`` and by the number ``id`` (its rank).

    Raises:
        ConfigError: the name is not 1 to 127 letters, digits, ``-``, ``_`` and ``:``, or ``id`` is not an integer.
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        check_name(self.name)
        if isinstance(self.id, bool) or not isinstance(self.id, int):
            raise ConfigError(f"a worker's id must be an integer, not {say(self.id, repr)}")

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """The description of one run of a worker, which other workers read.

    Attributes:
        rank: the worker's number in the group; -1: a dynamic group assigns the number.
        incarnation: 32 hexadecimal digits, different for every run (:func:`new_incarnation`).
        host: the worker's :func:`host_identity`.
        unix_path: the path of the worker's Unix socket, for workers with the same ``host``.
        tcp: the worker's addresses as ``(host, port)``, in the order in which a dialler tries them.
        main: the worker's :func:`main_identity`.
        gpus: the CUDA devices that the worker sees, as ``group.gpus.visible_gpus`` names them.
        devices: the devices that the worker's options allow; empty: all devices.
        device_maps: ``(worker, device here, device there)``: tensors on a device of this worker that are sent to ``worker``
            arrive on ``device there``. Answers of ``worker``, and gradients, are mapped in the other direction. None: the
            worker belongs to a cluster, where ``Peer.device_map`` chooses the device.
        data_only: the worker opens no pickles and accepts plain data only.
        hostname: the name of the worker's host, for users; empty if it is not known.
    """

    name: str
    rank: int
    incarnation: str
    host: str
    unix_path: str | None = None
    tcp: tuple[tuple[str, int], ...] = ()
    pid: int = 0
    main: str = ""
    gpus: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    device_maps: tuple[tuple[str, str, str], ...] | None = ()
    data_only: bool = False
    hostname: str = ""

    @property
    def is_visitor(self) -> bool:
        """Whether this is a visitor, which is no member of the group: the group neither lists nor announces visitors."""
        return self.rank >= FIRST_VISITOR

    @property
    def info(self) -> WorkerInfo:
        """The name and the rank."""
        return WorkerInfo(self.name, self.rank)

    def __post_init__(self) -> None:
        check_name(self.name)
        path, devices, routes = self.unix_path, self.devices, self.device_maps or ()
        for is_right, what in (
            (
                _is_int(self.rank, -1, 1 << 31),
                f"a worker's rank must be an integer, not {say(self.rank, repr)}",
            ),
            (_matches(_INCARNATION, self.incarnation), "an incarnation is 32 lower-case hexadecimal digits"),
            (
                _matches(_HOST, self.host),
                "the identity of a host has 1 to 128 characters: a to z, A to Z, 0 to 9, _.:-",
            ),
            (path is None or _is_text(path, 1, 108), "a Unix socket's path has 1 to 108 characters"),
            (
                isinstance(self.tcp, tuple)
                and len(self.tcp) <= _MAX_ADDRESSES
                and all(map(_is_address, self.tcp)),
                f"tcp addresses are a tuple of at most {_MAX_ADDRESSES} (host, port) with a port from 1 to 65535",
            ),
            (_is_int(self.pid, 0, 1 << 31), "a process id is an integer from 0 to 2**31 - 1"),
            (_is_text(self.main, 0, 64), "a main module's identity has at most 64 characters"),
            (
                isinstance(self.gpus, tuple) and all(_is_text(each, 1, 128) for each in self.gpus),
                "gpus is a tuple of texts of 1 to 128 characters: names as in CUDA_VISIBLE_DEVICES, or numbers of devices",
            ),
            (
                isinstance(devices, tuple) and all(_matches(_DEVICE, each) for each in devices),
                "devices are a tuple of names such as cuda:0",
            ),
            (
                isinstance(routes, tuple) and all(map(_is_route, routes)),
                "device maps are a tuple of (worker, device here, device there)",
            ),
            (type(self.data_only) is bool, "data_only is a bool"),
            (_is_text(self.hostname, 0, 255), "the name of a host has at most 255 characters"),
        ):
            if not is_right:
                raise ConfigError(what)
        for route in routes:
            check_name(route[0])

    def to_bytes(self) -> bytes:
        """Return the record as a msgpack array."""
        packed: bytes = msgpack.packb([_RECORD_FORMAT, *(getattr(self, each.name) for each in fields(self))])
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> WorkerRecord:
        """Read a record that :meth:`to_bytes` has packed.

        Raises:
            RendezvousError: the bytes are not a record, or a field is not valid.
        """
        if len(data) > _MAX_RECORD:
            raise RendezvousError(
                f"the record of a worker has {len(data)} bytes and may have {_MAX_RECORD}: another program, or another version "
                f"of actorrpc, has written it"
            )
        try:
            row: Any = msgpack.unpackb(data, raw=False)
            if not isinstance(row, list) or not row or row[0] != _RECORD_FORMAT or isinstance(row[0], bool):
                raise ValueError("it was written by another version of actorrpc, or by something else")
            names = [each.name for each in fields(cls)]
            return cls(**dict(zip(names, map(_with_tuples, row[1:]), strict=True)))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RendezvousError(f"the record of a worker cannot be read: {error}") from error


def addresses_of_hosts(records: Iterable[WorkerRecord]) -> dict[str, str]:
    """Return the address of each host that listens on TCP, by :func:`host_identity`: that of the worker with the lowest rank."""
    found: dict[str, str] = {}
    for each in sorted(records, key=lambda each: each.rank):
        if each.tcp:
            found.setdefault(each.host, each.tcp[0][0])
    return found


def _with_tuples(value: Any) -> Any:
    """Convert lists, which msgpack returns, to tuples, two levels deep."""
    if not isinstance(value, list):
        return value
    return tuple(tuple(each) if isinstance(each, list) else each for each in value)


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < high


def _is_text(value: object, low: int, high: int) -> bool:
    return isinstance(value, str) and low <= len(value) <= high and "\0" not in value


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_address(pair: object) -> bool:
    return (
        isinstance(pair, tuple)
        and len(pair) == 2
        and _is_text(pair[0], 1, 255)
        and is_host(pair[0])
        and _is_int(pair[1], 1, 65536)
    )


def _is_route(route: object) -> bool:
    return isinstance(route, tuple) and len(route) == 3 and all(_matches(_DEVICE, each) for each in route[1:])
