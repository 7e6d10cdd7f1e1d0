"""What fixed and dynamic groups share to find each other through a store of torch's (TCP, file, or torchrun's).

In a *fixed* group (``world_size`` given, :mod:`actorrpc.group.fixed`), the store has one value, the address of rank 0; the
workers meet over connections to rank 0. A *dynamic* group, which workers join and leave at any time
(:mod:`actorrpc.group.dynamic`), keeps its list of workers in the store.

The thread that joins does all the work, except that pool threads of rank 0 receive the records of a fixed group, and that other
threads call the store (:func:`~actorrpc.group.store.use_store`). Waits have a
time limit and poll in short slices, so that Ctrl-C works. Other processes can write to a store: this package checks the values
that it reads from the store, writes no secret into it, and unpickles none of its values.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import msgpack
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from actorrpc.errors import AuthenticationError, ConfigError, RendezvousError, RpcError
from actorrpc.group.store import addresses_towards, use_store
from actorrpc.wire import keys
from actorrpc.wire.identity import WorkerRecord
from actorrpc.wire.keys import Key

__all__ = [
    "FILE",
    "GIVEN",
    "OTHERS",
    "Membership",
    "Rendezvous",
    "StoreLike",
    "check_device_maps",
    "listed",
    "pack",
    "unpack",
]

GIVEN: Final = "given"
"""Each worker was given the group's key."""

FILE: Final = "file"
"""A worker has made the group's key, and the others read it from a file."""

OTHERS: Final = "another program or another version of actorrpc has written to the store: give the group its own port or file"


