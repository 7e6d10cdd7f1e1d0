"""Collective operations among actors."""

__all__: list[str] = []
