"""The bars of :func:`actorrpc.progress` and ``as_completed(progress=True)``: tqdm's, which is imported for the first one."""

from __future__ import annotations

import importlib
from typing import Any

from actorrpc.errors import ConfigError

__all__ = ["progress_bar"]


def progress_bar(total: int | None, description: str | None) -> Any:
    """Return a new bar, tqdm's own for what it is shown on: a terminal, a file or a notebook.

    Args:
        total: how many there will be; None: nobody knows.

    Raises:
        ConfigError: tqdm is not installed.
    """
    try:
        tqdm = importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise ConfigError(f"progress bars are tqdm's ({error}): pip install 'actorrpc[progress]'") from None
    return tqdm(total=total, desc=description)
