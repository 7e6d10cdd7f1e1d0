"""``python -m actorrpc.compat script.py args...``: run an unchanged program of torch's RPC on actorrpc.

The program replaces this process and runs as with ``python script.py args...``, with the options of the interpreter, except
``-E``, ``-I`` and ``-S``. ``-m module`` instead of the script runs a module (``-m torch.distributed.run ...``). Interpreters
that the program starts also run on actorrpc.
"""

from __future__ import annotations

import os

from actorrpc.compat.take_over import check_launch, drop_in, launch

__all__ = ["main"]


def main() -> None:
    """Replace this process by the program that the arguments name."""
    check_launch("actorrpc.compat")
    launch(drop_in(os.environ))


if __name__ == "__main__":
    main()
