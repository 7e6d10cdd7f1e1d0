"""Families: supervision groups as the supervisor knows them. They carry out what :mod:`actorrpc.actors.siblings` decides.

A family is told by the supervisor what happens to its children, always under the supervisor's lock, which guards
everything here. It gives back deeds: what is to be done about that when the lock has been released. Nothing here waits,
and no user code is called but by ``over``, a future, which is completed as a deed.

Families keep nobody alive: children are what the supervisor knows of actors, not handles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from actorrpc.actors.restarts import Restarts
from actorrpc.actors.siblings import Order, Plan, Siblings, State, Strategy
from actorrpc.errors import SupervisionError
from actorrpc.futures import Future

if TYPE_CHECKING:
    from actorrpc.actors.supervised import Supervised
    from actorrpc.actors.supervisor import Supervisor

__all__ = ["Deed", "Family", "perform"]

Deed = Callable[[], object]
_log = logging.getLogger("actorrpc.actors")
_STATES: Final[dict[str, State]] = {"starting": "making", "restarting": "making"}


def perform(deeds: list[Deed]) -> None:
    """Do what is to be done; the supervisor's lock is not held."""
    for deed in deeds:
        deed()


class Family:
    """One supervision group.

    Args:
        children: actors and other families, in the order in which they start. All are this supervisor's, and in no
            family yet; their lock is held.
        title: how messages call the group.

    Attributes:
        parent: the family that this one is a child of.
        over: completes with the SupervisionError when the group has given up for good.
        ended: completes when all children have ended because :meth:`end` was called, or the group has given up.
        restarts: how often children have been made again because of a death.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        children: list[Supervised | Family],
        strategy: Strategy,
        limit: int,
        period_s: float,
        backoff_s: float,
        title: str,
    ) -> None:
        self.title = title
        self.strategy = strategy
        self.children = children
        self.parent: Family | None = None
        self.index = 0
        self.over: Future[SupervisionError] = Future()
        self.over.label = f"the failure of {title}"
        self.ended: Future[None] = Future()
        self.ended.label = f"the end of {title}"
        self.restarts = 0
        self.is_over = False
        self._cause: BaseException | None = None
        self._supervisor = supervisor
        self._given = (limit, period_s, backoff_s)
        states: list[State] = []
        for index, child in enumerate(children):
            if isinstance(child, Family):
                child.parent = self
                child.index = index
                states.append("up" if not child._siblings.busy else "making")
                child._siblings.watched()
            else:
                child.family = self
                child.index = index
                states.append(_STATES.get(child.phase, "up"))
        self._siblings = Siblings(states, strategy, self._account())
        self._siblings.restarts.came_to_life(self._now())

    def _account(self) -> Restarts:
        limit, period_s, backoff_s = self._given
        return Restarts(limit, period_s, backoff_s, self._supervisor.draw)

    def _now(self) -> float:
        return self._supervisor.now()

    @property
    def state(self) -> str:
        """``"up"``, ``"restarting"``, ``"failed"`` or ``"ended"``."""
        if self.over.done():
            return "failed"
        if self.is_over:
            return "ended"
        return "restarting" if self._siblings.busy or self._siblings.failed else "up"

    def actors(self) -> Iterator[Supervised]:
        """Yield all actors of the family and of those in it, in their order."""
        for child in self.children:
            if isinstance(child, Family):
                yield from child.actors()
            else:
                yield child

    def root(self) -> Family:
        """Return the family that nobody is above."""
        found = self
        while found.parent is not None:
            found = found.parent
        return found

    # -- news of children; the supervisor's lock is held ---------------------------------------------------

    def made(self, child: Supervised | Family) -> list[Deed]:
        """Take note that a child lives."""
        return self._carry_out(self._siblings.made(child.index, self._now()))

    def died(self, child: Supervised | Family, why: str) -> list[Deed]:
        """Take note that a child's incarnation is over, whoever has ended it."""
        return self._carry_out(self._siblings.died(child.index, self._now(), f"{child.title}: {why}"))

    def left(self, child: Supervised) -> list[Deed]:
        """Take note that a child is dead for good, as was wanted."""
        return self._carry_out(self._siblings.left(child.index, self._now()))

    def lost(self, child: Supervised, why: str, cause: BaseException | None) -> list[Deed]:
        """Take note that a child is dead for good, as it cannot be made."""
        self._cause = self._cause or cause
        return self._carry_out(self._siblings.lost(child.index, self._now(), f"{child.title}: {why}"))

    # -- what is wanted of it; the lock is held -------------------------------------------------------------

    def bring_down(self) -> list[Deed]:
        """End all children, the last first."""
        return self._carry_out(self._siblings.bring_down(self._now()))

    def bring_up(self) -> list[Deed]:
        """Make all children again, the first first."""
        return self._carry_out(self._siblings.bring_up(self._now(), self._account()))

    def end(self) -> list[Deed]:
        """End all children for good, the last first. Only for a family that nobody is above."""
        if self.is_over:
            return []
        self.is_over = True
        return self.bring_down()

    # -- orders ---------------------------------------------------------------------------------------------

    def _carry_out(self, orders: list[Order]) -> list[Deed]:
        deeds: list[Deed] = []
        for order in orders:
            deeds += self._one(order)
        return deeds

    def _one(self, order: Order) -> list[Deed]:
        if order.what == "wait":
            assert order.plan is not None
            return [partial(self._supervisor.later, order.seconds, partial(self._due, order.plan))]
        if order.what in ("end", "make"):
            child = self.children[order.child]
            if order.what == "end":
                if isinstance(child, Family):
                    return child.bring_down()
                why = f"it was ended with the others of {self.title}, of which one had died"
                if self.is_over:
                    why = f"{self.title} was ended"
                return [partial(self._supervisor.bring_down, child, child.epoch, why)]
            self.restarts += 1
            if isinstance(child, Family):
                return child.bring_up()
            child.held = False
            child.restarts.count += 1
            return [partial(self._supervisor.bring_up, child)]
        if self.parent is not None:
            if order.what == "up":
                return self.parent.made(self)
            return self.parent.died(self, self._why() if order.what == "failed" else "it has ended")
        if order.what == "failed":
            self.is_over = True
            return [self._give_up]
        return [self._bury] if order.what == "down" and self.is_over else []

    def _due(self, plan: Plan) -> None:
        with self._supervisor.lock:
            deeds = self._carry_out(self._siblings.due(plan, self._now()))
        perform(deeds)

    def _why(self) -> str:
        """Say why it has given up."""
        restarts, why = self._siblings.restarts, self._siblings.why
        before = restarts.causes()
        if not before or not why.startswith(before[-1]):  # it was not one death too many
            return f"it has given up: {why}"
        limit, period_s, _ = self._given
        allowed = "no restart" if limit == 0 else "1 restart" if limit == 1 else f"{limit} restarts"
        text = f"it has given up, as {allowed} within {period_s:g} s did not do (max_restarts={limit}): {why}"
        if len(before) > 1:
            listed = "".join(f"\n    {number}. {each}" for number, each in enumerate(before, 1))
            text += f"\n  these were the deaths that count:{listed}"
        return text

    def _cause_of(self) -> BaseException | None:
        inner = (child._cause_of() for child in self.children if isinstance(child, Family))
        return self._cause or next((each for each in inner if each is not None), None)

    def _give_up(self) -> None:
        with self._supervisor.lock:
            why, cause = self._why(), self._cause_of()
            self._end_inner()
        for actor in reversed(list(self.actors())):
            self._supervisor.bury(actor, f"{self.title}, which it belongs to, has ended: {why}", cause)
        _log.error("%s: %s", self.title, why)
        error = SupervisionError(f"{self.title}: {why}", actor=self.title, cause=cause)
        if self.over._claim():
            self.over._finish(error, None)
        if self.ended._claim():
            self.ended._finish(None, None)

    def _bury(self) -> None:
        with self._supervisor.lock:
            self._end_inner()
        for actor in reversed(list(self.actors())):
            self._supervisor.bury(actor, f"{self.title}, which it belongs to, was ended", None)
        if self.ended._claim():
            self.ended._finish(None, None)

    def _end_inner(self) -> None:
        self.is_over = True
        for child in self.children:
            if isinstance(child, Family):
                child._end_inner()
