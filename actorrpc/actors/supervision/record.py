"""What a supervisor knows of one actor, and which answers that gives. No I/O; its supervisor's lock guards it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from actorrpc.actors.spec.actor_spec import ActorSpec, Card, Location
from actorrpc.actors.spec.death_report import ActorState, Restarting
from actorrpc.actors.supervision.restart_policy import RestartPolicy
from actorrpc.errors import ActorDiedError
from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerKey

if TYPE_CHECKING:
    from actorrpc.actors.refs.snapshot import Snapshot
    from actorrpc.actors.spec.options import ActorOptions
    from actorrpc.actors.supervision.groups import SupervisionGroup

__all__ = ["ActorRecord", "LifetimeToken", "Phase", "RestartVerdict"]

_PATIENCE_S: Final = 30.0  # how long the one that places an actor may take to hear of a death

Phase = Literal["starting", "alive", "restarting", "ending", "dead"]
_SHOWN: Final = {
    "starting": "PENDING_CREATION",
    "alive": "ALIVE",
    "restarting": "RESTARTING",
    "ending": "ENDING",
    "dead": "DEAD",
}


class LifetimeToken:
    """Stands for an actor. It is the value of an RRef, and dies when no handle holds a fork of that any more.

    Args:
        drop: called with the actor's id then; only queues, as it may be called anywhere.
    """

    __slots__ = ("_drop", "actor_id")

    def __init__(self, drop: Callable[[int], None], actor_id: int) -> None:
        self._drop = drop
        self.actor_id = actor_id

    def __del__(self) -> None:
        self._drop(self.actor_id)


@dataclass(frozen=True, slots=True)
class RestartVerdict:
    """What is to follow the end of an incarnation.

    Attributes:
        again: another one, in ``wait_s`` seconds, or when its family says so.
        why_not: why there is none.
        before: how former ones ended, where that is a reason.
    """

    again: bool = False
    wait_s: float = 0.0
    why_not: str = ""
    before: tuple[str, ...] = ()


class ActorRecord:
    """One actor.

    Attributes:
        place: where it is to live: None for a process of its own, ``"turn"``, a WorkerKey, or another actor's route.
        epoch: counts incarnations; ``instance_id`` names the present one, 0 while there is none.
        worker: where the present incarnation lives or is being made.
        process: the name of the worker whose process the actor has to itself.
        unwanted: there is to be no further incarnation.
        orphaned: its last handle is gone: it ends as soon as it has come to life.
        killed: somebody has killed the present incarnation.
        answered: the present incarnation's end has been seen to.
        put_off_since: when the incarnation that is due was first put off; None if it has not been.
        state: what the next incarnation starts from; None where no checkpoint has come yet.
        state_number: which one of the present incarnation's checkpoints that is; 0: none of them.
        family: the supervision group that decides about its restarts, and ``index`` its place there.
        held: its next incarnation is not to be begun yet: the family will say when.
        moving: its incarnation is ended because its worker is to leave: the next one begins elsewhere, and does not count.
        drained: why its worker was asked to leave, where the present incarnation lives and does not move; empty if not.
        doomed: why the family ends the present incarnation; empty if it does not.
    """

    __slots__ = (
        "answered",
        "arguments",
        "card",
        "cls",
        "death",
        "doomed",
        "drained",
        "epoch",
        "family",
        "held",
        "index",
        "instance_id",
        "killed",
        "last",
        "location",
        "moving",
        "options",
        "orphaned",
        "phase",
        "place",
        "process",
        "put_off_since",
        "restarts",
        "state",
        "state_number",
        "unwanted",
        "waiters",
        "watchers",
        "worker",
        "worker_name",
    )

    def __init__(
        self,
        card: Card,
        cls: Snapshot,
        arguments: Snapshot | None,
        options: ActorOptions,
        place: Any,
        draw: Callable[[], float] | None = None,
    ) -> None:
        self.card = card
        self.cls: Snapshot | None = cls
        self.arguments = arguments
        self.options = options
        self.place = place
        self.restarts = RestartPolicy(
            options.max_restarts, options.restart_window_s, options.restart_backoff_s, draw
        )
        self.family: SupervisionGroup | None = None
        self.index = 0
        self.held = False
        self.moving = False
        self.drained = ""
        self.doomed = ""
        self.phase: Phase = "starting"
        self.epoch = 0
        self.instance_id = 0
        self.worker: WorkerKey | None = None
        self.worker_name = ""
        self.process: str | None = None
        self.location: Location | None = None
        self.state: Snapshot | None = None
        self.state_number = 0
        self.unwanted = False
        self.orphaned = False
        self.killed = False
        self.answered = 0
        self.put_off_since: float | None = None
        self.last: Restarting | None = None
        self.death: ActorDiedError | None = None
        #: (the incarnation that the asker knows to be gone, whether it waits for the next one, its future)
        self.waiters: list[tuple[int, bool, Future[Any]]] = []
        self.watchers: list[Future[ActorDiedError]] = []

    @property
    def title(self) -> str:
        """How messages name it."""
        return self.card.title

    def forget(self) -> None:
        """Let go of what only further incarnations would need: of the dead, only what is said of them is kept."""
        self.cls = self.arguments = self.state = self.place = self.location = self.family = None

    def spec(self) -> ActorSpec:
        """Return what its worker needs to make the present incarnation."""
        assert self.cls is not None
        return ActorSpec(
            actor_id=self.card.actor_id,
            instance_id=self.instance_id,
            epoch=self.epoch,
            cls=self.cls,
            arguments=self.arguments,
            info=self.card.info,
            options=self.options,
            card=self.card,
            state=self.state,
            alone=self.process is not None,
        )

    def keep(self, epoch: int, number: int, state: Snapshot) -> bool:
        """Keep a checkpoint, unless there is a later one; say whether incarnation ``epoch`` is the present one.

        Checkpoints may come in another order than they were made in. One with a higher number was begun later, and has
        in it whatever one with a lower number has.
        """
        if epoch != self.epoch:
            return False
        if number > self.state_number:
            self.state, self.state_number = state, number
        return True

    @property
    def is_due(self) -> bool:
        """Whether its next incarnation is to be begun."""
        return self.phase in ("starting", "restarting") and not self.instance_id and not self.held

    def put_off(self, now: float) -> bool:
        """Take the incarnation back that was to be made in a worker which is gone; say whether it is to be begun again.

        The spawner that has named that worker has not heard of its end yet: nothing has lived there, and no death is to be
        counted. Not where the actor can only live in that worker, nor after half a minute.
        """
        if isinstance(self.place, WorkerKey):
            return False
        if self.put_off_since is None:
            self.put_off_since = now
        if now - self.put_off_since > _PATIENCE_S:
            return False
        self.instance_id = 0
        return True

    def come_to_life(self, location: Location, now: float) -> None:
        """Record that the present incarnation lives, there."""
        self.phase = "alive"
        self.put_off_since = None
        self.location = location
        self.restarts.came_to_life(now)
        if not self.options.max_restarts and not self.card.info.has_checkpoint:
            self.cls = self.arguments = None  # and whatever only they keep alive

    def verdict(self, now: float, text: str, bound: str) -> RestartVerdict:
        """Decide what is to follow, where nobody wanted the end. To be asked once for each incarnation.

        Args:
            text: how it ended.
            bound: why it can only live where nothing lives any more; empty where it can live elsewhere.
        """
        if self.moving:
            return RestartVerdict(again=True)
        if bound:
            return RestartVerdict(why_not=f"not restarted: {bound}")
        if self.family is not None:
            return RestartVerdict(again=True)
        wait = self.restarts.next(now, text)
        if wait is None:
            return RestartVerdict(why_not=self.restarts.why_not(), before=tuple(self.restarts.causes()[:-1]))
        return RestartVerdict(again=True, wait_s=wait)

    def lose(self, last: Restarting) -> None:
        """Record that the present incarnation is over, and another one is to follow."""
        self.phase = "restarting"
        self.epoch += 1
        self.state_number = 0
        self.put_off_since = None
        self.instance_id = 0
        self.worker = None
        self.moving = False
        self.drained = ""
        self.last = last
        self.held = self.family is not None

    def answer(self, after: int, wait: bool) -> Location | Restarting | None:
        """Return what is to be said to one who knows that incarnation ``after`` is gone; None: nothing yet."""
        if self.epoch <= after:
            return None  # the death has not been seen here yet
        if self.location is not None:
            return self.location
        return None if wait else self.last

    def take_answered(self) -> list[tuple[Future[Any], Location | Restarting]]:
        """Return the waiters for which there is an answer now, with it, and forget them."""
        ready, left = [], []
        for after, wait, future in self.waiters:
            found = self.answer(after, wait)
            if found is None:
                left.append((after, wait, future))
            else:
                ready.append((future, found))
        self.waiters = left
        return ready

    def row(self, supervisor: str) -> ActorState:
        """Return its row in ``list_actors()``."""
        cause = ""
        if self.death is not None:
            cause = str(self.death.args[0])
        elif self.last is not None:
            cause = self.last.text
        location = self.location
        return ActorState(
            actor_id=self.card.actor_id,
            class_name=self.card.info.name,
            name=self.card.name,
            namespace=self.card.namespace,
            state=_SHOWN[self.phase],
            worker=self.worker_name if self.phase != "dead" else "",
            pid=location.pid if location is not None else 0,
            restarts=self.restarts.count,
            death_cause=cause,
            detached=self.options.lifetime == "detached",
            supervisor=supervisor,
            instance_id=self.instance_id,
        )
