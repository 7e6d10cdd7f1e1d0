"""Seals: frames come out unchanged and in order, or with a ProtocolError, however the bytes in between are changed."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from actorrpc.errors import ProtocolError
from actorrpc.futures import Future
from actorrpc.wire import frames
from actorrpc.wire.frames import CHUNK, PREFIX, PREFIX_SIZE, Frame, FrameReader, pack_frame, pack_position
from actorrpc.wire.integrity import DIGEST_SIZE, SHORT, TAG_SIZE, Seal, SealedReader, Seals, chunk_head
from tests.agent.agents import agents
from tests.intruders.doors import tcp_agents
from tests.layers import rest_is_slow

_KEY = bytes(range(32))
_MAX_FRAME = 1 << 12
_MAX_CHUNK = 1 << 10


class _Sinks:
    """Provides memory for chunks, and records it."""

    def __init__(self) -> None:
        self.got: list[tuple[int, int, bytearray]] = []

    def __call__(self, stream: int, position: int, length: int) -> memoryview:
        memory = bytearray(length)
        self.got.append((stream, position, memory))
        return memoryview(memory)


def _seals() -> Seals:
    """Return the seals of both ends of one direction."""
    return Seals(Seals.of(_KEY, dialled=True).outgoing, Seals.of(_KEY, dialled=False).incoming)


def _reader(sinks: Any = None, seal: Seal | None = None) -> SealedReader:
    return SealedReader(
        seal or _seals().incoming,
        max_frame=_MAX_FRAME,
        max_chunk=_MAX_CHUNK,
        sink_for=sinks or _Sinks(),
        capacity=1 << 9,
    )


def _pack(seal: Seal, stream: int, position: int, data: bytes) -> bytes:
    prefix = pack_frame(CHUNK, stream, chain=position, length=len(data))
    return seal.tagged(chunk_head(prefix, memoryview(data))) + data


def _feed(
    reader: FrameReader, data: bytes, sizes: list[int], found: list[Frame] | None = None
) -> list[Frame]:
    """Feed bytes as a socket would: in pieces of the given sizes, and never more than fit."""
    found = [] if found is None else found
    position = 0
    turns = itertools.cycle(sizes or [len(data)])
    while position < len(data):
        count, put = max(1, next(turns)), 0
        for target in reader.target():
            assert 0 < len(target) <= _MAX_FRAME + (1 << 12)
            part = data[position + put : position + min(put + len(target), count)]
            target[: len(part)] = part
            put += len(part)
            if len(part) < len(target):
                break
        position += put
        found.extend(reader.fed(put))
        while reader.more:
            found.extend(reader.fed(0))
    return found


# -- an attacker between both ends -----------------------------------------------------------------------


def _conversation() -> tuple[list[bytes], list[Frame]]:
    """Return sealed frames of all kinds, and the frames that a reader must return for them."""
    seal = _seals().outgoing
    plain = [
        pack_frame(frames.INTRO, body=b"who I am"),
        pack_frame(frames.REQUEST, 7, b"a call", extra=b"\x81\xa1x\x01", remaining=1.5, chain=9),
        pack_frame(frames.PING),
        pack_frame(frames.REPLY, 3, b"42"),
        pack_frame(frames.REPLY, 4, b"a" * SHORT, extra=b"\x80"),
        pack_frame(frames.REQUEST, 8, b"in parts", flags=frames.STREAM, extra=b"\x80"),
    ]
    units = [seal.sealed(each) for each in plain]
    units += [_pack(seal, 1, pack_position(0, offset), b"chunk%d" % offset) for offset in (0, 6)]
    units += [seal.sealed(pack_frame(kind, 6)) for kind in (frames.CREDIT, frames.ACK, frames.CANCEL)]
    return units, _feed(_reader(), b"".join(units), [])


class _Listener:
    """Reads changed bytes, and checks that only a prefix of the sent frames comes out."""

    def __init__(self) -> None:
        self.units, self.sent_frames = _conversation()
        self.places = [(1, pack_position(0, 0), 6), (1, pack_position(0, 6), 6)]

    def read(self, data: bytes, sizes: list[int], seal: Seal | None = None) -> tuple[int, str]:
        """Return the number of frames that came out, and the outcome: ``refused``, ``waits`` or ``whole``."""
        sinks = _Sinks()
        found: list[Frame] = []
        reader, end = _reader(sinks, seal), "whole"
        try:
            _feed(reader, data, sizes, found)
            end = "waits" if reader.mid_frame else "whole"
        except ProtocolError:
            end = "refused"
            with pytest.raises(ProtocolError):  # permanently
                reader.fed(0)
        assert found == self.sent_frames[: len(found)]
        places = [(stream, position, len(memory)) for stream, position, memory in sinks.got]
        assert places == self.places[: len(places)]
        told = sum(frame.kind == CHUNK for frame in found)
        assert [bytes(memory) for _, _, memory in sinks.got[:told]] == [b"chunk0", b"chunk6"][:told]
        return len(found), end


@pytest.mark.limit(60)
@pytest.mark.parametrize("sizes", rest_is_slow([[], [61]]))
def test_every_flipped_bit_is_detected(sizes: list[int]) -> None:
    """Frames before the flipped bit are read, and none after it, even if the bit belongs to a length."""
    listener = _Listener()
    whole = b"".join(listener.units)
    starts = list(itertools.accumulate(map(len, listener.units), initial=0))
    # A reader never waits for more bytes than a short frame has.
    more = bytes(SHORT + TAG_SIZE)
    for at in range(len(whole)):
        unit = max(number for number, start in enumerate(starts) if start <= at)
        for bit in range(8):
            changed = bytearray(whole)
            changed[at] ^= 1 << bit
            count, end = listener.read(bytes(changed), sizes)
            assert count <= unit
            if end != "refused":
                # A bit of a length: the frame seems longer, and the reader waits for the rest.
                assert end == "waits"
                assert at - starts[unit] < 4
                assert listener.read(bytes(changed) + more, sizes)[1] == "refused"


def test_swapped_repeated_and_missing_frames_are_detected() -> None:
    listener = _Listener()
    units = listener.units
    numbers = range(len(units))
    for one, other in itertools.combinations(numbers, 2):
        swapped = list(units)
        swapped[one], swapped[other] = swapped[other], swapped[one]
        assert listener.read(b"".join(swapped), [])[1] != "whole"
        assert listener.read(b"".join(swapped), [20])[0] <= one
    for one in numbers:
        repeated = b"".join([*units[: one + 1], units[one], *units[one + 1 :]])
        assert listener.read(repeated, [20])[0] <= one + 1
        assert listener.read(repeated, [])[1] == "refused"
        without = b"".join([*units[:one], *units[one + 1 :]])
        assert listener.read(without, [20])[0] <= one
        if one < len(units) - 1:  # a missing last frame cannot be noticed yet
            assert listener.read(without, [])[1] == "refused"
    assert listener.read(b"".join(units), [20])[0] == len(units)


def test_resuming_at_a_wrong_position_yields_no_other_frames() -> None:
    """The position at which a session resumes is sent unsealed, so an attacker may change it."""
    listener = _Listener()
    whole = b"".join(listener.units)
    starts = list(itertools.accumulate(map(len, listener.units), initial=0))
    for here in range(0, len(whole), 23):
        for there in range(0, len(whole), 17):
            count, end = listener.read(whole[:here] + whole[there:], [])
            unit = max(number for number, start in enumerate(starts) if start <= here)
            assert count <= unit or here == there
            assert (end == "whole") == (here == there) or here == 0 or there == len(whole)


def test_frames_of_another_direction_or_connection_or_without_a_seal_are_refused() -> None:
    listener = _Listener()
    whole = b"".join(listener.units)
    dialler, acceptor = Seals.of(_KEY, dialled=True), Seals.of(_KEY, dialled=False)
    assert listener.read(whole, [], acceptor.incoming)[1] == "whole"
    assert listener.read(whole, [], dialler.incoming) == (0, "refused")
    assert listener.read(whole, [], Seals.of(bytes(32), dialled=False).incoming) == (0, "refused")
    bare = b"".join(each[:-TAG_SIZE] for each in listener.units)
    assert listener.read(bare, [20])[0] == 0
    assert listener.read(bare, []) == (0, "refused")


def test_limits_apply_before_seals_are_checked() -> None:
    for kind, length in ((frames.REQUEST, _MAX_FRAME + 1), (CHUNK, _MAX_CHUNK + 1), (CHUNK, 0)):
        reader = _reader()
        with pytest.raises(ProtocolError):
            _feed(reader, PREFIX.pack(length, 0, kind, 0, math.inf, 1, 0), [])
    # No memory is allocated for a length without a valid seal.
    for kind, length in ((frames.REQUEST, _MAX_FRAME), (CHUNK, _MAX_CHUNK)):
        reader = _reader()
        _feed(reader, PREFIX.pack(length, 0, kind, 0, math.inf, 1, 0), [])
        assert sum(map(len, reader.target())) < 1 << 9
    reader, frame = _reader(), _seals().outgoing.sealed(pack_frame(frames.REQUEST, body=bytes(_MAX_FRAME)))
    _feed(reader, frame[:80], [])
    assert sum(map(len, reader.target())) == _MAX_FRAME
    assert PREFIX_SIZE + DIGEST_SIZE + TAG_SIZE == 80  # as SECURITY.md says


# -- connections -----------------------------------------------------------------------------------------


def test_calls_cancelled_before_sending_do_not_break_the_sequence_of_seals() -> None:
    with tcp_agents(2, frame_integrity=True) as (one, other):
        peer = one.peer(other.name)
        assert one.call_sync(peer, _echo, (1,), {}, 20.0) == 1
        conn = peer.conn
        assert conn is not None
        assert conn.writer.seal is not None
        with conn.writer.lock:
            futures = [Future[Any]() for _ in range(3)]
            for future in futures:
                one.call(peer, _echo, (2,), {}, 20.0, future=future)
            assert all(future.cancel() for future in futures)
        assert one.call_sync(peer, _echo, (3,), {}, 20.0) == 3
        assert peer.conn is conn


def _echo(value: Any) -> Any:
    return value


@pytest.mark.parametrize("wants", [(False, False), (True, False), (False, True), (True, True)])
def test_frames_are_sealed_if_either_side_sets_frame_integrity(wants: tuple[bool, bool]) -> None:
    each = [{"frame_integrity": want} for want in wants]
    with tcp_agents(2, each=each) as (a0, a1):
        value = torch.arange(1 << 20)
        for agent, other in ((a0, "a1"), (a1, "a0")):
            assert torch.equal(agent.call_sync(agent.peer(other), _echo, (value,), {}, 30.0), value)
        conns = [*a0.connector.connections(), *a1.connector.connections()]
        for conn in conns:
            assert (conn.writer.seal is not None) == any(wants)
            assert type(conn.reader) is (SealedReader if any(wants) else FrameReader)


def test_frames_on_one_host_are_not_sealed() -> None:
    """Bytes in Unix sockets and shared memory do not leave the host, so frame_integrity has no effect on them."""
    with agents(2, frame_integrity=True) as (a0, a1):
        assert a0.call_sync(a0.peer("a1"), _echo, (5,), {}, 30.0) == 5
        assert all(
            conn.writer.seal is None for conn in (*a0.connector.connections(), *a1.connector.connections())
        )
