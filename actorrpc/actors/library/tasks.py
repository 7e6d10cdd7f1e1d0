"""Tasks: the result of ``@remote`` above a function. ``f.remote(...)`` runs it in another process.

Tasks are executed by internal actors, the runners. In an embedded cluster, each runner has a process, started when it is needed.
For tasks with equal options of the process, there are at most as many runners as CPUs, and all workers share them. Runners of
tasks that book resources are not shared. They book their resources like other actors, and end when they have had no task
for ``_LINGER_S``, so that others can book the resources.

In a group made by ``init_rpc``, each process that calls tasks makes a runner on each other worker; if such a worker ends, its
runner moves to another worker. While a task waits in actorrpc, its runner executes other tasks, so nested tasks cannot block each
other.
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, ParamSpec, TypeVar, cast, overload

from actorrpc._exceptions import is_of_handler, undo_on_error
from actorrpc._python import running_loop
from actorrpc.actors.client.actor_class import ActorClass, Itself, is_importable, with_internal_options
from actorrpc.actors.client.handle import ActorHandle, route_of
from actorrpc.actors.client.pending_call import PendingCall
from actorrpc.actors.client.route import shaped
from actorrpc.actors.client.supervisor_client import call_quietly
from actorrpc.actors.client.typed_methods import RemoteCall
from actorrpc.actors.context import Runtime, runtime
from actorrpc.actors.spec.actor_spec import ProcessSpec
from actorrpc.actors.spec.class_info import TASKS, THE_FUNCTION, ClassInfo, MethodInfo, Signature, kind_of
from actorrpc.actors.spec.options import CallOptions, TaskOptions
from actorrpc.agent.calls import CURRENT
from actorrpc.errors import (
    ActorDiedError,
    ActorUnavailableError,
    CancelledError,
    ConfigError,
    PeerDiedError,
    RemoteError,
    SerializationError,
)
from actorrpc.futures import Future, InnerFuture, Progress
from actorrpc.group.launchers import own_cpus

if TYPE_CHECKING:
    from actorrpc.actors.client.route import Route
    from actorrpc.actors.streams.consumer import Again
    from actorrpc.actors.supervision.supervisor import Supervisor
    from actorrpc.agent.peers import Peer

__all__ = ["RemoteFunction", "RunnerPools", "TaskFuture", "TaskRunner"]

P = ParamSpec("P")
Out = TypeVar("Out")
_LEASE_S: Final = 60.0  # how long rank 0 may take to give this process a runner
_LINGER_S: Final = 0.2  # how long an idle runner keeps its booking, so that a program that waits for each task keeps its process
_THREADS: Final = 8  # how many tasks a runner on a worker of the group executes at a time


# -- where tasks run -------------------------------------------------------------------------------------------


class TaskRunner:
    """The actor that executes tasks: one at a time, or 8 on a worker of the group. Tasks that wait in actorrpc do not count."""

    __actorrpc_name__ = TASKS  # its name in messages

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Execute a function; a coroutine is run to its end."""
        _say(function)
        result = function(*args, **kwargs)
        return asyncio.run(_await(result)) if isinstance(result, Coroutine) else result

    def stream(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Execute a generator function, also an asynchronous one, and yield its items."""
        _say(function)
        found = function(*args, **kwargs)
        yield from _steps(found) if hasattr(found, "__aiter__") else found


def _say(function: Callable[..., Any]) -> None:
    """Store the function in the current execution: errors about the result then name the function."""
    current = CURRENT.get()
    if current is not None:
        current.what = function


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _steps(source: AsyncIterator[Any]) -> Iterator[Any]:
    """Drive an asynchronous iterator from a thread that has no event loop."""
    with asyncio.Runner() as runner:
        try:
            while True:
                try:
                    item = runner.run(_await(source.__anext__()))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            close = getattr(source, "aclose", None)
            if close is not None:
                runner.run(_await(close()))


_RUNNER: Final[ActorClass[[], TaskRunner]] = ActorClass(TaskRunner)
_INFO: Final = ClassInfo.of(TaskRunner)
_RUN: Final = _INFO.methods["run"]
_STREAM: Final = _INFO.methods["stream"]


class _Runner:
    """A runner, how many of this process's tasks it has (``busy``), and how many it has had (``tasks``)."""

    __slots__ = ("busy", "handle", "route", "tasks")

    def __init__(self, handle: ActorHandle[Any]) -> None:
        self.handle = handle
        self.route: Route = route_of(handle)
        self.busy = self.tasks = 0


class _RunnerPool:
    """The runners for one kind of tasks, as this process uses them. Guarded by the lock of :class:`RunnerPools`.

    Attributes:
        books: its runners book resources.
        leases: the unanswered requests to rank 0 for one more runner.
    """

    def __init__(self, limit: int, books: bool = False) -> None:
        self.limit = limit
        self.books = books
        self.runners: list[_Runner] = []
        self.leases: list[Future[None]] = []

    def choose(self) -> _Runner | None:
        """Return the least busy runner; None if another runner should be made."""
        least = min(self.runners, key=lambda each: each.busy, default=None)
        if least is None or (least.busy and len(self.runners) + len(self.leases) < self.limit):
            return None
        return least


class RunnerPools:
    """All the runners that this process uses. Thread-safe.

    ``_lock`` guards ``_pools`` and the numbers in it. Runners are made under the lock, without user code. The lock is
    re-entrant, because the garbage collector may run while it is held.
    """

    def __init__(self, in_force: Runtime) -> None:
        self.runtime = in_force
        self._lock = threading.RLock()
        self._pools: dict[Any, _RunnerPool] = {}

    def assign(self, options: TaskOptions) -> _Runner:
        """Choose a runner for a task, count the task in ``runner.busy``, and return the runner.

        If :meth:`lease` returned a future, call this after the future has completed.
        """
        with self._lock:
            runner = self._choose(options)
            runner.busy += 1
            runner.tasks += 1
        return runner

    def give_back(self, runner: _Runner, dead: bool = False) -> None:
        """Record that a task has ended and, with ``dead``, that its runner has ended for good."""
        with self._lock:
            runner.busy -= 1
            for pool in self._pools.values():
                if runner in pool.runners:
                    if dead:
                        pool.runners.remove(runner)
                    elif pool.books and not runner.busy:
                        end = partial(self._end_idle, pool, runner, runner.tasks)
                        agent = self.runtime.agent
                        agent.clock.after(_LINGER_S, partial(agent.submit, end))

    def _end_idle(self, pool: _RunnerPool, runner: _Runner, tasks: int) -> None:
        """Drop the handle of a runner, which ends it, unless it has got further tasks."""
        with self._lock:
            if runner.tasks == tasks and runner in pool.runners:
                pool.runners.remove(runner)

    @property
    def _is_first(self) -> bool:
        return self.runtime.agent.record.rank == 0

    def _choose(self, options: TaskOptions) -> _Runner:
        if self.runtime.spawner is not None and options.worker is None:
            pool = self._pool(options)
            found = pool.choose()
            if found is None and not self._is_first and not pool.books:  # rank 0 has no more runners
                found = min(pool.runners, key=lambda each: each.busy)
            if found is None:
                found = _Runner(_make(options))
                pool.runners.append(found)
            return found
        worker = options.worker
        movable = worker is None
        key: tuple[Any, ...]
        if worker is None:
            supervisor: Supervisor = self.runtime.supervisor
            peer = supervisor.places.next_worker()
            worker, key = peer.record.rank, peer.key
        else:
            key = "at", worker
        pool = self._pools.setdefault(key, _RunnerPool(1))
        if not pool.runners:
            made = _make(options, worker=worker, max_concurrency=_THREADS, movable=movable)
            pool.runners.append(_Runner(made))
        return pool.runners[0]

    def _pool(self, options: TaskOptions) -> _RunnerPool:
        key = (
            "new",
            options.num_cpus,
            options.num_gpus,
            tuple(sorted((options.env or {}).items())),
            options.working_dir,
            options.bundle,
            tuple(sorted((options.resources or {}).items())),
        )
        found = self._pools.get(key)
        if found is None:
            cpus = getattr(self.runtime.spawner, "num_cpus", None) or own_cpus()
            # For tasks that book resources, _measure() sets the limit.
            found = _RunnerPool(1, True) if _books(options) else _RunnerPool(max(1, int(cpus)))
            self._pools[key] = found
        return found

    # -- the runners of rank 0, for all workers of an embedded cluster ----------------------------------------

    def share(self, options: TaskOptions, count: int) -> list[ActorHandle[Any]]:
        """Return the runners for a kind of tasks, after making some if there are fewer than ``count``."""
        with self._lock:
            pool = self._pool(options)
            while len(pool.runners) < min(count, pool.limit):
                pool.runners.append(_Runner(_make(options)))
            return [each.handle for each in pool.runners]

    def lease(self, options: TaskOptions) -> Future[None] | None:
        """Request one more runner from rank 0 if all runners that this process knows are busy, and the pool allows one more.

        Does not block. For tasks that book resources, ask how many runners there can be, if there is none. Other tasks of rank 0,
        tasks in processes without an embedded cluster, and tasks with ``worker=`` need no request: :meth:`assign` makes their
        runners.

        Returns:
            None if :meth:`assign` can be called at once. Otherwise a future that completes when rank 0 has answered, and fails if
            the request does. If ``_RunnerPool.limit`` requests are under way already, the future of the last request.
        """
        if self.runtime.spawner is None or options.worker is not None:
            return None
        if _books(options):
            return self._measure(options)
        if self._is_first:
            return None
        lease: Future[None] = Future()
        with self._lock:
            pool = self._pool(options)
            if pool.choose() is not None:
                return None
            if len(pool.leases) >= pool.limit:
                return pool.leases[-1]
            pool.leases.append(lease)
            count = len(pool.runners) + len(pool.leases)
        lease.label = "a process for tasks"
        lease.cover()  # the tasks that wait for the lease report its error
        agent = self.runtime.agent
        plain = replace(options, name=None, retry_exceptions=False)
        token = CURRENT.set(None)  # not nested in this thread's call, as other tasks may wait for the lease
        try:
            asked = call_quietly(agent, lambda: agent.peer(0), _share, (plain, count), _LEASE_S)
        finally:
            CURRENT.reset(token)
        asked.add_done_callback(partial(self._leased, pool, lease, count))
        return lease

    def _measure(self, options: TaskOptions) -> Future[None] | None:
        """Set the limit of a pool whose runners book resources, if it has no runners: return a future of that, or None."""
        with self._lock:
            pool = self._pool(options)
            if pool.runners:
                return None
        spec = ProcessSpec(
            label=TASKS,
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            resources=options.resources or {},
            own=bool(options.env or options.working_dir),
            bundle=options.bundle and options.bundle[:2],
        )
        measured: Future[None] = Future()
        measured.label = "the number of processes for tasks"
        measured.cover()  # the tasks that wait for it report its error

        def answered(done: Future[int]) -> None:
            if done.value_or_none:
                with self._lock:
                    pool.limit = done.value_or_none
            measured.follow(done)

        self.runtime.spawner.capacity(spec).add_done_callback(answered)
        return measured

    def _leased(
        self, pool: _RunnerPool, lease: Future[None], count: int, done: Future[list[ActorHandle[Any]]]
    ) -> None:
        with self._lock:
            pool.leases.remove(lease)
            if done.value_or_none is not None:
                known = {each.handle for each in pool.runners}
                pool.runners.extend(_Runner(each) for each in done.value_or_none if each not in known)
                if len(pool.runners) < count:
                    pool.limit = len(pool.runners)
        lease.follow(done)


def _share(options: TaskOptions, count: int) -> list[ActorHandle[Any]]:
    """Call :meth:`RunnerPools.share`. Called by RPC on rank 0."""
    pools: RunnerPools = runtime().task_pools
    return pools.share(options, count)


def _books(options: TaskOptions) -> bool:
    return bool(options.num_cpus or options.num_gpus or options.resources)


def _make(options: TaskOptions, **how: Any) -> ActorHandle[Any]:
    given: dict[str, Any] = {}
    internal: dict[str, Any] = {}
    if "worker" not in how:  # with worker=, the runner never ends, so it must book nothing
        given = {name: getattr(options, name) for name in ("num_cpus", "num_gpus", "resources")}
        internal["bundle"] = options.bundle
        if _books(options):
            internal["placement_timeout"] = math.inf  # tasks wait for resources as long as others have them
    if options.env:
        given["env"] = options.env
    if options.working_dir is not None:
        given["working_dir"] = options.working_dir
    # Each task has a thread of its own: a task that ran nested on the thread of a waiting task would delay that task.
    internal |= {"movable": how.pop("movable", False), "yielding": True, "reentrant": False}
    made = with_internal_options(
        _RUNNER.options(max_restarts=-1, **given, **how), **internal, allow_out_of_order_execution=True
    )
    handle: ActorHandle[Any] = made.remote()
    return handle


# -- tasks ---------------------------------------------------------------------------------------------------------


def _is_of(route: Route | None, error: BaseException | None) -> bool:
    """Say whether an error is about the runner of a task, and not from an argument or the task's code."""
    return (
        isinstance(error, (ActorDiedError, ActorUnavailableError))
        and not isinstance(error, RemoteError)
        and (route is None or error.actor_id in (None, route.actor_id))
    )


def _task_error(label: object, error: Any, route: Route | None) -> BaseException:
    """Return the error of a task whose call of the runner failed with ``error``."""
    if not _is_of(route, error):
        return cast(BaseException, error)
    # The cluster cannot start any process, for example after a wrong init(preload=).
    if type(error.__cause__) is ConfigError:
        return ConfigError(str(error.__cause__))
    # Keep the cause of death, and drop the advice to call the actor again, which does not apply to a task.
    cause = str(error.__cause__ or error).partition("is being restarted: ")[2] or str(error)
    failure = PeerDiedError(
        f"{label} was not finished, and is not run (again), see max_retries=. {cause.partition('. Call again')[0]}",
        maybe_executed=error.maybe_executed,
        worker=error.worker,
    )
    failure.__cause__ = error
    return failure


class _AwaitsRunner(Progress):
    """The source of a task's future while the task waits for a runner."""

    __slots__ = ("task", "unwanted")

    def __init__(self, task: TaskFuture) -> None:
        self.task = task
        self.unwanted = False

    def cancel(self) -> bool:
        """Make the task fail with CancelledError, instead of being sent, when its lease completes.

        If another thread has just sent the task, its call is cancelled.

        Returns:
            False if the task has ended.
        """
        self.unwanted = True
        source = self.task.source
        # Another thread may have sent the task meanwhile: then cancel its call.
        return not self.task.completed if source is self or source is None else source.cancel()


class TaskFuture(InnerFuture[Any]):
    """The result of a task. Its errors name the task, and not the actor that executes it."""

    __slots__ = ("_again", "_call", "_method", "_options", "_pools", "_route", "_runner")

    def __init__(
        self, title: str, method: MethodInfo, options: TaskOptions, call: CallOptions, pools: RunnerPools
    ) -> None:
        Future.__init__(self)
        self.label = f"task {title}"
        self._method = method
        self._options = options
        self._call = call
        self._pools = pools
        self._runner: _Runner | None = None
        self._route: Route | None = None
        self._again: Again | None = None

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pass the task to a runner.

        Raises:
            SerializationError: the function, or an argument, cannot be sent.
        """
        runner = self._pools.assign(self._options)
        route = runner.route
        with undo_on_error(partial(self._pools.give_back, runner)):
            self._again = route.again(self._method, self._call, args, kwargs)
            call = route.call(self._method, self._call, args, kwargs, refs=True)
        self._runner, self._route = runner, route
        self.source = call
        call.add_done_callback(self._ended)

    def start_after(self, lease: Future[None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pass the task to a runner when ``lease`` completes, with the arguments as they are now. No thread waits.

        Raises:
            SerializationError: the function, or an argument, cannot be sent.
        """
        try:
            held = PendingCall.hold(args, kwargs)
        except SerializationError as error:
            self._method.signature.name_argument(error)
            raise
        context = copy_context()
        self.source = awaits = _AwaitsRunner(self)

        def leased(done: Future[None]) -> None:
            try:
                if awaits.unwanted:
                    raise CancelledError(
                        f"{self.label} was cancelled before it was sent", maybe_executed=False
                    )
                done.value()
                context.run(self.start, *PendingCall.opened(held))
            except BaseException as failed:
                self.try_fail(failed)
                if is_of_handler(failed):
                    raise
            if awaits.unwanted:
                self.cancel()

        lease.add_done_callback(leased)

    def _ended(self, call: Future[Any]) -> None:
        runner, self._runner = self._runner, None
        error = call.error
        if runner is not None:
            dead = isinstance(error, ActorDiedError) and _is_of(runner.route, error)
            self._pools.give_back(runner, dead=dead)
        call.acknowledge()  # the task's future reports the error
        route = self._route
        if self._method.name != _STREAM.name:  # a stream has only begun, and needs its runner
            self._route = self._again = None  # references to the result must not keep the runner
        if self.claim():
            self.conclude(
                call.value_or_none, None if error is None else _task_error(self.label, error, route)
            )

    def kill(self) -> Future[None] | None:
        """End the process that executes the task. Return the future of :meth:`Route.kill`; None if no process executes it."""
        runner = self._runner
        return None if runner is None else runner.route.kill(False)

    # -- a task whose result is a stream -----------------------------------------------------------------------

    def again(self, error: BaseException) -> Future[Any] | None:
        """Repeat the call of a stream that has failed before its first item. See :meth:`Route.again`."""
        return None if self._again is None else self._again(error)

    def explain(
        self, method: MethodInfo, options: CallOptions, error: BaseException, peer: Peer | None
    ) -> BaseException | Future[Any]:
        """Return the error to raise to the reader of a stream that failed with ``error``. As :meth:`Route.explain`."""
        route = self._route
        if route is None:  # the task was not sent
            return error
        meaning = route.explain(method, options, error, peer)
        if not isinstance(meaning, Future):
            return _task_error(self.label, meaning, route)
        failure: Future[Any] = Future()
        failure.label = meaning.label

        def known(done: Future[Any]) -> None:
            done.acknowledge()  # the task's future reports the error
            failure.set_exception(_task_error(self.label, done.error or error, route))

        meaning.add_done_callback(known)
        return failure


_interned: Final[dict[CallOptions, CallOptions]] = {}


def _intern(options: CallOptions) -> CallOptions:
    """Return the same object for equal options: a route prepares a call template for each object (``call_template.py``)."""
    if len(_interned) > 1000:
        _interned.clear()
    return _interned.setdefault(options, options)


class RemoteFunction(Generic[P, Out]):
    """A function that runs in another process: ``f.remote(...)``. Immutable and thread-safe.

    Generator functions return streams; ``async def`` functions are run to their end. The function itself is
    ``f.__wrapped__``. Type parameters: the function's parameters, and the return type of ``remote``.

    Args:
        function: the function.
        options: the options of its tasks.
    """

    def __init__(self, function: Callable[P, Any], options: TaskOptions | None = None) -> None:
        functools.update_wrapper(self, function)  # name, module and docstring, and `__wrapped__`
        self.__wrapped__: Callable[P, Any] = function
        self._name_as(self)
        self._options = options if options is not None else TaskOptions()
        self._title = getattr(function, "__qualname__", None) or repr(function)
        self._signature = Signature.of(function, self._title.rpartition("<locals>.")[2], 0)
        streams = kind_of(function) in ("generator", "async_generator")
        runs = _STREAM if streams or self._options.num_returns == "streaming" else _RUN
        name = self._signature.title
        says = Signature(name, (THE_FUNCTION, *self._signature.positional), varargs=True, varkw=True)
        self._method = MethodInfo(runs.name, runs.kind, says)
        call = self._options.for_calls()
        call = replace(call, name=call.name or name)
        self._shape = call
        self._call = _intern(call if call.num_returns else replace(call, num_returns=1))

    def _name_as(self, first: RemoteFunction[..., Any]) -> None:
        """Record the remote function that may have replaced the function in its module, for pickling (``Itself``)."""
        self._first = first
        self._travels: object = Itself(self.__wrapped__, first, "__wrapped__")

    if TYPE_CHECKING:

        @property
        def remote(self) -> RemoteCall[Callable[P, Out]]:
            """Run the function in another process."""
            raise AssertionError
    else:

        def remote(self, *args, **kwargs):
            """Run the function in another process; return an ObjectRef to its result at once.

            ObjectRefs in the arguments are replaced by their values. Starts the embedded cluster if this process is in no group.

            Returns:
                An ObjectRef; with ``num_returns`` above 1, a list of ObjectRefs; with 0, None; for a generator function, an
                ObjectRefGenerator.

            Raises:
                TypeError: the function does not take these arguments. Nothing was sent.
                SerializationError: the function, or an argument, cannot be sent.
            """
            self._signature.check(args, kwargs)
            pools: RunnerPools = runtime(start=True).task_pools
            task = TaskFuture(self._title, self._method, self._options, self._call, pools)
            given = (self._travels, *args)
            lease = pools.lease(self._options)
            if lease is not None and running_loop() is not None:
                task.start_after(lease, given, kwargs)
            else:
                if lease is not None:
                    lease.wait()
                task.start(given, kwargs)
            return shaped(task, self._method, self._shape, task.explain, task.again, self._title)

    @overload
    def options(self, *, num_returns: int | str, **options: Any) -> RemoteFunction[P, Any]: ...
    @overload
    def options(self, **options: Any) -> RemoteFunction[P, Out]: ...
    def options(self, **options: Any) -> RemoteFunction[P, Any]:
        """Return the same function with other options: see :class:`~actorrpc.actors.spec.options.TaskOptions`.

        Raises:
            ConfigError: an option is unknown, or its value is wrong; the message lists valid options.
        """
        made: RemoteFunction[P, Any] = RemoteFunction(self.__wrapped__, self._options.merged(**options))
        made._name_as(self._first)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise TypeError: tasks are run with ``remote``.

        Raises:
            TypeError: always.
        """
        name = self.__wrapped__.__name__ if hasattr(self.__wrapped__, "__name__") else "f"
        raise TypeError(
            f"a remote function cannot be called directly: instead of {name}(...) write {name}.remote(...); the plain function "
            f"is {name}.__wrapped__"
        )

    def __repr__(self) -> str:
        return f"<remote function {self._title}>"

    def __reduce__(self) -> Any:
        if is_importable(self):
            return self.__qualname__  # type: ignore[attr-defined]
        return RemoteFunction, (Itself(self.__wrapped__, self._first, "__wrapped__"), self._options)
