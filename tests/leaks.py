"""The leak check: the package's own, under the name that these tests use."""

from __future__ import annotations

import sys

from actorrpc.testing import leaks

sys.modules[__name__] = leaks
