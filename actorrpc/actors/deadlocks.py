"""Deadlocks: actors that wait for each other in a circle, found and broken.

Where calls wait for an actor, and the actor itself waits for a call for a second, its worker asks the worker of that
call what *it* waits for, and so on. Only what is certain is followed: a method that waits for a call (or for all of
several; a coroutine that awaits one), and a call that waits for the one method that a serial actor runs, for its
arguments, or for an earlier call of its caller that waits for its arguments. If the question comes back to where it
began, twice in a row, none of them can ever go on: the call that closes the circle fails with DeadlockError, which
names all of it. (Edge chasing, after Chandy, Misra and Haas.)

Runs on the clock's thread and on pool threads; takes no lock of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from actorrpc.actors.crew import calls_of
from actorrpc.actors.letter_entry import LetterEntry
from actorrpc.actors.mailbox import NEW
from actorrpc.actors.object_ref import ObjectRef
from actorrpc.actors.runtime import current
from actorrpc.core.calls import CURRENT, Call, Execution
from actorrpc.core.clock import Tick
from actorrpc.errors import DeadlockError, RpcError
from actorrpc.futures import Future
from actorrpc.rpc.fork_messages import RRefId, WorkerKey
from actorrpc.rpc.rref import RRef

if TYPE_CHECKING:
    from actorrpc.actors.crew import Station
    from actorrpc.actors.resident import Resident
    from actorrpc.actors.runtime import Runtime

__all__ = ["Deadlocks", "Probe"]

_LOOK_S: Final = 1.0
_MOST_HOPS: Final = 64
_BRANCHES: Final = 4  # of the calls that one waits for at a time, so many are followed


@dataclass(frozen=True, slots=True)
class Probe:
    """A question on its way: who asked it, and whom it has passed.

    ``execution`` is what waits where it began; of a call that waits for its arguments, its number, negative.
    """

    worker: WorkerKey
    resident_id: int
    execution: int
    trail: tuple[str, ...]

    def past(self, what: str) -> Probe:
        """Return the question as it goes on."""
        return replace(self, trail=(*self.trail, what))

    def began(self, runtime: Runtime, resident: Resident, what: int) -> bool:
        """Say whether it has come back to where it began."""
        return (self.worker, self.resident_id, self.execution) == (runtime.references.me, resident.id, what)


class Deadlocks:
    """Looks, once a second while there is reason to, for actors here that may be in a deadlock. Thread-safe."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._tick = Tick(runtime.agent.clock, _LOOK_S, self._look)
        self._seen: dict[object, list[Call]] = {}  # who waited, and for what, when we looked last

    def poke(self) -> None:
        """See to it that somebody looks soon: an actor for which calls wait waits itself."""
        self._tick.poke()

    def _look(self) -> bool:
        busy = False
        seen, self._seen = self._seen, {}
        for resident in self._runtime.residents.all():
            for head in _heads(resident):
                busy = True
                probe = Probe(self._runtime.references.me, resident.id, -head.number, (_say(head),))
                self._begin(seen, (resident.id, head.number), _calls_of_arguments(head), probe)
            station = _blocked(resident)
            calls = station.waits_for if station is not None else []
            if station is None or not calls:
                continue
            busy = True
            running = station.running
            if not isinstance(running, LetterEntry) or running.execution is None:
                continue
            probe = Probe(self._runtime.references.me, resident.id, running.execution.chain, (_say(running),))
            self._begin(seen, resident.id, calls, probe)
        return busy

    def _begin(self, seen: dict[object, list[Call]], who: object, calls: list[Call], probe: Probe) -> None:
        """Ask about the calls that somebody waits for, if they have been waited for when we looked last."""
        self._seen[who] = calls
        before = seen.get(who, ())
        for call in calls[:_BRANCHES]:
            if any(call is each for each in before):  # otherwise it has only begun to wait
                self._runtime.agent.submit(partial(_send, self._runtime, call, probe))


def _heads(resident: Resident) -> list[LetterEntry]:
    """Return the calls that wait for their arguments, while later ones of their callers wait for them."""
    lanes = (*resident.mailbox.lanes.values(), *resident.mailbox.async_lanes.values())
    return [head for lane in lanes for head in lane.heads() if isinstance(head, LetterEntry)]


def _calls_of_arguments(entry: LetterEntry) -> list[Call]:
    """Return the calls that bring a call the arguments that are not here."""
    if entry.ready or not isinstance(entry.opened, tuple):
        return []
    args, kwargs = entry.opened
    refs = [each for each in (*args, *kwargs.values()) if type(each) is ObjectRef]
    futures = [each._fetched or each._future for each in refs]
    return [call for future in futures if future is not None for call in calls_of(future)]


def _blocked(resident: Resident) -> Station | None:
    """Return the station of a serial actor for which calls wait while it waits itself."""
    lane = resident.mailbox.lanes[""]
    if lane.limit != 1 or lane.yielding or not lane.waiting:
        return None
    for station in list(resident.crew):
        if station.lane is lane and station.waits_for:
            return station
    return None


