"""Two ends of a connection that breaks and comes back, in orders that are drawn by lot.

The code is the real one, of connections and of their resumption; the threads are real as well, but one of them runs at a
time, and hands over at each step: before it takes a lock, suspends, tells how far it has come, goes on, says or hears
something. What is between the two ends moves bytes, loses some, and cuts; either side may run out of patience.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actorrpc.config import Settings
from actorrpc.core import replay
from actorrpc.core.connection import Connection
from actorrpc.core.frames import ACK, REPLY, Frame, pack_frame
from actorrpc.core.resumption import Resumption

NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"
_ANSWER = b"come in"  # the last message of a handshake


# -- threads, one at a time ------------------------------------------------------------------------------


def _held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class _Task:
    go: threading.Lock = field(default_factory=_held)
    ready: Callable[[], bool] | None = None
    rests_until: int = 0
    error: BaseException | None = None
    over: bool = False


class _Steps:
    """Runs tasks on threads of their own, one at a time: which one goes on is drawn by lot."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._tasks: list[_Task] = []
        self._back = _held()
        self._count = 0
        self._mine = threading.local()

    def spawn(self, run: Callable[[], object]) -> None:
        task = _Task()
        self._tasks.append(task)
        threading.Thread(target=self._run, args=(task, run), daemon=True).start()

    def _run(self, task: _Task, run: Callable[[], object]) -> None:
        self._mine.task = task
        task.go.acquire()
        try:
            run()
        except BaseException as error:
            task.error = error
        task.over = True
        self._back.release()

    def step(self, ready: Callable[[], bool] | None = None) -> None:
        """Let others go on first; not to be chosen before ``ready()``."""
        task: _Task = self._mine.task
        task.ready = ready
        if not self._dice.randrange(8):  # a thread that is not let run for a while is what most errors need
            task.rests_until = self._count + self._dice.choice((10, 100, 600))
        self._back.release()
        task.go.acquire()

    def go_on(self) -> bool:
        """Have one task make a step; say whether there was any that could."""
        self._count += 1
        able = [task for task in self._tasks if task.ready is None or task.ready()]
        if not able:
            return False
        task = self._dice.choice([task for task in able if task.rests_until < self._count] or able)
        task.go.release()
        self._back.acquire()
        if task.over:
            self._tasks.remove(task)
            if task.error is not None:
                raise task.error
        return True

    @property
    def left(self) -> int:
        return len(self._tasks)


