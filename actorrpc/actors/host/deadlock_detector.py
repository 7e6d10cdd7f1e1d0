"""Actors that wait for each other in a circle, found and broken.

Where calls wait for an actor, and the actor itself waits for a call for a second, its worker asks the worker of that
call what *it* waits for, and so on. Only what is certain is followed: a method that waits for a call (or for all of
several; a coroutine that awaits one, also where the method runs the event loop itself), and a call that waits for the one
method that a serial actor runs, for an event loop that is blocked, for its arguments, or for an earlier call of its
caller that waits for its arguments. If the question comes back to where it began, twice in a row, none of them can ever
go on: the call that closes the circle fails with DeadlockError, which names all of it. (Edge chasing, after Chandy,
Misra and Haas.)

A stream is in the way where its generator pauses and holds its actor, as its reader has not taken what is there. Then a
search begins with the pause, when calls wait for the actor and all of its places are held by calls that wait, or where the reader
is below the generator on the same thread. It goes on with what the reader waits for: a thread or a coroutine (see
``stalls.py``). If it comes to a call that waits for those places, and does so from each of them, that call fails; if it comes
back to the generator itself, the stream does. A thread that has only made a stream may have given it to another, which is about
to read it: where that cannot be excluded, the search goes on when nobody has asked for an item for ``PATIENCE_S``.

Runs on the clock's thread and on pool threads; takes no lock of its own.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from actorrpc import _time
from actorrpc.actors.context import current
from actorrpc.actors.host.envelope import Envelope
from actorrpc.actors.host.mailbox import NEW, Entry, GroupQueue
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.streams.producer import Producer
from actorrpc.actors.streams.stalls import PATIENCE_S, Stall, StreamReader, awaited, awaited_by
from actorrpc.agent.calls import CURRENT, Call, Execution
from actorrpc.agent.timers import Tick
from actorrpc.errors import DeadlockError, RpcError
from actorrpc.futures import Future
from actorrpc.rpc.refcount.messages import RRefId
from actorrpc.rpc.rref import RRef
from actorrpc.wire.identity import WorkerKey

if TYPE_CHECKING:
    from actorrpc.actors.host.actor import HostedActor
    from actorrpc.actors.host.loop_thread import LoopThread
    from actorrpc.actors.host.threads import ActorThread
    from actorrpc.actors.streams.producer import Streams
    from actorrpc.agent.agent import Agent
    from actorrpc.agent.peers import Peer
    from actorrpc.rpc.refcount.runtime import References

__all__ = ["DeadlockDetector", "Probe", "Searched"]

_LOOK_S: Final = 1.0
_MOST_HOPS: Final = 64
_BRANCHES: Final = 4  # of the calls that one waits for at a time, so many are followed
_AGAIN_S: Final = 0.5  # what is on its way may undo a circle: it counts when it is seen twice, so far apart
_MIB: Final = 1 << 20
_KEPT: Final = 20  # errors of circles that were found here


class _Actors(Protocol):
    def all(self) -> list[HostedActor]:
        """See ActorRegistry.all."""


class Searched(Protocol):
    """A worker as a search sees it: its Runtime."""

    agent: Agent
    references: References
    streams: Streams
    registry: _Actors


@dataclass(frozen=True, slots=True)
class Probe:
    """A question on its way: who asked it, and whom it has passed.

    ``execution`` is the execution that waits where it began; of a call that waits for its arguments, its number, negative.
    """

    worker: WorkerKey
    instance_id: int
    execution: int
    trail: tuple[str, ...]

    def past(self, what: str) -> Probe:
        """Return the question as it goes on."""
        return replace(self, trail=(*self.trail, what))

    def began(self, runtime: Searched, hosted: HostedActor, what: int) -> bool:
        """Say whether it has come back to where it began."""
        return (self.worker, self.instance_id, self.execution) == (runtime.references.me, hosted.id, what)


class DeadlockDetector:
    """Looks, once a second while there is reason to, for actors here that may be in a deadlock. Thread-safe."""

    def __init__(self, runtime: Searched) -> None:
        self._runtime = runtime
        self.looks = Tick(runtime.agent.clock, _LOOK_S, self._look)
        #: has the detector look soon: an actor for which calls wait waits itself
        self.poke = self.looks.poke
        self._pauses: set[int] = set()  # of streams, when we looked last
        self._seen: dict[
            object, list[Call | Stall | Envelope]
        ] = {}  # who waited, and for what, when we looked last
        #: the circles that were broken here last: when, by ``_time.now()``, and what the error said
        self.found: deque[tuple[float, str]] = deque(maxlen=_KEPT)

    def note(self, error: DeadlockError) -> None:
        """Remember a circle that is broken now."""
        self.found.append((_time.now(), str(error)))

    def _look(self) -> bool:
        self._pauses = _look_at_streams(self._runtime, self._pauses)
        ends = [each for each in list(self._runtime.streams.consumers.values()) if each.awaits_end]
        for consumer in ends:
            consumer.look()
        busy = bool(self._pauses or ends)
        seen, self._seen = self._seen, {}
        for hosted in self._runtime.registry.all():
            for head in _heads(hosted):
                busy = True
                probe = Probe(self._runtime.references.me, hosted.id, -head.number, (_say(head),))
                self._inquire(seen, (hosted.id, head.number), _awaited_arguments(head), probe)
            for running, found in _blocked(hosted):
                busy = True  # also where it waits for no call yet: one to an actor that is being made comes later
                calls = [each for each in found if not isinstance(each, Producer)]
                if not isinstance(running, Envelope) or not running.begun:
                    continue
                probe = Probe(self._runtime.references.me, hosted.id, running.chain, (_say(running),))
                self._inquire(seen, (hosted.id, running.chain), calls, probe)
        return busy

    def _inquire(
        self,
        seen: dict[object, list[Call | Stall | Envelope]],
        who: object,
        calls: Sequence[Call | Stall | Envelope],
        probe: Probe,
    ) -> None:
        """Ask about what somebody waits for, if it has been waited for when we looked last."""
        # A coroutine that blocks its event loop is found twice: it awaits nothing, and waits on its thread.
        self._seen[who] = [*self._seen.get(who, ()), *calls]
        before = seen.get(who, ())
        for call in calls[:_BRANCHES]:
            if any(call is each for each in before):  # otherwise it has only begun to wait
                self._runtime.agent.submit(partial(_send, self._runtime, call, probe))


def _heads(hosted: HostedActor) -> list[Envelope]:
    """Return the calls that wait for their arguments, while later ones of their callers wait for them."""
    queues = (*hosted.mailbox.queues.values(), *hosted.mailbox.async_lanes.values())
    return [head for queue in queues for head in queue.heads() if isinstance(head, Envelope)]


def _awaited_arguments(entry: Envelope) -> Sequence[Call | Stall | Envelope]:
    """Return the calls and streams that produce the missing arguments of a call; the call itself if its caller waits for them."""
    if entry.reserved:
        return [entry]
    if entry.ready or not isinstance(entry.opened, tuple):
        return []
    args, kwargs = entry.opened
    refs = [each for each in (*args, *kwargs.values()) if type(each) is ObjectRef]
    return [found for each in refs for found in awaited(each._fetched or each._future)]


def _blocked(hosted: HostedActor) -> list[tuple[Entry | None, list[Call | Stall]]]:
    """Return what calls wait for at an actor and waits itself, and for what: the method of a serial one, and event loops."""
    runners: list[ActorThread | LoopThread] = []
    queue = hosted.mailbox.queues[""]
    if _is_serial(queue) and queue.waiting:
        runners += [each for each in list(hosted.threads) if each.queue is queue and each.waits][:1]
    runners += [loop.runner for loop in list(hosted.loops.values()) if loop.runner.waiting]
    found: list[tuple[Entry | None, list[Call | Stall]]] = [
        (each.running, each.waits_for) for each in runners
    ]
    for queue in hosted.mailbox.async_lanes.values():
        if _is_serial(queue) and queue.waiting:
            found += [(each, awaited_by(task)) for each, task in _coroutines(hosted, queue)]
    return found


def _is_serial(queue: GroupQueue) -> bool:
    """Say whether a call of the queue waits for the end of the one that runs."""
    return queue.limit == 1 and not queue.yielding


def _coroutines(hosted: HostedActor, queue: GroupQueue) -> list[tuple[Envelope, asyncio.Task[Any]]]:
    """Return the calls of a queue that run on the event loop, all of which have to end before another can begin."""
    loop = hosted.loop_of(queue)
    entries = [] if loop is None else list(loop.runner.entries.values())
    return [(each, task) for each in entries if (task := each.task) is not None]


def _holder(entry: Envelope, hosted: HostedActor) -> Envelope | None:
    """Return the call that has to go on before this one, which is its actor's, can; itself if it runs on a thread."""
    queue, loop = entry.queue, hosted.loop_of(entry.queue)
    if queue is not None and queue.is_async:
        # On a loop: what blocks that, unless this one runs inside of the wait.
        held = loop.runner.running if loop is not None else None
        if loop is None or held is None or (held is not entry and loop.runner.may_run(entry, held)):
            return None
        return held
    if entry.state is not NEW:
        return entry
    if queue is None or not _is_serial(queue) or not entry.ready:
        return None
    runner = next((each for each in list(hosted.threads) if each.queue is queue), None)
    found = runner.running if runner is not None else None
    return found if isinstance(found, Envelope) else None


