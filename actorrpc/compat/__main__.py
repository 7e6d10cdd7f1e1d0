"""``python -m actorrpc.compat script.py args...``: run an unchanged program of torch's RPC on actorrpc.

The program runs in the place of this process, as ``python script.py args...`` would; all options of the interpreter are
taken over. ``-m module`` in the place of the script runs a module (``-m torch.distributed.run ...``). Every interpreter that
the program starts is like it.
"""

from __future__ import annotations

import os
import sys

from actorrpc.compat.take_over import drop_in

__all__ = ["main"]


def main() -> None:
    """Replace this process by the program that the arguments name."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m actorrpc.compat (script.py | -m module) [arguments]")
    if sys.flags.ignore_environment or sys.flags.no_site:
        sys.exit(
            "python -m actorrpc.compat does not work with -E, -I and -S: it passes on what is to be done by PYTHONPATH"
        )
    # Python's own options: what stands before `-m actorrpc.compat`.
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) - 1]
    os.environ.update(drop_in(os.environ))
    os.execv(sys.executable, [sys.executable, *options, *sys.argv[1:]])


if __name__ == "__main__":
    main()
