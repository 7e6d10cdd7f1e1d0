"""One group of three workers for all tests here; this process is the first of them.

One for all, because torch imports its compiler, for seconds, when a process makes its first optimizer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import actorrpc.autograd  # noqa: F401 (in force with RPC from the start)
from actorrpc.testing import leaks, processes
from actorrpc.testing.pytest_plugin import WATCHDOG, charge
from tests.actors.e2e import kit


@pytest.fixture(scope="package")
def _package_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    before = leaks.LeakSnapshot.take()
    yield
    found = leaks.settle(before, request.config.getoption("--leak-wait"))
    if found and not request.session.testsfailed:  # a traceback keeps a test's variables alive
        charge(found)


@pytest.fixture(scope="package")
def workers(_package_leaves_nothing: None) -> Iterator[list[str]]:
    """The names of the workers; the first is this process."""
    with kit.group(3):
        yield ["worker0", "worker1", "worker2"]


@pytest.fixture(autouse=True, scope="module")
def _module_leaves_nothing() -> None:
    """In place of the fixture of that name: the group goes on when a module is over. All of it is checked at the end."""


@pytest.fixture(autouse=True)
def _test_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """In place of the fixture of that name: threads may come in a group that goes on."""
    if "workers" in request.fixturenames:
        request.getfixturevalue("workers")
    request.config.stash[WATCHDOG].keep(processes.descendants())
    yield
    gc.collect()
