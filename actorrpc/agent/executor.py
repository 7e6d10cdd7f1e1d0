"""The execution of requests, from the arrival of a request to its answer.

Pool threads execute requests and send answers; the thread that completes the future of an ``async_execution`` function sends that
answer. A request whose deadline has passed, or whose caller has cancelled it, is not started. No lock is held while arguments are
opened, functions run and answers are packed. The arguments are dropped before the answer is sent, so that the release of their
shared memory is sent with it.
"""

from __future__ import annotations

import logging
import pickle
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any, Final

import torch

from actorrpc._exceptions import cut_frames, is_a, is_of_handler, let_frames_go, line_of, report, say
from actorrpc._limits import NO_DESCRIPTOR
from actorrpc._torch import NativeFuture
from actorrpc.agent import outbound
from actorrpc.agent.calls import CURRENT, MAILBOX_BIT, Execution
from actorrpc.agent.hooks import OutgoingMessage, recorded, run_hooked
from actorrpc.agent.peers import MessageContext, Peer
from actorrpc.errors import (
    CancelledError,
    DeadlockError,
    LimitError,
    ProtocolError,
    RefusedError,
    RpcError,
    RpcTimeoutError,
    SerializationError,
)
from actorrpc.flight_recorder import in_words
from actorrpc.futures import QUEUED, run_queued_callbacks
from actorrpc.serialization import codec, exceptions
from actorrpc.transport.stream import CLOSED
from actorrpc.wire.frames import CAST, FAILURE, REPLY, Frame, Header, pack_frame, unpack_header

if TYPE_CHECKING:
    from actorrpc.agent.agent import Agent

__all__ = ["ASYNC_MARK", "Deferred", "Executor", "future_of", "pack_error", "path_of"]

_PLAIN: Final = frozenset({int, float, bool, type(None)})  # the types of values that need no codec
_dumps = pickle.dumps
_modules: Final = sys.modules
_log = logging.getLogger("actorrpc")
_INFINITE: Final = float("inf")
# Advice for the error text if a method returns an object of such a type: its decorator hides that it is a generator function.
_OF_GENERATORS: Final[dict[type, str]] = {
    GeneratorType: '. It is a generator, and its decorator hides that: call it with .options(num_returns="streaming")',
    AsyncGeneratorType: ". Its decorator hides what it is: have the decorator's wrapper be an async generator function",
}
# The attribute that marks functions whose future is the answer; torch's decorator sets it, too.
ASYNC_MARK: Final = "_wrapped_async_rpc_function"


def path_of(header: Header, chain: int) -> tuple[int, ...]:
    """Return the executions of actor methods that led to a request, the outermost first.

    Raises:
        ProtocolError: the header is not valid.
    """
    path = header.get("path", ())
    if not chain >> MAILBOX_BIT:
        return ()
    if not isinstance(path, (list, tuple)) or not all(isinstance(each, int) for each in path):
        raise ProtocolError("the path of a request cannot be read")
    return (*path, chain)


class Deferred:
    """Returned by internal functions whose answer is the value of a future, not the future."""

    __slots__ = ("future",)

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self.future = future


def future_of(value: Any, function: Any) -> Any:
    """Check that a function marked with ``async_execution`` has returned a future, and return the future.

    Raises:
        TypeError: ``value`` is not a future.
    """
    if not isinstance(value, NativeFuture):
        raise TypeError(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but got "
            f"{type(value)} from {getattr(function, '__qualname__', function)}"
        )
    return value


