"""ObjectRefs: references to results, which calls of actors return at once.

A small result is sent with the reply. A large result is written once into memory that all processes of the host share; the reply
carries a :class:`Snapshot`, which names that memory, and a file descriptor of the memory. Each ``get()`` makes a value of its own
from the snapshot. A process on another host is sent a :class:`StoredResult`, an RRef to the result, and fetches the result when
the process needs the value. An ObjectRef that is sent before its result exists is sent as a promise: an RRef of the sending
worker, which gets the result later.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Generator, Iterator
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar

import torch

from actorrpc._exceptions import shown, type_name
from actorrpc.actors.context import current, runtime
from actorrpc.actors.refs import pickles
from actorrpc.actors.refs.deadlines import deadline_of, wait_for
from actorrpc.actors.refs.host_copies import CopyOnHost, HostCopies
from actorrpc.actors.refs.offers import Wanted
from actorrpc.actors.refs.pull import fill, wanted_for
from actorrpc.actors.refs.shared import SharedTensor, check_sharable
from actorrpc.actors.refs.snapshot import ATOMS, LARGE, Snapshot, StoredResult, of_promise, readable, replace
from actorrpc.agent.calls import CURRENT
from actorrpc.agent.peers import MessageContext
from actorrpc.errors import (
    CancelledError,
    PeerDiedError,
    RpcTimeoutError,
    RRefError,
    SerializationError,
)
from actorrpc.futures import INTERRUPTED, ConcurrentFuture, Future, InnerFuture, Progress, interruption_point
from actorrpc.rpc import rref as rrefs
from actorrpc.rpc.rref import RRef
from actorrpc.serialization import codec, exceptions
from actorrpc.serialization.local_refs import LocalReferences
from actorrpc.transport.signals import uninterruptible

if TYPE_CHECKING:
    from actorrpc.agent.peers import Peer

__all__ = ["SMALL", "ObjectRef", "keep_large", "keep_sole", "put", "share"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_Tensor = TypeVar("_Tensor", bound=torch.Tensor)

SMALL: Final = 64 << 10
"""Results up to this many bytes are always sent with the reply; :func:`keep_large` decides about larger results."""

SOLE: Final = 2 if sys.version_info < (3, 14) else -1
"""The result of ``sys.getrefcount(argument)`` in a function if no other variable refers to the argument.

