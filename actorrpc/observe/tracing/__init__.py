"""Trace files with the calls and the torch profiles of all workers."""

__all__: list[str] = []
