"""Find and break deadlocks: actors that wait for each other in a circle.

If calls wait for an actor, and the actor itself has waited for a call for a second, its worker asks the worker of that call what
*that* call waits for, and so on (edge chasing, after Chandy, Misra and Haas). The search only follows waits that are certain:

* a method that waits for a call, or for all of several calls; a coroutine that awaits a call, also if the method runs the
  event loop;
* a call that waits for the running method of a serial actor, for a blocked event loop, for its arguments, or for an earlier call
  of its caller that waits for its arguments.

If the search comes back to its beginning, and does so again at least ``_AGAIN_S`` later, none of the waits can end, except by a
time-out or a cancellation. The call that closes the circle then fails with a DeadlockError that names all calls in it.

A stream can block an actor, too. Its generator pauses while the reader does not take items, and still holds a place: it counts as
one of the calls that the actor runs at a time. If other calls wait, and waiting calls hold all places, a search begins at each
place. A search also begins at the pause of a generator that runs nested on its reader's thread. From a pause, the search
continues with the wait of the reader, a thread or a coroutine (see ``stalls.py``). If the searches from all places find the same
call, which waits for a place, this call fails. If a search comes back to the generator where it began, the stream fails. While
another thread may begin to read the stream, the search ends at the reader, until no thread has requested an item for
``stalls.PATIENCE_S``.

The search runs on the clock's thread and on pool threads, and takes no lock of its own.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from actorrpc import _time
from actorrpc.actors.context import current
from actorrpc.actors.host.mailbox import NEW, Entry, Envelope, GroupQueue
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.streams.producer import Producer
from actorrpc.actors.streams.stalls import Stall, StreamReader, awaited, awaited_by
from actorrpc.agent.calls import CURRENT, Call, Execution
from actorrpc.agent.timers import Tick
from actorrpc.errors import DeadlockError, RpcError
from actorrpc.futures import Future
from actorrpc.rpc.rref import RRef
from actorrpc.wire.identity import WorkerKey

if TYPE_CHECKING:
    from actorrpc.actors.host.actor import HostedActor
    from actorrpc.actors.host.event_loop import EventLoop
    from actorrpc.actors.host.threads import Runner
    from actorrpc.actors.streams.producer import Streams
    from actorrpc.agent.agent import Agent
    from actorrpc.agent.peers import Peer
    from actorrpc.rpc.refcount.runtime import References

__all__ = ["DeadlockDetector", "Probe", "Searched"]

_LOOK_S: Final = 1.0
_MOST_HOPS: Final = 64
_BRANCHES: Final = 4  # greatest number of targets of one wait that a search follows
# A circle counts if it is found again after this many seconds: before that, a message in transit may have resolved it.
_AGAIN_S: Final = 0.5
_MIB: Final = 1 << 20
_KEPT: Final = 20  # errors of recent circles that are kept
_TAKE_ITEMS: Final = (
    "Take the stream's items before you wait for the actor, close the stream, give it a larger max_buffered_items=, or the actor "
    "max_concurrency > 1"
)

#: The target of a wait; an Envelope stands for the missing arguments of that call.
_Target = Call | Stall | Envelope


class _Actors(Protocol):
    def all(self) -> list[HostedActor]: ...


class Searched(Protocol):
    """The attributes of a Runtime that a search uses."""

    agent: Agent
    references: References
    streams: Streams
    registry: _Actors


@dataclass(frozen=True, slots=True)
class Probe:
    """A search message: where the search began, and its path.

    ``execution``: the number of the waiting execution, or of the generator's pause, where the search began; for a call that
    waits for its arguments, the negative number of its entry in the mailbox.
    """

    worker: WorkerKey
    instance_id: int
    execution: int
    trail: tuple[str, ...]

    def past(self, what: str) -> Probe:
        """Return the probe with one more entry in its trail."""
        return replace(self, trail=(*self.trail, what))

    def began(self, runtime: Searched, hosted: HostedActor, what: int) -> bool:
        """Say whether the search began at this actor of this worker, at the wait with the number ``what``."""
        return (self.worker, self.instance_id, self.execution) == (runtime.references.me, hosted.id, what)


class DeadlockDetector:
    """Looks for actors of this process that may be in a deadlock, once a second while actors wait. Thread-safe."""

    def __init__(self, runtime: Searched) -> None:
        self._runtime = runtime
        self.looks = Tick(runtime.agent.clock, _LOOK_S, self._look)
        #: Call this when an actor waits while calls wait for it: the detector then searches soon.
        self.wake = self.looks.wake
        # The actor's number and the number of the wait (as in `Probe`) -> the targets of the wait at the last look.
        self._seen: dict[object, list[_Target]] = {}
        #: The circles that were broken here recently: ``_time.now()``, and the text of the error.
        self.found: deque[tuple[float, str]] = deque(maxlen=_KEPT)

    def note(self, error: DeadlockError) -> None:
        """Record the error that breaks a circle."""
        self.found.append((_time.now(), str(error)))

    def _look(self) -> bool:
        """Start a search for each wait that also existed at the last look; return whether to look again."""
        runtime = self._runtime
        seen, self._seen = self._seen, {}
        ends = [each for each in list(runtime.streams.consumers.values()) if each.awaits_end]
        for consumer in ends:
            consumer.look()
        busy = bool(ends)
        for hosted, token, title, targets in (*_waiting_calls(runtime), *_pausing_streams(runtime)):
            busy = True
            who = hosted.id, token
            before = seen.get(who, ())
            # A wait may be found twice: as a coroutine that blocks its event loop, and as a wait of the loop's thread.
            self._seen[who] = [*self._seen.get(who, ()), *targets]
            begun = [each for each in targets[:_BRANCHES] if any(each is one for one in before)]
            if begun:
                probe = Probe(runtime.references.me, hosted.id, token, (title,))
                runtime.agent.submit(partial(_follow, runtime, begun, probe))
        return busy


#: An actor; the execution, argument or pause that waits, as in :class:`Probe`; its name in messages; the targets of its wait.
_Wait = tuple["HostedActor", int, str, Sequence[_Target]]


def _waiting_calls(runtime: Searched) -> Iterator[_Wait]:
    """Yield waits that block other calls: of calls whose arguments are missing, methods of serial actors, and event loops."""
    for hosted in runtime.registry.all():
        for queue in (*hosted.mailbox.queues.values(), *hosted.mailbox.async_lanes.values()):
            for head in queue.heads():
                if isinstance(head, Envelope):
                    yield hosted, -head.number, head.title, _awaited_arguments(head)
        for running, found in _blocked(hosted):
            if isinstance(running, Envelope) and running.begun:
                calls = [each for each in found if not isinstance(each, Producer)]
                yield hosted, running.chain, running.title, calls
            else:
                yield hosted, 0, "", ()  # no waiting call is known; the detector has to look again


def _awaited_arguments(entry: Envelope) -> Sequence[_Target]:
    """Return the calls and streams that produce the missing arguments of a call; the call itself if its caller waits for them."""
    if entry.reserved:
        return [entry]
    opened = entry.opened  # other threads replace it
    if entry.ready or not isinstance(opened, tuple):
        return []
    args, kwargs = opened
    refs = [each for each in (*args, *kwargs.values()) if type(each) is ObjectRef]
    return [found for each in refs for found in awaited(each._fetched or each._future)]


def _blocked(hosted: HostedActor) -> list[tuple[Entry | None, list[Call | Stall]]]:
    """Return the executions of an actor that wait and hold back other calls, each with the calls and streams that it waits for.

    These are the method or coroutine of a serial queue, and the call that blocks an event loop (None if it is not known).
    """
    runners: list[Runner | EventLoop] = []
    queue = hosted.mailbox.queues[""]
    if _is_serial(queue) and queue.waiting:
        runners += [each for each in list(hosted.runners) if each.queue is queue and each.waits][:1]
    runners += [loop for loop in list(hosted.loops.values()) if loop.waiting]
    found: list[tuple[Entry | None, list[Call | Stall]]] = [
        (each.running, each.waits_for) for each in runners
    ]
    for queue in hosted.mailbox.async_lanes.values():
        if _is_serial(queue) and queue.waiting:
            found += [(each, awaited_by(task)) for each, task in _coroutines(hosted, queue)]
    return found


def _pausing_streams(runtime: Searched) -> Iterator[_Wait]:
    """Yield pauses of nested generators; for a queue with pausing generators and waiting calls, all waits that hold places."""
    looked: set[GroupQueue] = set()
    for producer in runtime.streams.pausing():
        entry, pause = producer.entry, producer.pause
        if entry is None or not pause or entry.hosted is None or entry.queue is None:
            continue
        hosted, queue = entry.hosted, entry.queue
        slot: Any = hosted.mailbox.running.get(entry.chain)
        if (
            slot is not None and slot.depth > 1
        ):  # the generator may run nested within a wait of its own reader
            yield hosted, pause, _say_pause(producer), [producer]
        elif queue.waiting and queue not in looked:
            looked.add(queue)
            for token, (title, targets) in (_holders(runtime, hosted, queue) or {}).items():
                yield hosted, token, title, targets
        else:
            yield hosted, 0, "", ()


def _holders(
    runtime: Searched, hosted: HostedActor, queue: GroupQueue
) -> dict[int, tuple[str, list[Call | Stall]]] | None:
    """Return the executions that hold the places of a queue, and the targets of their waits; None if not all wait."""
    found: dict[int, tuple[str, list[Call | Stall]]] = {}
    if queue.yielding:
        return None  # a waiting call holds no place
    if queue.is_async:
        for producer in runtime.streams.pausing():
            if producer.entry is not None and producer.entry.queue is queue:
                found[producer.pause] = _say_pause(producer), [producer]
    else:
        for runner in list(hosted.runners):
            running, targets = runner.running, runner.waits_for
            if runner.queue is not queue or not isinstance(running, Envelope) or not running.begun:
                continue
            if not targets:
                return None
            first = targets[0]
            if isinstance(first, Producer):
                found[first.pause] = _say_pause(first), targets
            else:
                found[running.chain] = running.title, targets
    return found if found and len(found) >= queue.running else None


def _is_serial(queue: GroupQueue) -> bool:
    """Say whether a call of the queue has to wait for the end of the running call."""
    return queue.limit == 1 and not queue.yielding


def _coroutines(hosted: HostedActor, queue: GroupQueue) -> list[tuple[Envelope, asyncio.Task[Any]]]:
    """Return the calls of a serial queue that run on its event loop; they have to end before its next call can begin."""
    loop = hosted.loop_of(queue)
    entries = [] if loop is None else list(loop.entries.values())
    return [(each, task) for each in entries if (task := each.task) is not None]


def _holder(entry: Envelope, hosted: HostedActor) -> Envelope | None:
    """Return the call that has to continue before ``entry`` can; ``entry`` itself if it runs in a thread; None if unknown."""
    queue, loop = entry.queue, hosted.loop_of(entry.queue)
    if queue is not None and queue.is_async:
        # On a loop: the call that blocks the loop, unless `entry` may run within the wait of the blocking call.
        held = loop.running if loop is not None else None
        if loop is None or held is None or (entry.begun and not loop.runs(entry.chain)):
            return None  # the loop is not blocked by another call
        if held is not entry and loop.may_run(entry, held):
            return None
        return held
    if entry.state is not NEW:
        return entry
    if queue is None or not _is_serial(queue) or not entry.ready:
        return None
    runner = next((each for each in list(hosted.runners) if each.queue is queue), None)
    found = runner.running if runner is not None else None
    return found if isinstance(found, Envelope) else None


def _say_pause(producer: Producer) -> str:
    items, size = producer.ahead
    name = "a generator" if producer.entry is None else producer.entry.title
    bound = f"max_buffered_items={producer.limit}" if producer.limit and items >= producer.limit else "64 MiB"
    return (
        f"{name} (pauses until its reader takes some of {items} items, {size / _MIB:.1f} MiB; bound: {bound})"
    )


# -- following waits ---------------------------------------------------------------------------------------------------


def _follow(runtime: Searched, targets: Sequence[Any], probe: Probe) -> None:
    """Continue a search at each of the targets; the last entry of the probe's trail waits for all of them."""
    for target in targets[:_BRANCHES]:
        if isinstance(target, Call):
            if target.done or len(probe.trail) > _MOST_HOPS:
                continue
            if isinstance(target.keep, RRef):  # the call fetches a promised value
                _search_at(runtime, target.peer, "promise", target.keep._handle.rref_id, probe)
            else:
                _search_at(runtime, target.peer, "call", target.id, probe)
        elif isinstance(target, Envelope):
            _search_at(runtime, target.peer, "arguments", target.frame.id, probe)
        elif isinstance(target, Producer):
            onwards = probe
            if (probe.worker, probe.execution) != (runtime.references.me, target.pause):
                onwards = probe.past(_say_pause(target))
            elif len(probe.trail) > 1:  # the search has come back to the stream where it began
                _end_stream(target, probe)
                continue
            if target.peer is not None and target.pause:
                _search_at(runtime, target.peer, "reader", (runtime.references.me, target.stream), onwards)
        elif hasattr(target, "waits_for"):  # the consumer of a stream
            source = target.waits_for
            if isinstance(source, Future):
                _follow(runtime, [each for each in awaited(source) if isinstance(each, Call)], probe)
            elif source is not None:
                peer, stream = source
                _search_at(runtime, peer, "generator", stream, probe)


