"""The committed table: which tests there are, and what is expected of each."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["Expectation", "read"]

_PATH = Path(__file__).with_name("table.tsv")


class Expectation(NamedTuple):
    """What is expected of one test.

    Attributes:
        test: class and method, as torch's runner names them.
        category: which part of torch it tests.
        outcome: ``passed``; ``fails`` (it runs, and has to fail: nobody may pass by accident); ``skipped`` (needs hardware);
            ``absent`` (its class cannot be made).
        group: whether its ranks join a group; tests that only look at arguments do not.
        fast: whether it belongs to the part that runs on every change.
        reason: why it is not expected to pass.
    """

    test: str
    category: str
    outcome: str
    group: bool
    fast: bool
    reason: str


def read() -> list[Expectation]:
    """Return all expectations, in the table's order."""
    found = []
    for line in _PATH.read_text().splitlines()[1:]:
        test, category, outcome, group, fast, reason = line.split("\t")
        found.append(Expectation(test, category, outcome, group == "group", fast == "fast", reason))
    return found
