"""A first-in, first-out queue that lives in an actor and that any number of processes may use.

The interface of ``ray.util.queue.Queue``. The actor's methods are coroutines, so that up to a million callers can wait. The actor
applies their time-outs itself: an item is given to a caller that still waits, or it stays in the queue.

No item is lost when a caller gives up. Each ``get`` has a ticket. A caller that gives up (asyncio cancellation, Ctrl-C, the
deadline or the end of the call in which it runs) withdraws its ticket. If the actor has already sent it an item, the item
returns to its old place in the queue. The actor keeps a sent item until the caller's next ``get`` confirms it, for at most
:data:`_KEEP_S` seconds. (If the caller's process dies, the item is lost, as with every queue.)
"""

from __future__ import annotations

import asyncio
import copyreg
import itertools
import math
import os
import queue as standard
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from actorrpc._exceptions import undo_on_error
from actorrpc.actors.client.actor_class import ActorClass
from actorrpc.actors.client.handle import kill
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.wait import cover, get, wait
from actorrpc.agent.calls import CURRENT
from actorrpc.errors import RpcError, ShutdownError, WrongTypeError
from actorrpc.validation import integer, number

if TYPE_CHECKING:
    from actorrpc.actors.client.handle import ActorHandle
    from actorrpc.actors.refs.object_ref import ObjectRef

__all__ = ["Empty", "Full", "Queue"]

T = TypeVar("T")
Ticket = tuple[int, int]  # the number of a Queue object, and the number of one of its calls
# How long sent items are kept for a withdrawal, if their receiver does not call again.
_KEEP_S: Final = 30.0
# Each waiting caller is a running call of the actor. If they reached its limit, the call that wakes them could not run.
_MAX_WAITING: Final = 1_000_000


class Empty(standard.Empty):
    """No item arrived within the time-out, or the queue has fewer items than requested."""


class Full(standard.Full):
    """The queue stayed full until the time-out, or has not enough room for the items."""


# -- inside the actor ---------------------------------------------------------------------------------------


class _Waiter:
    """A waiting caller. Its future gets the item (for a getter), or None when its item was put in (for a putter)."""

    __slots__ = ("entry", "future", "line", "withdrawn")

    def __init__(self, line: deque[_Waiter], entry: Any = None) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.line = line
        self.entry = entry
        self.withdrawn = False