class StoreLike(Protocol):
    """The methods of a store that this module calls; all of torch's stores have them."""

    def set(self, key: str, value: Any, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> Sequence[bytes]: ...
    def compare_set(self, key: str, expected: Any, desired: Any, /) -> bytes: ...


class Membership:
    """A worker's membership in its group: a rendezvous in a store, or the directory of a cluster."""

    def leave(self) -> None:
        """Tell the others that this worker leaves, before its agent is closed: remove this worker from a dynamic group's list."""

    def close(self) -> None:
        """Leave the group, and remove the files and connections by which other workers find this worker. Idempotent."""


class Rendezvous(Membership):
    """One worker's part in the rendezvous.

    Args:
        prefix: the beginning of the names of all values in the store.
        timeout: the longest time for which a method waits, in seconds.

    Attributes:
        key_is_given: whether this worker was given the group's key; if not, a worker of the group has made the key.
    """

    def __init__(self, store: StoreLike, prefix: str, timeout: float) -> None:
        self.timeout = timeout
        self.key_is_given = False
        self._store = store
        self._deadline = 0.0  # when the rendezvous must have finished
        self._prefix = prefix
        self._key_file: str | None = None

    def close(self) -> None:
        """Leave, remove the key file and release the store. Ignores errors of the store, whose host may have ended."""
        self._forget_key_file()
        try:
            self.leave()
        except RpcError:
            pass
        # The socket of the store closes with the last reference to it, and this object may be part of a cycle.
        self._store = _Released()

    def own_address(self) -> str | None:
        """Return the local address that the kernel would use to reach the store's host.

        None for stores that are not reached over the network, or that are on this host's loopback interface.
        """
        store: Any = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        host, port = getattr(store, "host", None), getattr(store, "port", None)
        if not isinstance(host, str) or not isinstance(port, int) or not host:
            return None
        found = addresses_towards(host, port)
        return next((text for text in found if not ipaddress.ip_address(text).is_loopback), None)

    # -- the key -------------------------------------------------------------------------------------

    def _make_key(self) -> Key:
        """Make a key, and write it to a file that only this user can read."""
        self._key_file = keys.create_key_file()
        return keys.read_key_file(self._key_file)

    def _forget_key_file(self) -> None:
        path, self._key_file = self._key_file, None
        if path is not None:
            keys.remove_file(path)

    @staticmethod
    def _accept(kind: str, path: str, there: str, own_key: Key | None, host: str) -> Key:
        """Return the group's key: the key that this worker was given, or the key in the file ``path``.

        Args:
            kind: ``GIVEN`` or ``FILE``, as rank 0 or the first worker has announced in the store.
            path, there: the file, and the identity of its host, if ``kind`` is ``FILE``.
            own_key: the key that this worker was given, or None.
            host: the identity of this worker's host.

        Raises:
            AuthenticationError: only some workers were given a key, or this worker cannot read the file.
        """
        if kind == GIVEN:
            if own_key is None:
                raise AuthenticationError(
                    "the group has a key and this worker has none: set ACTORRPC_KEY (or _KEY_FILE) to it"
                )
            return own_key
        if kind != FILE:
            raise AuthenticationError(
                f"the announcement of the group's key in the store cannot be read; {OTHERS}"
            )
        if own_key is not None:
            raise AuthenticationError(
                "this worker was given a key, but the first worker (rank 0) was not: give all of them "
                "the same ACTORRPC_KEY"
            )
        if there != host:
            raise AuthenticationError(
                "the group's key lies in a file on another host (or in another container, of another user): "
                "make a key with `actorrpc key FILE`, and set ACTORRPC_KEY_FILE for every worker"
            )
        return keys.read_key_file(path)

    # -- the store ---------------------------------------------------------------------------------------

    def _find(self, key: str) -> bytes | None:
        # get() of a missing key would block; a key that exists is never removed.
        return bytes(self._store_op("get", key)) if self._store_op("check", [key]) else None

    def _store_op(self, operation: str, key: str | list[str], *arguments: Any) -> Any:
        where = [self._prefix + each for each in key] if isinstance(key, list) else self._prefix + key
        return use_store(self._store, self._deadline, operation, where, *arguments)


class _Released:
    """Replaces a store that was released."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("this worker has left its group: call init_rpc() to join a group")


def pack(*parts: Any) -> bytes:
    """Pack values for the store, or for a notice."""
    packed: bytes = msgpack.packb(parts)
    return packed


def unpack(data: bytes, *types: type) -> list[Any]:
    """Unpack values.

    Args:
        types: the types of the values; none: any values, at least one.

    Raises:
        RendezvousError: the bytes are not packed values of these types.
    """
    try:
        found = msgpack.unpackb(data, raw=False)
    except (ValueError, msgpack.UnpackException):
        found = None
    if not isinstance(found, list) or not found or (types and tuple(map(type, found)) != types):
        raise RendezvousError(f"the store's data about the group cannot be read; {OTHERS}")
    return found


def listed(records: Iterable[WorkerRecord]) -> str:
    """Return the names, ranks, process ids and hosts of some workers as text."""
    shown = [
        f"{r.name!r} (rank {r.rank}, pid {r.pid}, host {r.host[:8]})"
        for r in sorted(records, key=lambda r: r.rank)
    ]
    return ", ".join(shown[:20]) + (" ..." if len(shown) > 20 else "")


def check_device_maps(
    records: Iterable[WorkerRecord], find: Callable[[str], WorkerRecord | None], *, fixed: bool
) -> None:
    """Check the device maps of some workers against the devices of the workers, with torch's error messages.

    Args:
        records: the workers whose maps are checked.
        find: returns the record of a worker by name, or None.
        fixed: whether all workers of the group are known, so that a map to an unknown worker is an error.

    Raises:
        ConfigError: devices are listed twice, do not exist or are not allowed by the options; or a map names an unknown worker.
    """
    # Sorted by rank, so that the reported error does not depend on the order in which the workers came.
    for record in sorted(records, key=lambda each: each.rank):
        where = f"Node {record.name} has"
        if len(set(record.devices)) != len(record.devices):
            raise ConfigError(f"{where} duplicated devices: {', '.join(record.devices)}")
        if wrong := _absent(record.devices, record):
            raise ConfigError(f"{where} devices with invalid indices: {wrong}")
        maps = record.device_maps or ()
        for name in dict.fromkeys(route[0] for route in maps):
            target = find(name)
            if target is None:
                if fixed:
                    raise ConfigError(
                        f"{where} invalid target node names in its device maps: there is no worker {name!r}"
                    )
                continue
            forth = {here: there for worker, here, there in maps if worker == name}
            if len(set(forth.values())) != len(forth):
                raise ConfigError(f"{where} duplicated target devices in its device map for {name}: {forth}")
            for owner, side, devices in (
                (record, "source", list(forth)),
                (target, "target", [*forth.values()]),
            ):
                what = f"{side} devices"
                suffix = f"in its device map for {name}"
                if owner.devices:
                    unexpected = [each for each in devices if each not in owner.devices]
                    if unexpected:
                        raise ConfigError(
                            f"{where} unexpected {what} {suffix}: {unexpected[0]} is none of the devices that the options of "
                            f"{owner.name} allow ({', '.join(owner.devices)})"
                        )
                elif wrong := _absent(devices, owner):
                    raise ConfigError(f"{where} {what} with invalid indices {suffix}: {wrong}")


def _absent(devices: Iterable[str], owner: WorkerRecord) -> str:
    """Describe the first CUDA device in ``devices`` that ``owner`` does not have; empty if it has all of them."""
    for device in devices:
        kind, _, index = device.partition(":")
        if kind == "cuda" and int(index or 0) >= len(owner.gpus):
            return f"{device}, but {owner.name} sees {len(owner.gpus)} CUDA devices"
    return ""
