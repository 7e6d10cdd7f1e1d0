"""``runtime_env``: environment variables, a working directory and modules for the processes of actors and tasks.

``env_vars`` and ``working_dir`` are options of actorrpc. ``py_modules`` and the working directory are added to the import path of
the process before its actor or task is unpickled. Actors and tasks started in such a process inherit the
``runtime_env``. Fields that would install packages are refused: the processes of actors use this program's packages.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

from actorrpc.compat.ray.exceptions import RuntimeEnvSetupError

__all__ = [
    "VARIABLE",
    "RuntimeEnv",
    "SearchingFunction",
    "WithPaths",
    "checked",
    "inherited",
    "merged",
    "options_of",
]

VARIABLE: Final = "ACTORRPC_RAY_RUNTIME_ENV"
_INSTALL: Final = (
    "the processes of actors use this program's packages: install the packages before the program starts"
)
_REFUSED: Final = {
    "pip": _INSTALL,
    "conda": _INSTALL,
    "uv": _INSTALL,
    "container": "there are no containers: start the program in the image, or join workers that run in it",
    "image_uri": "there are no containers: start the program in the image, or join workers that run in it",
    "java_jars": "there are Python actors only",
    "worker_process_setup_hook": "call the function at the beginning of the constructor or the task",
    "py_executable": "processes are forks of this interpreter",
    "nsight": "profile with torch's profiler, or py-spy",
}
_KNOWN: Final = ("env_vars", "py_modules", "working_dir")
# Ignored fields. Most of them say how environments are installed, and actorrpc installs none.
_IGNORED: Final = ("config", "excludes", "eager_install", "rocprof_sys", "_validate")


class RuntimeEnv(dict[str, Any]):
    """A ``runtime_env``: a dict with named arguments.

    Args:
        env_vars: environment variables.
        working_dir: the working directory, which is also on the import path.
        py_modules: directories of packages, files of modules, or imported modules.
    """

    def __init__(
        self,
        *,
        env_vars: Mapping[str, str] | None = None,
        working_dir: str | None = None,
        py_modules: list[Any] | None = None,
        **more: Any,
    ) -> None:
        given = {"env_vars": env_vars, "working_dir": working_dir, "py_modules": py_modules, **more}
        super().__init__({name: value for name, value in given.items() if value is not None})
        checked(self)

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict."""
        return dict(self)


