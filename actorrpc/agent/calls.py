"""Calls: a request to a peer with its answer (:class:`Call`), and the execution of a peer's request here (:class:`Execution`).

A :class:`Call` ends exactly once. The thread that removes it from its peer's ``pending`` table (one atomic step) ends it: because
it has read the reply, or because the deadline has passed, the call is cancelled, or the peer or this agent has ended. The thread
that waits for a call reads the connection itself if no other thread does (:meth:`Call.drive`), and sleeps otherwise.

Two steps decide whether the worker may execute a call. ``Agent._dispatch`` enters the call into ``pending`` together with its
frame, before the first byte can be sent: until then the call has certainly not run, and no other thread can end it. The thread
that ends the call calls :meth:`Call.withdraw` once, which withdraws the frame if that is possible, and returns whether the call
may run.

``CURRENT`` is the execution that the running code belongs to. As it is a ``ContextVar``, coroutines and callbacks that run in a
copy of the context have the same execution. A thread that sets it resets it after the execution.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from threading import get_ident
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from actorrpc import _time
from actorrpc.agent.hooks import NO_NOTES
from actorrpc.errors import CancelledError, DeadlockError, RpcTimeoutError
from actorrpc.flight_recorder import OWN, OWN_MODULES, in_words
from actorrpc.futures import (
    INTERRUPTED,
    QUEUED,
    WAITING,
    Future,
    Progress,
    interruption_point,
    run_queued_callbacks,
)
from actorrpc.serialization.class_cache import empty_before_collection
from actorrpc.transport.signals import checkpoint, uninterruptible
from actorrpc.transport.signals import state as _interrupts
from actorrpc.transport.stream import CLOSED
from actorrpc.wire.frames import CANCEL, LATE, STOP, Header, pack_frame, pack_header

if TYPE_CHECKING:
    from actorrpc.agent.hooks import HookSet
    from actorrpc.agent.peers import Peer
    from actorrpc.agent.threads import Pool
    from actorrpc.agent.timers import Clock
    from actorrpc.transport.connection import Connection
    from actorrpc.wire.frames import Frame

__all__ = ["CALLER_BIT", "CURRENT", "MAILBOX_BIT", "Call", "Execution", "MailHeader", "Nested", "run_within"]

T = TypeVar("T")

INFINITE: Final = float("inf")
MAILBOX_BIT: Final = 63  # set in the number of a chain whose calls descend from a call of an actor
CALLER_BIT: Final = 39  # a chain's bits from here to MAILBOX_BIT name the caller; a caller's calls keep order
_MANY_NESTED: Final = 64  # an execution with more nested calls than this forgets the ended calls


# Marked as uninterruptible here, because the modules of these functions may not import the module of signals.
for _step in (Future.conclude, Future.try_complete, Future.try_fail, Future.follow, empty_before_collection):
    uninterruptible(_step)


class Nested(Protocol):
    """A call that was made in an execution: a :class:`Call`, or a call that waits until it can be sent."""

    @property
    def done(self) -> bool:
        """Whether the call has ended."""

    def cancel(self, stop: bool = True, late: bool = False) -> bool:
        """Cancel the call; see :meth:`Call.cancel`."""


class Execution:
    """A peer's call that is executed here, or waits for its turn. Nested calls inherit its deadline, chain and path.

    Attributes:
        conn: the connection that the answer is sent over; None for a call of this worker to itself.
        peer: the caller's worker.
        id: the number of the call among the calls of that peer.
        deadline: when the call times out, on this process's monotonic clock; infinite without a time-out.
        chain: the number of the chain of nested calls that the call belongs to.
        cancelled: whether the caller has given the call up, so that the nested calls are cancelled.
        nested: the calls that were made during this execution, in order; some of them may have ended.
        late: whether the caller has given the call up because of a time-out. Nested calls then end with a time-out as well,
            because their deadlines are no later. Set before ``cancelled``.
        given_up: one entry for each cancellation of the nested calls: whether to interrupt their code. Each cancellation stores a
            longer tuple. A thread that makes a nested call meanwhile sees another tuple, and cancels the call.
        received_at: when the request was read. ``begun``: when the execution was started; 0.0 before that. ``thread``: the
            identifier of the thread that started the execution.
        header: the fields that came with the request, or ``None``.
        path: the numbers of the executions of actor methods that led to this call, the outermost first; the last number equals
            ``chain``. When a call of an actor begins, its own number is appended. Empty if no actor's method led to the call.
        actor: the called actor, or ``None`` for a plain call.
        what: the function, or the name of the actor's method, for messages.
        deferred: whether the function has returned a future, whose value will be the answer.
        notes: see :class:`~actorrpc.agent.hooks.CallHooks`. ``ending``: the ``on_end`` methods of the hooks that take part in
            this execution; None: the ``on_end`` of the agent's hooks.
        convert: a function that replaces the result before it is packed, or None.
    """

    # Class attributes are the defaults: most calls set few of these, and one object is made for each call.
    begun = 0.0
    thread = 0
    cancelled = False
    late = False
    given_up: tuple[bool, ...] = ()
    header: Header | None = None
    path: tuple[int, ...] = ()
    actor: Any = None
    what: Any = None
    deferred = False
    notes = NO_NOTES
    ending: tuple[Callable[..., None], ...] | None = None
    convert: Callable[[Any], Any] | None = None

    def __init__(
        self,
        conn: Connection | None,
        peer: Peer,
        id: int,
        deadline: float,
        chain: int,
        received_at: float = 0.0,
    ) -> None:
        self.conn = conn
        self.peer = peer
        self.id = id
        self.deadline = deadline
        self.chain = chain
        self.begun = _time.now()
        self.received_at = received_at or self.begun
        self.thread = get_ident()
        self.nested: dict[Nested, None] = {}
        if chain >> MAILBOX_BIT:
            self.path = (chain,)

    @property
    def fields(self) -> Mapping[str, Any]:
        """The header fields of the request."""
        return cast("Mapping[str, Any]", self.header or {})

    @property
    def label(self) -> str:
        """The name of the function or method, for messages."""
        name = self.what if isinstance(self.what, str) else getattr(self.what, "__qualname__", None)
        if name is None:
            return "the call"
        spec = getattr(self.actor, "spec", None)
        return str(name) if spec is None else f"{spec.info.prefix}{str(name).rpartition('<locals>.')[2]}"

    def cancel(self, stop: bool = False, late: bool = False) -> None:
        """Cancel the execution for its caller; see :meth:`give_up`. Runs on a pool thread."""
        self.give_up(stop, late)

    def give_up(self, stop: bool = False, late: bool = False) -> None:
        """Record that the caller has given the call up, and cancel the nested calls.

        Args:
            stop: whether the caller has cancelled the call, so that running code is interrupted if that is possible; False: the
                call has timed out, or the caller's worker has ended.
            late: whether the call has timed out.
        """
        self.late = self.late or late
        self.cancelled = True
        self.give_up_nested(stop)

    def give_up_nested(self, stop: bool) -> None:
        """Cancel the nested calls. The execution itself continues, and may make other calls."""
        # Set before ``nested`` is read. If another thread is making a nested call, either this thread finds the call in
        # ``nested``, or that thread finds that ``given_up`` has changed.
        self.given_up = (*self.given_up, stop)
        nested = self.nested
        while nested:
            try:
                call, _ = nested.popitem()
            except KeyError:
                return
            call.cancel(stop, self.late)

    def given_up_error(self) -> CancelledError | RpcTimeoutError:
        """Return the error of a nested call that is made after the caller has given up this execution."""
        if self.late:
            return RpcTimeoutError("the call that this one is nested in has timed out", maybe_executed=False)
        return CancelledError("the call that this one is nested in was cancelled", maybe_executed=False)

    def add_nested(self, call: Nested) -> None:
        """Record a nested call, which is given up together with this one. Any thread in this execution's context may call it."""
        nested = self.nested
        if len(nested) > _MANY_NESTED:
            for each in list(nested):
                if each.done:
                    nested.pop(each, None)
        nested[call] = None


