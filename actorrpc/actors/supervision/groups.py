"""Supervision groups in the supervisor. They carry out the decisions of :mod:`actorrpc.actors.supervision.strategies`.

The supervisor calls a group's methods for the events of the group's children. It holds its lock meanwhile, which guards the state
of all groups. Methods of a group return actions, which the supervisor runs after releasing the lock. No method blocks. Only
callbacks of the future ``over``, which an action completes, call user code.

Groups keep no actor alive: their children are records, not handles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from actorrpc.actors.supervision.strategies import (
    RestartOrder,
    RestartPlan,
    RestartPolicy,
    RestartStrategy,
    State,
    Strategy,
)
from actorrpc.errors import ActorDiedError, SupervisionError
from actorrpc.futures import Future

if TYPE_CHECKING:
    from actorrpc.actors.context import Runtime
    from actorrpc.actors.supervision.record import ActorRecord, Incarnation

__all__ = ["Action", "SupervisionGroup", "perform"]

Action = Callable[[], object]
_log = logging.getLogger("actorrpc.actors")
END_S: Final = 5.0  # how long a child may take to end before its process is killed
_STATES: Final[dict[str, State]] = {"starting": "making", "restarting": "making"}


def perform(actions: list[Action]) -> None:
    """Run actions. The supervisor's lock must not be held."""
    for deed in actions:
        deed()


class SupervisorOfGroup(Protocol):
    """The methods of the supervisor that a group uses."""

    draw: Callable[[], float]

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """See Supervisor."""

    def begin(self, actor: ActorRecord) -> None:
        """See Supervisor.begin."""

    def ended(self, actor: ActorRecord, life: Incarnation, text: str) -> None:
        """See Supervisor.ended."""

    def end_there(self, life: Incarnation, how: str, why: str) -> Future[Any]:
        """See Supervisor.end_there."""

    def mark_dead(self, actor: ActorRecord, text: str, *, cause: BaseException | None) -> None:
        """See Supervisor.mark_dead."""


