"""One connection: who reads it, who waits for what comes over it and who sends, in orders that are drawn by lot.

At this end is a whole agent with its calls, its inbox, its pool, its clock and its executor; all of that is the real code,
on threads of which one runs at a time and hands over at steps: before it takes a lock, arms, polls or parks, and before some
lines. At the other end is a script, which reads, answers and asks when the dice say so, in pieces, and not for a while.

Time is moved by hand, and far only where nobody can go on: a wake-up that was lost is not made up for by a wait that ends
by itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import operator
import os
import random
import select
import socket
import struct
import termios
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import actorrpc
from actorrpc import futures
from actorrpc.actors.host.carriers import ActorThread, ActorThreads
from actorrpc.actors.host.threads import Runner
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import Call
from actorrpc.agent.peers import Peer
from actorrpc.config import Settings
from actorrpc.errors import BackpressureError, CancelledError, PeerDiedError, RpcTimeoutError
from actorrpc.futures import WAITING, Future
from actorrpc.transport import reader
from actorrpc.transport.connection import Connection
from actorrpc.transport.connection_state import CLOSED
from actorrpc.transport.stream import SocketStream
from actorrpc.wire import frames
from actorrpc.wire.frames import pack_frame
from tests.agent.agents import record
from tests.agent.other_end import Other
from tests.agent.steps import Condition, Epoll, Poll, Steps
from tests.layers import rest_is_slow

NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"
_FAR = 0.09  # seconds; a wait that long is a slice of one that has no end, or has a deadline
_PACKAGE = Path(actorrpc.__file__).parent
_FILES = frozenset(
    str(file)
    for pattern in ("agent/*.py", "transport/*.py", "actors/host/*.py", "futures.py")
    for file in _PACKAGE.glob(pattern)
)
# How a call may end without an answer; the last one at the end only.
_ENDED = (BackpressureError, CancelledError, RpcTimeoutError, PeerDiedError)

_here: list[_World] = []  # the one that runs


# -- what the other end has executed here ----------------------------------------------------------------


def _plain(number: int) -> int:
    return number


def _slow(number: int) -> int:
    _here[0].steps.step()
    return number


def _nested(number: int) -> int:
    """Call back, and wait."""
    with contextlib.suppress(*_ENDED):
        _here[0].call()
    return number


def _for_the_guest(number: int) -> int:
    _here[0].guest.order("post")
    return number


_ASKED = (_plain, _plain, _slow, _nested, _for_the_guest)


# -- what is put in the place of what waits --------------------------------------------------------------


class _Spinner(reader.Spinner):
    """Gives the right to spin, or not."""

    def __init__(self, steps: Steps, dice: random.Random) -> None:
        super().__init__()
        self._steps = steps
        self._dice = dice
        self.pays = dice.choice((-1.0, 0.15, 2.0))
        self.worth = dice.choice((-1.0, 0.25))  # below 0, each wait spins
        self.shared = 2.0  # never taken for that

    def acquire(self) -> bool:
        self._steps.step()
        return self._dice.random() < 0.7 and self.lock.acquire(False)


class _Guest(Runner):
    """Runs on the thread of an actor: sleeps where its last caller's next message comes, and is called for orders."""

    def __init__(self, world: _World) -> None:
        threads = ActorThreads(world.agent)
        super().__init__(
            cast(Any, SimpleNamespace(agent=world.agent, actor_threads=threads)),
            cast(Any, SimpleNamespace(waiting=False, has_ready=False, yielding=False)),
        )
        self._world = world
        self.thread = ActorThread(threads, self, own=True)
        self.thread.caller = world.conn
        self.orders: deque[str] = self.work  # type: ignore[assignment]
        self.posted = 0
        self.ended = False

    def order(self, what: str) -> None:
        self.orders.append(what)
        self.wake()

    def run(self) -> None:
        self.ident = self.thread.ident = threading.get_ident()
        WAITING.runner = self
        while not self.ended:
            if self.orders:
                self._carry_out()
            else:
                self.thread._sleep()

    def serve(self) -> None:
        outer, self._wakers = self._wakers, []
        try:
            self._carry_out()
        finally:
            self._wakers = outer

    def _carry_out(self) -> None:
        match self.orders.popleft():
            case "post":  # leaves with the wait for more
                self.posted += 1
                self._world.conn.outbox.append(pack_frame(frames.PONG, self.posted))
            case "call":
                with contextlib.suppress(*_ENDED):
                    self._world.call()
            case "end":
                self.ended = True


