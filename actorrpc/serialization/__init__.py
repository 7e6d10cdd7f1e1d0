"""Turns objects into bytes and ranges of memory for messages, and back. Uses no sockets."""

__all__: list[str] = []
