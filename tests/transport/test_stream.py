"""Streams over plain sockets: sending and receiving a whole message before a time, and cutting records."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorrpc import _time
from actorrpc.transport.stream import SocketStream, receive_exactly, records, send_all


@pytest.fixture
def pair() -> Iterator[tuple[SocketStream, SocketStream]]:
    one, other = (SocketStream(sock) for sock in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_a_message_that_the_kernel_does_not_take_at_once_arrives_whole(
    pair: tuple[SocketStream, SocketStream],
) -> None:
    data, limit = bytes(range(256)) * 20_000, _time.now() + 30
    thread = threading.Thread(target=send_all, args=(pair[0], data, limit))
    thread.start()
    assert receive_exactly(pair[1], len(data), limit) == data
    thread.join()


def test_nothing_behind_the_wanted_bytes_is_read(pair: tuple[SocketStream, SocketStream]) -> None:
    limit = _time.now() + 30
    send_all(pair[0], b"wanted and more", limit)
    assert receive_exactly(pair[1], 6, limit) == b"wanted"
    assert receive_exactly(pair[1], 9, limit) == b" and more"


def test_waiting_has_an_end(pair: tuple[SocketStream, SocketStream]) -> None:
    one, other = pair
    with pytest.raises(TimeoutError):
        receive_exactly(one, 1, _time.now() + 0.01)
    with pytest.raises(TimeoutError):
        send_all(one, bytes(1 << 24), _time.now() + 0.01)
    other.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionError):
        send_all(one, b"nobody reads", _time.now() + 30)
    with pytest.raises(ConnectionError):
        receive_exactly(other, 1 << 24, _time.now() + 30)


@given(st.lists(st.binary(max_size=50), max_size=10), st.integers(1, 40))
def test_records_are_full_but_the_last_one(parts: list[bytes], most: int) -> None:
    found = [bytes(record) for record in records([memoryview(part) for part in parts], most)]
    assert b"".join(found) == b"".join(parts)
    assert all(len(record) == most for record in found[:-1])
    assert all(0 < len(record) <= most for record in found)
