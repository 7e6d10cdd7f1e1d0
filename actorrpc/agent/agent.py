"""The agent of a worker: its connections, threads, clock and calls.

Higher packages add RRefs, autograd contexts, traces and actors to calls: ``hooks`` take part in calls, ``on_notice`` handles
one-way messages, and the functions in ``on_peer_end`` are called when a peer has ended.

Any thread may make calls. ``Inbox.control`` runs under a connection's read lock, on whichever thread reads; it is short and runs
no user code. ``Inbox.deliver`` runs after the lock was released.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection
from functools import partial
from types import FrameType, FunctionType
from typing import Any, Final, NoReturn

from actorrpc import _stacks, _time
from actorrpc._exceptions import report
from actorrpc._limits import memory_limit
from actorrpc._torch import profiler, thread_is_profiled
from actorrpc.agent import outbound
from actorrpc.agent.calls import CURRENT, Call, Execution, MailHeader
from actorrpc.agent.connector import Connector
from actorrpc.agent.context import current_worker
from actorrpc.agent.executor import Executor
from actorrpc.agent.hooks import HookSet, MessageReferences, OutgoingMessage, Recorder, recorded
from actorrpc.agent.inbound import Inbox
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
from actorrpc.flight_recorder import FlightRecorder, in_words
from actorrpc.futures import QUEUED, Future, interruption_point, run_queued_callbacks
from actorrpc.serialization import by_value, codec
from actorrpc.serialization.codec import encode_body
from actorrpc.transport import signals
from actorrpc.transport.buffers import BufferPool
from actorrpc.transport.connection import Connection
from actorrpc.transport.cuda_memory import cuda_memory
from actorrpc.transport.device_memory import DeviceMemory
from actorrpc.transport.failure_detector import holds_back
from actorrpc.transport.object_accounts import ObjectAccounts
from actorrpc.transport.object_store import ObjectStore
from actorrpc.transport.signals import checkpoint, uninterruptible
from actorrpc.transport.signals import state as _interrupts
from actorrpc.transport.stream import CLOSED, SUSPENDED, Goodbye
from actorrpc.wire import frames, keys
from actorrpc.wire.frames import Frame, Header, pack_frame, pack_header
from actorrpc.wire.identity import WorkerRecord
from actorrpc.wire.keys import Key

__all__ = ["Agent"]

_log = logging.getLogger("actorrpc")
INFINITE: Final = float("inf")
_ANSWERS_S: Final = 1.0  # how long to wait until other threads have delivered the last answers of a peer
_GOODBYE_S: Final = 0.5  # how long sending goodbyes may take by default
_modules: Final = sys.modules
_RETRY_S: Final = 1.0  # the wait before a notice is sent again; each further wait is 1.5 times as long
_ATTEMPTS: Final = 20


def _ring_main() -> None:
    """Make the main thread run deferred signal handlers. Runs on the clock's thread."""
    _time.pause(0.002)  # so that the main thread may leave its uninterruptible code first
    signals.wake_main()


