"""ObjectRefs: what a call to an actor gives at once, and its result later.

A small result rides on the reply. A large one is written once into memory that all processes of the host share: a
:class:`Snapshot` that names it travels, with the reply and from process to process, and its descriptor with it. Each ``get()``
makes a value of its own from a snapshot. To another host a large result does not travel unasked, but a reference to where it is,
:class:`StoredResult`; the process that wants the value fetches it from there, directly. An ObjectRef that is sent before its
result is there travels as an RRef of this worker that is given the result when it comes (a promise).
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Generator, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar

from actorrpc._exception_text import shown, type_name
from actorrpc.actors.context import current, runtime
from actorrpc.actors.refs import pickles
from actorrpc.actors.refs.host_copies import CopyOnHost, HostCopies
from actorrpc.actors.refs.results import ATOMS, StoredResult, of_promise, readable, replace
from actorrpc.actors.refs.snapshot import LARGE, Snapshot
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

__all__ = ["SMALL", "ObjectRef", "keep_large", "put"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

SMALL: Final = 64 << 10
"""Results up to this many bytes ride on the reply; larger ones stay where they were made, or in memory of their host."""

SOLE: Final = 2 if sys.version_info < (3, 14) else -1
"""The reference count, asked for by a function, of its argument where nobody else has that: nobody can ask for its result again.

