"""Joining a group of workers, and leaving it."""

__all__: list[str] = []
