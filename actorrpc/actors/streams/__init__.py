"""Streams of items from a method to its caller."""

__all__: list[str] = []