class _CallingAgent(Protocol):
    """The parts of an agent that a call needs."""

    @property
    def name(self) -> str: ...

    pool: Pool
    clock: Clock
    hooks: HookSet
    scheduler: Any
    executor: Any

    def next_chain(self) -> int: ...


CURRENT: Final[ContextVar[Execution | None]] = ContextVar("actorrpc_current_call", default=None)


def run_within(execution: Execution, function: Callable[..., T], *args: Any) -> T:
    """Call ``function(*args)`` in a copy of the caller's context, in which ``CURRENT`` is ``execution``.

    The caller's context keeps its own ``CURRENT``, even if a signal handler raises between any two steps.
    """

    def run() -> T:
        CURRENT.set(execution)
        return function(*args)

    return copy_context().run(run)


class MailHeader:
    """The header of all mail of one kind, which is packed once. Immutable.

    Args:
        interrupts: whether the actor interrupts, if possible, the method of a call whose deadline has passed.
        late: what the actor does with a call whose deadline has passed, for the text of the error.
    """

    __slots__ = ("header", "interrupts", "late", "packed")

    def __init__(self, header: Header, *, interrupts: bool = False, late: str = "") -> None:
        self.header = header
        self.interrupts = interrupts
        self.late = late
        self.packed: bytes = pack_header(header)


