"""References (handles, ObjectRefs, RRefs) in pickles that a program makes itself, as with ``pickle.dumps(handle)``.

Such a pickle does not keep the value alive, because the pickle may be loaded any number of times, or never. The pickle contains
the address of the value: the incarnation of a worker and the id of the value. The process that loads the pickle requests a
reference from that worker, which counts it like all references. Therefore a program must keep a reference until the pickle was
loaded.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from actorrpc.errors import (
    NotInitializedError,
    PeerDiedError,
    RRefError,
    SerializationError,
    UnknownWorkerError,
)
from actorrpc.rpc import rref as rrefs
from actorrpc.rpc.refcount.messages import RRefId
from actorrpc.rpc.refcount.runtime import References
from actorrpc.rpc.rref import RRef
from actorrpc.wire.identity import WorkerKey

__all__ = ["Address", "GroupIdentity", "address_of", "enter", "find", "here"]

_FIND_S: Final = 30.0  # how long the worker that has a value may take to answer


class GroupIdentity(NamedTuple):
    """Identifies the group of a reference by the incarnation of the group's rank 0.

    Attributes:
        first: the incarnation of rank 0; empty if the pickling process did not know it.
        name, pid: the name and process id of rank 0, for messages.
    """

    first: str
    name: str
    pid: int

    def __str__(self) -> str:
        return f"the group {self.first[:8]} of {self.name!r} (process {self.pid})"


class Address(NamedTuple):
    """The address of a value.

    Attributes:
        worker, name: the key and the name of the worker that has the value.
        value: the id of the value.
    """

    group: GroupIdentity
    worker: WorkerKey
    name: str
    value: RRefId


def here() -> GroupIdentity:
    """Return the group of this process.

    Raises:
        NotInitializedError: this process is in no group.
    """
    agent = rrefs.runtime().agent
    for record in (agent.record, *agent.members()):
        if record.rank == 0:
            return GroupIdentity(record.incarnation, record.name, record.pid)
    return GroupIdentity("", agent.record.name, agent.record.pid)


def enter(group: GroupIdentity, what: str) -> References:
    """Return the :class:`References` of this process, after checking that it is in the group in which ``what`` was pickled.

    Raises:
        NotInitializedError: this process is in no group.
        SerializationError: this process is in another group.
    """
    try:
        references, mine = rrefs.runtime(), here()
    except NotInitializedError:
        raise NotInitializedError(
            f"{what} was pickled in {group}, and can only be loaded by workers of that group: this process is in none. Load it "
            "in an actor or a task, or join the group first; a process that was forked from a worker is not a worker"
        ) from None
    if group.first and mine.first and group.first != mine.first:
        raise SerializationError(
            f"{what} was pickled in {group}, and can only be loaded by workers of that group: this process is in {mine}. "
            "Between groups, send values: get() them first"
        )
    return references


def address_of(rref: RRef[Any]) -> Address:
    """Return the address of an RRef's value. The address is valid as long as any process keeps a reference to the value."""
    rref._check()
    references, handle = rref._references, rref._handle
    owner = handle.owner
    name = references.agent.name if owner == references.me else references.peer_of(owner).name
    return Address(here(), owner, name, handle.rref_id)


def find(address: Address, what: str) -> RRef[Any]:
    """Return a reference to the value at an address. Blocks until the worker that has the value answers.

    Raises:
        NotInitializedError, SerializationError: this process is not in the group of the address.
        PeerDiedError: the worker that had the value has ended.
        RRefError: the value was freed because no process kept a reference.
        RpcTimeoutError: the worker does not answer.
    """
    references = enter(address.group, what)
    if address.worker == references.me:
        found = rrefs.lend(address.value)
    else:
        agent = references.agent
        try:
            peer = agent.peer(address.worker.rank)
            if peer.record.incarnation != address.worker.incarnation:
                raise UnknownWorkerError(f"{peer.name!r} has taken its place")
            found = agent.call_sync(peer, _lend, (address.value,), {}, _FIND_S)
        except (UnknownWorkerError, PeerDiedError) as error:
            raise PeerDiedError(
                f"{what} cannot be loaded from its pickle: worker {address.name!r}, which had it, has ended ({error})",
                maybe_executed=False,
                worker=address.name,
            ) from None
    if found is None:
        raise RRefError(
            f"{what} cannot be loaded from its pickle: it was freed, because no process kept it. A pickle keeps nothing "
            "alive: keep the reference itself until the pickle was loaded"
        )
    return found


def _lend(value: RRefId) -> RRef[Any] | None:
    """Return a reference to a value of this worker, or None if the value was freed. Called by RPC from :func:`find`."""
    return rrefs.lend(value)
