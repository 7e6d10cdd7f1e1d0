"""Groups and meshes of actors."""

__all__: list[str] = []
