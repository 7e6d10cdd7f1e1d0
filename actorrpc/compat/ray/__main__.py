"""``python -m actorrpc.compat.ray script.py args...``: run an unchanged program of Ray's on actorrpc.

The program replaces this process and runs as with ``python script.py args...``, with the options of the interpreter, except
``-E``, ``-I`` and ``-S``. ``-m module`` instead of the script runs a module. In the program and in interpreters that it starts,
``import ray`` imports :mod:`actorrpc.compat.ray`, even if Ray is installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from actorrpc.compat.take_over import check_launch, launch, with_ray

__all__ = ["main"]


def main() -> None:
    """Replace this process by the program that the arguments name."""
    check_launch("actorrpc.compat.ray")
    installed = importlib.util.find_spec("ray") if "ACTORRPC_RAY" not in os.environ else None
    if installed is not None and installed.origin is not None:
        sys.stderr.write(
            f"actorrpc.compat.ray: Ray is installed in {os.path.dirname(installed.origin)}; in this program, `import ray` means "
            "actorrpc.compat.ray\n"
        )
    launch(with_ray(os.environ))


if __name__ == "__main__":
    main()
