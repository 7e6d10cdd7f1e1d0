"""Formatting of durations and counts for findings, tables and sentences. No I/O."""

from __future__ import annotations

import math

__all__ = ["count", "span"]


def span(seconds: float) -> str:
    """Format a duration."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if not math.isfinite(seconds):  # another process may have sent infinity or NaN
        return f"{seconds} s"
    minutes, _ = divmod(int(seconds), 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def count(number: int, what: str) -> str:
    """Return the number and the noun, with an s if the number is not 1."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