def _search_at(runtime: Searched, peer: Peer, kind: str, key: Any, probe: Probe) -> None:
    """Continue a search on another worker; does not wait."""
    answer: Future[None] = Future()
    # After an error, the search ends here: the other worker has ended, or does not answer in time.
    answer.add_done_callback(Future.acknowledge)
    token = CURRENT.set(None)
    try:
        runtime.agent.call(peer, _search_here, (kind, key, probe), {}, 10.0, future=answer)
        runtime.agent.flush()
    except RpcError:
        pass
    finally:
        CURRENT.reset(token)


def _search_here(kind: str, key: Any, probe: Probe) -> None:
    """Continue a search on this worker. Called by RPC.

    Args:
        kind: the object whose number ``key`` is: ``"call"``, a call of the worker that sent the search; ``"arguments"``, a call
            of this worker whose arguments are pending; ``"promise"``, a value that this worker has promised; ``"generator"``, a
            stream that is produced here; ``"reader"``, a stream that is read here.
    """
    runtime: Searched | None = current()
    asking = CURRENT.get()
    if runtime is None or asking is None:
        return
    if kind == "call":
        entry: Any = asking.peer.running.get(key)
        if type(entry) is Execution:
            _at_function(runtime, entry, probe)
        elif isinstance(entry, Envelope) and entry.hosted is not None:
            _at_call(runtime, entry, entry.hosted, probe)
    elif kind == "arguments":
        call = asking.peer.pending.get(key)
        for argument in () if call is None else call.awaits:
            _follow(runtime, awaited(argument), probe)
    elif kind == "promise":
        _follow(runtime, awaited(runtime.references.promised.get(key)), probe)
    elif kind == "generator":
        _at_generator(runtime, runtime.streams.find(key), probe)
    else:
        _at_reader(runtime, runtime.streams.consumers.get(key), probe)


