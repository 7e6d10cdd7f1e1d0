"""Where processes come from: this host, Ray."""

__all__: list[str] = []
