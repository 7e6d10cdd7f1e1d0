"""Alias of the package's leak check, ``actorrpc.testing.leaks``."""

from __future__ import annotations

import sys

from actorrpc.testing import leaks

sys.modules[__name__] = leaks
