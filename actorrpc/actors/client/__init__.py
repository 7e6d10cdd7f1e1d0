"""An actor's callers: handles, and the calls that they make."""

__all__: list[str] = []
