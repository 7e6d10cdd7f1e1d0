"""FrameReader: any bytes, in pieces of any size, give the right frames or a ProtocolError, within the limits."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorrpc.errors import LimitError, ProtocolError
from actorrpc.wire import frames
from actorrpc.wire.frames import (
    CHUNK,
    MAX_EXTRA,
    PREFIX,
    PREFIX_SIZE,
    Frame,
    FrameReader,
    pack_frame,
    pack_position,
    unpack_position,
)

_MAX_FRAME = 1 << 16
_MAX_CHUNK = 1 << 12

_kinds = st.sampled_from([kind for kind in range(1, frames.NOTICE + 1) if kind != CHUNK])
_u64 = st.integers(0, 2**64 - 1)
_small = st.builds(
    lambda kind, flags, id, remaining, chain, extra, body: (
        Frame(kind, flags, id, remaining, chain, extra, body),
        pack_frame(kind, id, body, flags=flags, remaining=remaining, chain=chain, extra=extra),
    ),
    _kinds,
    st.integers(0, 255),
    _u64,
    st.one_of(st.just(math.inf), st.floats(0, 1e6, width=32)),
    _u64,
    st.binary(max_size=64),
    st.binary(max_size=600),
)
_chunks = st.builds(
    lambda stream, offset, data: (stream, offset, data),
    st.integers(0, 2**64 - 1),
    st.integers(0, 1 << 20),
    st.binary(min_size=1, max_size=_MAX_CHUNK),
)


class _Sinks:
    """Provides memory for chunks, and records it."""

    def __init__(self) -> None:
        self.got: list[tuple[int, int, bytearray]] = []

    def __call__(self, stream: int, position: int, length: int) -> memoryview:
        assert 0 < length <= _MAX_CHUNK
        memory = bytearray(length)
        self.got.append((stream, position, memory))
        return memoryview(memory)


def _reader(sinks: _Sinks | None = None, capacity: int = 1 << 12) -> FrameReader:
    return FrameReader(max_frame=_MAX_FRAME, max_chunk=_MAX_CHUNK, sink_for=sinks, capacity=capacity)


def _feed(reader: FrameReader, data: bytes, sizes: list[int]) -> list[Frame]:
    """Feed bytes as a socket would: in pieces of at most the given sizes, and never more than fit."""
    found: list[Frame] = []
    position, turn = 0, 0
    while position < len(data):
        count = max(1, sizes[turn % len(sizes)]) if sizes else len(data)
        turn += 1
        put = 0
        for target in reader.target():
            assert len(target) > 0
            assert len(target) <= _MAX_FRAME + (1 << 12)
            part = data[position + put : position + put + min(len(target), count - put)]
            target[: len(part)] = part
            put += len(part)
            if put == count or len(part) < len(target):
                break
        if not put:
            raise AssertionError("no room")
        position += put
        found.extend(reader.fed(put))
        while reader.more:
            found.extend(reader.fed(0))
    return found


def _no_large_bytes(given: memoryview) -> bytes:
    if len(given) > 100:
        raise MemoryError
    return bytes(given)


@pytest.mark.parametrize("sizes", [[], [40], [5000]])
@pytest.mark.parametrize(("flags", "extra"), [(0, b""), (frames.MAIL, b"header")])
def test_a_message_without_memory_for_its_body_becomes_an_unread_frame(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], flags: int, extra: bytes
) -> None:
    monkeypatch.setattr(frames, "bytes", _no_large_bytes, raising=False)
    reader = _reader()
    large = pack_frame(frames.REPLY, 7, b"x" * 200, flags=flags, extra=extra)
    for data in (large, pack_frame(frames.REQUEST, 1, b"a") + large + pack_frame(frames.REQUEST, 2, b"b")):
        found = {frame.id: frame for frame in _feed(reader, data, sizes)}
        assert found.pop(7) == Frame(frames.UNREAD, flags, 7, math.inf, 0, extra, b"", (frames.REPLY, 200))
        assert [frame.body for frame in found.values()] in ([], [b"a", b"b"])


def test_lack_of_memory_for_definitions_or_stream_headers_raises_memory_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "bytes", _no_large_bytes, raising=False)
    for kind, flags in ((frames.DEFINITION, 0), (frames.REQUEST, frames.STREAM)):
        with pytest.raises(MemoryError):
            _feed(_reader(), pack_frame(kind, 1, b"x" * 200, flags=flags), [])


@given(st.lists(st.one_of(_small, _chunks), max_size=12), st.lists(st.integers(1, 5000), max_size=8))
def test_packed_frames_are_read_back_in_pieces_of_any_size(
    items: list[tuple[Frame, bytes] | tuple[int, int, bytes]], sizes: list[int]
) -> None:
    sinks = _Sinks()
    data, expected, memory = b"", [], []
    for item in items:
        if len(item) == 2:
            data += item[1]
            expected.append(item[0])
        else:
            stream, offset, chunk = item
            position = pack_position(3, offset)
            data += pack_frame(CHUNK, stream, chain=position, length=len(chunk)) + chunk
            expected.append(Frame(CHUNK, len(chunk), stream, math.inf, position, b"", b""))
            memory.append((stream, position, bytearray(chunk)))
    reader = _reader(sinks)
    assert _feed(reader, data, sizes) == expected
    assert sinks.got == memory
    assert not reader.mid_frame


def test_frames_of_maximum_size_are_read_and_the_buffer_stays_bounded() -> None:
    body = bytes(range(256)) * (_MAX_FRAME // 256)
    data = pack_frame(frames.REPLY, 1, body)
    for sizes in ([], [1000], [33, 4096]):
        reader = _reader()
        for _ in range(3):
            (frame,) = _feed(reader, data, sizes)
            assert frame.body == body
        assert sum(len(part) for part in reader.target()) <= 2 * (_MAX_FRAME + PREFIX_SIZE)


@pytest.mark.parametrize(
    "prefix",
    [
        (_MAX_FRAME + 1, 0, frames.REQUEST, 0, 1.0, 1, 1),
        (2**32 - 1, 0, frames.REQUEST, 0, 1.0, 1, 1),
        (10, 11, frames.REQUEST, 0, 1.0, 1, 1),
        (0, 2**32 - 1, frames.REQUEST, 0, 1.0, 1, 1),
        (0, 0, 0, 0, 1.0, 1, 1),
        (0, 0, frames.ACK + 1, 0, 1.0, 1, 1),
        (0, 0, 255, 0, 1.0, 1, 1),
        (0, 0, frames.REQUEST, 0, math.nan, 1, 1),
        (0, 0, CHUNK, 0, 1.0, 1, 1),
        (_MAX_CHUNK + 1, 0, CHUNK, 0, 1.0, 1, 1),
        (2**32 - 1, 0, CHUNK, 0, 1.0, 1, 1),
    ],
)
def test_an_invalid_prefix_is_refused_before_its_body_is_read(
    prefix: tuple[int, int, int, int, float, int, int],
) -> None:
    sinks = _Sinks()
    reader = _reader(sinks)
    with pytest.raises(ProtocolError, match=r"limit|not a frame"):
        _feed(reader, PREFIX.pack(*prefix) + bytes(10), [])
    assert not sinks.got
    assert sum(len(part) for part in reader.target()) <= 1 << 12


@given(st.lists(_small, min_size=1, max_size=6), st.data())
def test_flipped_bits_give_frames_or_a_protocol_error(
    items: list[tuple[Frame, bytes]], data: st.DataObject
) -> None:
    stream = bytearray(b"".join(packed for _, packed in items))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(stream) * 8 - 1))
        stream[at // 8] ^= 1 << at % 8
    sinks = _Sinks()
    reader = _reader(sinks)
    try:
        found = _feed(reader, bytes(stream), data.draw(st.lists(st.integers(1, 700), max_size=4)))
    except ProtocolError:
        return
    assert sum(len(frame.body) + len(frame.extra) for frame in found) <= len(stream)
    assert all(0 < frame.kind <= frames.LAST_KIND for frame in found)


def test_random_prefixes_give_frames_or_a_protocol_error_within_the_limits() -> None:
    """Prefixes with plausible kinds and lengths, more of them than hypothesis would try."""
    rng = random.Random(20)
    outcomes = [0, 0]
    for _ in range(3000):
        sinks = _Sinks()
        reader = _reader(sinks, capacity=256)
        data = b"".join(
            PREFIX.pack(
                rng.choice([0, 1, 7, 300, 5000, _MAX_FRAME, _MAX_FRAME + 1, rng.getrandbits(32)]),
                rng.choice([0, 0, 0, 1, 9, rng.getrandbits(32)]),
                rng.choice([*range(18), 255]),
                rng.getrandbits(8),
                rng.choice([0.0, 1.0, math.inf, -1.0]),
                rng.getrandbits(64),
                rng.getrandbits(64),
            )
            + rng.randbytes(rng.choice([0, 1, 7, 300]))
            for _ in range(rng.randrange(1, 6))
        )
        try:
            _feed(reader, data, [rng.randrange(1, 400) for _ in range(3)])
            outcomes[0] += 1
        except ProtocolError:
            outcomes[1] += 1
        assert sum(len(memory) for _, _, memory in sinks.got) <= 5 * _MAX_CHUNK
        assert sum(len(part) for part in reader.target()) <= 3 * _MAX_FRAME
    assert all(outcomes)


# -- fields -------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(0, (1 << 40) - 1))
def test_chunk_positions_survive_packing(index: int, offset: int) -> None:
    assert unpack_position(pack_position(index, offset)) == (index, offset)


def test_packing_a_header_over_its_limit_raises_limit_error() -> None:
    with pytest.raises(LimitError):
        pack_frame(frames.REQUEST, extra=bytes(MAX_EXTRA + 1))
