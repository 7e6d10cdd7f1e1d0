"""Fuzzing. Before authentication, no input reaches an unpickler or allocates much memory. Afterwards, invalid input
gives typed errors and closes its connection."""

from __future__ import annotations

import _pickle
import contextlib
import itertools
import os
import pickle
import random
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import msgpack
import pytest
import torch

from actorrpc.agent import outbound
from actorrpc.agent.agent import Agent
from actorrpc.agent.outbound import INLINE, LANE, STREAM
from actorrpc.errors import LimitError, ProtocolError, RpcError
from actorrpc.serialization import by_value, codec, data_only
from actorrpc.wire import frames, handshake
from actorrpc.wire.frames import FrameReader, pack_frame
from actorrpc.wire.handshake import Acceptor, Dialler, Refusal
from actorrpc.wire.identity import WorkerRecord
from tests.actors.e2e.kit import until
from tests.agent.agents import KEY, Stranger, agents
from tests.intruders import service
from tests.intruders.doors import dialler, knock, tcp_agents
from tests.intruders.mutations import cut, mutate
from tests.migration.rows import row

_NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"
_INPUTS = 1_000_000 if _NIGHTLY else 10_000
_OVER_SOCKETS = 20_000 if _NIGHTLY else 1_000
_AFTERWARDS = 20_000 if _NIGHTLY else 1_500
_MOST = 64 << 10  # bytes that an input may allocate before authentication
_ACCEPTOR, _DIALLER = "a" * 32, "d" * 32

nightly = pytest.mark.limit(3600 if _NIGHTLY else 60)


