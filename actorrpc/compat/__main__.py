"""``python -m actorrpc.compat script.py args...``: run an unchanged program of torch's RPC on actorrpc.

The program runs in the place of this process, as ``python script.py args...`` would; all options of the interpreter are
taken over. ``-m module`` in the place of the script runs a module (``-m torch.distributed.run ...``). Every interpreter that
the program starts is like it.
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
