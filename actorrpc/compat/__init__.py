"""Compatibility: programs written for ``torch.distributed.rpc`` run on actorrpc unchanged.

:func:`install` puts actorrpc in the place of torch's modules; ``python -m actorrpc.compat script.py`` and the environment
variable ``ACTORRPC_DROP_IN=1`` do so for an unchanged program. This package has the private names and the words of errors that
torch's users and tests depend on beyond the documented API; the rest of actorrpc does not know them.
"""

from actorrpc.compat.take_over import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
