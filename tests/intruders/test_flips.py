"""Sealed connections: whatever bytes the network changes, each call returns the right value or raises a typed error."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from actorrpc.agent.agent import Agent
from actorrpc.config import Settings
from actorrpc.errors import AuthenticationError, PeerDiedError, RpcError
from actorrpc.transport.connection import Connection
from actorrpc.wire.frames import CHUNK, LAST_KIND, PREFIX, PREFIX_SIZE
from actorrpc.wire.handshake import Acceptor, Dialler
from actorrpc.wire.identity import WorkerRecord, new_incarnation
from actorrpc.wire.integrity import DIGEST_SIZE, SHORT, TAG_SIZE
from tests.agent.agents import KEY, record
from tests.faults.figures import NIGHTLY, note
from tests.harness.proxy import Disturbance, FaultProxy

_FLIPS = 100_000 if NIGHTLY else 150
_CALLS = 12  # the maximum number of calls over one connection
_HANDSHAKE = 140  # bytes; tests/intruders/test_between.py changes bytes of the handshake
_SEALED: dict[str, Any] = {
    "frame_integrity": True,
    # Low limits, so that small tensors are sent both in the frame and in chunks.
    "lane_threshold": 4 << 10,
    "chunk": 8 << 10,
    "heartbeat": 0.1,
    "heartbeat_misses": 3,
    "session_grace": 1.0,
}


# Pings follow soon after silence, but a busy machine does not make a peer dead.
_PATIENT: dict[str, Any] = {"heartbeat": 0.1, "heartbeat_misses": 100}


def _value(seed: int) -> Any:
    """Return a value that is unique for the seed."""
    dice = random.Random(seed)
    match dice.randrange(4):
        case 0:
            return dice.getrandbits(62)
        case 1:
            return [dice.random() for _ in range(20)]
        case 2:
            return dice.randbytes(dice.choice((10, 1_000, 20_000)))
    size = dice.choice((100, 2_000, 4_000, 10_000))
    return torch.randint(0, 1 << 30, (size,), generator=torch.Generator().manual_seed(seed))


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@dataclass
class _Log:
    """Records of all calls and connections. The lock guards the counters."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    runs: Counter[int] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    closed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


_log = _Log()


def _swap(seed: int, value: Any) -> Any:
    """Run at the callee: check the value of a seed, and return the value of the next seed."""
    with _log.lock:
        _log.runs[seed] += 1
        if not _same(value, _value(seed)):
            _log.wrong.append(f"call {seed} came with another value")
    return _value(seed + 1)


def _agent(
    name: str, sock: socket.socket, address: tuple[str, int], known: dict[Any, Any], **given: Any
) -> Agent:
    mine = replace(record(name, len(known)), tcp=(address,))
    agent = Agent(
        mine, settings=Settings(transport="tcp", **given), key=KEY, resolve=known.get, members=lambda: [mine]
    )
    agent.start([sock])
    closed = agent.inbox.closed

    def count_closed(conn: Connection, error: BaseException | None) -> None:
        with _log.lock:
            _log.closed[type(error).__name__] += 1
        closed(conn, error)

    agent.inbox.closed = count_closed  # type: ignore[method-assign]
    return agent


