"""One group of three workers for all tests of this package; this process is the first worker.

The group is shared, because torch imports its compiler, which takes seconds, when a process creates its first optimizer.
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
    before = leaks.LeakSnapshot.capture()
    yield
    found = leaks.settle(before, request.config.getoption("--leak-wait"))
    if found and not request.session.testsfailed:  # a traceback keeps a test's variables alive
        charge(found)


@pytest.fixture(scope="package")
def workers(_package_leaves_nothing: None) -> Iterator[list[str]]:
    """The names of the workers; the first name is that of this process."""
    with kit.group(3):
        yield ["worker0", "worker1", "worker2"]


@pytest.fixture(autouse=True, scope="module")
def _module_leaves_nothing() -> None:
    """Override the fixture of this name, because the group outlives modules. Leaks are checked at the end of the package."""


@pytest.fixture(autouse=True)
def _test_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Override the fixture of this name, because the shared group may start threads."""
    if "workers" in request.fixturenames:
        request.getfixturevalue("workers")
    request.config.stash[WATCHDOG].keep(processes.descendants())
    yield
    gc.collect()
