"""How workers find each other: through a store of torch's (TCP, file, or torchrun's).

A *fixed* group (``world_size`` given) uses the store only while it forms, in a *round*: each worker takes a place by an atomic
counter and writes its record. The last worker reads all records, checks them, and publishes the outcome, for which the others
poll: the table of workers, an error that all raise, or that all meet again in a new round. The next group in the same store
is the next round. A *dynamic* group, which workers join and leave at any time, has a key in the store for each name and for each
rank; a worker that joins claims its two keys, and lookups read the store.

The caller's thread does all the work. Waits poll in short slices, so that Ctrl-C works, and are bounded. Other processes can
write to a store: values read from it are checked, no secret and no hash of a secret is written to it, and nothing is unpickled.
One thread at a time may join; lookups are thread-safe.
"""

from __future__ import annotations

import ipaddress
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

import msgpack
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from actorrpc import _time
from actorrpc.errors import AuthenticationError, ConfigError, RendezvousError, RpcError
from actorrpc.group.store import addresses_towards, first_line, open_store, poll
from actorrpc.wire import keys
from actorrpc.wire.identity import WorkerRecord
from actorrpc.wire.keys import Key

__all__ = ["Membership", "Rendezvous", "StoreLike", "check_device_maps", "open_store"]

_TABLE, _ERROR, _AGAIN = "table", "error", "again"
_LEFT: Final = b"left"  # the value of a name's or rank's key after its holder has left
# How many rounds are repeated because of records that a killed run may have left in the store; then such records are an error.
_TRIES: Final = 2
# How long rank 0 waits until the others have read the outcome. Also how long a worker that has timed out waits for another
# such worker to publish the outcome.
_GRACE: Final = 2.0


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
        """Remove this worker from the list of a dynamic group."""

    def close(self) -> None:
        """Leave the group, and remove the files and connections by which other workers find this worker. Idempotent."""


