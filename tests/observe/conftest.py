"""One cluster for all tests of a module, with the leak check of the end-to-end tests of actors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.actors.e2e import kit
from tests.actors.e2e.conftest import _test_leaves_nothing

__all__ = ["_test_leaves_nothing"]


@pytest.fixture(scope="module")
def embedded() -> Iterator[None]:
    """An embedded cluster for all tests of a module."""
    with kit.running("embedded"):
        yield
