"""The messages that workers send each other about RRefs: ids, messages and their bytes. No I/O, no state, no pickle.

A *fork* is one worker's handle on a value: each sent RRef makes a fork, from its *parent* (the sender) for its *child* (the
receiver). An id contains the incarnation of the worker that made it, because the counter of a restarted worker starts at 0
again. A message lists each worker once; an id in it is two numbers, the index of its worker and the count. All bytes are checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgpack

from actorrpc.errors import ProtocolError, RRefError
from actorrpc.wire.identity import WorkerKey

__all__ = [
    "BATCH",
    "ChildAccept",
    "ForkAck",
    "ForkData",
    "ForkId",
    "ForkRequest",
    "Message",
    "RRefId",
    "UserDelete",
    "pack_forks",
    "pack_message",
    "unpack_forks",
    "unpack_message",
]

BATCH: Final = 100  # most forks in one message
_MAX_FORKS: Final = 1 << 16  # most forks that one call may carry
_MAX_BYTES: Final = 64 << 10  # a message of BATCH forks is a few kilobytes
_MAX_FORK_BYTES: Final = 16 << 20
_MAX_NUMBER: Final = 1 << 62
_MAX_INCARNATION: Final = 1024


# -- words ---------------------------------------------------------------------------------------


class _Id(NamedTuple):
    created_on: int
    local_id: int
    incarnation: str = ""

    @property
    def creator(self) -> WorkerKey:
        """The worker that made this id; the creator of a fork's id is the fork's parent."""
        return WorkerKey(self.created_on, self.incarnation)

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"


class RRefId(_Id):
    """Names a value by the worker that requested it and a counter of that worker. The value may be on another worker."""

    __slots__ = ()


class ForkId(_Id):
    """Names a fork by the worker that made it and a counter of that worker."""

    __slots__ = ()


class ForkData(NamedTuple):
    """An RRef in a message: the sender's :meth:`RRefTable.fork` makes it, the receiver's :meth:`RRefTable.receive` reads it."""

    owner: WorkerKey
    rref_id: RRefId
    fork_id: ForkId


# -- messages ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UserDelete:
    """User to owner: the user has released these forks. Deleting a fork twice, or an unknown fork, changes nothing."""

    items: tuple[tuple[RRefId, ForkId], ...]


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """Child to owner: register these forks. The owner answers each copy of this message with :class:`ForkAck`."""

    items: tuple[tuple[RRefId, ForkId], ...]


@dataclass(frozen=True, slots=True)
class ForkAck:
    """Owner to child: the forks are registered (``True``), or their value was already released (``False``)."""

    items: tuple[tuple[RRefId, ForkId, bool], ...]


@dataclass(frozen=True, slots=True)
class ChildAccept:
    """Child to parent: the owner has answered for these forks, or has died, so the parent may release its own fork."""

    items: tuple[tuple[ForkId], ...]


Message = UserDelete | ForkRequest | ForkAck | ChildAccept

_SHAPES: Final[dict[int, tuple[Any, tuple[type, ...]]]] = {
    1: (UserDelete, (RRefId, ForkId)),
    2: (ForkRequest, (RRefId, ForkId)),
    3: (ForkAck, (RRefId, ForkId, bool)),
    4: (ChildAccept, (ForkId,)),
}
_TAGS: Final[dict[type, int]] = {shape[0]: tag for tag, shape in _SHAPES.items()}
_FORK_SHAPE: Final[tuple[type, ...]] = (WorkerKey, RRefId, ForkId)


def _pack_rows(rows: Iterable[Iterable[Any]]) -> tuple[list[WorkerKey], list[int]]:
    """Flatten rows of ids to numbers. The first list has each worker once; the numbers refer to workers by index."""
    workers: dict[WorkerKey, int] = {}
    flat: list[int] = []
    for row in rows:
        for cell in row:
            if isinstance(cell, bool):
                flat.append(int(cell))
            elif isinstance(cell, WorkerKey):
                flat.append(workers.setdefault(cell, len(workers)))
            else:
                flat += (workers.setdefault(cell.creator, len(workers)), cell.local_id)
    return list(workers), flat


def _unpack_rows(workers: Any, flat: Any, shape: tuple[type, ...], most: int) -> list[tuple[Any, ...]]:
    width = sum(1 if cell in (bool, WorkerKey) else 2 for cell in shape)
    if type(workers) is not list or type(flat) is not list:
        raise ProtocolError("RRef message: not a list")
    if len(flat) % width or not 0 < len(flat) <= most * width or len(workers) > most * len(shape):
        raise ProtocolError("RRef message: wrong number of entries")
    keys: list[WorkerKey] = []
    for pair in workers:
        if type(pair) is not list or len(pair) != 2:
            raise ProtocolError("RRef message: worker is not a pair")
        rank, incarnation = pair
        if type(rank) is not int or not 0 <= rank < _MAX_NUMBER or type(incarnation) is not str:
            raise ProtocolError("RRef message: not a worker")
        keys.append(WorkerKey(rank, incarnation))
    for number in flat:
        if type(number) is not int or not 0 <= number < _MAX_NUMBER:
            raise ProtocolError("RRef message: number out of range")
    rows: list[tuple[Any, ...]] = []
    numbers = iter(flat)
    try:
        for _ in range(len(flat) // width):
            row: list[Any] = []
            for cell in shape:
                if cell is bool:
                    row.append((False, True)[next(numbers)])
                    continue
                key = keys[next(numbers)]
                row.append(key if cell is WorkerKey else cell(key.rank, next(numbers), key.incarnation))
            rows.append(tuple(row))
    except IndexError:
        raise ProtocolError("RRef message: index out of range") from None
    return rows


def _unpack(data: bytes, limit: int, length: int) -> list[Any]:
    if len(data) > limit:
        raise ProtocolError(f"RRef message of {len(data)} bytes")
    try:
        parts = msgpack.unpackb(
            data, max_str_len=_MAX_INCARNATION, max_map_len=0, max_bin_len=0, max_ext_len=0
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise ProtocolError("RRef message: not msgpack") from error
    if type(parts) is not list or len(parts) != length:
        raise ProtocolError("RRef message: wrong shape")
    return parts


def pack_message(message: Message) -> bytes:
    """Write a message."""
    packed: bytes = msgpack.packb([_TAGS[type(message)], *_pack_rows(message.items)])
    return packed


def unpack_message(data: bytes) -> Message:
    """Read a message.

    Raises:
        ProtocolError: the bytes are not a message.
    """
    tag, workers, flat = _unpack(data, _MAX_BYTES, 3)
    if type(tag) is not int or tag not in _SHAPES:
        raise ProtocolError("RRef message: unknown kind")
    make, shape = _SHAPES[tag]
    message: Message = make(tuple(_unpack_rows(workers, flat, shape, BATCH)))
    return message


def pack_forks(forks: Sequence[ForkData]) -> bytes:
    """Write the forks that a call or a reply carries. An empty list gives no bytes.

    Raises:
        RRefError: there are more than 65 536.
    """
    if not forks:
        return b""
    if len(forks) > _MAX_FORKS:
        raise RRefError(
            f"{len(forks)} RRefs in one message; at most {_MAX_FORKS} are allowed: send them in several calls"
        )
    packed: bytes = msgpack.packb(_pack_rows(forks))
    return packed


def unpack_forks(data: bytes) -> list[ForkData]:
    """Read what :func:`pack_forks` wrote.

    Raises:
        ProtocolError: the bytes are not such a list.
    """
    if not data:
        return []
    workers, flat = _unpack(data, _MAX_FORK_BYTES, 2)
    return [ForkData(*row) for row in _unpack_rows(workers, flat, _FORK_SHAPE, _MAX_FORKS)]