def checked(env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the known fields of a ``runtime_env``, with absolute paths.

    Raises:
        RuntimeEnvSetupError: a field is not supported here; the message says what to do. Also a ValueError.
        TypeError: a field, or an item of a field, has a wrong type.
    """
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise TypeError(f"runtime_env must be a dict, not {type(env).__name__}")
    found: dict[str, Any] = {}
    for name, value in env.items():
        if value is None or name in _IGNORED:
            continue
        if name in _REFUSED:
            raise RuntimeEnvSetupError(f"runtime_env: {name!r} is not possible here: {_REFUSED[name]}")
        if name not in _KNOWN:
            raise RuntimeEnvSetupError(f"runtime_env has no field {name!r}; there are: {', '.join(_KNOWN)}")
        found[name] = value
    if "env_vars" in found:
        variables = found["env_vars"]
        if not isinstance(variables, Mapping) or not all(
            isinstance(each, str) for pair in variables.items() for each in pair
        ):
            raise TypeError(f"runtime_env: env_vars must be a dict of texts, not {variables!r}")
        found["env_vars"] = dict(variables)
    if "working_dir" in found:
        found["working_dir"] = _directory("working_dir", found["working_dir"])
    if "py_modules" in found:
        if isinstance(found["py_modules"], (str, ModuleType)) or not hasattr(found["py_modules"], "__iter__"):
            raise TypeError("runtime_env: py_modules must be a list of paths or modules")
        found["py_modules"] = [_path_of(each) for each in found["py_modules"]]
    return found


def _directory(name: str, value: Any) -> str:
    path: str = os.path.abspath(os.path.expanduser(os.fspath(value)))
    if "://" in str(value) or not os.path.isdir(path):
        raise RuntimeEnvSetupError(
            f"runtime_env: {name} {str(value)!r} is no directory of this machine: fetch or unpack it before the program starts"
        )
    return path


def _path_of(module: Any) -> str:
    """Return the directory from which a module is imported."""
    if isinstance(module, ModuleType):
        spec = importlib.util.find_spec(module.__name__)
        origin = None if spec is None else spec.origin
        if origin is None:
            raise RuntimeEnvSetupError(f"runtime_env: py_modules: {module.__name__} has no file")
        folder = os.path.dirname(os.path.abspath(origin))
        return os.path.dirname(folder) if spec is not None and spec.submodule_search_locations else folder
    path: str = os.path.abspath(os.path.expanduser(os.fspath(module)))
    if os.path.isfile(path) and path.endswith((".py", ".whl", ".zip")):
        return path if not path.endswith(".py") else os.path.dirname(path)
    # A package is imported from the parent of its directory.
    return os.path.dirname(_directory("py_modules", module))


def inherited() -> dict[str, Any]:
    """Return the ``runtime_env`` of this process, which its actors and tasks inherit."""
    said = os.environ.get(VARIABLE)
    found: dict[str, Any] = json.loads(said) if said else {}
    return found


def merged(env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the inherited ``runtime_env``, changed by ``env``: environment variables are added, other fields replaced."""
    own, above = dict(env or {}), inherited()
    variables = {**above.get("env_vars", {}), **own.get("env_vars", {})}
    found = {**above, **own}
    if variables:
        found["env_vars"] = variables
    return found


def options_of(env: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return actorrpc's options for a ``runtime_env``, and the paths to add to the import path."""
    if not env:
        return {}, ()
    options: dict[str, Any] = {"env": {**env.get("env_vars", {}), VARIABLE: json.dumps(env)}}
    paths = tuple(env.get("py_modules", ()))
    if "working_dir" in env:
        options["working_dir"] = env["working_dir"]
        paths = (env["working_dir"], *paths)
    return options, paths


class WithPaths:
    """Stands for an object in a pickle. Unpickling it adds directories to the import path, and then gives the object.

    Args:
        paths: the directories.
        held: the object.
    """

    __slots__ = ("_held", "_paths")

    def __init__(self, paths: tuple[str, ...], held: Any) -> None:
        self._paths = paths
        self._held = held

    def __reduce__(self) -> tuple[Any, ...]:
        # _Paths comes first, because it must be unpickled (and set the paths) before the object is unpickled.
        return _second, (_Paths(self._paths), self._held)


class SearchingFunction:
    """Calls the function ``held``. Unpickling this object adds directories to the import path of the process.

    Args:
        paths: the directories.
        held: the function, or an object that is unpickled as the function.
    """

    def __init__(self, paths: tuple[str, ...], held: Any) -> None:
        functools.update_wrapper(self, held)
        self._paths = paths
        self._held = held

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._held(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _searching, (_Paths(self._paths), self._paths, self._held)


class _Paths:
    __slots__ = ("_paths",)

    def __init__(self, paths: tuple[str, ...]) -> None:
        self._paths = paths

    def __reduce__(self) -> tuple[Any, ...]:
        return _add_paths, (self._paths,)


def _add_paths(paths: tuple[str, ...]) -> None:
    """Put the ``paths`` in the ``runtime_env`` of this process at the front of the import path (named in pickles)."""
    own = options_of(inherited())[1]
    sys.path[:0] = [each for each in paths if each in own and each not in sys.path]


def _second(_first: None, held: Any) -> Any:
    """Return the second argument (named in pickles)."""
    return held


def _searching(_first: None, paths: tuple[str, ...], held: Any) -> SearchingFunction:
    """Rebuild a :class:`SearchingFunction` (named in pickles)."""
    return SearchingFunction(paths, held)
