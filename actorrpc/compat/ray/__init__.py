"""Programs written for Ray run on actorrpc: ``import actorrpc.compat.ray as ray``.

``python -m actorrpc.compat.ray script.py`` runs an unchanged program: in it, ``import ray`` imports this package. Names that are
missing here raise an error that lists the existing names; docs/migration/ray-programs.md has tables of the names.
"""

from __future__ import annotations

from typing import Any

import cloudpickle

from actorrpc.compat.ray import (
    actor,
    exceptions,
    names,
    remote_function,
    runtime_context,
    runtime_env,
    util,
)
from actorrpc.compat.ray.actor import ActorClass, ActorHandle, ActorID, actor_class, get_actor, kill, method
from actorrpc.compat.ray.cluster import (
    VERSION,
    available_resources,
    cluster_resources,
    init,
    is_initialized,
    nodes,
    shutdown,
    timeline,
)
from actorrpc.compat.ray.object_ref import (
    DynamicObjectRefGenerator,
    ObjectRef,
    ObjectRefGenerator,
    cancel,
    get,
    put,
    wait,
)
from actorrpc.compat.ray.remote_function import RemoteFunction
from actorrpc.compat.ray.runtime_context import get_gpu_ids, get_runtime_context

__all__ = [
    "ActorClass",
    "ActorHandle",
    "ActorID",
    "DynamicObjectRefGenerator",
    "ObjectRef",
    "ObjectRefGenerator",
    "__version__",
    "actor",
    "available_resources",
    "cancel",
    "cloudpickle",
    "cluster_resources",
    "exceptions",
    "get",
    "get_actor",
    "get_gpu_ids",
    "get_runtime_context",
    "init",
    "is_initialized",
    "kill",
    "method",
    "nodes",
    "put",
    "remote",
    "remote_function",
    "runtime_context",
    "runtime_env",
    "shutdown",
    "timeline",
    "types",
    "util",
    "wait",
]

__version__ = VERSION
types = names.module("ray.types", "types for annotations.", ObjectRef, ObjectRefGenerator)


def remote(*given: Any, **options: Any) -> Any:
    """Make an actor class of a class, or a task of a function: ``@ray.remote``, or with options ``@ray.remote(num_cpus=2)``.

    Raises:
        TypeError: the argument is neither a class nor a function, or is given together with options; or there is no argument.
        ConfigError: an option is not supported here, or its value is wrong; the message says what to do (a ValueError).
    """
    if len(given) == 1 and not options:
        return _decorated(given[0], {})
    if given or not options:
        raise TypeError(
            "@ray.remote stands above a class or a function, without arguments or with keyword options: @ray.remote(num_cpus=2)"
        )
    return lambda made: _decorated(made, options)


def _decorated(made: Any, options: dict[str, Any]) -> Any:
    if isinstance(made, (ActorClass, RemoteFunction)):
        raise TypeError(
            f"@ray.remote is for classes and functions, and {made!r} is remote already: use .options(...)"
        )
    if isinstance(made, type):
        return actor_class(made, options)
    if isinstance(made, (staticmethod, classmethod)) or not callable(made):
        raise TypeError(f"@ray.remote is for classes and functions, not for {made!r}")
    return remote_function.remote_function(made, options)


__getattr__ = names.missing("ray", __all__)
