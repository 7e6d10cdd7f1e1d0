"""How workers join and leave a dynamic group, whose list of workers is in the store.

The store has a value for each name and for each rank, and a log of the names. A worker that joins claims its name and its rank;
lookups read the store. If the workers were given a key, a :class:`SealedStore` encrypts all values with it, except counters and
the announcement of the key, which has no secret. If no key was given, nothing in the store is encrypted.

One thread at a time may join; lookups are thread-safe.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from actorrpc import _time
from actorrpc.config import Settings
from actorrpc.errors import AuthenticationError, ConfigError, RendezvousError
from actorrpc.group.rendezvous import FILE, GIVEN, OTHERS, Rendezvous, StoreLike, listed, pack, unpack
from actorrpc.wire import keys
from actorrpc.wire.identity import WorkerRecord
from actorrpc.wire.keys import Key

__all__ = ["DynamicRendezvous", "SealedStore"]

_LEFT: Final = b"left"  # the value of a name's or rank's key after its holder has left
_PURPOSE: Final = "a dynamic group"


class SealedStore:
    """A store whose names and values can be read only with the key.

    The encryption (AES-SIV) is deterministic, so that ``compare_set`` works. A value is bound to its name in the store. Counters
    are not encrypted. An attacker can replace a value by an earlier value of the same name.

    Raises:
        ConfigError: the package ``cryptography`` is missing.
    """

    def __init__(self, store: StoreLike, key: Key) -> None:
        try:
            ciphers = importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
            self._wrong: type[Exception] = importlib.import_module("cryptography.exceptions").InvalidTag
        except ImportError as error:
            raise ConfigError(
                f"a group with a key and without world_size needs the package cryptography: pip install cryptography ({error})"
            ) from error
        self._store = store
        self._key = key
        self._cipher = ciphers.AESSIV(key.sign("cipher 1", b"") + key.sign("cipher 2", b""))

    def _name(self, key: str) -> str:
        return self._key.sign("name", key.encode()).hex()

    def _seal(self, name: str, value: bytes) -> bytes:
        return bytes(self._cipher.encrypt(value, [name.encode()]))

    def _open(self, name: str, sealed: bytes) -> bytes:
        try:
            return bytes(self._cipher.decrypt(bytes(sealed), [name.encode()]))
        except self._wrong:
            raise AuthenticationError(
                f"a value in the store was not written with the group's key: {OTHERS}"
            ) from None

    def set(self, key: str, value: bytes, /) -> None:
        """Encrypt and write a value."""
        self._store.set(name := self._name(key), self._seal(name, value))

    def get(self, key: str, /) -> bytes:
        """Return a value.

        Raises:
            AuthenticationError: the value was not written with this key.
        """
        return self._open(name := self._name(key), self._store.get(name))

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, and return its new value."""
        return self._store.add(self._name(key), amount)

    def check(self, keys: list[str], /) -> bool:
        """Say whether all names have values."""
        return self._store.check(list(map(self._name, keys)))

    def multi_get(self, keys: list[str], /) -> Sequence[bytes]:
        """Return the values of several names; errors as :meth:`get`."""
        names = list(map(self._name, keys))
        return list(map(self._open, names, self._store.multi_get(names)))

    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes:
        """Replace the value ``expected`` (empty: no value) by ``desired``; return the value afterwards. Errors as :meth:`get`."""
        name = self._name(key)
        before = self._seal(name, expected) if expected else b""
        return self._open(name, self._store.compare_set(name, before, self._seal(name, desired)))


