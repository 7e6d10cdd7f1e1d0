"""Replaces ``torch.distributed.nn.api``."""

__all__: list[str] = []
