"""The gate that faults stand at: it sees every message of an agent before it leaves, and asks the faults about it.

Only an agent for which a fault is in force has one. What a message is, is in ``types.py``;
here is how each kind of message is lost, and how it is sent later.

``_lock`` guards the lists of faults and rooms; the locks of rooms and faults are leaves, not taken under it. Messages are
sent, and messages rolled back, with no lock held.

Messages that are held up wait in a :class:`WaitingRoom`, and leave one after the other when their time has come.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from actorrpc.agent import outbound
from actorrpc.agent.hooks import RECEIPT, Interceptor
from actorrpc.autograd import transport
from actorrpc.errors import RpcError, RpcTimeoutError, ShutdownError
from actorrpc.serialization import codec, exceptions
from actorrpc.serialization.tensors import TensorSpan
from actorrpc.testing.messages.faults import Fault
from actorrpc.testing.messages.kill_points import KillPoint, finishing
from actorrpc.testing.messages.types import ANSWER, CONTROL, Message, type_of_notice, type_of_request
from actorrpc.transport.connection_state import CLOSED, OPEN
from actorrpc.transport.signals import uninterruptible
from actorrpc.wire import frames
from actorrpc.wire.headers import Header

if TYPE_CHECKING:
    from actorrpc.agent.agent import Agent
    from actorrpc.agent.calls import Call, Execution
    from actorrpc.agent.mail import MailHeader
    from actorrpc.agent.peers import MessageContext, Peer
    from actorrpc.testing.messages.active import Injection
    from actorrpc.transport.connection import Connection

__all__ = ["FaultGate", "HeldMessage", "WaitingRoom", "copied"]

_log = logging.getLogger("actorrpc.testing")


def copied(encoded: Any) -> Any:
    """Have a packed message keep copies of the memory that goes with it: the caller may change that soon."""
    if not isinstance(encoded, bytes) and encoded.spans:
        encoded.spans = [TensorSpan.of(bytearray(span.view())) for span in encoded.spans]
        encoded.outgoing, encoded.tensors = None, []
    return encoded


class HeldMessage:
    """A message that waits.

    Args:
        fault: what holds it up.
        send: sends it; called on a pool thread, with no lock held.
        discard: gives back what is in it, where it will not be sent.
        in_line: no message that is in line may overtake another one.
    """

    __slots__ = ("discard", "fault", "in_line", "send")

    def __init__(
        self,
        fault: Fault,
        send: Callable[[], None],
        discard: Callable[[], None],
        *,
        in_line: bool = False,
    ) -> None:
        self.fault = fault
        self.send = send
        self.discard = discard
        self.in_line = in_line


class WaitingRoom:
    """What is held up on its way to one worker. Thread-safe.

    Args:
        emptied: called, with no lock held, when the last message has left.
    """

    def __init__(self, agent: Agent, emptied: Callable[[], None]) -> None:
        self._agent = agent
        self._emptied = emptied
        # Guards all below; a leaf.
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, HeldMessage]] = []
        self._numbers = itertools.count()
        self._queue = 0  # how many of those in line have not left
        self._last: tuple[float, Fault] | None = None  # of those in line: when it is due, and why
        self._busy = False  # somebody is sending what is due

    @property
    def empty(self) -> bool:
        """Whether nothing waits, and nothing is just leaving."""
        return not self._heap and not self._busy

    def put(self, held: HeldMessage, seconds: float) -> None:
        """Have a message wait for some time, and for those before it in line."""
        due = self._agent.clock.now() + seconds
        with self._lock:
            if held.in_line:
                if self._queue and self._last is not None:
                    due = max(due, self._last[0])
                self._queue += 1
                self._last = due, held.fault
            heapq.heappush(self._heap, (due, next(self._numbers), held))
        held.fault.hold(1)
        self._agent.clock.at(due, partial(self._agent.submit, self.release))

    def line_held_by(self) -> Fault | None:
        """Return the fault for which the line waits; None if nobody is in line."""
        with self._lock:
            return self._last[1] if self._queue and self._last is not None else None

    def put_behind(self, held: HeldMessage) -> None:
        """Have a message wait for those before it in line, and no longer."""
        with self._lock:
            due = self._last[0] if self._queue and self._last is not None else float("-inf")
            self._queue += 1
            heapq.heappush(self._heap, (due, next(self._numbers), held))
        held.fault.hold(1)
        self._agent.submit(self.release)  # those before it may be gone by now

    def hasten(self, fault: Fault | None) -> None:
        """Let what a fault holds up (None: everything) leave now, in order."""
        with self._lock:
            heap: list[tuple[float, int, HeldMessage]] = []
            front = float("-inf")
            for due, number, held in sorted(self._heap, key=lambda each: each[1]):
                if fault is None or held.fault is fault:
                    due = float("-inf")
                if held.in_line:
                    front = due = max(due, front)
                heap.append((due, number, held))
            heapq.heapify(heap)
            self._heap = heap
            if self._last is not None:
                self._last = front, self._last[1]

    def release(self) -> None:
        """Send what is due, on this thread, unless another one does."""
        clock = self._agent.clock
        with self._lock:
            if self._busy:
                return
            self._busy = True
        sent: HeldMessage | None = None
        while True:
            with self._lock:
                if sent is not None and sent.in_line:
                    self._queue -= 1
                if not self._heap or self._heap[0][0] > clock.now():
                    self._busy = False
                    empty = not self._heap
                    break
                sent = heapq.heappop(self._heap)[2]
            sent.fault.hold(-1)
            try:
                sent.send()
            except Exception:
                _log.exception("a message that was held up could not be sent")
        if empty and sent is not None:
            self._emptied()

    def discard(self) -> None:
        """Give up all that waits."""
        with self._lock:
            heap, self._heap = self._heap, []
            self._queue = 0
        for _, _, held in heap:
            held.fault.hold(-1)
            held.discard()


_INFINITE: Final = float("inf")
_AGAIN_S: Final = 1.0  # a held notice that cannot be sent is tried again after this time
_EXECUTIONS: Final = 1 << 16  # of so many is it known what they were asked
_WATCHED: Final = (RECEIPT, transport.NOTICE)


class FaultGate:
    """The faults of one agent, at work. Thread-safe. Implements :class:`actorrpc.agent.hooks.MessageFilter`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self.worker = agent.name
        self._faults: tuple[Fault, ...] = ()
        self._kills: tuple[KillPoint, ...] = ()
        self._idle: list[Injection] = []  # they are for other workers
        self._rooms: dict[Peer, WaitingRoom] = {}
        self._lost: dict[bytes, tuple[Fault, Peer, str, bytes]] = {}  # notices that did not get through yet
        self._questions = _Questions()
        self._executions = _Executions(lambda: self._kills)
        self._handlers: dict[str, Callable[[Peer, bytes], None]] = {}
        self._closed = False

    # -- faults --------------------------------------------------------------------------------------

    def add(self, fault: Injection) -> None:
        """Bring a fault or kill point into force, if it is for this worker."""
        with self._lock:
            if self._closed or not fault.is_for(self.worker):
                self._idle.append(fault)
            elif isinstance(fault, KillPoint):
                self._kills = (*self._kills, fault)
                self._look()
            elif isinstance(fault, Fault):
                self._faults = (*self._faults, fault)
                self._look()

    def remove(self, fault: Injection) -> None:
        """Take a fault or kill point out of force: what it holds up leaves now, and notices that it dropped are sent."""
        with self._lock:
            self._kills = tuple(each for each in self._kills if each is not fault)
            self._faults = tuple(each for each in self._faults if each is not fault)
            self._idle = [each for each in self._idle if each is not fault]
            rooms = list(self._rooms.values())
            lost = {key: each for key, each in self._lost.items() if each[0] is fault}
            for key in lost:
                del self._lost[key]
        for room in rooms:
            if isinstance(fault, Fault):
                room.hasten(fault)
            self._agent.submit(room.release)
        for _, peer, name, body in lost.values():
            self._agent.submit(partial(self._agent.send_notice, peer, name, body))
        with self._lock:
            self._look()

    def close(self, graceful: bool) -> None:
        """Take all faults out of force; what is held up leaves now, or, at an end that is not graceful, never."""
        with self._lock:
            faults = [*self._faults, *self._kills, *self._idle]
            self._faults, self._kills = (), ()
            self._closed = True
        if graceful:
            for fault in faults:
                self.remove(fault)
            for room in list(self._rooms.values()):
                room.release()
        else:
            for room in list(self._rooms.values()):
                room.discard()
        for fault in faults:
            fault.ended()
        with self._lock:
            self._look()

    def _look(self) -> None:
        """Be at the agent's gate for as long as there is anything to do there. Under the lock."""
        agent = self._agent
        if self._faults or self._kills or any(not room.empty for room in self._rooms.values()):
            agent.gate = self
        elif agent.gate is self:
            agent.gate = None
        self._stand()
        asks = any(fault.takes_answers for fault in self._faults)
        asks = asks or any(kill.wants("sending", "sent") for kill in self._kills)
        if asks and self._questions not in agent.interceptors:
            agent.interceptors.append(self._questions)
        elif not asks and self._questions in agent.interceptors:
            agent.interceptors.remove(self._questions)

    def _stand(self) -> None:
        """Wrap executions and handlers for as long as anybody wants to be there. Under the lock."""
        agent = self._agent
        executes = any(kill.wants("starting", "finished") for kill in self._kills)
        if executes and self._executions not in agent.interceptors:
            agent.interceptors.append(self._executions)
        elif not executes and self._executions in agent.interceptors:
            agent.interceptors.remove(self._executions)
        handles = any(kill.wants("arrived", "handled") for kill in self._kills)
        if handles and not self._handlers:
            self._handlers = {name: agent.on_notice[name] for name in _WATCHED if name in agent.on_notice}
            for name, handler in self._handlers.items():
                agent.on_notice[name] = partial(self._handle, name, handler)
        elif not handles:
            agent.on_notice.update(self._handlers)
            self._handlers = {}

    def _handle(self, name: str, handler: Callable[[Peer, bytes], None], peer: Peer, body: bytes) -> None:
        type = type_of_notice(name, body)
        message = None if type is None else Message(type, peer, None)
        self._reach("arrived", message)
        handler(peer, body)
        self._reach("handled", message)

    def _reach(self, stage: str, message: Message | None) -> None:
        if message is not None:
            for kill in self._kills:
                kill.reach(f"{message.type}.{stage}", message)

    def _waits_until_sent(self, message: Message) -> bool:
        return any(f"{message.type}.sent" in kill.points for kill in self._kills)

    def _emptied(self) -> None:
        with self._lock:
            self._look()

    def _fault_for(self, message: Message) -> Fault | None:
        for fault in self._faults:
            if fault.takes(message):
                return fault
        return None

    def _room(self, peer: Peer) -> WaitingRoom:
        with self._lock:
            room = self._rooms.get(peer)
            if room is None:
                room = self._rooms[peer] = WaitingRoom(self._agent, self._emptied)
            return room

    # -- calls ---------------------------------------------------------------------------------------

    @uninterruptible
    def request(
        self,
        call: Call,
        function: Any,
        args: tuple[Any, ...],
        encoded: Any,
        header: Header | None,
        mail: MailHeader | None,
        context: MessageContext,
    ) -> bool:
        """See :class:`actorrpc.agent.hooks.MessageFilter`."""
        peer = call.peer
        type, called, subject = type_of_request(function, args, mail, call.label)
        parts = _contents(encoded) if mail is None else [mail.packed, *_contents(encoded)]
        message = Message(type, peer, called, parts, subject)
        self._reach("sending", message)
        fault = self._fault_for(message)
        make = partial(self._hold_call, call, encoded, header, mail, context)
        if fault is None:
            room = None if mail is None else self._rooms.get(peer)
            ahead = None if room is None else room.line_held_by()
            if room is None or ahead is None:
                if not self._waits_until_sent(message):
                    return True
                self._agent._dispatch(call, encoded, header)
                _hand_over(call.conn)
                self._reach("sent", message)
                return False
            room.put_behind(make(ahead))
            return False
        if fault.action == "delay":
            self._room(peer).put(make(fault), fault.seconds)
            return False
        self._agent.references.roll_back(context)
        self._expect(call)
        if fault.at_once or call.deadline == _INFINITE:
            if peer.pending.pop(call.id, None) is not None:
                # An RRef knows of its loss before it can be used. Nobody else can have a callback there yet.
                call.fail(_loss(str(call), peer, fault), None if type == "remote" else self._agent.submit)
        return False

    def _expect(self, call: Call) -> None:
        """Have a call that is not sent, but that its caller takes for sent, end as others do.

        Raises:
            PeerDiedError, ShutdownError: there is nobody, or nobody any more, who could end it.
        """
        agent, peer = self._agent, call.peer
        call.sent = True
        peer.pending[call.id] = call
        peer.check_alive(f"cannot call {call.label}")
        if agent.closed_down:
            raise ShutdownError(f"worker {agent.name!r} has shut down", maybe_executed=True)
        agent.scheduler.watch(call)

    def _hold_call(
        self,
        call: Call,
        encoded: Any,
        header: Header | None,
        mail: MailHeader | None,
        context: MessageContext,
        fault: Fault,
    ) -> HeldMessage:
        self._expect(call)
        whole = copied(encoded)
        size = len(whole) if isinstance(whole, bytes) else whole.nbytes
        if size >= outbound.CHARGED:
            call.peer.window.charge(call, size)
        left = call.deadline - self._agent.clock.now() if fault.bounded else _INFINITE
        if mail is not None:
            header = {**(header or {}), **mail.header}
        flags = 0 if mail is None else frames.MAIL
        send = partial(self._send_call, call, whole, header, context, left, flags)
        return HeldMessage(
            fault, send, partial(self._agent.references.roll_back, context), in_line=mail is not None
        )

    def _send_call(
        self,
        call: Call,
        whole: Any,
        header: Header | None,
        context: MessageContext,
        left: float,
        flags: int,
    ) -> None:
        """Send a call that was held up, whether or not its caller still waits for it."""
        peer = call.peer
        if not call.done and call.deadline <= self._agent.clock.now():
            call.expire()  # nobody has come to it: what is said to the worker then would overtake the call
        if peer.is_self:
            peer.cancelled.pop(call.id, None)  # that it was given up would have come behind it
        try:
            self._send_request(peer, call.id, whole, header, left, call.chain, flags, call.label, call)
        except RpcError as error:
            self._agent.references.roll_back(context)
            if peer.pending.pop(call.id, None) is not None:
                call.fail(error, self._agent.submit)

    def _send_request(
        self,
        peer: Peer,
        id: int,
        whole: Any,
        header: Header | None,
        left: float,
        chain: int,
        flags: int,
        label: str,
        call: Call | None = None,
    ) -> None:
        """Send a request.

        Raises:
            RpcError: it was not sent.
        """
        agent = self._agent
        if agent.closed_down:
            raise ShutdownError(f"worker {agent.name!r} has shut down", maybe_executed=False)
        if peer.is_self:
            agent.loop_back(frames.REQUEST, id, whole, header, agent.clock.now() + left, chain, flags)
            return
        peer.check_alive(f"cannot call {label}")
        conn = peer.conn
        if conn is None or conn.state is CLOSED:
            conn = agent.connector.connect(peer, _INFINITE, label)
        if call is not None and not call.done:
            call.conn = conn  # from now on, a caller that gives the call up says so over there
        outbound.send(
            agent, conn, frames.REQUEST, id, whole, remaining=left, chain=chain, header=header, flags=flags
        )
        conn.flush()

    # -- posts and notices ---------------------------------------------------------------------------

    @uninterruptible
    def post(
        self,
        peer: Peer,
        function: Any,
        args: tuple[Any, ...],
        encoded: Any,
        header: Header | None,
        chain: int,
        context: MessageContext,
    ) -> bool:
        """See :class:`actorrpc.agent.hooks.MessageFilter`."""
        type, called, subject = type_of_request(function, args, None, "")
        message = Message(type, peer, called, _contents(encoded), subject)
        self._reach("sending", message)
        fault = self._fault_for(message)
        if fault is None:
            if not self._waits_until_sent(message):
                return True
            self._send_post(peer, encoded, header, chain, context, type)
            _hand_over(peer.conn)
            self._reach("sent", message)
            return False
        if fault.action == "drop":
            self._agent.references.roll_back(context)
            raise _loss(f"a message of type {type}", peer, fault)
        send = partial(self._send_post, peer, copied(encoded), header, chain, context, type)
        held = HeldMessage(fault, send, partial(self._agent.references.roll_back, context))
        self._room(peer).put(held, fault.seconds)
        return False

    def _send_post(
        self,
        peer: Peer,
        whole: Any,
        header: Header | None,
        chain: int,
        context: MessageContext,
        type: str,
    ) -> None:
        try:
            self._send_request(peer, next(peer.ids), whole, header, _INFINITE, chain, frames.POST, type)
        except RpcError:
            self._agent.references.roll_back(context)  # the peer is dead: others are told

    def notice(self, peer: Peer, name: str, body: bytes) -> bool:
        """See :class:`actorrpc.agent.hooks.MessageFilter`."""
        type = type_of_notice(name, body)
        if type is None:
            return self._agent.send_notice(peer, name, body)
        message = Message(type, peer, None, (body,))
        self._reach("sending", message)
        fault = self._fault_for(message)
        if fault is None:
            if self._lost:
                with self._lock:
                    self._lost.pop(message.key(), None)
            sent = self._agent.send_notice(peer, name, body)
            if sent and self._waits_until_sent(message):
                _hand_over(peer.conn)
                self._reach("sent", message)
            return sent
        if fault.action == "drop":
            with self._lock:
                if fault in self._faults:
                    self._lost[message.key()] = fault, peer, name, body
                    return False
            return self._agent.send_notice(peer, name, body)  # it has ended in this moment
        send = partial(self._send_notice, fault, peer, name, body)
        self._room(peer).put(HeldMessage(fault, send, _nothing), fault.seconds)
        return True

    def _send_notice(self, fault: Fault, peer: Peer, name: str, body: bytes) -> None:
        agent = self._agent
        if agent.send_notice(peer, name, body) or peer.state != "alive" or agent.closed_down:
            return
        again = partial(self._send_notice, fault, peer, name, body)
        self._room(peer).put(HeldMessage(fault, again, _nothing), _AGAIN_S)

    # -- answers -------------------------------------------------------------------------------------

    def answer(
        self,
        conn: Any,
        kind: int,
        id: int,
        encoded: Any,
        header: Header | None,
        execution: Execution | None,
        context: MessageContext | None,
    ) -> bool:
        """See :class:`actorrpc.agent.hooks.MessageFilter`."""
        agent = self._agent
        peer = agent.self_peer if conn is None else conn.peer
        asked, called = self._questions.pop(peer, id)
        type = asked if asked == CONTROL else ANSWER
        message = Message(type, peer, called, _contents(encoded))
        self._reach("sending", message)
        fault = self._fault_for(message)
        discard = _nothing if context is None else partial(agent.references.roll_back, context)
        if fault is None:
            if not self._waits_until_sent(message):
                return True
            self._send_answer(conn, kind, id, encoded, header, discard)
            _hand_over(conn)
            self._reach("sent", message)
            return False
        if fault.action == "delay":
            send = partial(self._send_answer, conn, kind, id, copied(encoded), header, discard)
            self._room(peer).put(HeldMessage(fault, send, discard), fault.seconds)
            return False
        discard()
        if fault.at_once or execution is None or execution.deadline == _INFINITE:
            error = _loss("the answer of a call", peer, fault)
            data = exceptions.dump(error, worker=agent.name, dumps=codec.dumper(peer.same_main))
            self._send_answer(conn, frames.FAILURE, id, data, None, _nothing)
        return False

    def _send_answer(
        self,
        conn: Any,
        kind: int,
        id: int,
        encoded: Any,
        header: Header | None,
        discard: Callable[[], None],
    ) -> None:
        agent = self._agent
        if agent.closed_down or (conn is not None and conn.state is CLOSED):
            discard()
        elif conn is None:
            agent.loop_back(kind, id, encoded, header, _INFINITE, 0)
        else:
            try:
                outbound.send(agent, conn, kind, id, encoded, header)
            except RpcError:
                discard()
            else:
                conn.flush()


