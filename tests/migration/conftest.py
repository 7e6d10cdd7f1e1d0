"""Where the rows of the pages are tried: on workers in this process, and, in the slow layer, on an embedded cluster.

Tests that need processes are in classes, each of which shares one cluster: an in-process cluster cannot be started beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actorrpc.testing import InProcessCluster, processes
from actorrpc.testing.pytest_plugin import WATCHDOG
from tests.actors.e2e import kit


@pytest.fixture
def near() -> Iterator[InProcessCluster]:
    """Two workers in this process; actors and tasks of the test, which is the first, run on the second."""
    with InProcessCluster(2) as cluster:
        yield cluster


@pytest.fixture
def passing() -> Iterator[InProcessCluster]:
    """The same, with a clock that goes on to what is due next by itself."""
    with InProcessCluster(2, autojump=True) as cluster:
        yield cluster


@pytest.fixture(scope="class")
def embedded() -> Iterator[None]:
    """An embedded cluster for the tests of a class."""
    with kit.running("embedded"):
        yield


@pytest.fixture(autouse=True)
def _test_leaves_nothing(request: pytest.FixtureRequest, _module_leaves_nothing: None) -> None:
    """In place of the fixture of that name: where the tests of a class share a cluster, it may grow."""
    if "embedded" in request.fixturenames:
        request.getfixturevalue("embedded")
        request.config.stash[WATCHDOG].keep(processes.descendants())
    else:
        request.getfixturevalue("no_leaks")