def _at_function(runtime: Searched, execution: Execution, probe: Probe) -> None:
    """Continue a search at a plain function, if exactly one call that it made has not ended, and a thread waits for that call."""
    left = [call for call in list(execution.nested) if isinstance(call, Call) and not call.done]
    if len(left) == 1 and (left[0].polling is not None or left[0].lock is not None):
        _follow(runtime, left, probe.past(f"a function on {runtime.agent.name!r}"))


def _at_call(runtime: Searched, entry: Envelope, hosted: HostedActor, probe: Probe) -> None:
    """Continue the search at a call of an actor here: at its arguments, and at the calls that have to end before it."""
    if _closes(runtime, entry, hosted, probe):
        return
    queue = entry.queue
    if entry.state is NEW and queue is not None:
        _follow(runtime, _awaited_arguments(entry), probe.past(entry.title))
        first = queue.held_behind(entry)
        if isinstance(first, Envelope):
            if probe.began(runtime, hosted, -first.number):
                _verdict(hosted, entry, probe, first)
                return
            _follow(runtime, _awaited_arguments(first), probe.past(first.title))
    running = _holder(entry, hosted)
    if running is None:
        if entry.state is not NEW:
            _at_task(runtime, entry, probe)
        elif queue is not None and _is_serial(queue):
            for each, _task in _coroutines(hosted, queue):
                if each.begun and probe.began(runtime, hosted, each.chain):
                    _verdict(hosted, entry, probe)
                    return
                _at_task(runtime, each, probe)
        return
    if not running.begun:
        return
    if running is not entry and probe.began(runtime, hosted, running.chain):
        _verdict(hosted, entry, probe)
        return
    slot: Any = hosted.loop_of(queue) or hosted.mailbox.running.get(running.chain)
    if slot is None:
        return
    # The innermost execution on this thread has to end first.
    inner = slot.running
    probe = probe.past(running.title)
    if inner is not running and isinstance(inner, Envelope):
        probe = probe.past(inner.title)
    _follow(runtime, slot.waits_for, probe)


