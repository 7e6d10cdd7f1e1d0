"""The registry of a worker: the actors that live here, and the router that puts messages into their mailboxes.

The router runs under the read lock of the connection that has received a message. It decodes the header and queues the call, but
never decodes the pickle or runs a call. ``_lock`` guards the table of actors, and is a leaf.
"""

from __future__ import annotations

import itertools
import os
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from actorrpc import _time
from actorrpc.actors.context import current
from actorrpc.actors.host.actor import HostedActor
from actorrpc.actors.host.carriers import ActorThreads
from actorrpc.actors.host.deadlock_detector import DeadlockDetector
from actorrpc.actors.host.mailbox import Envelope
from actorrpc.actors.spec.actor_spec import HostedActorGoneError
from actorrpc.agent.calls import CALLER_BIT, MAILBOX_BIT
from actorrpc.agent.executor import Deferred
from actorrpc.errors import ProtocolError
from actorrpc.futures import Future, collect_all
from actorrpc.wire.frames import MAIL, RESERVED, Frame, Header, unpack_header

if TYPE_CHECKING:
    from actorrpc.actors.context import Runtime
    from actorrpc.agent.peers import Peer
    from actorrpc.transport.connection import Connection

__all__ = ["ActorRegistry", "HostedActorState", "stop"]

_END_S: Final = 5.0
_AT_LEAST_S: Final = 0.25

_CALLERS: Final = (1 << MAILBOX_BIT - CALLER_BIT) - 1
_HEADERS = 16384
_SHORT = 128  # bytes; longer headers are probably unique, and are not cached
_REMEMBERED = 1000  # ended actors for which the reason of the end is kept


@dataclass(frozen=True, slots=True)
class HostedActorState:
    """The state of an actor, as reported by the worker where it lives."""

    actor_id: int
    instance_id: int
    state: str
    waiting: int
    running: int
    calls: int
    uptime: float


