"""Modules on other workers: the API of ``torch.distributed.nn``, implemented with actorrpc's calls."""

from __future__ import annotations

from actorrpc.nn import RemoteModule

__all__ = ["RemoteModule"]
