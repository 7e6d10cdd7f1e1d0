"""Members: an actor's part in a collective, in the actor's process.

A member joins through its actor's mailbox, in order with the actor's other calls. The calls :func:`cut` and :func:`remove` do not
use the mailbox, because the actor may be blocked in an operation that the other members have left. When an operation fails or the
actor ends, this process reports that to the worker that made the collective.

``_lock`` guards the tables and the members in them. No other module is called under it. It is re-entrant, because the garbage
collector may run while it is held.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import distributed as dist
from torch import nn

from actorrpc.actors.client.supervisor_client import call_quietly, peer_of
from actorrpc.actors.collectives import process_group as groups
from actorrpc.actors.collectives import rendezvous
from actorrpc.actors.collectives.rendezvous import MemberSlot
from actorrpc.actors.context import current, runtime
from actorrpc.agent.calls import CURRENT
from actorrpc.errors import CollectiveError, ConfigError, RpcError
from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerKey

if TYPE_CHECKING:
    from actorrpc.actors.host.actor import HostedActor
    from actorrpc.agent.agent import Agent
    from actorrpc.agent.peers import Peer

__all__ = ["Members", "Ticket", "broadcast", "collective_group", "cut", "join", "nothing", "remove"]

_REPORT_S: Final = 2.0  # how long a failed operation waits for the reason
_BACKENDS: Final = ("gloo", "NCCL")  # errors of the backends contain these words
_GONE: Final = "is not registered, please create group"  # torch's error for a group that was destroyed
_PLACE: Final = re.compile(r"^\[[^]]*\.\w+:\d+\] ")


@dataclass(frozen=True, slots=True)
class Ticket:
    """The data that a member needs to join.

    Attributes:
        key: the number of the generation.
        maker: the worker that made the collective.
        timeout_s: seconds that an operation may take.
        join_s: seconds that the members may take to meet.
    """

    key: int
    name: str
    generation: int
    rank: int
    size: int
    backend: str
    timeout_s: float
    join_s: float
    maker: WorkerKey

    @property
    def title(self) -> str:
        """The name of the generation in messages."""
        return f"collective {self.name!r} (generation {self.generation})"


class _Member:
    """One actor's part in one generation. ``Members._lock`` guards it."""

    __slots__ = ("connections", "group", "instance_id", "store", "ticket", "why")

    def __init__(self, ticket: Ticket, instance_id: int) -> None:
        self.ticket = ticket
        self.instance_id = instance_id
        self.store: groups.CallStore | None = None
        self.group: dist.ProcessGroup | None = None
        self.connections = 0  # open connections when the group was made
        self.why = ""


