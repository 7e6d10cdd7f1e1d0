"""The agent of a worker: outgoing and incoming calls, peers, threads and timers."""

__all__: list[str] = []
