"""Benchmarks of actorrpc, compared with torch's own RPC and the raw limits: ``python -m benchmarks.core``."""

from __future__ import annotations

__all__: list[str] = []
