"""Joining and leaving a group of workers."""

__all__: list[str] = []
