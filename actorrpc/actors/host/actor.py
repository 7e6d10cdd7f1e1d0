"""An actor on the worker where it lives: its instance, mailbox, threads and shutdown."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from actorrpc import _time
from actorrpc._exceptions import add_note, line_of, report
from actorrpc._limits import NO_THREAD, explain_threads
from actorrpc.actors.context import current
from actorrpc.actors.host.carriers import ActorThreads
from actorrpc.actors.host.cpu_lender import CpuLender
from actorrpc.actors.host.event_loop import EventLoop
from actorrpc.actors.host.executor import ActorExecutor, died, resolve
from actorrpc.actors.host.mailbox import NOTHING, Entry, Envelope, GroupQueue, Mailbox, Wakeups
from actorrpc.actors.host.threads import FOREIGN_THREADS, Runner
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.spec.actor_spec import IN_RESTORE, ActorSpec, HostedActorGoneError
from actorrpc.agent import hooks
from actorrpc.agent.calls import CURRENT, Execution
from actorrpc.errors import CancelledError, DeadlockError, LimitError, RpcError
from actorrpc.futures import WAITING, Future
from actorrpc.wire.frames import Frame

if TYPE_CHECKING:
    from actorrpc.actors.context import Runtime
    from actorrpc.agent.timers import Tick

__all__ = ["HostedActor", "send_ended"]

_log = logging.getLogger("actorrpc.actors")


def _ended(actor_id: int, epoch: int, kind: str, text: str) -> None:
    found = current()
    if found is not None:
        found.supervisor.note_ended(actor_id, epoch, kind, text)


def send_ended(runtime: Runtime, spec: ActorSpec, kind: str, text: str) -> None:
    """Tell the supervisor that the actor has ended by itself. Does not wait.

    ``kind``: ``"exit"`` (by exit_actor(), not restarted), ``"sys.exit"`` or ``"broken"`` (a thread ended unexpectedly).
    """
    agent = runtime.agent
    future: Future[None] = Future()
    future.add_done_callback(Future.acknowledge)  # an error means that the supervisor's worker has ended
    try:
        peer = runtime.references.peer_of(spec.descriptor.supervisor)
        agent.call(peer, _ended, (spec.actor_id, spec.epoch, kind, text), {}, 0, future=future)
        agent.flush()
    except RpcError as error:
        _log.info("the supervisor of actor %s cannot be told: %s", spec.descriptor.title, error)


_AGAIN_S: Final = 0.02
_BLOCKED_S: Final = 5.0
_MOST_SHOWN: Final = 100
# Packages whose classes have a `__repr__` that lists all contents of an object, which is too long to show.
_NOT_THEIR_OWN: Final = frozenset({"builtins", "collections", "torch", "typing"})
_ASYNC_LIMIT: Final = 1000  # default limit of concurrent coroutines of one actor, as in Ray


def _shown(instance: Any) -> str:
    """Return ``repr(instance)``, cut, on one line; empty if ``__repr__`` is object's, is from ``_NOT_THEIR_OWN``, or raises."""
    says: Any = type(instance).__repr__
    if says is object.__repr__:
        return ""
    owner = next((each for each in type(instance).__mro__ if "__repr__" in vars(each)), object)
    if owner.__module__.partition(".")[0] in _NOT_THEIR_OWN:
        return ""
    try:
        return " ".join(str(repr(instance)).split())[:_MOST_SHOWN]
    except BaseException:
        return ""


class _DeadlockSearch(Protocol):
    """The attributes and methods of a DeadlockDetector that actors use."""

    looks: Tick
    wake: Callable[[], None]

    def note(self, error: DeadlockError) -> None: ...


class _Registry(Protocol):
    """The attributes and methods of an ActorRegistry that its actors use."""

    executions: itertools.count[int]

    @property
    def deadlocks(self) -> _DeadlockSearch: ...
    def new_caller(self) -> int: ...
    def number_threads(self) -> None: ...
    def forget(self, hosted: HostedActor) -> None: ...