From Python 3.14 on, variables are lent to calls, and nothing can be known of that.
"""

_TEXTS: Final = frozenset({str, bytes})
_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_MAX_HOPS: Final = 8  # a promise of a promise of a kept result is three


def keep_large(value: Any, nbytes: int, peer: Peer) -> Any:
    """Return what the reply to ``peer`` carries in place of a result of ``nbytes`` packed bytes: the value itself if it is small.

    A large result is copied once: what its actor does to the object afterwards changes nothing. On this host it is the
    caller's from then on.

    Raises:
        SerializationError: it cannot be copied.
        ObjectStoreFullError: there is no room for it.
    """
    if nbytes <= SMALL:
        return value
    shared = runtime().agent.shares_memory(peer)
    if shared and nbytes < LARGE:
        return value
    execution = CURRENT.get()
    snapshot = Snapshot.of(
        value, label="a result" if execution is None else f"the result of {execution.label}"
    )
    return snapshot if shared else StoredResult(RRef(snapshot))


def _lost(label: object, error: PeerDiedError) -> PeerDiedError:
    """Return what it means that a worker has ended which has kept a result."""
    what = str(label).removeprefix("the result of ").removeprefix("the call of ")
    lost = PeerDiedError(
        f"the result of {what} is lost: the call was executed, and its large result stayed on worker {error.worker!r}, "
        "which has ended before it was fetched. Call again, and fetch such results, or hand them on, while their actor lives",
        maybe_executed=True,
        worker=error.worker,
    )
    lost.__cause__ = error
    return lost


def _out_of_reach(label: object, error: PeerDiedError) -> PeerDiedError:
    """Return what it means that a worker has ended which has handed on the reference to a value that it has put, or waits for."""
    lost = PeerDiedError(
        f"the value of {label} is lost: it was to come from worker {error.worker!r}, which has ended before it was fetched. "
        "Fetch such values while that worker lives",
        maybe_executed=error.maybe_executed,
        worker=error.worker,
    )
    lost.__cause__ = error
    return lost


class _Pursuit(Progress):
    """Follows a result to where its value is, and completes a future with that.

    The source of its future, as a call is of its own: a thread that waits reads the replies itself. Each step is
    taken up once, by that thread or by a callback: ``_claim`` is a list from which one of them pops it.

    Args:
        opens: for which ObjectRef the future is completed with a value of its own, and not with a snapshot.
        stays: it is completed with where the result is kept, where that is not where it is asked for.
    """

    __slots__ = ("_claim", "_copies", "_hops", "_is_nearby", "_opens", "_rref", "_stays", "future")

    def __init__(
        self,
        future: Future[Any],
        label: object,
        *,
        opens: ObjectRef[Any] | None = None,
        stays: bool = False,
    ) -> None:
        self.future = future
        self._opens, self._stays = opens, stays
        self._is_nearby = False  # whether the step is to get another worker's copy on this host
        self.future.label = label
        self.future.source = self
        self._rref: RRef[Any] | None = None
        self._copies: HostCopies | None = None
        self._hops = 0
        self._claim: list[Future[Any]] = []

    def follow(self, step: Future[Any]) -> None:
        """Go on when ``step`` is complete."""
        claim = self._claim = [step]
        step.add_done_callback(lambda _: self._arrived(claim))

    @uninterruptible
    def _arrived(self, claim: list[Future[Any]]) -> None:
        try:
            step = claim.pop()
        except IndexError:
            return
        error, value = step.error, of_promise(step.value_or_none)
        if self._is_nearby and type(value) is not Snapshot and type(error) is not CancelledError:
            step.acknowledge()  # who has asked the object's worker before has ended, or has let go of it, or has not got it
            assert self._rref is not None
            self.pursue(self._rref, anew=True)
        elif error is not None:
            if type(error) is PeerDiedError and self._rref is not None:
                if not self._stays:
                    error = _lost(self.future.label, error)
                elif error.worker == self._rref.owner_name():  # and not the error of the call itself
                    error = _out_of_reach(self.future.label, error)
            self.future.follow(step, error)
        elif type(value) is CopyOnHost:
            assert self._copies is not None
            self._is_nearby = True
            self.follow(self._copies.ask(value))
        elif type(value) is StoredResult and not self._stays:
            self._hop(value.rref)
        else:
            try:
                # What lives here is for everybody who asks; what another worker sent is ours alone.
                owned = self._rref is not None and self._rref.is_owner() and not self._stays
                if owned and type(value) is not Snapshot:
                    value = Snapshot.of(value)
                if self._opens is not None:
                    value = self._opens._value(value)
            except Exception as caught:
                self.future.try_fail(caught)
            else:
                self.future.try_complete(value)

    def _hop(self, rref: RRef[Any]) -> None:
        self._hops += 1
        if self._hops > _MAX_HOPS:
            self.future.try_fail(RRefError(f"{self.future.label} leads from worker to worker without an end"))
            return
        self.pursue(rref)

    def pursue(self, rref: RRef[Any], *, anew: bool = False) -> None:
        """Go to where a value is kept, or to who has a copy of it on this host.

        Args:
            anew: not to who has a copy.
        """
        self._rref, self._is_nearby = rref, False
        found = current()
        if found is None:  # this worker has left its group: the error says so
            self.follow(rref._to_future())
            return
        self._copies = found.host_copies
        self.follow(self._copies.fetch(rref, self.future, anew))
        found.agent.flush()

    # -- as the source of a future -----------------------------------------------------------------

    @property
    def behind(self) -> Future[Any] | None:
        """What it follows now: the search for deadlocks looks here."""
        claim, rref = self._claim, self._rref
        try:
            step = claim[0]
        except IndexError:
            return None
        if rref is not None and rref.is_owner():  # it was promised here, and says itself what it waits for
            return rrefs.promised(rref) or step
        return step

    def drive(self, deadline: float | None) -> None:
        """Make progress until the future is complete, the deadline has passed or others are at it."""
        while not self.future.completed:
            claim = self._claim
            try:
                step = claim[0]
            except IndexError:
                return
            step.drive(deadline)
            if not step.completed:
                return
            self._arrived(claim)

    def flush(self) -> None:
        """Send what is still gathered."""
        for step in self._claim:
            step.flush()

    def cancel(self) -> bool:
        """Give up what is under way."""
        try:
            return self._claim[0].cancel()
        except IndexError:
            return False


# Guards the slots ``_future``, ``_fetched`` and ``_promise`` of all ObjectRefs while they are filled: so that nothing is
# fetched twice. Nothing is called under it; re-entrant, as the collector may run finalisers that use ObjectRefs.
_lock = threading.RLock()


# Identities start with random bytes of this process. A system call for each ObjectRef would take longer than its call.
_origin = b""
_numbers = itertools.count()


def _draw_origin() -> None:
    global _origin
    _origin = os.urandom(7)


_draw_origin()
os.register_at_fork(after_in_child=_draw_origin)


class ObjectRef(Generic[T_co]):
    """A reference to the result of a call to an actor or a task; :func:`actorrpc.get` gives the result.

    It can be awaited, on any event loop. Given to another call as an argument it is replaced by its result before
    the method runs; inside of containers it arrives as an ObjectRef. It travels in all messages of the
    group, complete or not. ObjectRefs are equal when they are for the same result, wherever they have been.
    Thread-safe.

    What ``pickle``, ``cloudpickle`` or ``torch.save`` makes of it can be loaded by all workers of the group, and holds nothing:
    keep the ObjectRef until it was loaded, which waits for the worker that has pickled it.

    Args:
        future: completes with the result, with :class:`StoredResult`, or with the error; None: it is asked of ``promise``.
        label: how messages call it.
        promise: refers to the result at the worker that has handed on the ObjectRef.
        ref_id: what is the same for all ObjectRefs of the result; by default it is drawn when it is needed.
    """

    __slots__ = ("__weakref__", "_fetched", "_future", "_id", "_label", "_promise")

    # What a call gives is made without the constructor: see handle.py.
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
    def of(cls, value: T, *, label: object = None) -> ObjectRef[T]:
        """Return an ObjectRef for a small value that is here already."""
        future: Future[Any] = InnerFuture()
        future.set_result(value)
        made: ObjectRef[T] = ObjectRef(future, label=label)
        return made

    @classmethod
    def failed(cls, error: BaseException, *, label: object = None) -> ObjectRef[Any]:
        """Return an ObjectRef that raises an error whenever it is looked at."""
        return cls(_failed(error), label=label)

    # -- the result ----------------------------------------------------------------------------------

    def _ask(self) -> Future[Any]:
        """Return the future of the result or of where it is kept; of one that came as a promise, ask for it."""
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
        """Return a future of a value of its own; start to fetch it if it is known to be elsewhere."""
        settled = self._settled()
        pursuit = _Pursuit(cls(), settled.label, opens=self)
        pursuit.follow(settled)
        return pursuit.future

    def _settled(self) -> Future[Any]:
        """Return the future of the value, or of a snapshot of it that is here; what is known to be elsewhere is fetched."""
        future = self._ask()
        if future.completed and (future.error is not None or type(future.value_or_none) is not StoredResult):
            return future
        found = self._fetched
        if found is None or _worth_another_try(found):
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
                    future.value_or_none.policy.fetched()
                pursuit.follow(future)
        if future.covered:  # looked at when the fetch can be seen: covered here, or with the call
            found.cover()
        return found

    def future(self) -> ConcurrentFuture[T_co]:
        """Return a Future of the value itself, which ``concurrent.futures`` and ``asyncio.wrap_future`` take, too.

        A value that stayed elsewhere is fetched.
        """
        return self._final(ConcurrentFuture)  # type: ignore[no-any-return]

    def done(self) -> bool:
        """Say whether the call is over. A large result may still have to be fetched."""
        return self._ask().completed

    def cancel(self) -> bool:
        """Give the call up: it ends with :class:`CancelledError` and its actor is told; False if it was over.

        Of an ObjectRef that came from another worker only the waiting here is given up.
        """
        return self._ask().cancel()

    def __await__(self) -> Generator[Any, None, T_co]:
        try:
            value = yield from self._ask().__await__()
            if type(value) is StoredResult:
                value = yield from self._settled().__await__()
            sole = sys.getrefcount(self) == SOLE
            return self._value(value, None, sole)  # type: ignore[no-any-return]
        finally:
            del self  # an error's traceback has this frame: see wait.get()

    def _value(self, found: Any, copy: bool | None = None, sole: bool = False) -> Any:
        """Return a value that nobody else has, given what :meth:`_settled` gives.

        Args:
            sole: nobody but the caller has this ObjectRef.
        """
        kind = type(found)
        if kind in ATOMS:
            return found
        if kind is Snapshot:
            template = getattr(self._future, "template", None)
            if template is not None:
                template.fetched()
            return found.open(copy)
        if sole and self._id is None and copy is not False:
            return found  # it is given away, and nobody can ask for it again
        kept, mine = replace(found, self._futures())
        if type(kept) is not Snapshot:
            return kept
        return found if mine and copy is not False else kept.open(copy)

    def _futures(self) -> list[Future[Any]]:
        """Return the futures that may have the result's value.

        That of a fetch has the same object as that of the call where it was begun before the call was over.
        """
        return [each for each in (self._future, self._fetched) if each is not None]

    # -- travelling ----------------------------------------------------------------------------------

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
        """Return how the ObjectRef goes into the message that is being packed."""
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
                return _arrive_promise, (*known, self._as_promise())
            # The worker that has handed on this ObjectRef cannot be asked for the value any more.
            return _as_failed(
                *known, _out_of_reach(known[1], lost) if type(lost) is PeerDiedError else lost, context
            )
        if lost is not None:
            self._promise = None  # this worker promises what it has
        error = future.error
        value = future.value_or_none
        if error is None and type(value) is StoredResult:
            error = rrefs.failure(value.rref)
            fetched = self._fetched
            if fetched is not None and fetched.completed and fetched.error is None:
                # It is here, too: nearer to a process of this host than where it was made, and all that is left where that is
                # gone.
                if error is not None:
                    self._future, error = fetched, None
                if self._future is fetched or rrefs.runtime().agent.shares_memory(context.peer):
                    value = fetched.value_or_none
            elif type(error) is PeerDiedError:
                error = _lost(known[1], error)
        value = readable(value, self._futures())
        if type(value) is Snapshot:
            is_fetched = value.nbytes > SMALL and not rrefs.runtime().agent.shares_memory(context.peer)
        else:
            is_fetched = type(value) in _TEXTS and len(value) >= LARGE
        if is_fetched:
            return _arrive_promise, (*known, self._as_promise())
        if error is not None:
            future.acknowledge()  # the caller of get() will see
            return _as_failed(*known, error, context)
        return _arrive, (*known, value)

    # -- Python --------------------------------------------------------------------------------------

    def hex(self) -> str:
        """Return what is the same for all ObjectRefs of this result, as text."""
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
        # In a pickle of the program's own; messages have _reduce().
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


def _worth_another_try(fetched: Future[Any]) -> bool:
    """Whether a fetch failed for a reason that lay with the process that wanted the value at that time."""
    return fetched.completed and isinstance(fetched.error, (RpcTimeoutError, CancelledError))


def _failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = InnerFuture()
    future.set_exception(error)
    future.acknowledge()  # it was raised, or logged, where it comes from
    return future


def _as_failed(ref_id: bytes, label: str, error: BaseException, context: MessageContext) -> tuple[Any, ...]:
    dumps = codec.dumper(context.peer.same_main)
    packed = exceptions.dump(error, worker=rrefs.runtime().agent.name, dumps=dumps)
    return _arrive_failed, (ref_id, label, packed)


def _arrive(ref_id: bytes, label: str, value: Any) -> ObjectRef[Any]:
    """Rebuild an ObjectRef whose result comes along, or is kept (named in pickles)."""
    future: Future[Any] = InnerFuture()
    future.set_result(value)
    return ObjectRef(future, label=label, ref_id=ref_id)


def _arrive_failed(ref_id: bytes, label: str, packed: bytes) -> ObjectRef[Any]:
    """Rebuild an ObjectRef of a call that failed (named in pickles)."""
    error = exceptions.load(packed, loads=codec.loads)
    return ObjectRef(_failed(error), label=label, ref_id=ref_id)


def _arrive_promise(ref_id: bytes, label: str, promise: RRef[Any]) -> ObjectRef[Any]:
    """Rebuild an ObjectRef whose call is not over (named in pickles)."""
    return ObjectRef(None, label=label, promise=promise, ref_id=ref_id)


def _load(address: pickles.Address, ref_id: bytes, label: str) -> ObjectRef[Any]:
    """Rebuild an ObjectRef that a program has pickled (named in pickles).

    Raises: as :func:`pickles.find`.
    """
    promise = pickles.find(address, f"an ObjectRef to {label}")
    future = rrefs.runtime().promised.get(address.value) if promise.is_owner() else None
    return ObjectRef(future, label=label, promise=promise, ref_id=ref_id)


codec.register(ObjectRef, ObjectRef._reduce)


def put(value: T) -> ObjectRef[T]:
    """Return an ObjectRef for a value as it is now: changing the object later changes nothing, and so does changing what
    ``get()`` returns.

    The tensors, arrays and buffers of a large value (from 256 KiB) are copied once, into memory that all processes of this host
    share, and live until the last ObjectRef and the last value made from it are gone, wherever they are. Other hosts
    fetch it from here.

    Raises:
        TypeError: it is an ObjectRef already.
        SerializationError: it cannot be sent.
        ObjectStoreFullError: there is no room for it on this host, and none has become free in time.
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


def _site() -> str:
    """Return where the code is that has called into this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
