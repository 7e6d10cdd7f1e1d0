"""The engines that there are, by name. One that needs a package which is not installed is only imported when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

from actorrpc.cluster.provisioners.base import Engine
from actorrpc.errors import ConfigError, RpcError, WrongTypeError

__all__ = ["find"]

#: name -> (module with ``make(**options) -> Engine``, the package that it needs, how to install it)
_KNOWN: Final = {"ray": ("actorrpc.cluster.provisioners.ray", "ray", "pip install 'actorrpc[ray]'")}


def find(engine: Engine | str | None, options: Mapping[str, Any]) -> Engine | None:
    """Return the engine of a name, or what was given; None for the embedded one.

    Raises:
        ConfigError: there is none of that name, it is not installed, or its options cannot be used.
    """
    if engine is None or engine == "local":
        if options:
            raise ConfigError(f"the embedded engine takes no engine_options, not {', '.join(options)}")
        return None
    if not isinstance(engine, str):
        wanted = ("start", "nodes", "register", "kill", "end")
        if not all(callable(getattr(engine, each, None)) for each in wanted):
            raise WrongTypeError(f"engine must be a name or an Engine, not {engine!r}")
        return engine
    if engine not in _KNOWN:
        raise ConfigError(f"there is no engine {engine!r}; there are: local, {', '.join(_KNOWN)}")
    module, package, how = _KNOWN[engine]
    try:
        importlib.import_module(package)
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"engine {engine!r} needs the package {package!r}: {error}. {how}") from error
    try:
        made: Engine = found.make(**options)
    except RpcError:
        raise
    except TypeError as error:
        raise ConfigError(f"engine {engine!r} cannot be made with these engine_options: {error}") from error
    return made
