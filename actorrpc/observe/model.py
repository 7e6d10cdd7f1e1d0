"""The classes that :func:`actorrpc.state` returns, and their construction from the answers of workers.

Workers answer with plain values (types of msgpack and JSON). :func:`made_of` makes objects of these values and does not trust
them: a field that is missing or has a wrong type gets its default. All classes are frozen dataclasses. Times are in seconds,
sizes in bytes. The command line imports this module, so the module imports neither torch nor any code that runs workers.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

__all__ = [
    "BrokenDeadlock",
    "Finding",
    "GroupState",
    "MailboxState",
    "ObservedActor",
    "ObservedCall",
    "ObservedConnection",
    "ObservedContext",
    "ObservedHolder",
    "ObservedSegment",
    "ObservedStream",
    "ObservedWait",
    "ObservedWorker",
    "OutgoingCall",
    "StackFrame",
    "ThreadStack",
    "WorkerDeath",
    "made_of",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFrame:
    """One frame of a thread's stack.

    Attributes:
        function: the qualified name of the function.
        file: the path of the source file, as in ``co_filename``.
        line: the number of the line that the frame executes, from 1.
    """

    function: str = ""
    file: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """The stack of one thread.

    Attributes:
        name: the thread's name in ``threading``; empty if ``threading`` has none, or if a signal handler wrote the stack.
        ident: the thread's identifier, as ``threading.get_ident()`` returns it.
        frames: the innermost last; at most 100.
        waits_for: descriptions of the results and streams that the thread waits for; empty if it waits for none, or if that
            cannot be determined.
    """

    name: str = ""
    ident: int = 0
    frames: tuple[StackFrame, ...] = ()
    waits_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedConnection:
    """The relation of a worker to another worker (the peer). It stays listed after its last socket was closed.

    Attributes:
        worker: the name of the peer.
        state: the state that this worker ascribes to the peer: ``"alive"``, ``"suspect"``, ``"dead"`` or ``"left"``.
        sockets: the number of open connections to the peer.
        local: whether an open connection is a Unix socket; then both workers are on one host.
        silent: seconds since the last byte from the peer arrived; -1 if none arrived.
        calls_out: unfinished calls to the peer. The oldest of them calls ``oldest_call`` and was made ``oldest`` seconds ago.
        calls_in: unfinished calls of the peer to this worker.
        unread: bytes of calls to the peer that the peer has not started yet.
        blocked: seconds that calls to the peer have waited to be sent, because the peer has not started enough of the earlier
            calls (setting ``window``); 0 if no call waits.
        stalled: seconds since the last byte of a large message to the peer could be sent, because the peer does not read; 0 if no
            message waits.
        sent, received: bytes of all frames on the open sockets; closed sockets are not counted. ``chunks_sent`` and
            ``chunks_received`` are the part of these bytes that belongs to large tensors and messages.
        lent: bytes of this worker's shared memory that the peer uses now. ``placed``: all bytes that were sent to the peer
            through shared memory.
        borrowed: bytes of the peer's shared memory that this worker uses now. ``taken``: all bytes that were received from the
            peer through shared memory.
        device_lent, device_placed, device_taken: the same as ``lent``, ``placed`` and ``taken``, in memory of GPUs.
    """

    worker: str = ""
    state: str = ""
    sockets: int = 0
    local: bool = False
    silent: float = -1.0
    calls_out: int = 0
    oldest_call: str = ""
    oldest: float = 0.0
    calls_in: int = 0
    unread: int = 0
    blocked: float = 0.0
    stalled: float = 0.0
    sent: int = 0
    received: int = 0
    chunks_sent: int = 0
    chunks_received: int = 0
    lent: int = 0
    placed: int = 0
    borrowed: int = 0
    taken: int = 0
    device_lent: int = 0
    device_placed: int = 0
    device_taken: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingCall:
    """An unfinished call that a worker has made.

    Attributes:
        label: the method or function that is called.
        worker: the name of the called worker.
        since: seconds since the call was made.
        left: seconds until the call times out; None if it has no time-out.
    """

    label: str = ""
    worker: str = ""
    since: float = 0.0
    left: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCall:
    """A running call.

    Attributes:
        method: the method of the actor; for a plain call, the name of the function.
        caller: the name of the calling worker.
        since: seconds since the call arrived, time in the mailbox included; 0 for a plain call.
        left: seconds until the call's deadline, negative after the deadline; None if it has no time-out.
        execution: an identifier of this execution that is unique in the group; empty if the call has not begun.
        chain: the identifiers of the executions that led to this call, the outermost first.
        thread: the identifier of the thread that runs the call; 0 for a plain call, and for a coroutine that awaits something.
        waits_for: descriptions of the calls and streams that the call waits for; empty if it waits for none, or if that cannot be
            determined.
    """

    method: str = ""
    caller: str = ""
    since: float = 0.0
    left: float | None = None
    execution: str = ""
    chain: tuple[str, ...] = ()
    thread: int = 0
    waits_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxState:
    """One queue of an actor's mailbox: the calls of a concurrency group to coroutine methods, or to its other methods.

    Attributes:
        group: the name of the concurrency group; empty for the default group.
        is_async: whether the queue holds calls of coroutine methods.
        waiting: queued calls.
        running: running calls.
        limit: how many calls may run at a time.
        oldest: seconds that the first queued call has waited; 0 if the queue is empty.
        next: the method of the first queued call; empty if the queue is empty.
    """

    group: str = ""
    is_async: bool = False
    waiting: int = 0
    running: int = 0
    limit: int = 1
    oldest: float = 0.0
    next: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStream:
    """A stream whose generator runs on the observed worker.

    Attributes:
        method: the generator method; empty if it is unknown.
        actor: the title of the actor; empty if it is unknown.
        consumer: the name of the worker that reads the items.
        items, bytes: the items that were produced and not yet read.
        limit: the most items that may be produced ahead; 0 if only their bytes are limited.
        pauses: whether the generator is paused until the consumer reads more items.
    """

    method: str = ""
    actor: str = ""
    consumer: str = ""
    items: int = 0
    bytes: int = 0
    limit: int = 0
    pauses: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedContext:
    """The part of one distributed autograd context that is on the observed worker.

    Attributes:
        context: the id of the context, in hexadecimal digits.
        origin: the rank of the worker that created the context.
        idle: seconds since the context was last used on this worker.
        sent: messages with tensors that require grad that this worker sent in the context.
        received: such messages that this worker received, by the rank of the sender. The backward pass sends gradients back to
            these senders.
        leaves: tensors of this worker for which the context has gradients.
        passes: backward passes of the context that run on this worker.
    """

    context: str = ""
    origin: int = -1
    idle: float = 0.0
    sent: int = 0
    received: dict[str, int] = field(default_factory=dict)
    leaves: int = 0
    passes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedHolder:
    """The references of one worker (the holder) to values of one class that live on the observed worker (the owner).

    Attributes:
        holder: the name of the holder; the owner itself is listed as well.
        what: the class of the values. ``"actor"``: the references are handles of actors. ``"a kept result"``: copies of results,
            kept so that another host may fetch them. ``"an error"`` and ``"nothing yet"``: there is no value.
        references: the number of references.
        bytes: the size of the values, each counted once; 0 if it cannot be read without running a method of the user's object.
    """

    holder: str = ""
    what: str = ""
    references: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedSegment:
    """A segment of shared memory with large objects. The observed worker has references to the objects, or uses their values.

    Attributes:
        segment: identifies the segment and its current content; it is the same on all workers that use the segment.
        label: describes the object in the segment; if there are several, the latest.
        site: the ``file:line`` where that object was made; may be empty.
        bytes: the memory of the segment on its host, which does not depend on how many workers use it.
    """

    segment: str = ""
    label: str = ""
    site: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCall:
    """A call that the debugger has stopped at least once. ``actorrpc debug`` attaches to it.

    Attributes:
        session: the name of the debug session, unique in the group.
        call: the actor and its method, the function, or the thread if it executed no call.
        actor_id: the id of the actor; empty if no actor was called.
        why: the reason for the last stop: ``breakpoint()``, an exception, or a front end that entered the actor.
        is_held: whether the call is stopped now; otherwise it runs to the next stop or to its end.
        thread: the identifier of the thread that runs the call.
        file, line, function: the place of the last stop.
        since: seconds since the last stop.
        attached: whether a front end is attached.
    """

    session: str = ""
    call: str = ""
    actor_id: str = ""
    why: str = ""
    is_held: bool = False
    thread: int = 0
    file: str = ""
    line: int = 0
    function: str = ""
    since: float = 0.0
    attached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenDeadlock:
    """A cycle of calls that waited for each other. The worker broke it by failing one of the calls.

    Attributes:
        error: the error message of the failed call.
        since: seconds since the call was failed.
    """

    error: str = ""
    since: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDeath:
    """The death of a worker that had joined a cluster and was not being drained.

    Attributes:
        what: the name, process id and host of the worker, and the reason.
        since: seconds since the driver has detected the death.
    """

    what: str = ""
    since: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWait:
    """A wait of a worker until other workers have entered the same round of a collective operation: a barrier, or shutdown.

    Attributes:
        round: the name of the round; it is the same on all workers that have entered it.
        members: the workers that take part, at most 100; empty: every member of the group.
        since: seconds since the wait began.
    """

    round: str = ""
    members: tuple[str, ...] = ()
    since: float = 0.0

    def includes(self, worker: str) -> bool:
        """Return whether the worker takes part in the round."""
        return not self.members or worker in self.members


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWorker:
    """A worker of the group.

    Attributes:
        name, rank, pid: identify the worker.
        host: the name of its host; the address if the name is not known.
        address: the address at which other hosts reach its host; empty if no worker of the host listens on TCP.
        what: describes the worker's role in the group.
        output: where its standard output and standard error go: "the driver" if the driver keeps them, "the driver and FILE" if a
            file of its host has them, too, or the targets of its streams. Empty if it is not known.
        versions: the versions of ``actorrpc``, ``Python`` and ``torch`` in its process.
        state: ``"alive"``: it answered. ``"stopped"``: a signal or a debugger has stopped its process. ``"dead"``: its process
            has ended. ``"busy"``: its process runs and does not answer, because code in C holds the GIL or because the process
            gets no CPU time. ``"silent"``: it did not answer, and its process cannot be inspected or reached. ``"incompatible"``:
            it runs a version of actorrpc that this process does not understand. ``"refused"``: it and this process do not share a
            key or the settings of TLS. ``"left"``: it has left the group.
        reason: explains a state other than alive. Also set if an alive worker is being drained, or did not report its state.
        through: the name of the worker that has passed on question and answer, as the observer could not reach this worker; else
            empty.
        calls_to: unfinished calls of other workers to this worker, as the callers report them, even if this worker does not
            answer. The oldest of them calls ``oldest_call`` and was made ``oldest`` seconds ago.
        age: seconds since the process was started. ``cpu``: seconds of CPU time that it has used.
        memory: bytes of its memory in RAM (RSS).
        descriptors, descriptor_limit: open file descriptors, and their limit (0: unlimited or unknown).
        thread_count: threads of the process.
        pool: the worker's thread pool: ``threads``, ``listening`` (idle threads) and ``queued`` (tasks).
        connections: the connections to other workers.
        calls: running plain calls, which are calls of functions and not of actors; at most 100.
        outgoing: unfinished calls that the worker has made, at most 100. ``outgoing_count``: the number of all of them.
        waits: its waits for other workers to enter a barrier or the shutdown.
        references: numbers of RRefs. ``held``: handles on this worker. ``owned``: values on this worker that are referred to.
            ``promised``: values that are not computed yet.
        holders: the references to values on this worker, by holder and class, the most memory first; at most 1000.
        memory_pool: bytes of the worker's buffers, as ``used`` and ``kept`` (free for reuse).
        objects: segments of shared memory with large objects that the worker uses: the largest, at most 100.
        object_memory: bytes of shared memory. ``held``: all segments in use by this worker. ``kept``: free segments kept for
            reuse. ``host``: segments in use and free segments of all workers of the host, each counted once. ``limit``: the
            limit of ``host``.
        streams: streams whose generators run on this worker, paused streams first. ``stream_count``: the number of all of them.
        autograd: the numbers of ``contexts`` and ``passes`` of distributed autograd. ``contexts``: the latest contexts, at most
            20.
        deadlocks: the latest deadlocks that this worker has broken, at most 20.
        deaths: if this worker is the driver of a cluster, the latest deaths of workers that had joined, at most 20.
        held: calls on this worker that the debugger has stopped.
        tasks: running calls of remote functions.
        threads: the stacks of its threads, if they were requested, without the thread that gathered them.
        dumped: whether a signal handler wrote ``threads``, because the worker did not answer.
    """

    name: str = ""
    rank: int = -1
    pid: int = 0
    host: str = ""
    address: str = ""
    what: str = ""
    output: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    state: str = "alive"
    reason: str = ""
    through: str = ""
    calls_to: int = 0
    oldest_call: str = ""
    oldest: float = 0.0
    age: float = 0.0
    cpu: float = 0.0
    memory: int = 0
    descriptors: int = 0
    descriptor_limit: int = 0
    thread_count: int = 0
    pool: dict[str, int] = field(default_factory=dict)
    connections: tuple[ObservedConnection, ...] = ()
    calls: tuple[ObservedCall, ...] = ()
    outgoing: tuple[OutgoingCall, ...] = ()
    outgoing_count: int = 0
    waits: tuple[ObservedWait, ...] = ()
    references: dict[str, int] = field(default_factory=dict)
    holders: tuple[ObservedHolder, ...] = ()
    memory_pool: dict[str, int] = field(default_factory=dict)
    objects: tuple[ObservedSegment, ...] = ()
    object_memory: dict[str, int] = field(default_factory=dict)
    streams: tuple[ObservedStream, ...] = ()
    stream_count: int = 0
    autograd: dict[str, int] = field(default_factory=dict)
    contexts: tuple[ObservedContext, ...] = ()
    deadlocks: tuple[BrokenDeadlock, ...] = ()
    deaths: tuple[WorkerDeath, ...] = ()
    held: tuple[HeldCall, ...] = ()
    tasks: int = 0
    threads: tuple[ThreadStack, ...] = ()
    dumped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedActor:
    """An actor of the group.

    Attributes:
        actor_id: 16 hexadecimal digits, as ``get_runtime_context().get_actor_id()`` returns them; a restart does not change them.
        title: the name of the actor in messages.
        class_name, name, namespace: its class, and the name and namespace that were given to it.
        state: ``"PENDING_CREATION"``, ``"ALIVE"``, ``"RESTARTING"``, ``"ENDING"`` (its last handle was released and its last
            calls run), ``"DEAD"``, or ``"UNKNOWN"`` (its supervisor does not answer, and its worker does not report it as alive).
        worker, pid: the worker that hosts it; empty and 0 if no worker does.
        supervisor: the name of the worker that supervises it.
        restarts: how often it was restarted. ``max_restarts``: how often it may be restarted (-1: no limit).
        death_cause: why it is dead, or why it died last; empty if it never died.
        dead_for: seconds since its death; 0 if it is not dead.
        detached: whether it outlives its creator.
        handles: the number of handles of each worker, by the worker's name, as counted by its supervisor.
        answered: whether the hosting worker answered. If not, ``max_restarts`` and the fields below have their defaults.
        age: seconds since the current instance was created.
        calls_done: method calls that the current instance has finished. The call of a stream is finished when the stream ends.
        latest: method calls of this actor among the last 4 096 records of its worker's flight recorder. ``failed``: how many of
            them failed. ``p50``, ``p99``: percentiles of their run time in seconds, without time in the mailbox. The run time of
            a stream's call ends when the stream begins.
        mailbox: its queues, at least one for each concurrency group.
        running: running calls, at most 100.
    """

    actor_id: str = ""
    title: str = ""
    class_name: str = ""
    name: str | None = None
    namespace: str = ""
    state: str = "UNKNOWN"
    worker: str = ""
    pid: int = 0
    supervisor: str = ""
    restarts: int = 0
    max_restarts: int = 0
    death_cause: str = ""
    dead_for: float = 0.0
    detached: bool = False
    handles: dict[str, int] = field(default_factory=dict)
    answered: bool = False
    age: float = 0.0
    calls_done: int = 0
    latest: int = 0
    failed: int = 0
    p50: float = 0.0
    p99: float = 0.0
    mailbox: tuple[MailboxState, ...] = ()
    running: tuple[ObservedCall, ...] = ()

    @property
    def waiting(self) -> int:
        """The number of calls in all queues of the mailbox."""
        return sum([each.waiting for each in self.mailbox])

    @property
    def oldest(self) -> float:
        """Seconds that the first queued call has waited; 0 if no call is queued."""
        return max([each.oldest for each in self.mailbox], default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault of a group, or another noteworthy fact about it.

    Attributes:
        kind: one word for programs: ``"worker"``, ``"actor"``, ``"deadlock"``, ``"mailbox"``, ``"deadline"``, ``"stream"``,
            ``"descriptors"``, ``"threads"``, ``"suspect"``, ``"debugger"``, ``"rounds"``, ``"window"``, ``"stalled"``,
            ``"through"``, or the subject of a check of ``actorrpc doctor``.
        wrong: whether it is a fault; otherwise it may be intended.
        what: the finding, in one sentence.
        remedy: what the user can do; may be empty.
    """

    kind: str
    wrong: bool
    what: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """The state of a group, as :func:`actorrpc.state` returns it.

    Attributes:
        workers: in the order of their ranks.
        actors: in the order of their ids. Dead actors are included: the latest 1000 of each supervisor.
        took: seconds that the query took.
        findings: faults first, then other findings; ``actorrpc status`` prints them.
    """

    workers: tuple[ObservedWorker, ...] = ()
    actors: tuple[ObservedActor, ...] = ()
    took: float = 0.0
    findings: tuple[Finding, ...] = ()

    def worker(self, name: str) -> ObservedWorker | None:
        """Return the worker with this name, or None."""
        return next((each for each in self.workers if each.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the state as values that JSON can represent: dicts, lists, strings, numbers, booleans and None."""
        return typing.cast("dict[str, Any]", plain(self))


def plain(value: Any) -> Any:
    """Convert objects of this module to values that JSON can represent."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


# -- construction from the answers of workers ------------------------------------------------------------------


_WRONG: Final = object()
_Check = Callable[[Any], Any]  # returns the value, converted to the field's type, or _WRONG


@functools.cache
def _fields_of(kind: Any) -> tuple[tuple[str, Any, _Check], ...]:
    """Return name, type and check of each field. Cached, because one query may construct thousands of objects."""
    return tuple((name, wanted, _check_of(wanted)) for name, wanted in typing.get_type_hints(kind).items())


def made_of(kind: type[T], row: Any) -> T:
    """Return an object of a class of this module, from a dict of plain values that another process has sent."""
    found: dict[str, Any] = {}
    if isinstance(row, dict):
        for name, wanted, check in _fields_of(typing.cast(Any, kind)):
            if name not in row:
                continue
            value = row[name]
            if type(value) is not wanted:  # most values have the field's type and need no check
                value = check(value)
            if value is not _WRONG:
                found[name] = value
    return kind(**found)


def _check_of(wanted: Any) -> _Check:
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):
        check = _check_of(next(each for each in typing.get_args(wanted) if each is not type(None)))
        return lambda value: None if value is None else check(value)
    if origin is tuple:
        part = typing.get_args(wanted)[0]
        return functools.partial(_tuple_of, _check_of(part))
    if origin is dict:
        part = typing.get_args(wanted)[1]
        return functools.partial(_dict_of, _check_of(part))
    if dataclasses.is_dataclass(wanted):
        return functools.partial(made_of, typing.cast("type[Any]", wanted))
    return functools.partial(_plain, wanted)


def _tuple_of(check: _Check, value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return _WRONG
    if not value:
        return ()
    return tuple(each for each in map(check, value) if each is not _WRONG)


def _dict_of(check: _Check, value: Any) -> Any:
    if not isinstance(value, dict):
        return _WRONG
    rows = {key: check(each) for key, each in value.items() if isinstance(key, str)}
    return {key: each for key, each in rows.items() if each is not _WRONG}


def _plain(wanted: type, value: Any) -> Any:
    if wanted is float and type(value) is int:
        return float(value)
    return value if type(value) is wanted else _WRONG
