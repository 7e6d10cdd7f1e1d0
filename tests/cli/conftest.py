"""Leak check of test modules whose tests share a cluster."""

from __future__ import annotations

import pytest

from actorrpc.testing import processes
from actorrpc.testing.pytest_plugin import WATCHDOG


@pytest.fixture(autouse=True)
def _test_leaves_nothing(request: pytest.FixtureRequest, _module_leaves_nothing: None) -> None:
    """Replace the leak check of single tests if they share a cluster, which may grow."""
    for name in ("job", "environment"):
        if name in request.fixturenames:
            request.getfixturevalue(name)
            request.config.stash[WATCHDOG].keep(processes.descendants())
            return
    request.getfixturevalue("no_leaks")
