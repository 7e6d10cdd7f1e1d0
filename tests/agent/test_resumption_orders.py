"""Two ends of a connection that breaks and is resumed, under random schedules.

The code of connections and of their resumption is real. One thread runs at a time, and hands over at each step: before it
takes a lock, suspends, reports its position, resumes, sends or receives. The simulated line between the two ends moves bytes,
loses some, and is cut; each side may time out.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import socket
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actorrpc.agent.connector import Resumption
from actorrpc.agent.outbound import Assembly
from actorrpc.config import Settings
from actorrpc.transport.connection import Connection
from actorrpc.transport.stream import CLOSED, ReliableStream, SocketStream
from actorrpc.wire import frames
from actorrpc.wire.frames import Frame
from tests.agent.steps import Steps
from tests.layers import rest_is_slow

NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"
_ANSWER = b"come in"  # the last message of a handshake
_CHUNK = 3_000


# -- the line between the two ends -----------------------------------------------------------------------


class _Wire(socket.socket):
    """One end of a line. It takes a step before it would block; a wait may time out."""

    patience: Callable[[], bool]
    steps: Steps

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        self.steps.step(self._readable)
        try:
            return super().recv(size, socket.MSG_DONTWAIT)
        except BlockingIOError:  # the step ended because the wait timed out
            raise TimeoutError from None

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        self.steps.step()
        super().sendall(data)

    def settimeout(self, value: float | None, /) -> None:
        pass  # `patience` decides

    def _readable(self) -> bool:
        if self.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(0)) or not self.patience()


class _Line:
    """A line that moves bytes only when told to, so that it can be cut with bytes in flight."""

    def __init__(self, steps: Steps, patience: Callable[[], bool]) -> None:
        self._inner: list[socket.socket] = []
        self.ends: list[_Wire] = []
        for _ in range(2):
            outer, inner = socket.socketpair()
            wire = _Wire(fileno=outer.detach())
            wire.steps, wire.patience = steps, patience
            self.ends.append(wire)
            self._inner.append(inner)
        self._under_way = [b"", b""]
        self.up = True

    def move(self, dice: random.Random) -> None:
        """Move some bytes, or all, in a random direction."""
        way = dice.randrange(2)
        with contextlib.suppress(OSError):
            more = dice.choice((1, 50, 3_000, 1 << 20))
            with contextlib.suppress(BlockingIOError):
                came = self._inner[way].recv(more, socket.MSG_DONTWAIT)
                self._under_way[way] += came
                if not came and not self._under_way[way]:
                    self._inner[1 - way].shutdown(socket.SHUT_WR)
            data = self._under_way[way][: dice.choice((1, 50, 3_000, 1 << 20))]
            if data:
                done = self._inner[1 - way].send(data, socket.MSG_DONTWAIT)
                self._under_way[way] = self._under_way[way][done:]

    def cut(self) -> None:
        """Cut the line: bytes in flight are lost, delivered bytes can still be read."""
        self.up = False
        for inner in self._inner:
            inner.close()


# -- the two ends ----------------------------------------------------------------------------------------


class _End(Connection):
    """A connection that takes a step before and after each operation of a resumption."""

    steps: Steps
    resumed = 0

    def suspend(self, error: BaseException) -> None:
        self.steps.step()
        super().suspend(error)

    def standstill(self, attempt: int) -> int | None:
        self.steps.step()
        count = super().standstill(attempt)
        self.steps.step()
        return count

    def register(self) -> None:
        self.resumed += 1

    def resume(self, *args: Any) -> bool:
        self.steps.step()
        done = super().resume(*args)
        self.steps.step()
        return done


class _World:
    """Two ends, the lines between them, and the messages that were sent and received."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dice = random.Random(seed)
        self.steps = Steps(self.dice)
        self.steps.install(monkeypatch)
        self.calm = False
        self.lines: list[_Line] = []
        self.epoll = select.epoll()
        self.settings = Settings()
        self.closed_down = False
        self.sent: list[list[bytes]] = [[], []]
        self.came: list[list[bytes]] = [[], []]
        # Large messages by number. Small messages overtake them. None: the message was aborted, and arrives whole or not at all.
        self.numbers = itertools.count(1)
        self.large: list[dict[int, bytes | None]] = [{}, {}]
        self.large_came: list[dict[int, bytes]] = [{}, {}]
        # This object also acts as the agent, the Connector and the Events of the connections.
        self.submit = self.steps.spawn
        self.clock = SimpleNamespace(at=lambda *_: None, after=lambda _, task: self.steps.spawn(task))
        self.pool = SimpleNamespace(submit=self.submit, forget=lambda _: None, watch=lambda *_: None)
        whole = cast(Any, self)
        self.resumption = Resumption(whole, whole)
        self.ends: list[_End] = []
        for dialled, wire in zip((True, False), self.line().ends, strict=True):
            end = _End(
                # Small limits, so that acknowledgements are sent and the resend buffer fills up.
                ReliableStream(
                    SocketStream(wire),
                    ("dialler", "life"),
                    dialled,
                    say_every=3_000,
                    limit=20_000,
                    large=1_000,
                ),
                epoll=self.epoll,
                events=self,
                settings=self.settings,
                attach=b"",
                local=False,
            )
            end.steps = self.steps
            self.ends.append(end)
        self.ends[0].peer = SimpleNamespace(name="acceptor")

    def line(self) -> _Line:
        self.lines.append(_Line(self.steps, self.patient))
        return self.lines[-1]

    def patient(self) -> bool:
        return self.calm or self.dice.random() > 0.02

    # -- links -------------------------------------------------------------------------------------

    def stream(self, wire: _Wire, local: bool) -> SocketStream:
        return SocketStream(wire)

    def addresses(self, peer: Any) -> list[tuple[int, str]]:
        return [(socket.AF_UNIX, "acceptor")]

    def dial(self, *_: Any) -> tuple[_Wire, None]:
        self.steps.step()
        mine, theirs = self.line().ends
        session = SimpleNamespace(peer_name="dialler", peer_incarnation="life")
        self.steps.spawn(
            partial(self.resumption.admit, theirs, cast(Any, session), _ANSWER, cast(Any, self.ends[1]))
        )
        try:
            left = len(_ANSWER)
            while left:
                more = mine.recv(left)
                if not more:
                    raise ConnectionResetError
                left -= len(more)
        except OSError:
            mine.close()
            raise
        return mine, None

    # -- events ------------------------------------------------------------------------------------

    def control(self, connection: Connection, frame: Frame) -> Frame | None:
        side = self.ends.index(cast(_End, connection))
        match frame.kind:
            case frames.ACK:
                assert connection.session is not None
                connection.session.acknowledged(frame.id)
            case frames.REPLY:
                size = int.from_bytes(frame.body, "big")
                connection.assemblies[frame.id] = Assembly(frame, [size], lambda n: memoryview(bytearray(n)))
            case frames.CHUNK:
                begun: Assembly = connection.assemblies[frame.id]
                if begun.record_chunk(frame.chain, frame.flags):
                    del connection.assemblies[frame.id]
                    self.large_came[side][frame.id] = bytes(begun.buffers[0])
            case frames.STREAM_ABORT:
                del connection.assemblies[frame.id]
            case _:
                raise AssertionError(frame)
        return None

    def deliver(self, connection: Connection, batch: list[Frame], waiting: bool) -> bool:
        assert not waiting, "no thread waits for a reply here"
        came = self.came[self.ends.index(cast(_End, connection))]
        for frame in batch:
            came.append(frame.body)
            assert frame.id == len(came)
        return True

    def closed(self, connection: Connection, error: BaseException | None) -> None:
        if error is not None:
            raise AssertionError(f"closed: {error!r}")

    def suspended(self, connection: Connection, error: BaseException) -> None:
        self.resumption.begin(connection, error)

    # -- random actions ----------------------------------------------------------------------------

    def send(self, side: int) -> None:
        end = self.ends[side]
        body = self.dice.randbytes(self.dice.choice((0, 7, 100, 2_000)))
        self.sent[side].append(body)
        end.outbox.append(frames.pack_frame(frames.REPLY, len(self.sent[side]), body))
        end.flush()

    def send_large(self, side: int) -> None:
        """Send a message in chunks, which may be aborted; overwrite its memory afterwards."""
        end, number = self.ends[side], next(self.numbers)
        data = self.dice.randbytes(self.dice.choice((1, 5_000, 20_000)))
        memory = bytearray(data)
        pieces = [(0, at, memoryview(memory)[at : at + _CHUNK]) for at in range(0, len(data), _CHUNK)]
        self.large[side][number] = data
        end.outbox.append(
            frames.pack_frame(frames.REPLY, number, len(data).to_bytes(4, "big"), flags=frames.STREAM)
        )
        in_time = self.dice.random() < 0.7
        if not end.writer.send_chunks(number, pieces, None if in_time else 0.0):
            self.large[side][number] = None
        memory[:] = bytes(len(data))

    def read(self, side: int) -> None:
        self.ends[side].turn()

    def anything(self) -> None:
        """Do a random action."""
        side = self.dice.randrange(2)
        self.steps.now += 0.002
        match self.dice.choices(range(5), (50, 8, 14, 25, 0 if self.calm else 1.2))[0]:
            case 0:
                self.steps.advance()
            case 1 if not self.calm and self.steps.left < 12:
                self.steps.spawn(partial(self.dice.choice((self.send, self.send_large)), side))
            case 2 if sum(task.name == "read" for task in self.steps.tasks) < 6:
                self.steps.spawn(partial(self.read, side), "read")
            case 4:
                self.dice.choice(self.up).cut()
            case _:
                self.dice.choice(self.up).move(self.dice)

    @property
    def up(self) -> list[_Line]:
        return [line for line in self.lines if line.up] or self.lines

    @property
    def whole(self) -> bool:
        return self.came == self.sent[::-1] and all(
            came.get(number) == data
            for sent, came in zip(self.large, self.large_came[::-1], strict=True)
            for number, data in sent.items()
            if data is not None
        )

    def close(self) -> None:
        for end in self.ends:
            end.enter(CLOSED)
        for line in self.lines:
            line.cut()
        self.steps.run_out()
        self.steps.spawn(lambda: [end.reap() for end in self.ends])
        self.steps.run_out()
        assert not self.steps.left, self.steps.where()
        for line in self.lines:
            for wire in line.ends:
                wire.close()
        self.epoll.close()


@contextlib.contextmanager
def world(seed: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[_World]:
    """Create a world, and close it."""
    made = _World(seed, monkeypatch)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.prints(
    "a large message to worker .* has been blocked"
)  # virtual time may pass without a byte being sent
@pytest.mark.limit(60)
@pytest.mark.parametrize("seed", rest_is_slow(range(2_000 if NIGHTLY else 25), 3))
def test_messages_arrive_once_and_in_order_over_breaking_connections(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(seed, monkeypatch) as there:
        for _ in range(2_500):
            there.anything()
        there.calm = True
        for _ in range(40_000):
            if there.whole:
                break
            there.anything()
        assert [len(bodies) for bodies in there.came] == [len(bodies) for bodies in there.sent[::-1]]
        assert there.whole
        assert any(end.resumed for end in there.ends)  # otherwise the test has checked nothing
