"""The time that everything here goes by: what is due, and how long a wait may take.

Call it as ``moments.now()``, through the module: a virtual clock (:mod:`actorrpc.testing`) puts another function in
its place. Starting and watching of other processes goes by ``time.monotonic`` itself, since those live in real time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["now"]

#: Seconds since some moment; never runs backwards. Only differences mean anything. Thread-safe.
now: Callable[[], float] = time.monotonic