@pytest.fixture
def no_unpickling(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Make every function that decodes messages fail, and record that it was called."""
    tried: list[str] = []

    def refuse(name: str) -> Callable[..., Any]:
        def fail(*args: Any, **kwargs: Any) -> Any:
            tried.append(name)
            raise AssertionError(f"{name} before authentication")

        return fail

    for module, name in (
        *((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (_pickle, "loads"), (_pickle, "load")),
        *((_pickle, "Unpickler"), (cloudpickle, "loads"), (torch, "load")),
        *((codec, "unpickle"), (outbound, "opened"), (codec, "decode")),
        *((codec, "loads_here"), (codec, "load_here"), (by_value, "loads_here"), (data_only, "loads")),
        *((msgpack, "unpackb"), (frames, "unpack_header"), (outbound, "begin_stream")),
        *((WorkerRecord, "from_bytes"), (FrameReader, "fed")),
    ):
        monkeypatch.setattr(module, name, refuse(f"{getattr(module, '__name__', module)}.{name}"))
    yield tried
    assert not tried


def _sides(insecure: bool = False) -> tuple[Dialler, Acceptor]:
    key = b"" if insecure else KEY.reveal()
    return (
        Dialler(name="d", incarnation=_DIALLER, key=key, insecure=insecure, peer_name="a"),
        Acceptor(name="a", incarnation=_ACCEPTOR, key=key, insecure=insecure),
    )


def _old_messages() -> list[bytes]:
    """Return messages of finished handshakes, for replaying, reflecting and mixing."""
    found: list[bytes] = []
    for _ in range(4):
        one, other = _sides()
        found.append(one.start())
        found.append(other.feed(found[-1]))
        found.append(one.feed(found[-1]))
        found.append(other.feed(found[-1]))
    return [*found, Acceptor.refuse(Refusal.BUSY, "busy"), Acceptor.refuse(Refusal.KEY, "no")]


def _attack(rng: random.Random, old: list[bytes], change: Callable[[bytes], bytes]) -> tuple[Any, bool]:
    """Feed changed bytes to a random side at a random stage; return the side, and whether it may have been completed rightly."""
    one, other = _sides()
    hello = one.start()
    stage = rng.randrange(4)
    victim: Any
    if stage == 0:
        victim, honest = other, hello
    elif stage == 1:
        victim, honest = one, other.feed(hello)
    elif stage == 2:
        victim, honest = other, one.feed(other.feed(hello))
    else:
        victim, honest = one, other.feed(one.feed(other.feed(hello)))
    sent = change(rng.choice(old) if rng.random() < 0.1 else honest)
    with contextlib.suppress(ProtocolError, LimitError):  # LimitError: a replayed refusal of a busy acceptor
        for piece in cut(rng, sent):
            victim.feed(piece)
    # Bytes after the last message belong to the next protocol layer.
    return victim, stage >= 2 and sent.startswith(honest)


@nightly
@row("every process that reaches the port may connect", "from-torch-rpc")
def test_no_fuzzed_input_completes_a_handshake(no_unpickling: list[str]) -> None:
    """Changed, cut, replayed and reflected messages at each stage of both sides."""
    rng = random.Random(int(os.environ.get("ACTORRPC_FUZZ_SEED", "1")))
    old = _old_messages()
    largest = passed = 0
    tracemalloc.start()
    try:
        for number in range(_INPUTS):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            victim, excused = _attack(rng, old, lambda honest: mutate(rng, honest, old))
            largest = max(largest, tracemalloc.get_traced_memory()[1] - before)
            passed += victim.done
            assert not victim.done or excused, number
            assert len(victim._buffer) <= handshake.MAX_MESSAGE
    finally:
        tracemalloc.stop()
    assert largest < _MOST, largest
    assert passed < _INPUTS / 20  # changes without effect, or after a WELCOME


def test_the_fuzzer_detects_a_handshake_that_does_not_check_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake.hmac, "compare_digest", lambda one, other: True)
    rng = random.Random(2)
    old = _old_messages()
    found = [_attack(rng, old, lambda honest: mutate(rng, honest, old)) for _ in range(2_000)]
    assert any(victim.done and not excused for victim, excused in found)


def _send_junk(agent: Agent, rng: random.Random, old: list[bytes]) -> bool:
    """Send a changed HELLO, or a HELLO and a changed proof; return whether the agent has admitted this peer."""
    # From random addresses, because a single address would soon get no answers.
    source = ".".join(str(rng.randrange(1, 255)) for _ in range(3))
    sock, side = knock(agent, f"127.{source}", timeout=10.0), dialler(agent)
    with contextlib.closing(sock), contextlib.suppress(OSError, ProtocolError, LimitError):
        hello = side.start()
        if rng.random() < 0.5:
            sock.sendall(mutate(rng, hello, old))
        else:
            sock.sendall(hello)
            sock.sendall(mutate(rng, side.feed(sock.recv(4096)), old))
        sock.shutdown(socket.SHUT_WR)
        while answer := sock.recv(side.wanted or 4096):
            if not side.done:
                side.feed(answer)
    return side.done


@pytest.mark.slow
@nightly
@pytest.mark.prints(r"a connection from 127\.\d+\.\d+\.\d+ was refused: ")
def test_strangers_over_sockets_are_refused_without_unpickling(no_unpickling: list[str]) -> None:
    rng, old = random.Random(4), _old_messages()
    admitted: list[bool] = []

    def attack(seed: float) -> None:
        own = random.Random(seed)
        admitted.extend([_send_junk(agent, own, old) for _ in range(_OVER_SOCKETS // 4)])

    with tcp_agents(1, tls=False) as (agent,):
        # Several threads, which the agent serves concurrently.
        threads = [threading.Thread(target=attack, args=(rng.random(),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(admitted) == _OVER_SOCKETS // 4 * 4
        assert sum(admitted) < _OVER_SOCKETS / 20  # some changes have no effect
        until(lambda: not agent.connector.connections())


_HEADERS: list[dict[str, Any]] = [
    {"sizes": [4, 4]},
    {"sizes": [1 << 40, 1]},
    {"sizes": "x"},
    {"sizes": [3], "stream": 1, "placement": 1},
    {"sizes": [4], "placement": b"x" * 40},
    {"sizes": [4], "placement": [1 << 63, -1]},
    {"notice": "receipt"},
    {"notice": 3},
    {"references": b"\x01" * 33},
    {"path": [1, 2]},
    {"path": "x"},
    {"method": "x"},
]
_FLAGS = (0, INLINE, LANE, STREAM, INLINE | frames.CAST, frames.MAIL, STREAM | frames.MAIL, 0xFF)


def _frames_of(rng: random.Random) -> list[bytes]:
    """Return valid and nearly valid frames of each kind."""
    call = (service.add, (1, [2, {"x": torch.ones(2)}]), {})
    bodies = [
        codec.dumps(call),
        pickle.dumps((service.add, (1, 2), {}), 5),
        codec.dumps(call, remote_main=None),
    ]
    found = [
        pack_frame(
            kind, rng.randrange(5), rng.randbytes(rng.choice((0, 7, 8, 32))), flags=rng.choice((0, 1, 4))
        )
        for kind in range(1, 20)
    ]
    kinds = (frames.REQUEST, frames.REPLY, frames.FAILURE, frames.NOTICE)
    for header, flags in itertools.product(_HEADERS, _FLAGS):
        extra = msgpack.packb(header)
        found.append(
            pack_frame(rng.choice(kinds), rng.randrange(5), rng.choice(bodies), flags=flags, extra=extra)
        )
    found.append(pack_frame(frames.CHUNK, 1, b"abc", chain=0))
    found.append(pack_frame(frames.DEFINITION, body=by_value.hash_of(b"x") + b"x"))
    return found + [pack_frame(frames.REQUEST, number, body) for number, body in enumerate(bodies)]


@nightly
@pytest.mark.prints(
    r"the connection to (s\d+|a stranger) was closed: ",
    r"a notice .* of 's\d+' (has no handler here|raised in its handler)",
    r"(request|message) \d+ of 's\d+' came twice",
    r"a cast of 's\d+' failed here",
)
def test_fuzzed_frames_of_an_authenticated_peer_never_harm_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(5)
    ends: list[tuple[type, str]] = []  # not the errors, which keep their connections alive
    with agents(2, key=KEY, data_only=True) as pair:
        agent = pair[0]
        closed = agent.inbox.closed

        def note(conn: Any, error: BaseException | None) -> None:
            ends.append((type(error), str(error)[:100]))
            closed(conn, error)

        monkeypatch.setattr(agent.inbox, "closed", note)
        done = 0
        while done < _AFTERWARDS:
            stranger = Stranger(agent, name=f"s{done}")
            stranger.shake_hands()
            stranger.introduce()
            valid = _frames_of(rng)
            try:
                for _ in range(8):
                    whole = rng.choice(valid)
                    stranger.sock.sendall(mutate(rng, whole, valid) if rng.random() < 0.8 else whole)
                    done += 1
                stranger.sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            stranger.sock.settimeout(10.0)
            with contextlib.suppress(OSError):
                while stranger.sock.recv(1 << 16):
                    pass
            stranger.close()
        typed = (RpcError, OSError, EOFError, type(None))
        assert not {(kind, text) for kind, text in ends if not issubclass(kind, typed)}
        assert any(issubclass(kind, ProtocolError) for kind, _ in ends)
        assert pair[1].call_sync(pair[1].peer("a0"), service.add, (1, 2), {}, 20.0) == 3
