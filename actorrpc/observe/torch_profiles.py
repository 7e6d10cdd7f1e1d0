"""Profiles of ``torch.profiler`` that a worker keeps, and that ``actorrpc trace`` merges with the calls of all workers.

torch writes a profile in the Trace Event Format, with times of the wall clock. A worker keeps this text, compressed, together
with the offset between the wall clock and the flight recorder's clock.
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

_KEPT_BYTES: Final = 64 << 20  # most bytes of compressed profiles; beyond, the oldest are discarded
_KEPT: Final = 100  # profiles
_PIECE: Final = 1 << 20  # bytes of a compressed profile in one answer
_MOST: Final = 1 << 30  # bytes of the uncompressed text of one profile
_FIRST: Final = (
    20_000_000  # first number of torch's processes and threads in a trace; workers have lower numbers
)
#: the phases (``ph``) of events whose ``id`` refers to another event of the same profile
_NUMBERED: Final = frozenset("stfbenOND")


class KeptProfiles:
    """The latest profiles of one worker, compressed; they are read in pieces that fit into an answer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the attributes below; no other lock is taken under it
        self._kept: deque[tuple[int, bytes]] = deque()
        self._numbers = itertools.count(1)
        self._bytes = 0

    def add(self, text: bytes) -> None:
        """Keep a profile; discard the oldest if the limits are exceeded."""
        packed = zlib.compress(text, 3)
        with self._lock:
            self._kept.append((next(self._numbers), packed))
            self._bytes += len(packed)
            while len(self._kept) > 1 and (self._bytes > _KEPT_BYTES or len(self._kept) > _KEPT):
                self._bytes -= len(self._kept.popleft()[1])

    def piece(self, first: int) -> tuple[list[Any], int | None]:
        """Return piece number ``first`` of the profiles, and the number of the next piece, or None after the last.

        A piece is a list with one row ``[profile number, bytes]``, at most ``_PIECE`` bytes; without profiles, it is empty.
        """
        with self._lock:
            kept = list(self._kept)
        # The number of a piece is (profile number << 20) + index in the profile, so new profiles do not change it.
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
    """Store a profile in this worker; ``actorrpc trace`` and :func:`actorrpc.trace` merge it with the calls of all workers.

    Pass this function as ``on_trace_ready``, in any worker of a group::

        with torch.profiler.profile(on_trace_ready=actorrpc.observe.keep_profile):
            train()

    Each worker keeps its latest 100 profiles, up to 64 MiB compressed.

    Args:
        profile: a ``torch.profiler.profile`` that has stopped, or is at the end of a cycle of its schedule.

    Raises:
        NotInitializedError: this process is in no group.
        OSError: a temporary file cannot be written.
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
    # The first line is the offset between the wall clock and the recorder's clock; the text of torch follows.
    worker.observer.profiles.add(b"%r\n%s" % (time.time() - _time.now(), text))


def joined(rows: Iterable[object]) -> list[bytes]:
    """Join the pieces that a worker has sent into profiles; rows that are not valid are ignored."""
    pieces: dict[int, list[bytes]] = {}
    for row in rows:
        if isinstance(row, list) and len(row) == 2 and type(row[0]) is int and isinstance(row[1], bytes):
            pieces.setdefault(row[0], []).append(row[1])
    return [b"".join(each) for _, each in sorted(pieces.items())]


@dataclass(frozen=True, slots=True)
class TorchProfile:
    """One profile.

    Attributes:
        events: the trace events that torch has written.
        zero: the time on the worker's clock, in seconds, that is 0 in the timestamps of the events.
    """

    events: list[dict[str, Any]]
    zero: float

    @classmethod
    def read(cls, packed: bytes) -> TorchProfile | None:
        """Unpack a profile that a worker has sent; return None if it is not valid."""
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
        """Return the profile without events that ended before a time on the worker's clock."""
        limit = 1e6 * (begun - self.zero)
        return TorchProfile(
            [each for each in self.events if each["ph"] == "M" or each["ts"] + each.get("dur", 0) >= limit],
            self.zero,
        )

    def is_empty(self) -> bool:
        """Return whether the profile has metadata events only."""
        return all(each["ph"] == "M" for each in self.events)

    def moments(self) -> Iterator[float]:
        """Yield the begin and the end of the profile, on the worker's clock; nothing if it has no timed events."""
        timed = [each for each in self.events if each["ph"] != "M"]
        if timed:
            yield self.zero + 1e-6 * min(each["ts"] for each in timed)
            yield self.zero + 1e-6 * max(each["ts"] + each.get("dur", 0) for each in timed)

    def shown(
        self, worker: str, own: int, pid: int, numbers: dict[str, int], zero: float, key: str
    ) -> Iterator[dict[str, Any]]:
        """Yield the events, converted for the trace file of all workers.

        Args:
            worker, own: the name and the process id of the profiled worker.
            pid: the number of the worker's process in the file. GPUs, which torch shows as processes, get other numbers.
            numbers: maps torch's GPUs and threads to numbers in the file; new entries are added. Torch's own thread ids are not
                used, because they may be words, and may equal ids of other threads in the file.
            zero: the time on the worker's clock that is 0 in the file.
            key: a prefix for the ids of events, which are unique within one profile only.
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
        """Convert a metadata event; return None for the name of the worker's own process, which the file has already."""
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
