"""How an actor's calls are run and answered, in its runners and on its event loops.

A thread claims the right to answer a call by removing the entry from the table ``running`` of the caller's peer, in one atomic
step. If a method returns after its call was cancelled, the thread finds that the call was answered, and discards the result.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial
from threading import get_ident
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Final

import torch

from actorrpc import _time
from actorrpc._exceptions import add_note, cut_frames, is_a, let_frames_go
from actorrpc._torch import use_count
from actorrpc.actors.host.checkpoints import Checkpoints
from actorrpc.actors.host.mailbox import GRACE_S, Envelope, GroupQueue
from actorrpc.actors.host.threads import CALL_METHODS, RUNS, Interrupted, Runner
from actorrpc.actors.refs.object_ref import SMALL, ObjectRef, keep_large, keep_sole
from actorrpc.actors.refs.snapshot import ATOMS, Snapshot, StoredResult
from actorrpc.actors.refs.wait import gather
from actorrpc.actors.spec.actor_spec import ActorExit, HostedActorGoneError, exit_text
from actorrpc.actors.streams.producer import aproduce, produce
from actorrpc.agent import outbound
from actorrpc.agent.calls import CALLER_BIT, CURRENT, MAILBOX_BIT
from actorrpc.agent.executor import ASYNC_MARK, Deferred, future_of
from actorrpc.agent.hooks import run_hooked
from actorrpc.errors import CancelledError, LimitError, RpcError, RpcTimeoutError
from actorrpc.futures import Future
from actorrpc.rpc.rref import RRef

if TYPE_CHECKING:
    from actorrpc.actors.host.actor import HostedActor
    from actorrpc.actors.host.event_loop import EventLoop
    from actorrpc.actors.streams.producer import Producer

__all__ = ["ActorExecutor", "died", "resolve"]

INFINITE: Final = float("inf")
_AT_ONCE: Final = 64  # calls that are started in one callback of the event loop
_MAX_DEPTH: Final = 60  # greatest number of calls that are nested on one thread
_NOTHING: Final = object()
_TEXTS: Final = frozenset({str, bytes})
_FIXED: Final = frozenset({int, float, bool, str, bytes, type(None)})
_OF_ACTOR: Final = 1 << MAILBOX_BIT
_NUMBER: Final = (1 << CALLER_BIT) - 1  # mask of the number of an execution


def died(hosted: HostedActor, why: str) -> HostedActorGoneError:
    """Return the error of a call that was running when its actor ended; its caller asks the supervisor about the actor."""
    error = HostedActorGoneError(hosted.id, why)
    error.maybe_executed = True
    return error


def resolve(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Future[tuple[tuple[Any, ...], dict[str, Any]]] | None:
    """Start to fetch the results of all ObjectRefs among the arguments; no thread waits.

    Returns:
        A Future of the arguments with values in place of ObjectRefs, which fails as soon as one ObjectRef fails; None if no
        argument is an ObjectRef.
    """
    refs = [each for each in (*args, *kwargs.values()) if type(each) is ObjectRef]
    if not refs:
        return None

    def complete(fetched: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = iter(fetched)
        return (
            tuple([next(values) if type(each) is ObjectRef else each for each in args]),
            {name: next(values) if type(each) is ObjectRef else each for name, each in kwargs.items()},
        )

    resolved = gather(refs, "the ObjectRefs among the arguments", complete)
    resolved.flush()
    return resolved


class ActorExecutor:
    """Runs the calls of one actor. Thread-safe."""

    def __init__(self, hosted: HostedActor) -> None:
        self.hosted = hosted
        self.runtime = hosted.runtime
        self.agent = hosted.agent
        self.mailbox = hosted.mailbox
        self.checkpoints = Checkpoints(hosted)
        self._instance_rref: Any = None
        self._numbers = hosted.registry.executions
        self.keeps_state = False  # whether the actor has checkpoints
        #: Dequeued calls that are answered later: by a coroutine or a callback of an event loop, a future or a checkpoint.
        self.answered_later: dict[Envelope, None] = {}

    def run(self, entry: Any, runner: Runner) -> None:
        """Run one call on a runner, and answer it. Never raises."""
        agent, hosted, running = self.agent, self.hosted, self.mailbox.running
        if not agent.pool.idle:
            agent.pool.ensure_reader()
        runner.depth += 1
        try:
            if runner.depth > _MAX_DEPTH:
                self.fail(entry, self._too_deep())
            elif entry.deadline == INFINITE or self._may_start(entry):
                self._begin(entry, runner)
                token = CURRENT.set(entry)
                try:
                    try:
                        runner.under_way[entry] = RUNS
                        runner.running = entry
                        if entry.start_forbidden:
                            raise Interrupted
                        value = self._call(entry, runner)
                    finally:
                        # End a forked child now: the code below may need a lock that a thread held at the fork.
                        if agent.abandoned:
                            agent.end_fork(self.label(entry), sys.exc_info()[1])
                        found = runner.under_way.pop(entry, None)
                        if found is not RUNS or runner.inspected:
                            runner.withdraw(entry, found)
                        runner.running = None
                        running.pop(entry.chain, None)
                    if value is not _NOTHING:
                        if (
                            type(value) is torch.Tensor
                            and sys.getrefcount(value) == 2
                            and _has_own_memory(value)
                        ):
                            entry.sole = True
                        self.answer(entry, value)
                        value = None
                except BaseException as error:
                    self._raised(entry, error)
                finally:
                    CURRENT.reset(token)
                    entry.opened = None
        except BaseException as error:
            self.fail(entry, error)
        finally:
            runner.depth -= 1
        conn = entry.conn
        if conn is None:
            return
        thread, waiting = runner.thread, runner.queue.waiting
        if (waiting or hosted.actor_threads.ready) and len(conn.outbox) < agent.settings.cork_frames:
            if conn not in agent.scheduler.corked:
                agent.scheduler.cork(conn)  # send the answers of a batch together
        elif runner.depth or waiting:
            conn.flush(True)
        else:
            # The runner's thread sends the buffered answer when it has no other work.
            if thread.caller is not None and thread.caller is not conn and thread.caller.outbox:
                thread.caller.flush()
            thread.caller = conn

    def _raised(self, entry: Envelope, error: BaseException) -> None:
        """Answer a call whose method has raised; end the actor if the exception is that of ``exit_actor()`` or ``sys.exit()``."""
        if self.agent.abandoned:
            self.agent.end_fork(self.label(entry), error)
        spec = self.hosted.spec
        if spec is not None and spec.options.on_error == "debug" and self.agent.on_failure is not None:
            if isinstance(error, Exception) and not is_a(error, (RpcError, ActorExit)):
                self.agent.on_failure(entry, error)
        if type(error) is NameError:
            _explain_missing_name(error)
        if is_a(error, ActorExit):
            self.hosted.exited(entry, str(error))
        # A message without "method" constructs the actor: the constructor's sys.exit() is an error like others.
        elif is_a(error, SystemExit) and "method" in entry.header:
            self.hosted.exited(entry, exit_text(error), "sys.exit")
        elif is_a(error, Interrupted):
            self.fail(entry, CancelledError(f"{self.label(entry)} was interrupted: its call was cancelled"))
        else:
            self.fail(entry, error)

    def _too_deep(self) -> RecursionError:
        return RecursionError(
            f"actor {self.hosted.title}: calls that descend from each other are nested {_MAX_DEPTH} deep in it"
        )

    def _begin(self, entry: Envelope, runner: Runner | None) -> None:
        """Begin the execution of a call: calls that descend from it may run within it from now on."""
        caller = self.hosted.caller
        if caller is None:
            caller = self.hosted.registry.new_caller()
        id = _OF_ACTOR | caller << CALLER_BIT | next(self._numbers) & _NUMBER  # unique among all workers
        entry.path = (*entry.path, id)
        entry.chain = id
        entry.actor = self.hosted
        entry.what = entry.header.get("method", "__init__")
        entry.thread = get_ident()
        entry.begun = _time.now()
        self.mailbox.running[id] = runner

    def _may_start(self, entry: Envelope) -> bool:
        if _time.now() <= entry.deadline:
            return True
        text = f"{self.label(entry)} reached its turn too late to be started"
        self.refuse(entry, RpcTimeoutError(text, maybe_executed=False, worker=self.agent.name))
        return False

    def label(self, entry: Envelope) -> str:
        return f"the call of {entry.title}"

    def arguments(self, entry: Envelope) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the ``args`` and ``kwargs`` of a call, decoding its message if that was not done before its turn."""
        opened, entry.opened = entry.opened, None
        if opened is None:
            frame = entry.claim_frame()
            if frame is None:
                raise CancelledError(f"{self.label(entry)} was cancelled", maybe_executed=False)
            try:
                opened = outbound.opened(self.agent, entry.conn, frame, entry.peer, entry.header, entry)
            except LimitError as error:
                raise LimitError(f"{self.label(entry)} was not executed: {error}") from None
        elif isinstance(opened, BaseException):
            raise opened
        return opened  # type: ignore[no-any-return]

    def _call(self, entry: Envelope, runner: Runner | None = None) -> Any:
        """Run the method; return its result, or ``_NOTHING`` if the answer is sent later or was sent.

        Args:
            runner: the runner that runs the method; None: an event loop does.
        """
        header = entry.header
        name = header.get("method")
        if name is None:
            return self.hosted.make(entry)
        args, kwargs = self.arguments(entry)
        self.hosted.calls += 1
        method, kind = self._method(name)
        hooks = self.agent.hooks
        call = method
        if hooks.on_start or not hooks.header_fields.isdisjoint(header):
            call = partial(self._run_hooked, entry, method)
        if kind != "sync" or "window" in header:
            if kind.startswith("async"):
                raise TypeError(
                    f"{self.hosted.title}.{name} is async, but no method was when its class became an actor, so the actor has no "
                    "event loop"
                )
            self._stream(entry, call(*args, **kwargs))
            return _NOTHING
        value = call(*args, **kwargs)
        if type(value) is Deferred:
            self._answer_later(entry, value.future)
            return _NOTHING
        if getattr(method, ASYNC_MARK, None) is not None:
            # Save the state now: the future may complete in any thread, while the next call runs.
            self._when_kept(entry, partial(self._answer_later, entry, future_of(value, method)))
            return _NOTHING
        if self.keeps_state:
            more = runner is not None and runner.queue.waiting > 0
            if runner is None or (
                runner.depth == 1 and type(value) in _FIXED and (more or self.checkpoints.waiting)
            ):
                self._when_kept(entry, partial(self.answer, entry, value), more)
                return _NOTHING
            # Block until the checkpoint is stored, and answer then: another call on this thread could change a mutable result.
            self.checkpoints.save()
        return value

    def _stream(self, entry: Envelope, items: Any) -> None:
        """Answer a call with a stream of items, and run the method's generator to its end."""
        if isinstance(items, AsyncGenerator):
            items.aclose().close()
            raise TypeError(
                f"{entry.title} returned an async generator, but its decorator hides this: have the decorator's wrapper be an "
                "async generator function"
            )
        generator = items if inspect.isgenerator(items) else (item for item in items)
        producer = self._open_stream(entry)
        if producer is None:
            generator.close()
        else:
            produce(self.checkpoints.behind(generator), producer, partial(self._end_of_stream, entry))

    def _run_hooked(self, entry: Envelope, method: Any, /, *args: Any, **kwargs: Any) -> Any:
        hooks = self.agent.hooks
        if hooks.on_start or not hooks.header_fields.isdisjoint(entry.header):
            return run_hooked(hooks, entry, method, args, kwargs)
        return method(*args, **kwargs)

    def _when_kept(self, entry: Envelope, answer: Callable[[], object], more: bool = False) -> None:
        """Call ``answer()``: when the state is stored, if a checkpoint is due (see :meth:`Checkpoints.hold`), or else now."""
        if not self.checkpoints.hold(entry, answer, more):
            answer()

    def _method(self, name: str) -> tuple[Any, str]:
        assert self.hosted.spec is not None
        instance = self.hosted.instance
        if instance is None:  # the actor ended after its event loop had received the call
            raise HostedActorGoneError(self.hosted.id, self.hosted.why)
        info = self.hosted.spec.info.methods.get(name)
        if info is not None:
            method = getattr(instance, name)
            if not callable(method):  # an attribute of the instance replaces a method only if it is callable
                method = inspect.getattr_static(type(instance), name).__get__(instance, type(instance))
            return method, info.kind
        if name == "<call>":
            return self._call_function, "sync"
        if name == "<getattr>":
            return self._attribute, "sync"
        if name == "<rref>":
            return self._reference, "sync"
        raise AttributeError(f"actor {self.hosted.title} has no method {name!r}")

    def _call_function(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return function(self.hosted.instance, *args, **kwargs)

    def _attribute(self, name: str) -> Any:
        return getattr(self.hosted.instance, name)

    def _reference(self) -> Any:
        if self._instance_rref is None:
            self._instance_rref = RRef(self.hosted.instance)
        return self._instance_rref

    def _open_stream(self, entry: Envelope) -> Producer | None:
        """Answer a call with a stream; return its producer, or None if the call was answered before."""
        producer: Producer = self.runtime.streams.open(
            int(entry.header.get("window", 0)), entry.peer, owner=self.hosted, entry=entry
        )
        if not self.answer(entry, producer.ticket(), keep=False):
            producer.close()
            return None
        producer.serves(entry.id)
        if entry.unwanted:  # the call was cancelled before the stream existed
            producer.close()
        if entry.conn is not None:
            entry.conn.flush(True)
        return producer

    def _end_of_stream(self, entry: Envelope, error: BaseException) -> BaseException:
        """Return the exception that the consumer of a stream gets for the exception that the generator has raised."""
        if is_a(error, ActorExit):
            return died(self.hosted, str(error) or "exit_actor() was called in it")
        if is_a(error, SystemExit):
            return died(self.hosted, exit_text(error))
        if is_a(error, (Interrupted, CancelledError)):
            if self.hosted.ended:
                return died(self.hosted, self.hosted.why)
            return CancelledError(f"{self.label(entry)} was interrupted: its call was cancelled")
        return error

    def _answer_later(self, entry: Envelope, future: Any) -> None:
        self.answered_later[entry] = None
        self.agent.executor.when_done(
            future, entry, partial(self.answer, entry), partial(self._raised, entry)
        )

    # -- on an event loop ------------------------------------------------------------------------------

    def _start(self, entry: Envelope, queue: GroupQueue) -> None:
        loop = self.hosted.loop_of(queue)
        if loop is None:  # the actor has just ended
            self.refuse(entry, HostedActorGoneError(self.hosted.id, self.hosted.why))
        if loop is None or not self._may_start(entry):
            self.hosted.finished(self.mailbox.done(queue))
            return
        if self.hosted.is_plain(entry):
            loop.turn(entry, partial(self._turn, entry, loop))
            if self.mailbox.closed:  # the thread that ends the actor may not have found this method in `due`
                self.hosted.refuse_due(loop)
            return
        self._begin(entry, None)
        loop.entries[entry.chain] = entry
        context = loop.fresh_context()
        context.run(CURRENT.set, entry)
        task = entry.task = loop.task(self._run_async(entry), context)
        if entry.start_forbidden:  # the coroutine is cancelled, and then answers the call
            loop.submit(partial(self.stop, entry, False))

        def over(_: Any) -> None:
            entry.task = None
            self._over(entry, queue, loop)

        task.add_done_callback(over)

    def _over(self, entry: Envelope, queue: GroupQueue, loop: EventLoop) -> None:
        """Record the end of a call that has run on the loop, and start the next calls."""
        entry.opened = None
        if entry.grace is not None:
            entry.grace.cancel()
        loop.entries.pop(entry.chain, None)

        def finish() -> None:
            self.mailbox.running.pop(entry.chain, None)
            if entry.conn is not None and entry.conn.outbox:
                entry.conn.flush()
            self.hosted.finished(self.mailbox.done(queue))

        self.hosted.guard(finish)
        self.pump(queue)

    def stop(self, entry: Envelope, stop: bool) -> None:
        """Cancel the coroutine of a call that was cancelled (``stop``: see Execution.give_up). Runs on the loop.

        The coroutine's handlers may still make calls. The call is answered when the coroutine has ended, or after ``GRACE_S``.
        """
        task = entry.task
        if task is None or entry.grace is not None:
            return
        over = partial(self._grace_over, entry, task, stop)
        entry.grace = self.agent.clock.after(GRACE_S, lambda: self.agent.submit(over))
        task.cancel()
        # Set the deadline first, because it bounds all calls that the coroutine and its threads make from now on. Then cancel
        # the calls made before.
        entry.deadline = _time.now() + GRACE_S
        entry.give_up_nested(stop)

    def _grace_over(self, entry: Envelope, task: asyncio.Task[Any], stop: bool) -> None:
        if task.done():
            return
        entry.give_up(stop)
        self.fail(
            entry,
            CancelledError(
                f"{self.label(entry)} was cancelled, and its coroutine has not ended within {GRACE_S:g} s: it is cancelled again"
            ),
        )
        if entry.conn is not None:
            entry.conn.flush()
        loop = self.hosted.loop_of(entry.queue)
        if loop is not None:
            loop.submit(task.cancel)

    def _turn(self, entry: Envelope, loop: EventLoop) -> None:
        """Run a plain method on the loop. If it is not in ``due``, it has run within a wait, or was refused: do nothing."""
        if loop.due.pop(entry, entry) is None:
            self.hosted.guard(partial(self.run_plain, entry, loop, within=False), entry)

    def run_plain(self, entry: Envelope, loop: EventLoop, *, within: bool) -> None:
        """Run a plain method on the loop's thread, and answer the call, also if the method raises.

        Args:
            within: the method runs within the wait of another call, which blocks the loop.
        """
        queue = entry.queue
        assert queue is not None
        self._begin(entry, None)
        loop.entries[entry.chain] = entry
        run = partial(self._run_plain, entry, loop)
        outer, loop.plain = loop.plain, entry
        loop.depth += 1
        try:
            loop.fresh_context().run(run) if within else run()
        except BaseException as error:
            self._raised(entry, error)
        finally:
            loop.depth -= 1
            loop.plain = outer
        self._over(entry, queue, loop)

    def _run_plain(self, entry: Envelope, loop: EventLoop) -> None:
        if self.mailbox.closed:
            raise HostedActorGoneError(self.hosted.id, self.hosted.why)
        if entry.start_forbidden:
            raise CancelledError(f"{self.label(entry)} was cancelled before it started", maybe_executed=False)
        if loop.depth > _MAX_DEPTH:
            raise self._too_deep()
        CURRENT.set(entry)
        value = self._call(entry)
        if self.agent.abandoned:
            self.agent.end_fork(self.label(entry), None)
        if value is not _NOTHING:
            self.answer(entry, value)

    async def _run_async(self, entry: Envelope) -> None:
        try:
            if self.mailbox.closed:  # the actor has ended after the call was started
                raise HostedActorGoneError(self.hosted.id, self.hosted.why)
            args, kwargs = self.arguments(entry)
            self.hosted.calls += 1
            method, kind = self._method(entry.header["method"])
            if kind != "async":
                items = self._run_hooked(entry, method, *args, **kwargs)
                generator = items if isinstance(items, AsyncGenerator) else _stepwise(items)
                producer = self._open_stream(entry)
                if producer is None:
                    await generator.aclose()
                else:
                    kept = self.checkpoints.behind_async(generator)
                    await aproduce(kept, producer, partial(self._end_of_stream, entry))
                return
            value = await self._run_hooked(entry, method, *args, **kwargs)
            if self.agent.abandoned:  # in a forked child, which must not save the parent's state
                self.agent.end_fork(self.label(entry), None)
            answer: Callable[[], object] = partial(self.answer, entry, value)
            if entry.grace is not None:  # the coroutine was cancelled, and has returned nevertheless
                answer = partial(self.fail, entry, CancelledError(f"{self.label(entry)} was cancelled"))
            self._when_kept(entry, answer)
        except BaseException as error:
            if not is_a(error, asyncio.CancelledError):
                self._raised(entry, error)
            elif self.hosted.ended:  # the loop has cancelled the coroutine, because the actor ended
                self.fail(entry, died(self.hosted, self.hosted.why))
            else:
                self.fail(entry, CancelledError(f"{self.label(entry)} was cancelled"))

    def answer(self, entry: Envelope, value: Any, *, keep: bool = True) -> bool:
        """Send the result of a call (with ``keep``, maybe a reference to it); send nothing, return False if it was answered."""
        if not self._claim(entry):
            return False
        header = entry.header
        if "num_returns" in header and header["num_returns"] != 1:
            keep = False  # each part is kept separately
            try:
                if "rref" in header:
                    self.runtime.references.keep(header["rref"], entry.peer.key, value)
                    value = None
                else:
                    value = self._split(entry, value, header["num_returns"])
            except BaseException as error:
                self.agent.executor.fail(entry, error)
                return True
        kept = (keep_sole if entry.sole else keep_large) if keep and "keep" in header else None
        self.agent.executor.answer(entry, value, kept)
        return True

    def _split(self, entry: Envelope, value: Any, count: int) -> list[Any]:
        """Return the parts of a result, each packed separately, so that the caller's references share no object."""
        name = entry.label
        try:
            values = list(value)
        except TypeError:
            raise TypeError(f"{name} has num_returns={count}, but returned {type(value).__name__}") from None
        if len(values) != count:
            raise ValueError(f"{name} has num_returns={count}, but returned {len(values)} values")
        stays = not self.agent.shares_memory(entry.peer)
        for at, each in enumerate(values):
            if type(each) in ATOMS and not (type(each) in _TEXTS and len(each) > SMALL):
                continue
            snapshot = values[at] = Snapshot.of(each, label=f"value {at} of the result of {name}")
            if stays and snapshot.nbytes > SMALL:
                values[at] = StoredResult(RRef(snapshot))
        return values

    def fail(self, entry: Envelope, error: BaseException) -> None:
        if not self._claim(entry):  # it was answered before
            let_frames_go(error)
            return
        frame = entry.claim_frame()
        if frame is not None:  # its arguments were never decoded
            self.agent.inbox.discard(entry.conn, frame)
        if self.hosted.on_error is not None:
            try:
                error = self.hosted.on_error(error)
            except BaseException as failure:  # raised by __str__() of the user's exception
                error = failure
        cut_frames(error, __file__)
        self.agent.executor.fail(entry, error)

    def refuse(self, entry: Envelope, error: RpcError) -> None:
        """End a call that does not run: answer it with an error, and release its arguments."""
        if self._claim(entry):
            frame = entry.claim_frame()
            if frame is not None:
                self.agent.executor.refuse(entry.conn, frame, error)
            else:
                self.agent.executor.refuse_opened(entry.conn, entry.id, error)
            if entry.conn is not None:
                entry.conn.flush()
        entry.opened = None

    def _claim(self, entry: Envelope) -> bool:
        if self.answered_later:
            self.answered_later.pop(entry, None)
        running = entry.peer.running
        if running.get(entry.id) is not entry:
            # The call was answered. If a stream has replaced it in `running`, keep the stream, so that a cancellation closes it.
            return False
        return running.pop(entry.id, None) is entry

    def pump(self, queue: GroupQueue) -> None:
        """Start the entries of the queue, in batches, between which the loop runs other callbacks. Runs on the loop."""
        for _ in range(_AT_ONCE):
            entry, _todo = self.mailbox.dequeue(queue)
            if entry is None:
                entry = self.mailbox.dequeue_descendant(queue)
            if entry is None:
                return
            assert isinstance(entry, Envelope)
            self.answered_later[entry] = None
            self.hosted.guard(partial(self._start, entry, queue), entry)
        loop = self.hosted.loop_of(queue)
        if loop is not None:
            loop.submit(partial(self.pump, queue))


def _explain_missing_name(error: NameError) -> None:
    """Add a note to a NameError in code that was sent by value: the code uses copies of the globals, made when it was sent."""
    spaces = [frame.f_globals for frame, _ in walk_tb(error.__traceback__)]
    module = sys.modules.get(spaces[-1].get("__name__", "")) if spaces else None
    if spaces and (module is None or vars(module) is not spaces[-1]):
        add_note(
            error,
            f"this code was sent by value, with the globals that existed then. If {error.name!r} was defined later, run the "
            "class statement (in a notebook, its cell) again and make a new actor",
        )


async def _stepwise(items: Any) -> AsyncGenerator[Any, None]:
    """Run a plain generator (or another iterable) on the event loop, which runs other callbacks between its steps."""
    try:
        for item in items:
            yield item
            await asyncio.sleep(0)
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()


def _has_own_memory(tensor: torch.Tensor) -> bool:
    """Return True only if it is certain that no other object uses the memory of this tensor."""
    if tensor.device.type != "cpu" or tensor.requires_grad or tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    # A use count of two: the tensor and ``storage``. Memory from elsewhere (numpy, shared memory) cannot be resized.
    return storage.resizable() and use_count is not None and use_count(storage._cdata) == 2


CALL_METHODS.update(
    each.__code__
    for each in (
        ActorExecutor.run,
        ActorExecutor._call,
        ActorExecutor._call_function,
        ActorExecutor._run_async,
    )
)
