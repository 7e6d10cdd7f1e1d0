"""What holds for the tests of a module that debug one cluster."""

from tests.cli.conftest import _test_leaves_nothing

__all__ = ["_test_leaves_nothing"]
