"""One connection: sockets, shared memory, who reads and who writes."""

__all__: list[str] = []
