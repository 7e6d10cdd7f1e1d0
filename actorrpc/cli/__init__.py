"""The command line: ``actorrpc status``, ``stack``, ``describe``, ``logs``, ``trace``, ``profile``, ``dashboard`` and others.

Nothing here imports torch: so a command starts fast, also on a host where a job keeps all processors busy.
"""

from __future__ import annotations

__all__: list[str] = []
