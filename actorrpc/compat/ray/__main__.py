"""``python -m actorrpc.compat.ray script.py args...``: run an unchanged program of Ray's on actorrpc.

The program runs in the place of this process, as ``python script.py args...`` would; all options of the interpreter are
taken over. ``-m module`` in the place of the script runs a module. In every interpreter that the program starts, ``import ray``
means :mod:`actorrpc.compat.ray`, also where Ray is installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from actorrpc.compat.take_over import with_ray

__all__ = ["main"]


def main() -> None:
    """Replace this process by the program that the arguments name."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m actorrpc.compat.ray (script.py | -m module) [arguments]")
    if sys.flags.ignore_environment or sys.flags.no_site:
        sys.exit(
            "python -m actorrpc.compat.ray does not work with -E, -I and -S: it passes on what is to be done by PYTHONPATH"
        )
    installed = importlib.util.find_spec("ray") if "ACTORRPC_RAY" not in os.environ else None
    if installed is not None and installed.origin is not None:
        sys.stderr.write(
            f"actorrpc.compat.ray: Ray is installed in {os.path.dirname(installed.origin)}; in this program, `import ray` means "
            "actorrpc.compat.ray\n"
        )
    # Python's own options: what stands before `-m actorrpc.compat.ray`.
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) - 1]
    os.environ.update(with_ray(os.environ))
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *options, *sys.argv[1:]])


if __name__ == "__main__":
    main()
