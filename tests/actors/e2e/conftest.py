"""One cluster or group for all tests of a module, and a leak check that suits shared clusters."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

import actorrpc
from actorrpc.testing import processes
from actorrpc.testing.pytest_plugin import WATCHDOG
from tests.actors.e2e import kit
from tests.ranks import show_errors

_RAISED = pytest.StashKey[bool]()


@pytest.fixture(scope="module", params=["embedded", pytest.param("group", marks=pytest.mark.slow)])
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
    """Replaces the fixture of the same name: the test's actors must be dead, but the cluster may have grown.

    The complete leak check runs once per module.
    """
    for name in ("place", "embedded"):
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
