"""A folder for ``PYTHONPATH``: an interpreter runs its ``sitecustomize.py`` at the start; it replaces torch's RPC or Ray."""

__all__: list[str] = []