class Rendezvous(Membership):
    """One worker's part in the rendezvous.

    ``_lock`` guards the names that :meth:`members` caches; under it, only the store is called.

    Args:
        rank: this worker's rank; -1 or None lets a dynamic group assign a free rank.
        world_size: the number of workers; None for a dynamic group.
        timeout: the longest time for which a method waits, in seconds.
    """

    def __init__(self, store: StoreLike, *, rank: int | None, world_size: int | None, timeout: float) -> None:
        self.rank = -1 if rank is None else rank
        self.world_size = world_size
        self.timeout = timeout
        self.record: WorkerRecord | None = None
        self._store = store
        self._lock = threading.Lock()
        self._table: dict[str | int, WorkerRecord] = {}  # by name and by rank
        self._names: dict[int, str] = {}
        self._round: tuple[int, int] | None = None
        self._calls_off = 0
        self._own_key: Key | None = None
        self._agreed: Key | None = None
        self._host = ""
        self._key_file: str | None = None
        if world_size is None:
            self._prefix = "dynamic/"
        else:
            # torchrun keeps its store when it restarts the workers, so each restart needs another prefix. Each host counts its
            # own restarts: on several hosts the counts may differ, and are not used.
            alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"
            self._prefix = f"fixed/{world_size}/{restarts}/"

    @property
    def key_is_given(self) -> bool:
        """Whether this worker was given the group's key; if not, a worker of the group has made the key."""
        return self._own_key is not None

    def enter(self, record: WorkerRecord) -> WorkerRecord:
        """Join a dynamic group without reading its members; return ``record``, with the assigned rank if its rank is -1.

        The number of store operations does not grow with the group.

        Raises:
            RendezvousError: the name or the rank is taken, or the store failed.
        """
        self.record = mine = self._join_dynamic(record, _time.now() + self.timeout)
        return mine

    def join(self, record: WorkerRecord) -> dict[str, WorkerRecord]:
        """Join a fixed group as ``record``; return its workers by name, including this one.

        Raises:
            RendezvousError: a worker did not join in time, a name or rank is taken, some workers cannot reach each other, or
                the store failed. All workers raise the error that one of them has published.
        """
        deadline = _time.now() + self.timeout
        while True:
            kind, payload = self._join_round(record, deadline)
            if kind == _TABLE:
                table = _read_table(payload, record)
                for each in table.values():
                    self._table[each.name] = self._table[each.rank] = each
                self.record = record
                self._forget_key_file()  # every worker has read the key file before it joined
                return table
            if kind == _ERROR:
                self._see_others_off()
                raise RendezvousError(str(payload))
            self._round = None
            self._calls_off += 1
            before = self._agreed
            if before is not None and self.agree_key(self._own_key, self._host) != before:
                raise RendezvousError("rank 0 was restarted while the workers met; start them all again")

    def resolve(self, to: str | int) -> WorkerRecord | None:
        """Return the worker of this name or rank; None if there is none."""
        if self.world_size is not None:
            return self._table.get(to)
        if isinstance(to, str):
            value = self._find(f"name/{to}")
            return None if value is None or value == _LEFT else WorkerRecord.from_bytes(value)
        tag = self._find(f"rank/{to}")
        record = None if tag is None or tag == _LEFT else self.resolve(_tag_name(tag))
        return record if record is not None and record.rank == to else None

    def members(self) -> list[WorkerRecord]:
        """Return the records of all workers of a fixed group, or of the workers that have not left a dynamic group, by rank."""
        if self.world_size is not None:
            return [self._table[rank] for rank in range(self.world_size)] if self._table else []
        with self._lock:
            new = [n for n in range(1, self._store_op("add", "log", 0) + 1) if n not in self._names]
            # An entry of the log whose number was claimed, but which was not written yet, is read by the next call.
            if new and not self._store_op("check", [f"log/{n}" for n in new]):
                new = [n for n in new if self._store_op("check", [f"log/{n}"])]
            if new:
                names = self._store_op("multi_get", [f"log/{n}" for n in new])
                self._names.update(zip(new, (_text(name) for name in names), strict=True))
            # The log has a name twice if its worker has rejoined.
            known = list(dict.fromkeys(self._names.values()))
        values = self._store_op("multi_get", [f"name/{name}" for name in known]) if known else []
        found = [WorkerRecord.from_bytes(value) for value in values if value != _LEFT]
        return sorted(found, key=lambda each: each.rank)

    def leave(self) -> None:
        """Leave a dynamic group, so that other workers may take the name and the rank. Idempotent."""
        record, self.record = self.record, None
        if record is not None and self.world_size is None:
            # If another worker has claimed the name or the rank since, the store keeps the entries of that worker.
            self._store_op("compare_set", f"name/{record.name}", record.to_bytes(), _LEFT)
            self._store_op("compare_set", f"rank/{record.rank}", _tag(record), _LEFT)

    def close(self) -> None:
        """Leave, remove the key file and release the store. Ignores errors of the store, whose host may have ended."""
        self._forget_key_file()
        try:
            self.leave()
        except RendezvousError:
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

    def agree_key(self, own_key: Key | None, host: str) -> Key:
        """Return the key of the group; call it before :meth:`join`.

        Workers that were given a key use it, and it is not sent through the store. Otherwise rank 0 (in
        a dynamic group: the first worker) makes a file that only this user can read, and the others on
        ``host`` read it.

        Raises:
            AuthenticationError: only some workers were given a key, or this worker cannot read the file.
            RendezvousError: no worker made a key in time, or the store failed.
        """
        self._own_key, self._host = own_key, host
        deadline = _time.now() + self.timeout
        try:
            if self.world_size is None:
                key = self._agree_dynamic(own_key, host, deadline)
            elif self.rank == 0:
                key, announcement = self._offer(own_key, host)
                self._store_op("set", self._in_round("key", deadline), announcement)
            else:
                key = self._agree_fixed(own_key, host, deadline)
        except AuthenticationError as error:
            if self.world_size is not None and self._round is not None:
                self._publish(_ERROR, f"the worker of rank {self.rank} could not join: {error}")
            raise
        self._agreed = key
        return key

    def _offer(self, own_key: Key | None, host: str) -> tuple[Key, bytes]:
        if own_key is not None:
            return own_key, _pack("given")
        if self._key_file is None:
            self._key_file = keys.create_key_file()
        return keys.read_key_file(self._key_file), _pack("file", self._key_file, host)

    def _agree_fixed(self, own_key: Key | None, host: str, deadline: float) -> Key:
        while True:
            place, outcome = self._in_round("key", deadline), self._in_round("outcome", deadline)
            if not self._wait_for(deadline, place, outcome):
                self._publish(
                    _ERROR, f"rank 0 did not come within {self.timeout:g} s (it makes the group's key)"
                )
            elif (found := self._find(place)) is not None:
                announcement = _unpack(found)
                if own_key is not None or not _is_leftover(announcement, host):
                    return self._accept(announcement, own_key, host)
                self._publish(_AGAIN, "")
            kind, payload = _read_outcome(self._store_op("get", outcome))
            if kind != _AGAIN:
                raise RendezvousError(
                    str(payload)
                    if kind == _ERROR
                    else "the other workers met before rank 0 had announced the group's key: start all workers again"
                )
            self._round = None

    def _agree_dynamic(self, own_key: Key | None, host: str, deadline: float) -> Key:
        while True:
            current = self._find("key")
            if current is not None:
                announcement = _unpack(current)
                try:
                    key = self._accept(announcement, own_key, host)
                except AuthenticationError:
                    # The key may belong to an earlier group in this store whose workers have all ended.
                    alive = any(not _is_dead(each, host) for each in self.members())
                    if alive or _time.now() > deadline:
                        raise
                else:
                    if announcement[0] == "file" and self._key_file is None:
                        # Workers that join later must be able to read the key after the present workers have ended.
                        self._key_file = keys.link_key_file(announcement[1])
                    return key
            key, mine = self._offer(own_key, host)
            if self._store_op("compare_set", "key", current or "", mine) == mine:
                return key
            self._forget_key_file()  # another worker was faster

    def _accept(self, announcement: list[Any], own_key: Key | None, host: str) -> Key:
        if announcement == ["given"]:
            if own_key is None:
                raise AuthenticationError(
                    "the group has a key and this worker has none: set ACTORRPC_KEY (or _KEY_FILE) to it"
                )
            return own_key
        if len(announcement) != 3 or announcement[0] != "file" or not isinstance(announcement[1], str):
            raise AuthenticationError(
                f"the announcement of the group's key in the store cannot be read; {_OTHERS}"
            )
        if own_key is not None:
            raise AuthenticationError(
                "this worker was given a key, but the first worker (rank 0) was not: give all of them "
                "the same ACTORRPC_KEY"
            )
        if announcement[2] != host:
            raise AuthenticationError(
                "the group's key lies in a file on another host (or in another container, of another user): "
                "make a key with `actorrpc key FILE`, and set ACTORRPC_KEY_FILE for every worker"
            )
        return keys.read_key_file(announcement[1])

    def _forget_key_file(self) -> None:
        path, self._key_file = self._key_file, None
        if path is not None:
            keys.remove_file(path)

    # -- fixed groups ----------------------------------------------------------------------------------

    def _size(self) -> int:
        return self.world_size or 0

    def _in_round(self, key: str, deadline: float) -> str:
        """Return the store's key for ``key`` in this worker's round. Take a place in a round if the worker has none."""
        while self._round is None:
            number, slot = divmod(self._store_op("add", "arrivals", 1) - 1, self._size())
            # The other workers may have given up this round before it was full. Then this worker takes a place in the next round.
            if slot == 0 or not self._store_op("check", [f"{number}/outcome"]):
                self._round = number, slot
            elif _time.now() > deadline:
                raise RendezvousError(
                    "too many attempts to meet have failed in this store: start the workers with a new store (a new port or file)"
                )
        return f"{self._round[0]}/{key}"

    def _join_round(self, record: WorkerRecord, deadline: float) -> tuple[str, Any]:
        outcome = self._in_round("outcome", deadline)
        slot = self._round[1] if self._round is not None else 0
        self._store_op("set", self._in_round(f"record/{slot}", deadline), record.to_bytes())
        if self._store_op("add", self._in_round("ready", deadline), 1) == self._size():
            places = [self._in_round(f"record/{n}", deadline) for n in range(self._size())]
            self._publish(*self._judge(self._store_op("multi_get", places), record.host))
        if not self._wait_for(deadline, outcome):
            # The first worker that times out publishes the names of the missing workers; the others read this outcome.
            late = self._store_op("add", self._in_round("late", deadline), 1)
            if late == 1 or not self._wait_for(_time.now() + _GRACE, outcome):
                self._publish(_ERROR, self._name_missing(deadline))
        return _read_outcome(self._store_op("get", outcome))

    def _publish(self, kind: str, payload: Any) -> None:
        """Publish the outcome of the round, unless another worker has published an outcome."""
        self._store_op("compare_set", self._in_round("outcome", 0.0), "", _pack(kind, payload))

    def _judge(self, values: Iterable[bytes], own_host: str) -> tuple[str, Any]:
        """Return the outcome of a round in which all workers have written their records."""
        try:
            records = [WorkerRecord.from_bytes(value) for value in values]
        except RendezvousError as error:
            return _ERROR, str(error)
        ranks, names = Counter(r.rank for r in records), Counter(r.name for r in records)
        twice = [r for r in records if ranks[r.rank] > 1]
        # A run that was killed during its rendezvous may have left records with the same ranks. The living workers meet again.
        if self._calls_off < _TRIES and (twice or any(_is_dead(r, own_host) for r in records)):
            return _AGAIN, ""
        if twice or any(not 0 <= r.rank < self._size() for r in records):
            wrong = twice or [r for r in records if not 0 <= r.rank < self._size()]
            return (
                _ERROR,
                f"every worker needs a rank of its own from 0 to {self._size() - 1}: {_list(wrong)}",
            )
        same = [r for r in records if names[r.name] > 1]
        if same:
            return _ERROR, f"every worker needs a name of its own: {_list(same)}"
        hosts = {r.host for r in records}
        mute = [r for r in records if (len(hosts) > 1 or r.unix_path is None) and not r.tcp]
        if mute and len(records) > 1:
            return _ERROR, (
                f"the workers are on {len(hosts)} hosts (or in containers, or of different users) and these "
                f"listen on no address that the others can reach: {_list(mute)}. Set ACTORRPC_KEY to the "
                "same text for every worker; then they listen on TCP (ACTORRPC_BIND says on which address)"
            )
        return _TABLE, [r.to_bytes() for r in records]

    def _name_missing(self, deadline: float) -> str:
        places = [self._in_round(f"record/{n}", deadline) for n in range(self._size())]
        here = [
            WorkerRecord.from_bytes(self._store_op("get", p)) for p in places if self._store_op("check", [p])
        ]
        missing = sorted(set(range(self._size())) - {r.rank for r in here})
        return (
            f"{len(here)} of {self._size()} workers came within {self.timeout:g} s; missing: rank "
            f"{', '.join(map(str, missing[:20]))}{' ...' if len(missing) > 20 else ''}; here: {_list(here)}"
        )

    def _see_others_off(self) -> None:
        """Record that this worker has read the outcome. Rank 0, which may serve the store, waits some seconds for the others."""
        seen = self._store_op("add", self._in_round("seen", 0.0), 1)
        if self.rank == 0:
            came = self._store_op("add", self._in_round("ready", 0.0), 0)
            limit = _time.now() + _GRACE
            self._wait(
                lambda: max(seen, self._store_op("add", self._in_round("seen", 0.0), 0)) >= came, limit
            )

    # -- dynamic groups ----------------------------------------------------------------------------------

    def _join_dynamic(self, record: WorkerRecord, deadline: float) -> WorkerRecord:
        mine = self._take_rank(record, deadline)
        taken = self._claim(
            f"name/{mine.name}",
            mine.to_bytes(),
            lambda value: _is_dead(WorkerRecord.from_bytes(value), mine.host),
        )
        if taken is not None:
            self._store_op("compare_set", f"rank/{mine.rank}", _tag(mine), _LEFT)
            raise RendezvousError(
                f"the name is taken: {_list([WorkerRecord.from_bytes(taken)])}; choose another name"
            )
        self._store_op("set", f"log/{self._store_op('add', 'log', 1)}", mine.name.encode())
        return mine

    def _take_rank(self, record: WorkerRecord, deadline: float) -> WorkerRecord:
        wanted = record.rank if record.rank >= 0 else self.rank
        while True:
            mine = replace(record, rank=wanted if wanted >= 0 else self._store_op("add", "next_rank", 1) - 1)
            holder = self._claim(f"rank/{mine.rank}", _tag(mine), partial(self._tag_is_free, mine))
            if holder is None:
                return mine
            if wanted >= 0:
                name = _tag_name(holder)
                raise RendezvousError(f"rank {wanted} is taken by {name!r}; omit rank= to get a free rank")
            if _time.now() > deadline:
                raise RendezvousError(
                    f"no free rank was found within {self.timeout:g} s, because many workers join at once: call init_rpc() again"
                )

    def _claim(self, key: str, value: bytes, is_free: Callable[[bytes], bool]) -> bytes | None:
        """Set ``key`` to ``value`` if the key is new, its holder has left, or ``is_free(present value)``.

        Returns:
            None if the key was set, otherwise its present value.
        """
        current: bytes = self._store_op("compare_set", key, "", value)
        while current != value:
            if current != _LEFT and not is_free(current):
                return current
            current = self._store_op("compare_set", key, current, value)
        return None

    def _tag_is_free(self, mine: WorkerRecord, tag: bytes) -> bool:
        holder = self.resolve(_tag_name(tag))
        # If no record has the holder's name, the holder has claimed the rank and is about to claim the name: not free.
        return holder is not None and (_tag(holder) != tag or _is_dead(holder, mine.host))

    # -- the store ---------------------------------------------------------------------------------------

    def _find(self, key: str) -> bytes | None:
        # get() of a missing key would block; a key that exists is never removed.
        return self._store_op("get", key) if self._store_op("check", [key]) else None

    def _wait_for(self, deadline: float, *places: str) -> bool:
        """Wait until one of the keys ``places`` has a value; return False at the deadline."""
        return self._wait(lambda: any(self._store_op("check", [place]) for place in places), deadline)

    def _wait(self, done: Callable[[], bool], deadline: float) -> bool:
        # Poll less often in large groups, because all workers ask one server.
        return poll(done, deadline, slowest=min(0.5, max(0.05, self._size() / 2000)))

    def _store_op(self, operation: str, key: str | list[str], *arguments: Any) -> Any:
        where = [self._prefix + each for each in key] if isinstance(key, list) else self._prefix + key
        try:
            return getattr(self._store, operation)(where, *arguments)
        except RpcError:
            raise
        except RuntimeError as error:
            raise RendezvousError(
                f"the store through which the workers meet failed: {first_line(error)}. The process that "
                "serves it (rank 0, or torchrun) may have ended"
            ) from error


