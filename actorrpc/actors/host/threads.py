"""The runners of an actor, which run its sync methods, and what they do while they wait.

A serial actor has one :class:`Runner`, which runs all its calls and its constructor, because renderers, database connections and
event loops must be used in the thread that made them. While a runner is in one of actorrpc's waits, it runs calls that descend
from its own call, nested on the same thread. If a method runs an event loop itself (``asyncio.run()``), the loop runs such calls
between the steps of its coroutines, whatever the coroutines await.

``carriers.py`` decides which thread serves a runner, where the thread sleeps, and when it is woken: at most ``MAX_RUNNERS``
runners of a worker have their own threads, further runners share threads. Between two calls, a runner without its own thread
keeps its context variables and the mode of autograd; other thread-local state is as another actor has left it.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from operator import attrgetter, call, itemgetter
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final

import torch

from actorrpc import _stacks, _time
from actorrpc._exceptions import mark_handlers
from actorrpc._python import LOOP_STEPS, enter_task, leave_task, running_loop, set_running_loop
from actorrpc._torch import set_grad_enabled
from actorrpc.actors.host.mailbox import Entry, GroupQueue
from actorrpc.actors.streams.stalls import Stall, awaited, awaited_by, loop_on
from actorrpc.agent.calls import Call
from actorrpc.futures import INTERRUPTED, WAITING, set_foreign_threads
from actorrpc.transport.signals import is_protected, loses_exceptions

if TYPE_CHECKING:
    from actorrpc.actors.host.actor import HostedActor
    from actorrpc.actors.host.carriers import ActorThread

__all__ = [
    "CALL_METHODS",
    "FOREIGN_THREADS",
    "RUNS",
    "ForeignThreads",
    "Interrupted",
    "Runner",
    "bears_interruption",
]

# Seconds after which a postponed interruption is tried again (:meth:`Runner.interrupt`).
_AGAIN_S: Final = 0.02
# The progress of the interruption of a running call.
RUNS: Final = "runs"
_WANTED: Final = "will be interrupted"
_RAISED: Final = "was interrupted where it called this package"
_STRUCK: Final = "was interrupted in its own code"
_set_async_exc: Final = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = (ctypes.c_ulong, ctypes.py_object)
_place_of: Final = attrgetter("f_code", "f_lasti", "f_back")
_IMPORT: Final = "<frozen importlib."  # prefix of the file names of frames that import a module
_PACKAGE: Final = __name__.partition(".")[0] + "."
# Functions that make a task of a coroutine, and then run the task on an event loop.
_STARTS_LOOP: Final = frozenset(
    each.__code__
    for each in (
        asyncio.BaseEventLoop.run_until_complete,
        asyncio.run,
        asyncio.Runner.run,
        asyncio.Runner.close,
    )
)
# The functions of this package that call methods of actors. A method may be of the standard library itself.
CALL_METHODS: Final[set[CodeType]] = set()
_RUN_FOREVER: Final = asyncio.BaseEventLoop.run_forever.__code__


class Interrupted(KeyboardInterrupt):
    """Raised in a running method whose call was cancelled.

    It is not an Exception, so that ``except Exception`` does not catch it. It is a KeyboardInterrupt, because libraries handle
    this exception: an event loop that the method runs itself raises it, but only logs all other exceptions in callbacks.
    Like the exception of a signal handler, it does not mean that the code in which it is raised has failed.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        mark_handlers(self)


def bears_interruption(frame: FrameType | None) -> bool:
    """Tell whether a thread with this stack may be interrupted.

    It may not be if its innermost frame is of this package, or of the standard library and called by this package: the exception
    would, for example, end an encrypted connection in ``ssl``, or leave a lock locked. Nor may it be in these cases:

    * An import runs: a module that was imported by half can often not be imported again.
    * A ``__del__`` or the callback of a weak collection runs: the interpreter would print the exception, and the
      method would continue.
    * ``Thread.start`` runs: until a new thread runs, CPython 3.11 gives its state the id of the thread that starts it. An
      exception that is set for this id meanwhile would end the new thread before its first line.
    * An event loop begins or ends to run: it could not be closed afterwards.
    * asyncio holds a coroutine that no task runs yet, as at the end of ``asyncio.run``. The coroutine would never be awaited, and
      the interpreter would print a warning.
    """
    # Python 3.13 and later may raise the exception only after the return to the caller. Therefore the caller counts.
    owner = frame
    while owner is not None and _is_library(owner):
        owner = owner.f_back
    if owner is None or (
        _module(owner).startswith(_PACKAGE) and (owner is frame or owner.f_code not in CALL_METHODS)
    ):
        return False
    return _unwinds(frame)


