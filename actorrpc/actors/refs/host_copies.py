"""One copy for a host: a large object of another host is fetched from there once, and shared by all who want it here.

The worker that has the object sends its bytes to the first who asks from a host, and tells the others from there who that was
(:class:`CopyOnHost`): they ask that one, in whose process the copy goes into memory that the host shares, once. Nobody is told
when a copy is let go of: who asks in vain, or asks a worker that has ended, asks the object's worker anew, and gets the bytes.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, NamedTuple

from actorrpc._exception_text import is_of_handler
from actorrpc.actors.context import runtime
from actorrpc.actors.refs.results import of_promise
from actorrpc.actors.refs.snapshot import LARGE, Snapshot
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import CURRENT
from actorrpc.agent.executor import Deferred
from actorrpc.agent.peers import Peer
from actorrpc.errors import RpcError
from actorrpc.futures import Future
from actorrpc.rpc import rref as rrefs
from actorrpc.rpc.refcount.messages import RRefId
from actorrpc.rpc.refcount.runtime import References
from actorrpc.rpc.rref import RRef
from actorrpc.wire.identity import WorkerKey

__all__ = ["CopyOnHost", "HostCopies", "place_of"]

_ASK_S: Final = 30.0  # who has a copy, or is fetching it, may take so long; then its owner is asked again


class CopyOnHost(NamedTuple):
    """Stands for an object in an answer: another worker of the host that asks has a copy.

    Attributes:
        worker: who.
        value: which one, as that worker has asked for it.
    """

    worker: WorkerKey
    value: RRefId


class HostCopies:
    """What this process has fetched from other workers, or is fetching, for as long as an ObjectRef has it. Thread-safe."""

    __slots__ = ("_fetched", "_references")

    def __init__(self, references: References) -> None:
        self._references = references
        self._fetched: weakref.WeakValueDictionary[RRefId, Future[Any]] = weakref.WeakValueDictionary()

    def share(self, value: RRefId) -> Any:
        """Return the copy that this worker has fetched; None after the copy was freed."""
        agent, future = self._references.agent, self._fetched.get(value)
        if future is None:
            return None
        if future.completed:
            return _shared(agent, future)
        answer: Future[Any] = Future()
        answer.label = future.label
        # It may be long to copy: not on the thread that reads.
        future.add_done_callback(lambda done: agent.submit(lambda: answer.set_result(_shared(agent, done))))
        return Deferred(answer)

    def fetch(self, rref: RRef[Any], future: Future[Any], anew: bool) -> Future[Any]:
        """Return what completes with an object, or with :class:`CopyOnHost`. Never raises.

        Args:
            future: completes with the object in the end, wherever that is had from: others of this host are given it.
            anew: the copy on this host that was told of could not be had.
        """
        value = rref._handle.rref_id
        if not anew and not rref.is_owner():
            here = self._fetched.get(value)
            if here is not None and type(here.value_or_none) is Snapshot:
                return here
        self._fetched[value] = future
        return rref._to_future(fetch=_lend, more=(anew,))

    def ask(self, copy: CopyOnHost) -> Future[Any]:
        """Return what completes with the copy of another worker of this host, or with None where that has none any more."""
        future: Future[Any] = Future()
        references = self._references
        try:
            peer = references.peer_of(copy.worker)
            references.agent.call(peer, _share, (copy.value,), {}, _ASK_S, future=future)
        except RpcError as error:  # it has ended
            future.set_exception(error)
        references.agent.flush()
        return future


def place_of(agent: Agent, worker: str) -> str:
    """Return what is the same for all workers that share the memory of one copy: their host, or just the worker."""
    try:
        peer = agent.peer(worker)
        host = peer.record.host
        shares = agent.shares_memory(peer) if host == agent.record.host else peer.record.unix_path is not None
    except RpcError:  # it has died since
        return worker
    return host if shares else worker


def _lend(named: tuple[int, int, str], anew: bool) -> Any:
    """Answer with an object of this worker. Runs where it is."""
    value = RRefId(*named)
    execution = CURRENT.get()
    assert execution is not None
    agent, peer = runtime().agent, execution.peer
    found = rrefs._fetch(value)
    if type(found) is not Deferred:
        return _lent(agent, peer, value, anew, found)
    return Deferred(found.future.then(lambda there: _lent(agent, peer, value, anew, there.value())))


def _lent(agent: Agent, peer: Peer, value: RRefId, anew: bool, found: Any) -> Any:
    """Return what the answer carries: the object itself, or who on the asker's host has it."""
    found = of_promise(found)
    if type(found) is not Snapshot or found.nbytes < LARGE or agent.shares_memory(peer):
        return found
    place, lent = place_of(agent, peer.name), found.lent
    if lent is None:
        lent = found.lent = {}  # of two who are the first at once, each gets the bytes
    if anew:
        lent[place] = peer.key, value
    worker, known_as = lent.setdefault(place, (peer.key, value))
    return found if worker == peer.key else CopyOnHost(worker, known_as)


def _share(value: RRefId) -> Any:
    return runtime().host_copies.share(value)


def _shared(agent: Agent, done: Future[Any]) -> Snapshot | None:
    copy = done.value_or_none
    if done.error is not None or type(copy) is not Snapshot:
        return None
    try:
        copy.share(agent)
    except Exception as error:  # no room: who asks gets bytes
        if is_of_handler(error):
            raise
    return copy
