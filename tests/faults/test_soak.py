"""Soak test: calls of all kinds for minutes, while actors and their processes are killed at random.

Every call must end in time, with its value or with an error that names the dead actor or worker. At the end there must be no
more threads, processes, descriptors, files or references than before. It runs 30 minutes at night (ACTORRPC_SOAK_MINUTES), and
some seconds otherwise.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc.agent.peers import KEPT
from actorrpc.errors import ActorError, DeadlockError, PeerDiedError, RemoteError
from actorrpc.testing import processes
from tests.actors.e2e.kit import until
from tests.faults.figures import NIGHTLY, Taken, note

_SECONDS = 60 * float(os.environ.get("ACTORRPC_SOAK_MINUTES", "30")) if NIGHTLY else 6.0
_BOUND = 60.0  # time-out of each call, which includes restarts on a busy machine
_ACTORS = 6
# Errors of calls whose actor or worker is killed. Two chains of calls that cross each other are a real deadlock, which is
# detected.
_DEATHS = (ActorError, DeadlockError, PeerDiedError)


@actorrpc.remote(max_restarts=-1, restart_backoff_s=0.02)
class Worker:
    """An actor that is restarted at once after each kill."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.weight = torch.full((1000,), float(number))

    def who(self) -> tuple[int, int]:
        return self.number, os.getpid()

    def scale(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * self.number

    def keep(self) -> Any:
        return actorrpc.put(self.weight)

    def ask(self, other: Any, depth: int) -> int:
        if not depth:
            return self.number
        return self.number + int(actorrpc.get(other.ask.remote(other, depth - 1), timeout=_BOUND))

    def stream(self, count: int) -> Any:
        yield from range(count)

    def fail(self) -> None:
        raise ValueError("as asked")


@actorrpc.remote
def _task(number: int) -> int:
    return number + 1


class _Soak:
    """A thread that makes random calls until a given time."""

    def __init__(self, seed: int, actors: list[Any], until: float) -> None:
        self.random = random.Random(seed)
        self.actors = actors
        self.until = until
        self.ends: Counter[str] = Counter()
        self.slowest: dict[str, float] = {}
        self.wrong: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, name=f"soak-{seed}")
        self.thread.start()

    def _run(self) -> None:
        kinds = [
            self._plain,
            self._tensors,
            self._chain,
            self._stream,
            self._kept,
            self._failing,
            self._tasks,
        ]
        while time.monotonic() < self.until and not self.wrong:
            kind = self.random.choice(kinds)
            begun = time.monotonic()
            try:
                kind()
                self.ends["value"] += 1
            except _DEATHS as error:
                self.ends[type(error).__name__] += 1
            except BaseException as error:  # includes time-outs: a call that did not end
                self.wrong.append(error)
                error.add_note(f"in {kind.__name__}")
            took = round(time.monotonic() - begun, 2)
            self.slowest[kind.__name__] = max(self.slowest.get(kind.__name__, 0.0), took)

    def _pick(self) -> tuple[int, Any]:
        number = self.random.randrange(len(self.actors))
        return number, self.actors[number]

    def _plain(self) -> None:
        picked = [self._pick() for _ in range(20)]
        refs = [actor.who.remote() for _, actor in picked]
        ends: list[Any] = []
        for ref in refs:  # all of them, even after a failure
            try:
                ends.append(actorrpc.get(ref, timeout=_BOUND)[0])
            except _DEATHS as error:
                self.ends[type(error).__name__] += 1
                ends.append(None)
        assert all(end in (None, number) for end, (number, _) in zip(ends, picked, strict=True))

    def _tensors(self) -> None:
        number, actor = self._pick()
        size = self.random.choice([10, 20_000, 300_000])
        got = actorrpc.get(actor.scale.remote(torch.ones(size)), timeout=_BOUND)
        assert torch.equal(got, torch.full((size,), float(number)))

    def _chain(self) -> None:
        (number, actor), (other, peer) = self._pick(), self._pick()
        assert actorrpc.get(actor.ask.remote(peer, 2), timeout=_BOUND) == number + 2 * other

    def _stream(self) -> None:
        _, actor = self._pick()
        assert list(actor.stream.remote(10).values()) == list(range(10))

    def _kept(self) -> None:
        number, actor = self._pick()
        inner = actorrpc.get(actor.keep.remote(), timeout=_BOUND)
        assert actorrpc.get(inner, timeout=_BOUND)[0].item() == number

    def _failing(self) -> None:
        _, actor = self._pick()
        with contextlib.suppress(ValueError, RemoteError):
            actorrpc.get(actor.fail.remote(), timeout=_BOUND)
            raise AssertionError("it should have failed")

    def _tasks(self) -> None:
        refs = [_task.remote(n) for n in range(10)]
        assert actorrpc.get(refs, timeout=_BOUND) == list(range(1, 11))


