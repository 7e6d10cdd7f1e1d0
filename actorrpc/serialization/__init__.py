"""Objects to bytes and memory, and back. No sockets."""

__all__: list[str] = []
