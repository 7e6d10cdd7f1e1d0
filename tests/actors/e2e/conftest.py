"""One cluster, or one group, for all tests of a module."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
def gate(tmp_path: Path) -> Path:
    """A gate of the file system."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path
