"""Derives findings from the state of a group: faults, and other facts that a user should know. No I/O.

The commands use the formats of durations and counts (:func:`span`, :func:`count`) as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Final

from actorrpc.observe.model import Finding, GroupState, ObservedActor, ObservedWait, ObservedWorker

__all__ = [
    "calls_to",
    "count",
    "fault",
    "findings",
    "in_order",
    "is_wanted",
    "note",
    "of_actors",
    "of_workers",
    "remedy_of",
    "some",
    "span",
]

# Thresholds of findings.
_LONG_S: Final = 10.0  # report a call that has been queued for longer
_BLOCKED_S: Final = 2.0  # report calls and large messages that have been blocked for longer
_MANY: Final = 100  # report an actor that has so many queued calls
_RECENT_S: Final = 300.0  # how long a broken deadlock, or a death of an actor or a worker, is a fault
_NEAR: Final = 0.8  # report a process that has opened more than this part of its descriptor limit
# Parts of the death causes of actors that ended on purpose, or as a user has ordered.
_WANTED: Final = (
    "its last handle is gone",
    "it was killed with kill()",
    "exit_actor() was called",
    "is drained, and it cannot move",
    "has shut down",
    ", its supervisor, has",
)
_SHOWN: Final = 20


def span(seconds: float) -> str:
    """Format a duration."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if not math.isfinite(seconds):  # another process may have sent infinity or NaN
        return f"{seconds} s"
    minutes, _ = divmod(int(seconds), 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def count(number: int, what: str) -> str:
    """Return the number and the noun, with an s if the number is not 1."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def fault(kind: str, what: str, remedy: str = "") -> Finding:
    """Return the finding of a fault."""
    return Finding(kind=kind, wrong=True, what=what, remedy=remedy)


def note(kind: str, what: str, remedy: str = "") -> Finding:
    """Return a finding that may be intended, and so is no fault."""
    return Finding(kind=kind, wrong=False, what=what, remedy=remedy)


def findings(state: GroupState) -> list[Finding]:
    """Return all findings, faults first."""
    return in_order([*of_workers(state), *of_actors(state)])


def in_order(found: Iterable[Finding]) -> list[Finding]:
    """Sort findings into the order in which they are shown: faults first, streams last."""
    return sorted(found, key=lambda each: (not each.wrong, each.kind == "stream"))


def of_workers(state: GroupState) -> list[Finding]:
    """Return the findings about workers."""
    found: list[Finding] = []
    for worker in state.workers:
        found += _of_worker(worker, state)
    found += _seen_through(state)
    found += _suspects(state)
    found += _opposed(state)
    for worker in state.workers:
        found += [
            fault(
                "deadlock",
                f"worker {worker.name!r} broke a deadlock {each.since:.0f} s ago: {each.error}",
            )
            for each in worker.deadlocks
            if each.since < _RECENT_S
        ][-3:]
        found += [
            fault(
                "worker",
                f"{each.what} ({span(each.since)} ago)",
                "see its last lines (actorrpc logs) and the system log of its host, and start it again",
            )
            for each in worker.deaths
            if each.since < _RECENT_S
        ]
        found += [
            note(
                "window",
                f"calls of worker {worker.name!r} to {each.worker!r} have been blocked for {span(each.blocked)}: "
                f"{each.worker!r} has not started calls of {each.unread} bytes, and {each.calls_out} calls are unfinished",
                f"see what {each.worker!r} does; call less often, wait for results, or raise window=",
            )
            for each in worker.connections
            if each.blocked >= _BLOCKED_S
        ][:_SHOWN]
        found += [
            note(
                "stalled",
                f"a large message of worker {worker.name!r} to {each.worker!r} has been blocked for {span(each.stalled)}: "
                f"{each.worker!r} does not read",
                f"see what {each.worker!r} does; its process may be stopped, or the network between the two may be slow",
            )
            for each in worker.connections
            if each.stalled >= _BLOCKED_S
        ][:_SHOWN]
        found += [
            note(
                "stream",
                f"the stream of {each.actor}.{each.method}() on {worker.name!r} pauses: {each.consumer!r} has not taken "
                f"{each.items} items ({each.bytes / (1 << 20):.1f} MiB)",
                f"see what {each.consumer!r} does; max_buffered_items= bounds how far ahead a generator runs",
            )
            for each in worker.streams
            if each.pauses
        ][:_SHOWN]
    return found


def of_actors(state: GroupState) -> list[Finding]:
    """Return the findings about actors."""
    found = _of_dead(state)
    for actor in state.actors:
        found += _of_actor(actor)
    return found


def _of_dead(state: GroupState) -> list[Finding]:
    """Report actors that have not ended on purpose, equal causes together: as faults, and after ``_RECENT_S`` as notes."""
    dead: dict[tuple[bool, str], list[str]] = {}
    for actor in state.actors:
        if actor.state == "DEAD" and not is_wanted(actor):
            key = actor.dead_for < _RECENT_S, actor.death_cause.removeprefix(f"{actor.title} is dead")
            dead.setdefault(key, []).append(actor.title)
    found = []
    for (is_recent, cause), titles in sorted(dead.items(), key=lambda each: not each[0][0]):
        who = f"{titles[0]} is" if len(titles) == 1 else f"{len(titles)} actors ({some(titles)}) are"
        found.append(Finding(kind="actor", wrong=is_recent, what=f"{who} dead{cause}"))
    if len(found) > _SHOWN:
        more = f"actors are dead for {len(found) - _SHOWN} more reasons"
        found[_SHOWN:] = [Finding(kind="actor", wrong=found[_SHOWN].wrong, what=more)]
    return found


_REMEDIES: Final = {
    "stopped": "kill -CONT {pid} resumes it",
    "busy": "actorrpc stack {name} shows where it is",
    "dead": "its actors are restarted if max_restarts allows it",
    "incompatible": "run this command with the version of actorrpc that the group has",
    "refused": "give this command the key that the worker has (ACTORRPC_KEY or ACTORRPC_KEY_FILE), and its settings "
    "of TLS (ACTORRPC_TLS, ACTORRPC_TLS_CERT)",
    "silent": "check its machine, and the network between the hosts",
}


def remedy_of(worker: ObservedWorker) -> str:
    """Return what the user can do about a worker that does not answer."""
    return _REMEDIES.get(worker.state, "").format(pid=worker.pid, name=worker.name)


def calls_to(worker: ObservedWorker) -> str:
    """Describe the unfinished calls to a worker, as its callers report them. The text continues another sentence."""
    if not worker.calls_to:
        return ""
    return f"; {count(worker.calls_to, 'call')} to it unfinished, the oldest (of {worker.oldest_call}) for {span(worker.oldest)}"


def _of_worker(worker: ObservedWorker, state: GroupState) -> list[Finding]:
    found = []
    who = f"worker {worker.name!r} (pid {worker.pid})"
    if worker.state not in ("alive", "left"):
        actors = [each.title for each in state.actors if each.worker == worker.name and each.state != "DEAD"]
        hit = f"; on it: {', '.join(actors[:5])}{' ...' if len(actors) > 5 else ''}" if actors else ""
        hit += calls_to(worker)
        found.append(
            fault(
                "worker",
                f"{who} is {worker.state}: {worker.reason}{hit}",
                remedy_of(worker),
            )
        )
    elif worker.state == "alive" and worker.reason:
        found.append(note("worker", f"{who}: {worker.reason}"))
    found += [
        note(
            "debugger",
            f"{each.call} on {worker.name!r} is held in the debugger at {each.file}:{each.line}, in {each.function}(), "
            f"for {span(each.since)}, by {each.why}" + ("; a front end is attached" if each.attached else ""),
            "" if each.attached else f"actorrpc debug {each.session} attaches to it",
        )
        for each in worker.held
        if each.is_held
    ][:_SHOWN]
    if worker.descriptor_limit and worker.descriptors > _NEAR * worker.descriptor_limit:
        found.append(
            fault(
                "descriptors",
                f"{who} has {worker.descriptors} descriptors open, and may have {worker.descriptor_limit}",
                "raise the limit (ulimit -n), or close files and connections",
            )
        )
    if worker.pool.get("queued", 0) > 1 and not worker.pool.get("listening", 1):
        found.append(
            fault(
                "threads",
                f"all {worker.pool.get('threads', 0)} threads of the pool of {who} are busy, and {worker.pool['queued']} "
                "tasks wait",
                f"actorrpc stack {worker.name} shows what they do; max_threads= allows more",
            )
        )
    found += [
        fault(
            "deadline",
            f"{call.method}() on {worker.name!r}, called by {call.caller!r}, is {span(-call.left)} past its deadline "
            "and still runs",
        )
        for call in worker.calls
        if call.left is not None and call.left < -1.0
    ][:_SHOWN]
    return found


def _seen_through(state: GroupState) -> list[Finding]:
    through: dict[str, list[str]] = {}
    for worker in state.workers:
        if worker.through:
            through.setdefault(worker.through, []).append(worker.name)
    return [
        note(
            "through",
            f"{count(len(names), 'worker')} seen through {by!r}, because connections from here are not answered: {some(names)}",
            "if other workers shall call them first, or for profile and debug, let their hosts accept connections (firewall, "
            "ACTORRPC_ADVERTISE)",
        )
        for by, names in through.items()
    ]


def _suspects(state: GroupState) -> list[Finding]:
    found = []
    well = {each.name for each in state.workers if each.state == "alive"}
    for worker in state.workers:
        for each in worker.connections:
            if each.state == "suspect" and each.worker in well:
                found.append(
                    fault(
                        "suspect",
                        f"worker {worker.name!r} has received nothing from {each.worker!r} for {span(each.silent)}, but "
                        f"{each.worker!r} answers this command",
                        "check the network between the two",
                    )
                )
    return found[:_SHOWN]


def _opposed(state: GroupState) -> list[Finding]:
    """Report pairs of rounds (barriers, shutdowns) whose workers wait for each other.

    In such a pair, a worker of each round waits for a worker that has entered the other round only.
    """
    rounds: dict[str, dict[str, ObservedWait]] = {}
    for worker in state.workers:
        for wait in worker.waits:
            if wait.since >= _LONG_S:
                rounds.setdefault(wait.round, {})[worker.name] = wait
    found = []
    for (one, here), (other, there) in itertools.combinations(rounds.items(), 2):
        ours = [name for name in here if name not in there]
        theirs = [
            name for name in there if name not in here and any(here[each].includes(name) for each in ours)
        ]
        ours = [name for name in ours if any(there[each].includes(name) for each in theirs)]
        if ours and theirs:
            found.append(
                fault(
                    "rounds",
                    f"workers wait for each other in different rounds: {some(ours)} in {one} for "
                    f"{span(here[ours[0]].since)}, {some(theirs)} in {other} for {span(there[theirs[0]].since)}",
                    "one side left out a call that the other side made, usually because it raised an exception: see the logs",
                )
            )
    return found[:_SHOWN]


def some(names: list[str]) -> str:
    """Return the first five names in quotes, and the number of the others."""
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def is_wanted(actor: ObservedActor) -> bool:
    """Return whether a dead actor ended on purpose."""
    how = actor.death_cause.partition("\n")[0]  # lines on stderr and earlier deaths follow
    return any(text in how for text in _WANTED)


def _of_actor(actor: ObservedActor) -> list[Finding]:
    found = []
    if actor.state == "RESTARTING":
        found.append(
            fault(
                "actor",
                f"{actor.title} is being restarted: {actor.death_cause}",
                "it starts again as soon as a machine or worker has room for it. If none has within placement_timeout (60 s), it "
                "is dead: let a worker with its resources join",
            )
        )
    if actor.oldest >= _LONG_S or actor.waiting >= _MANY:
        runs = ", ".join(
            f"{call.method}() for {span(call.since)}"
            + (f", which waits for {' and '.join(call.waits_for[:2])}" if call.waits_for else "")
            for call in actor.running[:3]
        )
        found.append(
            fault(
                "mailbox",
                ("1 call waits" if actor.waiting == 1 else f"{actor.waiting} calls wait")
                + f" for {actor.title} on {actor.worker!r}, the first for {span(actor.oldest)}; "
                + (f"it runs {runs}" if runs else "it runs nothing"),
                f"actorrpc stack {actor.actor_id[-4:]} shows where it is; max_concurrency= lets it run more calls at a time",
            )
        )
    found += [
        fault(
            "deadline",
            f"{actor.title}.{call.method}() on {actor.worker!r} is {span(-call.left)} past its deadline and still runs",
            "options(timeout=, interrupt=True) interrupts such a call",
        )
        for call in actor.running
        if call.left is not None and call.left < -1.0
    ][:_SHOWN]
    return found