def _unwinds(frame: FrameType | None) -> bool:
    """Tell whether all frames of a stack pass on an exception without harm (see :func:`bears_interruption`)."""
    runs = False  # True: an inner frame runs an event loop, whose task has begun
    while frame is not None:
        code = frame.f_code
        runs = runs or (code is _RUN_FOREVER and _has_begun(loop_on(frame)[1]))
        if (
            code is threading.Thread.start.__code__
            or code in LOOP_STEPS
            or loses_exceptions(code)
            or code.co_filename.startswith(_IMPORT)
            or (code in _STARTS_LOOP and not runs)
        ):
            return False
        frame = frame.f_back
    return True


def _has_begun(task: object) -> bool:
    """Tell whether a task has taken its first step. If its coroutine never takes a step, the interpreter prints a warning."""
    coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
    return not inspect.iscoroutine(coroutine) or inspect.getcoroutinestate(coroutine) != inspect.CORO_CREATED


def _interrupt_at(ident: int, place: object) -> bool:
    """Set :class:`Interrupted` for a thread if it is still at ``place``; return whether the exception was set.

    While this thread inspects the other thread, the interpreter may run the other thread, which may enter code of this package
    meanwhile. Therefore functions in C that call one another compare the place again and set the exception: the interpreter
    switches no threads between them.
    """
    here = map(_place_of, map(itemgetter(ident), map(call, (sys._current_frames,))))
    idents = map({place: ident}.get, here, (0,))  # there is no thread 0
    with _stacks.without_collection():
        try:
            return bool(next(map(_set_async_exc, idents, (Interrupted,))))
        except KeyError:  # the thread has ended
            return False


def _may_raise(frame: FrameType) -> bool:
    """Tell whether an interruption may be raised in this frame of this package, which a method has called."""
    found: FrameType | None = frame
    while found is not None and _module(found).startswith(_PACKAGE):
        if found.f_code in (Runner.run_on.__code__, Runner.serve.__code__) or is_protected(found):
            # The runner's own work before or after a method, or code that must not be interrupted.
            return False
        found = found.f_back
    return found is not None and _unwinds(found)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_library(frame: FrameType) -> bool:
    """Tell whether a frame is of the standard library, or of a constructor that ``namedtuple`` has generated."""
    module = _module(frame).partition(".")[0]
    return module in sys.stdlib_module_names or module.startswith("namedtuple_")


def _watch_what_is_lost() -> None:
    """Retry interruptions that are raised where the interpreter ignores exceptions, instead of printing them.

    Such places are finalisers, and the callbacks of the collector and of weak references: a thread may enter such a place after
    its stack was inspected. The earlier ``sys.unraisablehook`` is called for all other exceptions.
    """
    previous = sys.unraisablehook
    if getattr(previous, "func", None) is _note_unraisable:
        return
    sys.unraisablehook = partial(_note_unraisable, previous)


def _note_unraisable(previous: Callable[[Any], Any], unraisable: Any, /) -> Any:
    runner = WAITING.runner
    if unraisable.exc_type is Interrupted and isinstance(runner, Runner):
        runner.interruption_lost()
        return None
    return previous(unraisable)


