"""What holds for the tests of a module that look into one cluster."""

from __future__ import annotations

import pytest

from actorrpc.testing import processes
from actorrpc.testing.pytest_plugin import WATCHDOG


@pytest.fixture(autouse=True)
def _test_leaves_nothing(request: pytest.FixtureRequest, _module_leaves_nothing: None) -> None:
    """In place of the fixture of that name: where the tests of a module share a cluster, it may grow."""
    for name in ("job", "environment"):
        if name in request.fixturenames:
            request.getfixturevalue(name)
            request.config.stash[WATCHDOG].keep(processes.descendants())
            return
    request.getfixturevalue("no_leaks")