class Call(Progress):
    """A call to a peer. At most one thread waits for it, or it completes a future.

    Args:
        function: names the call if there is no label.
        timeout: in seconds; 0: no limit except the deadline of the enclosing call.
        future: completed with the outcome; None if the caller is :meth:`Agent.call_sync`.
        keep: an object that is kept alive until the call ends.
        mail: the header of a request to a mailbox of the peer; the body of such a request is the arguments without the function.
        awaits: the pending futures of arguments; while there are any, the call only reserves its place in the mailbox.

    Attributes:
        id: the number of the call among the calls to the peer; 0 until its first message is made.
        made: the time at which the call was made. ``thread``: the identifier of the thread that made it.
        frame: the request, while it is in the outbox. ``sent``: whether it was sent.
        outcome: the reply or the error with which the call has ended; None if the call completes a future.
        polling: the connection that the waiting thread polls. ``lock``: the lock on which the thread sleeps while another thread
            reads the connection. ``awake``: whether the waiting thread was woken.
        stopping: whether the caller has called :meth:`stop`, and waits until the worker has ended the call.
        introduces: a number and a function, if the request tells the peer this number of the function; once the call is
            answered, later calls send the number alone. See ``numbered_functions``.
        size: bytes of body and buffers; 0 if there are no buffers and the body is no longer than one chunk.
        fields, notes: see :class:`~actorrpc.agent.hooks.CallHooks`; ``fields`` does not exist before ``on_call``.
        ending: the ``on_answer`` methods of the hooks that take part in the call.
    """

    __slots__ = (
        "agent",
        "awaits",
        "awake",
        "chain",
        "conn",
        "deadline",
        "done",
        "ending",
        "fields",
        "frame",
        "future",
        "id",
        "introduces",
        "keep",
        "label",
        "lock",
        "made",
        "mail",
        "notes",
        "outcome",
        "peer",
        "polling",
        "sent",
        "size",
        "stopping",
        "thread",
    )

    def __init__(
        self,
        agent: _CallingAgent,
        peer: Peer,
        function: Any,
        timeout: float,
        future: Future[Any] | None = None,
        label: str | None = None,
        keep: Any = None,
        mail: MailHeader | None = None,
        awaits: Sequence[Future[Any]] = (),
    ) -> None:
        current, made = CURRENT.get(), _time.now()
        deadline = made + timeout if timeout else INFINITE
        if current is None:
            self.chain = agent.next_chain()
        else:
            deadline, self.chain = min(deadline, current.deadline), current.chain
        if label is None:
            label = getattr(function, "__qualname__", None) or repr(function)
            if type(function) is FunctionType and OWN_MODULES[function.__module__]:
                label = f"{OWN}{label}"
        self.made = made
        self.thread = get_ident()
        self.agent = agent
        self.peer = peer
        self.id = 0
        self.label = label
        self.deadline = deadline
        self.future = future
        self.awaits = awaits
        self.conn: Connection | None = None
        self.frame = b""
        self.sent = False
        self.done = False
        self.polling: Connection | None = None
        self.awake = False
        self.stopping = False
        self.mail = mail
        self.lock: threading.Lock | None = None
        self.outcome: Frame | BaseException | None = None
        self.size = 0
        self.keep = keep
        self.introduces: Any = None
        self.ending = agent.hooks.on_answer
        self.notes = NO_NOTES

    fields: dict[str, Any]

    def __str__(self) -> str:
        return f"the call of {in_words(self.label)} on {self.peer.name!r}"

    # -- ending (by the thread that removed the call from ``pending``) -------------------------------------

    def finish(self, outcome: Frame | BaseException | None) -> None:
        """Record that the call has ended, and wake the waiting thread. Runs no user code."""
        self.outcome = outcome
        self.done = True
        self.wake()

    def fail(self, error: BaseException, submit: Any = None) -> None:
        """End the call with an error, without a reply."""
        self.peer.window.release(self)
        for ended in self.ending:
            ended(self, error)
        future = self.future
        callbacks: list[Any] = []
        if future is not None:
            future.try_fail(error, submit or callbacks.append)
        # If the call has a future, the error is not stored in the call as well: an execution refers to its nested calls, and the
        # frames of the error's traceback may refer to the execution, which would be a reference cycle.
        self.finish(error if future is None else None)
        self.future = None  # the future refers to the call, so this breaks a reference cycle
        self.keep = None
        for run in callbacks:
            run()

    # -- waiting -----------------------------------------------------------------------------------

    def drive(self, deadline: float | None) -> None:
        """Wait until the call has ended or the deadline has passed; if the call's own deadline has passed, end the call.

        The calling thread reads the connection itself, until it has read a request of the peer; then pool threads read.
        """
        agent, conn = self.agent, self.conn
        if agent.scheduler.corked:
            agent.scheduler.flush()
        until = self.deadline if deadline is None or deadline > self.deadline else deadline
        reads = True
        runner = WAITING.runner
        if runner is not None:
            if self.done:
                return
            runner.begin_wait(self.wake, self)
        try:
            while True:
                # Reset before the tests below: another thread sets the tested values first, and then ``awake``.
                self.awake = False
                if self.done:
                    return
                if QUEUED:
                    run_queued_callbacks()
                if runner is not None:
                    if INTERRUPTED:
                        interruption_point()
                    if runner.work:
                        if conn is not None and conn.outbox:
                            conn.flush()  # the outbox may hold this call's request
                        runner.serve()
                        continue
                if agent.pool.queue and agent.pool.is_member():
                    agent.pool.wake()  # another thread has to execute the queued tasks, because this one waits
                foreign = None
                if reads and conn is not None:
                    if conn.unattended and self.future is not None:
                        conn.unattended -= 1
                    foreign = conn.reading(self, conn.spinning, until)
                    if conn.outbox:
                        conn.flush()
                if _interrupts.pending:
                    checkpoint()
                if WAITING.casts:
                    agent.executor.run_casts(WAITING.casts)
                if self.done:
                    return
                if _time.now() >= until:
                    break
                if foreign is None:
                    if self._park(until):
                        return
                elif foreign:
                    # The peer has sent requests. From here on the pool reads, so that requests do not wait for this thread.
                    reads = False
        finally:
            if runner is not None:
                runner.end_wait()
        # The debugger may have moved the deadline meanwhile.
        if not self.done and self.deadline <= _time.now():
            self.expire()

    def wake(self) -> None:
        """Wake the thread that waits, if there is one: the call has ended, or the thread has other work."""
        self.awake = True
        polling = self.polling
        if polling is not None:
            polling.wake()
        lock = self.lock
        if lock is not None:
            try:
                lock.release()
            except RuntimeError:  # the thread is awake
                pass

    def _park(self, until: float) -> bool:
        """Sleep until woken; return whether the future, if there is one, is complete.

        Raises:
            DeadlockError: this thread is reading the connection, and waits in a finaliser that the garbage collector has run.
        """
        conn = self.conn
        if conn is not None and conn.read_by == get_ident():
            raise DeadlockError(
                f"{self} cannot be waited for here: a finaliser waits, on the very thread that was about to read the answer. "
                "A __del__ or a weakref's callback may make calls, but not wait for them",
                maybe_executed=self.handed_over,
                worker=self.peer.name,
            )
        future = self.future
        if future is not None:
            # Several threads may wait for one future, so each thread sleeps on its own lock in the future. The future is complete
            # a little before ``done`` is set. Polling ``done`` here would starve the thread that sets it.
            return future.park(_time.now() + _time.SLICE_S if until == INFINITE else until)
        lock = self.lock
        if lock is None:
            lock = threading.Lock()
            lock.acquire()
            self.lock = lock
        if not self.awake:
            _time.doze(lock, until)
        return False

    def flush(self) -> None:
        """Send all corked frames, and let the pool read the reply, because a thread is about to wait without reading."""
        self.agent.scheduler.flush()
        self.listen()

    def listen(self) -> None:
        """Let the pool read the reply."""
        conn = self.conn
        if conn is not None and conn.expecting:
            conn.listen()

    # -- giving up ---------------------------------------------------------------------------------

    def expire(self) -> bool:
        """End the call because its deadline has passed; return False if another thread has ended it meanwhile."""
        if self.cancel(stop=self.mail is not None and self.mail.interrupts, late=True):
            return True
        while not self.done:  # the other thread takes microseconds to end the call
            _time.pause(0.0005)
        return False

    def withdraw(self) -> bool:
        """Withdraw the request if it was not sent and its frame is the whole message; return whether the worker may run it.

        Called once, by the thread that ends the call: the result is final.
        """
        conn = self.conn
        # Read before ``sent``: once the connection is closed, a frame that was not sent is never sent.
        closed = conn is not None and conn.state is CLOSED
        frame = self.frame
        # A frame without flags and header has no shared memory, no references and no chunks. The writer sets ``sent`` before it
        # reads the frame, so either ``sent`` is seen here, or the writer finds the frame empty.
        if frame and not self.sent and not frame[9] and frame[4:8] == b"\0\0\0\0":
            self.frame = b""
        return self.sent or (bool(self.frame) and not closed)

    @property
    def handed_over(self) -> bool:
        """Whether the call has been sent, or is in the outbox."""
        return self.sent or bool(self.frame)

    def _timed_out(self, reached: bool) -> RpcTimeoutError:
        """Return the error of this call's time-out; ``reached``: the worker may run the call."""
        ran = "it was sent and may have run" if reached else "it was not sent"
        if reached and self.mail is not None and self.mail.late:
            ran = f"{ran}: {self.mail.late}"
        bound = f"{(self.deadline - self.made) * 1e3:.0f} ms"
        return RpcTimeoutError(
            f"{self} timed out: RPC ran for more than set timeout ({bound}) and will now be marked "
            f"with an error; {ran}. Give a longer timeout=, or see what {self.peer.name!r} is doing.",
            maybe_executed=reached,
            worker=self.peer.name,
        )

    @uninterruptible
    def cancel(self, stop: bool = True, late: bool = False) -> bool:
        """End the call with CancelledError and tell the worker; False if the call had ended before.

        Args:
            stop: whether the worker interrupts the code that it runs for the call, if that is possible.
            late: whether the deadline of this call or of the enclosing call has passed. This call then ends with RpcTimeoutError,
                unless :meth:`stop` was called before.
        """
        if self.peer.pending.pop(self.id, None) is None:
            return False
        reached = self.withdraw()
        error = self._timed_out(reached) if late and not self.stopping else self.was_cancelled(reached)
        self.fail(error, self.agent.pool.submit)
        if reached or self.awaits:
            self._tell_cancelled(stop, late)
        return True

    def give_back_place(self) -> bool:
        """End a call with a reserved place, whose arguments are not sent; False if it had ended. Its future stays pending."""
        if self.peer.pending.pop(self.id, None) is None:
            return False
        self.finish(None)
        self.future = self.keep = None
        self._tell_cancelled(stop=False)
        return True

    def was_cancelled(self, reached: bool, remote: BaseException | None = None) -> CancelledError:
        """Return the error of this call, which its caller has cancelled.

        Args:
            reached: whether the worker may have run the call.
            remote: the error with which the worker has answered.
        """
        said = "" if remote is None else f": {remote}"
        return CancelledError(
            f"{self} was cancelled by its caller{said}",
            maybe_executed=reached,
            worker=self.peer.name,
        )

    @uninterruptible
    def stop(self, patience: float) -> bool:
        """Let the worker cancel the call, which ends with the worker's answer; False if it had ended before. Does not wait.

        Args:
            patience: how many seconds the worker's answer may take; then the call ends as :meth:`cancel` ends it. A call
                that was not sent ends in this way at once.
        """
        if not self.sent:
            return self.cancel()
        if self.peer.pending.get(self.id) is not self:
            return False
        if not self.stopping:
            self.stopping = True
            id, pending, submit = self.id, self.peer.pending, self.agent.pool.submit

            def give_up() -> None:  # has no reference to the call: the timer would keep the arguments alive
                call = pending.get(id)
                if call is not None:
                    submit(call.cancel)

            self.agent.clock.after(patience, give_up)
            self._tell_cancelled(stop=True)
        return True

    def _tell_cancelled(self, stop: bool, late: bool = False) -> None:
        """Send CANCEL to the worker, which may have begun the call."""
        conn, flags = self.conn, STOP * stop | LATE * late
        if conn is not None:
            if conn.state is not CLOSED:
                # CANCEL is put into the outbox, so that it is sent after the request.
                conn.outbox.append(pack_frame(CANCEL, self.id, flags=flags))
                self.agent.scheduler.cork(conn)
        elif self.peer.is_self:
            self.peer.on_cancel(self.id, flags, self.agent.pool.submit)
