"""The crew: the threads that run an actor's sync methods, and what they do while they wait.

A serial actor has one :class:`ActorThread`, which runs everything, its constructor included: renderers, database
connections and event loops are used from the thread that made them. A station that waits in one of our waits runs
the calls that descend from its own meanwhile, nested on the same thread.

An idle station waits on the connection of its last caller (see ``transport/reader.py``), and so reads the next call itself;
where somebody else reads that, it parks on a lock of its own. A worker keeps at most ``MAX_STATIONS``; beyond that,
the station that has been idle longest ends, and its actor gets a new one with its next call.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch

from actorrpc import _time
from actorrpc._limits import NO_THREAD
from actorrpc.actors.host.mailbox import Entry, GroupQueue, Wakeups
from actorrpc.actors.streams.stalls import Stall, awaited
from actorrpc.agent.calls import Call
from actorrpc.agent.daemon_threads import Daemon
from actorrpc.agent.threads import follow_torch
from actorrpc.futures import WAITING, stand_by

if TYPE_CHECKING:
    from actorrpc.actors.host.actor import HostedActor
    from actorrpc.transport.connection import Connection

__all__ = [
    "BYSTANDERS",
    "MAX_STATIONS",
    "ActorThread",
    "ActorThreads",
    "Bystanders",
    "Interrupted",
    "wake_all",
]

MAX_STATIONS: Final = 1024
_AGAIN_S: Final = 0.02  # how soon an interruption is tried again on a thread that is in our own code
_set_async_exc: Final = ctypes.pythonapi.PyThreadState_SetAsyncExc
_PACKAGE: Final = __name__.partition(".")[0] + "."


class Interrupted(KeyboardInterrupt):
    """Raised in a running method whose call was cancelled.

    No Exception, so that ``except Exception`` lets it pass; and of the kind that Ctrl-C raises, as libraries are prepared for
    that: an event loop that the method runs itself lets it pass, and swallows all others in its callbacks.
    """


def _bears_interruption(frame: FrameType | None) -> bool:
    """Tell whether an exception that is set for a thread with this stack arrives, and cuts none of our own code in two.

    A ``__del__`` loses it: the interpreter prints what is raised there, and the method goes on. So does ``Thread.start``:
    CPython 3.11 gives the state of a new thread the id of the thread that makes it, until the new one runs. Meanwhile an
    exception that is set for this id goes to the new thread, as the first found, and that ends before its first line.
    """
    while frame is not None and _module(frame).startswith("namedtuple_"):
        frame = frame.f_back  # its constructor is made by `collections`: it belongs to the code that calls it
    if frame is None or _module(frame).startswith(_PACKAGE):
        return False
    while frame is not None:
        if frame.f_code is threading.Thread.start.__code__ or frame.f_code.co_name == "__del__":
            return False
        frame = frame.f_back
    return True


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


class ActorThreads:
    """All stations of this process. ``_lock`` guards the table and is a leaf."""

    def __init__(self, most: int = MAX_STATIONS) -> None:
        self._lock = threading.RLock()
        self._all: dict[ActorThread, None] = {}
        self._most = most

    def add(self, station: ActorThread) -> None:
        """Record a new station; if there are too many, let the one that has been idle longest end."""
        with self._lock:
            self._all[station] = None
            crowded = len(self._all) > self._most
            others = sorted(self._all, key=lambda each: each.idle_since or float("inf")) if crowded else []
        for each in others:
            if each is not station and each.idle_since and each.retire():
                return

    def remove(self, station: ActorThread) -> None:
        """Record that a station has ended."""
        with self._lock:
            self._all.pop(station, None)


class ActorThread:
    """A thread of an actor, for one lane. Made by its resident; ends when it is told to."""

    def __init__(self, resident: HostedActor, lane: GroupQueue) -> None:
        self.work: deque[Entry] = deque()
        self.idle_since = 0.0
        self.depth = 0
        self.ident = 0
        self.caller: Connection | None = None
        self.attends: Connection | None = None
        self.running: Entry | None = None
        self._grad = True  # the mode of autograd that the actor has between its calls
        self._resident = resident
        self.lane = lane
        self._ending = False
        self._stirs: list[tuple[Callable[[], None], object]] = []
        self._parked = threading.Lock()
        self._parked.acquire()
        # Guards the delivery of an interruption against the end of what it is for; leaf.
        self._interrupts = threading.Lock()
        self._interrupted: Entry | None = None

    def start(self) -> None:
        """Start the thread. Where the system has none, the calls hear of it that wait for one."""
        resident = self._resident
        resident.crew.append(self)
        resident.stations.add(self)
        try:
            Daemon(self._run, f"actorrpc-actor-{resident.title}").start()
        except NO_THREAD:
            resident.stations.remove(self)
            resident.understaffed(self.lane)
            resident.left(self)

    @property
    def waiting(self) -> bool:
        """Whether the thread is in one of our waits."""
        return bool(self._stirs)

    @property
    def waits_for(self) -> list[Call | Stall]:
        """What the thread waits for, all of it; nothing where it does not wait, or for something else."""
        try:
            return awaited(self._stirs[-1][1])
        except IndexError:
            return []

    def runs(self, execution: int) -> bool:
        """Whether an execution is under way here."""
        return self._resident.mailbox.seat_of(execution) is self

    def wake(self) -> None:
        """Have the thread look for work, whether it is parked or waits for something."""
        if threading.get_ident() == self.ident:
            return  # it has read its own letter, and is about to look
        stirs = self._stirs
        if stirs:
            try:
                stirs[-1][0]()
                return
            except IndexError:
                pass
        try:
            self._parked.release()
        except RuntimeError:
            pass
        conn = self.attends
        if conn is not None:
            conn.wake()

    def retire(self) -> bool:
        """End the thread if it is idle."""
        if not self._resident.mailbox.leave(self.lane, self):
            return False
        self.end()
        return True

    def end(self) -> None:
        """End the thread when it has nothing to do."""
        self._ending = True
        self.wake()

    def _run(self) -> None:
        self.ident = threading.get_ident()
        WAITING.station = self
        follow_torch()
        resident, lane, mailbox = self._resident, self.lane, self._resident.mailbox
        entry: Entry | None = None
        try:
            while True:
                entry, todo = mailbox.take(lane, self)
                if todo is not None:
                    resident.carry_out(todo)
                if entry is None:
                    if self._ending or mailbox.closed:  # one that starts late was not told
                        return
                    self.idle_since = _time.now()
                    self._sleep()
                    self.idle_since = 0.0
                    continue
                self._grad = torch.is_grad_enabled()
                if self.caller is not None and self.caller.outbox:
                    self.caller.flush(True)  # its last answer was left to be sent with the wait for more
                resident.callee.run(entry, self)
                entry = None
                resident.finished(lane, mailbox.done(lane, self))
        except BaseException as error:
            resident.broken(error, entry)
        finally:
            if self.caller is not None and self.caller.outbox:
                self.caller.flush()  # nobody waits for more here
            mailbox.leave(lane, self)
            resident.stations.remove(self)
            resident.left(self)
            WAITING.station = None

    def _sleep(self) -> None:
        """Wait for work, where it is most likely to come from: the connection of the last caller."""
        conn = self.caller
        if conn is not None:
            frames = conn.answering.attend(self)
            if frames is not None:
                if frames:
                    self._resident.agent.deliver(conn, frames, True)
                return
            if conn.outbox:
                conn.flush(True)
            if conn.broken:
                self.caller = None
            # Somebody else is reading it: what that thread brings in is worth one turn of the interpreter.
            time.sleep(0)
            if self.lane.waiting:
                return
        self._parked.acquire()

    def called(self) -> bool:
        """See reader.ServingThread."""
        return self._parked.acquire(False)

    # -- while it waits ----------------------------------------------------------------------------

    def begin_wait(self, stir: Callable[[], None], what: object) -> None:
        """See futures.NestedRunner."""
        self._stirs.append((stir, what))
        if self.lane.waiting:
            self._resident.runtime.residents.deadlocks.poke()
        if len(self._stirs) == 1:
            self.begin_await()

    def end_wait(self) -> None:
        """See futures.NestedRunner."""
        self._stirs.pop()
        if not self._stirs:
            self.end_await()

    def begin_await(self) -> None:
        """See futures.NestedRunner."""
        if self.lane.yielding:
            self._resident.carry_out(self._resident.mailbox.rest(self.lane))

    def end_await(self) -> None:
        """See futures.NestedRunner."""
        if self.lane.yielding:
            self._resident.mailbox.resume(self.lane)

    def serve(self) -> None:
        """See futures.NestedRunner."""
        entry = self._resident.mailbox.take_nested(self)
        if entry is None:
            return
        outer, stirs = self.running, self._stirs
        # A wait below is not stirred by calls that run above it; a wait up there brings its own.
        self._stirs = []
        # Nor does a `with torch.no_grad():` below that waits mean the calls that run within it.
        grad = torch.is_grad_enabled()
        if grad is not self._grad:
            torch._C._set_grad_enabled(self._grad)
        try:
            self._resident.callee.run(entry, self)
        finally:
            torch._C._set_grad_enabled(grad)
            self._stirs = stirs
            self.running = outer

    # -- interruption ------------------------------------------------------------------------------

    def interrupt(self, entry: Entry, again: Callable[[float, Callable[[], None]], object]) -> None:
        """Raise :class:`Interrupted` in the method that runs ``entry``, if it (still) does.

        Not while the thread is in our own code, which must not be cut in two, nor where it would be lost
        (:func:`_bears_interruption`): then it is tried again a little later (``again(delay, run)``), for as long as the
        entry runs.
        """
        time.sleep(0)  # a fresh turn of the interpreter: the thread cannot move between the look and the blow
        with self._interrupts:
            if self.running is not entry or self._interrupted is not None:
                return
            if _bears_interruption(sys._current_frames().get(self.ident)):
                self._interrupted = entry
                _set_async_exc(ctypes.c_ulong(self.ident), ctypes.py_object(Interrupted))
                return
        again(_AGAIN_S, lambda: self.interrupt(entry, again))

    def enter(self, entry: Entry) -> None:
        """Note that the thread runs ``entry`` from now on: it may be interrupted."""
        self.running = entry

    def leave(self) -> None:
        """Note that the entry is over. An interruption that was on its way for it arrives here or never."""
        try:
            with self._interrupts:
                self.running = None
                if self._interrupted is not None:
                    # Not delivered yet, or just now. Taken back by being delivered here: where it is replaced by
                    # none, CPython 3.11 checks for one at every step of every thread ever after, and a traced
                    # function (a debugger, coverage) waits for that in its first step for ever.
                    self._interrupted = None
                    if _set_async_exc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(Interrupted)):
                        while True:
                            time.sleep(0)
        except Interrupted:
            self.running = None
            self._interrupted = None

    def stack(self) -> str:
        """Return what the thread is doing, as a traceback."""
        frame = sys._current_frames().get(self.ident)
        return "".join(traceback.format_stack(frame)) if frame is not None else "(the thread is gone)"


class Bystanders:
    """The threads of this process that are no station's, where tasks run: those that tasks have started.

    Each of them that waits makes room for one more task, as a task does that waits itself: nobody knows whose it is. It is
    their station. ``_lock`` guards the number and the table; it is a leaf, and re-entrant, as the collector may run there.
    """

    work: Any = ()

    def __init__(self) -> None:
        self.waiting = 0
        self._lock = threading.RLock()
        self._residents: weakref.WeakSet[HostedActor] = weakref.WeakSet()

    def make_room_in(self, resident: HostedActor) -> None:
        """Have them make room in an actor that executes tasks."""
        with self._lock:
            self._residents.add(resident)
            for lane in resident.mailbox.lanes.values():
                lane.bystanders = self
            stand_by(self)

    def leave(self, resident: HostedActor) -> None:
        """Forget an actor that has ended; without one, waits are nobody's business here."""
        with self._lock:
            self._residents.discard(resident)
            if not self._residents:
                stand_by(None)

    def begin_wait(self, stir: Callable[[], None], what: object) -> None:
        """See futures.NestedRunner."""
        self.begin_await()

    def end_wait(self) -> None:
        """See futures.NestedRunner."""
        self.end_await()

    def begin_await(self) -> None:
        """See futures.NestedRunner."""
        with self._lock:
            self.waiting += 1
            residents = list(self._residents)
        for resident in residents:
            resident.carry_out(resident.mailbox.look())

    def end_await(self) -> None:
        """See futures.NestedRunner."""
        with self._lock:
            self.waiting -= 1

    def serve(self) -> None:
        """See futures.NestedRunner."""


BYSTANDERS: Final = Bystanders()


def wake_all(todo: Wakeups) -> None:
    """Wake the stations that a step has named."""
    for station in todo.wake:
        station.wake()