def _say(entry: LetterEntry) -> str:
    resident = entry.office
    name = entry.header.get("m", "__init__")
    return f"{resident.title}.{name}()" if resident is not None else f"{name}()"


def _send(runtime: Runtime, call: Call, probe: Probe) -> None:
    """Ask the worker of a call what the call waits for."""
    if call.done or len(probe.trail) > _MOST_HOPS:
        return
    answer: Future[None] = Future()

    def over(done: Future[None]) -> None:
        done.acknowledge()  # whoever has ended does not wait any more

    answer.add_done_callback(over)
    token = CURRENT.set(None)
    try:
        if isinstance(call.keep, RRef):  # it fetches what has been promised
            runtime.agent.call(
                call.peer, _pursue_promise, (call.keep._handle.rref_id, probe), {}, 10.0, future=answer
            )
        else:
            runtime.agent.call(call.peer, _pursue, (call.id, probe), {}, 10.0, future=answer)
        runtime.agent.flush()
    except RpcError:
        pass
    finally:
        CURRENT.reset(token)


def _pursue(id: int, probe: Probe) -> None:
    """Run on the worker that executes, or will execute, call ``id`` of the one who asks: pass the question on."""
    runtime, asking = current(), CURRENT.get()
    if runtime is None or asking is None:
        return
    entry: Any = asking.peer.running.get(id)
    if isinstance(entry, Execution):
        _pursue_plain(runtime, entry, probe)
        return
    if not isinstance(entry, LetterEntry) or entry.office is None:
        return
    resident, running = entry.office, entry
    if entry.state is NEW:
        lane = entry.lane
        if lane is None:
            return
        if not entry.ready:
            for call in _calls_of_arguments(entry)[:_BRANCHES]:
                _send(runtime, call, probe.past(_say(entry)))
        first = lane.held_behind(entry)
        if isinstance(first, LetterEntry):
            if probe.began(runtime, resident, -first.number):
                _verdict(resident, entry, probe, first)
                return
            for call in _calls_of_arguments(first)[:_BRANCHES]:
                _send(runtime, call, probe.past(_say(first)))
        if lane.is_async or lane.limit != 1 or lane.yielding or not entry.ready:
            return
        station = next((each for each in list(resident.crew) if each.lane is lane), None)
        held = station.running if station is not None else None
        if not isinstance(held, LetterEntry) or held.execution is None:
            return
        if probe.began(runtime, resident, held.execution.chain):
            _verdict(resident, entry, probe)
            return
        running = held
    execution = running.execution
    seat: Any = resident.mailbox.seat_of(execution.chain) if execution is not None else None
    if seat is None:
        awaited = getattr(getattr(running.task, "_fut_waiter", None), "awaited", None)
        for call in calls_of(awaited)[:_BRANCHES] if isinstance(awaited, Future) else ():
            _send(runtime, call, probe.past(_say(running)))
        return
    # What runs within it, on the same thread, has to end before it.
    inner = seat.running
    probe = probe.past(_say(running))
    if inner is not running and isinstance(inner, LetterEntry):
        probe = probe.past(_say(inner))
    for call in seat.waits_for[:_BRANCHES]:
        _send(runtime, call, probe)


def _pursue_promise(rref_id: RRefId, probe: Probe) -> None:
    """Run on the worker that has promised a value: pass the question on to what is to bring it."""
    runtime = current()
    promised = runtime.references.promised.get(rref_id) if runtime is not None else None
    if runtime is not None and promised is not None:
        for call in calls_of(promised)[:_BRANCHES]:
            _send(runtime, call, probe)


def _pursue_plain(runtime: Runtime, execution: Execution, probe: Probe) -> None:
    """Pass the question on for a plain function: it waits for a call if that is the only one that it has made."""
    left = [call for call in list(execution.nested or ()) if not call.done]
    if len(left) == 1 and (left[0].polling is not None or left[0].lock is not None):
        _send(runtime, left[0], probe.past(f"a function on {runtime.agent.name!r}"))


def _verdict(resident: Resident, entry: LetterEntry, probe: Probe, behind: LetterEntry | None = None) -> None:
    """Break the circle, if it has been found for the second time: what is on its way may have undone the first.

    ``behind``: the earlier call of the same caller that the entry waits for.
    """
    if entry.suspected != probe.execution:
        entry.suspected = probe.execution
        return
    circle = " -> ".join((*probe.trail, _say(entry)))
    if behind is None:
        advice = (
            "Let the first call go on without waiting (async def, or get() later), give the actor max_concurrency > 1, or "
            "leave it reentrant if the calls descend from each other"
        )
    else:
        advice = (
            f"The last one stands behind {_say(behind)}, an earlier call of the same caller, whose argument is what it is to "
            "help with. Give that actor allow_out_of_order_execution=True, or get() the argument before the earlier call"
        )
    error = DeadlockError(
        f"{_say(entry)} can never run: {circle} wait for each other in a circle. {advice}",
        maybe_executed=False,
        worker=resident.agent.name,
    )
    resident.withdraw(entry, error)
