"""Texts of the command line: tables, amounts and stacks. No I/O."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from actorrpc.observe.findings import count, span
from actorrpc.observe.model import (
    HeldCall,
    ObservedActor,
    ObservedCall,
    ObservedWorker,
    StackFrame,
    ThreadStack,
)

__all__ = [
    "Fold",
    "amount",
    "count",
    "figure",
    "folded",
    "is_idle",
    "known",
    "lapse",
    "latencies",
    "left_out",
    "runs",
    "say_call",
    "span",
    "stack_lines",
    "table",
    "users_part",
]

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FORKED: Final = os.path.join(
    "provisioners", "fork_server.py"
)  # in this file, the main thread of a forked worker waits
_IMPORTS: Final = "<frozen importlib"
_SHOWN: Final = 12  # greatest number of threads that are named for one stack


def amount(nbytes: float) -> str:
    """Return a size as text."""
    for unit in _UNITS:
        if nbytes < 1024 or unit == _UNITS[-1]:
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"


def lapse(seconds: float) -> str:
    """Return the duration of a call as text."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else span(seconds)


def latencies(actor: ObservedActor) -> tuple[str, str]:
    """Return the p50 and p99 of an actor's latest calls as texts; dashes if it has answered none."""
    return (lapse(actor.p50), lapse(actor.p99)) if actor.latest else ("-", "-")


def known(number: int, actors: Iterable[ObservedActor]) -> str:
    """Return a number of calls as text, with ``?`` if the worker of one of the actors has not answered."""
    if all(each.answered or not each.worker or each.state == "DEAD" for each in actors):
        return str(number)
    return f"{number} + ?" if number else "?"