def pack_error(
    agent: Agent, error: BaseException, same_main: bool | None, where: str = "", executed: bool = True
) -> bytes:
    """Pack an error as an answer, shortened if it does not fit into a message.

    Args:
        where: worker and actor, for the text of the error.
        executed: False if the called function was certainly not started.
    """
    settings, dumps = agent.settings, codec.dumper(same_main)
    # The message may hold two pickles of the error, the members of an exception group and texts: a quarter of ``max_message``
    # for one pickle leaves room for these in most cases.
    limit = min(exceptions.MAX_PICKLE, settings.max_message // 4)
    dump = partial(exceptions.dump, error, worker=agent.name, dumps=dumps, executed=executed, where=where)
    data = dump(limit=limit)
    if len(data) > max(settings.max_message, settings.chunk):
        data = dump(limit=0)
    return data


class Executor:
    """Runs requests for one agent. Thread-safe: it has no state of its own."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        # This error is packed in advance: when it is sent, there may be no memory for packing it.
        short = LimitError(
            f"worker {agent.name!r} cannot send the outcome of the call: it has no memory or no descriptors left, or the "
            "error is larger than its setting max_message"
        )
        short.maybe_executed = True
        self._short = exceptions.dump(short, worker=agent.name, dumps=codec.dumper(None))

    def run(self, task: tuple[Any, Frame, float], waiting: bool = False) -> None:
        """Execute a request that was read at ``task[2]``, answer it, and read the next requests.

        ``waiting``: the request is a cast that this thread has read while it waited for a reply. If a signal handler raises
        meanwhile, the exception is raised and not logged.
        """
        conn, frame, received_at = task
        agent = self._agent
        peer = agent.self_peer if conn is None else conn.peer
        id = frame[2]
        execution = Execution(conn, peer, id, received_at + frame[3], frame[4], received_at)
        if conn is not None and not peer.begun.first(id):
            _log.warning("request %d of %r came twice; it is executed once", id, peer.name)
        else:
            peer.running[id] = execution
            # Test after ``running`` was set. A thread that cancels the call sets ``cancelled`` first and then reads ``running``,
            # so one of the two threads sees the other's entry.
            if execution.begun > execution.deadline or (peer.cancelled and id in peer.cancelled):
                self._refuse_unwanted(frame, execution)
            else:
                token = CURRENT.set(execution)
                answered = True
                try:
                    if frame[5]:
                        self._read_header(frame, execution)
                    header, hooks = execution.header, agent.hooks
                    opened = outbound.opened(agent, conn, frame, peer, header, execution)
                    function, args, kwargs = opened
                    if type(function) is int:
                        try:
                            module, name = peer.functions.names[function]
                            function = getattr(_modules[module], name)
                        except (KeyError, AttributeError):
                            function = peer.functions.find(function, peer.name)
                    elif type(function) is tuple:
                        function = self._learn(peer, function)
                    execution.what = function
                    if hooks.on_start or (header and not hooks.header_fields.isdisjoint(header)):
                        value = run_hooked(hooks, execution, function, args, kwargs)
                    else:
                        value = function(*args, **kwargs)
                    opened = args = kwargs = None  # releases shared memory; the answer reports the release
                    if type(value) is Deferred or getattr(function, ASYNC_MARK, None) is not None:
                        self._answer_later(execution, value, function)
                        answered = False
                except BaseException as error:
                    opened = args = kwargs = None
                    self._raised(frame, error, execution, waiting)
                else:
                    if agent.abandoned:
                        agent.end_fork("a call", None)
                    if answered:
                        if not frame[1] & CAST:
                            self.answer(execution, value)
                        elif execution.ending is not None:
                            self._end_post(execution, None)
                finally:
                    CURRENT.reset(token)
                    if answered:
                        peer.running.pop(id, None)
        if conn is None or waiting:
            return
        if not agent.pool.queue:
            conn.reply()
        elif len(conn.outbox) >= agent.settings.cork_frames:
            conn.flush(True)
        elif conn.outbox and conn not in agent.scheduler.corked:
            agent.scheduler.cork(conn)  # more requests are queued; their answers are sent together

    def run_casts(self, casts: deque[tuple[Any, Frame, float]]) -> None:
        """Execute casts on the thread that has read them while it waited for a reply.

        Raises:
            Exception: an exception of a signal handler.
        """
        while casts:
            task = casts.popleft()
            try:
                # In a new context, so that this thread's CURRENT does not change, even if a signal handler raises within run().
                copy_context().run(self.run, task, True)
            except BaseException:
                task[0].peer.running.pop(task[1].id, None)
                raise
        if QUEUED:
            run_queued_callbacks()

    def _refuse_unwanted(self, frame: Frame, execution: Execution) -> None:
        """Refuse a request that its caller has cancelled, or whose deadline has passed."""
        name, peer = self._agent.name, execution.peer
        peer.running.pop(frame.id, None)
        error: RpcError
        if execution.begun > execution.deadline:
            text = f"{name!r} could not start the call in time: its deadline had passed"
            error = RpcTimeoutError(text, maybe_executed=False, worker=name)
        else:
            text = "the call was cancelled before it started"
            error = CancelledError(text, maybe_executed=False, worker=name)
        peer.cancelled.pop(frame.id, None)
        self.refuse(execution.conn, frame, error)

    def _raised(self, frame: Frame, error: BaseException, execution: Execution, waiting: bool) -> None:
        if self._agent.abandoned:
            self._agent.end_fork("a call", error)
        cut_frames(error, __file__)
        if frame.flags & CAST:
            if execution.ending is not None:
                self._end_post(execution, error)
            if waiting and is_of_handler(error):
                raise error
            report(_log, error, "a cast of %r failed here", execution.peer.name)
        else:
            self.fail(execution, error)

    def _end_post(self, execution: Execution, error: BaseException | None) -> None:
        """Run the hooks at the end of a cast, except the flight recorder's, which has no records of casts."""
        try:
            for end in execution.ending or ():
                if end not in self._agent.hooks.recorded:
                    end(execution, error)
        except Exception as raised:
            report(_log, raised, "hooks at the end of a cast of %r failed here", execution.peer.name)

    def _learn(self, peer: Peer, introduced: tuple[Any, ...]) -> Any:
        if self._agent.record.data_only:
            raise RefusedError("this worker takes data only: functions have no numbers here")
        return peer.functions.learn(introduced)

    @staticmethod
    def _read_header(frame: Frame, execution: Execution) -> None:
        header = execution.header = unpack_header(frame.extra)
        if "path" in header:
            execution.path = path_of(header, frame.chain)

    def _answer_later(self, execution: Execution, value: Any, function: Any) -> None:
        running, id = execution.peer.running, execution.id

        def answer(result: Any) -> None:
            self.answer(execution, result)
            running.pop(id, None)

        def fail(error: BaseException) -> None:
            self.fail(execution, error)
            running.pop(id, None)

        execution.deferred = True
        future = value.future if type(value) is Deferred else future_of(value, function)
        self.when_done(future, execution, answer, fail)

    def when_done(
        self,
        future: Any,
        execution: Execution,
        answer: Callable[[Any], object],
        fail: Callable[[BaseException], object],
    ) -> None:
        """Call ``answer`` with the value or ``fail`` with the error of a future, on the thread that completes the future."""

        def ready(done: Any) -> None:
            token = CURRENT.set(execution)
            try:
                try:
                    value = done.value()
                except BaseException as error:
                    fail(error)
                else:
                    answer(value)
            finally:
                CURRENT.reset(token)
            if execution.conn is not None:
                execution.conn.flush()

        future.add_done_callback(ready)

    # -- answering -----------------------------------------------------------------------------------

    def answer(
        self,
        execution: Execution,
        value: Any,
        keep: Callable[[Any, codec.Encoded | bytes, Peer], Any] | None = None,
    ) -> None:
        """Send an answer, or the error of packing it. ``keep(value, packed value, peer)`` may return another value to send."""
        agent, conn = self._agent, execution.conn
        hooks, stage = agent.hooks, "runs"
        message: MessageContext | None = None
        try:
            if (
                type(value) in _PLAIN
                and conn is not None
                and not hooks.messages
                and execution.convert is None
                and execution.peer.same_main is not None
            ):
                stage = "ends"
                for end in hooks.on_end if execution.ending is None else execution.ending:
                    end(execution, None)
                stage = "ended"
                conn.outbox.append(outbound.pack(agent, conn, REPLY, execution.id, _dumps(value, 5)))  # type: ignore[arg-type]
                return
            if execution.convert is not None:
                value = execution.convert(value)
            message = MessageContext(execution.peer)
            header: Header | None = None
            encoded = agent.encode(value, message, answer=True)
            if keep is not None:
                kept = keep(value, encoded, execution.peer)
                if kept is not value:
                    agent.references.roll_back(message)
                    message = MessageContext(execution.peer)
                    encoded = agent.encode(kept, message, answer=True)
            if not isinstance(encoded, bytes) and encoded.grad:
                header = recorded(agent.recorder, header, encoded, execution.peer)
            if message.sent or message.objects:
                header = agent.announce(message, header)
            stage = "ends"
            for end in hooks.on_end if execution.ending is None else execution.ending:
                end(execution, None)
            stage = "ended"
            if not self._send(conn, REPLY, execution.id, encoded, header, execution, message):
                agent.references.roll_back(message)
        except BaseException as error:
            if message is not None:
                agent.references.roll_back(message)
            if stage != "ends" and (is_a(error, SerializationError) or not is_a(error, RpcError)):
                remedy = _OF_GENERATORS.get(type(value), "") if execution.actor is not None else ""
                wrapped = SerializationError(
                    f"the result of {in_words(execution.label)} cannot be sent: {say(error)}{remedy}"
                )
                wrapped.__cause__ = error
                error = wrapped
            elif is_a(error, LimitError):
                error.maybe_executed = True  # the function has run; only its result exceeds the limit
            if stage == "runs":
                self.fail(execution, error)
            else:
                self._send_error(execution, error)

    def fail(self, execution: Execution, error: BaseException) -> None:
        """Run the hooks at the end of an execution, and answer with ``error``, or with the error that a hook raised."""
        try:
            for end in self._agent.hooks.on_end if execution.ending is None else execution.ending:
                end(execution, error)
        except Exception as raised:  # hooks of the user have raised
            error = raised
        self._send_error(execution, error)

    def _send_error(self, execution: Execution, error: BaseException) -> None:
        conn, id = execution.conn, execution.id
        try:
            name, shown = self._agent.name, getattr(execution.actor, "shown", "")
            where = f"{name}, actor {shown}" if shown else name
            # The function is known after the request was opened. Before that, it was refused for lack of memory.
            executed = execution.what is not None or not is_a(error, LimitError)
            data = pack_error(self._agent, error, execution.peer.same_main, where, executed)
            let_frames_go(error)
            self._send(conn, FAILURE, id, data, None, execution)
        except BaseException as failure:
            self._fail_shortly(conn, id, execution.peer, failure)

    def _fail_shortly(self, conn: Any, id: int, peer: Peer, failure: BaseException) -> None:
        """Answer a call whose error cannot be packed or sent, or for whose error a hook has raised. Hooks do not see this answer.

        If memory or descriptors have run out, a small message may still be sent.
        """
        data = self._short
        scarce = is_a(failure, (MemoryError, LimitError)) or (
            is_a(failure, OSError) and failure.errno in NO_DESCRIPTOR
        )
        if not scarce:
            with suppress(Exception):
                data = pack_error(self._agent, failure, peer.same_main, self._agent.name)
        if conn is None:
            self._agent.loop_back(FAILURE, id, data, None, _INFINITE, 0)
        else:
            conn.outbox.append(pack_frame(FAILURE, id, data))
        _log.error("an error cannot be sent to %r: %s", peer.name, line_of(failure))

    def refuse(self, conn: Any, frame: Frame, error: RpcError) -> None:
        """Answer an unopened request with an error (unless it is a cast), and release the memory and references in it."""
        self._agent.inbox.discard(conn, frame)
        if not frame.flags & CAST:
            self.refuse_opened(conn, frame.id, error)

    def refuse_opened(self, conn: Any, id: int, error: RpcError) -> None:
        """Answer a request that has been opened, but is not executed, with an error."""
        peer = self._agent.self_peer if conn is None else conn.peer
        try:
            dumps = codec.dumper(peer.same_main)
            data = exceptions.dump(error, worker=self._agent.name, dumps=dumps, executed=False)
            self._send(conn, FAILURE, id, data, None)
        except MemoryError as failure:
            self._fail_shortly(conn, id, peer, failure)
        except Exception as raised:
            report(_log, raised, "a hook failed for the refusal of a call of %r", peer.name)
            self._send(conn, FAILURE, id, data, None, offered=True)
        if conn is not None:
            conn.flush()

    def refuse_stuck(self, task: tuple[Any, Frame, float], why: str) -> None:
        """Answer a request that cannot be executed because all threads are blocked."""
        conn, frame, _ = task
        name = self._agent.name
        text = f"{name!r} did not execute the call: {why}"
        self.refuse(conn, frame, DeadlockError(text, maybe_executed=False, worker=name))

    def _send(
        self,
        conn: Any,
        kind: int,
        id: int,
        encoded: codec.Encoded | bytes,
        header: Header | None,
        execution: Execution | None = None,
        message: MessageContext | None = None,
        *,
        offered: bool = False,
    ) -> bool:
        agent = self._agent
        if agent.hooks.messages and not offered:
            peer = agent.self_peer if conn is None else conn.peer
            answer = OutgoingMessage(
                kind, peer, id, encoded, header, execution=execution, conn=conn, context=message
            )
            send = partial(self._send, conn, kind, id, encoded, header, offered=True)
            sent = agent.hooks.send(answer, send)
            return sent is None or bool(sent)
        if conn is None:
            agent.loop_back(kind, id, encoded, header, _INFINITE, 0)
            return True
        if conn.state is CLOSED:
            return False
        try:
            return outbound.send(agent, conn, kind, id, encoded, header)
        except RpcError as error:
            if conn.state is CLOSED:
                return False
            if kind == FAILURE:
                self._fail_shortly(conn, id, conn.peer, error)
                return False
            data = exceptions.dump(error, worker=agent.name, dumps=codec.dumper(conn.peer.same_main))
            outbound.send(agent, conn, FAILURE, id, data)
            return False
