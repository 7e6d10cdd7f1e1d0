"""An actor where it lives."""

__all__: list[str] = []