def figure(value: float | None) -> str:
    """Return a number without its fraction; a dash if it is unknown."""
    return "-" if value is None else f"{value:.0f}"


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], most: int = sys.maxsize, more: str = ""
) -> list[str]:
    """Return the lines of a table; columns of numbers are aligned right.

    Args:
        most: how many rows are shown; a last line, which ends with ``more``, says how many rows are left out.
    """
    cells = [[str(each) for each in row] for row in rows]
    raw = cells[:most]
    widths = [max([len(head[i]), *(len(row[i]) for row in raw)]) for i in range(len(head))]
    right = [bool(raw) and all(_is_number(row[i]) for row in raw) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if on_right else cell.ljust(width)
            for cell, width, on_right in zip(row, widths, right, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return [line(head), *(line(row) for row in raw), *left_out(len(cells) - most, more)]


def left_out(number: int, what: str) -> list[str]:
    """Return the line that says how many rows a table leaves out; no line if the number is not positive."""
    return [f"... and {number} more{what}"] if number > 0 else []


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell == "-"


# -- stacks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fold:
    """Threads with equal stacks.

    Attributes:
        frames: the stack, innermost frame last.
        where: the threads, each with its worker.
        calls: the calls that these threads run, each with its actor and worker.
        held: the calls of these threads that a debugger holds.
    """

    frames: tuple[StackFrame, ...]
    where: tuple[tuple[ObservedWorker, ThreadStack], ...]
    calls: tuple[tuple[ObservedActor, ObservedCall, ObservedWorker], ...]
    held: tuple[HeldCall, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether the threads are idle: their stack has no frames of user code; see :func:`is_idle`."""
        return is_idle(self.frames)

    @property
    def told(self) -> tuple[StackFrame, ...]:
        """The frames without the library's outer frames, which call the user's code."""
        return users_part(self.frames)

    @property
    def inner(self) -> int:
        """The number of the library's frames below the library function that user code has called; 0 if there is no such call."""
        depth = next((depth for depth, each in enumerate(reversed(self.told)) if not _is_ours(each)), 0)
        return max(0, depth - 1)


def _is_ours(frame: StackFrame) -> bool:
    """Whether a frame is of this library, or of Python's import system or ``threading``."""
    return frame.file.startswith((_PACKAGE, "<frozen")) or os.path.basename(frame.file) == "threading.py"


def is_idle(frames: Sequence[StackFrame]) -> bool:
    """Say whether a stack has only frames for which ``_is_ours()`` is true, or is of a forked worker's main thread."""
    return all(map(_is_ours, frames)) or any(each.file.endswith(_FORKED) for each in frames)


def users_part(frames: tuple[StackFrame, ...]) -> tuple[StackFrame, ...]:
    """Return a stack without the outer frames of the library and the frames of the import system; all if no frame is a user's."""
    users = [place for place, each in enumerate(frames) if not _is_ours(each)]
    return (
        tuple(each for each in frames[users[0] :] if not each.file.startswith(_IMPORTS)) if users else frames
    )


def folded(workers: Sequence[ObservedWorker], actors: Sequence[ObservedActor]) -> list[Fold]:
    """Return all stacks, equal ones once: stacks with calls first, then by frequency; idle threads of the library last."""
    calls: dict[tuple[str, int], list[tuple[ObservedActor, ObservedCall]]] = {}
    for actor in actors:
        for call in actor.running:
            if call.thread:
                calls.setdefault((actor.worker, call.thread), []).append((actor, call))
    groups: dict[tuple[StackFrame, ...], list[tuple[ObservedWorker, ThreadStack]]] = {}
    for worker in workers:
        for thread in worker.threads:
            groups.setdefault(thread.frames, []).append((worker, thread))
    found = []
    for frames, where in groups.items():
        running = [
            (actor, call, worker)
            for worker, thread in where
            for actor, call in calls.get((worker.name, thread.ident), ())
        ]
        held = [
            each
            for worker, thread in where
            for each in worker.held
            if each.is_held and each.thread == thread.ident
        ]
        found.append(Fold(frames, tuple(where), tuple(running), tuple(held)))
    return sorted(found, key=lambda each: (each.is_ours, not (each.calls or each.held), -len(each.where)))


def stack_lines(
    fold: Fold, workers: int, threads: int, callers: Mapping[str, str], whole: bool = False
) -> list[str]:
    """Return the lines that describe the threads with one stack.

    Args:
        workers, threads: the numbers of all workers and threads, for the heading.
        callers: id of a running execution -> its actor and method.
        whole: include the library's frames below the library function that the user's code has called.
    """
    names = list(dict.fromkeys(worker.name for worker, _ in fold.where))
    who = [
        f"{thread.name or 'a thread'} of {worker.name}" if len(names) > 1 else thread.name or "a thread"
        for worker, thread in fold.where
    ]
    shown = ", ".join(who[:_SHOWN]) + (f" and {len(who) - _SHOWN} more" if len(who) > _SHOWN else "")
    if len(names) == 1:
        shown = f"worker {names[0]}: {shown}"
    head = f"{len(fold.where)} of {threads} threads" if len(fold.where) > 1 else "1 thread"
    if len(names) > 1:
        head += f", on {len(names)} of {workers} workers"
    lines = [f"{head} ({shown})"]
    for actor, call, worker in fold.calls[:_SHOWN]:
        lines.append(
            f"  runs {say_call(actor.title, call, callers)}"
            + (f", on {worker.name}" if len(names) > 1 else "")
        )
    if len(fold.calls) > _SHOWN:
        lines.append(f"  runs {len(fold.calls) - _SHOWN} more calls")
    lines += [
        f"  {each.call} is held by {each.why} at {each.file}:{each.line}, in {each.function}()"
        for each in fold.held[:_SHOWN]
    ]
    if not fold.calls:  # the descriptions of calls include what they wait for
        waits = Counter(" and ".join(thread.waits_for) for _, thread in fold.where if thread.waits_for)
        for text, number in waits.most_common(_SHOWN):
            lines.append(f"  waits for {text}" if number == 1 else f"  {number} wait for {text}")
    inner = 0 if whole else fold.inner
    told = fold.told[: len(fold.told) - inner]
    width = max((len(each.function) for each in told), default=0)
    frames = [
        f"    {each.function.ljust(min(width, 50))}  {_short(each.file)}:{each.line}"
        for each in reversed(told)
    ]
    if inner:
        frames[0] += f" ({count(inner, 'frame')} of the library below)"
    return lines + frames


def say_call(title: str, call: ObservedCall, callers: Mapping[str, str]) -> str:
    """Describe a running method: its caller, its age, the time until its deadline, and the objects for which it waits."""
    caller = callers.get(call.chain[-1]) if call.chain else None
    whom = f"{caller} on {call.caller!r}" if caller else repr(call.caller)
    text = f"{title}.{call.method}() for {whom}, {span(call.since)} old"
    if call.left is not None:
        text += f", {span(call.left)} left" if call.left >= 0 else f", {span(-call.left)} past its deadline"
    if call.waits_for:
        text += f"; waits for {' and '.join(call.waits_for)}"
    return text


def runs(actor: ObservedActor, worker: ObservedWorker | None) -> str:
    """Say in a few words what an actor runs on its worker, or which of its calls a debugger holds."""
    held = [
        each
        for each in (worker.held if worker is not None else ())
        if each.is_held and each.actor_id == actor.actor_id
    ]
    at = {each.thread for each in held}
    said = [f"{each.call.rpartition('.')[2]} held in a debugger {span(each.since)}" for each in held]
    said += [f"{call.method}() {span(call.since)}" for call in actor.running if call.thread not in at]
    return ", ".join(said[:2]) or "-"


def _short(file: str) -> str:
    return "actorrpc/" + file.removeprefix(_PACKAGE) if file.startswith(_PACKAGE) else file