def _say(entry: Envelope) -> str:
    hosted = entry.hosted
    name = entry.header.get("method", "__init__")
    return f"{hosted.title}.{name}()" if hosted is not None else f"{name}()"


def _send(runtime: Searched, call: Call | Stall | Envelope, probe: Probe) -> None:
    """Ask the worker of a call what the call waits for, or the caller that waits for arguments."""
    if isinstance(call, Envelope):
        _ask(runtime, call.peer, _pursue_arguments, call.frame.id, probe)
        return
    if not isinstance(call, Call):
        _follow(runtime, call, probe)
        return
    if call.done or len(probe.trail) > _MOST_HOPS:
        return
    if isinstance(call.keep, RRef):  # it fetches what has been promised
        _ask(runtime, call.peer, _pursue_promise, call.keep._handle.rref_id, probe)
    else:
        _ask(runtime, call.peer, _pursue, call.id, probe)


def _ask(runtime: Searched, peer: Peer, function: Callable[..., None], *args: Any) -> None:
    """Call a function of the search on another worker. Nobody waits for it."""
    answer: Future[None] = Future()

    def over(done: Future[None]) -> None:
        done.acknowledge()  # a call that has ended does not wait any more

    answer.add_done_callback(over)
    token = CURRENT.set(None)
    try:
        runtime.agent.call(peer, function, args, {}, 10.0, future=answer)
        runtime.agent.flush()
    except RpcError:
        pass
    finally:
        CURRENT.reset(token)


