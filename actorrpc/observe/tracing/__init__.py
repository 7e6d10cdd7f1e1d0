"""Traces: the moments of calls, and the operators of torch, of all workers in one file."""

__all__: list[str] = []