class SupervisionGroup:
    """One supervision group.

    Args:
        children: actors of this supervisor and other groups, in the order in which they start. None of them is in a group yet;
            the supervisor's lock is held.
        limit, period_s, backoff_s: the first three arguments of :class:`RestartPolicy`.
        title: the group's name in messages.

    Attributes:
        parent: the group of which this group is a child; None for an outermost group.
        over: completes when all children have ended for good: with the SupervisionError if the group has given up, with None
            if it was ended on purpose.
        restarts: how often children were restarted, also because of the death of another child.
    """

    def __init__(
        self,
        supervisor: SupervisorOfGroup,
        runtime: Runtime,
        children: list[ActorRecord | SupervisionGroup],
        strategy: Strategy,
        limit: int,
        period_s: float,
        backoff_s: float,
        title: str,
    ) -> None:
        self.title = title
        self.strategy = strategy
        self.children = children
        self.parent: SupervisionGroup | None = None
        self.index = 0
        self.over: Future[SupervisionError | None] = Future()
        self.over.label = f"the end of {title}"
        self.restarts = 0
        self.is_over = False
        self._ending = False
        self._cause: BaseException | None = None
        self._runtime = runtime
        self._supervisor = supervisor
        self._clock = runtime.agent.clock
        self._submit = runtime.agent.submit
        self._given = (limit, period_s, backoff_s)
        states: list[State] = []
        for index, child in enumerate(children):
            if isinstance(child, SupervisionGroup):
                child.parent = self
                child.index = index
                states.append("up")
            else:
                child.family = self
                child.index = index
                states.append(_STATES.get(child.phase, "up"))
        self._siblings = RestartStrategy(states, strategy, self._account())
        self._siblings.restarts.note_alive(self._now())

    def _account(self) -> RestartPolicy:
        limit, period_s, backoff_s = self._given
        return RestartPolicy(limit, period_s, backoff_s, self._supervisor.draw)

    def _now(self) -> float:
        return self._clock.now()

    @property
    def state(self) -> str:
        """``"up"``, ``"restarting"``, ``"ending"``, ``"failed"`` or ``"ended"``."""
        if self.is_over:
            return "failed" if self.root()._siblings.failed else "ended"
        if self.root()._ending:
            return "ending"
        return "restarting" if self._siblings.busy or self._siblings.failed else "up"

    def actors(self) -> Iterator[ActorRecord]:
        """Yield all actors of the group and of the groups in it, in order."""
        for child in self.children:
            if isinstance(child, SupervisionGroup):
                yield from child.actors()
            else:
                yield child

    def root(self) -> SupervisionGroup:
        """Return the outermost group."""
        found = self
        while found.parent is not None:
            found = found.parent
        return found

    # -- events of children; the supervisor's lock is held ---------------------------------------------------

    def made(self, child: ActorRecord | SupervisionGroup) -> list[Action]:
        """Record that a child lives."""
        return self._carry_out(self._siblings.made(child.index, self._now()))

    def died(self, child: ActorRecord | SupervisionGroup, why: str) -> list[Action]:
        """Record that a child's incarnation has ended: it has died, or the group has ended it."""
        return self._carry_out(self._siblings.died(child.index, self._now(), f"{child.title}: {why}"))

    def departed(self, child: ActorRecord) -> list[Action]:
        """Record that a child is dead for good, and was ended on purpose."""
        actions = self._carry_out(self._siblings.departed(child.index, self._now()))
        root = self.root()
        if not root.is_over and all(each.phase == "dead" for each in root.actors()):
            actions.append(partial(root.close, None))
        return actions

    def lost(
        self, child: ActorRecord | SupervisionGroup, death: ActorDiedError | str, cause: BaseException | None
    ) -> list[Action]:
        """Record that a child is dead for good, because it cannot be made."""
        self._cause = self._cause or cause
        return self._carry_out(self._siblings.lost(child.index, self._now(), str(death)))

    # -- orders of the parent; the lock is held ----------------------------------------------------------------

    def bring_down(self) -> list[Action]:
        """End all children, the last first."""
        return self._carry_out(self._siblings.bring_down(self._now()))

    def bring_up(self) -> list[Action]:
        """Restart all children, in order."""
        return self._carry_out(self._siblings.bring_up(self._now(), self._account()))

    def end_all(self) -> list[Action]:
        """End all children for good, the last first. Only for an outermost group."""
        if self.is_over or self._ending:
            return []
        self._ending = True
        return self.bring_down()

    # -- orders ---------------------------------------------------------------------------------------------

    def _carry_out(self, orders: list[RestartOrder]) -> list[Action]:
        actions: list[Action] = []
        for order in orders:
            actions += self._one(order)
        return actions

    def _one(self, order: RestartOrder) -> list[Action]:
        if order.what == "wait":
            assert order.plan is not None
            due = partial(self._submit, partial(self._due, order.plan))
            return [partial(self._clock.after, order.seconds, due)]
        if order.what in ("end", "make"):
            child = self.children[order.child]
            if order.what == "end":
                if isinstance(child, SupervisionGroup):
                    return child.bring_down()
                why = f"it was ended with the other children of {self.title}, because a child had died"
                if self.root()._ending:
                    why = f"{self.title} was ended"
                return [partial(self._end_actor, child, child.epoch, why)]
            self.restarts += 1
            if isinstance(child, SupervisionGroup):
                return child.bring_up()
            child.held = False
            child.restarts.count += 1
            return [partial(self._submit, partial(self._supervisor.begin, child))]
        if self.parent is not None:
            if order.what == "up":
                return self.parent.made(self)
            if order.what == "failed" and self._siblings.hopeless:
                return self.parent.lost(self, f"{self.title}: {self._why()}", self._cause)
            return self.parent.died(self, self._why() if order.what == "failed" else "it has ended")
        if order.what == "failed":
            self.is_over = True
            return [self._give_up]
        return [self._close_ended] if order.what == "down" else []

    def _due(self, plan: RestartPlan) -> None:
        with self._supervisor.lock:
            actions = self._carry_out(self._siblings.due(plan, self._now()))
        perform(actions)

    def _why(self) -> str:
        """Return the reason why the group has given up."""
        restarts, why = self._siblings.restarts, self._siblings.why
        if not self._siblings.exceeded:
            return f"it has given up: {why}"
        before = restarts.causes()
        limit, period_s, _ = self._given
        allowed = "no restart" if limit == 0 else "1 restart" if limit == 1 else f"{limit} restarts"
        text = f"it has given up after {allowed} within {period_s:g} s (max_restarts={limit}): {why}"
        if len(before) > 1:
            listed = "".join(f"\n    {number}. {each}" for number, each in enumerate(before, 1))
            text += f"\n  these were the deaths that count:{listed}"
        return text

    def _cause_of(self) -> BaseException | None:
        inner = (child._cause_of() for child in self.children if isinstance(child, SupervisionGroup))
        return self._cause or next((each for each in inner if each is not None), None)

    # -- actions ----------------------------------------------------------------------------------------------

    def _end_actor(self, actor: ActorRecord, epoch: int, why: str) -> None:
        """End incarnation ``epoch`` of an actor, if it has not ended. The supervisor processes the end like any other."""
        supervisor = self._supervisor
        actions: list[Action] = []
        with supervisor.lock:
            if actor.phase == "dead" or actor.epoch != epoch:
                return  # the end was recorded before
            life = actor.life
            if life is None:  # no incarnation was begun
                actor.held = True
                actions = self.died(actor, why)
            else:
                life.ended_by_group = why
                process, worker = life.process, life.worker
        if life is None:
            perform(actions)
            return
        if worker is None:  # its process is starting; Supervisor._moved_in() ends it later
            self._submit(partial(supervisor.ended, actor, life, why))
            return

        def over(_: object = None) -> None:
            # If the actor has a process of its own, end the process: its resources must be free before the next process starts.
            if process is None:
                supervisor.ended(actor, life, why)
            else:
                self._runtime.spawner.kill(process)

        timer = self._clock.after(END_S, partial(self._submit, over))

        def gently(_: object) -> None:
            timer.cancel()
            self._submit(over)

        supervisor.end_there(life, "now", why).add_done_callback(gently)

    def _give_up(self) -> None:
        with self._supervisor.lock:
            why, cause = self._why(), self._cause_of()
        self._mark_all_dead(f"{self.title}, which it belongs to, has ended: {why}", cause)
        _log.error("%s: %s", self.title, why)
        self.close(SupervisionError(f"{self.title}: {why}", actor=self.title, cause=cause))

    def _close_ended(self) -> None:
        self._mark_all_dead(f"{self.title}, which it belongs to, was ended", None)
        self.close(None)

    def _mark_all_dead(self, text: str, cause: BaseException | None) -> None:
        for actor in reversed(list(self.actors())):
            self._supervisor.mark_dead(actor, text, cause=cause)

    def close(self, error: SupervisionError | None) -> None:
        """Record the end of this group and of all groups in it, and complete ``over``. The lock is not held."""
        for child in self.children:
            if isinstance(child, SupervisionGroup):
                child.close(error)
        self.is_over = True
        self.over.try_complete(error)
