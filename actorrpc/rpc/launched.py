"""What ``init_rpc`` was not told, taken from what a launcher has said. Thread-safe; keeps nothing."""

from __future__ import annotations

import copy
import os
from typing import Any

from actorrpc.core.launch import VARIABLES, of_environment
from actorrpc.errors import ConfigError

__all__ = ["fill_in"]


def fill_in(name: str | None, rank: Any, world_size: Any, options: Any) -> tuple[str, Any, Any, Any]:
    """Return name, rank, world size and options of a worker, as they were given or as the launcher has said.

    Raises:
        ConfigError: no name was given, and there is no launcher; or what it says makes no sense.
    """
    told = rank != -1 or world_size is not None or options.init_method != "env://"
    if name is not None and (told or "RANK" in os.environ or "WORLD_SIZE" in os.environ):
        return name, rank, world_size, options
    launch = of_environment()
    if launch is None:
        if name is None:
            raise ConfigError(
                f"init_rpc() needs a name, as no launcher has said which rank this process is: {VARIABLES} are not set"
            )
        return name, rank, world_size, options
    name = f"worker{launch.rank}" if name is None else name
    if told:
        return name, rank, world_size, options
    where = f"[{launch.master}]" if ":" in launch.master else launch.master
    options = copy.copy(options)
    options.init_method = f"tcp://{where}:{launch.port}"
    return name, launch.rank, launch.size, options
