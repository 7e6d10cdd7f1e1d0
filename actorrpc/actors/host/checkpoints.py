"""Checkpoints: the state that an actor's worker gives its supervisor, for the actor's next incarnation to start from.

An answer leaves when the supervisor has the state behind it: what a caller has been told survives the death of the actor,
by any caller. That costs the call a round trip to the supervisor's worker; where that is the actor's own, nothing
is sent. The actor's thread waits for that, or on its event loop the coroutine alone.

Checkpoints are numbered when they are begun, before the actor is asked: threads and coroutines of one actor ask for
theirs at the same time, and the supervisor may take them up in any order.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import TYPE_CHECKING, Any, Final

from actorrpc._exception_text import report
from actorrpc.actors.context import current
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.spec.actor_spec import HostedActorGoneError
from actorrpc.agent import hooks
from actorrpc.agent.calls import CURRENT
from actorrpc.errors import ShutdownError
from actorrpc.futures import Future

if TYPE_CHECKING:
    from actorrpc.actors.host.actor import HostedActor
    from actorrpc.actors.spec.actor_spec import ActorSpec

__all__ = ["LAST", "Checkpoints"]

_log = logging.getLogger("actorrpc.actors")
LAST: Final = 1 << 62  # the number of a state behind which there is none: the actor has ended


class Checkpoints:
    """The checkpoints of one actor. Thread-safe.

    Every way to save returns when the supervisor has the state, where one was due. What keeps it from being made or kept
    is logged: the state before it stays.

    Raises:
        HostedActorGoneError: the supervisor has given this incarnation up meanwhile, and keeps nothing of it.
    """

    def __init__(self, hosted: HostedActor) -> None:
        self._hosted = hosted
        self._numbers = itertools.count(1)  # of calls that have not raised

    @property
    def _spec(self) -> ActorSpec | None:
        """The actor's spec, if what it has now is of use to a next incarnation."""
        hosted = self._hosted
        spec = hosted.spec
        if spec is None or not spec.info.has_checkpoint:
            return None
        alive = hosted.state == "alive" or (hosted.moving and hosted.state == "ending")
        return spec if alive else None

    @property
    def wanted(self) -> bool:
        """Whether the actor's state is kept."""
        return self._spec is not None

    def save(self) -> None:
        """Save the state after a call that has not raised, on the thread that has run it."""
        kept = self._begin()
        if kept is not None:
            with self._keeping():
                self._confirm(kept.wait())

    async def save_from_loop(self) -> None:
        """Do as :meth:`save` does, on the actor's event loop; nothing else there waits."""
        kept = self._begin()
        if kept is not None:
            with self._keeping():
                self._confirm(await kept)

    def behind(self, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Return a generator that saves the state when this one is over, before anybody is told that it is."""
        if self._spec is None:
            return generator
        return self._behind(generator)

    def _behind(self, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        try:
            yield from generator
        except GeneratorExit:  # nobody wants more of it
            self.save()
            raise
        self.save()

    def behind_async(self, generator: AsyncGenerator[Any, Any]) -> AsyncGenerator[Any, Any]:
        """Do as :meth:`behind` does for an async generator."""
        if self._spec is None:
            return generator
        return self._behind_async(generator)

    async def _behind_async(self, generator: AsyncGenerator[Any, Any]) -> AsyncGenerator[Any, Any]:
        try:
            async for item in generator:
                yield item
        except GeneratorExit:
            await generator.aclose()
            await self.save_from_loop()
            raise
        finally:
            await generator.aclose()  # of one that was cancelled: it ends before its wrapper does
        await self.save_from_loop()

    def _begin(self) -> Future[bool] | None:
        """Make a checkpoint, if one is due, and send it; return a future that says whether the supervisor keeps it."""
        spec = self._spec
        every = spec.options.checkpoint_every if spec is not None else 0
        if spec is None or not every:
            return None
        number = next(self._numbers)
        if number % every:
            return None
        try:
            hooks.reach("actor.checkpointing")
            state = Snapshot.of(self._hosted.instance.checkpoint())
            return self._send(spec, number, state)
        except Exception as error:
            self._lost(error)
            return None

    def _send(self, spec: ActorSpec, number: int, state: Snapshot) -> Future[bool]:
        here = self._hosted.runtime
        key, args = spec.card.supervisor, (spec.actor_id, spec.epoch, number, state)
        kept: Future[bool] = Future()
        if key == here.references.me:
            kept.set_result(here.supervisor.note_checkpoint(*args))
            return kept
        # Of the actor, not of the call: it is not given up with that, and what it says is kept all the same.
        token = CURRENT.set(None)
        try:
            here.agent.call(here.references.peer_of(key), _keep, args, {}, 0, future=kept)
            here.agent.flush()
        finally:
            CURRENT.reset(token)
        return kept

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        """Log what keeps the supervisor from having the state, unless it has given the incarnation up."""
        try:
            yield
        except HostedActorGoneError:
            raise
        except Exception as error:
            self._lost(error)

    def _confirm(self, is_kept: bool) -> None:
        if not is_kept:
            error = HostedActorGoneError(self._hosted.id, "its supervisor has given it up")
            error.maybe_executed = True
            raise error
        hooks.reach("actor.checkpointed")

    def _lost(self, error: Exception) -> None:
        report(_log, error, "the state of actor %s could not be kept", self._hosted.title)


def _keep(actor_id: int, epoch: int, number: int, state: Snapshot) -> bool:
    """Keep a checkpoint; say whether that incarnation is the present one. Called by RPC on the supervisor's worker."""
    found = current()
    if found is None:
        raise ShutdownError("this worker has shut down: it looks after no actors", maybe_executed=False)
    return found.supervisor.note_checkpoint(actor_id, epoch, number, state)
