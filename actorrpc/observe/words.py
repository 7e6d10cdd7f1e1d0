"""Amounts in words, the same in findings, tables and sentences. No I/O."""

from __future__ import annotations

import math

__all__ = ["count", "span"]


def span(seconds: float) -> str:
    """Return a time in words."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if not math.isfinite(seconds):  # what another process has sent may be no number
        return f"{seconds} s"
    minutes, _ = divmod(int(seconds), 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def count(number: int, what: str) -> str:
    """Return a number of things."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
