"""The command line: ``actorrpc status``, ``stack``, ``describe``, ``logs``, ``trace``, ``profile``, ``dashboard`` and others.

Modules of this package must not import torch, so that a command starts fast even if a job keeps all processors busy. The only
exception is ``gpu``, which ``doctor --gpu`` imports.
"""

from __future__ import annotations

__all__: list[str] = []
