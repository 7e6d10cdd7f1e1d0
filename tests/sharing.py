"""A plugin that keeps the test modules of some folders together, because their modules share a cluster or a group.

The order of modules is random, and pytest-xdist gives each module to any worker. Without this plugin, nearly each module of
these folders would start a cluster of its own.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["pytest_collection_modifyitems", "pytest_xdist_make_scheduler"]

_HERE = Path(__file__).parent.name
# Folders, and the parts into which their modules are divided for the workers of pytest-xdist.
_PARTS = {f"{_HERE}/actors/e2e/": 2, f"{_HERE}/optim/": 1}


def _folder(nodeid: str) -> str:
    return next((each for each in _PARTS if nodeid.startswith(each)), "")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after pytest-randomly
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Move the tests of each folder behind the folder's first test."""
    yield
    first: dict[str, int] = {}

    def place(numbered: tuple[int, pytest.Item]) -> int:
        number, item = numbered
        folder = _folder(item.nodeid)
        return first.setdefault(folder, number) if folder else number

    items[:] = [item for _, item in sorted(enumerate(items), key=place)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each part of these folders to one worker (``--dist loadfile``)."""
    from xdist.scheduler import LoadFileScheduling

    numbers: dict[str, int] = {}

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            folder = _folder(nodeid)
            return f"{folder}{numbers.setdefault(file, len(numbers)) % _PARTS[folder]}" if folder else file

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None
