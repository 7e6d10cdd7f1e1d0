"""Profiles of ``torch.profiler`` that a worker keeps, and that ``actorrpc trace`` merges with the calls of all workers.

torch writes a profile in the Trace Event Format, its moments on the clock of the day. What is kept is that text, compressed, with
how far that clock is from the flight recorder's.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from actorrpc import _time
from actorrpc.agent.context import current_worker
from actorrpc.errors import NotInitializedError

__all__ = ["KeptProfiles", "TorchProfile", "joined", "keep_profile"]

_KEPT_BYTES: Final = 64 << 20  # compressed; of the oldest none is kept any more
_KEPT: Final = 100
_PIECE: Final = 1 << 20
_MOST: Final = 1 << 30  # of the text of one
_FIRST: Final = 20_000_000  # above the numbers of all processes and of the recorder's threads
#: kinds of events in which another event of the same file is meant by its number
_NUMBERED: Final = frozenset("stfbenOND")


class KeptProfiles:
    """The latest profiles of one worker, compressed, in pieces that fit into an answer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows; nothing is called under it
        self._kept: deque[tuple[int, bytes]] = deque()
        self._numbers = itertools.count(1)
        self._bytes = 0

    def add(self, text: bytes) -> None:
        """Keep one; the oldest go where there is no room."""
        packed = zlib.compress(text, 3)
        with self._lock:
            self._kept.append((next(self._numbers), packed))
            self._bytes += len(packed)
            while len(self._kept) > 1 and (self._bytes > _KEPT_BYTES or len(self._kept) > _KEPT):
                self._bytes -= len(self._kept.popleft()[1])

    def piece(self, first: int) -> tuple[list[Any], int | None]:
        """Return a row ``[profile, bytes]`` with one piece of what is kept, and the next one's number, if there is one."""
        with self._lock:
            kept = list(self._kept)
        # Numbers that stay what they are while new profiles come: of the profile, and of its piece.
        profile, at = divmod(first, 1 << 20)
        for number, packed in kept:
            if number < profile:
                continue
            begun = at * _PIECE if number == profile else 0
            if begun >= len(packed):
                continue
            end = begun + _PIECE
            following = (number << 20) + end // _PIECE if end < len(packed) else (number + 1) << 20
            is_last = end >= len(packed) and number == kept[-1][0]
            return [[number, packed[begun:end]]], None if is_last else following
        return [], None


def keep_profile(profile: Any) -> None:
    """Keep a profile, so that ``actorrpc trace`` and :func:`actorrpc.trace` merge it with the calls of all workers.

    For ``on_trace_ready``, in any worker of a group::

        with torch.profiler.profile(on_trace_ready=actorrpc.observe.keep_profile):
            train()

    Each worker keeps its latest ones, up to 64 MiB compressed.

    Args:
        profile: a ``torch.profiler.profile`` that has stopped, or is at the end of a cycle of its schedule.

    Raises:
        NotInitializedError: this process is in no group.
        OSError: there is no room for a temporary file.
    """
    worker = current_worker()
    if worker is None or worker.observer is None:
        raise NotInitializedError(
            "a profile is kept for the traces of a group, and this process is in none: call actorrpc.init() or init_rpc() first"
        )
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profile.export_chrome_trace(path)
        with open(path, "rb") as file:
            text = file.read()
    finally:
        os.unlink(path)
    # What is to be taken off the moments of the day, on this line; the text follows.
    worker.observer.profiles.add(b"%r\n%s" % (time.time() - _time.now(), text))


def joined(rows: Iterable[object]) -> list[bytes]:
    """Return the profiles whose pieces a worker has sent, which may be anything."""
    pieces: dict[int, list[bytes]] = {}
    for row in rows:
        if isinstance(row, list) and len(row) == 2 and type(row[0]) is int and isinstance(row[1], bytes):
            pieces.setdefault(row[0], []).append(row[1])
    return [b"".join(each) for _, each in sorted(pieces.items())]


