"""Parametrization whose first cases run by default; the other cases are slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["rest_is_slow"]


def rest_is_slow(cases: Iterable[Any], quick: int = 1) -> list[Any]:
    """Return the cases for ``parametrize``, all but the first ``quick`` of them marked as slow; tuples are several values."""
    found: list[Any] = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        found.append(case if number < quick else pytest.param(*values, marks=pytest.mark.slow))
    return found
