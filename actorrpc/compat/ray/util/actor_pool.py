"""``ray.util.actor_pool``: a pool of actors that share work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from actorrpc import actors
from actorrpc.compat.ray.exceptions import rays_words
from actorrpc.compat.ray.object_ref import unwrap

__all__ = ["ActorPool"]

A = TypeVar("A")
V = TypeVar("V")


class _PoolTask:
    """Calls a user's ``fn(actor, value)``, and replaces Ray's ObjectRefs in its result by actorrpc's."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function = function

    def __call__(self, actor: Any, value: Any) -> Any:
        found = self._function(actor, value)
        return list(map(unwrap, found)) if isinstance(found, list) else unwrap(found)


class ActorPool(actors.ActorPool[A], Generic[A]):
    """Distributes tasks to actors. Each actor executes one task at a time. See :class:`actorrpc.ActorPool`.

    Args:
        actors: the handles of the actors.
    """

    def submit(self, fn: Callable[[A, V], Any], value: V) -> None:
        """Call ``fn(actor, value)``, which returns an ObjectRef, when an actor is free: at once, or while a result is awaited."""
        super().submit(_PoolTask(fn) if callable(fn) else fn, value)

    def get_next(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """Wait for the next task, in the order in which the tasks were submitted, and return its result."""
        with rays_words:
            return super().get_next(timeout, ignore_if_timedout)

    def get_next_unordered(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """Wait for the first task that ends, and return its result."""
        with rays_words:
            return super().get_next_unordered(timeout, ignore_if_timedout)