@dataclass(frozen=True, slots=True)
class TorchProfile:
    """One profile.

    Attributes:
        events: as torch writes them.
        zero: the moment on the worker's clock from which theirs count, in seconds.
    """

    events: list[dict[str, Any]]
    zero: float

    @classmethod
    def read(cls, packed: bytes) -> TorchProfile | None:
        """Return a profile as a worker has sent it; None where it is none."""
        try:
            unpacking = zlib.decompressobj()
            text = unpacking.decompress(packed, _MOST)
            if unpacking.unconsumed_tail:
                return None
            shift, _, document = text.partition(b"\n")
            found = json.loads(document)
            zero = found.get("baseTimeNanoseconds", 0) / 1e9 - float(shift)
            events = [each for each in found["traceEvents"] if _is_event(each)]
        except (ValueError, TypeError, KeyError, AttributeError, zlib.error, RecursionError):
            return None
        return cls(events, zero) if math.isfinite(zero) else None

    def since(self, begun: float) -> TorchProfile:
        """Return it without what was over before a moment of the worker's clock."""
        limit = 1e6 * (begun - self.zero)
        return TorchProfile(
            [each for each in self.events if each["ph"] == "M" or each["ts"] + each.get("dur", 0) >= limit],
            self.zero,
        )

    def is_empty(self) -> bool:
        """Return whether it has names only."""
        return all(each["ph"] == "M" for each in self.events)

    def moments(self) -> Iterator[float]:
        """Yield the first and the last moment, on the worker's clock."""
        timed = [each for each in self.events if each["ph"] != "M"]
        if timed:
            yield self.zero + 1e-6 * min(each["ts"] for each in timed)
            yield self.zero + 1e-6 * max(each["ts"] + each.get("dur", 0) for each in timed)

    def shown(
        self, worker: str, own: int, pid: int, numbers: dict[str, int], zero: float, key: str
    ) -> Iterator[dict[str, Any]]:
        """Yield its events as they stand in the file of all workers.

        Args:
            worker, own: whose it is: the worker's name and process.
            pid: the number of the process there. Its GPUs, which torch shows as processes, get numbers of their own.
            numbers: of those, and of all threads, by what torch calls them: its threads may have words for numbers, or those
                of other threads in this file. New ones are entered.
            zero: the moment on the worker's clock from which the file's moments count.
            key: what to put before the numbers of events, which mean others in other profiles.
        """
        shift = 1e6 * (self.zero - zero)
        for event in self.events:
            whose = event.get("pid")
            is_own = whose == own
            number = pid if is_own else numbers.setdefault(f"process {worker} {whose}", _FIRST + len(numbers))
            place = {"pid": number}
            if "tid" in event:
                name = f"thread {worker} {whose} {event['tid']}"
                place["tid"] = numbers.setdefault(name, _FIRST + len(numbers))
            if event["ph"] == "M":
                made = self._named(event, worker, is_own)
                if made is None:
                    continue
                yield {**made, **place, "ts": 0}
                continue
            made = {**event, **place, "ts": round(event["ts"] + shift, 3)}
            if event["ph"] in _NUMBERED and "id" in event:
                made["id"] = f"{key}-{event['id']}"
            yield made

    @staticmethod
    def _named(event: dict[str, Any], worker: str, is_own: bool) -> dict[str, Any] | None:
        """Return what names a process or a thread of torch's; None where the worker itself is meant, which has its name."""
        given = event.get("args")
        args = given if isinstance(given, dict) else {}
        if event["name"] == "thread_name":
            return {**event, "args": {"name": f"torch: {args.get('name', 'a thread')}"}}
        if is_own:
            return None
        if event["name"] == "process_name":
            return {**event, "args": {"name": f"{worker}, torch: {args.get('name', '')}"}}
        return event


def _is_event(event: object) -> bool:
    if not isinstance(event, dict) or not (
        isinstance(event.get("ph"), str) and isinstance(event.get("name"), str)
    ):
        return False
    if event["ph"] == "M":
        return True
    ts, dur = event.get("ts"), event.get("dur", 0)
    return isinstance(ts, (int, float)) and isinstance(dur, (int, float)) and math.isfinite(ts + dur)
