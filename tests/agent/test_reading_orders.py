"""One connection under random schedules of the threads that read it, send over it and wait for replies.

The local end is a complete, real agent with its calls, inbox, pool, clock and executor. One of its threads runs at a time
and hands over at steps: before it takes a lock, arms, polls or parks, and before some lines. The remote end is a script that
reads, replies and calls at random times, in pieces.

Time is virtual. It moves far only if no thread is able to run, so that the time-out of a wait does not hide a lost wake-up.
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
from actorrpc.transport import connection
from actorrpc.transport.connection import Connection
from actorrpc.transport.stream import CLOSED, SocketStream
from actorrpc.wire import frames
from actorrpc.wire.frames import pack_frame
from tests.agent.agents import record
from tests.agent.other_end import RemoteEnd
from tests.agent.steps import Condition, Epoll, Poll, Steps
from tests.layers import rest_is_slow

NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"
_FAR = 0.09  # seconds; longer waits are slices of an endless wait, or end at a deadline
_PACKAGE = Path(actorrpc.__file__).parent
_FILES = frozenset(
    str(file)
    for pattern in ("agent/*.py", "transport/*.py", "actors/host/*.py", "futures.py")
    for file in _PACKAGE.glob(pattern)
)
# The errors with which a call may end; PeerDiedError only when the world closes.
_ENDED = (BackpressureError, CancelledError, RpcTimeoutError, PeerDiedError)

_here: list[_World] = []  # the running world


# -- functions that the remote end calls -----------------------------------------------------------------


def _plain(number: int) -> int:
    return number


def _slow(number: int) -> int:
    _here[0].steps.step()
    return number


def _nested(number: int) -> int:
    """Call the remote end, and wait."""
    with contextlib.suppress(*_ENDED):
        _here[0].call()
    return number


def _for_the_guest(number: int) -> int:
    _here[0].guest.order("post")
    return number


_FUNCTIONS = (_plain, _plain, _slow, _nested, _for_the_guest)


# -- replacements for the spinner and for the thread of an actor -----------------------------------------


class _Spinner(connection.Spinner):
    """Permits spinning at random."""

    def __init__(self, steps: Steps, dice: random.Random) -> None:
        super().__init__()
        self._steps = steps
        self._dice = dice
        self.read_again = dice.choice((-1.0, 0.15, 2.0))
        self.worth = dice.choice((-1.0, 0.25))  # below 0, each wait spins
        self.shared = 2.0  # above every threshold

    def acquire(self) -> bool:
        self._steps.step()
        return self._dice.random() < 0.7 and self.lock.acquire(False)


class _Guest(Runner):
    """The runner of an actor's thread: it sleeps reading the connection of its last caller, and is woken for orders."""

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
            case "post":  # sent when this thread waits again
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
        self.ways += [self._called_back, self._shared, self._canceller, self._order_guest]
        self._names = itertools.count(1)
        steps.install(monkeypatch)
        monkeypatch.setattr(connection, "spinner", _Spinner(steps, dice))
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
        made.scheduler.pulse.active = True  # no heartbeats: a heartbeat would hide a lost wake-up
        made.connector.connect = self._connect  # type: ignore[method-assign]
        here, there = socket.socketpair()
        if dice.randrange(2):
            for sock in (here, there):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_608)
        self.other = RemoteEnd(there, dice, _FUNCTIONS)
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

    # -- callers -------------------------------------------------------------------------------------

    def call(self, future: Future[Any] | None = None, keen: bool = False) -> Any:
        """Make a call; wait for it if no future is given."""
        body = b"x" * (20_000 if not self.dice.randrange(12) else self.dice.choice((0, 300)))
        timeout = self.dice.choice((0, 0, 0, 2.0))
        if future is not None:
            return self.agent.call(self.peer, operator.add, (body,), {}, timeout, future=future)
        made_here = self.made_by.setdefault(threading.get_ident(), [])
        first = len(made_here)  # requests served during the wait may add more
        answer = self.agent.call_sync(self.peer, operator.add, (body,), {}, timeout)
        assert answer == made_here[first].id
        return answer

    def _note_call(self, made: Call, *args: Any) -> None:
        self.calls.append(made)
        self.made_by.setdefault(threading.get_ident(), []).append(made)
        Agent.send(self.agent, made, *args)

    def caller(self) -> None:
        """Make calls in a random way."""
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
        """Poll whether the future is done."""
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
        """Three threads wait for the same future."""
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
        self.callers += 1  # wait() has subtracted this caller, which is still running

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

    def _order_guest(self) -> None:
        """Order the guest to leave a frame in the outbox, or to call."""
        self.guest.order(self.dice.choice(("post", "call")))

    # -- random actions ------------------------------------------------------------------------------

    def anything(self) -> None:
        other = self.other
        match self.dice.choices(range(7), self.weights)[0]:
            case 0:
                self.steps.advance()
            case 1 if self.callers < 6:
                self.callers += 1
                self.steps.spawn(self.caller, f"caller {next(self._names)}")
            case 2:
                other.read()
            case 3:
                other.write()
            case 4:
                other.answer()
            case 5 if len(other.open_calls) < 8:
                other.make_call()
            case 6:
                self.steps.now += self.dice.choice((0.01, 1.0))

    def much(self) -> None:
        """Do many random actions, with a random share of reading and writing at the remote end."""
        dice = self.dice
        callers, reads, writes = dice.choice((1, 4)), dice.choice((0.2, 2, 8)), dice.choice((1, 8))
        self.weights = (60, callers, reads, writes, dice.choice((2, 8)), dice.choice((0.3, 2)), 0.05)
        for _ in range(dice.choice((400, 1_000))):
            self.anything()

    def settle(self) -> None:
        """Run all threads until they wait, without the remote end, and check that no wake-up was lost."""
        # A pool at its maximum number of threads polls repeatedly, and its queued tasks wait for the next tick of the clock.
        for _ in range(4):
            self.steps.run_out(self.steps.now + _FAR)
            wrong = self.lost_wakeups()
            if not wrong or not self.pool.queue:
                break
        assert not wrong, f"{wrong}\n{self.steps.where()}"

    def lost_wakeups(self) -> list[str]:
        """Return a description of each lost wake-up, when no thread is able to run."""
        conn, wrong = self.conn, []
        tasks = self.steps.tasks
        if conn.state is CLOSED:
            return ["the connection has ended"]
        for each in self.calls:
            if each.id in self.other.answered and not each.done:
                wrong.append(f"call {each.id} has been answered, but is not done")
        if struct.unpack("i", fcntl.ioctl(conn.fd, termios.FIONREAD, bytes(4)))[0]:
            wrong.append("no thread reads the received bytes")
        if (conn.outbox or conn.writer._rest) and self._takes_more():
            wrong.append("no thread sends the queued bytes")
        polling = [task.where.reads for task in tasks if isinstance(task.where, Poll)]
        reading, sending = True in polling, False in polling
        if conn.read_lock.locked() != reading:
            wrong.append("the read lock is held without a reader, or a reader does not hold it")
        if conn.writer.lock.locked() != sending:
            wrong.append("the write lock is held without a sender, or a sender does not hold it")
        if not reading and not self.epoll.mask(conn.fd) & select.EPOLLIN:
            wrong.append("the socket has no reader and is not armed")
        if conn.expecting:
            wrong.append("the connection still expects a caller to read")
        where = self.guest_task.where
        sends = where is conn.writer.lock or (isinstance(where, Poll) and not where.reads)
        if self.guest.orders and not sends and not isinstance(where, Condition):
            wrong.append("the guest sleeps although it has orders")
        if self.peer.window.waiting and not self.peer.window.full:
            wrong.append("a caller waits for the window although it has room")
        return wrong

    def _takes_more(self) -> bool:
        poll = select.poll()
        poll.register(self.conn.fd, select.POLLOUT)
        return bool(poll.poll(0))

    def finish(self) -> None:
        """Let the remote end read and answer everything."""
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
        if other.open_calls:
            wrong.append(f"the calls {other.open_calls} are not answered")
        if other.pongs != self.guest.posted or self.guest.orders:
            wrong.append(f"of {self.guest.posted} posts of the guest, {other.pongs} have come")
        if self.peer.pending or self.peer.window.charged or self.peer.window.waiting:
            wrong.append(f"left: {self.peer.pending} {self.peer.window.charged} {self.peer.window.waiting}")
        assert not wrong, f"{wrong}\n{self.steps.where()}"

    def close(self) -> None:
        """Close both ends; calls may still be running."""
        self.other.close()
        self.guest.order("end")
        self.steps.run_out(self.steps.now + _FAR)
        # Only the clock and idle threads of the pool may remain.
        stuck = [each.name for each in self.steps.tasks if each.where not in (self.epoll, "to tick")]
        where = self.steps.where() if stuck or self.callers or self.peer.pending else ""
        self.steps.spawn(self.agent.close, "the end")
        self.steps.run_out()
        assert not where, f"not ended with the connection: {stuck}, {self.callers} callers\n{where}"
        assert not self.steps.left, self.steps.where()


@contextlib.contextmanager
def world(seed: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[_World]:
    """Create a world, and close it."""
    gc.collect()
    gc.disable()  # finalisers would make the schedule depend on more than the seed
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
def test_no_wakeup_is_lost_in_random_schedules(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(seed, monkeypatch) as there:
        for _ in range(4):
            there.much()
            there.settle()
        if there.dice.randrange(4):
            there.finish()
            assert there.calls  # otherwise the test has checked nothing
