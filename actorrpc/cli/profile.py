"""Sampling profiles: the stacks of workers' threads, read repeatedly over one connection per worker, as a flame graph.

Wall-clock time is sampled: a waiting thread counts like a running one. The output is
https://www.speedscope.app/file-format-schema.json, or folded lines for flamegraph.pl.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from actorrpc.cli.text import count, is_idle, span, users_part
from actorrpc.errors import RpcError
from actorrpc.observe.model import ObservedActor, StackFrame, ThreadStack, made_of
from actorrpc.observe.visitor import Question, Target, Visit

__all__ = ["RATE_HZ", "ProfileSummary", "Sampler", "lines", "sample", "write"]

#: A sample costs a worker with 20 threads, each 20 functions deep, about 1.2 ms, so this rate costs about 1 % of its time.
RATE_HZ: Final = 10.0
_SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"
_KNOWN: Final = 10_000  # greatest number of stacks whose conversion to names is cached, per worker

_Place = tuple[str, str]  # a function, and its file
_Stack = tuple[_Place, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """A summary of a profile.

    Attributes:
        path: the file; empty if no worker has answered, so that no file was written.
        seconds: how long the workers were sampled.
        rate: the requested number of samples per worker and second.
        workers: how many workers have answered.
        threads: how many threads have samples; without ``--all``, threads that only waited in the library have none.
        samples: answers of all workers.
        late: answers that came after the next request was due.
        lost: requests that were skipped or not answered, because the previous answer, or the worker, took too long.
        missing: worker -> why it was not sampled, or not to the end.
    """

    path: str
    seconds: float
    rate: float
    workers: int
    threads: int
    samples: int
    late: int
    lost: int
    missing: dict[str, str] = field(default_factory=dict)


def lines(summary: ProfileSummary, collapsed: bool) -> list[str]:
    """Return what ``profile`` prints."""
    missing = [f"{worker} is missing: {why}" for worker, why in summary.missing.items()]
    if not summary.path:
        stacks = [f"actorrpc stack {worker} shows where it is" for worker in summary.missing]
        return [
            "there is nothing to sample, and no file was written: none of the selected workers answers",
            *missing,
            *stacks,
        ]
    whose = f"{count(summary.threads, 'thread')} of {count(summary.workers, 'worker')}"
    what = f"{count(summary.samples, 'sample')} in {span(summary.seconds)}"
    found = [f"{summary.path}: {whose}, {what}; {summary.late} late, {summary.lost} lost"]
    found[0] += "; for flamegraph.pl" if collapsed else "; https://www.speedscope.app opens it"
    return found + missing


# -- sampling ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Thread:
    name: str
    stacks: list[tuple[_Stack, int]] = field(default_factory=list)  # stack, number of successive samples


class Sampler:
    """Samples one worker in a thread of its own. After :meth:`run`, another thread may read the results.

    Args:
        actors: only threads that run calls of these actors, or have a title in their names: id -> title; None: all threads.
        with_idle: include threads that wait in the library, and the library's frames that call the user's code.

    Attributes:
        threads: the stacks of each thread, by its ident.
        samples: the number of answers; ``late``: answers that came after the next request was due.
        lost: requests that were skipped or not answered.
        why: why the worker was not sampled to the end; empty if it was.
    """

    def __init__(self, name: str, target: Target, actors: dict[str, str] | None, with_idle: bool) -> None:
        self.name = name
        self.threads: dict[int, _Thread] = {}
        self.samples = self.late = self.lost = 0
        self.why = ""
        self._target = target
        self._actors = actors
        self._with_idle = with_idle
        self._known: dict[tuple[StackFrame, ...], _Stack] = {}
        self._parts = ["threads"] if actors is None else ["threads", "actors"]

    def run(self, begun: float, rate: float, number: int, timeout: float, stop: threading.Event) -> None:
        """Send ``number`` requests at a fixed rate from ``begun`` on, until the worker ends or ``stop`` is set.

        Requests that become due before the previous request is answered are skipped.
        """
        try:
            visit = Visit(self._target, time.monotonic() + timeout)
        except (OSError, RpcError, ValueError) as error:
            self.why = str(error) or type(error).__name__
            return
        place = 0
        try:
            while place < number:
                if stop.wait(max(0.0, begun + place / rate - time.monotonic())):
                    return
                until = time.monotonic() + timeout
                try:
                    found = visit.query(Question(self._target, self._parts, until))
                except TimeoutError:
                    # The worker may answer this request later; the answer is ignored. Wait, so that such requests are few.
                    stop.wait(max(0.0, until - time.monotonic()))
                    self.lost += 1
                else:
                    self.add(found)
                    self.late += time.monotonic() > begun + (place + 1) / rate
                following = min(number, max(place + 1, math.ceil((time.monotonic() - begun) * rate)))
                self.lost += following - place - 1
                place = following
        except (OSError, RpcError, ValueError) as error:
            self.why = f"it was sampled {count(self.samples, 'time')}, then: {error}"
        finally:
            visit.close()
            if not self.samples and not self.why:
                self.why = "it has not answered in time"

    def add(self, found: dict[str, Any]) -> None:
        """Add the stacks of an answer to the threads' samples."""
        self.samples += 1
        wanted = self._wanted(found)
        rows = found.get("threads")
        for row in rows if isinstance(rows, list) else []:
            thread = made_of(ThreadStack, row)
            if wanted is not None and thread.ident not in wanted:
                if not any(title in thread.name for title in (self._actors or {}).values()):
                    continue
            stack = self._known.get(thread.frames)
            if stack is None:
                if len(self._known) >= _KNOWN:
                    self._known.clear()
                stack = self._known[thread.frames] = self._stack(thread.frames)
            if not stack:
                continue
            known = self.threads.setdefault(thread.ident, _Thread(thread.name))
            known.name = thread.name or known.name
            if known.stacks and known.stacks[-1][0] == stack:
                known.stacks[-1] = stack, known.stacks[-1][1] + 1
            else:
                known.stacks.append((stack, 1))

    def _wanted(self, found: dict[str, Any]) -> set[int] | None:
        """Return the threads that run calls of the selected actors; None for all threads."""
        if self._actors is None:
            return None
        idents: set[int] = set()
        rows = found.get("actors")
        for row in rows if isinstance(rows, list) else []:
            actor = made_of(ObservedActor, row)
            if actor.actor_id in self._actors:
                idents |= {call.thread for call in actor.running if call.thread}
        return idents

    def _stack(self, frames: tuple[StackFrame, ...]) -> _Stack:
        if not self._with_idle:
            if is_idle(frames):
                return ()
            frames = users_part(frames)
        return tuple((each.function, each.file) for each in frames)


