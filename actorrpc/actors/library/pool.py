"""A pool of actors that share work: the interface of ``ray.util.ActorPool``, and asynchronous iteration.

    pool = ActorPool([Worker.remote() for _ in range(4)])
    for result in pool.map(lambda actor, value: actor.double.remote(value), range(100)):
        ...

Callbacks of a task's futures only append to a deque and wake the waiting thread. All other work is done by the thread or
coroutine that uses the pool.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch

from actorrpc import _time
from actorrpc._exceptions import is_of_handler
from actorrpc.actors.refs.deadlines import time_left
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.wait import future_of
from actorrpc.errors import ActorDiedError, ConfigError, RpcTimeoutError, WrongTypeError
from actorrpc.futures import Future, collect_all
from actorrpc.validation import wait_limit

__all__ = ["ActorPool", "PoolResults"]

A = TypeVar("A")
V = TypeVar("V")


class _Task:
    """A function that the user gave to the pool, with the value, and the state of its call on an actor."""

    __slots__ = ("actor", "done", "error", "fn", "futures", "index", "is_list", "value")

    def __init__(self, index: int, fn: Callable[[Any, Any], Any], value: Any) -> None:
        self.index = index
        self.fn = fn
        self.value = value
        self.actor: Any = None  # None before the task is started, and after the actor is free again
        self.futures: list[Future[Any]] = []  # the future of the result, or of each result in a list
        self.is_list = False
        self.error: BaseException | None = None  # the exception that the function has raised
        self.done = False

    def start(self, actor: Any) -> Future[list[Any]]:
        """Call the function; return a future that completes when its results are available.

        Raises:
            WrongTypeError: the function has not returned an ObjectRef, a future, or a list of them.
        """
        result = self.fn(actor, self.value)
        self.is_list = isinstance(result, (list, tuple))
        parts = result if isinstance(result, (list, tuple)) else [result]
        for part in parts:
            if not isinstance(part, (ObjectRef, torch.futures.Future)):
                raise WrongTypeError(
                    "the function given to an ActorPool must return an ObjectRef (or a list of them): "
                    f"the result of actor.method.remote(...); it returned a {type(part).__name__}"
                )
        self.futures = [future_of(part, "an ActorPool") for part in parts]
        return collect_all(self.futures)


class ActorPool(Generic[A]):
    """Distributes tasks to actors; an actor executes one task at a time.

    A task is a function that is called with an actor and a value, and returns the ObjectRef of the call that it makes. The actor
    is busy until the result of that call was fetched, or the call has ended and a waiting task needs the actor. An actor that has
    died leaves the pool. If there are more tasks than actors, the others wait; the thread that waits for a result starts them.

    For one thread (or one task of an event loop) at a time, like an iterator.

    Args:
        actors: handles.
    """

    def __init__(self, actors: Iterable[A]) -> None:
        self._idle: list[A] = list(actors)
        self._tasks: dict[int, _Task] = {}  # tasks whose results were not fetched, by number
        self._waiting: deque[_Task] = deque()
        self._busy: dict[int, _Task] = {}  # tasks that occupy an actor, abandoned tasks included
        self._over: deque[_Task] = deque()  # tasks in the order in which they ended; callbacks append to it
        self._ready: dict[int, _Task] = {}  # the ended tasks of _tasks, in the order in which they ended
        self._next_task = 0
        self._next_return = 0
        self._dead = 0
        # A callback completes this future to wake the waiting thread, which makes another future before it waits again.
        self._change: Future[None] = Future()

    # -- submitting tasks ------------------------------------------------------------------------------

    def submit(self, fn: Callable[[A, V], Any], value: V) -> None:
        """Call ``fn(actor, value)``: at once if an actor is free, otherwise later, when an actor becomes free.

        Raises:
            WrongTypeError: ``fn`` was called at once and did not return an ObjectRef.
            Exception: ``fn`` was called at once and raised. (If it is called later, fetching the task's result raises.)
        """
        if not callable(fn):
            raise WrongTypeError(f"fn must be a function of an actor and a value, not {fn!r}")
        self._collect()
        task = _Task(self._next_task, fn, value)
        if self._idle and not self._waiting:
            self._start(task)
            if task.error is not None:
                raise task.error
        else:
            self._waiting.append(task)
        self._next_task += 1
        self._tasks[task.index] = task

    def map(self, fn: Callable[[A, V], Any], values: Iterable[V]) -> PoolResults:
        """Call ``fn(actor, value)`` for each value and return an iterator over the results, in order.

        Results of earlier tasks that were not fetched are discarded. All values are read at once. The iterator works with
        ``for`` and ``async for``; it raises the error of a call that failed, and can be continued after that.
        """
        return self._map(fn, values, ordered=True)

    def map_unordered(self, fn: Callable[[A, V], Any], values: Iterable[V]) -> PoolResults:
        """Call ``fn(actor, value)`` for each value and return an iterator over the results in the order in which calls end.

        In all other respects like :meth:`map`.
        """
        return self._map(fn, values, ordered=False)

    def _map(self, fn: Callable[[A, V], Any], values: Iterable[V], *, ordered: bool) -> PoolResults:
        self._waiting.clear()
        self._tasks.clear()
        self._ready.clear()
        self._next_return = self._next_task
        for value in values:
            self.submit(fn, value)
        return PoolResults(self, ordered)

    def _start(self, task: _Task) -> None:
        """Start a task on a free actor. An exception of the function becomes the task's error."""
        actor = self._idle.pop()
        try:
            everything = task.start(actor)
        except BaseException as error:
            self._idle.append(actor)
            # Exceptions of Ctrl-C and signal handlers interrupt this thread, and are no errors of the task.
            if not isinstance(error, Exception) or is_of_handler(error):
                raise
            task.error = error
            task.done = True
            return
        task.actor = actor
        self._busy[task.index] = task

        def over(_: object) -> None:
            self._over.append(task)
            self._change.try_complete(None)

        everything.add_done_callback(over)

    # -- state -----------------------------------------------------------------------

    def _collect(self, free: bool = False) -> None:
        """Process the tasks that have ended, and start waiting tasks.

        Args:
            free: if tasks wait, actors of ended tasks become free even if the results were not fetched.
        """
        while self._over:
            task = self._over.popleft()
            task.done = True
            if task.index in self._tasks:
                self._ready[task.index] = task
            else:
                self._free(task)  # the task was abandoned
        if free and self._waiting:
            for task in list(self._busy.values()):
                if task.done:
                    self._free(task)
        while self._waiting and self._idle:
            task = self._waiting.popleft()
            self._start(task)
            if task.done:
                self._ready[task.index] = task

    def _free(self, task: _Task) -> None:
        if self._busy.pop(task.index, None) is None:
            return
        actor, task.actor = task.actor, None
        if any(isinstance(future.error, ActorDiedError) for future in task.futures):
            self._dead += 1
        else:
            self._idle.append(actor)

    def _fail_if_alone(self) -> None:
        """Fail the first waiting task if the pool has no actor left that could start it."""
        if self._waiting and not self._busy and not self._idle:
            task = self._waiting.popleft()
            why = f"all of its actors have died ({self._dead})" if self._dead else "it has no actors"
            task.error = ConfigError(
                f"task {task.index} of this pool was not started: {why}; push() an actor first"
            )
            task.done = True
            self._ready[task.index] = task

    def has_next(self) -> bool:
        """Say whether there are tasks whose results were not fetched."""
        return bool(self._tasks)

    def has_free(self) -> bool:
        """Say whether an actor is free and no task waits."""
        self._collect()
        return bool(self._idle) and not self._waiting

    def pop_idle(self) -> A | None:
        """Remove a free actor from the pool and return it; None if no actor is free, or tasks wait."""
        return self._idle.pop() if self.has_free() else None

    def push(self, actor: A) -> None:
        """Put an actor into the pool.

        Raises:
            ConfigError: ``actor`` is in the pool already (a ValueError).
        """
        if actor in self._idle or any(task.actor == actor for task in self._busy.values()):
            raise ConfigError(f"{actor!r} belongs to this pool already")
        self._idle.append(actor)
        self._collect()

    # -- getting results ---------------------------------------------------------------------------

    def get_next(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """Return the result of the next task, in the order in which the tasks were submitted; waits for the result.

        Args:
            timeout: seconds to wait at most; None: without limit.
            ignore_if_timedout: after the time-out, also abandon the task. Its actor becomes free when the call ends.

        Raises:
            StopIteration: there is no task left.
            TimeoutError: the task has not ended in time.
            ConfigError: :meth:`get_next_unordered` has already returned results of later tasks (a ValueError); or no
                actor is left to start the task.
            Exception: the error of the call.
        """
        return self._get(True, timeout, ignore_if_timedout)

    def get_next_unordered(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """Return the result of the task that ends first; waits for the result. Otherwise as :meth:`get_next`."""
        return self._get(False, timeout, ignore_if_timedout)

    async def get_next_async(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """Return the result of the next task, as :meth:`get_next`, without blocking the event loop.

        Raises: as :meth:`get_next`, but StopAsyncIteration if no task is left.
        """
        return await self._get_async(True, timeout, ignore_if_timedout)

    async def get_next_unordered_async(
        self, timeout: float | None = None, ignore_if_timedout: bool = False
    ) -> Any:
        """Return the result of the task that ends first, as :meth:`get_next_async`."""
        return await self._get_async(False, timeout, ignore_if_timedout)

    def _find(self, ordered: bool) -> _Task | None:
        """Return the next task if it has ended; otherwise None: the caller then waits for ``_change`` and calls this again."""
        if ordered and self._next_return >= self._next_task:
            raise ConfigError("get_next() is not possible: get_next_unordered() has returned later results")
        self._change = Future()  # made before the tasks are checked, so that later changes complete it
        self._collect(free=True)
        self._fail_if_alone()
        if ordered:
            wanted = self._tasks[self._next_return]
            return wanted if wanted.done else None
        return next(iter(self._ready.values()), None)

    def _remove(self, task: _Task) -> None:
        """Remove a task whose result was fetched, or which was abandoned. Its actor becomes free when its call has ended."""
        self._tasks.pop(task.index, None)
        self._ready.pop(task.index, None)
        self._next_return = max(self._next_return, task.index + 1)
        if task.done:
            self._free(task)
        self._collect()

    def _too_late(self, timeout: float | None, ignore: bool) -> RpcTimeoutError:
        text = f"no result came within {timeout} s"
        if ignore and self._tasks:
            task = self._tasks.get(self._next_return) or next(iter(self._tasks.values()))
            if task in self._waiting:
                self._waiting.remove(task)
            self._remove(task)
            text += f"; task {task.index} was abandoned"
        return RpcTimeoutError(text, maybe_executed=None)

    def _get(self, ordered: bool, timeout: float | None, ignore: bool) -> Any:
        if not self._tasks:
            raise StopIteration("no more results to get")
        until = _time.now() + wait_limit(timeout)
        while (task := self._find(ordered)) is None:
            try:
                self._change.wait(time_left(until))
            except RpcTimeoutError:
                raise self._too_late(timeout, ignore) from None
        return self._result(task)

    async def _get_async(self, ordered: bool, timeout: float | None, ignore: bool) -> Any:
        if not self._tasks:
            raise StopAsyncIteration("no more results to get")
        until = _time.now() + wait_limit(timeout)
        while (task := self._find(ordered)) is None:
            try:
                async with asyncio.timeout(time_left(until)):
                    await self._change
            except TimeoutError:
                raise self._too_late(timeout, ignore) from None
        return self._result(task)

    def _result(self, task: _Task) -> Any:
        try:
            if task.error is not None:
                raise task.error
            values = [future.wait() for future in task.futures]
            return values if task.is_list else values[0]
        finally:
            self._remove(task)


class PoolResults(Iterator[Any], AsyncIterator[Any]):
    """The results of :meth:`ActorPool.map`: iterate with ``for`` or ``async for``."""

    def __init__(self, pool: ActorPool[Any], ordered: bool) -> None:
        self._pool = pool
        self._ordered = ordered

    def __iter__(self) -> PoolResults:
        return self

    def __next__(self) -> Any:
        return self._pool.get_next() if self._ordered else self._pool.get_next_unordered()

    def __aiter__(self) -> PoolResults:
        return self

    async def __anext__(self) -> Any:
        if self._ordered:
            return await self._pool.get_next_async()
        return await self._pool.get_next_unordered_async()
