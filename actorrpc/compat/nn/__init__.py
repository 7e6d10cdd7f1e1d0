"""What stands in the place of ``torch.distributed.nn.api``."""

__all__: list[str] = []
