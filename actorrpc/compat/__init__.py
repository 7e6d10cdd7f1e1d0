"""Compatibility: programs written for ``torch.distributed.rpc`` run on actorrpc unchanged.

:func:`install` puts actorrpc in the place of torch's modules; ``python -m actorrpc.compat script.py`` and the environment
variable ``ACTORRPC_DROP_IN=1`` do so for a program that does not ask for it. All that torch's users and tests reach for
beyond the documented API (private names, wording of errors) lives in this package, none of it in the rest of actorrpc.
"""

from actorrpc.compat.take_over import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
