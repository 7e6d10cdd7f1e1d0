"""Sends and receives the messages of backward passes, as calls, casts and notices of the agent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgpack

from actorrpc._exceptions import is_of_handler
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import CURRENT
from actorrpc.agent.context import current_worker
from actorrpc.agent.executor import Deferred
from actorrpc.autograd.messages import (
    Contribution,
    Discover,
    Gradient,
    Message,
    Notice,
    Release,
    Run,
    Settle,
    Stratum,
    Verdict,
    make,
)
from actorrpc.errors import NotInitializedError, ProtocolError, RpcError
from actorrpc.flight_recorder import OWN
from actorrpc.futures import WAITING, Future
from actorrpc.rpc.refcount.runtime import References
from actorrpc.wire.identity import WorkerKey

if TYPE_CHECKING:
    from actorrpc.autograd.local_pass import LocalPass
    from actorrpc.autograd.participant import Participant

__all__ = [
    "NOTICE",
    "AgentTransport",
    "fields_of",
    "message_of",
    "pack_notice",
    "serve",
    "unpack_notice",
]

NOTICE: Final = "autograd"
_WHOLE: Final = frozenset({int, bool})
_GRADIENT, _RUN, _DISCOVER, _SETTLE = range(4)  # the numbers that are sent for the kinds of messages


def serve(kind: int, *fields: Any) -> Any:
    """Handle a message of a backward pass. Other workers call this function with the result of :func:`fields_of`."""
    execution = CURRENT.get()
    worker = current_worker()
    participant: Participant | None = None if worker is None else worker.autograd
    if participant is None or execution is None:
        raise NotInitializedError("this worker has no distributed autograd: it has been shut down")
    message = make(Gradient, fields) if kind == _GRADIENT else message_of(kind, fields)
    answer = participant.handle(execution.peer.key, message)
    return Deferred(answer) if isinstance(answer, Future) else answer


def fields_of(message: Message) -> tuple[Any, ...]:
    """Return a message as plain values, which are sent in half of the time of nested named tuples."""
    if isinstance(message, Gradient):
        return (_GRADIENT, *message)
    if isinstance(message, Discover):
        return (_DISCOVER, *message)
    if isinstance(message, Settle):
        return (_SETTLE, *message)
    strata: list[dict[int, list[Any]]] = []
    for (messages,) in message.strata:
        flat: dict[int, list[Any]] = {}
        for number, contributions in messages.items():
            given = flat[number] = []
            for worker, receipt in contributions:
                given += (*worker, receipt)
        strata.append(flat)
    gradients: list[tuple[Any, ...]] = []
    for each in message.gradients:
        gradients.append(each[2:5])
    return (_RUN, message.context, message.pass_id, strata, *message[3:-1], gradients)


def message_of(kind: int, fields: tuple[Any, ...]) -> Message:
    """Return the message that :func:`fields_of` was given."""
    if kind == _GRADIENT:
        return Gradient(*fields)
    if kind == _DISCOVER:
        return Discover(*fields)
    if kind == _SETTLE:
        return Settle(*fields)
    context, pass_id, packed, retain_graph, create_graph, accumulate, timeout, sent = fields
    strata: list[Stratum] = []
    for flat in packed:
        messages: dict[int, tuple[Contribution, ...]] = {}
        for number, given in flat.items():
            contributions: list[Contribution] = []
            for at in range(0, len(given), 3):
                contributions.append(make(Contribution, (make(WorkerKey, given[at : at + 2]), given[at + 2])))
            messages[number] = tuple(contributions)
        strata.append(make(Stratum, (messages,)))
    gradients: list[Gradient] = []
    for message, receipt, each in sent:
        gradients.append(make(Gradient, (context, pass_id, message, receipt, each, create_graph)))
    return Run(context, pass_id, strata, retain_graph, create_graph, accumulate, timeout, gradients)


#: Returns a notice as bytes.
pack_notice: Final[Callable[[Notice], bytes]] = msgpack.packb


def unpack_notice(body: bytes) -> Notice:
    """Return the notice that :func:`pack_notice` was given.

    Raises:
        ProtocolError: the bytes are not a notice.
    """
    try:
        fields = msgpack.unpackb(body)
    except Exception as error:
        raise ProtocolError(f"a notice of distributed autograd cannot be read: {error!r}") from error
    if isinstance(fields, list) and _WHOLE.issuperset(map(type, fields)):
        if len(fields) == 1:
            return make(Release, fields)
        if len(fields) == 3:
            return make(Verdict, (fields[0], fields[1], bool(fields[2])))
    raise ProtocolError("a notice of distributed autograd has the wrong fields")


class _Casts(deque[Any]):
    """The casts (one-way messages) that a thread has read while it waited for ``part`` of a pass, and has not run yet."""

    part: LocalPass


class AgentTransport:
    """The :class:`~actorrpc.autograd.messages.Transport` of an agent. Thread-safe."""

    def __init__(self, agent: Agent, references: References) -> None:
        self._agent = agent
        self._references = references
        self.me = references.me

    def request(self, to: WorkerKey, message: Message, timeout: float) -> Future[Any]:
        future: Future[Any] = Future()
        label = f"{OWN}backward ({type(message).__name__})"
        future.label = label
        # The pass raises the future's error. If the pass is interrupted, an error that it has not read is not logged.
        future.cover()
        try:
            self._agent.call(
                self._references.peer_of(to),
                serve,
                fields_of(message),
                {},
                timeout,
                future=future,
                label=label,
            )
            self._agent.flush()
        except Exception as error:
            future.try_fail(error)
            if is_of_handler(error):
                raise
        return future

    def cast(self, to: WorkerKey, message: Gradient) -> None:
        self._agent.cast(
            self._references.peer_of(to),
            serve,
            fields_of(message),
            "backward",
            record=message.create_graph,
        )

    def notify(self, to: WorkerKey, notice: Notice) -> None:
        try:
            peer = self._references.peer_of(to)
        except RpcError:
            return
        lazily = isinstance(notice, Release) or notice.commit
        self._agent.notify_surely(peer, NOTICE, pack_notice(notice), lazily=lazily)

    def name(self, worker: WorkerKey) -> str:
        try:
            return self._references.peer_of(worker).name
        except RpcError:
            return f"worker {worker.rank}"

    def noted(self, kind: str, begun: float, context: int) -> None:
        flight_recorder = self._agent.flight_recorder
        if flight_recorder is not None:
            flight_recorder.noted(begun, kind, f"of context {context:x}")

    def begin_wait(self, part: LocalPass) -> _Casts | None:
        outer = WAITING.casts
        WAITING.casts = casts = _Casts()
        casts.part = part
        return outer  # type: ignore[return-value]

    def run_casts(self) -> None:
        if WAITING.casts:
            self._agent.executor.run_casts(WAITING.casts)

    def end_wait(self, outer: _Casts | None) -> None:
        left, WAITING.casts = WAITING.casts, outer
        if left:
            pool = self._agent.pool
            pool.queue.extend(left)
            pool.wake()

    def waits_for_another(self, part: LocalPass) -> bool:
        casts = WAITING.casts
        return isinstance(casts, _Casts) and casts.part is not part

    def later(self, run: Callable[[], object]) -> None:
        self._agent.submit(run)