class HostedActor:
    """One actor that lives in this worker. Thread-safe.

    ``_lock`` guards the state, and the messages that came before the actor was constructed. Other locks are taken under it: of
    the mailbox, the tables of threads, the thread pool and the clock.

    Attributes:
        on_imported: called after the class is imported and before the constructor, in a process that holds one actor only.
        on_shown: called with the ``repr`` of an actor that has its own process, if the class defines ``__repr__``.
    """

    on_imported: ClassVar[Callable[[], None] | None] = None
    on_shown: ClassVar[Callable[[str], None] | None] = None

    def __init__(
        self, registry: _Registry, runtime: Runtime, instance_id: int, threads: ActorThreads
    ) -> None:
        self.registry = registry
        self.runtime = runtime
        self.agent = runtime.agent
        self.id = instance_id
        self.actor_threads = threads
        self.runners: list[Runner] = []
        self.mailbox = Mailbox()
        self.executor = ActorExecutor(self)
        self.lender: CpuLender | None = None  # for an actor that executes tasks and has booked CPUs
        # The caller number of calls that the actor's methods make (see new_caller()); None: each execution has its own number.
        self.caller: int | None = registry.new_caller()
        self.instance: Any = None
        self.spec: ActorSpec | None = None
        self.title = f"{instance_id & 0xFFFF:04x}"
        self.shown = ""  # the result of _shown() after the constructor has returned
        #: "constructing", "alive", "ending" (it ends when it is idle), "closing" (it accepts no more calls), "stopping" (it runs
        #: its last hooks), "over"
        self.state = "constructing"
        self.why = ""
        self.moving = False
        self.over: Future[Any] = Future()
        self.calls = 0
        self.begun = _time.now()
        self._lock = threading.RLock()
        self._intake: list[Envelope] | None = []
        # The event loops of an async actor, by concurrency group. Entries are added under _lock, and never replaced.
        self.loops: dict[str, EventLoop] = {}
        # Returns the exception to send to the caller of a call that fails with the given exception (used by collectives).
        self.on_error: Callable[[BaseException], BaseException] | None = None
        self._plans: dict[str, GroupQueue] = {}

    # -- messages -----------------------------------------------------------------------------------

    def enqueue(self, entry: Envelope, *, held: bool = False) -> None:
        """Put a message into the mailbox. Called in the order in which messages arrive, maybe under a connection's read lock.

        Args:
            held: the message arrived before the actor was constructed, and was kept in ``_intake`` until then.
        """
        if not held:
            entry.hosted = self
            entry.peer.running[entry.id] = entry
            if self._intake is not None:
                with self._lock:
                    if self._intake is not None:
                        self._intake.append(entry)
                        return
        header = entry.header
        name = header.get("method", "")
        queue = self._plans.get(name)
        if queue is None or "group" in header:
            queue = self._lane_of(name, header.get("group"))
        todo = self.mailbox.put(entry, queue)
        if todo is None:
            gone = HostedActorGoneError(self.id, self.why)
            self.agent.submit(partial(self.executor.refuse, entry, gone))
            return
        for runner in todo.wake:
            # Do not wake an idle runner whose own thread this is: this thread has read the message, and checks the queue next.
            if entry.slot is not None or runner.shared or threading.get_ident() != runner.ident:
                runner.wake()
        if todo.start:
            self._start(todo.start)
        if not entry.ready or (
            queue.running
            and queue.limit == 1
            and (queue.is_async or (self.runners and self.runners[0].waits))
        ):
            looks = self.registry.deadlocks.looks
            if not looks.active:
                looks.wake()
        if entry.slot is not None and not entry.slot.waiting:  # type: ignore[attr-defined]
            self.agent.clock.after(_AGAIN_S, partial(self._look_after, entry, _AGAIN_S))
        if entry.whole and "unresolved" in header:
            self.agent.submit(partial(self._resolve, entry))

    def construct(self, entry: Envelope) -> None:
        """Put the message that constructs the actor into the mailbox, before all others."""
        entry.hosted = self
        entry.peer.running[entry.id] = entry
        todo = self.mailbox.put(entry, self.mailbox.queues[""])
        if todo is not None:
            self.carry_out(todo)

    def _lane_of(self, name: str, group: str | None) -> GroupQueue:
        assert self.spec is not None
        method = self.spec.info.methods.get(name)
        asked = group
        if group is None:
            group = (method.options.concurrency_group if method is not None else None) or ""
        # Plain methods of an async actor also run on its loop, unless they have `thread=True` or a concurrency group.
        threaded = (
            method is not None and not method.kind.startswith("async") and bool(group or method.threaded)
        )
        queues = (
            self.mailbox.async_lanes if self.mailbox.async_lanes and not threaded else self.mailbox.queues
        )
        queue = queues.get(group) or queues[""]
        if asked is None:
            self._plans[name] = queue
        return queue

    def is_plain(self, entry: Envelope) -> bool:
        """Say whether the called method is plain: no coroutine and no generator, so that it runs without a pause."""
        assert self.spec is not None
        header = entry.header
        method = self.spec.info.methods.get(header.get("method", ""))
        return "window" not in header and (method is None or method.kind == "sync")

    def receive_rest(self, entry: Envelope, conn: Any, frame: Frame) -> None:
        """Receive the rest of a message whose beginning is in the mailbox."""
        entry.frame = frame
        entry.conn = conn
        if self._intake is not None:
            with self._lock:
                # A message with a queue constructs the actor: it is in the mailbox, and not in `_intake`.
                if self._intake is not None and entry.queue is None:
                    entry.whole = True
                    entry.ready = "unresolved" not in entry.header
                    return
        entry.whole = True
        if "unresolved" in entry.header:
            self.agent.submit(partial(self._resolve, entry))
        else:
            self.carry_out(self.mailbox.ready(entry))

    def _resolve(self, entry: Envelope) -> None:
        """Decode a message and fetch the values of its ObjectRefs; mark the entry as ready when all values have arrived."""

        def ready(future: Future[Any]) -> None:
            error = future.error
            future.acknowledge()
            entry.keep_opened(future.value_or_none if error is None else error)
            self.carry_out(self.mailbox.ready(entry))

        # Fetch the values within this call's context, so that the fetches have the call's deadline and chain.
        token = CURRENT.set(entry)
        try:
            args, kwargs = self.executor.arguments(entry)
            future = resolve(args, kwargs)
        except BaseException as error:
            entry.keep_opened(error)
            self.carry_out(self.mailbox.ready(entry))
            return
        finally:
            CURRENT.reset(token)
        if future is None:
            entry.keep_opened((args, kwargs))
            self.carry_out(self.mailbox.ready(entry))
        else:
            entry.keep_opened((args, kwargs))  # for the search for deadlocks, until ready() replaces it
            future.add_done_callback(ready)

    def carry_out(self, todo: Wakeups) -> None:
        """Wake the threads of ``todo.wake``; start a thread or wake the event loop for each queue in ``todo.start``.

        An operation of the mailbox has returned ``todo``. This method runs no call itself.
        """
        for runner in todo.wake:
            runner.wake()
        self._start(todo.start)

    def _start(self, queues: Sequence[GroupQueue]) -> None:
        for queue in queues:
            if queue.is_async:
                loop = self.loops.get(queue.name)
                if loop is None:
                    self.agent.submit(partial(self._open_loop, queue))
                else:
                    self._schedule_pump(loop, queue)
            else:
                self.actor_threads.start(Runner(self, queue))

    def _schedule_pump(self, loop: EventLoop, queue: GroupQueue) -> None:
        """Make an event loop start the waiting calls of its queue, on the loop's thread."""
        try:
            loop.submit(partial(self.executor.pump, queue))
            if loop.waiting:
                loop.wake()
        except NO_THREAD:
            self.agent.submit(partial(self.no_thread, queue))

    def _open_loop(self, queue: GroupQueue) -> None:
        """Make the event loop of a concurrency group, for the group's first call."""
        loop = self.loops.get(queue.name)
        if loop is None:
            try:
                made = EventLoop(self, queue)
            except OSError as error:
                self.no_thread(queue, f"it needs an event loop, which cannot be made: {error}")
                return
            with self._lock:
                # A thread that ends the actor changes the state under this lock before it reads `self.loops`.
                if self.state in ("alive", "ending"):
                    loop = self.loops.setdefault(queue.name, made)
            if loop is not made:
                _ = made.close()
        if loop is not None:  # None: the actor has ended, and refuses its waiting calls
            self._schedule_pump(loop, queue)

    def loop_of(self, queue: GroupQueue | None) -> EventLoop | None:
        """Return the loop that runs the calls of a queue; None if they run in threads, or the loop does not exist yet."""
        return self.loops.get(queue.name) if queue is not None and queue.is_async else None

    def finished(self, todo: Wakeups) -> None:
        """Make the threads and event loops in ``todo`` run the next entries; end the actor if it is idle and "ending".

        A thread calls this method after it has ended an entry, without locks.

        Args:
            todo: the result of the mailbox operation that removed the entry.
        """
        if todo is not NOTHING:
            self.carry_out(todo)
        self.end_if_idle()

    def no_thread(self, queue: GroupQueue, why: str = "") -> None:
        """Refuse the waiting calls of a queue, because the system cannot start a thread. The next call tries to start one.

        ``why``: the reason that the error gives, if another resource than a thread is missing.
        """
        why = why or f"it needs a thread: {explain_threads()}"
        for entry in self.mailbox.no_thread(queue):
            assert isinstance(entry, Envelope)
            text = f"{self.executor.label(entry)} was not executed, as {why}"
            self.executor.refuse(entry, LimitError(text))
        self.finished(NOTHING)

    def guard(self, run: Callable[[], object], entry: Envelope | None = None) -> None:
        """Call ``run()`` in this thread, an event loop's. End the actor if it raises; ``entry``: see :meth:`broken`."""
        try:
            run()
        except BaseException as error:
            self.broken(error, entry)

    def broken(self, error: BaseException, entry: Entry | None = None) -> None:
        """End the actor, because one of its threads has raised unexpectedly; ``entry``: the call that the thread was running.

        The supervisor treats this as a death, and may restart the actor.
        """
        why = f"a thread of it ended unexpectedly, because of {line_of(error)}"
        report(_log, error, "actor %s is ended: a thread of it ended unexpectedly", self.title)
        if isinstance(entry, Envelope):
            self.executor.fail(entry, died(self, why))
        _ = self.stop("now", why)
        if self.spec is not None:
            send_ended(self.runtime, self.spec, "broken", why)

    def _look_after(self, entry: Envelope, elapsed: float) -> None:
        """Log a warning if a call has waited for ``_BLOCKED_S`` because its ancestor blocks a runner outside of actorrpc's waits.

        Before that, wake the runner at growing intervals: if the ancestor has started an event loop meanwhile, the loop can run
        the call. Runs on the clock's thread.
        """
        slot: Any = entry.slot
        if entry.state != "new" or slot is None or slot.waiting:
            return
        if elapsed < _BLOCKED_S:
            slot.wake()
            self.agent.clock.after(elapsed, partial(self._look_after, entry, 2 * elapsed))
            return
        _log.warning(
            "a call of %s on actor %s has waited for %.0f s: the call that it descends from blocks the actor outside of "
            "actorrpc's waits. The new call can run when the older has ended, or waits with get(). The older call's stack:\n%s",
            entry.header.get("method"),
            self.title,
            _BLOCKED_S,
            slot.stack(),
        )

    # -- cancellation -----------------------------------------------------------------------------------

    def cancel(self, entry: Envelope, stop: bool, late: bool) -> None:
        """Cancel a call: a waiting call never runs; a coroutine is cancelled; a method in a thread is interrupted if ``stop``.

        A plain method on an event loop continues. ``late``: see :class:`Execution`.
        """
        queue = entry.queue
        # Set these first: a thread that has dequeued the call reads both before it runs the method.
        entry.late = entry.late or late
        entry.start_forbidden = stop or (queue is not None and queue.is_async)
        text = f"{self.executor.label(entry)} was cancelled before it started"
        if self.withdraw(entry, CancelledError(text)):
            return
        loop = self.loop_of(queue)
        if queue is not None and queue.is_async:
            if entry.task is not None and loop is not None:
                loop.submit(partial(self.executor.stop, entry, stop))
            elif entry.begun:  # a plain method is never interrupted on the loop
                entry.give_up(stop, late)
            return
        if stop:
            # Interrupt the method before the calls for which it waits are cancelled, so that their errors do not reach it first.
            self.interrupt(entry)
        if entry.begun:
            entry.give_up(stop, late)

    def deadlocked(self, entry: Envelope, error: RpcError) -> None:
        """End a call that can never continue. Does nothing if it has ended."""
        if self.withdraw(entry, error):
            return
        self.executor.fail(entry, error)
        if entry.conn is not None:
            entry.conn.flush()
        loop = self.loop_of(entry.queue)
        if entry.task is not None and loop is not None:
            loop.submit(partial(self.executor.stop, entry, True))

    def withdraw(self, entry: Envelope, error: RpcError) -> bool:
        """End a waiting call with an error; return True. If it was dequeued or cancelled before, do nothing and return False."""
        todo = self.mailbox.cancel(entry)
        if todo is not None:
            self.executor.refuse(entry, error)
            self.finished(todo)
        return todo is not None

    def interrupt(self, entry: Entry) -> None:
        """Interrupt the method of a call, if it runs on a runner."""
        for runner in list(self.runners):
            runner.interrupt(entry)

    # -- construction --------------------------------------------------------------------------------

    def make(self, entry: Envelope) -> Any:
        """Construct the instance, open the mailbox for its calls, and return the process id. Runs on the actor's runner."""
        where = "constructor"
        try:
            (spec,), _ = self.executor.arguments(entry)
            self.spec = spec
            self.title = spec.descriptor.title
            assert isinstance(spec, ActorSpec)
            assert spec.cls is not None
            cls = spec.cls.open()
            if spec.alone and HostedActor.on_imported is not None:
                HostedActor.on_imported()
            args, kwargs = (), {}
            if spec.arguments is not None:
                args, kwargs = spec.arguments.open_once()
                resolved = resolve(args, kwargs)
                if resolved is not None:
                    args, kwargs = resolved.wait()
            hooks.reach("actor.making")
            instance = cls(*args, **kwargs)
            if spec.state is not None:
                where = "restore()"
                hooks.reach("actor.restoring")
                instance.restore(spec.state.open())
            hooks.reach("actor.made")
        except BaseException as error:
            if where != "constructor":
                add_note(error, IN_RESTORE)
            self.why = f"its {where} raised {line_of(error)}"
            with self._lock:
                self.state = "over"
            self._close()
            self.registry.forget(self)
            self.over.try_complete(None)
            raise
        self.instance = instance
        self.shown = _shown(instance)
        if self.shown and spec.alone and HostedActor.on_shown is not None:
            HostedActor.on_shown(self.shown)
        # Do not keep the constructor's arguments alive.
        spec.forget()
        self._open_mailbox(spec)
        return os.getpid()

    def _open_mailbox(self, spec: ActorSpec) -> None:
        options, info = spec.options, spec.info
        groups = dict(options.concurrency_groups or {})
        most = options.max_concurrency
        limits = {"": (1 if info.is_async else most or 1), **groups}
        async_limits = {"": most or _ASYNC_LIMIT, **groups} if info.is_async else {}
        loose = options.allow_out_of_order_execution
        if loose is None and (info.is_async or limits[""] > 1):
            loose = True
        self.mailbox.configure(
            limits, async_limits, reentrant=options.reentrant, yielding=options.yielding, loose=loose
        )
        if async_limits and most is None:
            # With the default limit, a generator that pauses does not count as a running call.
            self.mailbox.async_lanes[""].yielding = True
        self.executor.keeps_state = info.has_checkpoint
        if options.yielding:
            if options.num_cpus and self.runtime.spawner is not None:
                self.lender = CpuLender(self.runtime.spawner, self.id)
            self.caller = None
            FOREIGN_THREADS.register(self)
            self.registry.number_threads()
        with self._lock:
            if self.state == "constructing":
                self.state = "alive"
            # Set _intake to None last, so that later messages are queued behind the earlier messages.
            for entry in self._intake or ():
                self.enqueue(entry, held=True)
            self._intake = None

    # -- the end ---------------------------------------------------------------------------------------

    def exited(self, entry: Envelope | None, why: str, kind: str = "exit") -> None:
        """End the actor because its code has called exit_actor() or sys.exit().

        Args:
            entry: the call whose own code did so; None: a task or a thread did so, which a call has started.
            kind: ``"exit"``, or ``"sys.exit"``, after which the actor may be restarted.
        """
        why = why or "exit_actor() was called in it"
        if entry is not None:
            self.executor.fail(entry, died(self, why))
        _ = self.stop("now", why)  # "now": no waiting call may run
        if self.spec is not None:
            self.agent.submit(partial(send_ended, self.runtime, self.spec, kind, why))

    def on_exit_actor(self, execution: Execution, why: str) -> None:
        """End the actor if exit_actor() was called in a task or thread that the call ``execution`` has started.

        Otherwise the call's own code has called exit_actor(), whose exception reaches the executor, which ends the actor.
        """
        runner: Any = WAITING.runner
        entry: Any = None
        if isinstance(runner, Runner) and runner in self.runners:
            entry = runner.running
        elif isinstance(runner, EventLoop) and runner in list(self.loops.values()):
            entry = runner.current
        if entry is not execution:
            self.agent.submit(partial(self.exited, None, why))

    def stop(self, how: str, why: str) -> Future[None]:
        """End the actor: with ``"drain"`` after its waiting calls have run, with ``"now"`` without running them.

        The future completes when the actor has ended; if calls are running that ``"now"`` interrupts, it completes at once.
        ``"move"`` is like ``"drain"``; the future's value is then the last state, if any.
        """
        self.moving = self.moving or how == "move"
        how = "drain" if how == "move" else how
        with self._lock:
            if self.ended:
                return self.over
            self.why = self.why or why
            if how == "drain" and self.state in ("alive", "constructing"):
                self.state = "ending"
        if how == "drain":
            self.end_if_idle()
        else:
            self._end_now()
        return self.over

    @property
    def ended(self) -> bool:
        """Whether the actor accepts no more calls."""
        return self.state in ("closing", "stopping", "over")

    def end_if_idle(self) -> None:
        """End the actor if it is idle and in the state "ending"."""
        if (
            self.state == "ending"
            and self._intake is None
            and not self.executor.checkpoints.waiting
            and self.mailbox.close_if_idle()
        ):
            self._end_now()

    def _end_now(self) -> None:
        with self._lock:
            if self.ended:
                return
            self.state = "closing"
        running = self._close()
        self.runtime.streams.abort(self, died(self, self.why))
        for entry in running:
            self.executor.fail(entry, died(self, self.why))
            self.interrupt(entry)
            # Also cancel the calls for which the entry waits, as if the process had ended.
            self.cancel(entry, False, False)
        self.registry.forget(self)
        self.agent.submit(self._wind_up)
        if running:
            self.over.try_complete(None)

    def runner_ended(self, runner: Runner) -> None:
        """Remove a runner that has ended. If it was the last runner of a closing actor, finish the actor's end in this thread."""
        with self._lock:
            self.runners.remove(runner)
        self._wind_up()

    def _close(self) -> list[Envelope]:
        """Refuse the waiting calls and all later calls; return the running calls."""
        FOREIGN_THREADS.unregister(self)
        loops = list(self.loops.values())  # copied first, because _wind_up() empties the table
        entries, runners = self.mailbox.close()
        with self._lock:
            intake, self._intake = self._intake or [], None
        for entry in [*entries, *intake]:
            self.executor.refuse(entry, HostedActorGoneError(self.id, self.why))  # type: ignore[arg-type]
        for loop in loops:
            self.refuse_due(loop)
        for runner in runners:
            runner.stop()
        running = []
        for runner in list(self.runners):
            running += [each for each in runner.entered if isinstance(each, Envelope)]
        for loop in loops:
            running += list(loop.entries.values())
        return running

    def refuse_due(self, loop: EventLoop) -> None:
        """Refuse the plain methods that wait for their turn on a loop, because the actor has ended."""
        for entry in loop.pop_due():
            self.executor.refuse(entry, HostedActorGoneError(self.id, self.why))

    def _wind_up(self) -> None:
        """Run on_stop() (if the actor moves, checkpoint() before it), and close the loops; once, after the last runner's end."""
        with self._lock:
            if self.state != "closing" or self.runners:
                return
            self.state = "stopping"
        instance, self.instance = self.instance, None
        state = self._last_state(instance) if self.moving and instance is not None else None
        if instance is not None:
            hook = getattr(type(instance), "on_stop", None)
            try:
                hooks.reach("actor.ending")
                result = None if hook is None else hook(instance)
                if asyncio.iscoroutine(result):
                    asyncio.run(result)
            except BaseException as error:
                report(_log, error, "on_stop of actor %s raised", self.title)
        instance = None
        with self._lock:
            loops, self.loops = list(self.loops.values()), {}
        ends = [loop.close() for loop in loops]

        def over() -> None:
            if ends:
                ends.pop().add_done_callback(lambda _: over())
                return
            self.state = "over"
            for each in list(self.executor.answered_later):
                # No other code will answer these calls. _close() has refused the calls that were not dequeued, as not executed.
                self.executor.fail(each, died(self, self.why))
                if each.begun:
                    each.give_up()
            self.over.try_complete(state)

        over()

    def _last_state(self, instance: Any) -> Snapshot | None:
        """Return the state with which the next incarnation, on another worker, starts; None if ``checkpoint()`` gives none."""
        if self.spec is None or not self.spec.info.has_checkpoint:
            return None
        try:
            return Snapshot.of(instance.checkpoint(), on_cpu=True)
        except Exception as error:
            report(_log, error, "the state of actor %s could not be kept", self.title)
            return None

    # -- counting ----------------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int]:
        """Return how many calls wait and how many run."""
        waiting, running = self.mailbox.counts()
        return waiting + len(self._intake or ()), running