def _pursue(id: int, probe: Probe) -> None:
    """Run on the worker that executes, or will execute, call ``id`` of the one who asks: pass the question on."""
    runtime: Searched | None = current()
    asking = CURRENT.get()
    if runtime is None or asking is None:
        return
    entry: Any = asking.peer.running.get(id)
    if type(entry) is Execution:
        _pursue_plain(runtime, entry, probe)
        return
    if not isinstance(entry, Envelope) or entry.hosted is None:
        return
    if _closes(runtime, entry, probe):
        return
    hosted, queue = entry.hosted, entry.queue
    if entry.state is NEW and queue is not None:
        for call in _awaited_arguments(entry)[:_BRANCHES]:
            _send(runtime, call, probe.past(_say(entry)))
        first = queue.held_behind(entry)
        if isinstance(first, Envelope):
            if probe.began(runtime, hosted, -first.number):
                _verdict(hosted, entry, probe, first)
                return
            for call in _awaited_arguments(first)[:_BRANCHES]:
                _send(runtime, call, probe.past(_say(first)))
    running = _holder(entry, hosted)
    if running is None:
        if entry.state is not NEW:
            _pursue_task(runtime, entry, probe)
        elif queue is not None and _is_serial(queue):
            for each, _task in _coroutines(hosted, queue):
                if each.begun and probe.began(runtime, hosted, each.chain):
                    _verdict(hosted, entry, probe)
                    return
                _pursue_task(runtime, each, probe)
        return
    if not running.begun:
        return
    if running is not entry and probe.began(runtime, hosted, running.chain):
        _verdict(hosted, entry, probe)
        return
    on_loop, loop = queue is not None and queue.is_async, hosted.loop_of(queue)
    slot: Any = hosted.mailbox.slot_of(running.chain) if not on_loop else loop and loop.runner
    if slot is None:
        return
    # What runs within it, on the same thread, has to end before it.
    inner = slot.running
    probe = probe.past(_say(running))
    if inner is not running and isinstance(inner, Envelope):
        probe = probe.past(_say(inner))
    for call in slot.waits_for[:_BRANCHES]:
        _send(runtime, call, probe)


