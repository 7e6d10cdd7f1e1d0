"""Distributed reference counting of RRefs."""

__all__: list[str] = []
