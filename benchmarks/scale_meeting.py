"""How a group of n workers uses a store: the real code and a model of it, in virtual time, from one seed.

The real code (:mod:`actorrpc.group.fixed` and :mod:`actorrpc.group.dynamic`) runs on a thread for each worker, over torch's
``HashStore``; the model is a generator for each worker, and only stores which keys exist. Both follow the same schedule: one
worker runs at a time, each operation of the store takes ``LATENCY_S``, and the workers arrive at times that are drawn from the
seed. So their operations can be compared one by one, and the model can be run with thousands of workers, for which the threads
would take too long.

Not simulated: the connections over which a fixed group meets when its workers have read the address of rank 0, and that the store
serves one operation at a time. ``scale_parts.store_rates`` measures its throughput.
"""

from __future__ import annotations

import heapq
import os
import random
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final
from unittest import mock

from torch.distributed import HashStore

from actorrpc.config import Settings
from actorrpc.group import rank0
from actorrpc.group.dynamic import DynamicRendezvous
from actorrpc.group.fixed import FixedRendezvous
from actorrpc.wire.identity import WorkerRecord
from actorrpc.wire.keys import Key

__all__ = ["LATENCY_S", "SPREAD_S", "Meeting", "made_up", "model", "real"]

LATENCY_S: Final = 2e-4
SPREAD_S: Final = 1.0
"""Within how many seconds all workers come to the store, evenly."""

_WINDOW_S: Final = 0.1


@dataclass(slots=True)
class Meeting:
    """The operations of the store that the workers have made.

    Attributes:
        operations: how many of each kind, by worker.
        read: bytes that the store has sent to each worker.
        over_s: when each worker had met the others, in seconds since the start.
        load: operations in each tenth of a second.
    """

    workers: int
    operations: list[Counter[str]] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    over_s: list[float] = field(default_factory=list)
    load: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.operations = [Counter() for _ in range(self.workers)]
        self.read = [0] * self.workers
        self.over_s = [0.0] * self.workers

    def note(self, worker: int, now: float, operation: str, read: int) -> None:
        """Count one operation."""
        self.operations[worker][operation] += 1
        self.read[worker] += read
        self.load[int(now / _WINDOW_S)] += 1

    def figures(self) -> dict[str, float]:
        """Return the reported figures."""
        each = [sum(counts.values()) for counts in self.operations]
        polls = [counts["check"] for counts in self.operations]
        return {
            "workers": self.workers,
            "operations_mean": sum(each) / self.workers,
            "operations_most": max(each),
            "of_them_checks_mean": sum(polls) / self.workers,
            "store_operations": sum(each),
            "store_operations_per_s_peak": max(self.load.values()) / _WINDOW_S,
            "read_bytes_mean": sum(self.read) / self.workers,
            "store_bytes": sum(self.read),
            "met_after_s": max(self.over_s),
        }


def made_up(rank: int) -> WorkerRecord:
    """Return a record of a worker on a separate host."""
    return WorkerRecord(
        name=f"worker{rank}",
        rank=rank,
        incarnation=f"{rank:032x}",
        host=f"{rank:032x}",
        tcp=(("10.123.123.123", 43210),),
        pid=os.getpid(),  # a living process: records of dead processes would be ignored
        main="0" * 32,
    )


def _comes_at(seed: int, workers: int) -> list[float]:
    draw = random.Random(seed)
    return [draw.uniform(0.0, SPREAD_S) for _ in range(workers)]


# -- the real code -----------------------------------------------------------------------------------


class _Stage:
    """Virtual time for threads: one thread runs at a time, in the order of their wake-up times."""

    def __init__(self, workers: int) -> None:
        self._due: list[tuple[float, int]] = []
        self._turns = [threading.Semaphore(0) for _ in range(workers)]
        self._back = threading.Semaphore(0)
        self.now = 0.0

    def wait(self, worker: int, seconds: float) -> None:
        """Sleep for ``seconds`` of virtual time; called on the worker's thread."""
        heapq.heappush(self._due, (self.now + seconds, worker))
        self._back.release()
        self._turns[worker].acquire()

    def run(self, bodies: list[Callable[[], None]], moments: list[float]) -> None:
        """Run a body for each worker from its start time on; return when all have ended."""
        failures: list[BaseException] = []

        def life(worker: int) -> None:
            self._turns[worker].acquire()
            try:
                bodies[worker]()
            except BaseException as error:
                failures.append(error)
            self._back.release()

        threads = [
            threading.Thread(target=life, args=(worker,), daemon=True) for worker in range(len(bodies))
        ]
        for thread in threads:
            thread.start()
        for worker, moment in enumerate(moments):
            heapq.heappush(self._due, (moment, worker))
        while self._due and not failures:
            self.now, worker = heapq.heappop(self._due)
            self._turns[worker].release()
            self._back.acquire()
        if failures:
            raise failures[0]
        for thread in threads:
            thread.join()


