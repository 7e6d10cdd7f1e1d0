"""The core: bytes, links, the group of workers and the agent. Private: users import from the floors above."""

__all__: list[str] = []
