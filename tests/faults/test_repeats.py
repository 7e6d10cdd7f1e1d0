"""Duplicated and late frames: frames of every kind, messages of every type, and every handler of the higher layers.

Patched readers return frames twice. A connection never duplicates frames by itself, but a broken peer or a fault in the
resumption of connections would. A call's function must still run once, and control messages of connections, RRefs, backward
passes and groups must lead to the same state as without duplicates.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import pickle
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgpack
import pytest
import torch

from actorrpc import rpc
from actorrpc.agent import outbound, peers
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import Execution, MailHeader
from actorrpc.futures import Future
from actorrpc.testing import processes
from actorrpc.testing.message_types import ANSWER, CONTROL, MESSAGES, NOTICES
from actorrpc.wire import frames
from actorrpc.wire.frames import Frame, FrameReader, pack_frame, unpack_header
from tests.actors.e2e.kit import until
from tests.agent.agents import Stranger, agents
from tests.faults.figures import NIGHTLY
from tests.harness.every_message import everything
from tests.harness.kill_points import POINTS, kill_at
from tests.intruders.doors import tcp_agents
from tests.ranks import run_group


class _Router:
    """Records the messages that arrive for mailboxes, and answers each complete message."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.places: list[int] = []
        agent.inbox.mail_router = self

    def deliver(self, conn: Any, peer: Any, frame: Frame) -> None:
        if frame.id not in self.places:
            self.places.append(frame.id)
        self.agent.submit(lambda: self._open(conn, peer, frame))

    def _open(self, conn: Any, peer: Any, frame: Frame) -> None:
        header = unpack_header(frame.extra)
        args, _ = outbound.opened(self.agent, conn, frame, peer, header)
        self.agent.executor.answer(Execution(conn, peer, frame.id, 0.0, 0), (header["method"], len(args)))
        if conn is not None:
            conn.flush()

    def announce(self, conn: Any, peer: Any, frame: Frame) -> bool:
        self.places.append(frame.id)
        return True

    complete = deliver


_NO_KINDS = {"LAST_KIND", "CAST", "LATE", "MAIL", "OBJECTS", "RESERVED", "STOP", "STREAM", "UNREAD"}
KINDS = {
    value: name
    for name, value in vars(frames).items()
    if name in frames.__all__ and isinstance(value, int) and name not in _NO_KINDS
}
"""Every kind of frame, by number."""


class Repeater:
    """Makes every reader of this process return frames twice, the duplicate at once or ``late`` frames later.

    Attributes:
        repeated: number of duplicates, by kind.
    """

    def __init__(self, kinds: frozenset[int], *, late: int = 0) -> None:
        self.repeated: Counter[int] = Counter()
        self._kinds = kinds
        self._late = late
        self._kept: dict[FrameReader, list[Frame]] = {}
        self._fed = FrameReader.fed

    def __enter__(self) -> Repeater:
        repeater, fed = self, self._fed

        def fed_twice(reader: FrameReader, count: int) -> list[Frame]:
            return repeater.double(reader, fed(reader, count))

        FrameReader.fed = fed_twice  # type: ignore[method-assign]
        FrameReader.straight = False
        return self

    def __exit__(self, *_: object) -> None:
        FrameReader.fed = self._fed  # type: ignore[method-assign]
        FrameReader.straight = True

    def double(self, reader: FrameReader, found: list[Frame]) -> list[Frame]:
        made: list[Frame] = []
        kept = self._kept.setdefault(reader, [])
        for frame in found:
            made.append(frame)
            if frame.kind in self._kinds:
                kept.append(frame)
            if len(kept) > self._late:
                again = kept.pop(0)
                self.repeated[again.kind] += 1
                made.append(again)
        return made


# -- frames, between agents --------------------------------------------------------------------------------

_ran: Counter[Any] = Counter()
_gate = threading.Event()
_entered = threading.Semaphore(0)


def _note(key: Any, value: Any = None) -> Any:
    _ran[key] += 1
    return value


def _hold(key: Any, ballast: Any = None) -> Any:
    _ran[key] += 1
    _entered.release()
    _gate.wait()
    return key


def _begin(agent: Agent, to: Agent, function: Any, *args: Any, timeout: float = 0.0) -> Future[Any]:
    future: Future[Any] = Future()
    agent.call(agent.peer(to.name), function, args, {}, timeout, future=future)
    agent.flush()
    return future


def _sync(agent: Agent, to: Agent, function: Any, *args: Any) -> Any:
    return agent.call_sync(agent.peer(to.name), function, args, {}, 0.0)


def _local(scale: int) -> Callable[[int], int]:
    """Return a function that is sent by value, in a DEFINITION frame."""

    def scaled(number: int) -> int:
        return number * scale

    return scaled


