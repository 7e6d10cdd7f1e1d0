"""What is made of actors: pools, queues, tasks."""

__all__: list[str] = []
