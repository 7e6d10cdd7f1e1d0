"""One cluster, or one group, for all tests of a module."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.actors.e2e import kit


@pytest.fixture(scope="module", params=["embedded", "group"])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the module's tests run: ``"embedded"`` or ``"group"``."""
    with kit.running(request.param):
        yield request.param


@pytest.fixture(scope="module")
def embedded() -> Iterator[None]:
    """An embedded cluster for all tests of a module."""
    with kit.running("embedded"):
        yield


@pytest.fixture
def gates(tmp_path: Path) -> Callable[[], Path]:
    """Makes gates of the file system. At each of them, one at a time may wait."""
    numbers = itertools.count()

    def make() -> Path:
        path = tmp_path / f"gate{next(numbers)}"
        os.mkfifo(path)
        return path

    return make


@pytest.fixture
def gate(gates: Callable[[], Path]) -> Path:
    """A gate of the file system."""
    return gates()


@pytest.fixture(autouse=True)
def _test_leaves_nothing(request: pytest.FixtureRequest, _module_leaves_nothing: None) -> Iterator[None]:
    """In place of the fixture of that name: threads and connections of the cluster may grow, actors must be gone.

    The module is checked for everything, as all modules are.
    """
    if not {"place", "embedded"} & set(request.fixturenames):
        yield from _nothing(request)
        return
    request.getfixturevalue("place" if "place" in request.fixturenames else "embedded")
    before = processes.descendants()
    keep(request, before)
    yield
    raised = request.node.stash.get(_RAISED, False)
    deadline = time.monotonic() + (0.0 if raised else 10.0)
    while (left := _left(before)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    if left and not raised:
        pytest.fail("left behind:\n" + "\n".join(left), pytrace=False)


def _left(before: set[processes.ProcessId]) -> list[str]:
    if not actorrpc.is_initialized():
        return []
    actors = [str(row) for row in actorrpc.list_actors() if row.state != "DEAD"]
    # A process that was there before may have been replaced by another one of its kind: a runner of tasks.
    more = processes.descendants() - before
    return actors or [processes.describe(each) for each in more] if len(more) > len(before - processes.descendants()) else actors
