"""``ray.util.queue``: a first-in, first-out queue that lives in an actor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from actorrpc import actors
from actorrpc.actors import Empty, Full
from actorrpc.compat.ray.exceptions import rays_words
from actorrpc.compat.ray.object_ref import unwrap
from actorrpc.compat.ray.options import Extras, for_actors

__all__ = ["Empty", "Full", "Queue"]

T = TypeVar("T")


class Queue(actors.Queue[T], Generic[T]):
    """A first-in, first-out queue, used from any number of processes. See :class:`actorrpc.Queue`.

    Args:
        maxsize: the greatest number of items; 0 or less: no limit.
        actor_options: options of the actor in which the queue lives.
    """

    def __init__(self, maxsize: int = 0, actor_options: Mapping[str, Any] | None = None) -> None:
        options, _ = for_actors(actor_options or {}, Extras())
        super().__init__(maxsize, options)

    def _call(self, name: str, *args: Any) -> actors.ObjectRef[Any]:
        return super()._call(name, *map(unwrap, args))

    def _wait(self, ref: actors.ObjectRef[Any], ticket: tuple[int, int]) -> Any:
        with rays_words:
            return super()._wait(ref, ticket)

    async def _wait_async(self, ref: actors.ObjectRef[Any], ticket: tuple[int, int]) -> Any:
        with rays_words:
            return await super()._wait_async(ref, ticket)

    def __repr__(self) -> str:
        return f"<ray.util.queue.Queue(maxsize={self.maxsize}) in {self.actor!r}>"
