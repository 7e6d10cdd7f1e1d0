"""The hooks by which faults drop or hold back an agent's messages before they are sent.

They are installed in the agent while a fault is in force. :func:`start` makes the :class:`FaultFilter` of this process's worker.
A :class:`WaitingRoom` holds messages back, and sends each of them when it is due.

``FaultFilter._lock`` guards the lists of faults and rooms; hooks are added under it. The locks of rooms and faults are leaves.
No lock is held while messages are sent or their references are released.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import operator
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from actorrpc.agent import hooks, outbound
from actorrpc.agent.context import Worker
from actorrpc.agent.hooks import CallHooks
from actorrpc.errors import PeerDiedError, RpcError, RpcTimeoutError, ShutdownError
from actorrpc.rpc import api
from actorrpc.serialization import codec, exceptions
from actorrpc.serialization.tensors import TensorSpan
from actorrpc.testing.faults import Fault, apply_to, from_environment
from actorrpc.testing.message_types import Message, described, type_of_request
from actorrpc.transport.signals import uninterruptible
from actorrpc.transport.stream import CLOSED
from actorrpc.wire import frames

if TYPE_CHECKING:
    from actorrpc.agent.agent import Agent
    from actorrpc.agent.calls import Call, Execution
    from actorrpc.agent.peers import Peer

__all__ = ["FaultFilter", "start"]

_log = logging.getLogger("actorrpc.testing")
_INFINITE: Final = float("inf")


@dataclass(slots=True, eq=False)
class HeldMessage:
    """A delayed message.

    Attributes:
        fault: the fault that delays it.
        due: when the message is sent, by the agent's clock.
        in_line: whether the message keeps its order among the messages in line, which are the calls of actors.
        send: sends the message; called in a pool thread, with no lock held.
        discard: releases the references in the message; called if the message will not be sent.
    """

    fault: Fault
    due: float
    in_line: bool
    send: Callable[[], None]
    discard: Callable[[], None]


_by_due: Final = operator.attrgetter("due")


class WaitingRoom:
    """Delayed messages to one worker. Thread-safe.

    Args:
        emptied: called, with no lock held, when the last message was sent.
    """

    def __init__(self, agent: Agent, emptied: Callable[[], None]) -> None:
        self._agent = agent
        self._emptied = emptied
        # Guards the attributes below; a leaf.
        self._lock = threading.Lock()
        self._held: list[
            HeldMessage
        ] = []  # sorted by the time at which they are due; messages in line keep their order
        self._sending: HeldMessage | None = None  # the message that a thread is sending in release()

    @property
    def empty(self) -> bool:
        """Whether no message waits and none is being sent."""
        return not self._held and self._sending is None

    def put(self, held: HeldMessage) -> None:
        """Delay a message until it is due; a message in line also waits for the messages before it in line."""
        with self._lock:
            ahead = self._last_in_line() if held.in_line else None
            if ahead is not None:
                held.due = max(held.due, ahead.due)
            bisect.insort(self._held, held, key=_by_due)
        held.fault.hold(1)
        if held.due > self._agent.clock.now():
            self._agent.clock.at(held.due, partial(self._agent.submit, self.release))
        else:
            self._agent.submit(self.release)

    def line_held_by(self) -> Fault | None:
        """Return the fault that delays the last message in line; None if no message is in line."""
        with self._lock:
            last = self._last_in_line()
            return None if last is None else last.fault

    def _last_in_line(self) -> HeldMessage | None:
        in_line = (
            each for each in (*reversed(self._held), self._sending) if each is not None and each.in_line
        )
        return next(in_line, None)

    def hasten(self, faults: Collection[Fault]) -> None:
        """Make the messages that these faults delay due now; messages in line still wait for the messages before them."""
        with self._lock:
            front = -_INFINITE
            for held in self._held:
                if held.fault in faults:
                    held.due = -_INFINITE
                if held.in_line:
                    held.due = front = max(held.due, front)
            self._held.sort(key=_by_due)

    def release(self) -> None:
        """Send the messages that are due, in this thread. Does nothing if another thread is sending them."""
        with self._lock:
            held = self._next() if self._sending is None else None
        if held is None:
            return
        while held is not None:
            held.fault.hold(-1)
            try:
                held.send()
            except Exception:
                _log.exception("a delayed message could not be sent")
            with self._lock:
                held = self._next()
        if self.empty:
            self._emptied()

    def _next(self) -> HeldMessage | None:
        """Remove and return the next message that is due. Under the lock."""
        is_due = self._held and self._held[0].due <= self._agent.clock.now()
        self._sending = self._held.pop(0) if is_due else None
        return self._sending

    def discard(self) -> None:
        """Discard all messages that wait."""
        with self._lock:
            discarded, self._held = self._held, []
        for held in discarded:
            held.fault.hold(-1)
            held.discard()


_AGAIN_S: Final = 1.0  # a delayed notice that could not be sent is retried after this time


class FaultFilter(CallHooks):
    """Applies the faults of one agent. Thread-safe."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._faults: tuple[Fault, ...] = ()
        self._rooms: dict[Peer, WaitingRoom] = {}
        # Dropped notices that have not been sent again, by :meth:`Message.key`.
        self._lost: dict[bytes, tuple[Fault, hooks.OutgoingMessage]] = {}

    # -- faults --------------------------------------------------------------------------------------

    def apply(self, faults: Sequence[Fault]) -> None:
        """Apply only these faults from now on. Send the delayed messages and the dropped notices of faults that have ended."""
        with self._lock:
            before = self._faults
            self._faults = tuple(each for each in faults if each.is_for(self._agent.name))
            ended = [each for each in before if each not in self._faults]
            rooms = list(self._rooms.values())
            lost = [key for key, (fault, _) in self._lost.items() if fault in ended]
            notices = [self._lost.pop(key)[1] for key in lost]
            self._look()
        if ended:
            for room in rooms:
                room.hasten(ended)
                self._agent.submit(room.release)
        for notice in notices:
            self._agent.submit(partial(self._send_notice, notice))

    def close(self, graceful: bool) -> None:
        """End all faults. If ``graceful``, send the delayed messages; otherwise discard them."""
        if graceful:
            self.apply(())
            for room in list(self._rooms.values()):
                room.release()
            return
        with self._lock:
            self._faults = ()
        for room in list(self._rooms.values()):
            room.discard()
        self._emptied()

    def _look(self) -> None:
        """Install the hooks if there are faults or messages to send, else remove them. Under the lock."""
        if self._faults or any(not room.empty for room in self._rooms.values()):
            self._agent.hooks.add(self)
        else:
            self._agent.hooks.remove(self)

    def _emptied(self) -> None:
        with self._lock:
            self._look()

    def _room(self, peer: Peer) -> WaitingRoom:
        with self._lock:
            room = self._rooms.get(peer)
            if room is None:
                room = self._rooms[peer] = WaitingRoom(self._agent, self._emptied)
            return room

    # -- messages ------------------------------------------------------------------------------------

    def on_start(self, execution: Execution, function: Any, args: tuple[Any, ...]) -> None:
        """Record the executed function, so that faults can select the answer by its function."""
        type, called, _ = type_of_request(function, args, None, "")
        execution.notes[self] = Message(type, execution.peer, called)

    @uninterruptible
    def before_send(self, sent: hooks.OutgoingMessage) -> bool:
        """Drop the message or hold it back if a fault selects it. Returns whether the agent should send it now."""
        message = described(sent, self)
        if message is None:
            return True
        fault = next((each for each in self._faults if each.takes(message)), None)
        if fault is None:
            if self._lost:
                with self._lock:
                    self._lost.pop(message.key(), None)
            # A call of an actor must not overtake earlier calls that are delayed.
            room = None if sent.mail is None else self._rooms.get(sent.peer)
            ahead = None if room is None else room.line_held_by()
            if room is not None and ahead is not None:
                room.put(self._held(sent, ahead, -_INFINITE))
                return False
            return True
        if fault.action == "delay":
            self._room(sent.peer).put(self._held(sent, fault, fault.seconds))
            return False
        if sent.kind == frames.NOTICE:
            with self._lock:
                if fault not in self._faults:
                    return True  # another thread has just ended the fault
                self._lost[message.key()] = fault, sent
            sent.lost = True
            return False
        self._roll_back(sent)
        self._lose(sent, message, fault)
        return False

    def _roll_back(self, sent: hooks.OutgoingMessage) -> None:
        if sent.context is not None:
            self._agent.references.roll_back(sent.context)

    def _lose(self, sent: hooks.OutgoingMessage, message: Message, fault: Fault) -> None:
        """Fail the call whose request or answer is dropped at once, if the call has no deadline or the fault is ``at_once``.

        Raises:
            RpcTimeoutError: the message is a one-way request (cast); no call or answer can carry the error.
        """
        call, agent = sent.call, self._agent
        if call is not None:
            self._expect(call)
            if fault.at_once or call.deadline == _INFINITE:
                if sent.peer.pending.pop(call.id, None) is not None:
                    # Fail the RRef's call in this thread: no code has the RRef yet, so there are no callbacks to run.
                    submit = None if message.type == "remote" else agent.submit
                    call.fail(_loss(str(call), sent.peer, fault), submit)
        elif sent.is_answer:
            if fault.at_once or sent.execution is None or sent.execution.deadline == _INFINITE:
                error = _loss("the answer of a call", sent.peer, fault)
                sent.encoded = exceptions.dump(
                    error, worker=agent.name, dumps=codec.dumper(sent.peer.same_main)
                )
                sent.kind, sent.header, sent.context = frames.FAILURE, None, None
                with contextlib.suppress(RpcError):
                    self._transmit(sent, _INFINITE)
        else:
            raise _loss(f"a message of type {message.type}", sent.peer, fault)

    def _expect(self, call: Call) -> None:
        """Register a call that is not sent (yet), so that a deadline, a cancellation or the peer's death ends the call.

        Raises:
            PeerDiedError, ShutdownError: the peer is dead or this worker has shut down.
        """
        agent, peer = self._agent, call.peer
        call.sent = True
        peer.pending[call.id] = call
        peer.check_alive(f"cannot call {call.label}")
        if agent.closed_down:
            raise ShutdownError(f"worker {agent.name!r} has shut down", maybe_executed=True)
        agent.scheduler.watch(call)

    # -- delayed messages ---------------------------------------------------------------------

    def _held(self, sent: hooks.OutgoingMessage, fault: Fault, seconds: float) -> HeldMessage:
        call, left, now = sent.call, _INFINITE, self._agent.clock.now()
        if call is not None:
            self._expect(call)
            if sent.size >= outbound.CHARGED:
                sent.peer.window.charge(call, sent.size)
            if fault.bounded:
                left = call.deadline - now
        sent.function, sent.args = None, ()
        encoded = sent.encoded
        if not isinstance(encoded, bytes) and encoded.spans:
            # Copy the memory that the message refers to, because the caller may change it before the message is sent.
            encoded.spans = [TensorSpan.of(bytearray(span.view())) for span in encoded.spans]
            encoded.outgoing, encoded.tensors = None, []
        if sent.mail is not None:
            sent.header = {**(sent.header or {}), **sent.mail.header}
        send, discard = partial(self._send, sent, left, fault), partial(self._roll_back, sent)
        return HeldMessage(fault, now + seconds, sent.mail is not None, send, discard)

    def _send(self, sent: hooks.OutgoingMessage, left: float, fault: Fault) -> None:
        """Send a delayed message, even if its call has ended meanwhile."""
        agent, call, peer = self._agent, sent.call, sent.peer
        if sent.kind == frames.NOTICE:
            if not self._send_notice(sent) and peer.state == "alive" and not agent.closed_down:
                self._room(peer).put(self._held(sent, fault, _AGAIN_S))
            return
        if call is not None:
            if not call.done and call.deadline <= agent.clock.now():
                call.expire()  # otherwise a CANCEL would be sent later, and might overtake the call
            if peer.is_self:
                # Over a connection, a CANCEL would arrive after the delayed call, so the call would begin. Here the CANCEL was
                # noted at once; remove the note, so that the call begins, too.
                peer.cancelled.pop(call.id, None)
        try:
            self._transmit(sent, left)
        except RpcError as error:
            self._roll_back(sent)
            if call is not None and peer.pending.pop(call.id, None) is not None:
                call.fail(error, agent.submit)

    def _send_notice(self, sent: hooks.OutgoingMessage) -> bool:
        assert isinstance(sent.encoded, bytes)
        return self._agent.send_notice(sent.peer, sent.name, sent.encoded)

    def _transmit(self, sent: hooks.OutgoingMessage, left: float) -> None:
        """Send a request or an answer.

        Args:
            left: seconds until the deadline of a request.

        Raises:
            RpcError: the message was not sent.
        """
        agent, peer, call = self._agent, sent.peer, sent.call
        if agent.closed_down:
            raise ShutdownError(f"worker {agent.name!r} has shut down", maybe_executed=False)
        if peer.is_self:
            deadline = agent.clock.now() + left
            agent.loop_back(sent.kind, sent.id, sent.encoded, sent.header, deadline, sent.chain, sent.flags)
            return
        conn = sent.conn
        if conn is None:
            peer.check_alive(f"cannot call {sent.name}")
            conn = peer.conn
            if conn is None or conn.state is CLOSED:
                conn = agent.connector.connect(peer, _INFINITE, sent.name)
        elif conn.state is CLOSED:
            raise PeerDiedError("the connection was closed", maybe_executed=True)
        if call is not None and not call.done:
            call.conn = conn  # from now on, a caller that stops waiting sends a CANCEL over this connection
        outbound.send(
            agent,
            conn,
            sent.kind,
            sent.id,
            sent.encoded,
            sent.header,
            remaining=left,
            chain=sent.chain,
            flags=sent.flags,
        )
        conn.flush()


def _loss(what: str, peer: Peer, fault: Fault) -> RpcTimeoutError:
    why = "" if fault.at_once else "; as it has no time-out, it ends at once"
    return RpcTimeoutError(
        f"{what} was lost on the way to {peer.name!r}: {fault!r} has dropped it{why}",
        maybe_executed=True,
        worker=peer.name,
    )


def start(worker: Worker) -> Callable[[bool], None]:
    """Bring the faults of this process into force; return a function that ends them.

    Raises:
        ConfigError: ``ACTORRPC_FAULT`` cannot be parsed.
    """
    faults = from_environment()
    fault_filter = FaultFilter(worker.agent)
    apply_to(fault_filter.apply)
    for fault in faults:
        fault.start()

    def shut_down(graceful: bool) -> None:
        apply_to(None)
        fault_filter.close(graceful)

    return shut_down


api.on_start.append(start)
