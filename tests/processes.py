"""The processes of the session: what the package offers for that, under the name that these tests use."""

from __future__ import annotations

import sys

from actorrpc.testing import processes

sys.modules[__name__] = processes
