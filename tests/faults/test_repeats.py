"""What comes twice, or late: frames of every kind, messages of every type, and every handler of the floors above.

The receiver is made to see frames twice (its reader returns them so). A connection never does that by itself; a broken peer,
or a mistake in what resumes connections, would. A call's function runs once all the same, and what controls a connection
or an RRef, a backward pass or a group comes to the same state and the same values as if it had come once.
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
from typing import Any

import msgpack
import pytest
import torch

from actorrpc import rpc
from actorrpc.agent import peers
from actorrpc.agent.agent import Agent
from actorrpc.agent.mail import MailHeader
from actorrpc.futures import Future
from actorrpc.testing import processes
from actorrpc.testing.message_types import ANSWER, CONTROL, MESSAGES, NOTICES
from actorrpc.wire import frames
from actorrpc.wire.frames import Frame, FrameReader, pack_frame
from tests.agent.agents import Stranger, agents
from tests.agent.test_mail import Router
from tests.agent.test_resumption import behind
from tests.faults.figures import NIGHTLY
from tests.harness.every_message import everything
from tests.harness.kill_points import POINTS, kill_at
from tests.ranks import run_group

_NO_KINDS = {"LAST_KIND", "LATE", "MAIL", "OBJECTS", "POST", "RESERVED", "STOP", "STREAM", "UNREAD"}
KINDS = {
    value: name
    for name, value in vars(frames).items()
    if name in frames.__all__ and isinstance(value, int) and name not in _NO_KINDS
}
"""Every kind of frame, by number."""


def _until(condition: Callable[[], Any]) -> None:
    """Wait for something that nothing announces; bounded by the test's limit."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.002)


class Repeater:
    """Has every reader of this process return frames twice: the second one at once, or some frames later.

    Attributes:
        repeated: how often, by kind.
    """

    def __init__(self, kinds: frozenset[int], *, late: int = 0) -> None:
        self.repeated: Counter[int] = Counter()
        self._kinds = kinds
        self._late = late
        self._kept: dict[FrameReader, list[Frame]] = {}
        self._fed = FrameReader.fed

    def __enter__(self) -> Repeater:
        repeater, fed = self, self._fed

        def twice(reader: FrameReader, count: int) -> list[Frame]:
            return repeater._double(reader, fed(reader, count))

        FrameReader.fed = twice  # type: ignore[method-assign]
        FrameReader.straight = False
        return self

    def __exit__(self, *_: object) -> None:
        FrameReader.fed = self._fed  # type: ignore[method-assign]
        FrameReader.straight = True

    def _double(self, reader: FrameReader, found: list[Frame]) -> list[Frame]:
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
    return agent.ask(agent.peer(to.name), function, args, {}, 0.0)


def _local(scale: int) -> Callable[[int], int]:
    """Make a function that can only travel by value, and whose definition is sent for itself."""

    def scaled(number: int) -> int:
        return number * scale

    return scaled


def _talk(a: Agent, b: Agent) -> list[Any]:
    """Use all that there is between two agents; return what came of it."""
    came: list[Any] = []
    router = Router(b)
    told: list[bytes] = []
    b.on_notice["told"] = lambda peer, body: told.append(body)
    for number in range(40):
        came.append(_sync(a, b, _note, ("sync", number), number))
        came.append(_sync(b, a, _note, ("back", number), number))
    futures = [_begin(a, b, _note, ("async", number), number) for number in range(40)]
    came += [each.wait() for each in futures]
    for number in range(3):
        with pytest.raises(ZeroDivisionError):
            _sync(a, b, operator.truediv, number, 0)
    for size in (100, 30_000, 400_000, 3_000_000):  # inline, chunks or shared memory, and back
        value = torch.arange(size)
        kept = _sync(a, b, _note, ("tensor", size), value)
        others = [_sync(a, b, _note, ("tensors", size, n), value + n) for n in range(3)]
        came += [torch.equal(kept, value), *(torch.equal(each, value + n) for n, each in enumerate(others))]
    for number in range(3):  # definitions
        came.append(_sync(a, b, _local(number), 5))
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
        came.append(future.wait())
    came.append(len(router.places))
    # Calls that are given up, some before they run and some meanwhile.
    _gate.clear()
    held = [_begin(a, b, _hold, ("held", number)) for number in range(3)]
    held.append(_begin(a, b, _hold, ("held", 3), torch.zeros(400_000)))
    for _ in held:
        _entered.acquire()
    _until(
        lambda: a.peer(b.name).window.charged == 0
    )  # what runs has been taken up: credit comes before its answer
    came += [each.cancel() for each in held[:3]]
    _gate.set()
    came.append(held[3].wait())
    a.notify(a.peer(b.name), "told", b"news")
    came += [_sync(a, b, _note, ("last", number), number) for number in range(12)]
    _until(lambda: told)
    _until(lambda: not b.peer(a.name).running)
    assert not a.peer(b.name).pending
    assert a.peer(b.name).window.charged == 0
    return [*came, set(told)]


