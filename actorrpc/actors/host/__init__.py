"""The worker's side of actors: where they live."""

__all__: list[str] = []