class ActorRegistry:
    """The actors that live in this process. Thread-safe."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._agent = runtime.agent
        self._lock = threading.RLock()
        self._table: dict[int, HostedActor] = {}
        self._ended: dict[int, str] = {}
        self._threads = ActorThreads(runtime.agent)
        self.deadlocks = DeadlockDetector(runtime)
        self._closed = False
        self._headers: dict[bytes, Header] = {}
        # Starts at a random number that is drawn here, not at import: else forks of a process would use the same numbers.
        self.executions = itertools.count(int.from_bytes(os.urandom(5), "little"))
        self._callers = itertools.count()
        self._agent.inbox.mail_router = self
        self._agent.on_peer_end.append(self._peer_ended)

    # -- the router (agent.inbound.MailRouter) ------------------------------------------------------

    def deliver(self, conn: Connection | None, peer: Peer, frame: Frame, whole: bool = True) -> None:
        """See agent.inbound.MailRouter."""
        header = self._headers.get(frame.extra)
        if header is None:
            header = self._new_header(frame)
        entry = Envelope(conn, peer, frame, header)
        if not whole:
            entry.whole = entry.ready = False
        hosted = self._table.get(header["mailbox"])
        if hosted is not None:
            hosted.enqueue(entry)
        else:
            self._create_or_refuse(entry)
        flags = peer.cancelled.get(frame.id)
        if flags is not None:  # the call's cancellation has been received, before the call or just now
            peer.on_cancel(frame.id, flags, self._agent.submit)

    def announce(self, conn: Connection | None, peer: Peer, frame: Frame) -> bool:
        """See agent.inbound.MailRouter."""
        self.deliver(conn, peer, frame, False)
        return frame.id in peer.running

    def complete(self, conn: Connection | None, peer: Peer, frame: Frame) -> None:
        """See agent.inbound.MailRouter."""
        entry = peer.running.get(frame.id)
        if frame.flags & RESERVED:
            frame = frame._replace(flags=frame.flags & ~RESERVED)
            if entry is None:  # the call was cancelled or refused after its place was reserved
                self._agent.submit(partial(self._agent.inbox.discard, conn, frame))
        if type(entry) is Envelope and entry.hosted is not None and not entry.whole:
            entry.header = self._headers.get(frame.extra) or self._new_header(frame)
            entry.hosted.receive_rest(entry, conn, frame)

    def abandon(self, peer: Peer, id: int) -> None:
        """See agent.inbound.MailRouter."""
        entry = peer.running.get(id)
        if type(entry) is Envelope:
            self._agent.submit(entry.cancel)

    def _new_header(self, frame: Frame) -> Header:
        header = unpack_header(frame.extra)
        if not isinstance(header.get("mailbox"), int):
            raise ProtocolError("a message names no actor")
        if len(frame.extra) < _SHORT and not frame.flags & ~MAIL:
            # Most calls of one method have equal headers, which are never changed.
            if len(self._headers) >= _HEADERS:
                self._headers.clear()
            self._headers[frame.extra] = header
        return header

    def _create_or_refuse(self, entry: Envelope) -> None:
        """Handle a message whose actor is not in the table."""
        header = entry.header
        instance_id: int = header["mailbox"]
        hosted: HostedActor | None = None
        if header.get("creates"):
            with self._lock:
                if not self._closed:
                    hosted = self._table[instance_id] = HostedActor(
                        self, self._runtime, instance_id, self._threads
                    )
        if hosted is not None:
            hosted.construct(entry)
        elif entry.whole or entry.reserved:
            error = HostedActorGoneError(instance_id, self._ended.get(instance_id, ""))
            # Register the call as running, so that a worker which leaves the group answers the call before it ends.
            entry.peer.running[entry.id] = entry
            self._agent.submit(partial(self._refuse, entry, error))

    def _refuse(self, entry: Envelope, error: HostedActorGoneError) -> None:
        conn = entry.conn
        try:
            self._agent.executor.refuse(conn, entry.frame, error)
            if conn is not None:
                conn.flush()
        finally:
            entry.peer.running.pop(entry.id, None)

    def new_caller(self) -> int:
        """Return a number for a caller in this process, an actor or a task: calls with equal caller numbers keep their order.

        Code outside of actors and tasks uses the number of the process. So does the first actor of a process that the embedded
        cluster has started, so that the calls of threads that the actor starts keep their order with its own calls.
        """
        number = next(self._callers)
        agent = self._agent
        if number == 0 and self._runtime.spawner is not None and agent.record.rank != 0:
            return agent.next_chain() >> CALLER_BIT
        return (2 * number + 1) & _CALLERS  # numbers of processes are even

    def number_threads(self) -> None:
        """Give each thread without an execution its own caller number, because any task may have started the thread."""
        # A ContextVar: if another thread sends a call later, it does so in the context of the code that made the call.
        caller: ContextVar[int] = ContextVar("actorrpc_caller", default=0)
        numbers = itertools.count()

        def next_chain() -> int:
            number = caller.get()
            if not number:
                number = self.new_caller()
                caller.set(number)
            return number << CALLER_BIT | next(numbers) & ((1 << CALLER_BIT) - 1)

        self._agent.next_chain = next_chain

    # -- the table of actors -------------------------------------------------------------------------------

    def get(self, instance_id: int) -> HostedActor | None:
        """Return the actor with this incarnation number; None if it does not live here."""
        return self._table.get(instance_id)

    def all(self) -> list[HostedActor]:
        """Return the actors that live here."""
        with self._lock:
            return list(self._table.values())

    def forget(self, hosted: HostedActor) -> None:
        """Remove an ended actor, and keep the reason of its end."""
        with self._lock:
            if self._table.pop(hosted.id, None) is not None:
                self._ended[hosted.id] = hosted.why
                while len(self._ended) > _REMEMBERED:
                    self._ended.pop(next(iter(self._ended)))

    def states(self) -> list[HostedActorState]:
        """Return the states of the actors here."""
        found = []
        now = _time.now()
        for hosted in self.all():
            if hosted.spec is None:
                continue
            waiting, running = hosted.counts()
            found.append(
                HostedActorState(
                    hosted.spec.actor_id,
                    hosted.id,
                    hosted.state,
                    waiting,
                    running,
                    hosted.calls,
                    now - hosted.begun,
                )
            )
        return found

    # -- the end -----------------------------------------------------------------------------------

    def _peer_ended(self, peer: Peer) -> None:
        """End the actors whose creator has ended, unless they are detached."""
        key = peer.key
        for hosted in self.all():
            spec = hosted.spec
            if spec is not None and spec.descriptor.supervisor == key and spec.options.lifetime != "detached":
                _ = hosted.stop("now", f"its creator, worker {peer.name!r}, has ended")

    def close(self, graceful: bool, patience: float = _END_S) -> None:
        """End all actors here; wait for their on_stop(): ``patience`` s, bounded to 0.25 to 5 s; 0.25 s if not ``graceful``."""
        with self._lock:
            self._closed = True
        over: list[Future[None]] = [
            hosted.stop("now", f"worker {self._agent.name!r} shut down") for hosted in self.all()
        ]
        if over:
            try:
                collect_all(over).wait(max(_AT_LEAST_S, min(_END_S, patience)) if graceful else _AT_LEAST_S)
            except TimeoutError:
                pass
        self._threads.close()


# -- called by supervisors, on the worker where the actor lives -----------------------------------------


def stop(instance_id: int, how: str, why: str) -> Any:
    """End an actor here. ``how`` and the answer: see :meth:`HostedActor.stop`; None at once if the actor does not live here."""
    found = current()
    hosted: HostedActor | None = found.registry.get(instance_id) if found is not None else None
    if hosted is None:
        return None
    return Deferred(hosted.stop(how, why))
