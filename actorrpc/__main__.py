"""``python -m actorrpc COMMAND``, the same as the script ``actorrpc``: inspect running groups, and start programs."""

from __future__ import annotations

import sys

from actorrpc.cli.commands import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
