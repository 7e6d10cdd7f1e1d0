"""Deadlocks: serial actors, and event loops that are blocked, that wait for each other in a circle, found and broken.

Where calls wait for an actor, and the actor itself waits for a call for a second, its worker asks the worker of that
call what *it* waits for, and so on. Only what is certain is followed: a method that waits for a call (or for all of
several), and a call that waits for the one method that a serial actor runs. If the question comes back to where it
began, twice in a row, none of them can ever go on: the call that closes the circle fails with DeadlockError, which
names all of it. (Edge chasing, after Chandy, Misra and Haas.)

Runs on the clock's thread and on pool threads; takes no lock of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from actorrpc.actors.letter_entry import LetterEntry
from actorrpc.actors.mailbox import NEW
from actorrpc.actors.runtime import current
from actorrpc.core.calls import CURRENT, Call, Execution
from actorrpc.core.clock import Tick
from actorrpc.errors import DeadlockError, RpcError
from actorrpc.futures import Future
from actorrpc.rpc.fork_messages import WorkerKey

if TYPE_CHECKING:
    from actorrpc.actors.crew import Station
    from actorrpc.actors.loop_station import LoopStation
    from actorrpc.actors.resident import Resident
    from actorrpc.actors.runtime import Runtime

__all__ = ["Deadlocks", "Probe"]

_LOOK_S: Final = 1.0
_MOST_HOPS: Final = 64
_BRANCHES: Final = 4  # of the calls that one waits for at a time, so many are followed


@dataclass(frozen=True, slots=True)
class Probe:
    """A question on its way: who asked it, and whom it has passed."""

    worker: WorkerKey
    resident_id: int
    execution: int
    trail: tuple[str, ...]


class Deadlocks:
    """Looks, once a second while there is reason to, for actors here that may be in a deadlock. Thread-safe."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._tick = Tick(runtime.agent.clock, _LOOK_S, self._look)
        self._seen: dict[int, list[Call]] = {}  # station -> what it waited for when we looked last

    def poke(self) -> None:
        """See to it that somebody looks soon: an actor for which calls wait waits itself."""
        self._tick.poke()

    def _look(self) -> bool:
        busy = False
        seen, self._seen = self._seen, {}
        for resident in self._runtime.residents.all():
            for station in _blocked(resident):
                busy = True  # also where it waits for no call yet: one to an actor that is being made comes later
                calls = station.waits_for
                before = seen.get(id(station), ())
                self._seen[id(station)] = calls
                running = station.running
                if not isinstance(running, LetterEntry) or running.execution is None:
                    continue
                probe = Probe(
                    self._runtime.references.me, resident.id, running.execution.chain, (_say(running),)
                )
                for call in calls[:_BRANCHES]:
                    if any(call is each for each in before):  # otherwise it has only begun to wait
                        self._runtime.agent.submit(partial(_send, self._runtime, call, probe))
        return busy


def _blocked(resident: Resident) -> list[Station | LoopStation]:
    """Return what calls wait for at an actor and waits itself: the station of a serial one, and its event loop."""
    found: list[Station | LoopStation] = []
    lane = resident.mailbox.lanes[""]
    if lane.limit == 1 and not lane.yielding and lane.waiting:
        found += [each for each in list(resident.crew) if each.lane is lane and each.waiting][:1]
    loop = resident.loop
    if loop is not None and loop.station.waiting:
        found.append(loop.station)
    return found


def _holder(entry: LetterEntry, resident: Resident) -> LetterEntry | None:
    """Return the call that has to go on before this one, which is its actor's, can; itself if it runs on a thread."""
    lane, loop = entry.lane, resident.loop
    if lane is not None and lane.is_async:
        # On a loop: what blocks that, unless this one runs inside of the wait.
        held = loop.station.running if loop is not None else None
        execution = held.execution if held is not None else None
        if loop is None or execution is None or held is entry or loop.station.may_run(entry, execution):
            return None
        return held
    if entry.state is not NEW:
        return entry
    if lane is None or lane.limit != 1 or lane.yielding or not entry.ready:
        return None
    station = next((each for each in list(resident.crew) if each.lane is lane), None)
    found = station.running if station is not None else None
    return found if isinstance(found, LetterEntry) else None


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
    resident = entry.office
    running = _holder(entry, resident)
    if running is None or running.execution is None:
        return
    if running is not entry and (probe.worker, probe.resident_id, probe.execution) == (
        runtime.references.me,
        resident.id,
        running.execution.chain,
    ):
        _verdict(resident, entry, probe)
        return
    loop = resident.loop
    stations: list[Station | LoopStation] = [*resident.crew, *([loop.station] if loop is not None else ())]
    for station in stations:
        if station.running is running:
            trail = (*probe.trail, _say(running))
            for call in station.waits_for[:_BRANCHES]:
                _send(runtime, call, Probe(probe.worker, probe.resident_id, probe.execution, trail))
            return


def _pursue_plain(runtime: Runtime, execution: Execution, probe: Probe) -> None:
    """Pass the question on for a plain function: it waits for a call if that is the only one that it has made."""
    left = [call for call in list(execution.nested or ()) if not call.done]
    if len(left) == 1 and (left[0].polling is not None or left[0].lock is not None):
        trail = (*probe.trail, f"a function on {runtime.agent.name!r}")
        _send(runtime, left[0], Probe(probe.worker, probe.resident_id, probe.execution, trail))


def _verdict(resident: Resident, entry: LetterEntry, probe: Probe) -> None:
    """Break the circle, if it has been found for the second time: what is on its way may have undone the first."""
    if entry.suspected != probe.execution:
        entry.suspected = probe.execution
        return
    circle = " -> ".join((*probe.trail, _say(entry)))
    advice = (
        "Let the first call go on without waiting (async def, or get() later), give the actor max_concurrency > 1, or leave it "
        "reentrant if the calls descend from each other"
    )
    if entry.lane is not None and entry.lane.is_async:
        advice = f"get() blocks the event loop of {resident.title}: await there"
    error = DeadlockError(
        f"{_say(entry)} can never {'run' if entry.state is NEW else 'end'}: {circle} wait for each other in a circle. {advice}",
        maybe_executed=entry.execution is not None,
        worker=resident.agent.name,
    )
    resident.deadlocked(entry, error)
