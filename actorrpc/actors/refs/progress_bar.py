"""The bars of :func:`actorrpc.progress` and ``as_completed(progress=True)``, made by tqdm, which is imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

from actorrpc.errors import ConfigError

__all__ = ["progress_bar"]


def progress_bar(total: int | None, description: str | None) -> Any:
    """Return a new progress bar of tqdm, which is drawn as text or, in a notebook, as a widget.

    Args:
        total: the number of items; None: unknown.

    Raises:
        ConfigError: tqdm is not installed.
    """
    try:
        tqdm = importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise ConfigError(f"progress bars are tqdm's ({error}): pip install 'actorrpc[progress]'") from None
    return tqdm(total=total, desc=description)