def _ways() -> dict[str, Callable[[], Any]]:
    chunks = {"lane": False, "chunk": 1 << 16}

    def over_tcp() -> Any:
        return behind(each=(chunks, chunks))

    return {
        "lane": lambda: agents(2, heartbeat=0.1),
        "chunks": lambda: agents(2, heartbeat=0.1, lane=False),
        "tcp": over_tcp,
    }


def _pair(made: Any) -> tuple[Agent, Agent]:
    a, b = made[0] if isinstance(made, tuple) else made
    return a, b


# Which way of talking has them all but those that are tried below.
_BELOW = {"INTRO", "PING", "PONG", "STREAM_ABORT", "LANE_RETIRE", "GOODBYE"}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "actorrpc")  # each repeated request is a line


@pytest.fixture(scope="module")
def once() -> Any:
    _ran.clear()
    with agents(2) as (a, b):
        came = _talk(a, b)
    return came, Counter(_ran)


@pytest.mark.limit(120)
@pytest.mark.parametrize("late", [0, 7])
@pytest.mark.parametrize("way", ["lane", "chunks", "tcp"])
def test_frames_that_come_twice_change_nothing(way: str, late: int, once: Any) -> None:
    kinds = frozenset(KINDS) - {frames.INTRO, frames.CHUNK if late else frames.INTRO}
    with Repeater(kinds, late=late) as repeater:
        _ran.clear()
        with _ways()[way]() as made:
            a, b = _pair(made)
            came = _talk(a, b)
            assert a.peer(b.name).state == b.peer(a.name).state == "alive"
    assert (came, _ran) == once
    seen = {KINDS[kind] for kind in repeater.repeated}
    assert {"REQUEST", "REPLY", "FAILURE", "NOTICE", "CANCEL", "DEFINITION", "CREDIT"} <= seen


def test_every_kind_of_frame_has_a_case() -> None:
    """A new kind of frame has to be talked about above, or tried below by its name."""
    with Repeater(frozenset(KINDS) - {frames.INTRO}) as repeater:
        for way in ("lane", "tcp"):
            with _ways()[way]() as made:
                _talk(*_pair(made))
    assert set(KINDS.values()) - {KINDS[kind] for kind in repeater.repeated} <= _BELOW


@pytest.mark.parametrize("name", sorted(set(KINDS.values()) - {"REQUEST", "INTRO", "CHUNK"}))
def test_what_is_about_nothing_twice_is_harmless(name: str) -> None:
    """Late: what it is about is over, or never was."""
    kind = next(number for number, each in KINDS.items() if each == name)
    body, extra = bytes(16), b""
    if kind == frames.DEFINITION:
        body = hashlib.blake2b(b"nothing", digest_size=16).digest() + b"nothing"
    elif kind == frames.NOTICE:
        extra = msgpack.packb({"n": "nobody's"})
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
def test_what_must_not_come_twice_closes_the_connection(name: str) -> None:
    with agents(2) as (agent, other):
        stranger = Stranger(agent)
        stranger.shake_hands()
        stranger.introduce()
        if name == "INTRO":
            stranger.introduce()
        else:  # of a message that is over
            stranger.sock.sendall(pack_frame(frames.CHUNK, 5, b"more"))
        stranger.read_to_the_end()
        stranger.close()
        assert _sync(other, agent, operator.add, 1, 2) == 3


def test_a_request_that_comes_again_much_later_is_not_executed() -> None:
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
def test_messages_of_every_type_that_come_twice_are_executed_once(late: int) -> None:
    """Values, gradients and references are as ever (`everything` looks at them), and nothing is left at the end."""
    store = f"file://{tempfile.mkdtemp(dir=processes.scratch())}/store"
    each = run_group(_doubled, 3, store, late)
    total = {point: sum(counts[point] for counts in each) for point in POINTS}
    for type in MESSAGES:
        if type == ANSWER:
            continue
        sent = total[f"{type}.sent"]
        assert sent, f"{type} has no case: have tests/harness/every_message.py send one"
        if type in NOTICES:
            # It was handled twice, and that did no harm. The last of these are on their way when their worker counts.
            least = 0 if type == "rref_delete" else sent
            assert total[f"{type}.handled"] > least or late, type
        elif type != CONTROL:  # the last of these are on their way when their worker leaves
            # What an actor is asked is not all executed: the order to end it, for one.
            least = 1 if type == "actor_control" else sent
            assert least <= total[f"{type}.starting"] <= sent, type