class Members:
    """The members of collectives that live in this process. Thread-safe."""

    def __init__(self, agent: Agent, me: WorkerKey) -> None:
        self._agent = agent
        self._me = me
        self._lock = threading.RLock()
        self._table: dict[tuple[int, int], _Member] = {}  # by (key of the generation, rank)
        # By actor: its last membership that has ended, to explain errors of operations that fail afterwards.
        self._past: dict[int, _Member] = {}
        self._agent.on_peer_end.append(self._peer_ended)

    # -- joining and leaving ---------------------------------------------------------------------------

    def join(self, hosted: HostedActor, ticket: Ticket) -> MemberSlot:
        """Join a generation; waits for the other members.

        Raises:
            CollectiveError: another member was lost, or torch could not connect the members.
            ConfigError: the backend cannot be used in this process.
        """
        for old in self._of(hosted.id):
            if old.ticket.name == ticket.name:
                self.remove(old, "it is being rebuilt")
        member = _Member(ticket, hosted.id)
        slot = MemberSlot(self._me, hosted.id)
        with self._lock:
            self._table[ticket.key, ticket.rank] = member
        try:
            if hosted.on_error is None:
                hosted.on_error = partial(self._explained, hosted.id)
                hosted.over.add_done_callback(lambda _: self._hosted_over(hosted))
            groups.check_devices(ticket.backend)
            self._connect(member, slot)
        except BaseException as error:
            self.remove(member, f"joining failed: {error}")
            if isinstance(error, RuntimeError) and not isinstance(error, RpcError):
                raise CollectiveError(
                    f"rank {ticket.rank} of {ticket.title} could not connect to the others: {error}",
                    actor=hosted.title,
                ) from error
            raise
        return slot

    def _connect(self, member: _Member, slot: MemberSlot) -> None:
        ticket, agent = member.ticket, self._agent
        peer = peer_of(agent, ticket.maker)

        def query(what: str, *args: Any) -> Any:
            return agent.call_sync(peer, rendezvous.serve, (ticket.key, what, *args), {}, ticket.join_s)

        record = agent.record
        mine = (record.host, record.tcp[0][0] if record.tcp else socket.gethostname())
        all_hosts = query("gather", ticket.rank, slot, mine)
        one_host = len({host for host, _ in all_hosts}) == 1
        member.store = store = groups.CallStore(query)
        group = groups.make(
            store,
            ticket.rank,
            ticket.size,
            backend=ticket.backend,
            name=f"{ticket.name}/{ticket.generation}/{ticket.key:x}/{ticket.rank}",
            timeout_s=ticket.timeout_s,
            join_s=ticket.join_s,
            address="127.0.0.1" if one_host else mine[1],
        )
        member.connections = groups.connections(store)
        with self._lock:
            why = member.why
            if not why:
                member.group = group
        if why:  # another thread cut the member before its group was made
            groups.cut(group, store, ticket.backend)
            groups.forget(group)
            raise CollectiveError(f"{ticket.title} is broken: {why}", actor=ticket.title)

    def cut(self, member: _Member, why: str) -> None:
        """End the operations of a member. The member stays in the table, as broken."""
        with self._lock:
            if member.why:
                return
            member.why = why
            group, store = member.group, member.store
        groups.cut(group, store, member.ticket.backend)

    def remove(self, member: _Member, why: str) -> None:
        """End the operations of a member, and remove the member from the table."""
        self.cut(member, why)
        with self._lock:
            if self._table.pop((member.ticket.key, member.ticket.rank), None) is not None:
                self._past[member.instance_id] = member
            group, member.group, member.store = member.group, None, None
        if group is not None:
            groups.forget(group)

    def find(self, key: int, rank: int) -> _Member | None:
        """Return a member, or None if it is not in this process."""
        return self._table.get((key, rank))

    def close(self) -> None:
        """Remove all members, because this process leaves the group."""
        for member in list(self._table.values()):
            self.remove(member, "its worker has left")

    def _hosted_over(self, hosted: HostedActor) -> None:
        why = hosted.why or "it ended"

        def go() -> None:
            for member in self._of(hosted.id):
                self.remove(member, f"rank {member.ticket.rank} was lost: {why}")
                _ = self._report(member, why, True)
            self._past.pop(hosted.id, None)

        self._agent.submit(go)

    def _peer_ended(self, peer: Peer) -> None:
        key = peer.key
        for member in list(self._table.values()):
            if member.ticket.maker == key:
                why = f"worker {peer.name!r}, which made it, has ended"
                self._agent.submit(partial(self.remove, member, why))

    def _report(self, member: _Member, why: str, ended: bool) -> Future[str]:
        agent, ticket = self._agent, member.ticket
        return call_quietly(
            agent,
            lambda: peer_of(agent, ticket.maker),
            rendezvous.report_loss,
            (ticket.key, ticket.rank, why, ended),
            _REPORT_S,
        )

    # -- use -------------------------------------------------------------------------------------------

    def _of(self, instance_id: int) -> list[_Member]:
        with self._lock:
            return [each for each in self._table.values() if each.instance_id == instance_id]

    def group(self, hosted: HostedActor, name: str | None) -> dist.ProcessGroup:
        """See :func:`collective_group`."""
        mine = self._of(hosted.id)
        found = [each for each in mine if name is None or each.ticket.name == name]
        names = ", ".join(repr(each.ticket.name) for each in mine)
        who = hosted.title
        if not found:
            which = "no collective" if name is None else f"no collective {name!r}"
            past = self._past.get(hosted.id)
            hint = " (if it has been restarted, the worker that made the collective has to rebuild() it)"
            if mine:
                hint = f"; it is in {names}"
            elif past is not None:
                hint = f"; it was in {past.ticket.title}: {past.why}"
            raise CollectiveError(f"{who} is in {which}{hint}", actor=who)
        if len(found) > 1:
            raise CollectiveError(
                f"{who} is in several collectives: say which one by name: {names}", actor=who
            )
        (member,) = found
        group = member.group
        if member.why or group is None:
            why = member.why or "its members have not met yet"
            raise CollectiveError(
                f"{member.ticket.title} is broken: {why}; it works again after rebuild()", actor=who
            )
        return group

    def _explained(self, instance_id: int, error: BaseException) -> BaseException:
        """Return the exception to send to the caller of a call that fails with ``error``: see HostedActor.on_error."""
        if isinstance(error, ValueError) and _GONE in str(error):
            # A group of the actor has ended, and torch has removed the group from its tables.
            ended = [each for each in self._of(instance_id) if each.why]
            gone = ended[0] if ended else self._past.get(instance_id)
            if gone is None:
                return error
            return _caused(f"an operation of {gone.ticket.title} failed: {gone.why}", error)
        if not isinstance(error, RuntimeError) or isinstance(error, RpcError):
            return error
        text = str(error)
        if not isinstance(error, dist.DistError) and not any(word in text for word in _BACKENDS):
            return error
        # Keep the first sentence, without the place in torch's source.
        text = _PLACE.sub("", text.partition("\n")[0].partition(". ")[0])
        # The error does not name its group. Choose a group that is broken or has lost connections.
        mine = self._of(instance_id)
        broken = [each for each in mine if each.why] or [each for each in mine if _has_lost(each)]
        past = self._past.get(instance_id)
        if not broken and past is None:
            broken = mine if len(mine) == 1 else []
        if not broken:
            if past is None:
                return error
            return _caused(f"an operation of {past.ticket.title} failed: {past.why}", error)
        (member, *_) = broken
        ticket = member.ticket
        if not member.why:
            # Ending this member's connections also ends the operations of the other members. The report below asks the worker
            # that made the collective for the reason.
            self.cut(member, f"an operation of rank {ticket.rank} failed: {text}")
        report = self._report(member, member.why, False)
        try:
            why = member.why = report.wait(_REPORT_S)
        except RpcError:
            why = member.why
        return _caused(f"an operation of {ticket.title} failed at rank {ticket.rank}: {why}", error)