class _Lock:
    """A lock that is taken in steps."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps
        self._lock = threading.Lock()
        self.release = self._lock.release

    def acquire(self, blocking: bool = True) -> bool:
        self._steps.step()
        while not self._lock.acquire(False):
            if not blocking:
                return False
            self._steps.step(lambda: not self._lock.locked())
        return True

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


# -- what is between the two ends ------------------------------------------------------------------------


class _Wire(socket.socket):
    """One end of a line. Where it would block, it takes a step; where it has waited, its patience may be over."""

    patience: Callable[[], bool]
    steps: _Steps

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        self.steps.step(self._readable)
        try:
            return super().recv(size, socket.MSG_DONTWAIT)
        except BlockingIOError:  # chosen for its patience was over
            raise TimeoutError from None

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        self.steps.step()
        super().sendall(data)

    def settimeout(self, value: float | None, /) -> None:
        pass  # patience says

    def _readable(self) -> bool:
        if self.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(0)) or not self.patience()


class _Line:
    """A way for bytes, which it moves when it is told to; so it can end with bytes on it, and before it."""

    def __init__(self, steps: _Steps, patience: Callable[[], bool]) -> None:
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
        """Move some bytes of one direction, or all that there are."""
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
        """End: what is under way is lost, what has been brought can still be read."""
        self.up = False
        for inner in self._inner:
            inner.close()


# -- the two ends ----------------------------------------------------------------------------------------


class _End(Connection):
    """A connection that takes a step before and after what matters."""

    steps: _Steps

    def suspend(self, error: BaseException) -> None:
        self.steps.step()
        super().suspend(error)

    def standstill(self, attempt: int) -> int | None:
        self.steps.step()
        count = super().standstill(attempt)
        self.steps.step()
        return count

    def resume(self, *args: Any) -> bool:
        self.steps.step()
        done = super().resume(*args)
        self.steps.step()
        return done

    def _wait_writable(self, deadline: float | None = None) -> bool:
        self.steps.step()
        return False


class _World:
    """Two ends, the lines between them, and what has been sent and has come."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.steps = _Steps(self.dice)
        self.calm = False
        self.lines: list[_Line] = []
        self.epoll = select.epoll()
        self.settings = Settings()
        self.closed_down = False
        self.sent: list[list[bytes]] = [[], []]
        self.came: list[list[bytes]] = [[], []]
        self.resumed = 0
        # What Resumption asks of its agent and of its links.
        self.submit = self.steps.spawn
        self.clock = SimpleNamespace(at=lambda *_: None, after=lambda _, task: self.steps.spawn(task))
        self.pool = SimpleNamespace(forget=lambda _: None)
        whole = cast(Any, self)
        self.resumption = Resumption(whole, whole)
        self.ends: list[_End] = []
        for wire in self.line().ends:
            end = _End(
                wire,
                epoll=self.epoll,
                events=self,
                settings=self.settings,
                attach=b"",
                local=False,
            )
            end.steps = self.steps
            end.read_lock = cast(Any, _Lock(self.steps))
            end.write_lock = cast(Any, _Lock(self.steps))
            self.ends.append(end)
        self.ends[0].dialled = True
        self.ends[0].peer = SimpleNamespace(name="acceptor")
        self.ends[1].other = ("dialler", "life")

    def line(self) -> _Line:
        self.lines.append(_Line(self.steps, self.patient))
        return self.lines[-1]

    def patient(self) -> bool:
        return self.calm or self.dice.random() > 0.02

    # -- links -------------------------------------------------------------------------------------

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

    def watch(self, conn: Connection) -> None:
        self.resumed += 1

    # -- events ------------------------------------------------------------------------------------

    def control(self, connection: Connection, frame: Frame) -> Frame | None:
        assert frame.kind == ACK
        assert connection.replay is not None
        connection.replay.acknowledged(frame.id)
        return None

    def deliver(self, connection: Connection, frames: list[Frame], waiting: bool) -> bool:
        raise AssertionError("nobody waits for a reply here")

    def closed(self, connection: Connection, error: BaseException | None) -> None:
        if error is not None:
            raise AssertionError(f"closed: {error!r}")

    def suspended(self, connection: Connection, error: BaseException) -> None:
        self.resumption.begin(connection, error)

    # -- what is done ------------------------------------------------------------------------------

    def send(self, side: int) -> None:
        end = self.ends[side]
        body = self.dice.randbytes(self.dice.choice((0, 7, 100, 2_000)))
        self.sent[side].append(body)
        end.outbox.append(pack_frame(REPLY, len(self.sent[side]), body))
        end.flush()

    def read(self, side: int) -> None:
        for frame in self.ends[side].turn() or ():
            self.came[side].append(frame.body)
            assert frame.id == len(self.came[side])

    def anything(self) -> None:
        """Do what comes up."""
        side = self.dice.randrange(2)
        match self.dice.choices(range(5), (50, 8, 14, 25, 0 if self.calm else 1.2))[0]:
            case 0:
                self.steps.go_on()
            case 1 if not self.calm and self.steps.left < 12:
                self.steps.spawn(partial(self.send, side))
            case 2 if self.steps.left < 12:
                self.steps.spawn(partial(self.read, side))
            case 4:
                self.dice.choice(self.up).cut()
            case _:
                self.dice.choice(self.up).move(self.dice)

    @property
    def up(self) -> list[_Line]:
        return [line for line in self.lines if line.up] or self.lines

    @property
    def whole(self) -> bool:
        return self.came == self.sent[::-1]

    def close(self) -> None:
        for end in self.ends:
            end.broken = True
        for line in self.lines:
            line.cut()
        while self.steps.left:
            self.steps.go_on()
        self.steps.spawn(lambda: [end.reap() for end in self.ends])
        while self.steps.left:
            self.steps.go_on()
        for line in self.lines:
            for wire in line.ends:
                wire.close()
        self.epoll.close()


@contextlib.contextmanager
def world(seed: int) -> Iterator[_World]:
    """Make a world, and end all that it has."""
    made = _World(seed)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.limit(60)
@pytest.mark.parametrize("seed", range(2_000 if NIGHTLY else 25))
def test_every_byte_comes_once_and_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # So small that acknowledgements come, and what is kept is forgotten, and full.
    monkeypatch.setattr(replay, "_SAY_EVERY", 3_000)
    monkeypatch.setattr(replay, "_LIMIT", 20_000)
    monkeypatch.setattr(replay, "_LARGE", 1_000)
    with world(seed) as there:
        for _ in range(2_500):
            there.anything()
        there.calm = True
        for _ in range(40_000):
            if there.whole:
                break
            there.anything()
        assert [len(bodies) for bodies in there.came] == [len(bodies) for bodies in there.sent[::-1]]
        assert there.whole
        assert there.resumed  # else it has proved nothing
