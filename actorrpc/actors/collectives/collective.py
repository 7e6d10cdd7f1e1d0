"""Collectives: groups of actors whose tensors are exchanged by ``torch.distributed``.

    trainers = Trainer.group(4)
    collective = actorrpc.collective(trainers)              # a gloo group of the four, in the order of their ranks
    refs = collective.call("step", batch)                   # all at once; in step(): dist.all_reduce(
    actorrpc.get(refs)                                      #     gradient, group=actorrpc.collective_group())

Generations. A process group of torch does not survive the end of a member, so a collective is a series of such groups, called
generations. When a member dies or an operation fails, the whole present generation breaks: operations that run or start later
in other members raise CollectiveError. The collective stays broken until this process rebuilds it
by :meth:`Collective.rebuild` or the next :meth:`Collective.call`. Both wait until supervision has restarted the member
(``max_restarts``), and let all members join a new generation. Members join through their mailboxes. Therefore calls that this
process made before the rebuilding belong to the old generation, whose operations fail, and later calls belong to the new
generation. If each member rejoined by itself, a member could be one step ahead of another.

The members meet on the worker that made the collective. When that worker ends, the collective ends, too.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NoReturn

from actorrpc import _time
from actorrpc._exceptions import is_a, undo_on_error
from actorrpc.actors.client.actor_base import Actor
from actorrpc.actors.client.handle import ActorHandle, call, route_of
from actorrpc.actors.client.supervisor_client import call_quietly, peer_of
from actorrpc.actors.collectives import member, process_group
from actorrpc.actors.collectives.member import Ticket, collective_group
from actorrpc.actors.collectives.rendezvous import Generation, Generations
from actorrpc.actors.context import runtime
from actorrpc.actors.groups.group import ActorGroup, handles_of
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.spec.class_info import MethodInfo
from actorrpc.actors.spec.options import CallOptions
from actorrpc.errors import (
    ActorDiedError,
    ActorUnavailableError,
    CollectiveError,
    ConfigError,
    NameTakenError,
    RpcError,
    RpcTimeoutError,
    SerializationError,
    WrongTypeError,
)
from actorrpc.futures import Future
from actorrpc.serialization import exceptions
from actorrpc.validation import integer, number, text, wait_limit

__all__ = ["Collective", "collective", "collective_group"]

TIMEOUT_S: Final = 1800.0  # torch's default for operations of gloo
JOIN_S: Final = 60.0
_LEAVE_S: Final = 10.0
_PAUSE_S: Final = 0.05  # between attempts to rebuild, while members are still being lost
_CALL: Final = MethodInfo.anything("<call>", "call")


def collective(
    actors: ActorGroup[Any] | Iterable[ActorHandle[Any] | Actor],
    backend: str = "gloo",
    name: str | None = None,
    *,
    timeout: float = TIMEOUT_S,
    join_timeout: float = JOIN_S,
) -> Collective:
    """Make a process group of ``torch.distributed`` among actors; waits until all of them have joined.

    In the actors, :func:`actorrpc.collective_group` returns the group for ``dist.all_reduce``, ``broadcast``, ``all_gather``,
    ``reduce_scatter``, ``barrier`` and the others, and for ``DistributedDataParallel(module, process_group=...)``.
    All members have to be called for an operation, in the same order: :meth:`Collective.call` calls all. An actor may
    be in several collectives with different names. The process's default group is neither used nor changed.
    The backend uses sockets of its own between the members' hosts, neither encrypted nor authenticated, as in
    any ``torch.distributed`` program: members must be able to reach each other, and the network must be trusted. Only the
    messages with which members find each other use actorrpc's connections. gloo uses the address by which other workers know a
    worker (loopback if all members are on one host), or the interface that ``GLOO_SOCKET_IFNAME`` in the environment of the
    workers names.

    Args:
        actors: a group or slice of it, or handles; the first has rank 0. They may be of different classes. The Collective
            object keeps them alive.
        backend: ``"gloo"`` for tensors on the CPU; ``"nccl"`` for GPUs.
        name: the name for :func:`actorrpc.collective_group`; by default a generated one.
        timeout: seconds that an operation may take at each member; the default is torch's, half an hour.
        join_timeout: seconds in which all members must have joined, now and after each restart; an actor joins after
            its earlier calls.

    Raises:
        ConfigError: there are no actors, an actor occurs twice or is async, the backend is unknown or not available here or
            at an actor, or a time-out is not a positive number.
        TypeError: an item is not the handle of an actor.
        NameTakenError: one of the actors is in a collective of this name that this process made.
        ActorDiedError: one of the actors is dead.
        RpcTimeoutError: not all members have joined in time.
        CollectiveError: torch could not connect the members.
    """
    in_force = runtime()
    made = Collective(actors, process_group.check_backend(backend), name, timeout, join_timeout)
    with _lock:
        for other in list(_all):
            shared = [handle for handle in made.members if handle in other.ranks]
            if other.name == made.name and shared and not other.destroyed:
                raise NameTakenError(
                    f"{route_of(shared[0]).title} is in a collective {made.name!r} already: destroy() that collective, "
                    "or give the new one another name="
                )
        _all.add(made)
    in_force.agent.check_process()
    with undo_on_error(partial(made.destroy, timeout=0)):
        made.rebuild()
    return made


_seconds = partial(number, unit="seconds", above=True, most=1e9)


class Collective:
    """Actors that are in a process group of ``torch.distributed``. Thread-safe; cannot be sent to other processes.

    Made by :func:`actorrpc.collective`. The module's documentation says what happens when members die. If this object is freed,
    the group continues to exist until its members end.

    The lock ``_making`` guards the generation. A thread holds it while it rebuilds or destroys the collective and waits for the
    members. It is re-entrant, because the garbage collector may run while it is held.

    Attributes:
        name: the name for :func:`actorrpc.collective_group`.
        backend: ``"gloo"`` or ``"nccl"``.
        generation: the number of the present process group, from 1.
        destroyed: whether :meth:`destroy` was called.
    """

    def __init__(
        self,
        actors: ActorGroup[Any] | Iterable[ActorHandle[Any] | Actor],
        backend: str,
        name: str | None,
        timeout: float,
        join_timeout: float,
    ) -> None:
        self._timeout_s = float(_seconds("timeout", timeout))
        self._join_s = float(_seconds("join_timeout", join_timeout))
        text("the name of a collective", name, none=True, empty=False, error=WrongTypeError)
        self._source = actors if isinstance(actors, ActorGroup) else _checked_handles(actors)
        self._members = _members(self._source)
        _check(self._members)
        self.backend = backend
        self.generation = 0
        self.destroyed = False
        self._generation: Generation | None = None
        self._making = threading.RLock()
        # Random, not based on an address: processes that were forked from one process have the same addresses.
        self.name = name if name is not None else f"collective-{secrets.token_hex(6)}"

    # -- properties ----------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[ActorHandle[Any], ...]:
        """The members' handles, in the order of their ranks."""
        return self._members

    @property
    def ranks(self) -> Mapping[ActorHandle[Any], int]:
        """The rank of each member."""
        return {handle: rank for rank, handle in enumerate(self._members)}

    @property
    def broken(self) -> str | None:
        """Why the present generation cannot be used, as far as this process knows; None if it can be used."""
        if self.destroyed:
            return "it has been destroyed"
        generation = self._generation
        return "it is being made" if generation is None else generation.why or None

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        state = f", broken: {self.broken}" if self.broken else ""
        return f"<Collective {self.name!r} of {len(self)} over {self.backend}, generation {self.generation}{state}>"

    def __reduce__(self) -> NoReturn:
        raise SerializationError(
            f"{self!r} stays in the process that made it: members use actorrpc.collective_group({self.name!r})"
        )

    # -- use -----------------------------------------------------------------------------------------

    def call(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> list[ObjectRef[Any]]:
        """Call a method of all members, or a function with each instance as first argument. Rebuilds a broken collective first.

        A collective that has lost a member is only rebuilt if this process has been notified of the loss.

        Args:
            method: the name of a method, or a function, as for :func:`actorrpc.call`.

        Returns:
            An ObjectRef for each member, in the order of their ranks.

        Raises:
            CollectiveError: the collective was destroyed.
            Exception: any exception of :meth:`rebuild`, or of ``remote()``, for example for wrong arguments.
        """
        with self._making:
            if self.broken or self._has_lost_some():
                self.rebuild()
            members = self._members
        if callable(method):
            return [call(handle, method, *args, **kwargs) for handle in members]
        return [getattr(handle, method).remote(*args, **kwargs) for handle in members]

    def broadcast(self, what: str | Callable[[Any], Any] = "", *, src: int = 0) -> list[ObjectRef[None]]:
        """Copy tensors of one member into the tensors of all others, for example the weights of a trainer.

        All members' tensors must have the same shapes and dtypes. They are written in place, even if they require gradients.

        Args:
            what: the name of an attribute of the actor, which may be dotted (``"trainer.model"``); empty: the actor itself; or a
                function that takes the actor and returns the object. The object is a module (its parameters and buffers are
                copied), a tensor, or a list or dict of these.
            src: the rank of the member that has the values.

        Returns:
            An ObjectRef for each member, which completes with None when the member has the values.

        Raises: as :meth:`call`; ConfigError: there is no such rank.
        """
        integer("src", src, least=0, most=len(self) - 1, right=f"a rank from 0 to {len(self) - 1}")
        return self.call(member.broadcast, self.name, what, src)

    # -- generations -----------------------------------------------------------------------------------

    def rebuild(self, timeout: float | None = None) -> None:
        """Let the members join a new generation, and wait for them; operations of the old generation raise CollectiveError.

        Waits for members that are being restarted. If a member is lost meanwhile, the rebuilding starts again. If the
        collective was made of an ActorGroup, it uses the group's present members, which ``group.restart()`` may have replaced.

        Args:
            timeout: seconds; by default ``join_timeout``.

        Raises:
            ActorDiedError: a member is dead for good. Make another collective of the living actors.
            RpcTimeoutError: not all members have joined in time. The collective is broken, and can be rebuilt later.
            ConfigError: a member cannot use the backend.
            CollectiveError: the collective was destroyed, or torch could not connect the members.
        """
        until = _time.now() + (self._join_s if timeout is None else timeout)
        with self._making:
            while not self._try(until):
                threading.Event().wait(_PAUSE_S)

    def _try(self, until: float) -> bool:
        """Make a generation; return False if the caller should try again."""
        if self.destroyed:
            raise CollectiveError(f"the collective {self.name!r} has been destroyed")
        generations: Generations = runtime().generations
        if self._generation is not None:
            generations.close(self._generation, "it is being rebuilt")
        self._members = members = _members(self._source)
        self.generation += 1
        title = f"collective {self.name!r} (generation {self.generation})"
        generation = self._generation = generations.open(title, len(members))
        joins = [self._join(generation, rank, until) for rank in range(len(members))]

        def on_joined(rank: int, done: Future[Any]) -> None:
            done.acknowledge()
            if done.error is not None:
                generations.break_up(generation, f"rank {rank} did not join: {done.error}")

        try:
            for rank, future in enumerate(joins):
                future.add_done_callback(partial(on_joined, rank))
            for future in joins:
                future.exception(max(0.0, until - _time.now()))
        except RpcTimeoutError:
            late = [
                f"rank {rank} ({route_of(members[rank]).title})"
                for rank, each in enumerate(joins)
                if not each.done()
            ]
            why = f"not all members joined in time: {', '.join(late)} did not; they may be busy, or not be made yet"
            generations.break_up(generation, why)
            raise RpcTimeoutError(f"{title}: {why}", maybe_executed=True) from None
        except BaseException:
            generations.break_up(generation, "rebuild() was interrupted")
            raise
        errors = [error for each in joins if (error := each.error) is not None]
        if not errors:
            return not generation.why  # False: a member was lost after it had joined
        for error in errors:
            if isinstance(error, ActorDiedError):
                error.add_note(f"while {title} was made")
                raise error
        others = [each for each in errors if not is_a(exceptions.original(each), CollectiveError)]
        if others and not isinstance(others[0], ActorUnavailableError):
            if isinstance(others[0], RpcTimeoutError):
                raise RpcTimeoutError(
                    f"{title}: not all members joined in time: {others[0]}", maybe_executed=True
                )
            raise others[0]
        if not others and not self._has_lost_some():
            raise errors[0]
        if _time.now() >= until:
            raise RpcTimeoutError(
                f"{title}: members are lost again and again: {errors[0]}", maybe_executed=True
            )
        return False

    def _join(self, generation: Generation, rank: int, until: float) -> Future[Any]:
        seconds = max(0.001, until - _time.now())
        ticket = Ticket(
            key=generation.key,
            name=self.name,
            generation=self.generation,
            rank=rank,
            size=generation.size,
            backend=self.backend,
            timeout_s=self._timeout_s,
            join_s=seconds,
            maker=runtime().references.me,
        )
        return self._call_member(rank, (member.join, ticket), seconds)

    def _call_member(self, rank: int, asked: tuple[Any, ...], seconds: float) -> Future[Any]:
        """Call ``asked`` (a function of ``member.py``, and arguments) in a member, through its actor's mailbox."""
        route = route_of(self._members[rank])
        try:
            return route.call(_CALL, _OPTIONS, asked, {}, refs=False, timeout=seconds)
        except RpcError as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _has_lost_some(self) -> bool:
        """Say whether a member was lost or restarted since it joined the generation; if so, break the generation."""
        generation = self._generation
        if generation is None:
            return True
        for rank, handle in enumerate(_members(self._source)):
            slot = generation.slots.get(rank)
            located = route_of(handle).located()
            located.add_done_callback(Future.acknowledge)
            place = located.value_or_none  # None: the actor is being restarted
            if slot is None or place is None:
                why = "it has not joined, or is being restarted"
            elif place.instance_id != slot.instance_id:
                why = "it has been restarted"
            else:
                continue
            generations: Generations = runtime().generations
            generations.break_up(generation, f"rank {rank} was lost: {why}")
            return True
        return False

    def destroy(self, timeout: float = _LEAVE_S) -> None:
        """End the collective: every member leaves after its earlier calls. Idempotent.

        The threads and sockets of the process group end, unless an object in an actor keeps the group (DDP modules do).

        Args:
            timeout: seconds; after that, operations of a busy member are ended with CollectiveError.
        """
        with self._making:
            if self.destroyed:
                return
            until = _time.now() + wait_limit(timeout)
            generation = self._generation
            if generation is None:
                self.destroyed = True
                return
            if not generation.why and timeout > 0:
                done = [
                    self._call_member(rank, (member.nothing,), timeout) for rank in range(len(self._members))
                ]
                for future in done:
                    _settle(future, until)
            self.destroyed = True
            slots = dict(generation.slots)
            in_force = runtime()
            why = "it has been destroyed"
            generations: Generations = in_force.generations
            generations.close(generation, why)
            agent = in_force.agent
            left = [
                call_quietly(
                    agent,
                    partial(peer_of, agent, slot.worker),
                    member.remove,
                    (generation.key, rank, why),
                    _LEAVE_S,
                )
                for rank, slot in slots.items()
            ]
            for future in left:
                _settle(future, max(until, _time.now() + 1.0))


_OPTIONS: Final = CallOptions(max_task_retries=0, patient=True, name="collective")
# Existing Collective objects, to check their names. `_lock` guards the set, and no code that blocks runs under it. It is
# re-entrant, because the garbage collector may run while it is held.
_all: Final[weakref.WeakSet[Collective]] = weakref.WeakSet()
_lock: Final = threading.RLock()


def _settle(future: Future[Any], until: float) -> None:
    try:
        future.exception(max(0.0, until - _time.now()))
    except RpcError:
        pass
    future.acknowledge()


def _members(source: ActorGroup[Any] | tuple[ActorHandle[Any], ...]) -> tuple[ActorHandle[Any], ...]:
    return tuple(handles_of(source)) if isinstance(source, ActorGroup) else source


def _checked_handles(actors: Any) -> tuple[ActorHandle[Any], ...]:
    """Return the handles after checking that they can be members.

    Raises: as :func:`collective`.
    """
    if isinstance(actors, (str, ActorHandle)) or not isinstance(actors, Iterable):
        raise WrongTypeError(f"collective() takes a group of actors or a list of handles, not {actors!r}")
    handles = tuple(actors)
    for handle in handles:
        if not isinstance(handle, ActorHandle):
            raise WrongTypeError(f"collective() takes handles of actors, not a {type(handle).__name__}")
    return handles


def _check(handles: tuple[ActorHandle[Any], ...]) -> None:
    if not handles:
        raise ConfigError("a collective needs at least one actor, and there are none")
    seen: dict[ActorHandle[Any], int] = {}
    for rank, handle in enumerate(handles):
        route = route_of(handle)
        if handle in seen:
            raise ConfigError(
                f"{route.title} cannot be rank {rank}: it is rank {seen[handle]} of the collective already"
            )
        seen[handle] = rank
        if route.info.is_async:
            raise ConfigError(
                f"{route.title} cannot be in a collective: it is async (its class has async methods), and an operation "
                "of torch.distributed would block its event loop"
            )
