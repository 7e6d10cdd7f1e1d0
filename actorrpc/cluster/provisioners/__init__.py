"""Sources of processes: this host, Ray."""

__all__: list[str] = []