@contextlib.contextmanager
def _service(**given: Any) -> Iterator[tuple[WorkerRecord, Agent]]:
    """Run the called agent; yield its record and the agent."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    address = listener.getsockname()
    agent = _agent("service", listener, address, {}, **(_SEALED | given))
    try:
        yield agent.record, agent
    finally:
        agent.close()


@contextlib.contextmanager
def _client(number: int, service: WorkerRecord, address: str, **given: Any) -> Iterator[Agent]:
    """Run an agent that reaches the service at another address, that of a proxy."""
    host, _, port = address.rpartition(":")
    there = replace(service, tcp=((host, int(port)),))
    listener = socket.create_server(("127.0.0.1", 0))
    own = listener.getsockname()
    agent = _agent(f"client{number}", listener, own, {"service": there}, **(_SEALED | given))
    try:
        yield agent
    finally:
        agent.close(timeout=0.5)


def _talk(agent: Agent, number: int) -> int:
    """Call until an error; return the number of answered calls."""
    for turn in range(_CALLS):
        seed = (number * _CALLS + turn) * 2
        try:
            got = agent.call_sync(agent.peer("service"), _swap, (seed, _value(seed)), {}, 1.0)
        except RpcError as error:  # any other error fails the test
            with _log.lock:
                _log.ends[type(error).__name__] += 1
            return turn
        if not _same(got, _value(seed + 1)):
            with _log.lock:
                _log.wrong.append(f"call {seed} was answered with another value")
    with _log.lock:
        _log.ends["value"] += 1
    return _CALLS


@pytest.mark.limit(1800 if NIGHTLY else 60)
@pytest.mark.prints(r"the connection to (client\d+|service) was closed: ")
def test_a_flipped_bit_never_changes_a_value() -> None:
    """Numbers, bytes and tensors in both directions, with one in some thousand bits flipped after the handshake."""
    global _log
    _log = _Log()
    begun, flips, attempts, answered = time.monotonic(), 0, 0, 0
    while flips < _FLIPS:
        disturbances = [
            Disturbance("bit_flips", every=every, after=(_HANDSHAKE, 40_000), probability=0.5)
            for every in (1_500, 15_000)
        ]
        with (
            _service() as (service, _),
            FaultProxy(service.tcp[0], disturbances=disturbances, seed=attempts) as proxy,
        ):
            for _ in range(200):
                with _client(attempts, service, proxy.address) as agent:
                    answered += _talk(agent, attempts)
                attempts += 1
                if flips + proxy.struck["bit_flips"] >= _FLIPS:
                    break
            flips += proxy.struck["bit_flips"]
    note(
        "flips of single bits on sealed connections",
        {
            "flips": flips,
            "wrong values": len(_log.wrong),
            "connections": attempts,
            "calls answered": answered,
            "calls executed": sum(_log.runs.values()),
            "ends": dict(_log.ends),
            "closed": dict(_log.closed),
            "seconds": round(time.monotonic() - begun, 1),
        },
    )
    assert not _log.wrong
    assert max(_log.runs.values()) == 1
    assert answered > attempts // 4  # enough calls were made for a meaningful test
    assert _log.closed["ProtocolError"] > 0
    assert sum(_log.ends.values()) > _log.ends["value"]


# -- an attacker between the workers ---------------------------------------------------------------------

_Change = Callable[[bytes], list[bytes]]


class _Attacker:
    """A relay that parses frames, and changes requests of the first connection.

    Args:
        to: the address of the service.
        sealed: whether the workers seal their frames.
        change: called with each request; returns the bytes that are sent instead.
    """

    def __init__(self, to: tuple[str, int], sealed: bool, change: _Change) -> None:
        self._to, self._tag, self._change = to, TAG_SIZE if sealed else 0, change
        self._digest = DIGEST_SIZE if sealed else 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> _Attacker:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        for sock in (self._listener, *self._socks):
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one = self._listener.accept()[0]
                first = not self._socks
                self._socks.append(one)
                other = socket.create_connection(self._to)
                self._socks.append(other)
                for source, target, reads in ((one, other, first), (other, one, False)):
                    carry = threading.Thread(target=self._carry, args=(source, target, reads))
                    self._threads.append(carry)
                    carry.start()

    def _carry(self, source: socket.socket, target: socket.socket, reads: bool) -> None:
        with contextlib.suppress(OSError):
            if reads:
                for _ in range(2):  # hello and proof
                    head = _exactly(source, 6)
                    target.sendall(head + _exactly(source, head[5]))
            while reads:
                unit = self._unit(source)
                parts = self._change(unit) if unit[8] == 1 else [unit]
                for part in parts:
                    target.sendall(part)
            while data := source.recv(1 << 16):
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _unit(self, source: socket.socket) -> bytes:
        prefix = _exactly(source, PREFIX_SIZE)
        length, _, kind = struct.unpack_from("<IIB", prefix)
        assert 0 < kind <= LAST_KIND
        size = length + self._tag + (self._digest if kind == CHUNK or length > SHORT else 0)
        return prefix + _exactly(source, size)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


_executed_calls: list[int] = []


def _square(number: int) -> int:
    _executed_calls.append(number)
    return number * number


def _ask(client: Agent, timeout: float, answered: list[int]) -> None:
    for number in range(1, 1000):
        answered.append(client.call_sync(client.peer("service"), _square, (number,), {}, timeout))


class _Attacks:
    """Changes of the second request; each method returns the bytes that are sent instead of a request."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def _second(self, unit: bytes, instead: Callable[[], list[bytes]]) -> list[bytes]:
        self.seen.append(unit)
        return instead() if len(self.seen) == 2 else [unit]

    def repeated(self, unit: bytes) -> list[bytes]:
        return self._second(unit, lambda: [unit, unit])

    def body_changed(self, unit: bytes) -> list[bytes]:
        return self._second(unit, lambda: [unit[:-20] + bytes([unit[-20] ^ 1]) + unit[-19:]])

    def forged(self, unit: bytes) -> list[bytes]:
        """Send the same call again under another id."""
        fields = list(PREFIX.unpack_from(unit))
        fields[5] += 1000
        return self._second(unit, lambda: [unit, PREFIX.pack(*fields) + unit[PREFIX_SIZE:]])

    def made_huge(self, unit: bytes) -> list[bytes]:
        """Announce two megabytes more than are sent."""
        return self._second(unit, lambda: [unit[:2] + bytes([unit[2] ^ 0x20]) + unit[3:]])


