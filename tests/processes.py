"""Alias of ``actorrpc.testing.processes``, which lists and kills the processes of the session."""

from __future__ import annotations

import sys

from actorrpc.testing import processes

sys.modules[__name__] = processes
