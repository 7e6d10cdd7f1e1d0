"""``python -m actorrpc COMMAND``, which the script ``actorrpc`` is, too: look into groups that run, and start programs."""

from __future__ import annotations

import sys

from actorrpc.cli.commands import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