def _hand_over(conn: Connection | None) -> None:
    """Wait until the kernel has all that a connection was given to send, or the connection is lost."""
    while conn is not None and conn.state is OPEN:
        conn.flush(True)
        if conn.writer.is_drained(wait=True):
            return


class _Questions(Interceptor):
    """What calls that are executed here have asked for, for as long as they have no answer. An interceptor."""

    def __init__(self) -> None:
        # Guards the table; a leaf.
        self._lock = threading.Lock()
        self._asked: OrderedDict[tuple[Peer, int], tuple[str, Any]] = OrderedDict()

    def pop(self, peer: Peer, id: int) -> tuple[str, Any]:
        """Return the type of the call that is answered now, and what it has called, if that is known."""
        if not self._asked:
            return "", None
        with self._lock:
            return self._asked.pop((peer, id), ("", None))

    def wrap(
        self,
        execution: Execution,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[[], Any],
    ) -> Callable[[], Any]:
        """Note what is about to be called."""
        type, called, _ = type_of_request(function, args, None, "")
        with self._lock:
            self._asked[execution.peer, execution.id] = type, called
            if len(self._asked) > _EXECUTIONS:  # posts, and calls that were given up
                self._asked.popitem(last=False)
        return call


class _Executions(Interceptor):
    """Tells kill points when calls are executed here. An interceptor."""

    def __init__(self, kills: Callable[[], tuple[KillPoint, ...]]) -> None:
        self._kills = kills

    def wrap(
        self,
        execution: Execution,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[[], Any],
    ) -> Callable[[], Any]:
        """Be there before and after the call."""
        type, called, _ = type_of_request(function, args, None, "")
        message = Message("actor_call" if execution.actor is not None else type, execution.peer, called)

        def run() -> Any:
            for kill in self._kills():
                kill.reach(f"{message.type}.starting", message)
            return finishing(self._kills(), message, call())

        return run


def _contents(encoded: Any) -> list[bytes]:
    if isinstance(encoded, bytes):
        return [encoded]
    if (
        not encoded.spans
    ):  # the same as those that are mere bytes: which it is depends on what was packed before
        return [encoded.body]
    return [encoded.body, repr([span.nbytes for span in encoded.spans]).encode()]


def _nothing() -> None:
    """Give back nothing."""


def _loss(what: str, peer: Peer, fault: Fault) -> RpcTimeoutError:
    why = "" if fault.at_once else "; as it has no time-out, it ends at once"
    return RpcTimeoutError(
        f"{what} was lost on the way to {peer.name!r}: {fault!r} has dropped it{why}",
        maybe_executed=True,
        worker=peer.name,
    )
