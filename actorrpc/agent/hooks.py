"""Hooks, by which other modules and users take part in the calls of an agent.

A user or a module of this package derives a class from :class:`CallHooks`, overrides the methods that it needs, and adds an
instance: to all workers of the process (:func:`add_hooks`), or to one agent (:class:`HookSet`). A method for which no hooks
were added costs a call one test of an empty tuple. The flight recorder, spans of OpenTelemetry, ranges and remote events of
torch's profilers, and the faults of ``actorrpc.testing`` are such hooks.

Three more interfaces are here. Each agent has a :class:`Recorder`, which follows the tensors in messages (distributed autograd),
and a :class:`MessageReferences`, which counts the references in messages (RRefs). *Points* are named moments in the life of a
worker, at which tests make it die, stop or fail (:func:`reach`).
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import weakref
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from actorrpc._torch import profiler, thread_is_profiled
from actorrpc.wire import frames

if TYPE_CHECKING:
    from actorrpc.agent.calls import Call, Execution, MailHeader
    from actorrpc.agent.peers import MessageContext, Peer
    from actorrpc.flight_recorder import FlightRecorder
    from actorrpc.serialization.codec import Encoded
    from actorrpc.transport.connection import Connection
    from actorrpc.wire.frames import Header

__all__ = [
    "NO_NOTES",
    "POINTS",
    "RECEIPT",
    "CallHooks",
    "HookSet",
    "MessageReferences",
    "OutgoingMessage",
    "Recorder",
    "add_hooks",
    "is_profiled",
    "reach",
    "recorded",
    "remove_hooks",
    "run_hooked",
    "watch",
]

_log = logging.getLogger("actorrpc")
NO_NOTES: Final = cast("dict[Any, Any]", MappingProxyType({}))
"""The notes of calls and executions in which no hooks take part."""

RECEIPT: Final = "receipt"
"""The name of the notice by which a worker reports which references have arrived and which it has released."""


def is_profiled() -> bool:
    """Return whether a call that this thread makes is profiled, so that hooks with ``profiled_only`` take part."""
    return bool(profiler._is_profiler_enabled or thread_is_profiled())


class CallHooks:
    """Methods that run at certain moments of calls. Derive a class, override methods, and add an instance (:func:`add_hooks`).

    Methods run on the thread that makes, executes or ends the call, on any number of threads at a time, and delay the call. An
    exception from ``on_call`` is raised to the caller, one from ``before_send`` or ``after_send`` to the code that sends the
    message (if the message is an answer, the exception becomes the answer), one from ``on_start`` or ``on_end`` becomes the
    answer of the call, and one from ``on_answer`` is logged.

    A ``call`` is made by this worker, and an ``execution`` executes a call of a worker here. In both, ``peer.name`` is the name
    of the other worker, ``label`` names the function or method, ``fields`` are the header fields of the request, and ``notes`` is
    a dict in which hooks store data until the call ends, each under itself as the key. For a call that was already running when
    the hooks were added, only ``on_end`` or ``on_answer`` may be called.
    """

    #: The name of a header field. If set, the hooks take part only in executions whose request has this field.
    field: ClassVar[str] = ""
    #: Whether the hooks take part only in calls of functions (not of actors) that are made while a profiler of torch is on.
    profiled_only: ClassVar[bool] = False

    def on_call(self, call: Call, function: Any, args: tuple[Any, ...]) -> None:
        """Run when a call is made, before its arguments are packed. It may add values that msgpack can pack to ``call.fields``.

        Args:
            function: the called function; None for a call of an actor's method, which ``call.label`` names.
        """

    def before_send(self, message: OutgoingMessage) -> bool | None:
        """Run before a packed message is sent. Return False to take over the message: the hooks may drop it, or send it later."""

    def after_send(self, message: OutgoingMessage) -> None:
        """Run when a message was passed to its connection, which may delay it for a moment to send several together."""

    def on_start(
        self, execution: Execution, function: Any, args: tuple[Any, ...]
    ) -> AbstractContextManager[Any] | None:
        """Run before a function or method is executed.

        Returns:
            None, or a context manager in which the function is called. It is entered again for the run of a coroutine, and for
            each step of a generator, so it must be re-enterable.
        """
        return None

    def on_end(self, execution: Execution, error: BaseException | None) -> None:
        """Run when an execution has ended: before its answer is sent, or after the last item of a stream."""

    def on_answer(self, call: Call, error: BaseException | None) -> None:
        """Run when a call has ended, before its caller gets the result. ``error``: the error of the call, or None."""


_MOMENTS: Final = ("on_call", "before_send", "after_send", "on_start", "on_end", "on_answer")
# Guards the changes of hook sets; no other code runs under it.
_lock = threading.Lock()
_of_process: list[CallHooks] = []  # added by ``add_hooks``
_sets: weakref.WeakSet[HookSet] = weakref.WeakSet()


def add_hooks(hooks: CallHooks) -> None:
    """Add hooks to every worker of this process, also to workers that are started later. Idempotent.

    Other processes need hooks of their own: add them in a module that all import, or by a call.
    """
    with _lock:
        if hooks not in _of_process:
            _of_process.append(hooks)
        sets = list(_sets)
    for each in sets:
        each.add(hooks)


def remove_hooks(hooks: CallHooks) -> None:
    """Undo :func:`add_hooks`. Calls that have begun may still call the hooks. Idempotent."""
    with _lock:
        _of_process[:] = [each for each in _of_process if each is not hooks]
        sets = list(_sets)
    for each in sets:
        each.remove(hooks)


class HookSet:
    """The hooks of one agent, by the moments at which they run. Thread-safe: a change replaces tuples.

    Args:
        recorder: the agent's flight recorder. Its methods ``on_end`` and ``on_answer`` run before those of the hooks.

    Attributes:
        active: whether there are hooks, besides the recorder, that take part in all calls.
        messages: whether there are hooks with ``before_send`` or ``after_send``.
        on_call, before_send, after_send, on_start, on_end, on_answer: the methods of the hooks that take part in all calls.
        header_hooks: hooks that take part in executions with a certain header field, by the name of the field.
        header_fields: the keys of ``header_hooks``.
        profiled: hooks that take part in profiled calls only.
        recorded: the ``on_end`` of the recorder, as a tuple; empty without a recorder.
    """

    on_call: tuple[Callable[..., None], ...]
    before_send: tuple[Callable[..., bool | None], ...]
    after_send: tuple[Callable[..., None], ...]
    on_start: tuple[Callable[..., AbstractContextManager[Any] | None], ...]
    on_end: tuple[Callable[..., None], ...]
    on_answer: tuple[Callable[..., None], ...]

    def __init__(self, recorder: FlightRecorder | None = None) -> None:
        self.recorded: tuple[Callable[..., None], ...] = () if recorder is None else (recorder.on_end,)
        self._answered: tuple[Callable[..., None], ...] = () if recorder is None else (recorder.on_answer,)
        with _lock:
            self._change(tuple(_of_process))
            _sets.add(self)

    def add(self, hooks: CallHooks) -> None:
        """Add hooks. Idempotent."""
        with _lock:
            if hooks not in self._hooks:
                self._change((*self._hooks, hooks))

    def remove(self, hooks: CallHooks) -> None:
        """Remove hooks. Idempotent."""
        with _lock:
            self._change(tuple(each for each in self._hooks if each is not hooks))

    def _change(self, hooks: tuple[CallHooks, ...]) -> None:
        self._hooks = hooks
        self.header_hooks = {each.field: each for each in hooks if each.field}
        self.header_fields = self.header_hooks.keys()
        self.profiled = tuple(each for each in hooks if each.profiled_only)
        always = [each for each in hooks if not each.field and not each.profiled_only]
        for moment in _MOMENTS:
            setattr(self, moment, tuple(method for each in always for method in _overridden(each, moment)))
        self.on_end = (*self.recorded, *self.on_end)
        self.on_answer = (*self._answered, *self.on_answer)
        self.messages = bool(self.before_send or self.after_send)
        self.active = bool(always)

    def begin_call(
        self, call: Call, function: Any, args: tuple[Any, ...], header: Header | None
    ) -> Header | None:
        """Run ``on_call`` for a call; return the header of its request."""
        fields = call.fields = {} if header is None else cast("dict[str, Any]", header)
        call.notes = {}
        methods = self.on_call
        if call.mail is None and is_profiled():
            methods = (*methods, *(each.on_call for each in self.profiled))
            call.ending = (*call.ending, *(_logged(each.on_answer) for each in self.profiled))
        for method in methods:
            method(call, function, args)
        return cast("Header", fields) if fields else None

    def send(self, message: OutgoingMessage, send: Callable[[], Any]) -> Any:
        """Send a message by ``send()``, unless hooks take it over.

        Returns:
            The result of ``send()``, which is False if the message was not sent; None if hooks have taken it over.
        """
        for before in self.before_send:
            if before(message) is False:
                return None
        sent = send()
        if sent is not False:
            for after in self.after_send:
                after(message)
        return sent


def _overridden(hooks: CallHooks, moment: str) -> tuple[Callable[..., Any], ...]:
    method = getattr(hooks, moment)
    if getattr(method, "__func__", None) is getattr(CallHooks, moment):
        return ()
    return (_logged(method) if moment == "on_answer" else method,)


def _logged(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method ``on_answer``: its errors are logged, and are not raised in the thread that ends the call."""

    @wraps(method)
    def on_answer(call: Call, error: BaseException | None) -> None:
        try:
            method(call, error)
        except Exception:
            _log.exception("%r failed at the end of %s", method, call)

    return on_answer