def sample(
    samplers: Sequence[Sampler], seconds: float, rate: float, timeout: float, stop: threading.Event
) -> float:
    """Sample all workers concurrently; return how many seconds that took. Ctrl-C ends the sampling and keeps the samples."""
    begun = time.monotonic()
    number = max(1, math.ceil(seconds * rate))
    threads = []
    for place, sampler in enumerate(samplers):
        # Send the requests to the workers at different times, because this process receives all answers.
        first = begun + place / (rate * len(samplers))
        threads.append(
            threading.Thread(target=sampler.run, args=(first, rate, number, timeout, stop), daemon=True)
        )
        threads[-1].start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        stop.set()
        for thread in threads:
            thread.join(timeout)
    return time.monotonic() - begun


# -- writing -----------------------------------------------------------------------------------------------------


def write(
    path: str,
    samplers: Sequence[Sampler],
    missing: Mapping[str, str],
    seconds: float,
    rate: float,
    collapsed: bool,
) -> ProfileSummary:
    """Write the samples of a run of ``seconds`` into a file, if there are any; return a summary.

    Args:
        missing: worker -> why it was not sampled at all.

    Raises:
        OSError: the file cannot be written.
    """
    threads = [
        (f"{sampler.name}: {thread.name or f'thread {ident}'}", thread)
        for sampler in samplers
        for ident, thread in sorted(sampler.threads.items())
    ]
    samples = sum(each.samples for each in samplers)
    if samples:
        text = _folded(threads) if collapsed else json.dumps(_speedscope(threads, rate))
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return ProfileSummary(
        path=os.path.abspath(path) if samples else "",
        seconds=seconds,
        rate=rate,
        workers=sum(each.samples > 0 for each in samplers),
        threads=len(threads),
        samples=samples,
        late=sum(each.late for each in samplers),
        lost=sum(each.lost for each in samplers),
        missing={**missing, **{each.name: each.why for each in samplers if each.why}},
    )


def _speedscope(threads: Sequence[tuple[str, _Thread]], rate: float) -> dict[str, Any]:
    places: dict[_Place, int] = {}
    profiles = []
    for name, thread in threads:
        weights = [seen / rate for _, seen in thread.stacks]
        profiles.append(
            {
                "type": "sampled",
                "name": name,
                "unit": "seconds",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": [
                    [places.setdefault(place, len(places)) for place in stack] for stack, _ in thread.stacks
                ],
                "weights": weights,
            }
        )
    return {
        "$schema": _SCHEMA,
        "exporter": "actorrpc",
        "name": "actorrpc profile",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": function, "file": file} for function, file in places]},
        "profiles": profiles,
    }


def _folded(threads: Sequence[tuple[str, _Thread]]) -> str:
    found: Counter[str] = Counter()
    for name, thread in threads:
        worker, _, rest = name.partition(": ")
        for stack, seen in thread.stacks:
            calls = (f"{function} ({os.path.basename(file)})" for function, file in stack)
            found[";".join(map(_plain, (worker, rest, *calls)))] += seen
    return "".join(f"{line} {seen}\n" for line, seen in sorted(found.items()))


def _plain(text: str) -> str:
    """Return a name without the characters that separate names in folded lines."""
    return " ".join(text.replace(";", ",").split())