_ATTACKS = [name for name in vars(_Attacks) if not name.startswith("_")]


@pytest.mark.parametrize("attack", _ATTACKS)
@pytest.mark.prints(
    "the connection to (client0|service) was closed: a frame does not carry the seal of its sender"
)
def test_an_attacker_can_only_end_a_sealed_connection(attack: str) -> None:
    global _log
    _log = _Log()
    _executed_calls.clear()
    change = getattr(_Attacks(), attack)
    with (
        _service(**_PATIENT) as (service, _),
        _Attacker(service.tcp[0], True, change) as between,
        _client(0, service, between.address, **_PATIENT) as client,
    ):
        answered: list[int] = []
        with pytest.raises(PeerDiedError, match="service"):
            _ask(client, float("inf"), answered)
    assert answered[:1] == [1]
    assert answered == [number * number for number in range(1, len(answered) + 1)]
    assert _executed_calls == list(range(1, len(_executed_calls) + 1))  # each call once, in order
    assert _log.closed["ProtocolError"] == 1


def test_without_seals_a_forged_call_is_executed() -> None:
    """Proves that the attack is effective."""
    _executed_calls.clear()
    with (
        _service(frame_integrity=False, **_PATIENT) as (service, _),
        _Attacker(service.tcp[0], False, _Attacks().forged) as between,
        _client(0, service, between.address, frame_integrity=False, **_PATIENT) as client,
    ):
        for number in range(1, 30):
            client.call_sync(client.peer("service"), _square, (number,), {}, 30.0)
    assert _executed_calls.count(2) == 2


@pytest.mark.parametrize("wants", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("number", [0, 1])
def test_an_attacker_cannot_switch_seals_off_in_the_handshake(wants: tuple[bool, bool], number: int) -> None:
    """The attacker flips the flag by which a side requests seals."""
    one = Dialler(name="one", incarnation=new_incarnation(), key=KEY.reveal(), seals=wants[0])
    other = Acceptor(name="other", incarnation=new_incarnation(), key=KEY.reveal(), seals=wants[1])
    changed = 0

    def carry(which: int, message: bytes) -> bytes:
        nonlocal changed
        if which != number:
            return message
        lowered = bytearray(message)
        lowered[6 + 3] ^= 2
        changed += 1
        return bytes(lowered)

    proof = one.feed(carry(1, other.feed(carry(0, one.start()))))
    with pytest.raises(AuthenticationError):
        other.feed(proof)
    assert changed == 1
    assert not one.done
    assert not other.done
