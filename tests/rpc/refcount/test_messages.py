"""The encoding of reference-counting messages: they survive packing, and malformed bytes raise ProtocolError."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorrpc.errors import ProtocolError, RRefError
from actorrpc.rpc.refcount.messages import (
    BATCH,
    ChildAccept,
    ForkAck,
    ForkData,
    ForkId,
    ForkRequest,
    Message,
    RRefId,
    UserDelete,
    pack_forks,
    pack_message,
    unpack_forks,
    unpack_message,
)
from actorrpc.wire.identity import WorkerKey

keys = st.builds(WorkerKey, st.integers(0, 1 << 20), st.text(max_size=20))
numbers = st.integers(0, 1 << 50)
rref_ids = st.builds(lambda key, number: RRefId(key.rank, number, key.incarnation), keys, numbers)
fork_ids = st.builds(lambda key, number: ForkId(key.rank, number, key.incarnation), keys, numbers)


def rows(*columns: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(st.tuples(*columns), min_size=1, max_size=10).map(tuple)


messages = st.one_of(
    st.builds(UserDelete, rows(rref_ids, fork_ids)),
    st.builds(ForkRequest, rows(rref_ids, fork_ids)),
    st.builds(ForkAck, rows(rref_ids, fork_ids, st.booleans())),
    st.builds(ChildAccept, rows(fork_ids)),
)


@given(messages)
def test_messages_survive_packing(message: Message) -> None:
    again = unpack_message(pack_message(message))
    assert again == message
    assert [type(cell) for row in again.items for cell in row] == [
        type(cell) for row in message.items for cell in row
    ]


@pytest.mark.parametrize(
    "parts",
    [
        None,
        [],
        {},
        "text",
        [1, [], []],
        [0, [[0, "a"]], [0, 0, 0, 0]],
        [5, [[0, "a"]], [0, 0, 0, 0]],
        [True, [[0, "a"]], [0, 0, 0, 0]],
        [1, [[0, "a"]], [0, 0, 0]],
        [1, [[0, "a"]], [1, 0, 0, 0]],
        [1, [[0, "a"]], [0, -1, 0, 0]],
        [1, [[0, "a"]], [0, True, 0, 0]],
        [1, [[0, "a"]], [0, 1.0, 0, 0]],
        [1, [[0, "a"]], [0, 1 << 63, 0, 0]],
        [1, [[0, "a"]], [0, 0, 0, 0] * (BATCH + 1)],
        [1, [[0, "a"]] * 1000, [0, 0, 0, 0]],
        [1, [[-1, "a"]], [0, 0, 0, 0]],
        [1, [[0, 1]], [0, 0, 0, 0]],
        [1, [[0]], [0, 0, 0, 0]],
        [1, [0], [0, 0, 0, 0]],
        [1, [[0, "a" * 2000]], [0, 0, 0, 0]],
        [1, [[0, b"a"]], [0, 0, 0, 0]],
        [3, [[0, "a"]], [0, 0, 0, 0, 2]],
        [1, [[0, "a"]], "text"],
        [1, [[0, "a"]], [0, 0, 0, 0], 0],
        [msgpack.Timestamp(1), [], []],
        [[[0, "a"]], [0, 0, 0, 0]],
        [[[0, "a"]], [0, 0, 0, 1, 0]],
    ],
)
def test_malformed_messages_raise_protocol_error(parts: Any) -> None:
    data = msgpack.packb(parts)
    with pytest.raises(ProtocolError):
        unpack_message(data)
    with pytest.raises(ProtocolError):
        unpack_forks(data)


@given(st.binary(max_size=200), st.binary(max_size=8), messages, st.integers(0, 1000))
def test_damaged_bytes_raise_nothing_but_protocol_error(
    noise: bytes, patch: bytes, message: Message, at: int
) -> None:
    packed = bytearray(pack_message(message))
    packed[at % len(packed) : at % len(packed) + len(patch)] = patch
    for data in (noise, bytes(packed), b"\x00" * 70_000):
        for unpack in (unpack_message, unpack_forks):
            try:
                unpack(data)
            except ProtocolError:
                pass


def test_too_many_rrefs_in_one_call_raise_rref_error() -> None:
    data = ForkData(WorkerKey(0, "a"), RRefId(0, 0, "a"), ForkId(0, 1, "a"))
    with pytest.raises(RRefError):
        pack_forks([data] * 65_537)
