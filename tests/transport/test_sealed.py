"""Seals: what comes out is what went in, in its order, or a ProtocolError; whatever is done to the bytes between."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actorrpc.errors import ProtocolError
from actorrpc.futures import Future
from actorrpc.transport.connection import Connection
from actorrpc.transport.sealed import HEAD_SIZE, RECORD, TAG_SIZE, Seal, SealedStream
from actorrpc.wire import frames
from actorrpc.wire.frames import pack_frame
from tests.agent.agents import agents
from tests.intruders.doors import dialler, knock, tcp_agents

_KEY = bytes(range(32))


class _Wire:
    """A wire of which each end takes and gives a number of bytes at a time."""

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        # Two cycles: with one, each send could get a size of 0, and never end.
        self._sent, self._read = (itertools.cycle(sizes or [1 << 30]) for _ in range(2))
        self.under_way = bytearray()

    def send(self, data: bytes, flags: int = 0, /) -> int:
        size = next(self._sent)
        if not size:
            raise BlockingIOError
        self.under_way += data[:size]
        return len(data[:size])

    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0, /) -> int:
        data = self.under_way[: min(len(buffer), max(1, next(self._read)))]
        if not data:
            raise BlockingIOError
        del self.under_way[: len(data)]
        buffer[: len(data)] = data
        return len(data)


def _ends(wire: _Wire) -> tuple[SealedStream, SealedStream]:
    sock = cast(Any, wire)
    return SealedStream(sock, _KEY, dialled=True), SealedStream(sock, _KEY, dialled=False)


def _read(stream: SealedStream, most: int = 1 << 16) -> bytes:
    """Read until there is nothing more."""
    got = b""
    while True:
        buffer = memoryview(bytearray(most))
        try:
            got += buffer[: stream.recv_into(buffer)]
        except BlockingIOError:
            assert not stream.pending
            return got


_sizes = st.lists(st.integers(0, 3_000), min_size=1, max_size=8).filter(any)


@given(
    st.lists(st.binary(max_size=200), max_size=12),
    _sizes,
    st.integers(1, 5_000),
    st.sampled_from([1, 90, 500]),
)
def test_bytes_come_out_as_they_went_in(parts: list[bytes], sizes: list[int], most: int, times: int) -> None:
    wire = _Wire(sizes)
    one, other = _ends(wire)
    rest = [memoryview(part * times) for part in parts if part]
    sent, got = b"".join(rest), b""
    while rest:
        try:
            count = one.sendmsg(rest)
        except BlockingIOError:
            count = 0
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]
        got += _read(other, most)
    assert got + _read(other, most) == sent


def test_bytes_that_were_received_and_not_read_are_pending() -> None:
    wire = _Wire()
    one, other = _ends(wire)
    assert one.send(b"first") == 5
    assert one.send(b"second") == 6
    buffer = memoryview(bytearray(4))
    assert other.recv_into(buffer) == 4
    assert not wire.under_way
    assert other.pending
    assert other.recvmsg_into([buffer[:1], buffer[1:]]) == (4,)
    assert bytes(buffer) == b"tsec"
    assert other.pending
    assert _read(other) == b"ond"


def test_a_record_that_has_begun_goes_on_as_it_was_sealed() -> None:
    """The caller may change its memory meanwhile: the other side must not take that for an attack."""
    wire = _Wire([30, 0, 1 << 20])
    one, other = _ends(wire)
    memory = bytearray(b"as it was")
    with pytest.raises(BlockingIOError):
        one.sendmsg([memoryview(memory)])
    memory[:] = b"as it is!"
    assert one.sendmsg([memoryview(memory)]) == len(memory)
    assert _read(other) == b"as it was"


# -- somebody between ------------------------------------------------------------------------------------


def _conversation() -> tuple[list[bytes], list[bytes]]:
    """Return what is said, and its records."""
    said = [b"a call", b"x", b"its answer" * 20, bytes(33)]
    records = []
    wire = _Wire()
    one, _ = _ends(wire)
    for each in said:
        one.send(each)
        records.append(bytes(wire.under_way))
        wire.under_way.clear()
    return said, records


def _heard(data: bytes, most: int = 1 << 16, **end: Any) -> tuple[bytes, bool]:
    """Return what comes out of these bytes, and whether they were refused."""
    wire = _Wire()
    wire.under_way += data
    stream = SealedStream(cast(Any, wire), **({"key": _KEY, "dialled": False} | end))
    got = b""
    buffer = memoryview(bytearray(most))
    try:
        while True:
            got += buffer[: stream.recv_into(buffer)]
    except BlockingIOError:
        return got, False
    except ProtocolError:
        for _ in range(3):  # for good
            with pytest.raises(ProtocolError):
                stream.recv_into(buffer)
        return got, True


def test_the_conversation_is_heard() -> None:
    said, records = _conversation()
    assert _heard(b"".join(records)) == (b"".join(said), False)
    assert [len(record) for record in records] == [HEAD_SIZE + len(each) + TAG_SIZE for each in said]


def test_no_bit_can_be_flipped() -> None:
    """Every single one: what comes before is heard at most, and nothing behind it."""
    said, records = _conversation()
    whole = b"".join(records)
    starts = list(itertools.accumulate(map(len, records), initial=0))
    for at in range(len(whole)):
        record = max(number for number, start in enumerate(starts) if start <= at)
        for bit in range(8):
            changed = bytearray(whole)
            changed[at] ^= 1 << bit
            got, refused = _heard(bytes(changed), 1)  # so that what comes before is read before
            assert refused
            assert got == b"".join(said[:record])


def test_no_record_can_be_moved_repeated_or_left_out() -> None:
    said, records = _conversation()
    for one, other in itertools.combinations(range(len(records)), 2):
        swapped = list(records)
        swapped[one], swapped[other] = swapped[other], swapped[one]
        assert _heard(b"".join(swapped), 1) == (b"".join(said[:one]), True)
    for one in range(len(records)):
        repeated = b"".join([*records[: one + 1], *records[one:]])
        assert _heard(repeated, 1) == (b"".join(said[: one + 1]), True)
        without = b"".join([*records[:one], *records[one + 1 :]])
        is_last = one == len(records) - 1  # of what was cut off at the end, nobody knows yet
        assert _heard(without, 1) == (b"".join(said[:one]), not is_last)


def test_records_of_others_are_refused() -> None:
    """Of the other direction, of another connection, without a seal."""
    said, records = _conversation()
    whole = b"".join(records)
    assert _heard(whole, dialled=True) == (b"", True)
    assert _heard(whole, key=bytes(32)) == (b"", True)
    assert _heard(b"".join(said)) == (b"", True)


def test_a_length_is_refused_before_its_bytes_have_come() -> None:
    _, records = _conversation()
    huge = bytearray(records[0][:HEAD_SIZE])
    huge[2] ^= 1
    assert _heard(bytes(huge)) == (b"", True)
    wire = _Wire()
    _, other = _ends(wire)
    wire.under_way += Seal(_KEY, b"dialler").record(bytes(RECORD + 1))[:HEAD_SIZE]
    with pytest.raises(ProtocolError, match=f"a sealed record of {RECORD + 1} bytes"):
        _read(other)


# -- connections -----------------------------------------------------------------------------------------


def is_sealed(conn: Connection) -> bool:
    """Say whether what goes over a connection is sealed."""
    stream = conn.stream if conn.session is None else conn.session.stream
    return isinstance(stream, SealedStream)


def test_calls_that_are_taken_back_before_they_are_sent_leave_nothing_on_the_wire() -> None:
    with tcp_agents(2, frame_integrity=True) as (one, other):
        peer = one.peer(other.name)
        assert one.ask(peer, _echo, (1,), {}, 20.0) == 1
        conn = peer.conn
        assert conn is not None
        assert is_sealed(conn)
        with conn.writer.lock:
            futures = [Future[Any]() for _ in range(3)]
            for future in futures:
                one.call(peer, _echo, (2,), {}, 20.0, future=future)
            assert all(future.cancel() for future in futures)
        assert one.ask(peer, _echo, (3,), {}, 20.0) == 3
        assert peer.conn is conn


def _echo(value: Any) -> Any:
    return value


@pytest.mark.parametrize("wants", [(False, False), (True, False), (False, True), (True, True)])
def test_one_side_that_wants_them_is_enough(wants: tuple[bool, bool]) -> None:
    """And where nobody does, connections are as plain as ever."""
    each = [{"frame_integrity": want} for want in wants]
    with tcp_agents(2, each=each) as (a0, a1):
        value = torch.arange(1 << 20)
        for agent, other in ((a0, "a1"), (a1, "a0")):
            assert torch.equal(agent.ask(agent.peer(other), _echo, (value,), {}, 30.0), value)
        conns = [*a0.connector.connections(), *a1.connector.connections()]
        for conn in conns:
            assert is_sealed(conn) == any(wants)


def test_on_one_host_the_kernel_is_trusted() -> None:
    """Unix sockets and shared memory leave no host: nothing is sealed, also where it is wanted."""
    with agents(2, frame_integrity=True) as (a0, a1):
        assert a0.ask(a0.peer("a1"), _echo, (5,), {}, 30.0) == 5
        assert not any(map(is_sealed, (*a0.connector.connections(), *a1.connector.connections())))


@pytest.mark.prints(
    "the connection to a stranger was closed: what came does not carry the seal of its sender"
)
def test_a_member_that_does_not_seal_is_cut_off() -> None:
    with tcp_agents(1, frame_integrity=True) as (agent,):
        sock, side = knock(agent), dialler(agent)
        sock.sendall(side.start())
        while not side.done:
            sock.sendall(side.feed(sock.recv(side.wanted)))
        assert side.result.sealed
        sock.sendall(pack_frame(frames.PING) * 10)
        assert sock.recv(1) == b""
        sock.close()
