"""Checkpoints: the state that an actor's worker sends to the supervisor, and with which the actor's next incarnation starts.

The answer of a call is sent after the supervisor has stored the actor's state after the call (with ``checkpoint_every=n``: after
every n-th call). So, without ``checkpoint_every``, the effect of an answered call survives the death of the actor. That costs a
call a round trip to the supervisor's worker, unless the actor lives on the supervisor's worker.
After a call on an event loop, a call that returns a future, or a call with an immutable result while other calls or checkpoints
wait, the thread runs the next call until the state is stored (:meth:`Checkpoints.hold`). After all other calls, the thread waits
(:meth:`Checkpoints.save`).

A checkpoint gets its number before the actor's ``checkpoint()`` is called: threads and coroutines of one actor make checkpoints
at the same time, and the supervisor may receive them in any order. A checkpoint that was received confirms all lower numbers,
because it contains their state. Therefore at most ``_FLYING`` checkpoints are sent at a time, and of the checkpoints that are
made meanwhile only the last is sent: when an earlier checkpoint was confirmed, when ``_GATHERED`` answers wait for it, when no
call waits for the thread, or after a millisecond.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from actorrpc._exceptions import line_of, report
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
    from actorrpc.actors.host.mailbox import Envelope
    from actorrpc.actors.spec.actor_spec import ActorSpec
    from actorrpc.transport.connection import Connection

__all__ = ["LAST", "Checkpoints"]

_log = logging.getLogger("actorrpc.actors")
_GATHERED: Final = 32
_GATHER_S: Final = 1e-3
_FLYING: Final = 2  # checkpoints of one actor that are sent and not confirmed
#: The number of the state that an actor leaves when it moves. It is larger than the numbers of checkpoints, so that no late
#: checkpoint replaces this state.
LAST: Final = 1 << 62


class Checkpoints:
    """The checkpoints of one actor. Thread-safe.

    If the state cannot be sent to the supervisor, the error is only logged and the call is answered, because there is no next
    incarnation without a supervisor. The methods raise other errors, which are sent to the callers:

        CheckpointError: ``checkpoint()`` failed. The supervisor keeps the state before the call.
        HostedActorGoneError: the supervisor considers this incarnation dead, and does not store its state.
    """

    def __init__(self, hosted: HostedActor) -> None:
        self._hosted = hosted
        self._numbers = itertools.count(1)  # one number for each call that has not raised
        # Guards the attributes below; a leaf, and re-entrant, because the garbage collector may run while it is held.
        self._lock = threading.RLock()
        self._in_flight = 0  # checkpoints that were sent and not confirmed
        self._next: tuple[int, Snapshot] | None = None  # the last checkpoint made, if it was not sent
        #: Number of a checkpoint -> the function to call when it is confirmed, with None or the error for the call that waits
        #: for it. The function returns the connection of the call's answer, which is then flushed, or None.
        self.waiting: dict[int, Callable[[BaseException | None], Connection | None]] = {}
        self._tick = Tick(hosted.agent.clock, _GATHER_S, self._gathered)

    @property
    def _spec(self) -> ActorSpec | None:
        """The actor's spec; None if its state is not needed, because there will be no next incarnation."""
        hosted = self._hosted
        spec = hosted.spec
        if spec is None or not spec.info.has_checkpoint:
            return None
        alive = hosted.state == "alive" or (hosted.moving and hosted.state == "ending")
        return spec if alive else None

    def save(self) -> None:
        """Save the state after a call that has not raised, if a checkpoint is due, and wait until it is stored."""
        kept = self._begin()
        if kept is not None:
            kept.wait()

    def _begin(self) -> Future[None] | None:
        """Make a checkpoint, and return a future that completes when the checkpoint is stored; None if no checkpoint is due."""
        made = self._make()
        if made is None:
            return None
        kept: Future[None] = Future()
        kept.cover()  # do not log an error that no thread or coroutine retrieves

        def over(error: BaseException | None) -> None:
            _ = kept.try_complete(None) if error is None else kept.try_fail(error)

        sent = self._add(made, over, more=False)
        if sent is not None and not kept.completed:
            kept.source = sent
        return kept

    def hold(self, entry: Envelope, answer: Callable[[], object], more: bool = False) -> bool:
        """Save the state, if a checkpoint is due, and call ``answer()`` when it is stored. Does not wait.

        Args:
            answer: sends the answer; called in any thread. If the supervisor considers the actor dead, the call fails instead.
            more: other calls wait for the thread that has run this call; the checkpoint of a later call may be sent for all.

        Returns:
            False if no checkpoint is due; then ``answer`` is not called.
        """
        made = self._make()
        if made is None:
            return False
        executor = self._hosted.executor
        executor.answered_later[entry] = None

        def over(error: BaseException | None) -> Connection | None:
            if error is None:
                answer()
            else:
                executor.fail(entry, error)
            return entry.conn

        self._add(made, over, more)
        return True

    def behind(self, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Wrap a generator: the state is saved when it has ended, before its consumer is told of the end."""
        return generator if self._spec is None else self._behind(generator)

    def _behind(self, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        try:
            yield from generator
        except GeneratorExit:  # the consumer has closed the stream
            try:
                self.save()
            except CheckpointError as error:
                self._report(error)
            raise
        self.save()

    def behind_async(self, generator: AsyncGenerator[Any, Any]) -> AsyncGenerator[Any, Any]:
        """Like :meth:`behind`, for an async generator."""
        return generator if self._spec is None else self._behind_async(generator)

    async def _behind_async(self, generator: AsyncGenerator[Any, Any]) -> AsyncGenerator[Any, Any]:
        try:
            async for item in generator:
                yield item
        except GeneratorExit:
            await generator.aclose()
            try:
                await self._save_from_loop()
            except CheckpointError as error:
                self._report(error)
            raise
        finally:
            await generator.aclose()  # if the wrapper was cancelled, close the generator as well
        await self._save_from_loop()

    async def _save_from_loop(self) -> None:
        kept = self._begin()
        if kept is not None:
            await kept

    def _make(self) -> tuple[int, Snapshot] | None:
        hosted, spec = self._hosted, self._spec
        if spec is None:
            return None
        number = next(self._numbers)
        if number % spec.options.checkpoint_every:
            return None
        try:
            hooks.reach("actor.checkpointing")
            return number, Snapshot.of(hosted.instance.checkpoint(), on_cpu=True)
        except Exception as error:
            raise CheckpointError(
                f"the method of actor {hosted.title} has run, but its effect is not saved for a next incarnation: "
                f"checkpoint() failed: {line_of(error)}",
                maybe_executed=True,
                worker=hosted.agent.name,
                actor=hosted.title,
                actor_id=spec.actor_id,
            ) from error

    # -- sending ---------------------------------------------------------------------------------------------

    def _add(
        self,
        made: tuple[int, Snapshot],
        over: Callable[[BaseException | None], Connection | None],
        more: bool,
    ) -> Future[bool] | None:
        """Queue a checkpoint; return the future of the call that sends it, if it is sent now.

        Args:
            over: called when the checkpoint is confirmed: see :attr:`waiting`.
            more: see :meth:`hold`.
        """
        with self._lock:
            self.waiting[made[0]] = over
            if self._next is not None and self._next[0] > made[0]:
                made = self._next
            sends = self._in_flight < _FLYING and (not more or len(self.waiting) >= _GATHERED)
            self._next = None if sends else made
            self._in_flight += sends
        if sends:
            return self._send(*made)
        if not self._tick.active:
            self._tick.wake()
        return None

    def _gathered(self) -> bool:
        """Send the last checkpoint, if it was not sent. Runs on the clock's thread."""
        if self._next is not None:
            self._hosted.agent.submit(self._send_next)
        return False

    def _send_next(self) -> None:
        with self._lock:
            made = self._next
            if made is None or self._in_flight >= _FLYING:
                return  # _confirmed() sends it, when an earlier checkpoint is confirmed
            self._next = None
            self._in_flight += 1
        _ = self._send(*made)

    def _send(self, number: int, state: Snapshot) -> Future[bool]:
        here, spec = self._hosted.runtime, self._hosted.spec
        assert spec is not None
        key, args = spec.descriptor.supervisor, (spec.actor_id, spec.epoch, number, state)
        kept: Future[bool] = Future()
        kept.add_done_callback(partial(self._confirmed, number))
        # Do not make this a nested call of the actor's call: the state is stored even if that call is cancelled.
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

    def _confirmed(self, number: int, done: Future[bool]) -> None:
        """Answer the calls that wait for this or an earlier checkpoint; fail them if the supervisor considers the actor dead."""
        done.acknowledge()
        with self._lock:
            later, self._next = self._next, None
            if later is None:
                self._in_flight -= 1
            over = [self.waiting.pop(each) for each in sorted(self.waiting) if each <= number]
        if later is not None:
            _ = self._send(*later)
        error = done.error
        gone: HostedActorGoneError | None = None
        if error is not None:
            self._report(error)
        elif done.value_or_none:
            hooks.reach("actor.checkpointed")
        else:
            gone = HostedActorGoneError(self._hosted.id, "its supervisor considers it dead")
            gone.maybe_executed = True
        for conn in {each(gone) for each in over}:
            if conn is not None:
                conn.flush()
        self._hosted.end_if_idle()

    def _report(self, error: BaseException) -> None:
        report(_log, error, "the state of actor %s could not be kept", self._hosted.title)


def _keep(actor_id: int, epoch: int, number: int, state: Snapshot) -> bool:
    """Store a checkpoint; return whether incarnation ``epoch`` is the present one. Called by RPC on the supervisor's worker."""
    found = current()
    if found is None:
        raise ShutdownError("this worker has shut down: it supervises no actors", maybe_executed=False)
    kept: bool = found.supervisor.note_checkpoint(actor_id, epoch, number, state)
    return kept
