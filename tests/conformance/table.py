"""The committed table of tests and their expected outcomes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["NEEDS", "Expectation", "read"]

_PATH = Path(__file__).with_name("table.tsv")


NEEDS = {"needs one GPU": 1, "needs two GPUs": 2, "needs four GPUs": 4}
"""Reasons for skipping a test, with the number of CUDA devices with which the test is expected to pass.

A second reason may follow, if the test fails even then: ``needs one GPU; impossible here``.
"""


class Expectation(NamedTuple):
    """The expectation of one test.

    Attributes:
        test: class and method, as torch's runner names them.
        category: the part of torch that it tests.
        outcome: ``passed``; ``fails`` (it runs, and must fail, so that an accidental pass is noticed); ``skipped`` (needs
            hardware); ``absent`` (its class cannot be created).
        group: whether its ranks join a group; tests that only check arguments do not.
        fast: whether it belongs to the part that runs on every change.
        reason: the reason if it is not expected to pass.
        gpus: the number of CUDA devices that it needs.
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
        gpus: the number of available CUDA devices; tests that need no more are expected to pass.
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
