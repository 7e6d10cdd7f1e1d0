"""A group of this process alone, on which actors can be made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actorrpc import ActorHandle
from tests.actors import things
from tests.actors.alone import alone


@pytest.fixture
def one_worker(tmp_path: Path) -> Iterator[None]:
    """A group of one worker, ``w0``."""
    things.Counter.gate.clear()
    with alone(tmp_path):
        yield
        things.Counter.gate.set()


@pytest.fixture
def counter(one_worker: None) -> ActorHandle[Any]:
    """An actor of ``things.Counter`` that begins at 3."""
    return things.Counter.remote(3)
