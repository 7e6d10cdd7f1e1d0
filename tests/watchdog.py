"""The limit on each test's time: the package's own, under the name that these tests use."""

from __future__ import annotations

import sys

from actorrpc.testing import watchdog

sys.modules[__name__] = watchdog