@dataclass(slots=True, eq=False)
class OutgoingMessage:
    """A packed message that is about to be sent.

    Attributes:
        kind: ``frames.REQUEST``, ``REPLY``, ``FAILURE`` or ``NOTICE``.
        peer: the receiver.
        id: the number of the call that the message makes or answers.
        encoded: the body.
        header: the header, or None.
        call: the call that the message makes; None for a request without an answer, and for other kinds.
        execution: the execution that the message answers, if known.
        function, args: the function and the arguments of a request; ``mail``: the header of a call of an actor.
        name: the label of a request's call, or the name of a notice.
        chain, flags: see :class:`actorrpc.wire.frames.Frame`.
        conn: the connection over which an answer must be sent.
        context: the references and objects that were registered while the message was packed.
        lost: set by hooks that take over a notice, if the sender shall be told that the notice was not sent.
    """

    kind: int
    peer: Peer
    id: int
    encoded: Encoded | bytes
    header: Header | None = None
    _: KW_ONLY
    call: Call | None = None
    execution: Execution | None = None
    function: Any = None
    args: tuple[Any, ...] = ()
    mail: MailHeader | None = None
    name: str = ""
    chain: int = 0
    flags: int = 0
    conn: Connection | None = None
    context: MessageContext | None = None
    lost: bool = False

    @property
    def is_answer(self) -> bool:
        """Whether it answers a call."""
        return self.kind in (frames.REPLY, frames.FAILURE)

    @property
    def size(self) -> int:
        """The bytes of the body, with the memory of tensors and other buffers."""
        return len(self.encoded) if isinstance(self.encoded, bytes) else self.encoded.nbytes


