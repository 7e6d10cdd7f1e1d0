"""One agent and raw peers that connect to it: which peers are refused, and how malformed frames are handled."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from actorrpc.agent import outbound
from actorrpc.agent.agent import Agent
from actorrpc.errors import ProtocolError
from actorrpc.wire import frames
from actorrpc.wire.frames import PREFIX, pack_frame, pack_position
from tests.agent.agents import Stranger, agents

_INF = float("inf")


@pytest.fixture
def pair() -> Iterator[list[Agent]]:
    with agents(2, max_frame=1 << 16) as made:
        yield made


def _works(pair: list[Agent]) -> bool:
    """Return whether calls between the two agents still work."""
    return all(
        bool(pair[i].call_sync(pair[i].peer(f"a{1 - i}"), operator.add, (i, 1), {}, 0) == i + 1)
        for i in (0, 1)
    )


# -- refused peers -------------------------------------------------------------------------------------


def test_a_handshake_meant_for_another_worker_is_refused(pair: list[Agent]) -> None:
    for wrong in ({"peer_name": "a1"}, {"peer_incarnation": "f" * 32}):
        stranger = Stranger(pair[0], **wrong)
        with pytest.raises((ProtocolError, ConnectionError)):
            stranger.shake_hands()
        stranger.close()
    assert _works(pair)


@pytest.mark.prints("the connection to a stranger was closed: 'stranger' introduced itself as 'somebody'")
def test_an_introduction_under_another_name_than_in_the_handshake_is_refused(pair: list[Agent]) -> None:
    stranger = Stranger(pair[0])
    stranger.shake_hands()
    other = Stranger(pair[0], name="somebody")
    stranger.sock.sendall(pack_frame(frames.INTRO, body=other.record.to_bytes()))
    stranger.read_to_the_end()
    stranger.close()
    other.close()
    assert _works(pair)


# -- frames of authenticated peers ---------------------------------------------------------------------


def _request(id: int, function: Any, *args: Any) -> bytes:
    return pack_frame(frames.REQUEST, id, pickle.dumps((function, args, {})), remaining=_INF)


_GARBAGE = {
    "too long": PREFIX.pack(1 << 20, 0, frames.REQUEST, 0, 1.0, 1, 1),
    "longest": PREFIX.pack(2**32 - 1, 0, frames.REQUEST, 0, 1.0, 1, 1),
    "unknown kind": PREFIX.pack(0, 0, 200, 0, 1.0, 1, 1),
    "kind zero": bytes(PREFIX.size),
    "not a number": PREFIX.pack(0, 0, frames.REQUEST, 0, float("nan"), 1, 1),
    "chunk of no stream": pack_frame(frames.CHUNK, 9, chain=pack_position(0, 0), length=4) + b"abcd",
    "stream without sizes": pack_frame(frames.REQUEST, 9, flags=outbound.STREAM, extra=b"\x80"),
    "stream that is too large": pack_frame(
        frames.REQUEST, 9, flags=outbound.STREAM, extra=msgpack.packb({"b": [1 << 62], "s": 1})
    ),
    "stream of negative size": pack_frame(
        frames.REQUEST, 9, flags=outbound.STREAM, extra=msgpack.packb({"b": [-1, 5], "s": 1})
    ),
    "chunk outside": pack_frame(
        frames.REQUEST, 9, flags=outbound.STREAM, extra=msgpack.packb({"b": [8], "s": 1})
    )
    + pack_frame(frames.CHUNK, 1, chain=pack_position(0, 6), length=4)
    + b"abcd",
    "chunk of another buffer": pack_frame(
        frames.REQUEST, 9, flags=outbound.STREAM, extra=msgpack.packb({"b": [8], "s": 1})
    )
    + pack_frame(frames.CHUNK, 1, chain=pack_position(7, 0), length=4)
    + b"abcd",
    "introduced twice": None,
    "header that is no map": pack_frame(frames.NOTICE, extra=b"\x01"),
    "late answer with a bad header": pack_frame(frames.REPLY, 12345, extra=b"\xc1"),
}


@pytest.mark.parametrize("garbage", _GARBAGE.values(), ids=_GARBAGE)
@pytest.mark.prints("the connection to (a stranger|stranger) was closed: ")
def test_a_malformed_frame_closes_its_connection_and_no_other(
    pair: list[Agent], garbage: bytes | None
) -> None:
    bystander = Stranger(pair[0], name="bystander")
    bystander.shake_hands()
    bystander.introduce()
    stranger = Stranger(pair[0])
    stranger.shake_hands()
    stranger.introduce()
    if garbage is None:
        stranger.introduce()
    else:
        stranger.sock.sendall(garbage)
    stranger.read_to_the_end()
    stranger.close()
    bystander.sock.sendall(_request(1, operator.add, 1, 1))
    (frame,) = bystander.frames()
    assert pickle.loads(frame.body) == 2
    bystander.close()
    assert _works(pair)


@pytest.mark.prints("the connection to a stranger was closed: the peer did not introduce itself")
def test_a_frame_before_the_introduction_closes_the_connection(pair: list[Agent]) -> None:
    for data in (_request(1, operator.add, 1, 1), pack_frame(frames.PING), pack_frame(frames.REPLY, 1)):
        stranger = Stranger(pair[0])
        stranger.shake_hands()
        stranger.sock.sendall(data)
        stranger.read_to_the_end()
        stranger.close()
    assert _works(pair)


def test_a_request_that_cannot_be_unpickled_fails_without_closing_the_connection(pair: list[Agent]) -> None:
    stranger = Stranger(pair[0])
    stranger.shake_hands()
    stranger.introduce()
    bodies = [
        b"",
        b"\x80",
        b"nonsense",
        pickle.dumps(5),
        pickle.dumps((1, 2, 3)),
        b"\x80\x05cnowhere\nnothing\n.",
    ]
    for number, body in enumerate(bodies):
        stranger.sock.sendall(pack_frame(frames.REQUEST, number, body))
        got = stranger.frames()
        assert [(frame.kind, frame.id) for frame in got] == [(frames.FAILURE, number)]
    unreadable = ((1, b""), (1, msgpack.packb({"b": [99]})), (2, msgpack.packb({"p": b"junk"})), (0, b"\xc1"))
    for number, (flags, extra) in enumerate(unreadable, 50):
        stranger.sock.sendall(pack_frame(frames.REQUEST, number, b"body", flags=flags, extra=extra))
        got = stranger.frames()
        kinds = [frame.kind for frame in got if frame.kind != frames.CREDIT]
        assert kinds in ([frames.FAILURE], [])
        if not got:
            pytest.fail("the connection was closed")
    stranger.sock.sendall(_request(60, operator.add, 1, 1))
    assert stranger.frames()[-1].kind == frames.REPLY
    stranger.close()
    assert _works(pair)