def _kill_one(seed: random.Random, actors: list[Any]) -> str:
    """Kill a random actor or process; return which kind was killed."""
    if seed.random() < 0.3:
        actorrpc.kill(seed.choice(actors), no_restart=False)
        return "actor"
    mine = {row.pid for row in actorrpc.list_actors() if row.pid}
    victims = sorted(each.pid for each in processes.descendants() if each.pid in mine)
    if not victims:
        return "none"
    with contextlib.suppress(ProcessLookupError):
        os.kill(seed.choice(victims), seed.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))
    return "process"


@pytest.mark.limit(_SECONDS + 150)
def test_calls_end_and_nothing_leaks_while_actors_and_processes_are_killed() -> None:
    seed = random.Random(6)
    rows: list[dict[str, Any]] = []
    killed: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    with actorrpc.init(log_to_driver=False):
        actors = [Worker.remote(n) for n in range(_ACTORS)]
        assert [number for number, _ in actorrpc.get([each.who.remote() for each in actors])] == list(
            range(_ACTORS)
        )
        begun = time.monotonic()
        end = begun + _SECONDS
        minute = max(_SECONDS / 30, 3.0)
        pause = threading.Event()
        while (now := time.monotonic()) < end:
            # Between two periods no call is in flight, so remaining resources are leaks.
            callers = [_Soak(seed.randrange(1 << 30), actors, min(end, now + minute)) for _ in range(4)]
            while any(each.thread.is_alive() for each in callers):
                killed[_kill_one(seed, actors)] += 1
                pause.wait(seed.uniform(0.2, 1.0))
            for each in callers:
                each.thread.join()
                ends.update(each.ends)
                slowest = {kind: max(slowest.get(kind, 0.0), took) for kind, took in each.slowest.items()} | {
                    kind: took for kind, took in slowest.items() if kind not in each.slowest
                }
                if each.wrong:
                    raise each.wrong[0]
            del callers, each
            # All actors answer again.
            for number, actor in enumerate(actors):
                _answers(actor, number)
            rows.append(_row(begun))
            note("soak, so far", rows[-1])
        for actor in actors:
            actorrpc.kill(actor)
        until(lambda: all(row.state == "DEAD" for row in actorrpc.list_actors()))
        del actors, actor
        gc.collect()
    note(
        "soak",
        {
            "seconds": round(time.monotonic() - begun, 1),
            "kills": dict(killed),
            "ends": dict(ends),
            "slowest_s": slowest,
            "first_period": rows[0]["taken"],
            "last_period": rows[-1]["taken"],
            "processes": [rows[0]["processes"], rows[-1]["processes"]],
            "shm_files": [rows[0]["shm_files"], rows[-1]["shm_files"]],
        },
    )
    assert ends["value"]
    assert killed["actor"] + killed["process"]
    # In the first row, the pools have grown already.
    assert rows[-1]["taken"].threads <= rows[0]["taken"].threads + 10
    assert rows[-1]["taken"].descriptors <= rows[0]["taken"].descriptors + 20
    assert rows[-1]["processes"] <= rows[0]["processes"] + 3
    assert rows[-1]["shm_files"] <= rows[0]["shm_files"] + 3
    # The last KEPT dead peers keep their records, older dead peers a short report.
    kills = sum(killed.values())
    assert rows[-1]["taken"].objects - rows[0]["taken"].objects < 5000 + 100 * min(kills, KEPT) + 20 * kills
    assert rows[-1]["taken"].rss_mb - rows[0]["taken"].rss_mb < 30 + _SECONDS / 60


def _answers(actor: Any, number: int) -> None:
    """Call the actor until it answers: it may still be about to die of the last kill."""
    until = time.monotonic() + _BOUND
    while True:
        try:
            assert actorrpc.get(actor.who.remote(), timeout=_BOUND)[0] == number
            return
        except _DEATHS:
            assert time.monotonic() < until


def _row(begun: float) -> dict[str, Any]:
    return {
        "at_s": round(time.monotonic() - begun, 1),
        "taken": Taken.now(),
        "processes": len(processes.descendants()),
        "shm_files": len(os.listdir("/dev/shm")),
    }