class QueueActor:
    """The class of the queue's actor. All public methods are coroutines, so they run on one thread, one step at a time.

    Items have numbers in the order in which they were put in, so that a returned item goes to its old place.
    """

    def __init__(self, maxsize: int) -> None:
        self._maxsize = maxsize
        self._items: deque[tuple[int, Any]] = deque()
        self._numbers = itertools.count()
        self._getters: deque[_Waiter] = deque()
        self._putters: deque[_Waiter] = deque()
        self._waiting: dict[Ticket, _Waiter] = {}
        self._handed: dict[Ticket, tuple[list[tuple[int, Any]], asyncio.TimerHandle]] = {}

    def _settle(self) -> None:
        """Serve waiting callers. After that, no getter waits while there is an item, and no putter while there is room."""
        while True:
            if self._items and self._getters:
                self._getters.popleft().future.set_result(self._items.popleft())
            elif self._putters and self._room():
                putter = self._putters.popleft()
                self._items.append((next(self._numbers), putter.entry))
                putter.entry = None
                putter.future.set_result(None)
            else:
                return

    def _room(self) -> bool:
        return self._maxsize <= 0 or len(self._items) < self._maxsize

    async def _wait(self, waiter: _Waiter, ticket: Ticket, timeout: float | None) -> bool:
        """Wait in line; return whether the waiter was served. Afterwards the waiter is not in line any more."""
        waiter.line.append(waiter)
        self._waiting[ticket] = waiter
        try:
            # Unlike wait_for(), asyncio.wait() does not cancel the future, which shows whether the waiter was served.
            await asyncio.wait((waiter.future,), timeout=timeout)
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise
        finally:
            self._waiting.pop(ticket, None)
            if not waiter.future.done():
                waiter.line.remove(waiter)
        return waiter.future.done() and not waiter.withdrawn

    def _withdraw(self, waiter: _Waiter) -> None:
        if waiter.withdrawn:
            return
        waiter.withdrawn = True
        if not waiter.future.done():
            waiter.line.remove(waiter)
            waiter.future.set_result(None)
        elif waiter.line is self._getters:
            self._take_back([waiter.future.result()])

    def _take_back(self, entries: list[tuple[int, Any]]) -> None:
        """Return items that were sent, but not received, to their places."""
        for entry in entries:
            place = 0
            while place < len(self._items) and self._items[place][0] < entry[0]:
                place += 1
            self._items.insert(place, entry)
        self._settle()

    def _hand_out(self, ticket: Ticket, entries: list[tuple[int, Any]]) -> None:
        timer = asyncio.get_running_loop().call_later(_KEEP_S, self._handed.pop, ticket, None)
        self._handed[ticket] = (entries, timer)

    def _forget(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            handed = self._handed.pop(ticket, None)
            if handed is not None:
                handed[1].cancel()

    async def put(self, item: Any, ticket: Ticket, timeout: float | None) -> bool:
        """Put an item in; return False if there was no room in time."""
        if self._room() and not self._putters:
            self._items.append((next(self._numbers), item))
            self._settle()
            return True
        if timeout == 0:
            return False
        return await self._wait(_Waiter(self._putters, item), ticket, timeout)

    async def get(
        self, ticket: Ticket, timeout: float | None, received: tuple[Ticket, ...]
    ) -> tuple[Any] | None:
        """Remove an item and return it in a tuple; None if there was none in time."""
        self._forget(received)
        if self._items:
            entry = self._items.popleft()
            self._settle()
        else:
            if timeout == 0:
                return None
            waiter = _Waiter(self._getters)
            if not await self._wait(waiter, ticket, timeout):
                return None
            entry = waiter.future.result()
            self._settle()
        self._hand_out(ticket, [entry])
        return (entry[1],)

    async def put_batch(self, items: list[Any]) -> int | None:
        """Put all items in and return None; if there is not enough room, return the number of items in the queue."""
        if self._maxsize > 0 and len(self._items) + len(items) > self._maxsize:
            return len(self._items)
        self._items.extend((next(self._numbers), item) for item in items)
        self._settle()
        return None

    async def get_batch(self, count: int, ticket: Ticket, received: tuple[Ticket, ...]) -> list[Any] | int:
        """Remove and return ``count`` items; if there are fewer, return the number of items in the queue."""
        self._forget(received)
        if count > len(self._items):
            return len(self._items)
        entries = [self._items.popleft() for _ in range(count)]
        self._hand_out(ticket, entries)
        self._settle()
        return [item for _, item in entries]

    async def withdraw(self, ticket: Ticket) -> None:
        """End a call whose caller has given up; items that were sent to it return to the queue."""
        waiter = self._waiting.get(ticket)
        if waiter is not None:
            self._withdraw(waiter)
        handed = self._handed.pop(ticket, None)
        if handed is not None:
            handed[1].cancel()
            self._take_back(handed[0])

    async def qsize(self) -> int:
        """Return the number of items."""
        return len(self._items)

    async def full(self) -> bool:
        """Say whether there is no room."""
        return not self._room()

    async def waiting(self) -> tuple[int, int]:
        """Return how many callers wait for an item, and how many for room."""
        return len(self._getters), len(self._putters)

    async def handed(self) -> int:
        """Return the number of calls whose items were sent, but not confirmed yet."""
        return len(self._handed)

    async def drain(self) -> None:
        """Return. Calls of a process start in order, so its earlier calls have started by then."""


# -- outside of the actor ------------------------------------------------------------------------------------------------


def _check_timeout(block: bool, timeout: Any) -> float | None:
    """Return the time-out to send to the actor, after checking it: seconds; 0: do not wait; None: wait without limit."""
    if not block:
        return 0
    if timeout is None:
        return None
    return float(number("timeout", timeout, unit="seconds", most=math.inf))


class Queue(Generic[T]):
    """A first-in, first-out queue, used from any number of processes, threads and event loops.

    It lives in an actor of its own and ends with the last Queue object that refers to it. Queue objects can be sent
    in arguments and results; thread-safe. Waiting callers are served in the order in which they came.

    If a caller gives up or is cancelled, no item is lost: an item that was meant for it stays in the queue. As
    in every call, an ObjectRef that is put into the queue arrives as its value.

    Args:
        maxsize: the greatest number of items; 0 or less: no limit.
        actor_options: options of the actor, as for ``Cls.options(...)``: ``{"name": ..., "worker": ...}``.

    Raises:
        ConfigError: an option is unknown or wrong.
    """

    def __init__(self, maxsize: int = 0, actor_options: Mapping[str, Any] | None = None) -> None:
        if actor_options is not None and not isinstance(actor_options, Mapping):
            raise WrongTypeError(f"actor_options must be a dict of options, not {actor_options!r}")
        self.maxsize: int = integer("maxsize", maxsize)
        self.actor: ActorHandle[QueueActor] | None = (
            ActorClass(QueueActor)
            .options(**{"max_concurrency": _MAX_WAITING, **(actor_options or {})})
            .remote(self.maxsize)
        )
        self._begin()

    def _begin(self) -> None:
        self._client = int.from_bytes(os.urandom(7), "big")
        self._tickets = itertools.count()
        self._received: deque[Ticket] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self),), (self.maxsize, self.actor)  # type: ignore[attr-defined]

    def __setstate__(self, state: tuple[int, ActorHandle[QueueActor] | None]) -> None:
        self.maxsize, self.actor = state
        self._begin()

    # -- calls -------------------------------------------------------------------------------------

    def _call(self, name: str, *args: Any) -> ObjectRef[Any]:
        actor = self.actor
        if actor is None:
            raise ShutdownError("this queue was shut down", maybe_executed=False)
        # No time-out: the actor applies ``timeout``. If this thread executes a call, the new call ends with that call.
        return cast("ObjectRef[Any]", getattr(actor, name).remote(*args))

    def _ticket(self) -> Ticket:
        return self._client, next(self._tickets)

    def _received_tickets(self) -> tuple[Ticket, ...]:
        """Remove and return the tickets of received items that no ``get`` has confirmed yet; the next ``get`` confirms them."""
        found = []
        while self._received:
            try:
                found.append(self._received.popleft())
            except IndexError:  # another thread has removed the last ticket
                break
        return tuple(found)

    def _give_up(self, ref: ObjectRef[Any], ticket: Ticket) -> None:
        """Withdraw a call for which its caller no longer waits. Never raises."""
        # The call must not be nested in this thread's call, which may have ended or may be cancelled.
        token = CURRENT.set(None)
        try:
            cover([ref, self._call("withdraw", ticket)])
            ref.cancel()
        except RpcError:  # the actor has ended, with its items
            pass
        finally:
            CURRENT.reset(token)

    def _wait(self, ref: ObjectRef[Any], ticket: Ticket) -> Any:
        with undo_on_error(partial(self._give_up, ref, ticket)):
            return get(ref)

    async def _wait_async(self, ref: ObjectRef[Any], ticket: Ticket) -> Any:
        with undo_on_error(partial(self._give_up, ref, ticket)):
            return await ref

    # -- one item ----------------------------------------------------------------------------------

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Put an item in.

        Args:
            block: wait for room.
            timeout: seconds to wait at most; None: no limit.

        Raises:
            Full: there is no room, or there was none in time.
            ConfigError: the timeout is negative (a ValueError).
            ActorDiedError: the queue has ended.
        """
        seconds, ticket = _check_timeout(block, timeout), self._ticket()
        self._check_put(self._wait(self._call("put", item, ticket, seconds), ticket))

    async def put_async(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Put an item in, like :meth:`put`; if cancelled while waiting, the item is not put in."""
        seconds, ticket = _check_timeout(block, timeout), self._ticket()
        self._check_put(await self._wait_async(self._call("put", item, ticket, seconds), ticket))

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Remove an item and return it.

        Args:
            block: wait for an item.
            timeout: seconds to wait at most; None: no limit.

        Raises:
            Empty: there is no item, or there was none in time.
            ConfigError: the timeout is negative (a ValueError).
            ActorDiedError: the queue has ended.
        """
        seconds, ticket = _check_timeout(block, timeout), self._ticket()
        return self._check_got(
            self._wait(self._call("get", ticket, seconds, self._received_tickets()), ticket), ticket
        )

    async def get_async(self, block: bool = True, timeout: float | None = None) -> T:
        """Remove an item and return it, like :meth:`get`; if cancelled while waiting, no item is lost."""
        seconds, ticket = _check_timeout(block, timeout), self._ticket()
        ref = self._call("get", ticket, seconds, self._received_tickets())
        return self._check_got(await self._wait_async(ref, ticket), ticket)

    def _check_put(self, done: bool) -> None:
        if not done:
            raise Full(f"the queue is full: it has room for {self.maxsize}")

    def _check_got(self, found: tuple[T] | None, ticket: Ticket) -> T:
        if found is None:
            raise Empty("the queue is empty")
        self._received.append(ticket)
        return found[0]

    def put_nowait(self, item: T) -> None:
        """Put an item in if there is room. The same as ``put(item, block=False)``.

        Raises:
            Full: there is no room.
        """
        self.put(item, block=False)

    def get_nowait(self) -> T:
        """Remove an item and return it, if there is one. The same as ``get(block=False)``.

        Raises:
            Empty: there is no item.
        """
        return self.get(block=False)

    # -- several items -----------------------------------------------------------------------------------

    def put_nowait_batch(self, items: Iterable[T]) -> None:
        """Put several items in, in order, in one call.

        Raises:
            Full: there is no room for all of them; no item was put in.
            WrongTypeError: ``items`` cannot be iterated over.
        """
        if not isinstance(items, Iterable):
            raise WrongTypeError(f"items must be an iterable, not {items!r}")
        batch, ticket = list(items), self._ticket()
        held = self._wait(self._call("put_batch", batch), ticket)
        if held is not None:
            raise Full(f"cannot add {len(batch)} items to a queue of size {held} and maxsize {self.maxsize}")

    def get_nowait_batch(self, num_items: int) -> list[T]:
        """Remove several items in one call, and return them in order.

        Raises:
            Empty: the queue has fewer items; no item was removed.
            ConfigError: ``num_items`` is negative (a ValueError), or not an int (a TypeError).
        """
        num_items = integer("num_items", num_items, least=0)
        ticket = self._ticket()
        found = self._wait(self._call("get_batch", num_items, ticket, self._received_tickets()), ticket)
        if isinstance(found, int):
            raise Empty(f"cannot get {num_items} items from a queue of size {found}")
        self._received.append(ticket)
        return cast("list[T]", found)

    # -- size and end ------------------------------------------------------------------------

    def qsize(self) -> int:
        """Return how many items are in the queue now."""
        return cast(int, get(self._call("qsize")))

    size = qsize

    def __len__(self) -> int:
        return self.qsize()

    def __bool__(self) -> bool:
        """True: a queue that is empty is still a queue."""
        return True

    def empty(self) -> bool:
        """Say whether the queue has no item now."""
        return self.qsize() == 0

    def full(self) -> bool:
        """Say whether the queue has no room now."""
        return cast(bool, get(self._call("full")))

    def shutdown(self, force: bool = False, grace_period_s: float = 5) -> None:
        """End the queue for all processes. Its items are lost; waiting callers get ActorDiedError.

        Args:
            force: end it at once; otherwise earlier calls of this process are started first, but calls that wait fail.
            grace_period_s: how many seconds starting them may take.
        """
        seconds = _check_timeout(True, grace_period_s)
        actor = self.actor
        if actor is None:
            return
        if not force:
            try:
                drained = self._call("drain")
                cover([drained])
                wait([drained], timeout=seconds)
            except RpcError:  # the actor has already ended
                pass
        self.actor = None
        kill(actor)

    def __repr__(self) -> str:
        return f"<actorrpc.Queue(maxsize={self.maxsize}) in {self.actor!r}>"
