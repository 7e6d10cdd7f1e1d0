"""One copy per host: a large object of another host is fetched once, and all workers of the fetching host share the copy.

The worker that has the object sends its bytes to the first worker of a host that requests it. Later requests from that host are
answered with a :class:`CopyOnHost`, which names the first worker. The requesters fetch the copy from the first worker, which
moves it into shared memory once. Workers do not report that they have freed a copy: if the first worker has ended or has no copy
any more, the requester asks the object's worker again, which then sends the bytes.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, NamedTuple

import torch

from actorrpc._exceptions import is_of_handler
from actorrpc.actors.context import runtime
from actorrpc.actors.refs.offers import Offers, Wanted
from actorrpc.actors.refs.shared import SharedTensor
from actorrpc.actors.refs.snapshot import LARGE, Snapshot, of_promise
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

_ANSWER_S: Final = (
    30.0  # how long the worker that a CopyOnHost names may take; then the object's worker is asked again
)


class CopyOnHost(NamedTuple):
    """An answer in place of an object: another worker of the requesting host has a copy.

    Attributes:
        worker: identifies the worker that has the copy.
        value: the id under which that worker has requested the object.
    """

    worker: WorkerKey
    value: RRefId


class HostCopies:
    """Weak table of the values that this process has fetched, or is fetching, from other workers for ObjectRefs. Thread-safe."""

    __slots__ = ("_fetched", "_references")

    def __init__(self, references: References) -> None:
        self._references = references
        self._fetched: weakref.WeakValueDictionary[RRefId, Future[Any]] = weakref.WeakValueDictionary()

    def copy_of(self, value: RRefId) -> Any:
        """Return this worker's copy of a value, or a Deferred while it is fetched; None if it was freed or the fetch failed."""
        agent, future = self._references.agent, self._fetched.get(value)
        if future is None:
            return None
        if future.completed:
            return _in_segment(agent, future)
        answer: Future[Any] = Future()
        answer.label = future.label
        # Copying into shared memory may take long, so a pool thread copies, and not the thread that reads replies.
        future.add_done_callback(
            lambda done: agent.submit(lambda: answer.set_result(_in_segment(agent, done)))
        )
        return Deferred(answer)

    def fetch(
        self, rref: RRef[Any], future: Future[Any], anew: bool, wanted: Wanted | None = None
    ) -> Future[Any]:
        """Request the value of an RRef; return a future of the object, a :class:`CopyOnHost` or an :class:`Offer`. Never raises.

        Args:
            future: completes later with the object, or with the Offer. Without ``wanted``, other workers of this host may then
                fetch the object from this worker.
            anew: the copy that an earlier answer named is not available, so the object itself is requested.
            wanted: request an :class:`Offer` of a large object in place of the object.
        """
        value = rref._handle.rref_id
        if not anew and not rref.is_owner():
            here = self._fetched.get(value)
            if here is not None and type(here.value_or_none) is Snapshot:
                return here
        if wanted is None:
            self._fetched[value] = future
        return rref._to_future(fetch=_on_fetch, more=(anew, wanted))

    def request(self, copy: CopyOnHost) -> Future[Any]:
        """Fetch another worker's copy. The returned future has None if there is no copy, and fails if that worker has ended."""
        future: Future[Any] = Future()
        references = self._references
        try:
            peer = references.peer_of(copy.worker)
            references.agent.call(peer, _on_copy_request, (copy.value,), {}, _ANSWER_S, future=future)
        except RpcError as error:  # the worker has ended
            future.set_exception(error)
        references.agent.flush()
        return future


def place_of(agent: Agent, worker: str) -> str:
    """Return the same key for all workers that can share one copy: their host, or the worker if it shares no memory."""
    try:
        peer = agent.peer(worker)
        host = peer.record.host
        shares = agent.shares_memory(peer) if host == agent.record.host else peer.record.unix_path is not None
    except RpcError:  # the worker has died
        return worker
    return host if shares else worker


def _on_fetch(named: tuple[int, int, str], anew: bool, wanted: Wanted | None) -> Any:
    """Answer :meth:`HostCopies.fetch` of another worker, by RPC. ``named``: the id of an object of this worker."""
    value = RRefId(*named)
    execution = CURRENT.get()
    assert execution is not None
    agent, peer = runtime().agent, execution.peer
    found = rrefs._fetch(value)
    if type(found) is not Deferred:
        return _answer(agent, peer, value, anew, wanted, found)
    if wanted is None:
        return Deferred(
            found.future.then(lambda there: _answer(agent, peer, value, anew, None, there.value()))
        )
    answer: Future[Any] = Future()

    def make(there: Any) -> None:
        answer.complete_with(lambda: _answer(agent, peer, value, anew, wanted, there.value()))

    # A registered transport may take long, so a pool thread calls it, and not the thread that completes the future.
    found.future.add_done_callback(lambda there: agent.submit(lambda: make(there)))
    return Deferred(answer)


def _answer(agent: Agent, peer: Peer, value: RRefId, anew: bool, wanted: Wanted | None, found: Any) -> Any:
    """Return the content of the answer: the object itself, an Offer, or a CopyOnHost with a worker of the requesting host."""
    found = of_promise(found)
    offers: Offers = runtime().offers
    shares = agent.shares_memory(peer)
    if wanted is not None and (
        (type(found) is torch.Tensor and (found.is_cuda or not shares))
        or (type(found) is SharedTensor and not found.is_mappable_for(peer))
    ):
        return offers.make(found, wanted, peer.name)
    if type(found) is not Snapshot or found.nbytes < LARGE or shares:
        return found
    place, lent = place_of(agent, peer.name), found.host_copies
    if wanted is not None:
        known = None if lent is None or anew else lent.get(place)
        if known is not None and known[0] != peer.key:
            return CopyOnHost(*known)
        return offers.make(found, wanted, peer.name)
    if lent is None:
        # If two threads do this at once, both requests are answered with the bytes.
        lent = found.host_copies = {}
    if anew:
        lent[place] = peer.key, value
    worker, known_as = lent.setdefault(place, (peer.key, value))
    return found if worker == peer.key else CopyOnHost(worker, known_as)


def _on_copy_request(value: RRefId) -> Any:
    return runtime().host_copies.copy_of(value)


def _in_segment(agent: Agent, done: Future[Any]) -> Snapshot | None:
    copy = done.value_or_none
    if done.error is not None or type(copy) is not Snapshot:
        return None
    try:
        copy.move_to_segment(agent)
    except Exception as error:  # most often, there is no room in shared memory; the bytes are sent
        if is_of_handler(error):
            raise
    return copy
