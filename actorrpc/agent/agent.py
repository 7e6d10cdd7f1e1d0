"""The agent: one per process, it wires connections, threads, clock and calls together.

What it knows of a call is bytes, deadlines and who is waiting. Everything that rides along (RRefs, autograd
contexts, traces, actors) is put in from above: ``hooks`` take part in calls, ``on_notice``
handles one-way messages, ``on_peer_end`` is told of deaths.

Threads: any thread may make calls. ``control`` runs under a connection's read lock, on whichever thread reads; it is
short and runs no user code. ``deliver`` runs after the lock was released. No lock of this module is held while
calling out; ``_lock`` guards who closes only.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import FrameType, FunctionType
from typing import Any, Final, NoReturn

from actorrpc import _stacks, _time
from actorrpc._exception_text import report
from actorrpc._limits import memory_limit
from actorrpc.agent import outbound
from actorrpc.agent.calls import CURRENT, Call, Execution
from actorrpc.agent.connector import Connector
from actorrpc.agent.context import current_worker
from actorrpc.agent.executor import Executor
from actorrpc.agent.hooks import (
    HookSet,
    MessageReferences,
    OutgoingMessage,
    Recorder,
    profiler,
    recorded,
    thread_is_profiled,
)
from actorrpc.agent.inbound import Inbox
from actorrpc.agent.mail import MailHeader, MailRouter, NullRouter
from actorrpc.agent.peers import MAX_PENDING, SETTLED_S, MessageContext, Peer, PeerTable
from actorrpc.agent.scheduler import Scheduler
from actorrpc.agent.threads import Pool
from actorrpc.agent.timers import Clock
from actorrpc.config import Settings
from actorrpc.errors import (
    LostArgumentError,
    NotInitializedError,
    PeerDiedError,
    ProtocolError,
    RpcError,
    ShutdownError,
)
from actorrpc.flight_recorder import OWN, OWN_MODULES, FlightRecorder
from actorrpc.futures import QUEUED, Future, interruption_point, run_queued_callbacks
from actorrpc.serialization import by_value, codec
from actorrpc.transport import signals
from actorrpc.transport.buffers import BufferPool
from actorrpc.transport.connection import Connection
from actorrpc.transport.connection_state import CLOSED, SUSPENDED, Goodbye
from actorrpc.transport.failure_detector import holds_back
from actorrpc.transport.object_accounts import ObjectAccounts
from actorrpc.transport.object_store import ObjectStore
from actorrpc.transport.signals import checkpoint, uninterruptible
from actorrpc.transport.signals import state as _interrupts
from actorrpc.wire import frames, keys
from actorrpc.wire.frames import Frame, pack_frame
from actorrpc.wire.headers import Header, pack_header
from actorrpc.wire.identity import WorkerRecord
from actorrpc.wire.keys import Key

__all__ = ["Agent"]

_log = logging.getLogger("actorrpc")
INFINITE: Final = float("inf")
_ANSWERS_S: Final = (
    1.0  # how long the end of a peer waits for the answers that have come from it to be opened
)
_GOODBYE_S: Final = 0.5  # how long goodbyes may take to be handed over, unless somebody grants more
_modules: Final = sys.modules
_RETRY_S: Final = 1.0  # a notice that must arrive is sent again after this time, then 1.5 times that, ...
_ATTEMPTS: Final = 20


def _place(frame: FrameType | None) -> str:
    """Say where a thread is: its innermost functions."""
    found: list[str] = []
    while frame is not None and len(found) < 3:
        code = frame.f_code
        found.append(f"{code.co_name} at {os.path.basename(code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


class Agent:
    """This worker's end of everything. Thread-safe.

    Args:
        record: who this worker is and where it can be reached.
        settings: limits and switches.
        key: the group's key.
        resolve: gives the record of a worker by name or rank, or None.
        members: gives all records that are known.
    """

    def __init__(
        self,
        record: WorkerRecord,
        *,
        settings: Settings,
        key: Key | None,
        resolve: Callable[[str | int], WorkerRecord | None],
        members: Callable[[], list[WorkerRecord]],
    ) -> None:
        self.record = record
        self.name = record.name
        self.settings = settings
        self.pid = os.getpid()
        self.clock = Clock()
        self.executor = Executor(self)
        self.pool = Pool(
            clock=self.clock,
            execute=self.executor.run,
            refuse=self.executor.refuse_stuck,
            max_threads=settings.max_threads,
            starvation_s=settings.starvation_s,
        )
        self.buffers = BufferPool(settings.recycle_bytes, excess=self._let_memory_go)
        self.objects = self._object_store(key)
        self.recorder: Recorder = Recorder()
        self.flights = FlightRecorder() if settings.recorder else None
        self.hooks = HookSet(self.flights)
        self.on_notice: dict[str, Callable[[Peer, bytes], None]] = {}
        self.held: set[int] = set()  # threads whose calls a debugger holds
        self.on_failure: Callable[[Execution, Exception], None] | None = None
        self.on_peer_end: list[Callable[[Peer], None]] = []
        self.post: MailRouter = NullRouter(self.name, self.pool.submit, self.executor.refuse)
        self.references = MessageReferences()
        self._closing = False
        self.closed_down = False
        #: this process is a fork of the one that the agent belongs to
        self.abandoned = False
        #: when those who end gracefully are to be done, by ``_time.now()``; the thread that ends all of it says so
        self.leave_by = float("inf")
        self.inbox = Inbox(self)
        self.connector = Connector(self, self.inbox, key)
        self.scheduler = Scheduler(self)
        # Straight to where they live: these are on the path of every call.
        self.submit: Callable[[Callable[[], Any]], None] = self.pool.submit
        self.cork = self.scheduler.cork
        self.flush = self.scheduler.flush
        self.corked = self.scheduler.corked
        self.run_posts = self.executor.run_posts
        self.members = members
        self._lock = _time.Lock()
        self.peer_table = PeerTable(
            record,
            window=settings.window,
            resolve=resolve,
            members=members,
            replaced=self._replaced,
        )
        self.peer = self.peer_table.peer
        self.peers = self.peer_table.peers
        #: numbers what is called outside of executions; from ``CALLER_BIT`` on it says by whom
        self.next_chain: Callable[[], int] = itertools.count((record.rank & 0xFFFF) << 48 | 1).__next__
        self.self_peer = self.peer_table.own
        codec.restrict(settings.data_only)

    def start(self, listeners: list[socket.socket]) -> None:
        """Start the threads, and serve these listening sockets."""
        # First: from here on, no signal handler can come while a thread is half started.
        signals.install(self._put_off)
        self._start(listeners)

    def _put_off(self) -> None:
        self.clock.call_soon(signals.ring)

    @uninterruptible
    def _start(self, listeners: list[socket.socket]) -> None:
        self.clock.start()
        self.pool.start(3)
        self.connector.admission.listen(listeners)

    # -- calling -----------------------------------------------------------------------------------------

    def encode(self, obj: Any, message: MessageContext, *, answer: bool = False) -> codec.Encoded | bytes:
        """Pack an object for the message's peer; an answer's tensors arrive where the peer's device map says."""
        peer = message.peer
        return codec.encode_body(
            obj,
            peer.same_main,
            peer.known,
            peer.answer_map if answer else peer.device_map,
            message,
            bool(self.recorder.live) and not answer,
        )

    def call(
        self,
        peer: Peer,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        future: Future[Any] | None = None,
        keep: Any = None,
        label: str | None = None,
        mail: MailHeader | None = None,
        header: Header | None = None,
        awaits: Sequence[Future[Any]] = (),
        place: Call | None = None,
    ) -> Call:
        """Make a call; it is on its way, or in the outbox, when this returns.

        Args:
            header: fields that are to travel along.
            mail: names a mailbox over there; what travels then is ``(args, kwargs)`` alone, ``function`` is not used.
            timeout: seconds; 0 means no bound but that of the call that this one is nested in.
            future: completed with the outcome; without one, the caller is :meth:`ask`.
            keep: kept alive until the call is over.
            awaits: futures of arguments. Mail then only reserves its place in the mailbox, and the arguments are not used.
            place: the call that has reserved the place of this mail; its deadline and its future stay.

        Raises:
            SerializationError, LimitError: before anything is sent.
            CancelledError: the call in ``place`` is over, or the call that this one is nested in was cancelled.
            RpcTimeoutError: the time of the call that this one is nested in is over.
            PeerDiedError, BackpressureError, ShutdownError: nothing was executed. It is a LostArgumentError where not the
                peer has died, but the worker that a reference among the arguments leads to.
        """
        if self.closed_down:
            raise self.shut_down_error()
        current = CURRENT.get()
        made = _time.now()
        deadline = made + timeout if timeout else INFINITE
        if current is not None:
            deadline = min(deadline, current.deadline)
            chain, given_up = current.chain, current.given_up
            if current.cancelled:
                interruption_point()
                raise current.given_up_error()
        else:
            chain = self.next_chain()
        if label is None:
            label = getattr(function, "__qualname__", None) or repr(function)
            if type(function) is FunctionType and OWN_MODULES[function.__module__]:
                label = f"{OWN}{label}"
        if peer.state != "alive":
            peer.check_alive(f"cannot call {label}")
        try:
            message = peer.contexts.pop()
        except IndexError:
            message = MessageContext(peer)
            message.held = ()
        encoded: codec.Encoded | bytes
        hooks = self.hooks
        if place is not None:
            call = place
        else:
            if (
                current is None
                and (peer.window.charged or len(peer.pending) >= MAX_PENDING)
                and peer.window.full
            ):
                self.flush()
                peer.window.wait_for_room(deadline, f"the call of {label}")
            call = Call(self, peer, next(peer.ids), label, deadline, timeout, chain, future, made)
            call.awaits = awaits
        call.mail = mail
        if current is not None and len(current.path) > 1:
            header = {} if header is None else header
            header["path"] = current.path[:-1]
        try:
            is_profiled = mail is None and (profiler._is_profiler_enabled or thread_is_profiled())
            if (hooks.on_call or is_profiled) and not awaits:
                header = hooks.begin_call(call, function, args, header, is_profiled)
            sent = function
            if mail is None and type(function) is FunctionType and not by_value.modules:
                sent = peer.functions.numbers.get(function)
                if (
                    sent is None
                    or getattr(_modules.get(function.__module__), function.__name__, None) is not function
                ):
                    sent = peer.functions.introduce(function, peer.same_main)
            try:
                encoded = (
                    b""
                    if awaits
                    else codec.encode_body(
                        (sent, args, kwargs) if mail is None else (args, kwargs),
                        peer.same_main,
                        peer.known,
                        peer.device_map,
                        message,
                        bool(self.recorder.live),
                    )
                )
            except PeerDiedError as error:
                raise LostArgumentError(
                    f"{label} was not called, because an argument cannot be sent: {error}",
                    maybe_executed=False,
                    worker=error.worker,
                ) from error
            if (self.recorder.live and not awaits) or (not isinstance(encoded, bytes) and encoded.grad):
                header = recorded(self.recorder, header, encoded, peer)
            if message.sent or message.objects:
                header = self.announce(message, header)
            conn = peer.conn
            if (conn is None or conn.state is CLOSED) and not peer.is_self:
                self.connector.connect(peer, deadline, label)
            call.keep = (keep, message.held) if message.held else keep
            if type(sent) is tuple:
                call.introduces = sent[0], function
            if future is not None:
                future.source = call
                future.label = call  # put into words only when somebody asks
            if current is not None:
                current.add_nested(call)
            if hooks.messages and not awaits:
                request = OutgoingMessage(
                    frames.REQUEST,
                    peer,
                    call.id,
                    encoded,
                    header,
                    call=call,
                    function=function,
                    args=args,
                    mail=mail,
                    name=label,
                    chain=chain,
                    flags=0 if mail is None else frames.MAIL,
                    context=message,
                )
                hooks.send(request, partial(self._dispatch, call, encoded, header, mail))
            else:
                self._dispatch(call, encoded, header, mail)
                if not (message.sent or message.objects or message.held):
                    peer.contexts.append(message)
        except BaseException as error:
            if call.handed_over:
                call.cancel()  # a signal handler has raised, between chunks or since
            else:
                if call is not place:
                    peer.pending.pop(call.id, None)
                    peer.window.release(call)
                if message.sent:
                    self.references.roll_back(message)
                if not call.done:
                    # The flight recorder, which is first, has no records of calls that were not sent.
                    for ended in call.ending[len(hooks.recorded) :]:
                        ended(call, error)
            raise
        if current is not None and current.given_up is not given_up:
            call.cancel(current.given_up[-1], current.late)  # while it was being made, nobody could cancel it
        return call

    def ask(
        self,
        peer: Peer,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        keep: Any = None,
        label: str | None = None,
    ) -> Any:
        """Make a call as :meth:`call` does, and return its value or raise its error."""
        if QUEUED:
            run_queued_callbacks()
        call: Call | None = None
        try:
            call = self.call(peer, function, args, kwargs, timeout, None, keep, label)
            while not call.done:
                call.drive(None)
        except BaseException as error:
            if call is not None:
                self._give_up(call, error)  # a signal handler has raised
            raise
        if call.error is not None:
            try:
                raise call.error
            finally:
                call.error = None
        assert call.reply is not None
        try:
            value = outbound.opened(self, call.conn, call.reply, peer)
        except BaseException as error:
            for ended in call.ending:
                ended(call, error)
            raise
        for ended in call.ending:
            ended(call, None)
        call.reply = None  # the execution that this call is nested in keeps the call
        if _interrupts.pending:
            checkpoint()
        return value

    def cast(
        self, peer: Peer, function: Any, args: tuple[Any, ...], label: str, *, record: bool = True
    ) -> None:
        """Have a worker call ``function(*args)`` some time; it is on its way when this returns.

        There is no answer, which would cost the worker half as much as the request: this is for protocols that hear of their
        failures in another way. The function runs on a pool thread, in no order with calls; what it raises is logged there.

        Args:
            record: show the tensors to the agent's recorder.

        Raises:
            SerializationError, LimitError: it cannot be sent.
            PeerDiedError, ShutdownError: it was not sent, or not all of it.
        """
        if self.closed_down:
            raise self.shut_down_error()
        if peer.state != "alive":
            peer.check_alive(f"cannot call {label}")
        current = CURRENT.get()
        message = MessageContext(peer)
        header: Header | None = None
        if current is not None and len(current.path) > 1:
            header = {"path": current.path[:-1]}
        try:
            encoded = self.encode((peer.functions.sent(function), args, {}), message)
            if record and (self.recorder.live or (not isinstance(encoded, bytes) and encoded.grad)):
                header = recorded(self.recorder, header, encoded, peer)
            if message.sent or message.objects:
                header = self.announce(message, header)
            id, chain = next(peer.ids), 0 if current is None else current.chain
            if not self.hooks.messages:
                self._send_cast(peer, id, encoded, header, chain, label)
                return
            cast = OutgoingMessage(
                frames.REQUEST,
                peer,
                id,
                encoded,
                header,
                function=function,
                args=args,
                name=label,
                chain=chain,
                flags=frames.POST,
                context=message,
            )
            self.hooks.send(cast, partial(self._send_cast, peer, id, encoded, header, chain, label))
        except BaseException:
            if message.sent:
                self.references.roll_back(message)
            raise

    def _send_cast(
        self,
        peer: Peer,
        id: int,
        encoded: codec.Encoded | bytes,
        header: Header | None,
        chain: int,
        label: str,
    ) -> None:
        if peer.is_self:
            self.loop_back(frames.REQUEST, id, encoded, header, INFINITE, chain, frames.POST)
            return
        conn = peer.conn
        if conn is None or conn.state is CLOSED:
            conn = self.connector.connect(peer, INFINITE, label)
        outbound.send(self, conn, frames.REQUEST, id, encoded, header, chain=chain, flags=frames.POST)
        conn.flush()

    @uninterruptible
    def _give_up(self, call: Call, error: BaseException) -> None:
        """End a call of :meth:`ask`, which does not wait for its end any longer.

        The worker is told; where its reply has come, what that holds goes back.
        """
        if call.cancel():
            return
        while not call.done:  # by a thread that is ending it right now
            _time.pause(0.0005)
        if call.reply is not None:
            for ended in call.ending:
                ended(call, error)
            self.inbox.discard(call.conn, call.reply)

    @uninterruptible
    def _dispatch(
        self,
        call: Call,
        encoded: codec.Encoded | bytes,
        header: Header | None,
        mail: MailHeader | None,
    ) -> None:
        peer = call.peer
        extra, flags = b"", 0
        if mail is not None:
            flags = frames.MAIL | frames.RESERVED if call.awaits else frames.MAIL
            if header is None:
                header, extra = mail.header, mail.packed
            else:
                header.update(mail.header)
        if peer.is_self:
            call.sent = encoded != b""
            if call.awaits and encoded:
                self._use_place(call)
            else:
                peer.pending[call.id] = call
            self.scheduler.watch(call)
            if self.closed_down:
                raise self._shut_down(call)
            self.loop_back(frames.REQUEST, call.id, encoded, header, call.deadline, call.chain, flags)
            return
        conn = (
            call.conn or peer.conn
        )  # the message uses the connection of its reservation, so that it arrives later
        if conn is None or conn.state is CLOSED:
            if self.closed_down:
                raise self._shut_down(call)
            raise peer.died(f"cannot call {call.label}", maybe_executed=False)
        call.conn = conn
        # Send the message of a reserved call now: the thread that completed the argument may not flush soon.
        idle = not peer.pending or (bool(call.awaits) and encoded != b"")
        remaining = call.deadline - _time.now() if call.deadline != INFINITE else INFINITE
        packed = outbound.pack(
            self,
            conn,
            frames.REQUEST,
            call.id,
            encoded,
            header,
            extra,
            remaining,
            call.chain,
            flags,
            call.deadline,
        )
        rest = None if isinstance(packed, bytes) else packed
        frame = call.frame = packed if isinstance(packed, bytes) else packed.frame
        # From here on the worker may execute the call, and other threads may end it. A thread that ends it finds its frame:
        # it takes the frame back, or it tells the worker and the caller that the call may run.
        if call.awaits and encoded:
            self._use_place(call)
        else:
            peer.pending[call.id] = call
        if conn.state is CLOSED or peer.state != "alive":
            # The thread that ends the peer, or this agent, may have ended the pending calls before this call was entered.
            # The outbox of a closed connection is never sent.
            call.frame = b""
            peer.check_alive(f"cannot call {call.label}")
            if self.closed_down:
                raise self._shut_down(call)
        if rest is not None and rest.size:
            call.size = rest.size
            if rest.size >= outbound.CHARGED:
                peer.window.charge(call, rest.size)
        if encoded:
            conn.outbox.append(call)
        else:
            conn.outbox.append(frame)
            call.frame = b""  # only the reservation is in the outbox: the call has not been sent
        if rest is not None and rest.buffers and not outbound.send_buffers(self, conn, rest, call.deadline):
            if conn.state is not CLOSED:  # the end of the connection ends the call
                call.expire()
            return
        if call.future is not None:  # without one, the thread that waits for it sends it
            settings = self.settings
            if (
                idle
                or len(frame) * settings.cork_frames > settings.cork_bytes
                or len(conn.outbox) >= settings.cork_frames
            ):
                if idle and not call.future.callbacks and conn.expect():
                    scheduler = self.scheduler
                    scheduler.expecting[conn] = None
                    if not scheduler.expected.active:
                        scheduler.expected.poke()
                conn.flush()
            elif conn not in self.corked:
                self.cork(conn)
        if (call.future is not None and call.deadline < peer.scan_at) or not self.scheduler.pulse.active:
            self.scheduler.watch(call)

    @staticmethod
    def _use_place(call: Call) -> None:
        """Record that the message of a call follows the reservation of its place.

        A thread that ends the call takes it out of ``pending``, and then gives the place back if ``awaits`` is not empty.
        Therefore ``awaits`` stays as it is where the message is not sent.

        Raises:
            CancelledError: another thread has ended the call.
        """
        if call.id not in call.peer.pending:
            call.frame, call.sent = b"", False
            raise call.was_cancelled(False)
        call.awaits = ()

    def loop_back(
        self,
        kind: int,
        id: int,
        encoded: codec.Encoded | bytes,
        header: Header | None,
        deadline: float,
        chain: int,
        flags: int = 0,
    ) -> None:
        """Deliver a message of this worker to itself. Memory is copied, as it would be on the way to another."""
        peer = self.self_peer
        buffers: list[memoryview] = []
        if isinstance(encoded, bytes):
            body = encoded
        else:
            body = encoded.body
            for digest, definition in encoded.definitions.items():
                peer.definitions.add(digest, definition)
                peer.known.note(digest, len(definition))
            buffers = [memoryview(bytearray(span.view())) for span in encoded.spans]
        objects = None
        if header and "objects" in header:
            header = header.copy()
            objects = header.pop("objects")
            flags |= frames.OBJECTS
        extra = pack_header(header) if header else b""
        now = _time.now()
        if buffers:
            flags |= outbound.STREAM
        frame = Frame(kind, flags, id, deadline - now, chain, extra, body, buffers or None, objects)
        if flags & frames.RESERVED:
            if body:
                self.post.complete(None, peer, frame)
            else:
                self.post.announce(None, peer, frame._replace(flags=frames.MAIL))
        elif flags & frames.MAIL:
            self.post.take(None, peer, frame)
        elif kind == frames.REQUEST:
            self.pool.queue.append((None, frame, now))
            self.pool.wake()
        else:
            self.inbox.reply(peer, frame, True)

    def notify(self, peer: Peer, name: str, body: bytes, *, lazily: bool = False) -> bool:
        """Send a one-way message to the handler ``name`` of a peer; say whether there was a connection for it.

        ``lazily``: it may wait for something that it can go along with, though not for long.
        """
        if not self.hooks.messages:
            return self.send_notice(peer, name, body, lazily)
        notice = OutgoingMessage(frames.NOTICE, peer, 0, body, name=name)
        sent = self.hooks.send(notice, partial(self.send_notice, peer, name, body, lazily))
        return not notice.lost if sent is None else bool(sent)

    def notify_surely(
        self, peer: Peer, name: str, body: bytes, *, lazily: bool = False, attempt: int = 0
    ) -> None:
        """Do as :meth:`notify` does; where there is no connection, try again, ever more rarely, as long as the peer lives."""
        if self.closed_down or peer.state != "alive" or self.notify(peer, name, body, lazily=lazily):
            return
        if attempt < _ATTEMPTS:
            again = partial(self.notify_surely, peer, name, body, lazily=lazily, attempt=attempt + 1)
            self.clock.after(_RETRY_S * 1.5**attempt, partial(self.submit, again))

    def send_notice(self, peer: Peer, name: str, body: bytes, lazily: bool = False) -> bool:
        """Do what :meth:`notify` does, without hooks."""
        if peer.is_self:
            handler = self.on_notice.get(name)
            if handler is not None:
                self.pool.submit(lambda: handler(peer, body))
            return True
        if peer.state != "alive":
            return False
        try:
            conn = peer.conn
            if conn is None or conn.state is CLOSED:
                conn = self.connector.connect(peer, _time.now() + self.settings.connect_timeout, name)
        except RpcError:
            return False
        conn.outbox.append(pack_frame(frames.NOTICE, body=body, extra=pack_header({"notice": name})))
        if lazily:
            self.scheduler.soon(conn)
        else:
            conn.flush()
        return True

    def announce(self, message: MessageContext, header: Header | None) -> Header:
        """Name what a message carries in its header, where it can be seen without opening it: references, and shared memory."""
        header = {} if header is None else header
        if message.sent:
            header["references"] = self.references.pack(message.sent)
        if message.objects:
            header["objects"] = message.objects
        return header

    # -- shared memory ----------------------------------------------------------------------------------

    def lender(self, conn: Connection) -> Any:
        """Return the side of the tensor lane that lends memory to a connection's peer; None where there is none."""
        lender = conn.lane.lender
        self.scheduler.keep_trim()
        if lender is None and self.settings.lane:
            lender = self.connector.open_lane(conn)
        return lender

    def shares_memory(self, peer: Peer) -> bool:
        """Say whether a message to a worker can name memory of this one: it is on this host, and has a descriptor socket."""
        if peer.is_self:
            return True
        conn = peer.conn
        if conn is None or conn.state is CLOSED:
            if not peer.record.unix_path or not self.settings.lane:
                return False
            try:
                conn = self.connector.connect(
                    peer, _time.now() + self.settings.connect_timeout, "an object in shared memory"
                )
            except RpcError:
                return False
        return conn.local and self.lender(conn) is not None

    def _object_store(self, key: Key | None) -> ObjectStore:
        tag = "00000000" if key is None else key.tag()
        path = keys.accounts_path(self.record.unix_path, tag) if self.record.unix_path else None
        return ObjectStore(
            ObjectAccounts(path, f".{tag}.objects", self.name),
            limit_bytes=self.settings.object_memory or memory_limit() // 4,
            spill_dir=self.settings.spill_dir,
            on_let_go=self._look_after_objects,
        )

    def _look_after_objects(self) -> None:
        """Have what was let go of seen to soon. Runs where a finaliser does."""
        if not self.closed_down:
            self.clock.call_soon(self.scheduler.keep_objects)

    def _let_memory_go(self) -> None:
        """Have memory unmapped soon that is not to be kept. Runs where a finaliser does."""
        if not self.closed_down:
            self.clock.call_soon(lambda: self.submit(self.buffers.trim))

    # -- the ends ---------------------------------------------------------------------------------------

    def lost(self, conn: Connection, error: BaseException | None) -> None:
        """See to what a connection that has ended leaves behind. Runs on a pool thread."""
        self.pool.forget(conn.fd)
        if conn.goodbye is None and not self.closed_down:
            # A failed write is no proof of death: what the peer said last may lie there unread.
            last = conn.read_rest()
            if last:
                self.inbox.deliver(conn, last, False)
        conn.reap()
        peer = conn.peer
        self.connector.forget(conn)
        if peer is None or conn not in peer.conns:
            return
        peer.conns.remove(conn)
        peer.failure_detector.heard = max(peer.failure_detector.heard, conn.heard)
        if peer.conn is conn:
            peer.conn = None
        if self.closed_down:
            return
        self._take_answers(conn, peer)
        if conn.goodbye is Goodbye.GIVES_UP:
            self.peer_ended(peer, "dead", "it takes this worker for dead, and has ended the connection")
        elif conn.goodbye is Goodbye.LEAVES:
            self.peer_ended(peer, "left", "")
        else:
            closed = error is None or isinstance(error, EOFError)
            cause = "its end of the connection closed" if closed else str(error)
            if type(error) is ProtocolError:
                cause = f"what came from it makes no sense ({error}): run the same version of actorrpc on all workers"
            self.peer_ended(peer, "dead", cause)

    def _take_answers(self, conn: Connection, peer: Peer) -> None:
        """Have calls answered whose answers came before the end of a connection, before those that are left are ended.

        One thread reads an answer and lets the next one read, which finds the end: it must not overtake the answer. Where
        both sides dialled at once, there are two connections, and answers that have come over the one lie there when the
        end of the other is found. Bounded, as an answer that is opened may run anything, and as a thread may hold the
        read lock of a connection that lives.
        """
        begun = _time.now()
        for other in list(peer.conns):
            last = other.read_rest(_ANSWERS_S)
            if last:
                self.inbox.deliver(other, last, False)
        while any(each.undelivered for each in (conn, *peer.conns)) and _time.now() - begun < _ANSWERS_S:
            _time.sleep(0.001)

    def _replaced(self, peer: Peer) -> None:
        self.pool.submit(partial(self.peer_ended, peer, "dead", "a new incarnation has taken its place"))

    def peer_ended(self, peer: Peer, state: str, cause: str) -> None:
        """Fail everything that touches a peer which is gone. Idempotent."""
        if not self.peer_table.end(peer, state, cause):
            return
        if not peer.is_self:
            self.clock.after(SETTLED_S, partial(self.submit, peer.relieve))
        for conn in list(peer.conns):
            if state == "dead" and conn.state is not CLOSED:
                # It may live and hear us still, the way from it being lost: else it would find out as late again.
                conn.outbox.appendleft(pack_frame(frames.GOODBYE, flags=1))
                conn.flush()
            conn.close()
        while peer.pending:
            try:
                _, call = peer.pending.popitem()
            except KeyError:
                break
            call.fail(peer.died(str(call), maybe_executed=call.withdraw()), self.pool.submit)
        peer.window.wake_all()
        for execution in list(peer.running.values()):
            execution.cancel()
        for tell in list(self.on_peer_end):
            try:
                tell(peer)
            except Exception:
                _log.exception("a handler of the end of %r raised", peer.name)

    def shut_down_error(self) -> ShutdownError:
        """Return the error of a call that is made after this worker has shut down."""
        why = f"worker {self.name!r} has shut down"
        current = current_worker()
        if current is not None and current.agent is not self:
            why = (
                f"what is called belongs to an earlier cluster or group of this process, which was shut down (as worker "
                f"{self.name!r}): make the actor or the RRef again in the present one"
            )
        return ShutdownError(why, maybe_executed=False)

    def _shut_down(self, call: Call) -> ShutdownError:
        return ShutdownError(
            f"{call}: this worker, {self.name!r}, shut down",
            maybe_executed=call.withdraw(),
            worker=call.peer.name,
        )

    def _fail_pending(self) -> None:
        for peer in self.peers():
            while peer.pending:
                try:
                    _, call = peer.pending.popitem()
                except KeyError:
                    break
                call.fail(self._shut_down(call))
            peer.window.wake_all()

    def close(self, timeout: float = 2.0, parting: float = _GOODBYE_S) -> None:
        """End everything: connections are closed with a goodbye, threads end, waits fail with ShutdownError. Idempotent.

        Args:
            timeout: how long threads in user code may take to end, in seconds.
            parting: how long all of the goodbyes may take to be handed over to the kernel, and between hosts by it to the other
                one's, in seconds: peers that do not read take longer. To whom it cannot be in time, this is a death. Ctrl-C
                cuts that to 0.5 s.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self.connector.admission.stop_listening()
        # Also those whose peer is still to introduce itself: it takes the connection for made.
        conns = set(self.connector.connections())
        self._part(conns, parting)
        self.closed_down = True
        self.connector.stop_dialling()
        self._fail_pending()
        for conn in conns:
            conn.close()
        self._fail_pending()  # calls that were on their way into the table meanwhile
        left = self.pool.close(timeout)
        self.clock.close()
        self.dismiss(set(self.connector.connections()) - conns)  # that have come since
        for conn in {*conns, *self.connector.connections()}:
            conn.close()
            conn.reap()
        self._fail_pending()
        self.connector.admission.close()
        self.buffers.close()
        self.objects.close()
        signals.uninstall(self._put_off)
        codec.restrict(-self.settings.data_only)
        stacks = _stacks.top_frames()
        # Those that have no frame are at their ends, and get no processor.
        left = [each for each in left if each.ident in stacks]
        if left:
            where = ", ".join(f"{each.name} ({_place(stacks.get(each.ident or 0))})" for each in left)
            _log.warning("threads of %r are still in user code after shutdown: %s", self.name, where)

    def dismiss(self, conns: Collection[Connection]) -> None:
        """End connections that have come into being while the agent is closed, with a goodbye."""
        self._part(conns, _GOODBYE_S)
        for conn in conns:
            conn.close()
            conn.reap()

    @staticmethod
    def _part(conns: Collection[Connection], parting: float) -> None:
        """Say goodbye, and wait until it is sent with all else: without it, a peer would take this for a death.

        One whose socket has failed gets little time: it may never have another.
        """

        def hurried(conn: Connection) -> bool:
            return conn.state is SUSPENDED or signal.SIGINT in signals.state.pending

        for conn in conns:
            conn.outbox.append(pack_frame(frames.GOODBYE))
        begun = _time.now()
        for conn in conns:
            while not (
                # Another thread may have taken out what it sends, or is to keep; it has the lock until then.
                (conn.flush() and conn.writer.is_drained() and (conn.local or not holds_back(conn.sock)))
                or conn.state is CLOSED
                or _time.now() - begun >= (min(parting, _GOODBYE_S) if hurried(conn) else parting)
            ):
                _time.sleep(0.001)

    def abandon(self) -> None:
        """Let go of everything in a forked child: descriptors are closed, nothing is sent, no lock is taken."""
        self.closed_down = self.abandoned = True
        self.pool.abandon()
        self.connector.abandon()
        self.buffers.abandon()
        self.objects.abandon()
        signals.abandon()

    def end_fork(self, what: str, error: BaseException | None) -> NoReturn:
        """End this process, a fork, in which what has forked is over: there is nobody to answer, and nothing to go on with.

        The exit status is that of a ``SystemExit``, 0 where it has returned, and otherwise 1.
        """
        status = 0 if error is None else 1
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            report(_log, error, "%s failed in a fork of %r (os.fork()), which ends", what, self.name)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status & 0xFF)

    def check_process(self) -> None:
        """Raise NotInitializedError if this is a fork of the process that the agent belongs to."""
        if os.getpid() != self.pid:
            raise NotInitializedError(
                "this process is a fork of one that uses actorrpc (os.fork(), or multiprocessing's start method 'fork'), and "
                "has none of its connections: call actorrpc.init() (or init_rpc()) in it, or make an actor instead of a fork"
            )
