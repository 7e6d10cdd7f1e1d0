"""What stands in the place of ``torch.distributed.nn.api``."""
