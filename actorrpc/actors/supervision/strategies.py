"""Decides when dead actors are restarted, and with which other children of their supervision group. Pure computation.

The caller passes the time, and carries out the decisions. :class:`RestartPolicy` counts restarts in a sliding window. The first
restart in a row is immediate. Each further restart waits, at first ``backoff_s`` and then twice as long each time, up to
:data:`MAX_BACKOFF_S` (or ``backoff_s``, if it is longer). A row ends when the actor has lived longer than :data:`QUIET_S` and
than the last wait. Waits are shortened at random, by up to the fraction :data:`JITTER`, so that actors that died together do not
restart at the same moment.

:class:`RestartStrategy` decides for the children of a supervision group. The owner, a SupervisionGroup, reports events of its
children and the time, and gets orders (:class:`RestartOrder`). A child is a number here, from 0 in the order in which children
start; actors and groups are treated alike. A :class:`RestartPlan` handles a death: it ends its members one by one, the last
first, waits for the end of the back-off, and restarts them one by one, in order. With ``one_for_one`` there may be several
independent plans; otherwise there is one plan, which grows when another child dies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "JITTER",
    "MAX_BACKOFF_S",
    "QUIET_S",
    "STRATEGIES",
    "RestartOrder",
    "RestartPlan",
    "RestartPolicy",
    "RestartStrategy",
    "Strategy",
]

MAX_BACKOFF_S: Final = 10.0
QUIET_S: Final = 10.0
JITTER: Final = 0.5
_LISTED: Final = 10  # greatest number of causes in a message
_CUT: Final = 200  # greatest length of a cause, in characters


class RestartPolicy:
    """Decides on one actor's restarts. Not thread-safe.

    Args:
        limit: how many restarts within the window; -1: no limit; 0: none.
        window_s: the length of the window in seconds; None: the whole life of the actor.
        backoff_s: the wait before the second restart in a row, in seconds.
        draw: returns numbers from 0 to 1, by which waits are shortened; None: they are not shortened.
    """

    def __init__(
        self,
        limit: int = 0,
        window_s: float | None = None,
        backoff_s: float = 0.1,
        draw: Callable[[], float] | None = None,
    ) -> None:
        self.limit = limit
        self.window_s = window_s
        #: The number of restarts.
        self.count = 0
        self._backoff = backoff_s
        self._draw = draw
        self._causes: deque[tuple[float, str]] = deque(maxlen=_LISTED)
        self._times: deque[float] = deque()
        self._in_row = 0
        self._last_wait = 0.0
        self._lived_since: float | None = None

    def note_alive(self, now: float) -> None:
        """Record that the actor lives (again)."""
        self._lived_since = now

    def next(self, now: float, why: str = "") -> float | None:
        """Return in how many seconds an actor that has died at ``now`` is restarted; None: never.

        If a number is returned, a restart is counted.

        Args:
            why: how the actor died, for :meth:`causes`; only the first line is kept.
        """
        if why:
            self._causes.append((now, why.partition("\n")[0][:_CUT]))
        lived, self._lived_since = self._lived_since, None
        if self.limit == 0:
            return None
        if self.limit > 0:
            if self.window_s is None:
                if self.count >= self.limit:
                    return None
            else:
                while self._times and self._times[0] <= now - self.window_s:
                    self._times.popleft()
                if len(self._times) >= self.limit:
                    return None
                self._times.append(now)
        if lived is not None and now - lived > max(QUIET_S, self._last_wait):
            self._in_row = 0
        wait = 0.0
        if self._in_row:
            # The exponent is bounded, because 2.0 ** 1024 raises OverflowError.
            wait = min(self._backoff * 2.0 ** min(self._in_row - 1, 60), max(MAX_BACKOFF_S, self._backoff))
            if self._draw is not None:
                wait *= 1.0 - JITTER * self._draw()
        self._in_row += 1
        self._last_wait = wait
        self.count += 1
        return wait

    def why_not(self) -> str:
        """Say, for a message, why there is no further restart."""
        if self.limit == 0:
            return "not restarted: max_restarts is 0"
        within = "" if self.window_s is None else f" within {self.window_s:g} s"
        times = "once" if self.limit == 1 else f"{self.limit} times"
        return f"not restarted again: it was restarted {times}{within}, and max_restarts is {self.limit}"

    def causes(self) -> list[str]:
        """Return the last causes of death, oldest first: within the window before the last death, at most ten."""
        if not self._causes:
            return []
        since = -1.0 if self.window_s is None else self._causes[-1][0] - self.window_s
        return [why for at, why in self._causes if at > since]


Strategy = Literal["one_for_one", "one_for_all", "rest_for_one"]
STRATEGIES: Final = ("one_for_one", "one_for_all", "rest_for_one")
# "up" and "making": the child has an incarnation, whose end will be reported once; "ending": the child's end was ordered;
# "down": the child has no incarnation and should get another; "departed": the child has left the group for good.
State = Literal["up", "making", "ending", "down", "departed"]


class RestartPlan:
    """Ends some children, and then, if its ``goal`` is ``"up"``, restarts them.

    Attributes:
        members: the children.
        goal: ``"up"``; ``"down"`` and ``"fail"``: the children only end, as ordered or because the group gives up.
        stage: ``"ending"``, then ``"making"``.
        held: no child is restarted yet, because the back-off has not ended.
    """

    __slots__ = ("goal", "held", "members", "stage")

    def __init__(
        self, members: Iterable[int], goal: Literal["up", "down", "fail"], held: bool = False
    ) -> None:
        self.members = set(members)
        self.goal = goal
        self.stage = "ending"
        self.held = held


@dataclass(frozen=True, slots=True)
class RestartOrder:
    """One step for the owner to carry out.

    Attributes:
        what: ``"end"`` or ``"make"`` the ``child``; ``"wait"`` for ``seconds``, and then call ``due(plan)``; or tell the parent
            group that all children live (``"up"``), that all have ended as ordered (``"down"``), or that all have ended because
            the group has given up (``"failed"``).
    """

    what: Literal["end", "make", "wait", "up", "down", "failed"]
    child: int = -1
    seconds: float = 0.0
    plan: RestartPlan | None = None


class RestartStrategy:
    """Decides for the children of one group. Not thread-safe.

    Methods that record an event, or an order of the owner, return the orders that the owner has to carry out next.

    Args:
        states: the states of the children at the beginning: ``"up"`` or ``"making"``.
        restarts: how many restarts are allowed, and when.

    Attributes:
        failed: the group has given up, and was not restarted since.
        exceeded: the group has given up because there were too many deaths.
        hopeless: a child cannot be made at all, so restarting the group is useless.
        why: how the child died whose death exceeded the limit, or why a child cannot be made.
    """

    def __init__(self, states: Iterable[State], strategy: Strategy, restarts: RestartPolicy) -> None:
        self._states: list[State] = list(states)
        self._strategy = strategy
        self._plans: list[RestartPlan] = []
        self._rising = False  # the parent group waits until all children are up
        self.restarts = restarts
        self.failed = self.exceeded = self.hopeless = False
        self.why = ""

    @property
    def states(self) -> tuple[State, ...]:
        """The states of the children, in order."""
        return tuple(self._states)

    @property
    def busy(self) -> bool:
        """Whether children are being ended or restarted."""
        return bool(self._plans)

    # -- events of children ------------------------------------------------------------------------

    def made(self, child: int, now: float) -> list[RestartOrder]:
        """Record that a child lives."""
        if self._states[child] != "making":
            return []  # its end was ordered
        self._states[child] = "up"
        return self._go(now)

    def died(self, child: int, now: float, why: str) -> list[RestartOrder]:
        """Record the end of a child's incarnation: the child has died, or its end was ordered."""
        state = self._states[child]
        if state in ("departed", "down"):
            return []
        self._states[child] = "down"
        plan = next((each for each in self._plans if child in each.members), None)
        if state == "ending" or (plan is not None and plan.stage == "ending"):
            return self._go(now)  # the child's end was ordered, or planned
        wait = self.restarts.next(now, why)
        if wait is None:
            self.exceeded = True
            return self._fail(now, why)
        members = self._concerned(child)
        if self._strategy == "one_for_one":
            if plan is not None:
                plan.members.discard(child)
        else:
            for each in self._plans:
                members.update(one for one in each.members if self._states[one] != "up")
            self._plans.clear()
        plan = RestartPlan(members, "up", held=wait > 0)
        self._plans.append(plan)
        orders = [RestartOrder("wait", seconds=wait, plan=plan)] if wait > 0 else []
        return orders + self._go(now)

    def departed(self, child: int, now: float) -> list[RestartOrder]:
        """Record that a child is dead for good, because it was ended on purpose: the other children continue."""
        if self._states[child] == "departed":
            return []
        self._states[child] = "departed"
        for each in self._plans:
            each.members.discard(child)
        return self._go(now)

    def lost(self, child: int, now: float, why: str) -> list[RestartOrder]:
        """Record that a child cannot be made at all: the group can never be complete, and gives up."""
        if self._states[child] == "departed":
            return []
        self._states[child] = "departed"
        self.hopeless = True
        for each in self._plans:
            each.members.discard(child)
        return self._fail(now, why)

    def due(self, plan: RestartPlan, now: float) -> list[RestartOrder]:
        """Record that the back-off of a plan has ended, after the time of its order ``"wait"``."""
        plan.held = False
        return self._go(now)

    # -- orders from the owner ---------------------------------------------------------------------------

    def bring_down(self, now: float) -> list[RestartOrder]:
        """End all children, the last first; the order ``"down"`` follows when all have ended."""
        self.failed = self.exceeded = self._rising = False
        self._plans = [RestartPlan(self._left_over(), "down")]
        return self._go(now)

    def bring_up(self, now: float, restarts: RestartPolicy) -> list[RestartOrder]:
        """Restart children that have not departed, with a new count of restarts; the order ``"up"`` follows when they live."""
        self.failed = self.exceeded = False
        self.why = ""
        self.restarts = restarts
        self._rising = True
        self._plans = [RestartPlan(self._left_over(), "up")]
        return self._go(now)

    def _left_over(self) -> list[int]:
        return [child for child, state in enumerate(self._states) if state != "departed"]

    def _concerned(self, child: int) -> set[int]:
        if self._strategy == "one_for_one":
            return {child}
        first = 0 if self._strategy == "one_for_all" else child
        return {each for each in self._left_over() if each >= first}

    def _fail(self, now: float, why: str) -> list[RestartOrder]:
        if self.failed or any(each.goal == "down" for each in self._plans):
            return self._go(now)
        self.failed, self.why = True, why
        self._rising = False
        self._plans = [RestartPlan(self._left_over(), "fail")]
        return self._go(now)

    # -- next steps ----------------------------------------------------------------------------------------

    def _go(self, now: float) -> list[RestartOrder]:
        """Take the next step of every plan."""
        orders: list[RestartOrder] = []
        busy = bool(self._plans)
        for plan in list(self._plans):
            step = self._end_next(plan) if plan.stage == "ending" else None
            if plan.stage == "making":
                step = self._make_next(plan)
            if step is not None:
                orders.append(step)
        if busy and not self._plans and not self.failed:
            self.restarts.note_alive(now)
            if self._rising and all(each in ("up", "departed") for each in self._states):
                self._rising = False
                orders.append(RestartOrder("up"))
        return orders

    def _end_next(self, plan: RestartPlan) -> RestartOrder | None:
        states = self._states
        if any(states[child] == "ending" for child in plan.members):
            return None
        living = [child for child in plan.members if states[child] != "down"]
        if living:
            last = max(living)
            states[last] = "ending"
            return RestartOrder("end", last)
        if plan.goal == "up":
            plan.stage = "making"
            return None
        self._plans.remove(plan)
        return RestartOrder("failed" if plan.goal == "fail" else "down")

    def _make_next(self, plan: RestartPlan) -> RestartOrder | None:
        states = self._states
        if plan.held or any(states[child] == "making" for child in plan.members):
            return None
        down = [child for child in plan.members if states[child] == "down"]
        if down:
            first = min(down)
            states[first] = "making"
            return RestartOrder("make", first)
        self._plans.remove(plan)
        return None
