"""The supervisor: places actors, and decides what happens when they die."""

__all__: list[str] = []
