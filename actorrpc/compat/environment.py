"""The environment in which interpreters find actorrpc in the place of torch's RPC."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["VARIABLE", "drop_in", "without_drop_in"]

VARIABLE: Final = "ACTORRPC_DROP_IN"
_SITE: Final = str(Path(__file__).with_name("site"))


def _path(environment: Mapping[str, str]) -> list[str]:
    return [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each and each != _SITE]


def drop_in(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set for programs that are to run on actorrpc."""
    return {VARIABLE: "1", "PYTHONPATH": os.pathsep.join([_SITE, *_path(environment)])}


def without_drop_in(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set for programs that are not."""
    return {VARIABLE: "0", "PYTHONPATH": os.pathsep.join(_path(environment))}
