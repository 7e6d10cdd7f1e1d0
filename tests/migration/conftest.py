"""Clusters for the tests of the migration pages: workers in this process and, in the slow layer, an embedded cluster.

Tests that need processes are in classes that share one cluster, as a process cannot have two clusters at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actorrpc.testing import InProcessCluster, processes
from actorrpc.testing.pytest_plugin import WATCHDOG
from tests.actors.e2e import kit


@pytest.fixture
def near() -> Iterator[InProcessCluster]:
    """Two workers in this process: the test is the first worker, and its actors and tasks run on the second."""
    with InProcessCluster(2) as cluster:
        yield cluster


@pytest.fixture
def passing() -> Iterator[InProcessCluster]:
    """The same cluster, with a clock that jumps to the next timer when all threads wait."""
    with InProcessCluster(2, autojump=True) as cluster:
        yield cluster


@pytest.fixture(scope="class")
def embedded() -> Iterator[None]:
    """An embedded cluster for the tests of a class."""
    with kit.running("embedded"):
        yield


@pytest.fixture(autouse=True)
def _test_leaves_nothing(request: pytest.FixtureRequest, _module_leaves_nothing: None) -> None:
    """Replace the leak check of single tests if they share a cluster, which may grow."""
    if "embedded" in request.fixturenames:
        request.getfixturevalue("embedded")
        request.config.stash[WATCHDOG].keep(processes.descendants())
    else:
        request.getfixturevalue("no_leaks")
