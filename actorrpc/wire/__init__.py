"""The wire protocol: frames, the handshake, keys and identities. No sockets, no torch."""

__all__: list[str] = []
