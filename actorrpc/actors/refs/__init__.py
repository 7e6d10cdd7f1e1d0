"""References to objects, and waiting for them."""

__all__: list[str] = []