def _exchange(a: Agent, b: Agent) -> list[Any]:
    """Exchange frames of all kinds between two agents; return the results."""
    results: list[Any] = []
    router = _Router(b)
    notices: list[bytes] = []
    b.on_notice["notices"] = lambda peer, body: notices.append(body)
    for number in range(40):
        results.append(_sync(a, b, _note, ("sync", number), number))
        results.append(_sync(b, a, _note, ("back", number), number))
    futures = [_begin(a, b, _note, ("async", number), number) for number in range(40)]
    results += [each.wait() for each in futures]
    for number in range(3):
        with pytest.raises(ZeroDivisionError):
            _sync(a, b, operator.truediv, number, 0)
    for size in (100, 30_000, 400_000, 3_000_000):  # sent and returned inline, in chunks or in shared memory
        value = torch.arange(size)
        kept = _sync(a, b, _note, ("tensor", size), value)
        others = [_sync(a, b, _note, ("tensors", size, n), value + n) for n in range(3)]
        results += [
            torch.equal(kept, value),
            *(torch.equal(each, value + n) for n, each in enumerate(others)),
        ]
    for number in range(3):  # definitions
        results.append(_sync(a, b, _local(number), 5))
    # Messages keep their order.
    for number in range(6):
        future: Future[Any] = Future()
        body = torch.zeros(400_000 if number % 3 == 0 else 1)
        a.call(
            a.peer(b.name),
            None,
            (body,),
            {},
            0.0,
            future=future,
            mail=MailHeader({"method": f"n{number}"}),
        )
        results.append(future.wait())
    results.append(len(router.places))
    # Cancelled calls, some queued and some running.
    _gate.clear()
    held = [_begin(a, b, _hold, ("held", number)) for number in range(3)]
    held.append(_begin(a, b, _hold, ("held", 3), torch.zeros(400_000)))
    for _ in held:
        _entered.acquire()
    until(lambda: a.peer(b.name).window.charged == 0)  # CREDIT for running calls arrives before their answers
    results += [each.cancel() for each in held[:3]]
    _gate.set()
    results.append(held[3].wait())
    a.notify(a.peer(b.name), "notices", b"news")
    results += [_sync(a, b, _note, ("last", number), number) for number in range(12)]
    until(lambda: notices)
    until(lambda: not b.peer(a.name).running)
    assert not a.peer(b.name).pending
    assert a.peer(b.name).window.charged == 0
    return [*results, set(notices)]


_WAYS: dict[str, Callable[[], AbstractContextManager[list[Agent]]]] = {
    "lane": lambda: agents(2, heartbeat=0.1),
    "chunks": lambda: agents(2, heartbeat=0.1, lane=False),
    "tcp": lambda: tcp_agents(2, lane=False, chunk=1 << 16),
}


# Kinds of frames that `_exchange` does not send; tests below send them.
_SENT_BY_OTHER_TESTS = {"INTRO", "PING", "PONG", "STREAM_ABORT", "LANE_RETIRE", "LANE_DEVICES", "GOODBYE"}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "actorrpc")  # each duplicated request logs a line


@pytest.fixture(scope="module")
def without_duplicates() -> Any:
    _ran.clear()
    with agents(2) as (a, b):
        results = _exchange(a, b)
    return results, Counter(_ran)


@pytest.mark.limit(120)
@pytest.mark.parametrize("late", [0, 7])
@pytest.mark.parametrize("way", _WAYS)
def test_duplicated_frames_change_no_result_and_run_no_call_twice(
    way: str, late: int, without_duplicates: Any
) -> None:
    kinds = frozenset(KINDS) - {frames.INTRO, frames.CHUNK if late else frames.INTRO}
    with Repeater(kinds, late=late) as repeater:
        _ran.clear()
        with _WAYS[way]() as (a, b):
            results = _exchange(a, b)
            assert a.peer(b.name).state == b.peer(a.name).state == "alive"
    assert (results, _ran) == without_duplicates
    seen = {KINDS[kind] for kind in repeater.repeated}
    assert {"REQUEST", "REPLY", "FAILURE", "NOTICE", "CANCEL", "DEFINITION", "CREDIT"} <= seen


def test_every_kind_of_frame_is_sent_by_a_test() -> None:
    """A new kind of frame must be sent by `_exchange`, or by a test below."""
    with Repeater(frozenset(KINDS) - {frames.INTRO}) as repeater:
        for way in ("lane", "tcp"):
            with _WAYS[way]() as (a, b):
                _exchange(a, b)
    assert set(KINDS.values()) - {KINDS[kind] for kind in repeater.repeated} <= _SENT_BY_OTHER_TESTS