class DynamicRendezvous(Rendezvous):
    """One worker's membership in a dynamic group; see :class:`Rendezvous`."""

    def __init__(self, store: StoreLike, *, timeout: float) -> None:
        super().__init__(store, "dynamic/", timeout)
        self._record: WorkerRecord | None = None
        # The names that members() has read from the log. The dict is replaced, never changed.
        self._names: dict[int, str] = {}

    def enter(
        self, record: WorkerRecord, own_key: Key | None, settings: Settings
    ) -> tuple[WorkerRecord, Key | None]:
        """Join the group without reading its members; return ``record``, with the assigned rank if its rank is -1, and the key.

        The number of store operations does not grow with the group. Workers that were given a key use it. Otherwise the first
        worker makes a file that only this user can read, and the others on its host read it.

        Raises:
            AuthenticationError: the workers do not share a key, or a value in the store was not written with it.
            RendezvousError: the name or the rank is taken, no free rank was found in time, or the store failed.
            ConfigError: the package ``cryptography`` is missing, or the key file cannot be written.
        """
        self._deadline = _time.now() + self.timeout
        self.key_is_given = own_key is not None
        key = None if own_key is None and settings.insecure else self._agree(own_key, record.host)
        if own_key is not None:
            self._store = SealedStore(self._store, own_key)
            self._names = {}  # drop names of an earlier group, which had no given key
        self._record = mine = self._join(record)
        return mine, key

    def resolve(self, to: str | int) -> WorkerRecord | None:
        """Return the worker of this name or rank; None if there is none."""
        if isinstance(to, str):
            value = self._find(f"name/{to}")
            return None if value is None or value == _LEFT else WorkerRecord.from_bytes(value)
        tag = self._find(f"rank/{to}")
        record = None if tag is None or tag == _LEFT else self.resolve(_tag_name(tag))
        return record if record is not None and record.rank == to else None

    def members(self) -> list[WorkerRecord]:
        """Return the records of the workers that have not left, by rank."""
        names = self._names.copy()
        new = [n for n in range(1, self._store_op("add", "log", 0) + 1) if n not in names]
        # A worker that joins claims a number of the log, and then writes the entry. The next call of members() reads entries
        # that are not written yet.
        if new and not self._store_op("check", [f"log/{n}" for n in new]):
            new = [n for n in new if self._store_op("check", [f"log/{n}"])]
        if new:
            found = self._store_op("multi_get", [f"log/{n}" for n in new])
            names.update(zip(new, map(_text, found), strict=True))
            self._names = names
        known = list(dict.fromkeys(names.values()))  # the log has a name twice if its worker has rejoined
        values = self._store_op("multi_get", [f"name/{name}" for name in known]) if known else []
        records = [WorkerRecord.from_bytes(value) for value in values if value != _LEFT]
        return sorted(records, key=lambda each: each.rank)

    def leave(self) -> None:
        """Leave, so that other workers may take the name and the rank. Idempotent."""
        record, self._record = self._record, None
        if record is not None:
            # If another worker has claimed the name or the rank since, the store keeps the entries of that worker.
            self._store_op("compare_set", f"name/{record.name}", record.to_bytes(), _LEFT)
            self._store_op("compare_set", f"rank/{record.rank}", _tag(record), _LEFT)

    # -- the key -------------------------------------------------------------------------------------

    def _offer(self, own_key: Key | None, host: str) -> tuple[Key, bytes]:
        if own_key is not None:
            return own_key, pack(GIVEN, own_key.sign(_PURPOSE, b""))
        key = self._make_key()
        return key, pack(FILE, self._key_file, host)

    def _read(self, announcement: list[Any], own_key: Key | None, host: str) -> Key:
        kind, *rest = announcement
        if kind == GIVEN and [type(each) for each in rest] == [bytes]:
            key = self._accept(GIVEN, "", "", own_key, host)
            if not key.has_signed(_PURPOSE, b"", rest[0]):
                raise AuthenticationError(
                    "the group has another key than this worker: give all workers the same ACTORRPC_KEY. If they have it, "
                    + OTHERS
                )
            return key
        if kind == FILE and [type(each) for each in rest] == [str, str]:
            return self._accept(FILE, rest[0], rest[1], own_key, host)
        return self._accept("", "", "", own_key, host)

    def _agree(self, own_key: Key | None, host: str) -> Key:
        while True:
            current = self._find("key")
            if current is not None:
                announcement = unpack(current)
                try:
                    key = self._read(announcement, own_key, host)
                except AuthenticationError:
                    # The file may belong to an earlier group in this store whose workers have all ended. If that group was given
                    # a key, its list of workers is encrypted, so this worker cannot check whether they have ended.
                    if announcement[0] == GIVEN or _time.now() > self._deadline:
                        raise
                    if any(not _is_dead(each, host) for each in self.members()):
                        raise
                else:
                    if announcement[0] == FILE and self._key_file is None:
                        # Workers that join later must be able to read the key after the present workers have ended.
                        self._key_file = keys.link_key_file(announcement[1])
                    return key
            key, mine = self._offer(own_key, host)
            if self._store_op("compare_set", "key", current or "", mine) == mine:
                return key
            self._forget_key_file()  # another worker was faster

    # -- names and ranks -----------------------------------------------------------------------------

    def _join(self, record: WorkerRecord) -> WorkerRecord:
        mine = self._take_rank(record)
        taken = self._claim(
            f"name/{mine.name}",
            mine.to_bytes(),
            lambda value: _is_dead(WorkerRecord.from_bytes(value), mine.host),
        )
        if taken is not None:
            self._store_op("compare_set", f"rank/{mine.rank}", _tag(mine), _LEFT)
            raise RendezvousError(
                f"the name is taken: {listed([WorkerRecord.from_bytes(taken)])}; choose another name"
            )
        self._store_op("set", f"log/{self._store_op('add', 'log', 1)}", mine.name.encode())
        return mine

    def _take_rank(self, record: WorkerRecord) -> WorkerRecord:
        wanted = record.rank
        while True:
            mine = replace(record, rank=wanted if wanted >= 0 else self._store_op("add", "next_rank", 1) - 1)
            holder = self._claim(f"rank/{mine.rank}", _tag(mine), partial(self._tag_is_free, mine))
            if holder is None:
                return mine
            if wanted >= 0:
                name = _tag_name(holder)
                raise RendezvousError(f"rank {wanted} is taken by {name!r}; omit rank= to get a free rank")
            if _time.now() > self._deadline:
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


def _tag(record: WorkerRecord) -> bytes:
    return f"{record.incarnation} {record.name}".encode()


def _tag_name(tag: bytes) -> str:
    return _text(tag).partition(" ")[2]


def _text(data: bytes) -> str:
    return bytes(data).decode("utf-8", "replace")


def _is_dead(record: WorkerRecord, own_host: str) -> bool:
    """Whether a worker has certainly ended; False for workers of other hosts, whose processes this worker cannot see."""
    return record.host == own_host and record.pid > 0 and keys.process_start(record.pid) is None