class Runner:
    """Runs the calls of one queue of an actor, in a thread, until the actor ends.

    Attributes:
        thread: the thread that serves it now, or has served it last.
        shared: it has no thread of its own.
        under_way: the calls that run here, the innermost last, and the progress of the interruption of each. Calls are added and
            removed in single steps, without a lock. The lock ``_interrupts`` guards the progress, and is held while an
            interruption is set. It is a leaf, and re-entrant, because finalisers may call this package while it is held.
        inspected: set before another thread inspects this one to interrupt a call. After this thread has removed a call from
            ``under_way``, it reads ``inspected``, and takes the lock if it is set (:meth:`withdraw`). Therefore either the other
            thread finds no call to interrupt, or this thread finds out that it was inspected.
    """

    def __init__(self, hosted: HostedActor, queue: GroupQueue) -> None:
        self.thread: ActorThread
        self.ident = 0
        self.shared = False
        self.work: deque[Entry] = deque()
        self.depth = 0
        self.running: Entry | None = None
        self.under_way: dict[Entry, str] = {}
        self.inspected = False
        self.queue = queue
        self._hosted = hosted
        self._threads = hosted.actor_threads
        self._grad = True  # whether gradients are enabled between the runner's calls
        self._wakers: list[tuple[Callable[[], None], object]] = []
        # The event loops that methods run on this thread: one entry for each coroutine that awaits something of actorrpc.
        self._awaits: list[asyncio.AbstractEventLoop] = []
        self._context = Context()
        self._enters: Callable[[], None] | None = None
        self._interrupts = _time.RLock()

    @property
    def title(self) -> str:
        """The title of the actor."""
        return self._hosted.title

    def start(self) -> None:
        """Begin to run calls. If the system cannot start a thread, the calls that wait for it are refused."""
        self._hosted.runners.append(self)
        if self.shared:
            self._threads.call(self)
        else:
            self.thread.start()

    def no_thread(self) -> None:
        """End before running any call, because the system cannot start a thread."""
        hosted = self._hosted
        if self._threads.remove(self):
            hosted.no_thread(self.queue)
            hosted.runner_ended(self)

    @property
    def waiting(self) -> bool:
        """Whether the thread is in one of actorrpc's waits."""
        return bool(self._wakers)

    @property
    def waits(self) -> bool:
        """Whether the thread is in one of actorrpc's waits, or a coroutine is, on an event loop that a method runs itself."""
        return bool(self._wakers or self._awaits)

    @property
    def waits_for(self) -> list[Call | Stall]:
        """All calls and streams that the thread waits for; empty if it does not wait, or waits for something else."""
        try:
            return awaited(self._wakers[-1][1])
        except IndexError:
            return awaited_by(self._own_loop()[1])

    def _own_loop(self) -> tuple[asyncio.AbstractEventLoop | None, Any]:
        """Return the event loop that the method runs itself, if it is asyncio's, and the task for whose end it runs.

        The thread's stack is searched, because a library may run the loop. Any thread may call this.
        """
        return loop_on(_stacks.top_frame(self.ident), Runner.serve.__code__)

    @property
    def entered(self) -> list[Entry]:
        """The calls that run here, the innermost last. Thread-safe."""
        return list(self.under_way)

    def runs(self, execution: int) -> bool:
        """Whether an execution is under way here."""
        return self._hosted.mailbox.running.get(execution) is self

    def wake(self) -> None:
        """Make an idle runner check its queue. If the runner has :attr:`work`, make it run that within its wait."""
        if not self.work:
            if self.shared or threading.get_ident() != self.ident:
                self._threads.call(self)
            return  # this thread is the runner's own: it has read the message, and checks the queue next
        if threading.get_ident() == self.ident:
            if not self._wakers:
                self._serve_on(running_loop())
            return
        try:
            self._wakers[-1][0]()
            return
        except IndexError:
            pass
        self.thread.wake()
        # The thread runs a method. If the method starts an event loop later than now, begin_await() finds the work.
        loop, _ = self._own_loop()
        awaits = self._awaits[-1:]
        self._serve_on(awaits[0] if loop is None and awaits else loop)

    def stop(self) -> None:
        """The mailbox was closed: wake the runner if it is idle, so that it ends. A busy runner ends after its call."""
        self._threads.call(self)

    def run_on(self, thread: ActorThread) -> bool:
        """Run the waiting calls in ``thread``, which is this thread; return False if the runner has ended.

        As soon as the mailbox has no more calls for a shared runner, another thread may serve it; from then on this thread
        must not change it.
        """
        hosted, queue, threads, shared = self._hosted, self.queue, self._threads, self.shared
        mailbox, run = hosted.mailbox, hosted.executor.run
        entry: Entry | None = None
        try:
            if not shared:
                threads.on[self] = _time.now()
                if not self.ident:
                    self.ident, self._context = thread.ident, copy_context()
            entry, todo = mailbox.dequeue(queue, self)
            if shared and entry is not None:
                self.thread, self.ident = thread, thread.ident
            while True:
                if hosted.lender is not None:
                    hosted.lender.update(queue)
                if todo is not None:
                    hosted.carry_out(todo)
                if entry is None:
                    break
                begun = _time.now() if threads.ready or len(threads.on) > 1 else 0.0
                if shared:
                    if torch.is_grad_enabled() is not self._grad:
                        set_grad_enabled(self._grad)
                    self._context.run(run, entry, self)
                    self._grad = torch.is_grad_enabled()
                else:
                    self._grad = torch.is_grad_enabled()
                    run(entry, self)
                entry = None
                if begun:
                    threads.took(_time.now() - begun)
                entry, todo = mailbox.turn(queue, self)
                if hosted.state == "ending":
                    hosted.end_if_idle()
            if not mailbox.closed:
                return True
        except BaseException as error:
            hosted.broken(error, entry)
        thread.flush()  # send the buffered answers now, because runner_ended() may run on_stop(), which may take long
        mailbox.remove_slot(queue, self)
        if threads.remove(self):  # False if another thread has ended the runner
            hosted.runner_ended(self)
        return False

    # -- while it waits ----------------------------------------------------------------------------

    def begin_wait(self, wake: Callable[[], None], what: object) -> None:
        """See futures.NestedRunner."""
        self._wakers.append((wake, what))
        if self.queue.waiting:
            self._hosted.registry.deadlocks.wake()
        if len(self._wakers) == 1:
            self._rest()
        if self._threads.on.pop(self, None) is not None and self._threads.ready:
            self._threads.pass_on()

    def end_wait(self) -> None:
        """See futures.NestedRunner."""
        self._wakers.pop()
        if not self._wakers:
            self._resume()
            if self.depth:  # a call runs; on_stop(), which may also wait, has no turn
                self._threads.on[self] = _time.now()

    def begin_await(self) -> None:
        """See futures.NestedRunner."""
        loop = asyncio.get_running_loop()
        self._awaits.append(loop)
        if self.work:
            self._serve_on(loop)
        if self.queue.waiting:
            self._hosted.registry.deadlocks.wake()
        self._rest()

    def end_await(self) -> None:
        """See futures.NestedRunner. If a coroutine was dropped, the garbage collector calls this, in any thread."""
        self._resume()
        try:
            self._awaits.pop()
        except IndexError:
            pass

    def _rest(self) -> None:
        if self.queue.yielding:
            self._hosted.carry_out(self._hosted.mailbox.rest(self.queue))
            if self._hosted.lender is not None:
                self._hosted.lender.update(self.queue)

    def _resume(self) -> None:
        if self.queue.yielding:
            self._hosted.mailbox.resume(self.queue)
            if self._hosted.lender is not None:
                self._hosted.lender.update(self.queue)

    def _serve_on(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Make the event loop that the method runs itself, if any, run :attr:`work` between the steps of its coroutines."""
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._serve_between, loop, context=self._context.copy())
            except RuntimeError:  # the loop has ended: the thread finds the work in its next wait
                pass

    def _serve_between(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.work and threading.get_ident() == self.ident:
            self.serve()
            self._serve_on(loop)  # there may be more

    def serve(self) -> None:
        """See futures.NestedRunner."""
        entry = self._hosted.mailbox.dequeue_nested(self)
        if entry is None:
            return
        outer, wakers = self.running, self._wakers
        # Calls that run nested must not wake the outer wait; their own waits add their own wakers.
        self._wakers = []
        # Hide the outer event loop and its task: nested calls may run an event loop of their own.
        loop = running_loop()
        task = None if loop is None else asyncio.current_task(loop)
        if task is not None:
            leave_task(loop, task)
        set_running_loop(None)
        # A `with torch.no_grad():` of the outer call must not apply to nested calls.
        grad = torch.is_grad_enabled()
        if grad is not self._grad:
            set_grad_enabled(self._grad)
        try:
            self._hosted.executor.run(entry, self)
        finally:
            set_grad_enabled(grad)
            set_running_loop(loop)
            if task is not None:
                enter_task(loop, task)
            self._wakers = wakers
            self.running = outer

    # -- interruption ------------------------------------------------------------------------------

    def interrupt(self, entry: Entry) -> None:
        """Raise :class:`Interrupted` in the method that runs ``entry``, once, if it is still running.

        While the thread runs code of this package, which must not be interrupted, or code in which the exception would be lost
        (:func:`bears_interruption`), the interruption is postponed and tried again a little later, as long as the entry runs. A
        method that is hardly ever in its own code is interrupted when it next calls this package, or in its wait.
        """
        # Yield first, so that the GIL is hardly ever handed over while the thread is inspected.
        _time.pause(0)
        with self._interrupts:
            self.inspected = True  # before the stack is read
            if self.under_way.get(entry) not in (RUNS, _WANTED):
                return
            frame = _stacks.top_frame(self.ident)
            place = None if frame is None else _place_of(frame)
            if self.running is entry and bears_interruption(frame):
                self._settle(entry, _STRUCK)
                _watch_what_is_lost()
                if _interrupt_at(self.ident, place):
                    return
            self.under_way[entry] = _WANTED
            INTERRUPTED.add(self)
        try:
            self._wakers[-1][0]()
        except IndexError:
            pass
        agent = self._hosted.agent
        agent.clock.after(_AGAIN_S, partial(agent.submit, partial(self.interrupt, entry)))

    def raise_interruption(self) -> None:
        """Run the function of :meth:`enter`, and raise a postponed interruption. See futures.interruption_point."""
        enters = self._enters
        if enters is not None and _may_raise(sys._getframe(2)):
            self._enters = None
            with self._interrupts:
                self._unwanted()
            enters()
        with self._interrupts:
            entry = self.running
            if entry is None or self.under_way.get(entry) != _WANTED or not _may_raise(sys._getframe(2)):
                return
            self._settle(entry, _RAISED)
        raise Interrupted

    def enter(self, run: Callable[[], None]) -> None:
        """Make the thread call ``run()`` in its present or next wait in actorrpc, where it could be interrupted."""
        with self._interrupts:
            self._enters = run
            INTERRUPTED.add(self)
        try:
            self._wakers[-1][0]()
        except IndexError:
            pass

    def interruption_lost(self) -> None:
        """Repeat an interruption that was raised where the interpreter ignores exceptions. Runs on the runner's thread."""
        agent = self._hosted.agent
        with self._interrupts:
            for entry, state in self.under_way.items():
                if state == _STRUCK:
                    self.under_way[entry] = RUNS
                    # The collector may run while this thread holds any lock, so interrupt() is called in a pool thread.
                    agent.clock.call_soon(partial(agent.submit, partial(self.interrupt, entry)))

    def _settle(self, entry: Entry, state: str) -> None:
        self.under_way[entry] = state
        self._unwanted()

    def withdraw(self, entry: Entry, found: str | None) -> None:
        """Withdraw the interruption of a call that has ended. If the exception is set already, it is raised and caught here.

        Args:
            found: the progress of the interruption when the call was removed from ``under_way``.
        """
        try:
            with self._interrupts:
                self.inspected = False
                found = self.under_way.pop(entry, found)
                if found == _STRUCK:
                    # The exception is pending, or was raised just now: raise it here. If it were cleared instead, CPython 3.11
                    # would check for exceptions at every step of every thread from then on, and a traced function (a debugger,
                    # coverage) would never leave its first step.
                    if _set_async_exc(threading.get_ident(), Interrupted):
                        while True:
                            _time.pause(0)
                elif found == _WANTED:
                    self._unwanted()
        except Interrupted:
            if self.under_way.pop(entry, found) == _WANTED:
                self._unwanted()

    def _unwanted(self) -> None:
        if _WANTED not in self.under_way.values() and self._enters is None:
            INTERRUPTED.discard(self)

    def stack(self) -> str:
        """Return the thread's stack as a traceback."""
        frame = _stacks.top_frame(self.ident)
        return "".join(traceback.format_stack(frame)) if frame is not None else "(the thread has ended)"


class ForeignThreads:
    """The threads without a runner in a worker that executes tasks. Tasks may have started them.

    While such a thread waits, one more task may run, as if a task were waiting, because any task may have started the thread.
    ``_lock`` guards ``waiting`` and the table. It is a leaf, and re-entrant, because the garbage collector may run under it.
    """

    work: Any = ()

    def __init__(self) -> None:
        self.waiting = 0
        self._lock = _time.RLock()
        self._hosted_actors: weakref.WeakSet[HostedActor] = weakref.WeakSet()

    def register(self, hosted: HostedActor) -> None:
        """Add an actor that executes tasks, so that waits of threads without a runner make room for more of its tasks."""
        with self._lock:
            self._hosted_actors.add(hosted)
            for queue in hosted.mailbox.queues.values():
                queue.foreign_threads = self
            set_foreign_threads(self)

    def unregister(self, hosted: HostedActor) -> None:
        """Remove an actor that has ended. Without such actors, waits are not counted."""
        with self._lock:
            self._hosted_actors.discard(hosted)
            if not self._hosted_actors:
                set_foreign_threads(None)

    def begin_wait(self, wake: Callable[[], None], what: object) -> None:
        """See futures.NestedRunner."""
        self.begin_await()

    def begin_await(self) -> None:
        """See futures.NestedRunner."""
        with self._lock:
            self.waiting += 1
            registry = list(self._hosted_actors)
        for hosted in registry:
            hosted.carry_out(hosted.mailbox.look())

    def end_await(self) -> None:
        """See futures.NestedRunner."""
        with self._lock:
            self.waiting -= 1

    end_wait = end_await

    def serve(self) -> None:
        """See futures.NestedRunner."""


FOREIGN_THREADS: Final = ForeignThreads()
