"""Faults of messages, and points at which to kill."""

__all__: list[str] = []
