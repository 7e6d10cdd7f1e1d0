"""References to objects, and functions that wait for them."""

__all__: list[str] = []
