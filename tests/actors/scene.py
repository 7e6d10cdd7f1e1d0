"""A scene of supervision tests: a driver and its actors in the simulation, with a log of their starts and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actorrpc.actors.client.handle import ActorHandle
from actorrpc.actors.groups.supervision import Supervision, supervise
from tests.actors.fleet import Resident, World

__all__ = ["Scene", "error_of"]


class Scene:
    """A driver with actors that tests put into supervision groups; starts and ends of incarnations are logged in ``events``."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        count: int,
        seed: int = 1,
        spawner: bool = False,
        **options: Any,
    ) -> None:
        self.world = World(monkeypatch, seed, workers=1 if spawner else 3, spawner=spawner)
        self.driver = self.world.workers[0]
        options.setdefault("max_restarts", -1)
        self.routes = [self.world.create(self.driver, **options) for _ in range(count)]
        self.names = {route.actor_id: number for number, route in enumerate(self.routes)}
        self.world.settle()
        self.events: list[str] = []
        self.refuse: Callable[[int], BaseException | None] = lambda number: None
        self.world.constructor = self._constructed
        self.world.ended = self._ended

    def scatter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Run supervision actions at random later times, as delayed threads would."""

        def perform(actions: list[Callable[[], object]]) -> None:
            def first() -> None:
                actions[0]()
                perform(actions[1:])

            if actions:
                self.world.tasks.append((self.driver, first))

        for module in ("supervision.groups", "groups.supervision", "supervision.supervisor"):
            monkeypatch.setattr(f"actorrpc.actors.{module}.perform", perform)

    def _constructed(self, spec: Any) -> BaseException | None:
        number = self.names.get(spec.actor_id, -1)
        error = self.refuse(number)
        self.events.append(f"{'!' if error is not None else '+'}{number}")
        return error

    def _ended(self, hosted: Resident) -> None:
        self.events.append(f"-{self.names[hosted.spec.actor_id]}")

    def handle(self, number: int) -> ActorHandle[Any]:
        route = self.routes[number]
        return ActorHandle(route.descriptor, route)

    def group(self, *children: Any, **options: Any) -> Supervision:
        self.world.on(self.driver)
        found = [self.handle(each) if isinstance(each, int) else each for each in children]
        return supervise(found, **options)

    def resident(self, number: int) -> Resident:
        actor_id = self.routes[number].actor_id
        return next(
            hosted
            for worker in self.world.workers
            if not worker.dead
            for hosted in worker.actors_here.values()
            if hosted.spec.actor_id == actor_id
        )

    def kill(self, number: int) -> None:
        """End the actor as an unexpected death."""
        self.world.on(self.driver)
        self.routes[number].kill(no_restart=False)

    def living(self) -> list[int]:
        return sorted(
            self.names[hosted.spec.actor_id]
            for worker in self.world.workers
            if not worker.dead
            for hosted in worker.actors_here.values()
        )

    def settled_events(self, seconds: float = 60.0) -> list[str]:
        self.world.settle(seconds)
        events, self.events = self.events, []
        return events


def error_of(future: Any) -> BaseException:
    assert future.done()
    error = future.exception()
    assert error is not None
    return error  # type: ignore[no-any-return]