def _pursue_promise(rref_id: RRefId, probe: Probe) -> None:
    """Run on the worker that has promised a value: pass the question on to what is to bring it."""
    runtime: Searched | None = current()
    if runtime is not None:
        for call in awaited(runtime.references.promised.get(rref_id))[:_BRANCHES]:
            _send(runtime, call, probe)


def _pursue_arguments(id: int, probe: Probe) -> None:
    """Run on the caller of a call with pending arguments: pass the question on to the calls that produce them."""
    runtime: Searched | None = current()
    asking = CURRENT.get()
    call = None if asking is None else asking.peer.pending.get(id)
    if runtime is not None and call is not None:
        for argument in call.awaits:
            for target in awaited(argument)[:_BRANCHES]:
                _send(runtime, target, probe)


def _pursue_plain(runtime: Searched, execution: Execution, probe: Probe) -> None:
    """Pass the question on for a plain function: it waits for a call if that is the only one that it has made."""
    left = [call for call in list(execution.nested) if isinstance(call, Call) and not call.done]
    if len(left) == 1 and (left[0].polling is not None or left[0].lock is not None):
        _send(runtime, left[0], probe.past(f"a function on {runtime.agent.name!r}"))


def _say_reader(reader: StreamReader) -> str:
    call = reader.call
    return _say(call) if isinstance(call, Envelope) else reader.name


def _say_pause(producer: Producer) -> str:
    items, size = producer.ahead
    name = "a generator" if producer.entry is None else _say(producer.entry)
    bound = f"max_buffered_items={producer.limit}" if producer.limit and items >= producer.limit else "64 MiB"
    return (
        f"{name} (pauses until its reader takes some of {items} items, {size / _MIB:.1f} MiB; bound: {bound})"
    )


# -- streams: where a search begins -------------------------------------------------------------------------------------------


def _look_at_streams(runtime: Searched, before: set[int]) -> set[int]:
    """Begin a search for each pause here that is in the way of something, and was there when we looked ``before``.

    Returns:
        The pauses there are now. Where there are none, there is no reason to look again.
    """
    found: set[int] = set()
    looked: set[GroupQueue] = set()
    for producer in runtime.streams.pausing():
        entry, pause = producer.entry, producer.pause
        if entry is None or not pause or entry.hosted is None or entry.queue is None:
            continue
        found.add(pause)
        if pause not in before:
            continue
        hosted, queue = entry.hosted, entry.queue
        slot: Any = hosted.mailbox.slot_of(entry.chain)
        if slot is not None and slot.depth > 1:
            _begin(runtime, hosted, pause, _say_pause(producer), [producer])
        elif queue.waiting and queue not in looked:
            looked.add(queue)
            for token, (text, targets) in (_holders(runtime, hosted, queue) or {}).items():
                _begin(runtime, hosted, token, text, targets)
    return found


