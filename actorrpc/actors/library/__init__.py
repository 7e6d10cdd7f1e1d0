"""Pools, queues and tasks, which are made of actors."""

__all__: list[str] = []
