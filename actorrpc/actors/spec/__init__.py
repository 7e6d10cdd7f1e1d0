"""What an actor is: its options, its class, how it died."""

__all__: list[str] = []
