"""The caller's side of actors: handles and the calls that they make."""

__all__: list[str] = []