def _has_lost(member: _Member) -> bool:
    """Say whether connections of the member's group have ended; also true for backends whose connections are not visible."""
    if member.store is None or member.group is None:
        return False
    return member.ticket.backend != "gloo" or groups.connections(member.store) < member.connections


def _caused(text: str, error: BaseException) -> CollectiveError:
    found = CollectiveError(text, maybe_executed=True, cause=error)
    return found.with_traceback(error.__traceback__)


# -- called in the actor ------------------------------------------------------------------------------------


def _hosted(what: str) -> HostedActor:
    execution = CURRENT.get()
    hosted = None if execution is None else execution.actor
    if hosted is None or hosted.spec is None:
        raise CollectiveError(f"{what} is for the code of an actor, and no actor runs here")
    return cast("HostedActor", hosted)


def collective_group(name: str | None = None) -> dist.ProcessGroup:
    """Return the process group of a collective that the actor is in, for the functions of ``torch.distributed``.

    ``dist.all_reduce(tensor, group=actorrpc.collective_group())``, ``DistributedDataParallel(module, process_group=...)``
    and so on. Ranks that these functions take (``src=``, ``dst=``) are ranks in the collective; ``group.rank()`` is the rank
    of this actor and ``group.size()`` the number of members. (``dist.get_rank(group)`` uses the process's default group, which
    may not exist and is unrelated.)

    Call this in each method that uses the group, and do not keep the group: after ``rebuild()``, there is another group, and
    operations of the old group raise. Objects that keep a group (DDP modules) must then be made again.

    Works in methods and in functions called by :func:`actorrpc.call`, but not in other threads. Actors with
    ``max_concurrency`` above 1 must ensure the order of their operations themselves, as in torch.

    Args:
        name: the name of the collective; may be omitted if the actor is in only one.

    Raises:
        CollectiveError: no actor runs here; the actor is in no such collective, or in several; or the collective is broken.
    """
    members: Members = runtime().members
    return members.group(_hosted("collective_group()"), name)


def join(instance: Any, ticket: Ticket) -> MemberSlot:
    """Join a collective. Called through the mailbox of the actor."""
    del instance
    members: Members = runtime().members
    return members.join(_hosted("join"), ticket)


def nothing(instance: Any) -> None:
    """Do nothing. A call through the actor's mailbox ends after all earlier calls."""
    del instance


def broadcast(instance: Any, name: str, what: str | Callable[[Any], Any], src: int) -> None:
    """Copy tensors of rank ``src`` into the tensors of this actor."""
    group = collective_group(name)
    found = what(instance) if callable(what) else instance
    if isinstance(what, str) and what:
        for part in what.split("."):
            found = getattr(found, part)
    tensors = _tensors(found)
    with torch.no_grad():
        works = [dist.broadcast(each, group_src=src, group=group, async_op=True) for each in tensors]
        for work in works:
            work.wait()


def _tensors(found: Any) -> list[torch.Tensor]:
    if isinstance(found, nn.Module):
        return [each.detach() for each in (*found.parameters(), *found.buffers())]
    if isinstance(found, torch.Tensor):
        return [found.detach()]
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, (list, tuple)):
        return [tensor for each in found for tensor in _tensors(each)]
    raise ConfigError(
        f"broadcast() copies modules, tensors, and lists and dicts of them, not a {type(found).__name__}"
    )


# -- called by RPC on the worker of the actor ----------------------------------------------------------------


def cut(key: int, rank: int, why: str) -> None:
    """End the operations of a member, which stays in the table as broken. Called by RPC."""
    _apply(Members.cut, key, rank, why)


def remove(key: int, rank: int, why: str) -> None:
    """End the operations of a member, and remove the member from the table. Called by RPC."""
    _apply(Members.remove, key, rank, why)


def _apply(method: Callable[[Members, _Member, str], None], key: int, rank: int, why: str) -> None:
    """Call a method of :class:`Members` with a member of this process, if there is such a member."""
    here = current()
    member = None if here is None else here.members.find(key, rank)
    if here is not None and member is not None:
        method(here.members, member, why)
