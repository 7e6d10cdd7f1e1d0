"""FrameReader: any bytes, in pieces of any size, give the right frames or a ProtocolError, within the limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorrpc.errors import LimitError, ProtocolError
from actorrpc.wire import frames
from actorrpc.wire.frames import (
    CHUNK,
    MAX_EXTRA,
    PREFIX,
    Frame,
    FrameReader,
    pack_frame,
    pack_position,
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


@pytest.mark.parametrize(
    "prefix",
    [
        (_MAX_FRAME + 1, 0, frames.REQUEST, 0, 1.0, 1, 1),
        (2**32 - 1, 0, frames.REQUEST, 0, 1.0, 1, 1),
        (10, 11, frames.REQUEST, 0, 1.0, 1, 1),
        (0, 2**32 - 1, frames.REQUEST, 0, 1.0, 1, 1),
        (0, 0, 0, 0, 1.0, 1, 1),
        (0, 0, frames.LAST_KIND + 1, 0, 1.0, 1, 1),
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


# -- fields -------------------------------------------------------------------------------------------


def test_packing_a_header_over_its_limit_raises_limit_error() -> None:
    with pytest.raises(LimitError):
        pack_frame(frames.REQUEST, extra=bytes(MAX_EXTRA + 1))