class _Counted:
    """torch's store for one worker, in which each operation takes virtual time and is counted."""

    def __init__(self, store: HashStore, stage: _Stage, meeting: Meeting, worker: int) -> None:
        self._store, self._stage, self._meeting, self._worker = store, stage, meeting, worker

    def _do(self, operation: str, *arguments: Any) -> Any:
        self._stage.wait(self._worker, LATENCY_S)
        answer = getattr(self._store, operation)(*arguments)
        if operation == "get":
            read = len(answer)
        else:
            read = sum(map(len, answer)) if operation == "multi_get" else 0
        self._meeting.note(self._worker, self._stage.now, operation, read)
        return answer

    def set(self, key: str, value: Any) -> None:
        self._do("set", key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._do("get", key))

    def add(self, key: str, amount: int) -> int:
        return int(self._do("add", key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._do("check", keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [bytes(each) for each in self._do("multi_get", keys)]

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._do("compare_set", key, expected, desired))


def real(workers: int, seed: int, *, dynamic: bool = False) -> Meeting:
    """Let workers use the store with the real code."""
    meeting, stage, store = Meeting(workers), _Stage(workers), HashStore()
    key = Key(secrets.token_bytes(32))
    acting = threading.local()

    def attempts(_deadline: float, slowest: float = 0.05) -> Iterator[None]:
        pause = 0.001
        while True:
            yield
            stage.wait(acting.worker, pause)
            pause = min(pause * 1.5, slowest)

    def body(worker: int) -> Callable[[], None]:
        def run() -> None:
            acting.worker = worker
            counted = _Counted(store, stage, meeting, worker)
            record = made_up(worker)
            if dynamic:
                DynamicRendezvous(counted, timeout=1e6).enter(record, key, Settings())
            else:
                FixedRendezvous(counted, size=workers, timeout=1e6).enter(record, key, Settings())
            meeting.over_s[worker] = stage.now

        return run

    def visit(*_: Any) -> list[WorkerRecord]:
        return [made_up(worker) for worker in range(workers)]

    with (
        mock.patch.object(rank0, "attempts", attempts),
        mock.patch.object(FixedRendezvous, "_visit", visit),
    ):
        stage.run([body(worker) for worker in range(workers)], _comes_at(seed, workers))
    return meeting


# -- the model -------------------------------------------------------------------------------------

# Steps of a worker: an operation of the store with its key and the number of returned bytes, or a sleep in seconds.
_Steps = Generator[tuple[str, str, int] | float, Any, None]


def _poll(slowest: float, *keys: str) -> _Steps:
    pause = 0.001
    while True:
        for key in keys:
            if (yield "check", key, 0):
                return
        yield pause
        pause = min(pause * 1.5, slowest)


def _fixed(worker: int, workers: int) -> _Steps:
    """Yield the steps of a worker of a fixed group."""
    if worker == 0:
        yield "set", "leader", 0
    else:
        yield from _poll(min(0.5, max(0.02, workers / 2000)), "leader")
        yield "get", "leader", _leader_bytes()


def _dynamic(worker: int) -> _Steps:
    """Yield the steps of a worker that joins a dynamic group with a given key."""
    if (yield "check", "key", 0):
        yield "get", "key", _KEY_BYTES
    else:
        yield "compare_set", "key", 0
    for key in (f"rank/{worker}", f"name/{worker}"):
        yield "compare_set", key, 0
    number = yield "add", "log", 0
    yield "set", f"log/{number}", 0


_KEY_BYTES: Final = 41  # "given" and an HMAC, in msgpack


@cache
def _leader_bytes() -> int:
    """Return the size of the value that rank 0 writes."""
    store = HashStore()
    FixedRendezvous(store, size=1, timeout=1e6).enter(made_up(0), Key(bytes(range(32))), Settings())
    return len(store.get("fixed/1/0/leader"))


def model(workers: int, seed: int, *, dynamic: bool = False) -> Meeting:
    """Return the counts that :func:`real` would return, from the model."""
    meeting = Meeting(workers)
    counters: Counter[str] = Counter()
    there: set[str] = set()
    lives = [_dynamic(worker) if dynamic else _fixed(worker, workers) for worker in range(workers)]
    due: list[tuple[float, int, Any]] = [
        (moment, worker, None) for worker, moment in enumerate(_comes_at(seed, workers))
    ]
    heapq.heapify(due)
    while due:
        now, worker, step = heapq.heappop(due)
        answer: Any = None
        if isinstance(step, tuple):
            operation, key, read = step
            if operation == "add":
                counters[key] += 1
                answer = counters[key]
            elif operation == "check":
                answer = key in there
            elif operation in ("set", "compare_set"):
                there.add(key)
            meeting.note(worker, now, operation, read)
        try:
            following = lives[worker].send(answer)
        except StopIteration:
            meeting.over_s[worker] = now
            continue
        wait = LATENCY_S if isinstance(following, tuple) else following
        heapq.heappush(due, (now + wait, worker, following))
    return meeting
