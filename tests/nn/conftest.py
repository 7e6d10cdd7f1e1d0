"""A group of this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actors.alone import alone


@pytest.fixture
def here(tmp_path: Path) -> Iterator[None]:
    """A group of one worker, ``w0``. Tests must drop all remote modules before the end."""
    with alone(tmp_path):
        yield
