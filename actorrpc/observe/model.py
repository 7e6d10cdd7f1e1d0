"""What can be seen of a group: the classes of :func:`actorrpc.state`, and how they are made of what workers answer.

Workers answer with plain values (what msgpack and JSON have); :func:`made_of` makes objects of them and takes nothing for
granted: what is missing or of a wrong type has its default. All classes are immutable. Times are seconds, sizes are bytes.
This module imports neither torch nor anything that runs workers: the command line uses it.
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
    "made_of",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFrame:
    """One line of a stack.

    Attributes:
        function: its name, with its class.
        file: the path of the source file, as Python has it.
        line: the number of the line that runs, from 1.
    """

    function: str = ""
    file: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """A thread, and what it does.

    Attributes:
        name: as ``threading`` has it.
        ident: Python's number for it; 0 where only the dump of a signal handler tells of it.
        frames: what it runs, the innermost last; at most 100.
        waits_for: the results and streams that it waits for, in words; empty where it waits for none, or nobody knows.
    """

    name: str = ""
    ident: int = 0
    frames: tuple[StackFrame, ...] = ()
    waits_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedConnection:
    """A worker's connection to another one, or what is left of it.

    Attributes:
        worker: the name of the other one.
        state: how this worker finds the other: ``"alive"``, ``"suspect"``, ``"dead"`` or ``"left"``.
        sockets: how many connections there are; 0: there is none at present.
        local: it is a Unix socket, on one host.
        silent: seconds since anything came from it; -1 where nothing has.
        calls_out: calls made to it that are not over; the oldest of them is one of ``oldest_call``, made ``oldest`` seconds ago.
        calls_in: calls of its that are not over here.
        unread: bytes of large calls that it has not taken up yet.
        blocked: seconds that calls to it have waited here to be sent, because it has not started enough of the earlier calls
            (setting ``window``); 0 if no call waits.
        stalled: seconds since the last byte of a large message to it could be sent, because it does not read; 0 if none waits.
        sent, received: bytes that have gone over its sockets, of all frames; ``chunks_sent`` and ``chunks_received`` are those
            of them that belong to large tensors and messages. A socket that has ended for good is not counted any more.
        lent: bytes of shared memory that are lent to it, and ``placed`` bytes that have gone that way so far.
        borrowed: bytes of its shared memory that are in use here, and ``taken`` bytes that have come that way so far.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingCall:
    """A call that a worker has made and that is not over.

    Attributes:
        label: what is called.
        worker: where.
        since: seconds since it was made.
        left: seconds until its time is over; None where it has no bound.
    """

    label: str = ""
    worker: str = ""
    since: float = 0.0
    left: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCall:
    """A call that runs.

    Attributes:
        method: of the actor; of a plain call, the name of the function.
        caller: the name of the worker that has made it.
        since: seconds since it came here: what it has waited for its turn counts.
        left: seconds until its time is over, less than 0 if it is over; None where it has no bound.
        execution: names this execution in the group.
        chain: the executions that it descends from, the outermost first.
        thread: the number of its thread; 0 where it is a coroutine that awaits something.
        waits_for: what it waits for, in words; empty where it does not wait for calls or streams, or nobody knows.
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
    """The mailbox of one concurrency group of an actor.

    Attributes:
        group: its name; empty for the default one.
        is_async: it is for coroutines: those of a group and its plain methods have one each.
        waiting: calls that wait for their turn.
        running: calls that run.
        limit: how many may run at a time.
        oldest: seconds that the one which came first has waited; 0 where none waits.
        next: its method.
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
    """A stream that is produced on a worker.

    Attributes:
        method: of the generator; empty where that is not known.
        actor: the title of its actor.
        consumer: the name of the worker that takes the items.
        items, bytes: how much was produced and not taken.
        limit: of items; 0 where only their bytes are bounded.
        pauses: the generator waits until its consumer takes some.
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
    """What a worker knows of one context of distributed autograd.

    Attributes:
        context: its id, in hexadecimal digits.
        origin: the rank of the worker that has made it.
        idle: seconds since it was last used here.
        sent: messages with tensors that require grad that left here in it.
        received: those that have come, by the rank of the worker that sent them: gradients go back on these hops.
        leaves: tensors of this worker for which it has gradients.
        passes: backward passes that are under way here.
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
    """A worker that refers to values of a worker, of one kind.

    Attributes:
        holder: the name of the one that refers to them; their owner itself is one, too.
        what: their class; ``"actor"``: they are actors, to which there are handles; ``"a kept result"``: copies of
            results that another host may fetch; ``"an error"`` and ``"nothing yet"`` say that there is no value.
        references: how many there are.
        bytes: of these values, each counted once; 0 where that is not known without asking the user's object.
    """

    holder: str = ""
    what: str = ""
    references: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedSegment:
    """A piece of shared memory with large objects, which a worker holds: by references to them, or by their values.

    Attributes:
        segment: names it, and what it is filled with; the same in all workers that hold it.
        label: what is in it, in words; of several objects the latest.
        site: where that was made, as ``file:line``; may be empty.
        bytes: the memory that it takes on its host, however many hold it.
    """

    segment: str = ""
    label: str = ""
    site: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCall:
    """A call that a debugger holds, or has held and may hold again: ``actorrpc debug`` talks to it.

    Attributes:
        session: names it in the group.
        call: the actor and its method, or the function.
        actor_id: of the actor; empty where it is none's.
        why: what has held it.
        is_held: it is held now; otherwise it runs, to the next stop or to its end.
        thread: the number of its thread.
        file, line, function: where it was held last.
        since: seconds since then.
        attached: a front end is attached to it.
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
    """A circle of calls that waited for each other, one of which was made to fail.

    Attributes:
        error: what its error says.
        since: seconds since then.
    """

    error: str = ""
    since: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWait:
    """A wait of a worker until other workers have entered the same round of a collective operation: a barrier, or shutdown.

    Attributes:
        round: names the round; it is the same on all workers that have entered it.
        members: the workers that take part, at most 100; empty: every member of the group.
        since: seconds since the wait began.
    """

    round: str = ""
    members: tuple[str, ...] = ()
    since: float = 0.0

    def includes(self, worker: str) -> bool:
        """Say whether a worker takes part."""
        return not self.members or worker in self.members


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWorker:
    """A worker of the group.

    Attributes:
        name, rank, pid: who it is.
        host: the name of its machine; where it does not answer, what is known of that.
        what: what it is in the group, in words.
        state: ``"alive"``: it has answered; ``"stopped"``: a signal or a debugger has stopped its process; ``"dead"``: that
            is gone; ``"busy"``: its process runs and does not answer: code in C holds the interpreter's lock, or it gets no
            processor; ``"silent"``: it does not answer, and its host is another one; ``"incompatible"``: it runs another
            version of actorrpc, which this process does not understand; ``"refused"``: it and this process do not share a key
            or certificates; ``"left"``: it has left the group.
        reason: why it is not alive, in words; empty if it is.
        calls_to: calls of other workers to it that are not over, as these say, also where it does not answer itself; the
            oldest of them is one of ``oldest_call``, made ``oldest`` seconds ago.
        age: seconds since its process was started; ``cpu`` seconds of processor time that it has used.
        memory: bytes of it that are in memory (RSS).
        descriptors, descriptor_limit: open ones, and how many there may be.
        thread_count: threads of the process.
        pool: threads of its pool that there are, that listen, and what is queued for them.
        connections: to other workers.
        calls: plain calls (no actor's) that run here.
        outgoing: calls that it waits for, some of them; ``outgoing_count`` of all.
        waits: its waits for other workers to enter a barrier or the shutdown.
        references: RRefs held and owned, in numbers.
        holders: who refers to the values that live here, as this worker, their owner, knows it: those first that keep the most
            memory; at most 1000.
        memory_pool: bytes of the buffers that are in use and kept.
        objects: shared memory with large objects that it holds: the largest, at most 100.
        object_memory: in bytes: ``held`` by it, of all of those; ``kept`` to be filled again; ``host``: both, of all workers of
            its host together, each piece counted once; ``limit``: what that may be.
        streams: those produced here, the ones that pause first; ``stream_count`` of all.
        autograd: contexts and passes of distributed autograd, in numbers; ``contexts``: those that were made last.
        deadlocks: circles of calls that were broken here, the last ones, at most 20.
        held: calls that a debugger holds here.
        tasks: calls of remote functions that run in it.
        threads: its stacks, where they were asked for.
        dumped: the stacks were written by a signal handler, as it does not answer.
    """

    name: str = ""
    rank: int = -1
    pid: int = 0
    host: str = ""
    what: str = ""
    state: str = "alive"
    reason: str = ""
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
    held: tuple[HeldCall, ...] = ()
    tasks: int = 0
    threads: tuple[ThreadStack, ...] = ()
    dumped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedActor:
    """An actor of the group.

    Attributes:
        actor_id: 16 hexadecimal digits, for ever, as ``get_runtime_context().get_actor_id()`` gives them.
        title: how messages name it.
        class_name, name, namespace: of what class it is, and what it was called.
        state: ``"PENDING_CREATION"``, ``"ALIVE"``, ``"RESTARTING"``, ``"ENDING"`` (its last handle is gone and its last calls
            run), ``"DEAD"``, or ``"UNKNOWN"``: it lives, and who looks after it does not answer.
        worker, pid: where it lives; empty and 0 where it does not.
        supervisor: the worker that looks after it.
        restarts: how often it has been made again; ``max_restarts``: how often it may be, as its worker has it (-1: for ever).
        death_cause: why it is dead, or how it died last; empty if it has not.
        detached: it does not end with its creator.
        handles: how many handles each worker has to it, by the worker's name, as far as the one that looks after it knows.
        answered: the worker where it lives has answered: what follows is known.
        age: seconds since this incarnation was begun.
        calls_done: calls of methods that were begun and do not run any more, in this incarnation; that of a stream runs to the
            stream's end.
        latest: calls of methods that were answered, among the last 4 096 records of its worker's flight recorder; ``failed`` of
            them have, half of them took less than ``p50`` seconds until then, and 99 of 100 less than ``p99``: without their time
            in the mailbox. That of a stream is answered when the stream begins.
        mailbox: its queues, one for each concurrency group.
        running: the calls that run, at most 100.
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
        """How many calls wait for their turn."""
        return sum([each.waiting for each in self.mailbox])

    @property
    def oldest(self) -> float:
        """How long the call that came first has waited for its turn, in seconds; 0 where none waits."""
        return max([each.oldest for each in self.mailbox], default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something about a group that a reader wants to know, in words.

    Attributes:
        kind: one word for programs: ``"worker"``, ``"actor"``, ``"deadlock"``, ``"mailbox"``, ``"deadline"``, ``"stream"``,
            ``"descriptors"``, ``"threads"``, ``"suspect"``, ``"debugger"``, ``"rounds"``, ``"window"``, ``"stalled"``,
            or what a check of ``actorrpc doctor`` is about.
        wrong: it is a fault; otherwise it may be as it was meant.
        what: it, in one sentence.
        remedy: what can be done; may be empty.
    """

    kind: str
    wrong: bool
    what: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """What :func:`actorrpc.state` returns.

    Attributes:
        workers: by rank.
        actors: in the order of their ids, those that died lately among them (1000 for each worker that looks after actors).
        took: seconds that all of it took.
        findings: what is wrong, then what else there is to know, as ``actorrpc status`` says it.
    """

    workers: tuple[ObservedWorker, ...] = ()
    actors: tuple[ObservedActor, ...] = ()
    took: float = 0.0
    findings: tuple[Finding, ...] = ()

    def worker(self, name: str) -> ObservedWorker | None:
        """Return the worker of a name; None where there is none."""
        return next((each for each in self.workers if each.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        """Return it as what JSON has: dicts, lists, texts, numbers, booleans and None."""
        return typing.cast("dict[str, Any]", plain(self))


def plain(value: Any) -> Any:
    """Return objects of this module as what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


# -- of what workers answer ------------------------------------------------------------------------------------


_WRONG: Final = object()
_Check = Callable[[Any], Any]  # returns a value as a field wants it, or _WRONG


@functools.cache
def _fields_of(kind: Any) -> tuple[tuple[str, Any, _Check], ...]:
    """Return name, type and check of each field: made once, as there are thousands of objects in a look."""
    return tuple((name, wanted, _check_of(wanted)) for name, wanted in typing.get_type_hints(kind).items())


def made_of(kind: type[T], row: Any) -> T:
    """Return an object of a class of this module, made of a dict of plain values that another process has sent."""
    found: dict[str, Any] = {}
    if isinstance(row, dict):
        for name, wanted, check in _fields_of(typing.cast(Any, kind)):
            if name not in row:
                continue
            value = row[name]
            if type(value) is not wanted:  # most are as they should be
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
