"""Leak check of test modules that debug one cluster."""

from tests.cli.conftest import _test_leaves_nothing

__all__ = ["_test_leaves_nothing"]