def _place(frame: FrameType | None) -> str:
    """Return the three innermost functions of a thread's stack, as text."""
    found: list[str] = []
    while frame is not None and len(found) < 3:
        code = frame.f_code
        found.append(f"{code.co_name} at {os.path.basename(code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


def _lost_argument(call: Call, error: PeerDiedError) -> LostArgumentError:
    return LostArgumentError(
        f"{in_words(call.label)} was not called, because an argument cannot be sent: {error}",
        maybe_executed=False,
        worker=error.worker,
    )


class Agent:
    """The connections, threads and calls of one worker. Thread-safe.

    Args:
        record: the name, rank and addresses of this worker.
        settings: limits and switches.
        key: the group's key.
        resolve: returns the record of the worker with this name or rank; None if there is no such worker.
        members: returns all records that are known.
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
        self.settings = settings
        self.clock = Clock()
        self.executor = Executor(self)
        self.pool = Pool(
            clock=self.clock,
            execute=self.executor.run,
            refuse=self.executor.refuse_stuck,
            max_threads=settings.max_threads,
            starvation_s=settings.starvation_s,
        )
        self.buffers = BufferPool(settings.recycle_bytes, on_return=self._trim_later)
        self.objects = self._object_store(key)
        #: memory of the devices whose tensors are sent without host memory; None: no device
        self.device_memory: DeviceMemory | None = None
        if settings.lane and settings.device_lane_bytes and not settings.data_only:
            self.device_memory = cuda_memory()
        self.recorder: Recorder = Recorder()
        self.flight_recorder = FlightRecorder() if settings.recorder else None
        self.hooks = HookSet(self.flight_recorder)
        self.on_notice: dict[str, Callable[[Peer, bytes], None]] = {}
        self.held: set[int] = set()  # identifiers of threads whose calls a debugger holds
        self.on_failure: Callable[[Execution, Exception], None] | None = None
        self.on_peer_end: list[Callable[[Peer], None]] = []
        self.references = MessageReferences()
        self._closing = _time.Lock()  # taken by the thread that closes the agent, and never released
        self.closed_down = False
        self.abandoned = False  # this process is a fork of the process that the agent belongs to
        self.leave_by = INFINITE  # the time limit of a graceful shutdown, by ``_time.now()``
        self.inbox = Inbox(self)
        self.connector = Connector(self, self.inbox, key)
        self.scheduler = Scheduler(self)
        self.peer_table = PeerTable(
            record, window=settings.window, resolve=resolve, members=members, replaced=self._replaced
        )
        #: returns the number of a chain of calls that begins outside of executions; see ``CALLER_BIT``
        self.next_chain: Callable[[], int] = itertools.count((record.rank & 0xFFFF) << 48 | 1).__next__
        codec.restrict(settings.data_only)

    @property
    def name(self) -> str:
        """The name of this worker."""
        return self.record.name

    @property
    def self_peer(self) -> Peer:
        """This worker as the peer of its own calls."""
        return self.peer_table.own

    def peer(self, to: Any) -> Peer:
        """Return the peer of a name, rank or WorkerInfo; see :meth:`PeerTable.peer`."""
        return self.peer_table.peer(to)

    def peers(self) -> list[Peer]:
        """Return the known peers; see :meth:`PeerTable.peers`."""
        return self.peer_table.peers()

    def members(self) -> list[WorkerRecord]:
        """Return the records of the group's members."""
        return self.peer_table.members()

    def submit(self, task: Callable[[], Any]) -> None:
        """Run ``task()`` on a pool thread."""
        self.pool.submit(task)

    def flush(self) -> None:
        """Send all corked frames (frames whose sending was delayed), because the caller is about to wait."""
        self.scheduler.flush()

    def start(self, listeners: list[socket.socket]) -> None:
        """Start the threads, and serve these listening sockets."""
        # First, so that no signal handler interrupts the start of a thread.
        signals.install(self._put_off)
        self._start(listeners)

    def _put_off(self) -> None:
        self.clock.call_soon(_ring_main)

    @uninterruptible
    def _start(self, listeners: list[socket.socket]) -> None:
        self.clock.start()
        self.pool.start(3)
        self.connector.admission.listen(listeners)

    # -- calling -----------------------------------------------------------------------------------------

    def encode(self, obj: Any, message: MessageContext, *, answer: bool = False) -> codec.Encoded | bytes:
        """Pack an object for the message's peer. ``answer``: use the device map for answers, not the one for calls."""
        peer = message.peer
        device_map = peer.answer_map if answer else peer.device_map
        records = bool(self.recorder.live) and not answer
        return encode_body(obj, peer.same_main, peer.known, device_map, message, records)

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
    ) -> Call:
        """Make a call and send it; see :class:`Call` for the arguments, and :meth:`send` for errors."""
        call = Call(self, peer, function, timeout, future, label, keep, mail)
        self.send(call, function, args, kwargs)
        return call

    def send(
        self,
        call: Call,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        header: Header | None = None,
    ) -> None:
        """Send a new call, or the arguments of a call with a reserved place. On an error, undo all steps, or cancel the call.

        Args:
            function: the called function; not used for a request to a mailbox, whose body is ``(args, kwargs)``.
            header: further header fields.

        Raises:
            SerializationError, LimitError, PeerDiedError, BackpressureError, ShutdownError: the call was not executed.
            CancelledError: the enclosing call was cancelled, or this call has reserved its place and has ended meanwhile.
            RpcTimeoutError, AuthenticationError, VersionError: there is no time left or no connection (``Connector.connect``).
            LostArgumentError: an argument refers to a value of a worker that has died.
        """
        peer, mail, is_new = call.peer, call.mail, not call.id
        current = CURRENT.get()
        given_up = () if current is None else current.given_up
        if self.closed_down or peer.state != "alive" or (current is not None and current.cancelled):
            self._refuse(call, current)
        try:
            message = peer.contexts.pop()
        except IndexError:
            message = MessageContext(peer, held=())
        if current is not None and len(current.path) > 1:
            header = {} if header is None else header
            header["path"] = current.path[:-1]
        encoded: codec.Encoded | bytes = b""
        hooks, reserves = self.hooks, is_new and bool(call.awaits)
        try:
            if not reserves:
                profiled = mail is None and (profiler._is_profiler_enabled or thread_is_profiled())
                if hooks.on_call or profiled:
                    header = hooks.begin_call(call, function, args, header)
                sent = function
                if mail is None and type(function) is FunctionType and not by_value.modules:
                    sent = peer.functions.numbers.get(function)
                    module = _modules.get(function.__module__)
                    if sent is None or getattr(module, function.__name__, None) is not function:
                        sent = peer.functions.introduce(function, peer.same_main)
                        if type(sent) is tuple:
                            call.introduces = sent[0], function
                body = (sent, args, kwargs) if mail is None else (args, kwargs)
                live = bool(self.recorder.live)
                try:
                    encoded = encode_body(body, peer.same_main, peer.known, peer.device_map, message, live)
                except PeerDiedError as error:
                    raise _lost_argument(call, error) from error
                if live or (not isinstance(encoded, bytes) and encoded.grad):
                    header = recorded(self.recorder, header, encoded, peer)
                if message.sent or message.objects:
                    header = self.announce(message, header)
            if ((conn := peer.conn) is None or conn.state is CLOSED) and not peer.is_self:
                self.connector.connect(peer, call.deadline, in_words(call.label))
            if peer.window.charged or len(peer.pending) >= MAX_PENDING:
                self._wait_for_room(call, current)
            if is_new:
                call.id = next(peer.ids)
            if message.held:
                call.keep = call.keep, message.held
            if call.future is not None:
                call.future.source = call.future.label = call  # formatted only when its text is needed
            if current is not None:
                current.add_nested(call)
            if hooks.messages and not reserves:
                self._offer(call, function, args, encoded, header, message)
            else:
                self._dispatch(call, encoded, header)
                if not (message.sent or message.objects or message.held):
                    peer.contexts.append(message)
        except BaseException as error:
            self._undo(call, message, is_new, error)
            raise
        if current is not None and current.given_up is not given_up:
            call.cancel(current.given_up[-1], current.late)  # ``current`` was cancelled meanwhile

    def _refuse(self, call: Call, current: Execution | None) -> None:
        """Raise the error of a call that must not be sent."""
        if self.closed_down:
            raise self.shut_down_error()
        if current is not None and current.cancelled:
            interruption_point()
            raise current.given_up_error()
        call.peer.check_alive(f"cannot call {in_words(call.label)}")

    def _wait_for_room(self, call: Call, current: Execution | None) -> None:
        """Wait until the window has room. Nested calls and reserved places do not wait: calls in the window may wait for them."""
        if current is None and not call.id and call.peer.window.full:
            self.flush()
            call.peer.window.wait_for_room(call.deadline, f"the call of {in_words(call.label)}")

    def _offer(
        self,
        call: Call,
        function: Any,
        args: tuple[Any, ...],
        encoded: codec.Encoded | bytes,
        header: Header | None,
        message: MessageContext,
    ) -> None:
        """Send a packed call, unless hooks take it over."""
        request = OutgoingMessage(
            frames.REQUEST,
            call.peer,
            call.id,
            encoded,
            header,
            call=call,
            function=function,
            args=args,
            mail=call.mail,
            name=call.label,
            chain=call.chain,
            flags=0 if call.mail is None else frames.MAIL,
            context=message,
        )
        self.hooks.send(request, partial(self._dispatch, call, encoded, header))

    def _undo(self, call: Call, message: MessageContext, is_new: bool, error: BaseException) -> None:
        """Undo what :meth:`send` has begun; a call that is in the outbox or was sent is cancelled."""
        if call.handed_over:
            call.cancel()  # a signal handler or a hook raised after the frame was put into the outbox
            return
        if is_new:
            call.peer.pending.pop(call.id, None)
            call.peer.window.release(call)
        if message.sent:
            self.references.roll_back(message)
        if not call.done:
            # Skip the flight recorder, whose method is the first: it has no record of a call that was not sent.
            for ended in call.ending[len(self.hooks.recorded) :]:
                ended(call, error)

    def call_sync(
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
        call = Call(self, peer, function, timeout, None, label, keep)
        try:
            self.send(call, function, args, kwargs)
            while not call.done:
                call.drive(None)
        except BaseException as error:
            self._give_up(call, error)  # sending failed, or a signal handler has raised
            raise
        outcome = call.outcome
        if isinstance(outcome, BaseException):
            call.outcome = None
            try:
                raise outcome
            finally:
                del outcome  # the error, its traceback and this frame would be a reference cycle
        assert outcome is not None
        try:
            value = outbound.opened(self, call.conn, outcome, peer)
        except BaseException as error:
            self._end_asked(call, error)
            raise
        for ended in call.ending:
            ended(call, None)
        call.outcome = None  # the enclosing execution refers to the call, which would keep the reply alive
        if _interrupts.pending:
            checkpoint()
        return value

    def cast(
        self, peer: Peer, function: Any, args: tuple[Any, ...], label: str, *, record: bool = True
    ) -> None:
        """Make a worker call ``function(*args)``, without an answer.

        It is for protocols that detect failures in another way. The function runs on a pool thread of the other worker, or on its
        thread that waits in ``backward``, in no particular order with calls; its errors are logged there.

        Args:
            label: names the function in error messages.
            record: pass the tensors to the agent's recorder, which follows them for distributed autograd.

        Raises:
            SerializationError, LimitError: the message cannot be packed.
            PeerDiedError, ShutdownError: the message was not sent, or only in part. Also the errors of :meth:`Connector.connect`.
        """
        if self.closed_down:
            raise self.shut_down_error()
        if peer.state != "alive":
            peer.check_alive(f"cannot call {in_words(label)}")
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
                flags=frames.CAST,
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
            self.loop_back(frames.REQUEST, id, encoded, header, INFINITE, chain, frames.CAST)
            return
        conn = peer.conn
        if conn is None or conn.state is CLOSED:
            conn = self.connector.connect(peer, INFINITE, in_words(label))
        outbound.send(self, conn, frames.REQUEST, id, encoded, header, chain=chain, flags=frames.CAST)
        conn.flush()

    @uninterruptible
    def _give_up(self, call: Call, error: BaseException) -> None:
        """Cancel a call of :meth:`call_sync` if it is pending; if its reply has arrived, discard the reply."""
        if call.cancel():
            return
        while call.handed_over and not call.done:  # another thread is ending the call
            _time.pause(0.0005)
        outcome = call.outcome
        if isinstance(outcome, Frame):
            self._end_asked(call, error)
            self.inbox.discard(call.conn, outcome)
        call.outcome = None

    @staticmethod
    def _end_asked(call: Call, error: BaseException) -> None:
        """Run ``on_answer`` for a call of :meth:`call_sync` whose reply was received, and then discarded or failed to open."""
        for ended in call.ending:
            ended(call, error)
        call.outcome = None

    @uninterruptible
    def _dispatch(self, call: Call, encoded: codec.Encoded | bytes, header: Header | None) -> None:
        """Make the frame of a call, enter the call into the table of pending calls, and put the frame into the outbox."""
        peer, extra, flags = call.peer, b"", 0
        fills = bool(call.awaits) and encoded != b""
        if call.mail is not None:
            flags = frames.MAIL | frames.RESERVED if call.awaits else frames.MAIL
            if header is None:
                header, extra = call.mail.header, call.mail.packed
            else:
                header.update(call.mail.header)
        # Arguments are sent over the connection of the call's reservation, so that they arrive after the reservation.
        conn = call.conn or peer.conn
        if conn is None or conn.state is CLOSED:
            if peer.is_self:
                self._dispatch_here(call, encoded, header, flags, fills)
                return
            if self.closed_down:
                raise self._shut_down(call)
            raise peer.died(f"cannot call {in_words(call.label)}", maybe_executed=False)
        call.conn = conn
        # Flush the arguments of a call with a reserved place now: the thread that completed the last argument may not flush soon.
        idle = not peer.pending or fills
        remaining = call.deadline - _time.now() if call.deadline != INFINITE else INFINITE
        packed = outbound.pack(
            self, conn, frames.REQUEST, call.id, encoded, header, extra, remaining, call.chain, flags
        )
        rest = None if isinstance(packed, bytes) else packed
        frame = call.frame = packed if isinstance(packed, bytes) else packed.frame
        # From here on, other threads may end the call. The thread that ends the call finds its frame: either it withdraws the
        # frame, or it sends CANCEL to the worker, and the caller's error says that the call may have run.
        if fills:
            self._use_place(call)
        else:
            peer.pending[call.id] = call
        if conn.state is CLOSED or peer.state != "alive":
            # Another thread, which ends the peer or this agent, may have ended the pending calls before this call was entered.
            # The outbox of a closed connection is never sent, so the call counts as not sent.
            call.frame = b""
            peer.check_alive(f"cannot call {in_words(call.label)}")
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
            call.frame = b""  # only the reservation is in the outbox: the call itself has not been sent
        if rest is not None and rest.buffers and not outbound.send_buffers(self, conn, rest, call.deadline):
            if conn.state is not CLOSED:  # otherwise the thread that ends the peer ends the call
                call.expire()
            return
        scheduler, settings, future = self.scheduler, self.settings, call.future
        if future is not None:  # without a future, the waiting thread flushes the outbox in drive()
            much = len(frame) * settings.cork_frames > settings.cork_bytes
            if idle or much or len(conn.outbox) >= settings.cork_frames:
                if idle and not future.callbacks and conn.expect():
                    scheduler.expect(conn)
                conn.flush()
            elif conn not in scheduler.corked:
                scheduler.cork(conn)
        if (future is not None and call.deadline < peer.scan_at) or not scheduler.pulse.active:
            scheduler.watch(call)

    def _dispatch_here(
        self, call: Call, encoded: codec.Encoded | bytes, header: Header | None, flags: int, fills: bool
    ) -> None:
        peer = call.peer
        call.sent = encoded != b""
        if fills:
            self._use_place(call)
        else:
            peer.pending[call.id] = call
        self.scheduler.watch(call)
        if self.closed_down:
            raise self._shut_down(call)
        self.loop_back(frames.REQUEST, call.id, encoded, header, call.deadline, call.chain, flags)

    @staticmethod
    def _use_place(call: Call) -> None:
        """Record that the message of a call follows the reservation of its place.

        A thread that ends the call removes it from ``pending``, and then sends CANCEL for the place if ``awaits`` is not empty.
        Therefore ``awaits`` is emptied only if the call is still pending and its message will be sent.

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
        """Deliver a message of this worker to itself. Memory is copied, as if the message were sent to another worker."""
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
        if flags & frames.MAIL:
            self.inbox.deliver_mail(None, peer, frame)
        elif kind == frames.REQUEST:
            self.pool.queue.append((None, frame, now))
            self.pool.wake()
        else:
            self.inbox.reply(peer, frame, True)

    def notify(self, peer: Peer, name: str, body: bytes, *, lazily: bool = False) -> bool:
        """Send a one-way message to the handler ``name`` of a peer; return whether there was a connection for it.

        ``lazily``: the message may wait for some milliseconds, so that it is sent together with other messages.
        """
        if not self.hooks.messages:
            return self.send_notice(peer, name, body, lazily)
        notice = OutgoingMessage(frames.NOTICE, peer, 0, body, name=name)
        sent = self.hooks.send(notice, partial(self.send_notice, peer, name, body, lazily))
        return not notice.lost if sent is None else bool(sent)

    def notify_surely(
        self, peer: Peer, name: str, body: bytes, *, lazily: bool = False, attempt: int = 0
    ) -> None:
        """As :meth:`notify`; if there is no connection, retry with growing pauses, up to 20 times, while the peer is alive."""
        if self.closed_down or peer.state != "alive" or self.notify(peer, name, body, lazily=lazily):
            return
        if attempt < _ATTEMPTS:
            again = partial(self.notify_surely, peer, name, body, lazily=lazily, attempt=attempt + 1)
            self.clock.after(_RETRY_S * 1.5**attempt, partial(self.submit, again))

    def send_notice(self, peer: Peer, name: str, body: bytes, lazily: bool = False) -> bool:
        """As :meth:`notify`, but without hooks."""
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
                conn = self.connector.connect(peer, _time.now() + self.settings.reach_timeout, name)
        except RpcError:
            return False
        conn.outbox.append(pack_frame(frames.NOTICE, body=body, extra=pack_header({"notice": name})))
        if lazily:
            self.scheduler.soon(conn)
        else:
            conn.flush()
        return True

    def announce(self, message: MessageContext, header: Header | None) -> Header:
        """Add the references and object segments of a message to its header, which the receiver reads before the body."""
        header = {} if header is None else header
        if message.sent:
            header["references"] = self.references.pack(message.sent)
        if message.objects:
            header["objects"] = message.objects
        return header

    # -- shared memory ----------------------------------------------------------------------------------

    def lender(self, conn: Connection) -> Any:
        """Return the Lender that shares memory with a connection's peer; open it if needed. None: it cannot be opened."""
        lender = conn.lane.lender
        self.scheduler.keep_trim()
        if lender is None and self.settings.lane:
            lender = self.connector.open_lane(conn)
        return lender

    def shares_memory(self, peer: Peer) -> bool:
        """Return whether shared memory can be sent to a worker: it is on this host, and a descriptor socket can be opened."""
        if peer.is_self:
            return True
        conn = peer.conn
        if conn is None or conn.state is CLOSED:
            if not peer.record.unix_path or not self.settings.lane:
                return False
            try:
                conn = self.connector.connect(
                    peer, _time.now() + self.settings.reach_timeout, "an object in shared memory"
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
        """Start the periodic release of shared memory without readers. Called by finalisers of objects in that memory."""
        if not self.closed_down:
            self.scheduler.keep_objects()

    def _trim_later(self) -> None:
        """Start the periodic release of free buffers. Called by finalisers of buffers."""
        if not self.closed_down:
            self.clock.call_soon(self.scheduler.keep_trim)

    # -- ends of connections, peers and the agent ----------------------------------------------------------

    def lost(self, conn: Connection, error: BaseException | None) -> None:
        """Close a broken or ended connection, and record that its peer has ended. Runs on a pool thread."""
        self.pool.forget(conn.fd)
        if conn.goodbye is None and not self.closed_down:
            # If a write has failed, the peer's last messages may not have been read yet.
            last = conn.read_rest()
            if last:
                self.inbox.deliver(conn, last, False)
        conn.reap()
        self.scheduler.keep_lent(conn.lane.devices)
        peer = conn.peer
        self.connector.forget(conn)
        if peer is None or conn not in peer.conns:
            return
        peer.conns.remove(conn)
        peer.failure_detector.last_received = max(peer.failure_detector.last_received, conn.last_received)
        if peer.conn is conn:
            peer.conn = None
        if self.closed_down:
            return
        self._take_answers(conn, peer)
        if conn.goodbye is Goodbye.GIVES_UP:
            self.peer_ended(peer, "dead", "it considers this worker dead, and has closed the connection")
        elif conn.goodbye is Goodbye.LEAVES:
            self.peer_ended(peer, "left", "")
        else:
            closed = error is None or isinstance(error, EOFError)
            cause = "its end of the connection closed" if closed else str(error)
            if type(error) is ProtocolError:
                cause = f"it sent invalid data ({error}): run the same version of actorrpc on all workers"
            self.peer_ended(peer, "dead", cause)

    def _take_answers(self, conn: Connection, peer: Peer) -> None:
        """Complete the calls whose answers arrived before a connection ended. The caller then fails the other calls.

        1. Thread A reads an answer and releases the read lock. 2. Thread B reads the end of the connection. Therefore B has to
        wait until A has delivered the answer. If both sides have dialled at once, there is a second connection, which may hold
        unread answers when the end of the first is read. The wait is bounded, because opening an answer may run user code,
        and because a thread may hold the read lock of a connection that is still open.
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
        """Record that a peer has ended; fail the calls to the peer, and cancel the executions of its calls. Idempotent."""
        if not self.peer_table.record_end(peer, state, cause):
            return
        if not peer.is_self:
            self.clock.after(SETTLED_S, partial(self.submit, peer.relieve))
        for conn in list(peer.conns):
            if state == "dead" and conn.state is not CLOSED:
                # The link may be broken in one direction only. The peer learns now that this worker considers it dead.
                conn.outbox.appendleft(pack_frame(frames.GOODBYE, flags=1))
                conn.flush()
            conn.close()
        for call in peer.end_calls():
            call.fail(peer.died(str(call), maybe_executed=call.withdraw()), self.pool.submit)
        for execution in list(peer.running.values()):
            execution.cancel()
        for tell in list(self.on_peer_end):
            try:
                tell(peer)
            except Exception:
                _log.exception("a handler of the end of %r raised", peer.name)
        if peer.record.is_visitor:
            self.peer_table.forget(peer)

    def shut_down_error(self) -> ShutdownError:
        """Return the error of a call that is made after this worker has shut down."""
        why = f"worker {self.name!r} has shut down"
        current = current_worker()
        if current is not None and current.agent is not self:
            why = (
                f"the called actor or RRef belongs to an earlier cluster or group of this process, which was shut down (as "
                f"worker {self.name!r}): create it again in the current one"
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
            for call in peer.end_calls():
                call.fail(self._shut_down(call))

    def close(self, timeout: float = 2.0, parting: float = _GOODBYE_S) -> None:
        """Close the connections with a goodbye, end the threads, and fail all pending calls with ShutdownError. Idempotent.

        Args:
            timeout: how long threads in user code may take to end, in seconds.
            parting: how long sending all goodbyes may take, in seconds: until the kernel has them, and over TCP until the
                kernel has sent them. A peer whose goodbye is not sent in time considers this worker dead. After
                Ctrl-C, at most 0.5 s.
        """
        if not self._closing.acquire(blocking=False):
            return
        self.connector.admission.stop_listening()
        # Include connections whose peer has not sent its record yet, because the peer considers them open.
        conns = set(self.connector.connections())
        self._part(conns, parting)
        self.closed_down = True
        self.connector.stop_dialling()
        self._fail_pending()
        for conn in conns:
            conn.close()
        self._fail_pending()  # also the calls that other threads have entered meanwhile
        left = self.pool.close(timeout)
        self.clock.close()
        self.dismiss(set(self.connector.connections()) - conns)  # new connections
        for conn in {*conns, *self.connector.connections()}:
            conn.close()
            conn.reap()
            conn.lane.devices.release()
        self.scheduler.release_lent()
        self._fail_pending()
        self.connector.admission.close()
        self.buffers.close()
        self.objects.close()
        signals.uninstall(self._put_off)
        codec.restrict(-self.settings.data_only)
        stacks = _stacks.top_frames()
        # Threads without a frame have left user code, and are about to end.
        left = [each for each in left if each.ident in stacks]
        if left:
            where = ", ".join(f"{each.name} ({_place(stacks.get(each.ident or 0))})" for each in left)
            _log.warning("threads of %r are still in user code after shutdown: %s", self.name, where)

    def dismiss(self, conns: Collection[Connection]) -> None:
        """Send a goodbye over connections that were made while the agent was being closed, and close them."""
        self._part(conns, _GOODBYE_S)
        for conn in conns:
            conn.close()
            conn.reap()

    @staticmethod
    def _part(conns: Collection[Connection], parting: float) -> None:
        """Send goodbyes, and wait until all outboxes are sent: without a goodbye, a peer considers this worker dead.

        A connection whose socket has failed gets at most 0.5 s, as it may never be resumed.
        """

        def hurried(conn: Connection) -> bool:
            return conn.state is SUSPENDED or signal.SIGINT in signals.state.pending

        for conn in conns:
            conn.outbox.append(pack_frame(frames.GOODBYE))
        begun = _time.now()
        for conn in conns:
            while not (
                # Another thread may be sending frames that it has removed from the outbox; ``is_drained()`` is False meanwhile.
                (
                    conn.flush()
                    and conn.writer.is_drained()
                    and not conn.lane.devices.is_lending  # the memory would be released before the peer reads it
                    and (conn.local or not holds_back(conn.stream.sock))
                )
                or conn.state is CLOSED
                or _time.now() - begun >= (min(parting, _GOODBYE_S) if hurried(conn) else parting)
            ):
                _time.sleep(0.001)

    def abandon(self) -> None:
        """Close all descriptors in a forked child. Sends nothing and takes no lock."""
        self.closed_down = self.abandoned = True
        self.pool.abandon()
        self.connector.abandon()
        self.scheduler.abandon()
        self.buffers.abandon()
        self.objects.abandon()
        signals.abandon()

    def end_fork(self, what: str, error: BaseException | None) -> NoReturn:
        """End this process, a fork, because the function that called ``os.fork()`` has ended. A fork answers no calls.

        The exit status is that of a ``SystemExit``, 0 if the function has returned, and otherwise 1.
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
        if os.getpid() != self.record.pid:
            raise NotInitializedError(
                "this process is a fork of one that uses actorrpc (os.fork(), or multiprocessing's start method 'fork'), and "
                "has none of its connections: call actorrpc.init() (or init_rpc()) in it, or make an actor instead of a fork"
            )