def _begin(
    runtime: Searched, hosted: HostedActor, token: int, text: str, targets: list[Call | Stall]
) -> None:
    probe = Probe(runtime.references.me, hosted.id, token, (text,))
    for target in targets[:_BRANCHES]:
        if isinstance(target, Producer):
            runtime.agent.submit(partial(_ask_consumer, runtime, target, probe))
        else:
            runtime.agent.submit(partial(_follow, runtime, target, probe))


def _holders(
    runtime: Searched, hosted: HostedActor, queue: GroupQueue
) -> dict[int, tuple[str, list[Call | Stall]]] | None:
    """Return what the places of a queue are held by, and what that waits for; None unless all of it waits."""
    found: dict[int, tuple[str, list[Call | Stall]]] = {}
    if queue.yielding:
        return None  # a call that waits holds no place
    if queue.is_async:
        for producer in runtime.streams.pausing():
            if producer.entry is not None and producer.entry.queue is queue:
                found[producer.pause] = _say_pause(producer), [producer]
    else:
        for runner in list(hosted.threads):
            running, targets = runner.running, runner.waits_for
            if runner.queue is not queue or not isinstance(running, Envelope) or not running.begun:
                continue
            if not targets:
                return None
            first = targets[0]
            if isinstance(first, Producer):
                found[first.pause] = _say_pause(first), targets
            else:
                found[running.chain] = _say(running), targets
    return found if found and len(found) >= queue.running else None


# -- streams: from one to the next --------------------------------------------------------------------------------------


def _follow(runtime: Searched, target: Any, probe: Probe) -> None:
    """Ask what ``target`` waits for, for which something of the probe's trail waits."""
    if isinstance(target, Call):
        _send(runtime, target, probe)
    elif isinstance(target, Producer):
        if (probe.worker, probe.execution) == (runtime.references.me, target.pause):
            _end_stream(target, probe)
        else:
            _ask_consumer(runtime, target, probe.past(_say_pause(target)))
    elif hasattr(target, "waits_for"):  # the consumer of a stream
        source = target.waits_for
        if isinstance(source, Future):
            for call in awaited(source):
                if isinstance(call, Call):
                    _follow(runtime, call, probe)
        elif source is not None:
            peer, stream = source
            _ask(runtime, peer, _at_producer, stream, probe)


def _ask_consumer(runtime: Searched, producer: Producer, probe: Probe) -> None:
    if producer.peer is not None and producer.pause:
        _ask(runtime, producer.peer, _at_consumer, runtime.references.me, producer.stream, probe)


def _at_consumer(worker: WorkerKey, stream: int, probe: Probe) -> None:
    """Go on with what a stream's reader waits for. Called by RPC on the consumer's worker."""
    runtime: Searched | None = current()
    consumer = None if runtime is None else runtime.streams.consumers.get((worker, stream))
    if runtime is None or consumer is None or consumer.over:
        return
    if consumer.swept != probe.execution:
        # An error and its frames may be all that holds the stream, and an idle process does not come to collect them: it is
        # closed then, before the next question.
        consumer.swept = probe.execution
        gc.collect()
        return
    reader = consumer.reader
    if not reader.alone and _time.now() - consumer.touched < PATIENCE_S:
        return
    for target in reader.waits_for()[:_BRANCHES]:
        _follow(runtime, target, probe.past(f"its reader, {_say_reader(reader)} on {runtime.agent.name!r}"))


def _at_producer(stream: int, probe: Probe) -> None:
    """Go on with what a stream's generator waits for. Called by RPC on the producer's worker."""
    runtime: Searched | None = current()
    producer = None if runtime is None else runtime.streams.find(stream)
    entry = None if producer is None else producer.entry
    if runtime is None or producer is None or entry is None or entry.hosted is None:
        return
    if producer.pause:  # it has items
        return
    if _pursue_task(runtime, entry, probe):
        return
    slot: Any = entry.hosted.mailbox.slot_of(entry.chain)
    if slot is not None and slot.waiting:
        for target in slot.waits_for[:_BRANCHES]:
            _follow(runtime, target, probe.past(_say(entry)))