No other code can read an ObjectRef with this count. From Python 3.14 on, the count is not reliable: -1 matches no count.
"""

_TEXTS: Final = frozenset({str, bytes})
_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_MAX_HOPS: Final = 8  # how often a fetch may be referred to another worker


def keep_large(value: Any, encoded: codec.Encoded | bytes, peer: Peer, sole: bool = False) -> Any:
    """Return the object to send in the reply to ``peer`` for a result that was packed as ``encoded``.

    A result of at most SMALL bytes is sent itself. A result for a worker of this host is also sent itself if it has less than
    LARGE bytes or is on a GPU. For a larger result, a worker of this host gets a Snapshot, and a worker of another host gets a
    StoredResult. Both are copies, except that with ``sole`` a StoredResult refers to the result itself. Later changes of the
    object by its actor do not change a copy.

    Args:
        sole: no other object refers to the result, so a StoredResult refers to the result itself, and not to a copy.

    Raises:
        SerializationError, ObjectStoreFullError: as :meth:`Snapshot.of`.
    """
    nbytes = len(encoded) if isinstance(encoded, bytes) else encoded.nbytes
    if nbytes <= SMALL:
        return value
    shared = runtime().agent.shares_memory(peer)
    if shared and (nbytes < LARGE or (not isinstance(encoded, bytes) and encoded.is_placed)):
        return value
    if sole and not shared:
        return StoredResult(RRef(value))
    execution = CURRENT.get()
    snapshot = Snapshot.of(
        value, label="a result" if execution is None else f"the result of {execution.label}"
    )
    return snapshot if shared else StoredResult(RRef(snapshot))


keep_sole: Final = partial(keep_large, sole=True)


def _lost(label: object, error: PeerDiedError) -> PeerDiedError:
    """Return the error of a large result whose worker has ended before this process fetched the result."""
    what = str(label).removeprefix("the result of ").removeprefix("the call of ")
    return _explained(
        f"the result of {what} is lost: the call was executed, and its large result stayed on worker {error.worker!r}, "
        "which has ended before it was fetched. Call again, and fetch such results, or pass them on, while their actor lives",
        error,
        maybe_executed=True,
    )


def _out_of_reach(label: object, error: PeerDiedError) -> PeerDiedError:
    """Return the error of a value whose source has ended: the worker that sent the ObjectRef to this process."""
    return _explained(
        f"the value of {label} is lost: its source, worker {error.worker!r}, has ended before it was fetched. "
        "Fetch such values while that worker lives",
        error,
        maybe_executed=error.maybe_executed,
    )


def _explained(text: str, error: PeerDiedError, maybe_executed: bool | None) -> PeerDiedError:
    explained = PeerDiedError(text, maybe_executed=maybe_executed, worker=error.worker)
    explained.__cause__ = error
    return explained


class _Pursuit(Progress):
    """Follows references step by step to the value of a result, and completes a future with the value.

    A step is the future of one request. A pursuit is the source of its future, so a waiting thread reads the replies itself. The
    outcome of each step is handled once, by the waiting thread or a callback, whichever pops the step from the list ``_claim``.

    Args:
        stays: do not follow a :class:`StoredResult`, but complete the future with it.
        wanted: complete the future with an Offer of a tensor that this process cannot read in shared memory: the tensor is on
            another host or on a GPU.
    """

    __slots__ = ("_claim", "_copies", "_hops", "_is_nearby", "_rref", "_stays", "_wanted", "future")

    def __init__(
        self,
        future: Future[Any],
        label: object,
        *,
        stays: bool = False,
        wanted: Wanted | None = None,
    ) -> None:
        self.future = future
        self._stays = stays
        self._wanted = wanted
        self._is_nearby = False  # whether the current step requests a copy from another worker of this host
        self.future.label = label
        self.future.source = self
        self._rref: RRef[Any] | None = None
        self._copies: HostCopies | None = None
        self._hops = 0
        self._claim: list[Future[Any]] = []

    def follow(self, step: Future[Any]) -> None:
        """Make ``step`` the current step: continue with its outcome when it is complete."""
        claim = self._claim = [step]
        step.add_done_callback(lambda _: self._on_step(claim))

    @uninterruptible
    def _on_step(self, claim: list[Future[Any]]) -> None:
        try:
            step = claim.pop()
        except IndexError:
            return
        error, value = step.error, of_promise(step.value_or_none)
        if self._is_nearby and type(value) is not Snapshot and type(error) is not CancelledError:
            step.acknowledge()  # the other worker has ended, has freed its copy, or never got one
            assert self._rref is not None
            self.pursue(self._rref, anew=True)
        elif error is not None:
            if type(error) is PeerDiedError and self._rref is not None:
                if not self._stays:
                    error = _lost(self.future.label, error)
                elif error.worker == self._rref.owner_name():  # otherwise it is the error of the user's call
                    error = _out_of_reach(self.future.label, error)
            self.future.follow(step, error)
        elif type(value) is CopyOnHost:
            assert self._copies is not None
            self._is_nearby = True
            self.follow(self._copies.request(value))
        elif type(value) is StoredResult and not self._stays:
            self._hops += 1
            if self._hops > _MAX_HOPS:
                self.future.try_fail(
                    RRefError(f"{self.future.label} leads from worker to worker without end")
                )
            else:
                self.pursue(value.rref)
        else:
            try:
                # An object that lives on this worker is shared by all readers, so copy it. A fetched object has one reader.
                owned = self._rref is not None and self._rref.is_owner() and not self._stays
                if owned and type(value) is not Snapshot:
                    value = Snapshot.of(value)
            except Exception as caught:
                self.future.try_fail(caught)
            else:
                self.future.try_complete(value)

    def pursue(self, rref: RRef[Any], *, anew: bool = False) -> None:
        """Fetch the value of an RRef from its owner, or from a worker of this host that has a copy.

        Args:
            anew: fetch the value from its owner, because the copy is not available.
        """
        self._rref, self._is_nearby = rref, False
        found = current()
        if found is None:  # this worker has left its group: _to_future() gives the error
            self.follow(rref._to_future())
            return
        self._copies = found.host_copies
        self.follow(self._copies.fetch(rref, self.future, anew, self._wanted))
        found.agent.flush()

    # -- the source of a future -----------------------------------------------------------------

    @property
    def behind(self) -> Future[Any] | None:
        """The future for which this pursuit waits now, for the search for deadlocks."""
        claim, rref = self._claim, self._rref
        try:
            step = claim[0]
        except IndexError:
            return None
        if rref is not None and rref.is_owner():  # the step waits for a value that this worker has promised
            return rrefs.promised(rref) or step
        return step

    def drive(self, deadline: float | None) -> None:
        """Read replies in this thread until the future is complete, the deadline has passed, or another thread handles a step."""
        while not self.future.completed:
            claim = self._claim
            try:
                step = claim[0]
            except IndexError:
                return
            step.drive(deadline)
            if not step.completed:
                return
            self._on_step(claim)

    def flush(self) -> None:
        for step in self._claim:
            step.flush()

    def cancel(self) -> bool:
        try:
            return self._claim[0].cancel()
        except IndexError:
            return False


# Guards the first assignment of ``_future``, ``_fetched``, ``_promise`` and ``_id`` of each ObjectRef, so that no value is
# fetched twice. Re-entrant, because the garbage collector may run finalisers that use ObjectRefs.
_lock = threading.RLock()


# The identity of an ObjectRef consists of random bytes of this process and a number. Drawing random bytes for each ObjectRef
# would take longer than creating the ObjectRef.
_origin = b""
_numbers = itertools.count()


def _draw_origin() -> None:
    global _origin
    _origin = os.urandom(7)


_draw_origin()
os.register_at_fork(after_in_child=_draw_origin)


class ObjectRef(Generic[T_co]):
    """A reference to the result of a call to an actor or a task; :func:`actorrpc.get` returns the result.

    An ObjectRef can be awaited, on any event loop. As an argument of another call, it is replaced by its result before
    the method runs; inside of containers it is passed as an ObjectRef. It can be sent in arguments and results of calls,
    before or after its own call has ended. ObjectRefs of the same result are equal. Thread-safe.

    All workers of the group can load pickles of an ObjectRef (of ``pickle``, ``cloudpickle`` or ``torch.save``). A pickle does
    not keep the result: keep the ObjectRef until the pickle was loaded. Loading waits for the worker that pickled the ObjectRef,
    or from which that worker had received it.

    Args:
        future: completes with the result, with :class:`StoredResult`, or with the error; None: ``promise`` has the result.
        label: the name of the result in messages.
        promise: refers to the result at the worker that sent the ObjectRef.
        ref_id: identifies the result; by default the id is made when it is needed.
    """

    __slots__ = ("__weakref__", "_fetched", "_future", "_id", "_label", "_promise")

    def __init__(
        self,
        future: Future[Any] | None,
        *,
        label: object = None,
        promise: RRef[Any] | None = None,
        ref_id: bytes | None = None,
    ) -> None:
        self._future = future
        self._fetched: Future[Any] | None = None
        self._promise = promise
        self._id = ref_id
        self._label = label

    @classmethod
    def of(cls, value: T, *, label: object = None, ref_id: bytes | None = None) -> ObjectRef[T]:
        """Return an ObjectRef that is complete with ``value``: a small value, or a Snapshot of a large value."""
        future: Future[Any] = InnerFuture()
        future.set_result(value)
        made: ObjectRef[T] = ObjectRef(future, label=label, ref_id=ref_id)
        return made

    @classmethod
    def failed(
        cls, error: BaseException, *, label: object = None, ref_id: bytes | None = None
    ) -> ObjectRef[Any]:
        """Return an ObjectRef that is complete with an error."""
        future: Future[Any] = InnerFuture()
        future.set_exception(error)
        future.acknowledge()  # do not log the error as never retrieved
        return cls(future, label=label, ref_id=ref_id)

    # -- the result ----------------------------------------------------------------------------------

    def _request(self) -> Future[Any]:
        """Return the future of the result, which may be a :class:`StoredResult`. Requests the result of a promise once."""
        future = self._future
        if future is None:
            made: Future[Any] = InnerFuture()
            with _lock:
                future = self._future
                if future is None:
                    future = self._future = made
            if future is made:
                assert self._promise is not None
                _Pursuit(made, self._name(), stays=True).pursue(self._promise)
        return future

    def _final(self, cls: type[Future[Any]] = InnerFuture) -> Any:
        """Return a future of a value that no other reader has. A value on another worker is fetched."""
        settled, final = self._settled(), cls()
        final.label, final.source = settled.label, settled

        def opened(done: Future[Any]) -> None:
            if done.error is not None:
                final.follow(done)
            else:
                final.complete_with(self._value, done.value_or_none)

        settled.add_done_callback(opened)
        return final

    def _settled(self) -> Future[Any]:
        """Return the future of the value or of a Snapshot of it. A value on another worker is fetched."""
        future = self._request()
        if future.completed and (future.error is not None or type(future.value_or_none) is not StoredResult):
            return future
        found = self._fetched
        # A fetch that failed only because its reader timed out or cancelled it is repeated.
        if found is None or (found.completed and isinstance(found.error, (RpcTimeoutError, CancelledError))):
            pursuit = _Pursuit(InnerFuture(), f"the result of {self._name()}")
            with _lock:
                if self._fetched is found:
                    self._fetched = pursuit.future
                found = self._fetched
            assert found is not None
            if found is pursuit.future:
                if (
                    future.completed
                    and type(future.value_or_none) is StoredResult
                    and future.value_or_none.policy is not None
                ):
                    future.value_or_none.policy.inline_results()
                pursuit.follow(future)
        # Read `covered` (failures are not logged) after setting `_fetched`: either this thread reads True, or the thread that
        # covers the call reads the new `_fetched` and covers it.
        if future.covered:
            found.cover()
        return found

    def future(self) -> ConcurrentFuture[T_co]:
        """Return a Future of the value itself, which ``concurrent.futures`` and ``asyncio.wrap_future`` also accept.

        A value that is on another worker is fetched.
        """
        return self._final(ConcurrentFuture)  # type: ignore[no-any-return]

    def read_into(self, target: _Tensor, *, timeout: float | None = None) -> _Tensor:
        """Wait for the value, a tensor, and copy it into a tensor of this process, without a further tensor of this size.

        If the value is in host memory of this host, or this host has a copy of the value, the value is copied from shared memory.
        Otherwise the owner sends the value in chunks, or reader and owner use a transport that both have registered with
        :func:`register_tensor_transport`. No copy of the value stays on this host. The value can be read any number of times.
        Blocks: in a coroutine, call it by ``asyncio.to_thread()``. To wait for a value without fetching it, call
        ``wait(refs, fetch_local=False)``.

        Args:
            target: a strided tensor on the CPU or on a CUDA device, with the shape and dtype of the value, contiguous or not. It
                may be a Parameter: it is written to as in ``torch.no_grad()``, so no gradients flow to the value.
            timeout: seconds for the wait and the copy; None: no time-out. The deadline of the call that this thread executes
                also ends the wait and the copy.

        Returns:
            ``target``. If the method raises after the copy has begun, part of the target may be overwritten, and the message of
            the error says so. Other errors leave the target unchanged.

        Raises:
            TypeError: the value is not a tensor of the target's dtype; or ``target`` is not a strided tensor on CPU or CUDA.
            ValueError: the value has another shape; or elements of the target share memory, as in an expanded tensor.
            RpcTimeoutError: the value was not read in time.
            PeerDiedError: the worker that has the value has ended.
            RpcError: a registered transport has failed.
            Exception: the error of the call.
        """
        if INTERRUPTED:
            interruption_point()
        wanted, until = wanted_for(target), deadline_of(timeout)
        found: Any = None
        try:
            future = self._future
            if future is None:
                assert self._promise is not None
                found = self._offered(self._promise, wanted, until, timeout, stays=True)
            else:
                found, fetched = wait_for(future, until, timeout), self._fetched
                template = getattr(future, "template", None)
                if template is not None and type(found) not in (Snapshot, StoredResult):
                    template.leave_results()  # large results of the next calls stay on their worker, which sends them in chunks
                if fetched is not None and fetched.completed and fetched.error is None:
                    found = fetched.value_or_none
                # get() of another thread could return this same object to its caller, who may change it while this thread copies
                # it. readable() puts a Snapshot in its place, which no reader changes.
                found = readable(found, self._futures())
            if type(found) is StoredResult:
                found = self._offered(found.rref, wanted, until, timeout)
            if type(found) is SharedTensor:
                try:
                    found = found.open()
                except SerializationError:  # this process cannot map it
                    source = found.keeper or self._promise
                    if source is None:
                        raise
                    found = self._offered(source, wanted, until, timeout, stays=True)
            fill(target, found, f"the result of {self._name()}", wanted, until, timeout)
            return target
        finally:
            del self, found  # see wait.get(); the traceback of an error must not keep the owner's lease alive

    def _offered(
        self, rref: RRef[Any], wanted: Wanted, until: float, timeout: float | None, stays: bool = False
    ) -> Any:
        """Wait for the value of an RRef, or for an Offer of the value. Arguments: see :class:`_Pursuit` and :func:`wait_for`."""
        pursuit = _Pursuit(InnerFuture(), f"the result of {self._name()}", stays=stays, wanted=wanted)
        pursuit.pursue(rref)
        try:
            return wait_for(pursuit.future, until, timeout)
        finally:
            pursuit.future.cancel()  # no effect if the future is complete
            pursuit.future.acknowledge()
            del self, pursuit  # see wait.get()

    def done(self) -> bool:
        """Return whether the call has ended. ``get`` may still have to fetch a large result from another worker."""
        return self._request().completed

    def cancel(self) -> bool:
        """Cancel the call: it ends with :class:`CancelledError`, and its actor is notified; return False if it has already ended.

        For an ObjectRef that another worker has sent, only the wait in this process is cancelled.
        """
        return self._request().cancel()

    def __await__(self) -> Generator[Any, None, T_co]:
        try:
            value = yield from self._request().__await__()
            if type(value) is StoredResult:
                value = yield from self._settled().__await__()
            sole = sys.getrefcount(self) == SOLE
            return self._value(value, None, sole)  # type: ignore[no-any-return]
        finally:
            del self  # an error's traceback has this frame: see wait.get()

    def _value(self, found: Any, copy: bool | None = None, sole: bool = False) -> Any:
        """Return a value that no other reader has; :func:`replace` names exceptions.

        It is made from ``found``, the value of the future that :meth:`_settled` returned.

        Args:
            copy: see :func:`get`.
            sole: only the caller refers to this ObjectRef.
        """
        kind = type(found)
        if kind in ATOMS:
            return found
        if kind is Snapshot and (template := getattr(self._future, "template", None)) is not None:
            template.inline_results()
        if kind is Snapshot or kind is SharedTensor:
            return found.open(copy)
        if sole and self._id is None and copy is not False:
            return found  # no other reader can get the value
        kept, mine = replace(found, self._futures())
        if type(kept) is not Snapshot:
            return kept
        return found if mine and copy is not False else kept.open(copy)

    def _futures(self) -> list[Future[Any]]:
        """Return the futures that may have the result as their value: the future of the call, and the future of a fetch."""
        return [each for each in (self._future, self._fetched) if each is not None]

    # -- sending ObjectRefs ----------------------------------------------------------------------------------

    def _identity(self) -> bytes:
        found = self._id
        if found is None:
            made = _origin + next(_numbers).to_bytes(5, "little")
            with _lock:
                if self._id is None:
                    self._id = made
                found = self._id
        return found

    def _as_promise(self) -> RRef[Any]:
        promise = self._promise
        if promise is None:
            assert self._future is not None
            made: RRef[Any] = rrefs.runtime().promise(self._future)
            with _lock:
                if self._promise is None:
                    self._promise = made
                promise = self._promise
        return promise

    def _reduce(self) -> tuple[Any, ...]:
        """Reduce the ObjectRef for the message that is being packed."""
        context = codec.current_encoding()
        if isinstance(context, LocalReferences):
            return context.hold(self)
        if not isinstance(context, MessageContext):
            raise SerializationError(
                f"{self!r} can only be sent in the arguments and results of calls, and not with an exception: get() its value "
                "first"
            )
        known = self._identity(), self._name()
        future, promise = self._future, self._promise
        lost = None if promise is None else rrefs.failure(promise)
        if future is None or not future.completed:
            if lost is None:
                return _rebuild_promise, (*known, self._as_promise())
            # The worker that sent this ObjectRef to this process has ended, or cannot provide the value for another reason.
            return _as_failed(
                *known, _out_of_reach(known[1], lost) if type(lost) is PeerDiedError else lost, context
            )
        if lost is not None:
            self._promise = None  # its worker has ended: from now on, this worker is the source of the value
        error = future.error
        value = future.value_or_none
        if error is None and type(value) is StoredResult:
            error = rrefs.failure(value.rref)
            fetched = self._fetched
            if fetched is not None and fetched.completed and fetched.error is None:
                # Send the fetched copy to workers of this host, and, if the worker that made the result has ended, to all.
                if error is not None:
                    self._future, error = fetched, None
                if self._future is fetched or rrefs.runtime().agent.shares_memory(context.peer):
                    value = fetched.value_or_none
            elif type(error) is PeerDiedError:
                error = _lost(known[1], error)
        value = readable(value, self._futures())
        if type(value) is Snapshot:
            is_fetched = value.nbytes > SMALL and not rrefs.runtime().agent.shares_memory(context.peer)
        elif type(value) is SharedTensor:
            is_fetched = not value.is_mappable_for(context.peer)
        else:
            is_fetched = type(value) in _TEXTS and len(value) >= LARGE
        if is_fetched:
            return _rebuild_promise, (*known, self._as_promise())
        if error is not None:
            future.acknowledge()  # the receiver's get() raises the error
            return _as_failed(*known, error, context)
        return _rebuild, (*known, value)

    # -- Python --------------------------------------------------------------------------------------

    def hex(self) -> str:
        """Return the identity of the result as text."""
        return self._identity().hex()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not ObjectRef:
            return NotImplemented
        return self._id is not None and self._id == other._id

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        future = self._future
        if future is None or not future.completed:
            state = "pending"
        elif future.error is not None:
            state = f"failed: {shown(type_name(type(future.error)))}"
        elif type(future.value_or_none) is not StoredResult:
            state = "complete"
        elif self._fetched is not None and self._fetched.completed:
            state = "complete, fetched"
        else:
            state = "complete, elsewhere"
        return f"ObjectRef({self._name()}, {state})"

    def _name(self) -> str:
        if self._label is not None:
            return str(self._label)
        return "a result" if self._future is None else str(self._future.label)

    def __copy__(self) -> ObjectRef[T_co]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ObjectRef[T_co]:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Only for pickles that the program makes itself; for messages, the codec calls _reduce().
        return _load, (pickles.address_of(self._as_promise()), self._identity(), self._name())

    def _not_a_value(self, what: str) -> NoReturn:
        raise TypeError(
            f"{self!r} {what}: it is a reference; actorrpc.get(ref), or await ref, gives the value"
        )

    def __iter__(self) -> Iterator[Any]:
        self._not_a_value("cannot be iterated over")

    def __bool__(self) -> bool:  # noqa: PLE0304 (it never returns)
        self._not_a_value("is neither true nor false")

    def __getitem__(self, key: Any) -> Any:
        self._not_a_value("has no items")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"an ObjectRef has no attribute {name!r}: it is a reference; actorrpc.get(ref) gives the value"
        )


def _as_failed(ref_id: bytes, label: str, error: BaseException, context: MessageContext) -> tuple[Any, ...]:
    dumps = codec.dumper(context.peer.same_main)
    packed = exceptions.dump(error, worker=rrefs.runtime().agent.name, dumps=dumps)
    return _rebuild_failed, (ref_id, label, packed)


def _rebuild(ref_id: bytes, label: str, value: Any) -> ObjectRef[Any]:
    """Rebuild an ObjectRef that was sent with its result (named in pickles)."""
    return ObjectRef.of(value, label=label, ref_id=ref_id)


def _rebuild_failed(ref_id: bytes, label: str, packed: bytes) -> ObjectRef[Any]:
    """Rebuild an ObjectRef of a call that failed (named in pickles)."""
    error = exceptions.load(packed, loads=codec.loads)
    return ObjectRef.failed(error, label=label, ref_id=ref_id)


def _rebuild_promise(ref_id: bytes, label: str, promise: RRef[Any]) -> ObjectRef[Any]:
    """Rebuild an ObjectRef that was sent without its result, which is pending or large (named in pickles)."""
    return ObjectRef(None, label=label, promise=promise, ref_id=ref_id)


def _load(address: pickles.Address, ref_id: bytes, label: str) -> ObjectRef[Any]:
    """Rebuild an ObjectRef that a program has pickled by itself (named in pickles).

    Raises: as :func:`pickles.find`.
    """
    promise = pickles.find(address, f"an ObjectRef to {label}")
    future = rrefs.runtime().promised.get(address.value) if promise.is_owner() else None
    return ObjectRef(future, label=label, promise=promise, ref_id=ref_id)


codec.register(ObjectRef, ObjectRef._reduce)


def put(value: T) -> ObjectRef[T]:
    """Return an ObjectRef for a copy of a value. Later changes of ``value``, or of results of ``get()``, do not change the copy.

    The tensors, arrays and buffers of a large value (from 256 KiB) are copied once, into memory that all processes of this host
    share. The memory is freed when the last ObjectRef and the last value made from it were freed, in all processes. Processes
    of other hosts fetch the value from this process, once per host.

    Raises:
        TypeError: ``value`` is an ObjectRef.
        SerializationError: the value cannot be sent.
        ObjectStoreFullError: shared memory had no room for the value, and no room became free in time.
    """
    if INTERRUPTED:
        interruption_point()
    if isinstance(value, ObjectRef):
        raise TypeError(f"put() takes a value, and {value!r} is a reference already")
    runtime(start=True)
    label = f"put({type(value).__name__})"
    if type(value) in ATOMS:
        return ObjectRef.of(value, label=label)
    kept: Any = Snapshot.of(value, label=label, site=_site())
    return ObjectRef.of(kept, label=label)


def share(tensor: torch.Tensor) -> ObjectRef[torch.Tensor]:
    """Return an ObjectRef whose readers map the memory of a tensor, so that they see what this process writes into the tensor.

    Only this process may write, by operations that change ``tensor`` in place, as optimizers do. Nothing synchronises readers
    with the writer: a reader that reads during a write gets old and new elements, so tell readers by a call when to read. The
    readers' tensors are plain tensors without gradients. A write by a reader to a CPU tensor changes the reader's own copy of
    the written pages, which then no longer follow the writer; on a GPU, a write by a reader changes the memory for all.

    A CPU tensor is moved: its bytes are copied once, into memory that all processes of the host share, and ``tensor`` itself uses
    this memory from then on (it is no longer in pinned memory). Meanwhile, no thread may write to it. Operations that give
    ``tensor`` other memory (``tensor.data =``, ``module.to()``) end the sharing. A process that is forked later uses the same
    memory for ``tensor``, so it must not write to it. A CUDA tensor stays where it is. Before the ObjectRef is sent, this process
    waits for the current stream of its device; after later writes, synchronise before telling readers. A reader must see the same
    GPU, and drop its tensors before the owner ends. Sharing a tensor again, or a view of the whole tensor, uses the same memory.

    The memory is freed when the tensor, the last ObjectRef and the last tensor made from it were freed, in all processes. When a
    process is killed, its references count as freed. If this process ends, readers keep their CPU tensors.
    ``get(ref, copy=True)`` gives a copy. Workers that share no memory with this process can pass the ObjectRef on; ``get`` raises
    SerializationError there.
    Thread-safe.

    Raises:
        TypeError: ``tensor`` is not a tensor or a Parameter, but an object of another class.
        ValueError: ``tensor`` is a part of a larger storage, was computed from tensors that require gradients, has no elements,
            is not dense, or (on the CPU) shares its memory with other tensors or objects, or is used by other objects of torch
            (as the ``grad`` of a tensor is); or the memory of its device cannot be shared.
        ObjectStoreFullError: shared memory had no room for the tensor, and no room became free in time.
        LimitError: the system provides no shared memory.
    """
    if INTERRUPTED:
        interruption_point()
    check_sharable(tensor)
    agent = runtime(start=True).agent
    label = f"share({type(tensor).__name__})"
    shared: Any = SharedTensor.of(tensor, agent, label, _site())
    return ObjectRef.of(shared, label=label)


def _site() -> str:
    """Return the file and line of the code that called into this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
