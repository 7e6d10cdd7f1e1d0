"""The transport of one connection: sockets, TLS, shared memory, reading and writing."""

__all__: list[str] = []