def _at_task(runtime: Searched, entry: Envelope, probe: Probe) -> None:
    """Continue a search with the calls and streams that a call awaits, if it is a coroutine."""
    if entry.task is not None:
        _follow(runtime, awaited_by(entry.task), probe.past(entry.title))


def _at_generator(runtime: Searched, producer: Producer | None, probe: Probe) -> None:
    """Continue a search with the calls and streams for which the generator of a stream waits."""
    entry = None if producer is None else producer.entry
    # If the generator pauses, the reader has items to take, and does not wait for the generator.
    if producer is None or entry is None or entry.hosted is None or producer.pause:
        return
    _at_task(runtime, entry, probe)
    slot: Any = entry.hosted.mailbox.running.get(entry.chain)
    if slot is not None and slot.waiting:
        _follow(runtime, slot.waits_for, probe.past(entry.title))


def _at_reader(runtime: Searched, consumer: Any, probe: Probe) -> None:
    """Continue a search with the calls and streams for which the reader of a stream waits."""
    if consumer is None or consumer.over:
        return
    reader: StreamReader = consumer.reader
    if reader.swept != probe.execution:
        # The stream may only be referenced by garbage, such as an error and its frames, which an idle process does not collect.
        # Collecting the garbage closes the stream before the next search.
        reader.swept = probe.execution
        gc.collect()
    elif reader.certain:
        call = reader.call
        name = call.title if isinstance(call, Envelope) else reader.name
        _follow(runtime, reader.waits_for(), probe.past(f"its reader, {name} on {runtime.agent.name!r}"))


