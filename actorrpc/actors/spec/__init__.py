"""The description of actors: their options, their class, their death."""

__all__: list[str] = []