# -- executions with hooks ---------------------------------------------------------------------------------


def run_hooked(
    hooks: HookSet, execution: Execution, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``on_start`` of the hooks, and then ``function(*args, **kwargs)`` in the context managers that they return.

    If the function returns a coroutine or a generator, a wrapper of it is returned, which enters the context managers when it
    runs. ``Executor.answer`` and ``Executor.fail`` run ``on_end``.
    """
    added = [hook for field, hook in hooks.header_hooks.items() if field in execution.fields]
    execution.notes = {}
    execution.ending = (*hooks.on_end, *(each.on_end for each in added))
    found = [
        start(execution, function, args) for start in (*(each.on_start for each in added), *hooks.on_start)
    ]
    scopes = [each for each in found if each is not None]
    with _entered(scopes):
        value = function(*args, **kwargs)
    if inspect.iscoroutine(value):
        return _awaited(value, scopes) if scopes else value
    is_generator = inspect.isgenerator(value)
    if not is_generator and not inspect.isasyncgen(value):
        return value
    # A stream is answered before its first item is produced. The flight recorder records that answer as the end of the call, so
    # its ``on_end`` runs at the answer; ``on_end`` of the other hooks runs at the end of the stream.
    ending = [each for each in execution.ending if each not in hooks.recorded]
    execution.ending = hooks.recorded

    def on_finish(error: BaseException | None) -> None:
        for each in ending:
            each(execution, None if isinstance(error, GeneratorExit) else error)

    if is_generator:
        items = _stepped(value, scopes, on_finish)
        next(items)
        return items
    stream = _stepped_async(value, scopes, on_finish)
    with suppress(StopIteration):
        stream.asend(None).send(None)
    return stream


@contextmanager
def _entered(scopes: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter context managers for a block, in their order."""
    with ExitStack() as stack:
        for each in scopes:
            stack.enter_context(each)
        yield


async def _awaited(coroutine: Coroutine[Any, Any, Any], scopes: Sequence[AbstractContextManager[Any]]) -> Any:
    with _entered(scopes):
        return await coroutine


def _stepped(
    items: Generator[Any, Any, Any],
    scopes: Sequence[AbstractContextManager[Any]],
    on_finish: Callable[[BaseException | None], None],
) -> Generator[Any, Any, None]:
    error: BaseException | None = None
    try:
        yield  # ``run_hooked`` steps to this line, so that ``on_finish`` runs even if no item is requested
        while True:
            with _entered(scopes):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
    except BaseException as caught:
        error = caught
        raise
    finally:
        try:
            items.close()
        finally:
            on_finish(error)


async def _stepped_async(
    items: AsyncGenerator[Any, Any],
    scopes: Sequence[AbstractContextManager[Any]],
    on_finish: Callable[[BaseException | None], None],
) -> AsyncGenerator[Any, None]:
    error: BaseException | None = None
    try:
        yield  # see ``_stepped``
        while True:
            with _entered(scopes):
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            yield item
    except BaseException as caught:
        error = caught
        raise
    finally:
        try:
            await items.aclose()
        finally:
            on_finish(error)


# -- the other interfaces ------------------------------------------------------------------------------------


class Recorder:
    """Follows tensors from worker to worker, for autograd. This base class records nothing. One per agent. Thread-safe.

    Attributes:
        live: the autograd contexts that messages may belong to. While there are none, :meth:`sent` is called only for messages
            with tensors that require grad.
    """

    live: Collection[object] = ()

    def sent(self, tensors: Sequence[Any], peer: Peer | None, context: int | None = None) -> Any:
        """Record the plain tensors (``Encoded.tensors``) of a message that has been packed. Called on the thread that packs it.

        Args:
            peer: the receiver; None for a stored value, which any worker may fetch later.
            context: the number of the autograd context that the message belongs to; by default, the context of the calling code.

        Returns:
            A tag that travels with the message (a value that msgpack can pack), or None.
        """

    def received(self, tag: Any, tensors: list[Any], peer: Peer | None) -> None:
        """Record the plain tensors of a message that has been opened, in the order in which they were packed.

        Args:
            tag: the result of :meth:`sent` on the other worker, as received.
            peer: the sender; None for a stored value.

        Raises:
            ProtocolError: the tag cannot be read.
        """

    def forwarded(self, tag: Any, peer: Peer) -> None:
        """Record that a stored value is sent to a worker. ``tag``: the result of :meth:`sent` for the value."""


class MessageReferences:
    """Counts the references (RRefs) in messages. One per agent; thread-safe. This base class serves agents without references."""

    def pack(self, sent: list[Any]) -> bytes:
        """Return the header field that lists the references in a message that has been packed."""
        return b""

    def roll_back(self, context: MessageContext) -> None:
        """Undo the registration of the references of a message that is not sent."""

    def received(self, context: MessageContext, packed: bytes) -> None:
        """Register the references of a message that is about to be opened."""

    def refuse(self, peer: Peer, packed: bytes) -> None:
        """Release the references of a message that will not be opened."""

    def confirm(self, received: list[Any], execution: Execution) -> None:
        """Block until the owners have registered the references that an execution has received. Raises RpcTimeoutError."""


def recorded(
    recorder: Recorder, header: Header | None, encoded: Encoded | bytes, peer: Peer
) -> Header | None:
    """Let the recorder record the tensors of a packed message; return the header, with the recorder's tag if it returns a tag."""
    tag = recorder.sent(() if isinstance(encoded, bytes) else encoded.tensors, peer)
    if tag is not None:
        header = {} if header is None else header
        header["tag"] = tag
    return header


POINTS: Final[Mapping[str, str]] = {
    "join.listening": "a worker has opened its sockets and is about to exchange addresses with the others",
    "join.met": "the workers have exchanged their addresses; this worker serves no calls yet",
    "shutdown.called": "a worker of a fixed group is about to wait until all workers have called shutdown",
    "shutdown.together": "all workers have called shutdown",
    "shutdown.let_go": "a worker has released its references, and is about to wait until all workers have released theirs",
    "shutdown.settled": "all workers have released their references",
    "shutdown.closing": "a worker is about to close its connections, in any kind of shutdown",
    "shutdown.closed": "a worker has closed its connections, and is about to be removed from the group",
    "actor.making": "a worker is about to run an actor's constructor, for the first time or again",
    "actor.restoring": "the constructor of a restarted actor has run; restore() comes next",
    "actor.made": "an actor was created, but its supervisor has not been told yet",
    "actor.checkpointing": "a checkpoint of an actor is about to be made, before the call is answered",
    "actor.checkpointed": "the supervisor has the checkpoint; the call has not been answered yet",
    "actor.ending": "an actor has ended; on_stop() comes next",
}
"""All points that do not belong to a message, with a description of the moment of each."""

_watcher: Callable[[str, str], None] | None = None


def watch(watcher: Callable[[str, str], None] | None) -> None:
    """Call ``watcher(point, worker)`` at every point from now on; None: call nothing. The watcher may raise."""
    global _watcher
    _watcher = watcher


def reach(point: str, worker: str = "") -> None:
    """Call the watcher, if there is one. ``worker``: this worker's name, if the process has no agent yet."""
    if _watcher is not None:
        _watcher(point, worker)


def _after_fork() -> None:
    """Replace the lock in a forked child, because another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