# -- breaking circles -----------------------------------------------------------------------------------------------------------


def _sighted(seen: dict[int, float], token: int) -> bool:
    """Record that a circle was seen; return whether it was also seen at least ``_AGAIN_S`` before."""
    now = _time.now()
    return now - seen.setdefault(token, now) >= _AGAIN_S


def _closes(runtime: Searched, entry: Envelope, hosted: HostedActor, probe: Probe) -> bool:
    """Say whether a call waits for the places at which the search began. If the circle is certain, fail the call."""
    queue = entry.queue
    if queue is None or entry.state is not NEW or entry.slot is not None:
        return False
    if (probe.worker, probe.instance_id) != (runtime.references.me, hosted.id):
        return False
    held = _holders(runtime, hosted, queue)
    if held is None or probe.execution not in held:
        return False
    if not any(isinstance(targets[0], Producer) for _, targets in held.values()):
        return False
    _sighted(entry.circles, probe.execution)
    if all(token in entry.circles and _sighted(entry.circles, token) for token in held):
        hosted.withdraw(entry, _error(hosted, probe, entry, f"{entry.title} can never run", _TAKE_ITEMS))
    return True


def _end_stream(producer: Producer, probe: Probe) -> None:
    """Break a circle whose generator pauses while it is nested on the thread of its own consumer."""
    entry = producer.entry
    if entry is not None and entry.hosted is not None and _sighted(producer.suspected, probe.execution):
        what = f"the stream of {entry.title} can never go on"
        producer.abort(_error(entry.hosted, probe, entry, what, _TAKE_ITEMS))


def _verdict(hosted: HostedActor, entry: Envelope, probe: Probe, behind: Envelope | None = None) -> None:
    """Break the circle if it was also found ``_AGAIN_S`` earlier: a message in transit may resolve a circle that is found once.

    ``behind``: the earlier call of the same caller that the entry waits for.
    """
    if not _sighted(entry.circles, probe.execution):
        return
    loop = hosted.loop_of(entry.queue)
    on_loop = loop is not None and loop.waiting
    if behind is not None:
        advice = (
            f"The last call waits behind {behind.title}, an earlier call of the same caller, whose argument depends on the "
            "last call. Give that actor allow_out_of_order_execution=True, or get() the argument before the earlier call"
        )
    elif on_loop:
        advice = f"get() blocks the event loop of {hosted.title}: use await instead"
    else:
        advice = (
            "Let the first call continue without waiting (async def, or get() later), give the actor max_concurrency > 1, or "
            "keep it reentrant if the calls descend from each other"
        )
    what = f"{entry.title} can never {'run' if entry.state is NEW else 'end'}"
    error = _error(hosted, probe, entry, what, advice)
    if on_loop and behind is None:
        hosted.deadlocked(entry, error)
    else:
        hosted.withdraw(entry, error)


def _error(hosted: HostedActor, probe: Probe, entry: Envelope, what: str, advice: str) -> DeadlockError:
    trail = " -> ".join((*probe.trail, entry.title))
    error = DeadlockError(
        f"{what}: {trail} wait for each other in a circle. {advice}",
        maybe_executed=entry.begun > 0,
        worker=hosted.agent.name,
    )
    hosted.registry.deadlocks.note(error)
    return error
