"""``ray.types``: types for annotations."""

from actorrpc.compat.ray.object_ref import ObjectRef, ObjectRefGenerator

__all__ = ["ObjectRef", "ObjectRefGenerator"]
