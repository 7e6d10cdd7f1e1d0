"""One cluster for all tests of a module, with the fixtures of the end-to-end tests of actors."""

from __future__ import annotations

from tests.actors.e2e.conftest import _test_leaves_nothing, embedded

__all__ = ["_test_leaves_nothing", "embedded"]
