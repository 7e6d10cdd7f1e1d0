"""Whatever bytes of encrypted connections the network changes, each call returns the right value or raises a typed error."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from actorrpc.agent.agent import Agent
from actorrpc.config import Settings
from actorrpc.errors import RpcError
from actorrpc.transport.connection import Connection
from actorrpc.wire.identity import WorkerRecord
from tests.agent.agents import KEY, record
from tests.faults.figures import NIGHTLY, note
from tests.harness.proxy import Disturbance, FaultProxy

_BROKEN = 10_000 if NIGHTLY else 60
_CALLS = 12  # the maximum number of calls over one connection
_SETTINGS: dict[str, Any] = {
    # Low limits, so that small tensors are sent both in the frame and in chunks.
    "lane_threshold": 4 << 10,
    "chunk": 8 << 10,
    "heartbeat": 0.1,
    "heartbeat_misses": 3,
}


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


def _agent(name: str, known: dict[Any, Any], grace: float) -> Agent:
    sock = socket.create_server(("127.0.0.1", 0), backlog=256)
    mine = replace(record(name, len(known)), tcp=(sock.getsockname(),))
    agent = Agent(
        mine,
        settings=Settings(transport="tcp", session_grace=grace, **_SETTINGS),
        key=KEY,
        resolve=known.get,
        members=lambda: [mine],
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
def _client(number: int, service: WorkerRecord, address: str, grace: float) -> Iterator[Agent]:
    """Run an agent that reaches the service at another address, that of a proxy."""
    host, _, port = address.rpartition(":")
    agent = _agent(f"client{number}", {"service": replace(service, tcp=((host, int(port)),))}, grace)
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
@pytest.mark.prints(
    r"the connection to (client\d+|service) was closed: ", r"connections? .*w(as|ere) refused"
)
def test_a_flipped_bit_never_changes_a_value() -> None:
    """Numbers, bytes and tensors in both directions, with one bit in some thousand bytes flipped.

    A changed record ends its connection. The session is resumed over another connection, or there is no grace time.
    """
    global _log
    _log = _Log()
    begun, flips, connections, attempts, answered = time.monotonic(), 0, 0, 0, 0
    graces = itertools.cycle((1.0, 0.0))
    while (
        connections - _log.ends["value"] < _BROKEN
    ):  # the last connection of a finished session was not broken
        grace = next(graces)
        disturbances = [
            Disturbance("bit_flips", every=every, after=(0, 40_000), probability=0.5)
            for every in (1_500, 15_000)
        ]
        with (
            contextlib.closing(_agent("service", {}, grace)) as service,
            FaultProxy(service.record.tcp[0], disturbances=disturbances, seed=attempts) as proxy,
        ):
            for _ in range(_BROKEN // 10):
                with _client(attempts, service.record, proxy.address, grace) as agent:
                    answered += _talk(agent, attempts)
                attempts += 1
            flips += proxy.struck["bit_flips"]
            connections += proxy.connections
    note(
        "flips of single bits on encrypted connections",
        {
            "flips": flips,
            "connections": connections,
            "wrong values": len(_log.wrong),
            "sessions": attempts,
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
    assert sum(_log.ends.values()) > _log.ends["value"]