class _Released:
    """Replaces a store that was released."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("this worker has left its group: call init_rpc() to join a group")


_OTHERS: Final = "another program or another version of actorrpc has written to the store: give the group its own port or file"
_NO_SENSE: Final = f"the store's data about the group cannot be read; {_OTHERS}"


def _pack(*parts: Any) -> bytes:
    packed: bytes = msgpack.packb(parts)
    return packed


def _unpack(data: bytes) -> list[Any]:
    try:
        found = msgpack.unpackb(data, raw=False)
    except (ValueError, msgpack.UnpackException):
        found = None
    if not isinstance(found, list) or not found:
        raise RendezvousError(_NO_SENSE)
    return found


def _read_outcome(data: bytes) -> tuple[str, Any]:
    answer = _unpack(data)
    if len(answer) != 2 or answer[0] not in (_TABLE, _ERROR, _AGAIN):
        raise RendezvousError(_NO_SENSE)
    return answer[0], answer[1]


def _read_table(payload: Any, own: WorkerRecord) -> dict[str, WorkerRecord]:
    if isinstance(payload, list) and all(isinstance(each, bytes) for each in payload):
        table = {each.name: each for each in map(WorkerRecord.from_bytes, payload)}
        if table.get(own.name) == own:
            return table
    raise RendezvousError(
        "the store lists the workers of the group without this worker: start all workers again"
    )


def _tag(record: WorkerRecord) -> bytes:
    return f"{record.incarnation} {record.name}".encode()


def _tag_name(tag: bytes) -> str:
    return _text(tag).partition(" ")[2]


def _text(data: bytes) -> str:
    return bytes(data).decode("utf-8", "replace")


def _is_dead(record: WorkerRecord, own_host: str) -> bool:
    """Whether a worker has certainly ended; False for workers of other hosts, whose processes this worker cannot see."""
    return record.host == own_host and record.pid > 0 and keys.process_start(record.pid) is None


def _is_leftover(announcement: list[Any], own_host: str) -> bool:
    return (
        announcement[0] == "file" and announcement[2:] == [own_host] and keys.is_stale(str(announcement[1]))
    )


def _list(records: Iterable[WorkerRecord]) -> str:
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
    # Sorted by rank, so that all workers report the same error if there are several errors.
    for record in sorted(records, key=lambda each: each.rank):
        where = f"Node {record.name} has"
        if len(set(record.devices)) != len(record.devices):
            raise ConfigError(f"{where} duplicated devices: {', '.join(record.devices)}")
        if wrong := _absent(record.devices, record):
            raise ConfigError(f"{where} devices with invalid indices: {wrong}")
        for name in dict.fromkeys(route[0] for route in record.device_maps):
            target = find(name)
            if target is None:
                if fixed:
                    raise ConfigError(
                        f"{where} invalid target node names in its device maps: there is no worker {name!r}"
                    )
                continue
            forth = {here: there for worker, here, there in record.device_maps if worker == name}
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
        if kind == "cuda" and int(index or 0) >= owner.cuda_devices:
            return f"{device}, but {owner.name} sees {owner.cuda_devices} CUDA devices"
    return ""