@pytest.mark.parametrize("name", sorted(set(KINDS.values()) - {"REQUEST", "INTRO", "CHUNK"}))
def test_duplicated_frames_about_unknown_calls_are_ignored(name: str) -> None:
    kind = next(number for number, each in KINDS.items() if each == name)
    body, extra = bytes(16), b""
    if kind == frames.DEFINITION:
        body = hashlib.blake2b(b"nothing", digest_size=16).digest() + b"nothing"
    elif kind == frames.NOTICE:
        extra = msgpack.packb({"n": "unknown"})
    with agents(1) as (agent,):
        stranger = Stranger(agent)
        stranger.shake_hands()
        stranger.introduce()
        for _ in range(2):
            stranger.sock.sendall(pack_frame(kind, 999, body, extra=extra))
        call = pickle.dumps((operator.add, (1, 2), {}))
        stranger.sock.sendall(pack_frame(frames.REQUEST, 1, call, remaining=float("inf")))
        while (answer := stranger.frames()[-1]).kind != frames.REPLY:
            assert answer.kind in (frames.PONG, frames.PING)
        assert pickle.loads(answer.body) == 3
        assert agent.peer("stranger").state == "alive" if name != "GOODBYE" else True
        stranger.close()


@pytest.mark.parametrize("name", ["INTRO", "CHUNK"])
def test_a_second_intro_or_a_chunk_of_no_message_closes_the_connection(name: str) -> None:
    with agents(2) as (agent, other):
        stranger = Stranger(agent)
        stranger.shake_hands()
        stranger.introduce()
        if name == "INTRO":
            stranger.introduce()
        else:  # of a message that is complete
            stranger.sock.sendall(pack_frame(frames.CHUNK, 5, b"more"))
        stranger.read_to_the_end()
        stranger.close()
        assert _sync(other, agent, operator.add, 1, 2) == 3


def test_a_request_duplicated_much_later_is_not_executed_again() -> None:
    call = pickle.dumps((_note, ("again", 1), {}))
    _ran.clear()
    with agents(1) as (agent,):
        stranger = Stranger(agent)
        stranger.shake_hands()
        stranger.introduce()
        for number in [*range(1, peers.NUMBERS_KEPT), 1]:
            stranger.sock.sendall(pack_frame(frames.REQUEST, number, call, remaining=float("inf")))
        answers: set[int] = set()
        while len(answers) < peers.NUMBERS_KEPT - 1:
            answers.update(each.id for each in stranger.frames() if each.kind == frames.REPLY)
        last = pickle.dumps((_note, ("last", 1), {}))
        stranger.sock.sendall(pack_frame(frames.REQUEST, 1, last, remaining=float("inf")))
        stranger.sock.sendall(pack_frame(frames.REQUEST, 1 << 40, last, remaining=float("inf")))
        while not any(each.id == 1 << 40 for each in stranger.frames()):
            pass
        stranger.close()
    assert _ran == {"again": peers.NUMBERS_KEPT - 1, "last": 1}


# -- messages of every type, in a group ---------------------------------------------------------------------

_NEVER = 1 << 60


def _doubled(rank: int, world_size: int, store: str, late: int) -> dict[str, int]:
    logging.disable()
    kills = {point: kill_at(point, nth=_NEVER).start() for point in POINTS}
    kinds = frozenset({frames.REQUEST, frames.REPLY, frames.FAILURE, frames.NOTICE, frames.DEFINITION})
    with Repeater(kinds, late=late):
        options = rpc.TensorPipeRpcBackendOptions(init_method=store)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
        everything(rank)
        rpc.shutdown()
    for kill in kills.values():
        kill.stop()
    return {point: kill.count for point, kill in kills.items()}


@pytest.mark.limit(90)
@pytest.mark.parametrize("late", [0, 3] if NIGHTLY else [0])
def test_duplicated_messages_of_every_type_are_executed_once(late: int) -> None:
    """`everything` checks values, gradients and references; it must reach every point and send every type of message."""
    store = f"file://{tempfile.mkdtemp(dir=processes.scratch())}/store"
    each = run_group(_doubled, 3, store, late)
    total = {point: sum(counts[point] for counts in each) for point in POINTS}
    # No actor of the program restarts.
    assert {point for point, count in total.items() if not count} == {"actor.restoring"}
    for counts in each:
        for point in (
            "join.listening",
            "join.met",
            "shutdown.called",
            "shutdown.together",
            "shutdown.closed",
        ):
            assert counts[point] == 1
    for type in MESSAGES:
        if type == ANSWER:
            continue
        sent = total[f"{type}.sent"]
        if type in NOTICES:
            # Notices are handled twice. The last rref_delete may still be on its way when its worker counts.
            least = 0 if type == "rref_delete" else sent
            assert total[f"{type}.handled"] > least or late, type
        elif type != CONTROL:  # the last control messages may be on their way when their worker leaves
            # Not every actor_control message is executed, for example the order to end the actor.
            least = 1 if type == "actor_control" else sent
            assert least <= total[f"{type}.starting"] <= sent, type
