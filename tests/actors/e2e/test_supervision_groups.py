"""Supervision groups of actors, on the embedded cluster and in a group, and leaks after a thousand deaths."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest

import actorrpc
from actorrpc.actors.context import runtime
from actorrpc.errors import ActorDiedError, ActorError, ActorUnavailableError, SupervisionError
from actorrpc.testing import leaks, processes
from tests.actors.e2e.kit import pass_gate, row_of, until
from tests.migration.rows import row

NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"
CYCLES = 1000 if NIGHTLY else 20
REPORT = os.environ.get("ACTORRPC_FIGURES")  # a file to which measurements are appended

pytestmark = [
    pytest.mark.usefixtures("place"),
    pytest.mark.limit(1800 if NIGHTLY else 30),
    # A child that is ended may be interrupted anywhere, also between open() and its ``with``.
    pytest.mark.prints(
        r"ResourceWarning: unclosed file <_io\.FileIO name='[^']*/log'",
        r"^ResourceWarning: Enable tracemalloc",
    ),
]


@actorrpc.remote(max_restarts=-1)
class Child:
    """Appends a line to a file when it starts and when it ends."""

    def __init__(self, name: str, path: str) -> None:
        self.name, self.path = name, path
        self.seen = 0
        self.note("+")
        if os.path.exists(f"{path}.gate.{name}"):
            pass_gate(f"{path}.gate.{name}")
        if os.path.exists(f"{path}.refuse.{name}"):
            raise ValueError("refused by the test")

    def note(self, what: str) -> None:
        # One write call for each line: a method may be interrupted anywhere, and the file object closes itself.
        with open(self.path, "ab", buffering=0) as file:
            file.write(f"{what}{self.name}\n".encode())

    def add(self) -> int:
        self.seen += 1
        return self.seen

    def mark(self, number: int) -> int:
        self.note(f"{number} ")
        return number

    def pid(self) -> int:
        return os.getpid()

    def on_stop(self) -> None:
        self.note("-")


@actorrpc.remote(max_restarts=-1)
class Saving(Child):
    """Keeps its count over restarts; a count of 13 cannot be restored."""

    def checkpoint(self) -> int:
        return self.seen

    def restore(self, seen: int) -> None:
        if seen == 13:
            raise KeyError("thirteen")
        self.seen = seen


def _retry(call: Callable[[], Any]) -> Any:
    """Repeat a call until it is not interrupted by a death."""
    while True:
        try:
            return actorrpc.get(call())
        except ActorUnavailableError:
            pass


def _lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1]


def _make_children(path: Path, names: str, cls: Any = Child) -> list[Any]:
    children = [cls.remote(name, str(path)) for name in names]
    actorrpc.get([actorrpc.ready(child) for child in children])
    path.write_text("")
    return children


def _die(child: Any) -> None:
    """Kill the process of a child, or only the child if it shares a worker."""
    row = row_of(child)
    if row.worker.startswith("worker"):
        actorrpc.kill(child, no_restart=False)
    else:
        os.kill(row.pid, signal.SIGKILL)


def _error(ref: Any) -> BaseException:
    with pytest.raises(ActorError) as caught:
        actorrpc.get(ref)
    return caught.value


@pytest.mark.parametrize(
    ("strategy", "others", "born"),
    [
        ("one_for_one", [], ["+b"]),
        pytest.param("one_for_all", ["-c", "-a"], ["+a", "+b", "+c"], marks=pytest.mark.slow),
        pytest.param("rest_for_one", ["-c"], ["+b", "+c"], marks=pytest.mark.slow),
    ],
)
@row("a failure that no __supervise__ handles", "from-monarch")
def test_a_strategy_restarts_its_children_in_order_and_end_stops_them_in_reverse(
    tmp_path: Path, strategy: Any, others: list[str], born: list[str]
) -> None:
    path = tmp_path / "log"
    children = _make_children(path, "abc")
    group = actorrpc.supervise(children, strategy=strategy)
    _die(children[1])
    until(lambda: group.restarts == len(born) and group.state == "up")
    # In a shared process the killed child may still write its line.
    assert [line for line in _lines(path) if line != "-b"] == [*others, *born]
    assert actorrpc.get([child.add.remote() for child in children]) == [1, 1, 1]
    path.write_text("")
    group.end()
    assert group.state == "ended"
    until(lambda: len(_lines(path)) == 3)
    assert _lines(path) == ["-c", "-b", "-a"]
    assert isinstance(_error(children[0].add.remote()), ActorDiedError)


@pytest.mark.prints("supervision group 'brittle': it has given up after 1 restart within 60 s")
@row("__supervise__(self, failure)", "from-monarch")
def test_a_group_gives_up_after_max_restarts_and_reports_it_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    children = _make_children(path, "ab")
    failures: list[SupervisionError] = []
    fired: list[ActorDiedError] = []
    group = actorrpc.supervise(children, max_restarts=1, name="brittle", on_failure=failures.append)
    for child in children:
        actorrpc.monitor(child, fired.append)
    _die(children[0])
    assert _retry(children[0].add.remote) == 1
    until(lambda: group.state == "up")
    _die(children[0])
    error = group.monitor().wait(20)
    assert isinstance(error, SupervisionError)
    assert "supervision group 'brittle': it has given up after 1 restart within 60 s" in str(error)
    assert str(error).count("\n    ") >= 2
    for child in children:
        assert "supervision group 'brittle'" in str(_error(child.add.remote()))
    until(lambda: failures and len(fired) == 2)
    assert failures == [error]
    assert "-b" in _lines(path)


@actorrpc.remote(max_restarts=-1)
class Manager:
    """Creates children and supervises them in its own process."""

    def __init__(self, path: str) -> None:
        self.children = [Child.remote(name, path) for name in "xy"]
        self.group = actorrpc.supervise(self.children, strategy="one_for_all")

    def family(self) -> list[Any]:
        return self.children

    def state(self) -> tuple[str, int]:
        return self.group.state, self.group.restarts


@pytest.mark.slow
def test_a_supervised_actor_can_supervise_children_of_its_own(tmp_path: Path) -> None:
    """A group belongs to its process: its children end with it, and the next manager creates new ones."""
    path = tmp_path / "log"
    manager = Manager.remote(str(path))
    top = actorrpc.supervise([manager])
    x, y = actorrpc.get(manager.family.remote())
    assert actorrpc.get([x.add.remote(), y.add.remote()]) == [1, 1]
    _die(x)
    until(lambda: actorrpc.get(manager.state.remote()) == ("up", 2))
    assert actorrpc.get([_.add.remote() for _ in (x, y)]) == [1, 1]
    _die(manager)
    others = _retry(manager.family.remote)
    assert actorrpc.get([_.add.remote() for _ in others]) == [1, 1]
    assert top.restarts == 1
    if not row_of(manager).worker.startswith("worker"):
        assert isinstance(_error(x.add.remote()), ActorDiedError)


@pytest.mark.slow
@pytest.mark.prints(r"supervision group #\d+: it has given up.* its restore\(\) raised KeyError: 'thirteen'")
def test_a_restore_that_raises_is_a_death_in_a_group_and_otherwise_final(tmp_path: Path) -> None:
    path = tmp_path / "log"
    alone, child = _make_children(path, "xy", Saving)
    group = actorrpc.supervise([child], max_restarts=2, backoff=0.01)
    for actor in (alone, child):
        assert actorrpc.get([actor.add.remote() for _ in range(13)])[-1] == 13
        _die(actor)
        with pytest.raises(ActorDiedError, match=r"its restore\(\) raised KeyError: 'thirteen'") as caught:
            _retry(actor.add.remote)
        if actor is alone:
            assert type(caught.value.cause) is KeyError
    text = str(group.monitor().wait(10))
    assert text.count("its restore() raised") == 3
    assert row_of(alone).restarts == 1


@pytest.mark.slow
def test_calls_run_at_most_once_over_many_restarts(tmp_path: Path) -> None:
    """No number is written twice, and none whose call was reported as not executed."""
    path = tmp_path / "log"
    children = _make_children(path, "ab")
    group = actorrpc.supervise(children, strategy="one_for_all", max_restarts=1000, backoff=0.0)
    outcome: dict[int, bool | None] = {}
    ended = threading.Event()

    def call(first: int) -> None:
        number = first
        while not ended.is_set():
            refs = [(n, children[n % 2].mark.remote(n)) for n in range(number, number + 16)]
            number += 16
            for each, ref in refs:
                try:
                    actorrpc.get(ref)
                    outcome[each] = True
                except ActorUnavailableError as error:
                    outcome[each] = None if error.maybe_executed else False

    threads = [threading.Thread(target=call, args=(first,)) for first in (0, 1_000_000)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(CYCLES // 2):
            before = group.restarts
            _die(children[turn % 2])
            until(lambda before=before: group.restarts >= before + 2 and group.state == "up")
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    group.end()
    ran = Counter(int(line.split(" ")[0]) for line in _lines(path) if line[0].isdigit())
    assert all(count == 1 for count in ran.values())
    for number, done in outcome.items():
        if done is not None:
            assert (number in ran) is done, number
    assert sum(done is True for done in outcome.values()) > CYCLES


# -- many deaths -----------------------------------------------------------------------------------------------------


def _counts() -> dict[str, int]:
    """Return the counts that must not grow: processes, threads, descriptors, files, actors, peers and references."""
    gc.collect()
    here = runtime()
    now = leaks.LeakSnapshot.capture()
    found = {
        "processes": len(now.processes),
        "threads": len(now.threads) - len(here.agent.pool.threads),  # the pool keeps some idle threads
        "descriptors": sum(now.descriptors.values()),
        "files": len(now.files),
        "actors": sum(row.state != "DEAD" for row in actorrpc.list_actors()),
        "peers": sum(record is not None for record in here.agent.members()),
    }
    found.update(here.references.table.debug_info())
    return found


@pytest.mark.slow
def test_repeated_deaths_leave_nothing_behind(place: str, tmp_path: Path) -> None:
    """After each death, measure the time until the first call is answered."""
    path = tmp_path / "log"
    (actor,) = _make_children(path, "k", Saving)
    group = actorrpc.supervise([actor], max_restarts=10_000, period=1e6, backoff=0.0)
    before: dict[str, int] = {}
    took: list[float] = []
    for turn in range(CYCLES + 5):
        if turn == 5:
            before = _counts()
        restarts = group.restarts
        began = time.perf_counter()
        _die(actor)
        until(lambda restarts=restarts: group.restarts > restarts)
        assert _retry(actor.pid.remote) > 0
        took.append(time.perf_counter() - began)
    grown: dict[str, int] = {}

    def settled() -> bool:
        now = _counts()
        grown.clear()
        grown.update({key: now[key] - before[key] for key in now if now[key] > before.get(key, 0)})
        return not grown

    deadline = time.monotonic() + 20
    while not settled() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not grown
    assert row_of(actor).restarts == CYCLES + 5
    cuts = quantiles(took[5:], n=100)
    if REPORT:
        with open(REPORT, "a") as file:
            file.write(
                f"{place}: {CYCLES} deaths, restart and first call p50 {cuts[49]:.3f} s, p99 {cuts[98]:.3f} s\n"
            )
    group.end()
    assert not processes.descendants() - processes.of_session()
