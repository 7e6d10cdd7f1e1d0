"""The committed table: which tests there are, and what is expected of each."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["NEEDS", "Expectation", "read"]

_PATH = Path(__file__).with_name("table.tsv")


NEEDS = {"needs one GPU": 1, "needs two GPUs": 2, "needs four GPUs": 4}
"""Reasons to be skipped, and how many CUDA devices there must be for the test to be expected to pass.

Behind such a reason can stand why it fails even so: ``needs one GPU; impossible here``.
"""


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
        gpus: how many CUDA devices it needs.
    """

    test: str
    category: str
    outcome: str
    group: bool
    fast: bool
    reason: str
    gpus: int = 0


def read(gpus: int = 0) -> list[Expectation]:
    """Return all expectations, in the table's order.

    Args:
        gpus: how many CUDA devices there are: a test for which they are enough is expected to pass.
    """
    found = []
    for line in _PATH.read_text().splitlines()[1:]:
        test, category, outcome, group, fast, reason = line.split("\t")
        need, _, why = reason.partition("; ")
        needed = NEEDS.get(need, 0)
        if 0 < needed <= gpus:
            outcome, reason = "fails" if why else "passed", why
        found.append(Expectation(test, category, outcome, group == "group", fast == "fast", reason, needed))
    return found
