"""Checkpoints: the state that an actor's worker gives its supervisor, for the actor's next incarnation to start from.

An answer leaves when the supervisor has the state behind it: what a caller has been told survives the death of the actor,
by any caller. That costs the call a round trip to the supervisor's worker; where that is the actor's own, nothing
is sent. The actor's thread waits for that, or on its event loop the coroutine alone; where other calls wait for the thread, or
their answers for a checkpoint, it goes on, and the answer is held until then (:meth:`Checkpoints.hold`).

Checkpoints are numbered when they are begun, before the actor is asked: threads and coroutines of one actor ask for
theirs at the same time, and the supervisor may take them up in any order. One that has come answers for all with lower numbers:
what they have is in it. So few are on their way at a time, and of those that are made meanwhile only the last is sent: when one
has come, when ``_GATHERED`` answers wait for it, when no call waits for the thread any more, or after a millisecond.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from actorrpc._exception_text import line_of, report
from actorrpc.actors.context import current
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.spec.actor_spec import HostedActorGoneError
from actorrpc.agent import hooks
from actorrpc.agent.calls import CURRENT
from actorrpc.agent.timers import Tick
from actorrpc.errors import CheckpointError, ShutdownError
from actorrpc.futures import Future

if TYPE_CHECKING:
    from actorrpc.actors.host.actor import HostedActor
    from actorrpc.actors.host.envelope import Envelope
    from actorrpc.actors.spec.actor_spec import ActorSpec

__all__ = ["LAST", "Checkpoints"]

_log = logging.getLogger("actorrpc.actors")
_GATHERED: Final = 32
_GATHER_S: Final = 1e-3
_FLYING: Final = 2  # checkpoints of one actor that are on their way at a time
LAST: Final = 1 << 62  # the number of a state behind which there is none: the actor has ended


class Checkpoints:
    """The checkpoints of one actor. Thread-safe.

    Every way to save returns when the supervisor has the state, where one was due. What keeps it from being made is the
    call's error: the state before it stays. What keeps it from the supervisor is only logged: there is to be no next
    incarnation then.

    Raises:
        CheckpointError: it cannot be made.
        HostedActorGoneError: the supervisor has given this incarnation up meanwhile, and keeps nothing of it.
    """

    def __init__(self, hosted: HostedActor) -> None:
        self._hosted = hosted
        self._numbers = itertools.count(1)  # of calls that have not raised
        # Guards what follows; a leaf, and re-entrant, as the collector may run there.
        self._lock = threading.RLock()
        self._flying = 0  # on their way
        self._next: tuple[int, Snapshot] | None = None  # to be sent when one of those has come
        #: who waits until the state is kept, or it is known why it is not, by number: a future, or a call and its answer
        self.waiting: dict[int, Future[bool] | tuple[Envelope, Any]] = {}
        self._tick = Tick(hosted.agent.clock, _GATHER_S, self._gathered)

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

    def hold(self, entry: Envelope, value: Any, more: bool) -> bool:
        """Save the state, and have a call answered when it is kept; False where none is due: it is answered at once.

        Does not wait. The call is answered, or refused, on whichever thread hears of it. ``more``: other calls wait.
        """
        made = self._make()
        if made is None:
            return False
        number = made[0]
        self._hosted.executor.answered_later[entry] = None
        with self._lock:
            self.waiting[number] = entry, value
            last = made if self._next is None or self._next[0] < number else self._next
            sends = (len(self.waiting) >= _GATHERED or not more) and self._flying < _FLYING
            self._next = None if sends else last
            self._flying += sends
        if sends:
            _ = self._send(*last)
        elif not self._tick.active:
            self._tick.poke()
        return True

    def _gathered(self) -> bool:
        """Have the last checkpoint sent that was not. Runs on the clock's thread."""
        if self._next is not None:
            self._hosted.agent.submit(self._send_next)
        return False

    def _send_next(self) -> None:
        with self._lock:
            made = self._next
            if made is None or self._flying >= _FLYING:
                return  # when one of those has come
            self._next = None
            self._flying += 1
        _ = self._send(*made)

    def behind(self, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Return a generator that saves the state when this one is over, before anybody is told that it is."""
        if self._spec is None:
            return generator
        return self._behind(generator)

    def _behind(self, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        try:
            yield from generator
        except GeneratorExit:  # nobody wants more of it
            with self._keeping():
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
            with self._keeping():
                await self.save_from_loop()
            raise
        finally:
            await generator.aclose()  # of one that was cancelled: it ends before its wrapper does
        await self.save_from_loop()

    def _begin(self) -> Future[bool] | None:
        """Make a checkpoint, if one is due, and send it; return a future that says whether the supervisor keeps it."""
        made = self._make()
        if made is None:
            return None
        kept: Future[bool] = Future()
        kept.cover()  # who waits may do so for the call that brings it
        return self._put(*made, kept) or kept

    def _make(self) -> tuple[int, Snapshot] | None:
        hosted = self._hosted
        is_kept = hosted.state == "alive" and hosted.executor.keeps_state  # as of nearly all that come here
        spec = hosted.spec if is_kept else self._spec
        if spec is None:
            return None
        number = next(self._numbers)
        if number % spec.options.checkpoint_every:
            return None
        try:
            hooks.reach("actor.checkpointing")
            return number, Snapshot.of(hosted.instance.checkpoint())
        except Exception as error:
            raise CheckpointError(
                f"the method of actor {self._hosted.title} has run, and what it has done is not kept for a next incarnation: "
                f"checkpoint() failed: {line_of(error)}",
                maybe_executed=True,
                worker=self._hosted.agent.name,
                actor=self._hosted.title,
                actor_id=spec.actor_id,
            ) from error

    def _put(self, number: int, state: Snapshot, kept: Future[bool]) -> Future[bool] | None:
        """Have a checkpoint sent; return the call that sends it, where one does now."""
        with self._lock:
            self.waiting[number] = kept
            if self._next is None or self._next[0] < number:
                self._next = None
            if self._flying >= _FLYING:
                self._next = self._next or (number, state)
                return None
            self._flying += 1
        return self._send(number, state)

    def _send(self, number: int, state: Snapshot) -> Future[bool]:
        here, spec = self._hosted.runtime, self._hosted.spec
        assert spec is not None
        key, args = spec.card.supervisor, (spec.actor_id, spec.epoch, number, state)
        kept: Future[bool] = Future()
        kept.add_done_callback(partial(self._arrived, number))
        # Of the actor, not of the call: it is not given up with that, and what it says is kept all the same.
        token = CURRENT.set(None)
        try:
            if key == here.references.me:
                kept.set_result(here.supervisor.note_checkpoint(*args))
            else:
                here.agent.call(here.references.peer_of(key), _keep, args, {}, 0, future=kept)
                here.agent.flush()
        except Exception as error:
            kept.try_fail(error)
        finally:
            CURRENT.reset(token)
        return kept

    def _arrived(self, number: int, done: Future[bool]) -> None:
        """Go on with all that have waited for a checkpoint, or an earlier one: it is there, or lost."""
        done.acknowledge()
        with self._lock:
            later, self._next = self._next, None
            if later is None:
                self._flying -= 1
            over = [self.waiting.pop(each) for each in sorted(self.waiting) if each <= number]
        if later is not None:
            _ = self._send(*later)
        error: BaseException | None = None
        try:
            with self._keeping():
                self._confirm(done.value())
        except BaseException as caught:
            error = caught
        executor, conns = self._hosted.executor, set()
        for each in over:
            if isinstance(each, Future):
                each.follow(done)
            else:
                entry, value = each
                conns.add(entry.conn)
                if error is None:
                    executor.answer(entry, value)
                else:
                    executor.fail(entry, error)
        for conn in conns:
            if conn is not None:
                conn.flush()
        ending = self._hosted.ending
        if ending is not None:
            ending()

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        """Log what keeps the supervisor from having the state, unless it has given the incarnation up."""
        try:
            yield
        except HostedActorGoneError:
            raise
        except Exception as error:
            report(_log, error, "the state of actor %s could not be kept", self._hosted.title)

    def _confirm(self, is_kept: bool) -> None:
        if not is_kept:
            error = HostedActorGoneError(self._hosted.id, "its supervisor has given it up")
            error.maybe_executed = True
            raise error
        hooks.reach("actor.checkpointed")


def _keep(actor_id: int, epoch: int, number: int, state: Snapshot) -> bool:
    """Keep a checkpoint; say whether that incarnation is the present one. Called by RPC on the supervisor's worker."""
    found = current()
    if found is None:
        raise ShutdownError("this worker has shut down: it looks after no actors", maybe_executed=False)
    kept: bool = found.supervisor.note_checkpoint(actor_id, epoch, number, state)
    return kept
