"""Alias of the package's time limit for tests."""

from __future__ import annotations

import sys

from actorrpc.testing import watchdog

sys.modules[__name__] = watchdog
