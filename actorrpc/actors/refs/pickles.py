"""References in pickles that a program makes itself, as with ``pickle.dumps(handle)``.

Such a pickle does not keep the value alive, as it may be loaded any number of times, or never. It has the address of the value:
one value of one incarnation of one worker. The process that loads it asks that worker for a reference, which is counted as all
others. Therefore a program has to keep a reference until its pickle was loaded.
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

_FIND_S: Final = 30.0  # how long the worker that has a value may take to lend it


class GroupIdentity(NamedTuple):
    """The group that a reference is of: by its rank 0, which is one life of one worker.

    Attributes:
        first: its incarnation; empty if it was not known.
        name, pid: its name and process id, for messages.
    """

    first: str
    name: str
    pid: int

    def __str__(self) -> str:
        return f"the group {self.first[:8]} of {self.name!r} (process {self.pid})"


class Address(NamedTuple):
    """Where a value is.

    Attributes:
        worker, name: the worker that has the value.
        value: the id of the value.
    """

    group: GroupIdentity
    worker: WorkerKey
    name: str
    value: RRefId


def here() -> GroupIdentity:
    """Return the group that this process is in.

    Raises:
        NotInitializedError: it is in none.
    """
    agent = rrefs.runtime().agent
    for record in (agent.record, *agent.members()):
        if record.rank == 0:
            return GroupIdentity(record.incarnation, record.name, record.pid)
    return GroupIdentity("", agent.record.name, agent.record.pid)


def enter(group: GroupIdentity, what: str) -> References:
    """Return the references of this process, if it is in the group in which an object was pickled.

    Raises:
        NotInitializedError: it is in none.
        SerializationError: it is in another one.
    """
    try:
        references, mine = rrefs.runtime(), here()
    except NotInitializedError:
        raise NotInitializedError(
            f"{what} was pickled in {group}, and can only be loaded by workers of that group: this process is in none. Load it "
            "in an actor or a task, or join the group first; a process that was forked from a worker is none"
        ) from None
    if group.first and mine.first and group.first != mine.first:
        raise SerializationError(
            f"{what} was pickled in {group}, and can only be loaded by workers of that group: this process is in {mine}. "
            "Between groups, send values: get() them first"
        )
    return references


def address_of(rref: RRef[Any]) -> Address:
    """Return the address of a reference. It is valid as long as any process keeps a reference to the value."""
    rref._check()
    references, handle = rref._references, rref._handle
    owner = handle.owner
    name = references.agent.name if owner == references.me else references.peer_of(owner).name
    return Address(here(), owner, name, handle.rref_id)


def find(address: Address, what: str) -> RRef[Any]:
    """Return a reference to the value at an address. Waits for the answer of the worker that has the value.

    Raises:
        NotInitializedError, SerializationError: this process is not in its group.
        PeerDiedError: the worker that had it has ended.
        RRefError: the value was freed, as no process kept a reference.
        RpcTimeoutError: that worker does not answer.
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
            found = agent.ask(peer, _lend, (address.value,), {}, _FIND_S)
        except (UnknownWorkerError, PeerDiedError) as error:
            raise PeerDiedError(
                f"{what} cannot be loaded from its pickle: worker {address.name!r}, which had it, has ended ({error})",
                maybe_executed=False,
                worker=address.name,
            ) from None
    if found is None:
        raise RRefError(
            f"{what} cannot be loaded from its pickle: it is no more, as nobody has kept it. A pickle keeps nothing alive: keep "
            "the reference itself until the pickle was loaded"
        )
    return found


def _lend(value: RRefId) -> RRef[Any] | None:
    """Return a reference to a value of this worker, if it is still there. Called by RPC."""
    return rrefs.lend(value)
