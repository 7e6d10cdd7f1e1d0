"""Who a worker is: its public name and rank, one run of it (the incarnation), and where it can be reached.

``WorkerInfo`` is what users see; ``WorkerRecord`` is what workers tell each other through the rendezvous
store. A record is read back from a store that others may write to, so every field is checked on the way
in and nothing here evaluates, imports or unpickles what it is given.

Any thread may use these classes: they are immutable. This module opens nothing and keeps no state.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from actorrpc._exception_text import say
from actorrpc.errors import ConfigError, RendezvousError
from actorrpc.wire.keys import boot_id, file_digest

__all__ = [
    "FIRST_VISITOR",
    "MAX_NAME",
    "WorkerInfo",
    "WorkerKey",
    "WorkerRecord",
    "check_name",
    "host_identity",
    "main_identity",
    "new_incarnation",
]

MAX_NAME = 127
"""The longest worker name, in characters (torch's limit: names are *shorter than* 128)."""

FIRST_VISITOR = 1 << 30
"""The ranks from here on are of visitors: of those who only ask a worker something, and are no members of its group."""

_NAME = re.compile(r"[A-Za-z0-9_:-]+", re.ASCII)
_INCARNATION = re.compile(r"[0-9a-f]{32}", re.ASCII)
_DEVICE = re.compile(r"[a-z]{1,32}(:[0-9]{1,5})?", re.ASCII)
_HOST = re.compile(r"[0-9a-zA-Z_.:-]{1,128}", re.ASCII)
_RECORD_FORMAT = 3
_MAX_RECORD = 256 << 10  # device maps name every worker that they are for
_MAX_ADDRESSES = 64
# Only used where the kernel does not say which boot this is: then no other process is "on this host".
_UNKNOWN_BOOT = secrets.token_hex(16)


class WorkerKey(NamedTuple):
    """One life of one worker: a worker that restarts is another one."""

    rank: int
    incarnation: str


def check_name(name: object) -> str:
    """Return ``name`` if a worker may be called that.

    Raises:
        ConfigError: it is not a string of 1 to 127 letters, digits, ``-``, ``_`` and ``:``.
    """
    if isinstance(name, str) and len(name) <= MAX_NAME and _NAME.fullmatch(name):
        return name
    shown = repr(name if not isinstance(name, str) else name[:160])
    raise ConfigError(
        f"Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter than {MAX_NAME + 1} "
        f"chars, but got {shown}"
    )


def new_incarnation() -> str:
    """Return a fresh name for one run of a worker: 16 random bytes as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def _namespace(kind: str) -> str:
    try:
        found = os.stat(f"/proc/self/ns/{kind}")
    except OSError:
        return f"no {kind}"
    return f"{found.st_dev}.{found.st_ino}"


def host_identity() -> str:
    """Return a string that is equal in two processes exactly if they can reach each other's Unix sockets.

    It is a hash of the boot id, the network, mount and PID namespaces and the user id: two containers on one
    machine differ, two processes of one user in one container do not. The PID namespace is part of it so that
    a process id means the same process to all who are on this "host". It tells a reader nothing else.
    """
    spaces = [_namespace(kind) for kind in ("net", "mnt", "pid")]
    parts = ["actorrpc host", boot_id() or _UNKNOWN_BOOT, *spaces, str(os.getuid())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def main_identity() -> str:
    """Return a word that is equal in two processes that run the same program; else empty or different.

    What is defined in the main module may go by name between such processes.
    """
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return file_digest(path)[:32] if isinstance(path, str) else ""


@dataclass(frozen=True, slots=True, repr=False)
class WorkerInfo:
    """Name one worker of the group: ``name`` and the number ``id`` (its rank).

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
    """What one run of a worker tells the others about itself.

    Attributes:
        rank: its number in the group; -1 asks a dynamic group to hand one out.
        incarnation: 32 hexadecimal digits, different for every run (:func:`new_incarnation`).
        host: what :func:`host_identity` returned there.
        unix_path: its Unix socket, for workers with the same ``host``.
        tcp: addresses to try in this order, as ``(host, port)``.
        main: what :func:`main_identity` returned there.
        cuda_devices: how many CUDA devices it sees.
        devices: the devices that its options allow; empty: all.
        device_maps: ``(worker, device here, device there)``: on which device of another worker its tensors arrive. The
            answers of that worker, and gradients, come back the other way.
        data_only: it opens no pickles: what is sent to it is data and nothing else.
    """

    name: str
    rank: int
    incarnation: str
    host: str
    unix_path: str | None = None
    tcp: tuple[tuple[str, int], ...] = ()
    pid: int = 0
    main: str = ""
    cuda_devices: int = 0
    devices: tuple[str, ...] = ()
    device_maps: tuple[tuple[str, str, str], ...] = ()
    data_only: bool = False

    @property
    def is_visitor(self) -> bool:
        """Whether this is no member of the group: it is not listed, and nobody is told of it."""
        return self.rank >= FIRST_VISITOR

    @property
    def info(self) -> WorkerInfo:
        """The part that users see."""
        return WorkerInfo(self.name, self.rank)

    def __post_init__(self) -> None:
        check_name(self.name)
        if not _is_int(self.rank, -1, 1 << 31):
            raise ConfigError(f"a worker's rank must be an integer, not {say(self.rank, repr)}")
        if not (isinstance(self.incarnation, str) and _INCARNATION.fullmatch(self.incarnation)):
            raise ConfigError("an incarnation is 32 lower-case hexadecimal digits")
        if not (isinstance(self.host, str) and _HOST.fullmatch(self.host)):
            raise ConfigError("a host identity is 1 to 128 messages and digits")
        path = self.unix_path
        if path is not None and not (isinstance(path, str) and 0 < len(path) <= 108 and "\0" not in path):
            raise ConfigError("a Unix socket's path has 1 to 108 characters")
        if not isinstance(self.tcp, tuple) or len(self.tcp) > _MAX_ADDRESSES:
            raise ConfigError(f"tcp addresses are a tuple of at most {_MAX_ADDRESSES}")
        for address in self.tcp:
            if not (isinstance(address, tuple) and len(address) == 2 and _is_address(*address)):
                raise ConfigError("a tcp address is (host, port) with a port from 1 to 65535")
        if not _is_int(self.pid, 0, 1 << 31):
            raise ConfigError("a process id is a positive integer")
        if not (isinstance(self.main, str) and len(self.main) <= 64):
            raise ConfigError("a main module's identity has at most 64 characters")
        if not _is_int(self.cuda_devices, 0, 1 << 16):
            raise ConfigError("a number of CUDA devices is a positive integer")
        if not (isinstance(self.devices, tuple) and all(map(_is_device, self.devices))):
            raise ConfigError("devices are a tuple of names such as cuda:0")
        if not isinstance(self.device_maps, tuple):
            raise ConfigError("device maps are a tuple")
        for route in self.device_maps:
            if not (isinstance(route, tuple) and len(route) == 3 and all(map(_is_device, route[1:]))):
                raise ConfigError("an entry of a device map is (worker, device here, device there)")
            check_name(route[0])
        if type(self.data_only) is not bool:
            raise ConfigError("data_only is a bool")

    def to_bytes(self) -> bytes:
        """Return the record as a msgpack array."""
        fields = [
            self.name,
            self.rank,
            self.incarnation,
            self.host,
            self.unix_path,
            self.tcp,
            self.pid,
            self.main,
            self.cuda_devices,
            self.devices,
            self.device_maps,
            self.data_only,
        ]
        packed: bytes = msgpack.packb([_RECORD_FORMAT, *fields])
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> WorkerRecord:
        """Read what :meth:`to_bytes` wrote.

        Raises:
            RendezvousError: the bytes are not a record, or one of its fields makes no sense.
        """
        if len(data) > _MAX_RECORD:
            raise RendezvousError(
                f"what a worker has said of itself has {len(data)} bytes, and at most {_MAX_RECORD} make sense: something "
                f"else has written to the store, or another version of actorrpc"
            )
        try:
            row: Any = msgpack.unpackb(data, raw=False)
            if not isinstance(row, list) or not row or row[0] != _RECORD_FORMAT or isinstance(row[0], bool):
                raise ValueError("it was written by another version of actorrpc, or by something else")
            _, name, rank, incarnation, host, path, tcp, pid, main, cuda, devices, device_maps, only = row
            if not isinstance(tcp, list) or not all(isinstance(address, list) for address in tcp):
                raise ValueError("its tcp addresses are not a list of pairs")
            if not isinstance(device_maps, list) or not all(isinstance(route, list) for route in device_maps):
                raise ValueError("its device maps are not a list of triples")
            if not isinstance(devices, list):
                raise ValueError("its devices are not a list")
            return cls(
                name=name,
                rank=rank,
                incarnation=incarnation,
                host=host,
                unix_path=path,
                tcp=tuple(tuple(address) for address in tcp),
                pid=pid,
                main=main,
                cuda_devices=cuda,
                devices=tuple(devices),
                device_maps=tuple(tuple(route) for route in device_maps),
                data_only=only,
            )
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RendezvousError(
                f"what a worker has said of itself in the store cannot be read: {error}"
            ) from error


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < high


def _is_address(host: object, port: object) -> bool:
    return isinstance(host, str) and 0 < len(host) <= 255 and "\0" not in host and _is_int(port, 1, 65536)


def _is_device(value: object) -> bool:
    return isinstance(value, str) and _DEVICE.fullmatch(value) is not None