def _pursue_task(runtime: Searched, entry: Envelope, probe: Probe) -> bool:
    """Go on with what the coroutine of a call awaits; False where it is none."""
    task = entry.task
    if task is None:
        return False
    for target in awaited_by(task)[:_BRANCHES]:
        _follow(runtime, target, probe.past(_say(entry)))
    return True


# -- streams: where it ends ---------------------------------------------------------------------------------------------


def _sighted(seen: dict[int, float], token: int) -> bool:
    """Note that a circle was seen; say whether that was so before."""
    now = _time.now()
    return now - seen.setdefault(token, now) >= _AGAIN_S


def _closes(runtime: Searched, entry: Envelope, probe: Probe) -> bool:
    """Say whether a call waits for the places from one of which the search began; break the circle if it is certain."""
    hosted, queue = entry.hosted, entry.queue
    if hosted is None or queue is None or entry.state is not NEW or entry.slot is not None:
        return False
    if (probe.worker, probe.instance_id) != (runtime.references.me, hosted.id):
        return False
    held = _holders(runtime, hosted, queue)
    if held is None or probe.execution not in held:
        return False
    if not any(isinstance(targets[0], Producer) for _, targets in held.values()):
        return False
    if entry.circles is None:
        entry.circles = {}
    _sighted(entry.circles, probe.execution)
    if all(token in entry.circles and _sighted(entry.circles, token) for token in held):
        hosted.withdraw(entry, _error(hosted, f"{_say(entry)} can never run", (*probe.trail, _say(entry))))
    return True


def _end_stream(producer: Producer, probe: Probe) -> None:
    """Break a circle whose generator pauses on top of its own consumer."""
    entry = producer.entry
    if entry is not None and entry.hosted is not None and _sighted(producer.suspected, probe.execution):
        producer.abort(
            _error(entry.hosted, f"the stream of {_say(entry)} can never go on", (*probe.trail, _say(entry)))
        )


def _error(hosted: HostedActor, what: str, trail: tuple[str, ...]) -> DeadlockError:
    error = DeadlockError(
        f"{what}: {' -> '.join(trail)} wait for each other in a circle. Take the stream's items before "
        "you wait for the actor, close the stream, give it a larger max_buffered_items=, or the actor max_concurrency > 1",
        maybe_executed=what.startswith("the stream"),
        worker=hosted.agent.name,
    )
    hosted.registry.deadlocks.note(error)
    return error


def _verdict(hosted: HostedActor, entry: Envelope, probe: Probe, behind: Envelope | None = None) -> None:
    """Break the circle, if it has been found for the second time: what is on its way may have undone the first.

    ``behind``: the earlier call of the same caller that the entry waits for.
    """
    if entry.suspected != probe.execution:
        entry.suspected = probe.execution
        return
    circle = " -> ".join((*probe.trail, _say(entry)))
    advice = (
        "Let the first call go on without waiting (async def, or get() later), give the actor max_concurrency > 1, or leave it "
        "reentrant if the calls descend from each other"
    )
    loop = hosted.loop_of(entry.queue)
    on_loop = loop is not None and loop.runner.waiting
    if behind is not None:
        advice = (
            f"The last one stands behind {_say(behind)}, an earlier call of the same caller, whose argument is what it is to "
            "help with. Give that actor allow_out_of_order_execution=True, or get() the argument before the earlier call"
        )
    elif on_loop:
        advice = f"get() blocks the event loop of {hosted.title}: await there"
    error = DeadlockError(
        f"{_say(entry)} can never {'run' if entry.state is NEW else 'end'}: {circle} wait for each other in a circle. {advice}",
        maybe_executed=entry.begun > 0,
        worker=hosted.agent.name,
    )
    hosted.registry.deadlocks.note(error)
    if on_loop and behind is None:
        hosted.deadlocked(entry, error)
    else:
        hosted.withdraw(entry, error)
