"""Supervision groups: actors that are restarted together, as Erlang's supervisors do.

    store = Store.options(max_restarts=-1).remote()
    front = Front.options(max_restarts=-1).remote(store)
    tree = supervise([store, front], strategy="rest_for_one", max_restarts=3, period=60)

When a child dies, the group makes it again, alone or with other children (``strategy``), where it was placed and with the same
arguments; handles stay valid. After too many deaths, the group gives up: all of its children end, and the group above it, if
there is one, treats it as a dead child.

``supervision/strategies.py`` decides, ``supervision/groups.py`` carries the decisions out; this module is the interface.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

from actorrpc.actors.client.actor_class import Actor
from actorrpc.actors.client.handle import ActorHandle, route_of
from actorrpc.actors.context import Runtime, runtime
from actorrpc.actors.groups.group import ActorGroup, handles_of
from actorrpc.actors.supervision.groups import SupervisionGroup, perform
from actorrpc.actors.supervision.record import ActorRecord
from actorrpc.actors.supervision.strategies import STRATEGIES, Strategy
from actorrpc.actors.supervision.supervisor import Supervisor
from actorrpc.errors import ConfigError, SerializationError, SupervisionError, WrongTypeError
from actorrpc.futures import Future
from actorrpc.validation import choice, integer, number, text

__all__ = ["Supervision", "supervise"]

_numbers = itertools.count(1)
_END_S: Final = 60.0


class Supervision:
    """A supervision group, as :func:`supervise` makes it. Thread-safe; cannot be sent to other processes.

    This object keeps the children alive, as their handles do. The group exists as long as it has living children, even if this
    object was freed. The end of a ``with`` block of this object ends the group.
    """

    def __init__(self, family: SupervisionGroup, children: tuple[Any, ...], here: Runtime) -> None:
        self._family = family
        self._children = children
        self._runtime = here

    @property
    def children(self) -> tuple[ActorHandle[Any] | Supervision, ...]:
        """The children, ended children included, in the order in which they start: handles, and groups."""
        return self._children

    @property
    def strategy(self) -> Strategy:
        """Which children a death restarts: see :func:`supervise`."""
        return self._family.strategy

    @property
    def state(self) -> str:
        """``"up"``; ``"restarting"``: children are being ended or made again; ``"ending"``; ``"failed"``, or ``"ended"``."""
        with self._runtime.supervisor.lock:
            return self._family.state

    @property
    def restarts(self) -> int:
        """How often children of this group were made again, also children that had not died themselves."""
        return self._family.restarts

    def monitor(
        self, callback: Callable[[SupervisionError], Any] | None = None
    ) -> Future[SupervisionError | None]:
        """Watch the group: the future completes, once, when the group has ended for good.

        Its value is the SupervisionError if the group, or a group above it, has given up; None if the group was ended, all of
        its children were ended, or this process leaves.

        Args:
            callback: called with the SupervisionError, on a pool thread; not called for None.
        """
        if callback is not None and not callable(callback):
            raise TypeError(f"callback must be callable, not a {type(callback).__name__}")
        watched: Future[SupervisionError | None] = Future()
        watched.label = self._family.over.label
        submit = self._runtime.agent.submit

        def over(done: Future[SupervisionError | None]) -> None:
            error = done.value()
            watched.try_complete(error)
            notify = callback
            if notify is not None and error is not None:
                submit(lambda: notify(error))

        self._family.over.add_done_callback(over)
        return watched

    def end(self, timeout: float = _END_S) -> None:
        """End all children for good, the last first, each when the child after it has ended. Idempotent.

        ``on_stop`` runs in children that are not busy. If a child with a process of its own takes more than 5 s, the process is
        killed. Calls that have not ended raise ActorDiedError.

        Args:
            timeout: how many seconds to wait for the end. After that, the group continues to end.

        Raises:
            ConfigError: this group is a child of another group: end that group.
            RpcTimeoutError: the group has not ended in time.
        """
        with self._runtime.supervisor.lock:
            if self._family.parent is not None:
                raise ConfigError(
                    f"{self!r} is a child of {self._family.parent.title}, which would restart it: end that group"
                )
            actions = self._family.end_all()
        perform(actions)
        self.monitor().wait(timeout)

    def __enter__(self) -> Supervision:
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def __repr__(self) -> str:
        return f"<Supervision {self._family.title}: {self._family.strategy}, {len(self._children)} children>"

    def __reduce__(self) -> NoReturn:
        raise SerializationError(
            f"{self!r} stays in the process that made it; send the handles of its children"
        )


def supervise(
    children: Iterable[ActorHandle[Any] | Actor | ActorGroup[Any] | Supervision],
    *,
    strategy: Strategy = "one_for_one",
    max_restarts: int = 3,
    period: float = 60.0,
    backoff: float = 0.1,
    name: str | None = None,
    on_failure: Callable[[SupervisionError], Any] | None = None,
) -> Supervision:
    """Put actors into a supervision group, which decides about their restarts from now on.

    The terms are Erlang's, but the children are handles, not specifications: the actors are made first, and may live anywhere.
    A child that dies is made again where it was placed, with the same arguments, and with its state if its class has
    ``checkpoint()`` and ``restore()``. The child's ``max_restarts`` must not be 0; only the group's is applied. A child that is
    ended on purpose (``kill()``, ``exit_actor()``, the end of its last handle) leaves the group. An error in a restart is another
    death. An error in the first start, or the loss of the child's place, makes the group and all groups above it give up.

    When the group gives up, its children end, the last first. A group above it treats this as the death of a child, and makes the
    group with its children again if it can. Otherwise calls of the actors fail with an ActorDiedError that lists the deaths.
    Use ``strategy="one_for_all"`` and ``max_restarts=0`` for actors that must all end when an actor dies.

    Args:
        children: handles of actors that this process has made, other groups, and ActorGroups, which count as their members.
            Each can be in one group only. Their order is the order of starts.
        strategy: which children a death restarts: ``"one_for_one"``: only the child that died; ``"one_for_all"``: all children;
            ``"rest_for_one"``: the child that died and all after it. They end one by one, in reverse order, and start in order.
        max_restarts: how many deaths the group accepts within ``period``; at the next death it gives up.
        period: the length of that time, in seconds.
        backoff: seconds before the second restart in a row, doubled up to 10 s, and shortened at random by up to a half.
        name: the name of the group in messages.
        on_failure: called with the SupervisionError, on a pool thread, when this group or a group above it has given up.

    Raises:
        TypeError: a child cannot be supervised.
        ConfigError: a child belongs to another process or to another group, or has ``max_restarts=0``; or a value is wrong.
        ActorDiedError: a child is dead already.
    """
    choice("strategy", strategy, of=STRATEGIES)
    right = "an int of at least 0 (a group that never gives up does not report that something is wrong)"
    limit = integer("max_restarts of a group", max_restarts, least=0, right=right)
    period_s = number("period", period, unit="seconds", above=True)
    backoff_s = number("backoff", backoff, unit="seconds")
    text("name", name, none=True, empty=False, error=WrongTypeError)
    if on_failure is not None and not callable(on_failure):
        raise WrongTypeError(f"on_failure must be callable, not a {type(on_failure).__name__}")
    given = tuple(_flat(children))
    if not given:
        raise ConfigError("a supervision group needs at least one child")
    here = runtime()
    title = f"supervision group {name!r}" if name is not None else f"supervision group #{next(_numbers)}"
    supervisor: Supervisor = here.supervisor
    with supervisor.lock:
        found = [_child(here, each) for each in given]
        if len({id(each) for each in found}) < len(found):
            raise ConfigError("an actor, or a group, is given twice: each can be in one group only, and once")
        family = SupervisionGroup(supervisor, here, found, strategy, limit, period_s, backoff_s, title)
    made = Supervision(family, given, here)
    if on_failure is not None:
        _ = made.monitor(on_failure)
    return made


def _flat(children: Any) -> Iterable[ActorHandle[Any] | Supervision]:
    if isinstance(children, (ActorHandle, Supervision, str)) or not isinstance(children, Iterable):
        raise WrongTypeError(f"supervise() takes a list of children, not {children!r}")
    for each in children:
        if isinstance(each, ActorGroup):
            yield from handles_of(each)
        elif isinstance(each, (ActorHandle, Supervision)):
            yield each
        else:
            raise WrongTypeError(
                f"supervise() takes handles of actors, groups of them, and supervision groups, not {each!r}"
            )


def _child(here: Runtime, given: ActorHandle[Any] | Supervision) -> ActorRecord | SupervisionGroup:
    """Return the record of a child; the supervisor's lock is held."""
    if isinstance(given, Supervision):
        family = given._family
        if given._runtime is not here or family.state not in ("up", "restarting"):
            raise ConfigError(f"{given!r} has ended")
        if family.parent is not None:
            raise ConfigError(f"{given!r} is a child of {family.parent.title} already")
        return family
    descriptor = route_of(given).descriptor
    if descriptor.supervisor != here.references.me:
        raise ConfigError(
            f"{descriptor.title} is supervised by worker {descriptor.supervisor_name!r}, which made it: call supervise() there"
        )
    supervisor: Supervisor = here.supervisor
    actor = supervisor.known(descriptor.actor_id)
    if actor is None:
        raise supervisor.death_of(descriptor.actor_id)
    if actor.family is not None:
        raise ConfigError(f"{descriptor.title} is a child of {actor.family.title} already")
    if not actor.options.max_restarts:
        raise ConfigError(
            f"{descriptor.title} was made with max_restarts=0, the default: its constructor's arguments were not kept, and calls "
            "to it do not wait for a restart. Make it with .options(max_restarts=-1); in a group, the group's max_restarts counts"
        )
    return actor
