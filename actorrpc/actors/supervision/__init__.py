"""The supervisor: where actors live, and what becomes of them when they die."""

__all__: list[str] = []
