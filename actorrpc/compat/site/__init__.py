"""What interpreters read at their start that are to find actorrpc in the place of torch's RPC."""

__all__: list[str] = []
