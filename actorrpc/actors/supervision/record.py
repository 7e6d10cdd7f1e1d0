"""A supervisor's record of one actor, with decisions, answers and texts that depend on it.

No I/O; the supervisor's lock guards records.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from actorrpc import _time
from actorrpc._exceptions import CAUSE, TRACEBACK, is_a, line_of, notes_of
from actorrpc.actors.spec.actor_spec import (
    IN_RESTORE,
    ActorDescriptor,
    ActorSpec,
    ActorState,
    DeathReport,
    Location,
    Restarting,
)
from actorrpc.actors.supervision.strategies import RestartPolicy
from actorrpc.errors import (
    ActorDiedError,
    ConfigError,
    PlacementError,
    RemoteError,
    RemoteTraceback,
    SerializationError,
    UnplacedActorError,
)
from actorrpc.futures import Future
from actorrpc.serialization import exceptions
from actorrpc.wire.identity import WorkerKey

if TYPE_CHECKING:
    from actorrpc.actors.refs.snapshot import Snapshot
    from actorrpc.actors.spec.options import ActorOptions
    from actorrpc.actors.supervision.groups import SupervisionGroup

__all__ = ["ActorRecord", "Incarnation", "LifetimeToken", "Phase", "RestartVerdict", "new_id", "why_not_made"]

_PATIENCE_S: Final = 30.0  # how long the spawner may take to learn of the end of a worker

Phase = Literal["starting", "alive", "restarting", "ending", "dead"]
_SHOWN: Final = {
    "starting": "PENDING_CREATION",
    "alive": "ALIVE",
    "restarting": "RESTARTING",
    "ending": "ENDING",
    "dead": "DEAD",
}

# Numbers of actors and incarnations start at random. They grow in steps that are odd, so that no number occurs twice, and large,
# so that actors made together have different-looking numbers. A random number from the system would release the GIL each time.
_STEP: Final = 0x9E3779B97F4A7C15
_TOP: Final = 1 << 63
_numbers = itertools.count()


def _draw_numbers() -> None:
    global _numbers
    _numbers = itertools.count(int.from_bytes(os.urandom(8), "little"))


_draw_numbers()
os.register_at_fork(after_in_child=_draw_numbers)


def new_id() -> int:
    """Return a unique number for an actor or an incarnation."""
    return next(_numbers) * _STEP % _TOP | _TOP


class LifetimeToken:
    """The value of an RRef that all handles of an actor refer to, except weak handles; freed after the last of these handles.

    Args:
        drop: called with the actor's id when the token is freed. It only queues the id, because any thread may free the token.
    """

    __slots__ = ("_drop", "actor_id")

    def __init__(self, drop: Callable[[int], None], actor_id: int) -> None:
        self._drop = drop
        self.actor_id = actor_id

    def __del__(self) -> None:
        self._drop(self.actor_id)


@dataclass(frozen=True, slots=True)
class RestartVerdict:
    """The supervisor's decision about the end of an incarnation.

    Attributes:
        again: another incarnation follows, in ``wait_s`` seconds, or when the supervision group orders it.
        why_not: why no other incarnation follows.
        before: how earlier incarnations ended, if there were too many.
    """

    again: bool = False
    wait_s: float = 0.0
    why_not: str = ""
    before: tuple[str, ...] = ()


class Incarnation:
    """One incarnation of an actor, from the decision to make it until its end was processed.

    Attributes:
        id: its unique number.
        worker, worker_name: where it lives or is being made; None and empty until the worker is known.
        process: the name of its worker, if it is alone in the worker's process; otherwise None.
        location: where it lives; None while it is being made.
        state_number: the number of its last checkpoint; 0 if there is none.
        killed: ``kill()`` has ended it.
        ended_by_group: why its supervision group ends it; empty if the group does not.
        drained: why its worker was asked to leave, if the actor stays on that worker; otherwise empty.
        moving: its worker was asked to leave, so the next incarnation begins on another worker; this is not counted as a restart.
        over: its end was processed, or it was postponed and never made.
    """

    def __init__(self, id: int) -> None:
        self.id = id
        self.worker: WorkerKey | None = None
        self.worker_name = ""
        self.process: str | None = None
        self.location: Location | None = None
        self.state_number = 0
        self.killed = self.moving = self.over = False
        self.ended_by_group = self.drained = ""

    def end_of_worker(self, report: DeathReport | None, why: str) -> str:
        """Describe the end of this incarnation, whose worker has ended.

        Args:
            report: the report on the end of the worker's process.
            why: the known reason for the end of the worker if there is no report; may be empty.
        """
        if self.ended_by_group:
            return self.ended_by_group
        if report is not None:
            text = report.describe()
        else:
            text = f"worker {self.worker_name!r}, where it lived, has ended" + (f": {why}" if why else "")
        if self.drained and not self.killed:
            return f"{self.drained}, and it cannot move: {text}"
        return f"it was killed with kill(): {text}" if self.killed else text


def why_not_made(error: BaseException, worker: str | None) -> tuple[str, bool]:
    """Return why an incarnation could not be made, and whether this is final: it is not if no worker was found for it.

    Args:
        error: the answer of the worker, or the error that prevented the request.
        worker: the worker's name; None if there was no worker yet.
    """
    original = exceptions.original(error)
    what = line_of(original)
    if is_a(error, RemoteError) and not is_a(original, ActorDiedError) and worker is not None:
        if CAUSE.__get__(original) is None:
            # Programs that print the error then show the traceback that the worker has sent.
            CAUSE.__set__(original, RemoteTraceback(exceptions.traceback_of(error)))
        where = "restore()" if IN_RESTORE in notes_of(original) else "constructor"
        text, final = f"its {where} raised {what}", True
        if is_a(original, SerializationError):  # its class or an argument cannot be rebuilt
            text = f"it could not be made on worker {worker!r}: {what}"
    elif worker is not None:
        text, final = f"it could not be made on worker {worker!r}: {what}", True
    elif is_a(original, ConfigError):
        text, final = str(original), False
    else:
        text, final = f"no process could be started for it: {what}", False
    TRACEBACK.__set__(original, None)
    return text, final


class ActorRecord:
    """One actor.

    Attributes:
        place: where it should live: the result of Placements.place().
        epoch: how many incarnations have ended; also the number of the present incarnation.
        last_life: the present incarnation, or else the last incarnation; None before the first incarnation.
        orphaned: its last handle was freed: its incarnation ends after its waiting calls, or once it is made, and no other
            follows.
        postponed_since: when the next incarnation was first postponed; None if it was not.
        state: the state with which the next incarnation starts; None if no checkpoint was received.
        family, index: the supervision group that decides about its restarts (or None), and its place there.
        held: its next incarnation only begins when the group orders it.
    """

    def __init__(
        self,
        descriptor: ActorDescriptor,
        cls: Snapshot,
        arguments: Snapshot | None,
        options: ActorOptions,
        place: Any,
        draw: Callable[[], float] | None = None,
    ) -> None:
        self.descriptor = descriptor
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
        self.phase: Phase = "starting"
        self.epoch = 0
        self.last_life: Incarnation | None = None
        self.state: Snapshot | None = None
        self.orphaned = False
        self.postponed_since: float | None = None
        self.last: Restarting | None = None
        self.death: ActorDiedError | None = None
        self.dead_since = 0.0
        #: Queries that wait for an answer: the arguments ``after`` and ``wait`` of Supervisor.locate(), and the future.
        self.waiters: list[tuple[int, bool, Future[Any]]] = []
        self.watchers: list[Future[ActorDiedError]] = []

    @property
    def life(self) -> Incarnation | None:
        """The present incarnation; None if there is none."""
        life = self.last_life
        return None if life is None or life.over else life

    @property
    def worker_name(self) -> str:
        """The name of the worker where the present or last incarnation lives, lived or was being made; may be empty."""
        return "" if self.last_life is None else self.last_life.worker_name

    @property
    def title(self) -> str:
        """Its name in messages."""
        return self.descriptor.title

    def forget(self) -> None:
        """Record when the actor died, and release all data that is only needed for further incarnations."""
        self.dead_since = _time.now()
        self.cls = self.arguments = self.state = self.place = self.family = None
        if self.last_life is not None:
            self.last_life.over = True

    def spec(self, life: Incarnation) -> ActorSpec:
        """Return the data that a worker needs to make an incarnation."""
        assert self.cls is not None
        return ActorSpec(
            actor_id=self.descriptor.actor_id,
            instance_id=life.id,
            epoch=self.epoch,
            cls=self.cls,
            arguments=self.arguments,
            info=self.descriptor.info,
            options=self.options,
            descriptor=self.descriptor,
            state=self.state,
            alone=life.process is not None,
        )

    def keep(self, epoch: int, number: int, state: Snapshot) -> bool:
        """Store a checkpoint, unless there is a later one; return whether incarnation ``epoch`` is the present one.

        Checkpoints may be received in another order than they were made in. A checkpoint with a higher number was begun later,
        and its state contains the effects that checkpoints with lower numbers contain.
        """
        life = self.life
        if epoch != self.epoch or life is None:
            return False
        if number > life.state_number:
            self.state, life.state_number = state, number
        return True

    @property
    def is_due(self) -> bool:
        """Whether its next incarnation can be begun."""
        return self.phase in ("starting", "restarting") and self.life is None and not self.held

    def postpone(self, life: Incarnation, now: float) -> bool:
        """Withdraw an incarnation that was not made because its worker has ended; return whether another attempt follows.

        The worker was chosen before its end was known. The actor has not lived on it, so this does not count as a death. Returns
        False if the actor can only live on that worker, or if the first such attempt was half a minute ago.
        """
        if isinstance(self.place, WorkerKey):
            return False
        if self.postponed_since is None:
            self.postponed_since = now
        if now - self.postponed_since > _PATIENCE_S:
            return False
        life.over = True
        return True

    def note_alive(self, life: Incarnation, pid: int, now: float) -> None:
        """Record that an incarnation was made, in process ``pid``."""
        assert life.worker is not None
        self.phase = "alive"
        self.postponed_since = None
        life.location = Location(life.worker, life.worker_name, life.id, self.epoch, pid)
        self.restarts.note_alive(now)
        if not self.options.max_restarts and not self.descriptor.info.has_checkpoint:
            self.cls = self.arguments = None  # no incarnation follows: free the objects in them

    def verdict(self, life: Incarnation, now: float, text: str, bound: str) -> RestartVerdict:
        """Decide what follows after an unexpected end of an incarnation. Call this once for each incarnation.

        Args:
            text: how it ended.
            bound: why the actor cannot live on another worker, if its worker has ended; otherwise empty.
        """
        if life.moving:
            return RestartVerdict(again=True)
        if bound:
            return RestartVerdict(why_not=f"not restarted: {bound}")
        if self.family is not None:
            return RestartVerdict(again=True)
        wait = self.restarts.next(now, text)
        if wait is None:
            return RestartVerdict(why_not=self.restarts.why_not(), before=tuple(self.restarts.causes()[:-1]))
        return RestartVerdict(again=True, wait_s=wait)

    def death_error(
        self, text: str, report: DeathReport | None, cause: BaseException | None, verdict: RestartVerdict
    ) -> ActorDiedError:
        """Return the error that describes its death.

        Args:
            text: how it ended.
            verdict: contains why it is not restarted; empty if it was ended on purpose.
        """
        text = f"{self.title} is dead{f' ({verdict.why_not})' if verdict.why_not else ''}: {text}"
        if verdict.before:
            text += "\n  before that, it had died like this:"
            text += "".join(f"\n    {number}. {each}" for number, each in enumerate(verdict.before, 1))
        kind = UnplacedActorError if is_a(cause, PlacementError) else ActorDiedError
        return kind(
            text,
            worker=self.worker_name or None,
            actor=self.title,
            actor_id=self.descriptor.actor_id,
            report=report,
            cause=cause,
        )

    def lose(self, last: Restarting) -> None:
        """Record that the present incarnation has ended, and that another incarnation will follow."""
        self.phase = "restarting"
        self.epoch += 1
        self.postponed_since = None
        self.last = last
        self.held = self.family is not None

    def answer(self, after: int, wait: bool) -> Location | Restarting | None:
        """Return the answer to a query for the location after incarnation ``after``; None if the query has to wait."""
        if self.epoch <= after:
            return None  # the supervisor has not noticed the death yet
        location = None if self.life is None else self.life.location
        if location is not None:
            return location
        return None if wait else self.last

    def pop_answered(self) -> list[tuple[Future[Any], Location | Restarting]]:
        """Remove and return the waiters that can be answered now, with their answers."""
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
        life = self.life
        location = None if life is None else life.location
        return ActorState(
            actor_id=self.descriptor.actor_id,
            class_name=self.descriptor.info.name,
            name=self.descriptor.name,
            namespace=self.descriptor.namespace,
            state=_SHOWN[self.phase],
            worker=self.worker_name if self.phase != "dead" else "",
            pid=location.pid if location is not None else 0,
            restarts=self.restarts.count,
            death_cause=cause,
            dead_for=_time.now() - self.dead_since if self.phase == "dead" else 0.0,
            detached=self.options.lifetime == "detached",
            supervisor=supervisor,
            instance_id=0 if life is None else life.id,
        )