# -- all of it -------------------------------------------------------------------------------------------


class _World:
    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dice = dice = random.Random(seed)
        self.steps = steps = Steps(dice, dice.choice((0.0, 0.01, 0.03)), _FILES)
        self.calls: list[Call] = []
        self.made_by: dict[int, list[Call]] = {}
        self.callers = 0
        self.weights: tuple[float, ...] = ()
        self.ways: list[Callable[[], object]] = [self.call, self._with_future, self._several, self._watcher]
        self.ways += [self._called_back, self._shared, self._canceller, self._teller]
        self._names = itertools.count(1)
        steps.install(monkeypatch)
        monkeypatch.setattr(reader, "spinner", _Spinner(steps, dice))
        mine, theirs = record("me", 0), record("other", 1)
        settings = Settings(
            max_threads=dice.choice((3, 4, 8)),
            spin_us=dice.choice((0, 20)),
            window=30_000,
            chunk=6_000,
            lane=False,
            cork_frames=4,
            starvation_s=0.03,
        )
        self.agent = made = Agent(
            mine,
            settings=settings,
            key=None,
            resolve={"me": mine, "other": theirs}.get,  # type: ignore[arg-type]
            members=lambda: [mine, theirs],
        )
        made.send = self._note_call  # type: ignore[method-assign]
        self.pool, self.peer = made.pool, made.peer("other")
        self.epoll = cast(Epoll, made.pool.epoll)
        made.scheduler.pulse.active = True  # a heartbeat would wake whoever has been forgotten
        made.connector.connect = self._connect  # type: ignore[method-assign]
        here, there = socket.socketpair()
        if dice.randrange(2):
            for sock in (here, there):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_608)
        self.other = Other(there, dice, _ASKED)
        self.conn = conn = Connection(
            SocketStream(here),
            epoll=made.pool.epoll,
            events=made.inbox,
            settings=settings,
            attach=b"",
            local=True,
        )
        conn.peer, self.peer.conn = self.peer, conn
        self.peer.conns.append(conn)
        made.pool.watch(conn.fd, conn.turn)
        conn.register()
        made.pool.start(2)
        made.clock.start()
        self.guest = _Guest(self)
        self.guest_task = steps.spawn(self.guest.run, "the guest")

    def _connect(self, other: Peer, *_: object) -> Any:
        raise other.died("there is no other connection", maybe_executed=False)

    # -- who calls -----------------------------------------------------------------------------------

    def call(self, future: Future[Any] | None = None, keen: bool = False) -> Any:
        """Make a call; wait for it, where it has no future."""
        body = b"x" * (20_000 if not self.dice.randrange(12) else self.dice.choice((0, 300)))
        timeout = self.dice.choice((0, 0, 0, 2.0))
        if future is not None:
            return self.agent.call(self.peer, operator.add, (body,), {}, timeout, future=future)
        made_here = self.made_by.setdefault(threading.get_ident(), [])
        first = len(made_here)  # calls that are served in its wait may make more
        answer = self.agent.ask(self.peer, operator.add, (body,), {}, timeout)
        assert answer == made_here[first].id
        return answer

    def _note_call(self, made: Call, *args: Any) -> None:
        self.calls.append(made)
        self.made_by.setdefault(threading.get_ident(), []).append(made)
        Agent.send(self.agent, made, *args)

    def caller(self) -> None:
        """Call in one of the ways that there are."""
        try:
            with contextlib.suppress(*_ENDED):
                self.dice.choice(self.ways)()
        finally:
            self.callers -= 1

    def _with_future(self) -> None:
        future: Future[int] = Future()
        made = self.call(future)
        if not self.dice.randrange(3):
            with contextlib.suppress(RpcTimeoutError):
                future.wait(self.dice.choice((0.0, 1e-5, 0.5)))
        assert future.wait() == made.id

    def _several(self) -> None:
        many: list[Future[int]] = [Future() for _ in range(self.dice.randrange(2, 7))]
        numbers = {future: self.call(future).id for future in many}
        self.dice.shuffle(many)
        for future in many:
            with contextlib.suppress(*_ENDED):
                assert future.wait() == numbers[future]

    def _watcher(self) -> None:
        """Ask again and again."""
        future: Future[int] = Future()
        self.call(future)
        self.steps.step(future.done, where="a future to be done")

    def _called_back(self) -> None:
        future: Future[int] = Future()
        called: list[Any] = []
        if self.dice.randrange(2):
            future.add_done_callback(called.append)
            self.call(future)
        else:
            self.call(future)
            future.add_done_callback(called.append)
        self.steps.step(lambda: bool(called), where="its callback")
        future.acknowledge()

    def _shared(self) -> None:
        """Several wait for one."""
        future: Future[int] = Future()
        made = self.call(future)

        def wait() -> None:
            try:
                with contextlib.suppress(*_ENDED):
                    assert future.wait() == made.id
            finally:
                self.callers -= 1

        for _ in range(2):
            self.callers += 1
            self.steps.spawn(wait, f"one of several for call {made.id}")
        with contextlib.suppress(*_ENDED):
            wait()
        self.callers += 1  # it is not over

    def _canceller(self) -> None:
        future: Future[int] = Future()
        self.call(future)

        def cancel() -> None:
            self.steps.step()
            future.cancel()
            self.callers -= 1

        self.callers += 1
        self.steps.spawn(cancel, "a canceller")
        future.wait()

    def _teller(self) -> None:
        """Leave something in the outbox, or have the guest do it."""
        self.guest.order(self.dice.choice(("post", "call")))

    # -- what is done --------------------------------------------------------------------------------

    def anything(self) -> None:
        other = self.other
        match self.dice.choices(range(7), self.weights)[0]:
            case 0:
                self.steps.go_on()
            case 1 if self.callers < 6:
                self.callers += 1
                self.steps.spawn(self.caller, f"caller {next(self._names)}")
            case 2:
                other.read()
            case 3:
                other.write()
            case 4:
                other.answer()
            case 5 if len(other.asked) < 8:
                other.ask()
            case 6:
                self.steps.now += self.dice.choice((0.01, 1.0))

    def much(self) -> None:
        """Do a lot; the other end reads or writes little for all that time, or much."""
        dice = self.dice
        callers, reads, writes = dice.choice((1, 4)), dice.choice((0.2, 2, 8)), dice.choice((1, 8))
        self.weights = (60, callers, reads, writes, dice.choice((2, 8)), dice.choice((0.3, 2)), 0.05)
        for _ in range(dice.choice((400, 1_000))):
            self.anything()

    def settle(self) -> None:
        """Let all go on for as long as they can, without the other end; and see that none was forgotten."""
        # A pool that may have no more threads looks again and again.
        self.steps.run_out(self.steps.now + _FAR)
        wrong = self.forgotten()
        assert not wrong, f"{wrong}\n{self.steps.where()}"

    def forgotten(self) -> list[str]:
        """Say what is left although nobody can go on."""
        conn, wrong = self.conn, []
        tasks = self.steps.tasks
        if conn.state is CLOSED:
            return ["the connection has ended"]
        for each in self.calls:
            if each.id in self.other.answered and not each.done:
                wrong.append(f"call {each.id} has its answer, and is not done")
        if struct.unpack("i", fcntl.ioctl(conn.fd, termios.FIONREAD, bytes(4)))[0]:
            wrong.append("nobody reads what there is")
        if (conn.outbox or conn.writer._rest) and self._takes_more():
            wrong.append("nobody sends what there is")
        polling = [task.where.reads for task in tasks if isinstance(task.where, Poll)]
        reading, sending = True in polling, False in polling
        if conn.read_lock.locked() != reading:
            wrong.append("the read lock is held by nobody who reads, or the other way round")
        if conn.writer.lock.locked() != sending:
            wrong.append("the write lock is held by nobody who sends, or the other way round")
        if not reading and not self.epoll.mask(conn.fd) & select.EPOLLIN:
            wrong.append("nobody listens")
        if conn.expecting:
            wrong.append("somebody is expected still")
        where = self.guest_task.where
        sends = where is conn.writer.lock or (isinstance(where, Poll) and not where.reads)
        if self.guest.orders and not sends and not isinstance(where, Condition):
            wrong.append("the guest sleeps over its orders")
        if self.peer.window.waiting and not self.peer.window.full:
            wrong.append("somebody waits for room that there is")
        return wrong

    def _takes_more(self) -> bool:
        poll = select.poll()
        poll.register(self.conn.fd, select.POLLOUT)
        return bool(poll.poll(0))

    def finish(self) -> None:
        """Have the other end do all that it owes."""
        other = self.other
        for _ in range(10_000):
            self.settle()
            other.answer()
            moved = other.read()
            moved = other.write() or moved
            if not moved and not other.unanswered:
                break
        self.settle()
        wrong = []
        if self.callers:
            wrong.append(f"{self.callers} callers are not done")
        if other.asked:
            wrong.append(f"{other.asked} are not answered")
        if other.pongs != self.guest.posted or self.guest.orders:
            wrong.append(f"of {self.guest.posted} posts of the guest, {other.pongs} have come")
        if self.peer.pending or self.peer.window.charged or self.peer.window.waiting:
            wrong.append(f"left: {self.peer.pending} {self.peer.window.charged} {self.peer.window.waiting}")
        assert not wrong, f"{wrong}\n{self.steps.where()}"

    def close(self) -> None:
        """End all of it; with calls under way, where the dice have it so."""
        self.other.close()
        self.guest.order("end")
        self.steps.run_out(self.steps.now + _FAR)
        # What is left are the clock, and threads of the pool that have nothing to do.
        stuck = [each.name for each in self.steps.tasks if each.where not in (self.epoll, "to tick")]
        where = self.steps.where() if stuck or self.callers or self.peer.pending else ""
        self.steps.spawn(self.agent.close, "the end")
        self.steps.run_out()
        assert not where, f"not ended with the connection: {stuck}, {self.callers} callers\n{where}"
        assert not self.steps.left, self.steps.where()


@contextlib.contextmanager
def world(seed: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[_World]:
    """Make a world, and end all that it has."""
    gc.collect()
    gc.disable()  # what finalisers do is no matter of the dice
    made = _World(seed, monkeypatch)
    _here.append(made)
    futures.mute(True)
    try:
        yield made
        made.close()
    finally:
        futures.mute(False)
        _here.clear()
        gc.enable()


@pytest.mark.limit(60)
@pytest.mark.prints("has been blocked for 2 s")  # the window is small, and virtual time passes fast
@pytest.mark.parametrize("seed", rest_is_slow(range(2_000 if NIGHTLY else 25), 10))
def test_nobody_is_forgotten(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(seed, monkeypatch) as there:
        for _ in range(4):
            there.much()
            there.settle()
        if there.dice.randrange(4):
            there.finish()
            assert there.calls  # else it has proved nothing
