"""One for each worker: calls in and out, peers, threads, timers."""

__all__: list[str] = []
