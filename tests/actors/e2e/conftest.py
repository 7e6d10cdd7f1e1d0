"""One cluster or group for the tests of several modules, and a leak check that suits shared clusters."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

import actorrpc
from actorrpc.testing import leaks, processes
from actorrpc.testing.pytest_plugin import WATCHDOG, charge
from tests.actors.e2e import kit
from tests.ranks import show_errors

_RAISED = pytest.StashKey[bool]()


class Shared:
    """The cluster or group in which the tests run. Modules that follow each other share it if they need the same kind."""

    def __init__(self) -> None:
        self._where = ""
        self._stack = contextlib.ExitStack()

    def want(self, where: str) -> None:
        """Start a cluster or group of this kind, unless it runs already."""
        if where != self._where:
            self.close()
            self._stack.enter_context(kit.running(where))
            self._where = where

    def close(self) -> None:
        """Shut it down."""
        self._where = ""
        self._stack.close()


@pytest.fixture(scope="package")
def shared(request: pytest.FixtureRequest) -> Iterator[Shared]:
    """What the modules share; at its end, a complete leak check."""
    before = leaks.LeakSnapshot.capture()
    made = Shared()
    with contextlib.closing(made):
        yield made
    found = leaks.settle(before, request.config.getoption("--leak-wait"))
    if found and not request.session.testsfailed:  # a traceback keeps a test's variables alive
        charge(found)


@pytest.fixture(scope="module", params=["embedded", pytest.param("group", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, shared: Shared) -> Iterator[str]:
    """Where the module's tests run: ``"embedded"`` or ``"group"``."""
    shared.want(request.param)
    yield request.param
    if request.node.get_closest_marker("prints") is not None:
        shared.close()  # otherwise its last output could count for a test of the next module


@pytest.fixture(scope="module")
def embedded(shared: Shared) -> None:
    """An embedded cluster."""
    shared.want("embedded")


@pytest.fixture(scope="module")
def apart(shared: Shared) -> None:
    """No cluster: the tests start their own."""
    shared.close()


@pytest.fixture(autouse=True, scope="module")
def _module_leaves_nothing() -> None:
    """Override the fixture of this name, because a cluster outlives modules. Leaks are checked at its end."""


@pytest.fixture
def gates(tmp_path: Path) -> Callable[[], Path]:
    """Return a function that makes gates in the file system. At most one thread may wait at each."""
    numbers = itertools.count()

    def make() -> Path:
        path = tmp_path / f"gate{next(numbers)}"
        os.mkfifo(path)
        return path

    return make


@pytest.fixture
def gate(gates: Callable[[], Path]) -> Path:
    """A gate in the file system."""
    return gates()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.excinfo is not None:
        item.stash[_RAISED] = True
    return (yield)


@pytest.fixture(autouse=True)
def _test_leaves_nothing(request: pytest.FixtureRequest, _module_leaves_nothing: None) -> Iterator[None]:
    """Replaces the fixture of the same name: the test's actors must be dead, but the cluster may have grown."""
    for name in ("place", "embedded", "apart"):
        if name in request.fixturenames:
            request.getfixturevalue(name)
    actors = _living()
    request.config.stash[WATCHDOG].keep(processes.descendants())
    yield
    show_errors()
    if request.node.stash.get(_RAISED, False):  # a traceback keeps the test's variables alive
        return
    deadline = time.monotonic() + 5.0
    while left := [text for actor, text in _living().items() if actor not in actors]:
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail("left behind:\n" + "\n".join(left), pytrace=False)
        time.sleep(0.01)


def _living() -> dict[int, str]:
    rows = actorrpc.list_actors() if actorrpc.is_initialized() else []
    return {row.actor_id: str(row) for row in rows if row.state != "DEAD"}
