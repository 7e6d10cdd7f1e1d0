"""Compatibility: programs written for ``torch.distributed.rpc``, or Ray (``compat/ray``), run on actorrpc unchanged.

:func:`install` replaces torch's modules by actorrpc's; ``python -m actorrpc.compat script.py`` and the environment variable
``ACTORRPC_DROP_IN=1`` do so for an unchanged program. This package has the private names and the texts of errors on which
torch's users and tests depend beyond the documented API; the rest of actorrpc does not use them.
"""

from actorrpc.compat.take_over import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
