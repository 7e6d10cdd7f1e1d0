"""The file that an interpreter runs at its start, so that actorrpc replaces torch's RPC or Ray."""

__all__: list[str] = []
