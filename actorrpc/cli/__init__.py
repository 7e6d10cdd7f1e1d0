"""The command line: ``actorrpc status``, ``stack``, ``describe``, ``logs``, ``trace``, ``profile``, ``dashboard`` and others.

Nothing here imports torch: a command is there at once, also beside a job that keeps all processors busy.
"""

from __future__ import annotations

__all__: list[str] = []
