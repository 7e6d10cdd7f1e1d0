"""RRefs: references to values that live on a worker, counted across all workers.

Users hold objects of :class:`RRef`. The protocol (which worker holds which fork, when a value may be released) is the state
machine in ``refcount/protocol.py``, which ``refcount/runtime.py`` connects to the agent. This module also has the functions that
run on the owner of a value: they make the value, fetch it, and call its methods.

``RRef.__del__`` only queues the release of its handle; a pool thread sends the deletes in batches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import torch

from actorrpc._exceptions import cut_frames, is_of_handler
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import CURRENT
from actorrpc.agent.context import current_worker
from actorrpc.agent.executor import ASYNC_MARK, Deferred, future_of
from actorrpc.agent.hooks import is_profiled
from actorrpc.agent.peers import MessageContext
from actorrpc.errors import (
    NotInitializedError,
    ProtocolError,
    RemoteError,
    RpcTimeoutError,
    RRefError,
)
from actorrpc.futures import Future
from actorrpc.rpc.options import UNSET_RPC_TIMEOUT, check_timeout
from actorrpc.rpc.refcount.messages import ForkData, ForkId, RRefId
from actorrpc.rpc.refcount.protocol import Handle, Outcome
from actorrpc.rpc.refcount.runtime import References
from actorrpc.serialization import codec, exceptions, tensors
from actorrpc.serialization.local_refs import LocalReferences
from actorrpc.transport.signals import uninterruptible
from actorrpc.wire.identity import WorkerInfo

__all__ = [
    "MethodCalls",
    "RRef",
    "RRefProxy",
    "call_method",
    "call_with_value",
    "failure",
    "lend",
    "new_references",
    "promised",
    "run_here",
    "runtime",
    "set_class",
    "value_here",
    "with_calls",
]

T = TypeVar("T")
Style = Literal["rpc_sync", "rpc_async", "remote"]

_NO_CONTEXT: Final = -1


def runtime() -> References:
    """Return the references of the current worker.

    Raises:
        NotInitializedError: this process has no worker, or is a fork of a worker's process.
    """
    worker = current_worker()
    if worker is None:
        raise NotInitializedError("RPC has not been initialized. Call init_rpc first.")
    references: References = worker.references
    return references


def _timeout(timeout: float) -> float:
    if timeout == UNSET_RPC_TIMEOUT:
        return runtime().default_timeout()
    return check_timeout(timeout)


# -- functions that run on the owner ------------------------------------------------------------------------


def _wait_outcome(references: References, rref_id: RRefId, future: Future[Any] | None = None) -> Future[Any]:
    """Return a future for an owned value; it completes when the value has been created.

    If this thread executes a call, the future fails with RpcTimeoutError at the deadline of that call.
    """
    if future is None:
        future = Future()
    future.label = f"the value of {rref_id}"

    def settle(outcome: Outcome) -> None:
        if future.claim():
            error = outcome.error
            future.conclude(outcome.value, None if error is None else references.copy_of(error))
            future.acknowledge()

    outcome = references.table.fetch(rref_id, settle)
    if outcome is not None:
        settle(outcome)
        return future
    execution = CURRENT.get()
    if execution is not None and execution.deadline != float("inf"):

        def give_up() -> None:
            references.carry_out(references.table.cancel_fetch(rref_id, settle))
            # The message has the words of the caller's own time-out, which occurs at the same moment.
            late = RpcTimeoutError(
                f"{future.label} was not made in time: RPC ran for more than the time left to the call that waits for it; the "
                f"value is still being made",
                maybe_executed=False,
            )
            settle(Outcome(error=late))

        timer = references.agent.clock.at(execution.deadline, partial(references.agent.submit, give_up))
        future.add_done_callback(lambda _: timer.cancel())
    return future


def _create(
    rref_id: RRefId, fork_id: ForkId | None, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    references = runtime()
    execution = CURRENT.get()
    assert execution is not None
    if fork_id is not None and not references.table.creation_arrived(rref_id, fork_id, execution.peer.key):
        return None
    execution.what = function

    def call() -> Any:
        value = function(*args, **kwargs)
        if type(value) is not Deferred and getattr(function, ASYNC_MARK, None) is not None:
            value = Deferred(future_of(value, function))
        return value

    value = _keep_outcome(references, rref_id, call)
    if type(value) is not Deferred:
        return None
    stored: Future[None] = Future()

    def ready(done: Any) -> None:
        _keep_outcome(references, rref_id, done.value)
        stored.set_result(None)

    value.future.add_done_callback(ready)
    return Deferred(stored)


def _keep_outcome(references: References, rref_id: RRefId, call: Callable[[], Any]) -> Any:
    """Give an RRef the result or the error of ``call()``; return the result (None: an error). A Deferred is only returned."""
    try:
        value = call()
    except BaseException as error:
        _keep_error(references, rref_id, error)
        return None
    if type(value) is not Deferred:
        references.carry_out(references.table.set_value(rref_id, value))
    return value


def _keep_error(references: References, rref_id: RRefId, error: BaseException) -> None:
    if not isinstance(error, RemoteError):
        # Uses of the RRef on this worker then raise the same error as on other workers, and the error keeps no frames alive.
        cut_frames(error, __file__)
        error = _as_others_get_it(references, error)
    references.carry_out(references.table.set_error(rref_id, error))


def _as_others_get_it(references: References, error: BaseException) -> BaseException:
    dumps = codec.dumper(references.agent.self_peer.same_main)
    packed = exceptions.dump(error, worker=references.agent.name, dumps=dumps)
    return exceptions.load(packed, loads=codec.loads)


def _fetch(named: tuple[int, int, str]) -> Any:
    """Return an owned value; waits until it has been created. ``named``: see :func:`_invoke`."""
    references = runtime()
    future = _wait_outcome(references, RRefId(*named))
    if future.completed:
        return future.wait()
    return Deferred(future)


def _value_of(references: References, named: tuple[int, int, str]) -> Any:
    """Return an owned value; waits until it has been created. ``named``: an RRefId, or the plain tuple that is equal to it."""
    known = references.table.known_outcome(named)
    if known is not None and known.error is None:
        return known.value
    return _wait_outcome(references, RRefId(*named)).wait()


def _invoke(named: tuple[int, int, str], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of an owned value; waits until the value has been created.

    Args:
        named: an RRefId, sent as a plain tuple, which is equal to the RRefId and is pickled in fewer steps.
    """
    execution = CURRENT.get()
    if execution is not None:
        execution.what = name
    method = getattr(_value_of(runtime(), named), name)
    result = method(*args, **kwargs)
    if getattr(method, ASYNC_MARK, None) is not None:
        return Deferred(future_of(result, method))
    return result


def _with_value(named: tuple[int, int, str], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a function with an owned value; waits until the value has been created."""
    return function(_value_of(runtime(), named), *args)


def _backward(named: tuple[int, int, str], context_id: int, retain_graph: bool) -> None:
    """Run the backward pass of an owned value; waits until the value has been created."""
    value, worker = _value_of(runtime(), named), current_worker()
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(f"RRef should contain a tensor for .backward(), not {type(value).__name__}")
    if context_id == _NO_CONTEXT:
        value.backward(retain_graph=retain_graph)
    elif worker is None or worker.autograd is None:
        raise NotInitializedError("this worker has no distributed autograd: it has been shut down")
    else:
        worker.autograd.backward(context_id, [value], retain_graph=retain_graph)


def _rebuild(index: int, calls: MethodCalls | None = None) -> Any:
    """Return the RRef of a received message whose fork has this index in the message's header."""
    message = codec.current_decoding()
    if not isinstance(message, MessageContext) or message.received is None:
        raise RRefError("an RRef can only be unpickled by RPC")
    return with_calls(message.received[1 + index], calls)


def _rebuild_own(created_on: int, local_id: int, incarnation: str, calls: MethodCalls | None = None) -> Any:
    """Return an RRef that a caller has sent to its owner without a fork. The caller keeps its RRef until the answer."""
    if not (type(created_on) is type(local_id) is int and type(incarnation) is str):
        raise ProtocolError("an RRef in a call to its owner cannot be read")
    references = runtime()
    handle = references.table.handle_on(RRefId(created_on, local_id, incarnation))
    return with_calls(references.wrapped(handle), calls)


# -- the class of users' RRefs --------------------------------------------------------------------------------


class MethodCalls(Protocol):
    """Replaces the way in which an RRef calls methods of its value. It is sent with the RRef."""

    def __call__(
        self, style: Style, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> Any:
        """Call a method of the value; return what a proxy of this style returns."""


class RRef(Generic[T]):
    """A reference to a value that lives on one worker (its owner), and can be used on every worker.

    ``RRef(value)`` refers to a value of this worker, and ``remote(...)`` returns an RRef to a result on the called worker.
    An RRef in the arguments or the result of a call arrives as an RRef to the same value, which lives until
    the last RRef to it has been deleted.

    Thread-safe. RRefs are equal when they refer to the same value.

    Args:
        value: the value to refer to.
        type_hint: accepted for compatibility with torch (TorchScript interfaces).

    Raises:
        NotInitializedError: RPC is not initialised in this process.
    """

    __slots__ = ("__weakref__", "_calls", "_creation", "_handle", "_references")

    def __init__(self, value: T, type_hint: Any = None) -> None:
        references = runtime()
        tensors.settle()
        # The table passes the handle to this object, so no signal handler runs between adding the entry and keeping its handle.
        references.table.create_owner(value, partial(self._refer, references, None))

    def _refer(self, references: References, creation: Future[None] | None, handle: Handle) -> None:
        self._references = references
        self._creation = creation
        self._calls: MethodCalls | None = None
        self._handle = handle

    @classmethod
    def _wrap(cls, references: References, handle: Handle, creation: Future[None] | None) -> RRef[Any]:
        rref: RRef[Any] = cls.__new__(cls)
        rref._refer(references, creation, handle)
        return rref

    def __del__(self) -> None:
        try:
            self._references.drop(self._handle)
        except AttributeError:  # construction failed, or the interpreter is shutting down
            pass

    # -- the owner ---------------------------------------------------------------------------------

    def owner(self) -> WorkerInfo:
        """Return the WorkerInfo of the worker on which the value lives."""
        return self._references.peer_of(self._handle.owner).record.info

    def owner_name(self) -> str:
        """Return the name of the worker on which the value lives."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Say whether the value lives on this worker."""
        return self._handle.owner == self._references.me

    def confirmed_by_owner(self) -> bool:
        """Say whether the owner has confirmed this reference."""
        return self._references.table.is_confirmed(self._handle)

    # -- the value ---------------------------------------------------------------------------------------

    def local_value(self) -> T:
        """Return the value itself, on its owner; waits until it has been created.

        Raises:
            RRefError: this worker is not the owner.
            Exception: the error of the creation.
        """
        if not self.is_owner():
            raise RRefError(
                f"RRef not owned locally: cannot call local_value() on a non-owner reference {self!r} "
                f"(rref_id={self._handle.rref_id}); it lives on {self.owner_name()!r}, use to_here()"
            )
        value: T = _value_of(self._references, self._handle.rref_id)
        return value

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Fetch a copy of the value; on the owner, return the value itself. Waits until it has been created.

        Args:
            timeout: seconds; 0: no time-out; default: ``get_rpc_timeout()``.

        Raises:
            RpcTimeoutError, PeerDiedError: the value did not arrive.
            Exception: the error of the creation.
        """
        seconds = _timeout(timeout)
        if self.is_owner():
            future: Future[T] = _wait_outcome(self._references, self._handle.rref_id)
            if seconds:
                try:
                    return future.wait(seconds)
                except RpcTimeoutError:
                    if future.done():
                        raise
                    raise RpcTimeoutError(
                        f"RRef.to_here of {self!r} timed out: RPC ran for more than set timeout ({seconds * 1e3:.0f} ms); "
                        f"the value is still being made",
                        maybe_executed=None,
                        worker=self._references.agent.name,
                    ) from None
            return future.wait()
        return self._call_owner(_fetch, (), seconds, "RRef.to_here")  # type: ignore[no-any-return]

    def _call_owner(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        seconds: float,
        label: str,
        future: Future[Any] | None = None,
    ) -> Any:
        """Call ``function(id, *args)`` on the owner. ``id`` is a plain tuple, which is pickled in fewer steps than an RRefId.

        Args:
            future: gets the answer, and is returned. Without a future, this method waits and returns the answer.
        """
        self._check()
        references, handle = self._references, self._handle
        agent, peer = references.agent, references.peer_of(handle.owner)
        arguments = (handle.rref_id[:], *args)
        if future is None:
            return agent.call_sync(peer, function, arguments, {}, seconds, keep=self, label=label)
        agent.call(peer, function, arguments, {}, seconds, future=future, keep=self, label=label)
        return future

    def _call_method(
        self, style: Style, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> Any:
        """Call a method of the value; return what a proxy of this style returns."""
        references = self._references
        seconds = references.default_timeout() if timeout == UNSET_RPC_TIMEOUT else check_timeout(timeout)
        if self._calls is not None:
            self._check()
            return self._calls(style, name, args, kwargs, timeout)
        if style != "remote":
            future: Future[Any] | None = None if style == "rpc_sync" else Future()
            return self._call_owner(_invoke, (name, args, kwargs), seconds, name, future)
        self._check()
        handle = self._handle
        kept = (self, handle.rref_id[:], name, args, kwargs)
        peer = references.peer_of(handle.owner)
        return references.create(peer, _invoke_kept, kept, {}, seconds, name)

    def _to_future(self, fetch: Callable[..., Any] | None = None, more: tuple[Any, ...] = ()) -> Future[T]:
        """Start to fetch the value, as :meth:`to_here` does, without a time-out. Only signal handlers may raise.

        Args:
            fetch: if the owner is another worker, ``fetch(id, *more)`` is called there.

        Returns:
            A future, which keeps this RRef until the future is complete.
        """
        future: Future[T] = Future()
        if self.is_owner():
            future.add_done_callback(lambda _, kept=self: None)  # type: ignore[misc]
            return _wait_outcome(self._references, self._handle.rref_id, future)
        try:
            self._call_owner(fetch or _fetch, more, 0, "RRef.to_here", future)
        except Exception as error:
            future.try_fail(error.with_traceback(None))
            if is_of_handler(error):
                raise
        return future

    def backward(self, dist_autograd_ctx_id: int = _NO_CONTEXT, retain_graph: bool = False) -> None:
        """Run the backward pass from the value, a tensor with one element, on its owner; return when the pass has ended.

        Args:
            dist_autograd_ctx_id: the distributed autograd context; without one, the owner runs a local backward pass.
            retain_graph: keep the graph for another pass.

        Raises:
            RuntimeError: this worker is not the owner and there is no context; the value is not a tensor, or cannot be
                differentiated.
            Exception: see :func:`actorrpc.autograd.backward`; or the error of the creation of the value.
        """
        if isinstance(dist_autograd_ctx_id, bool) or not isinstance(dist_autograd_ctx_id, int):
            raise TypeError(f"dist_autograd_ctx_id must be an int, not {dist_autograd_ctx_id!r}")
        arguments = (dist_autograd_ctx_id, bool(retain_graph))
        if self.is_owner():
            _backward(self._handle.rref_id, *arguments)
            return
        if dist_autograd_ctx_id == _NO_CONTEXT:
            raise RuntimeError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        self._call_owner(_backward, arguments, 0, "RRef.backward")

    def _check(self) -> None:
        """Raise the error of this RRef if its creation has failed, its owner has died, or its value was released."""
        self._references.agent.check_process()
        error = self._references.table.failure(self._handle)
        if error is not None:
            # A copy, because the table keeps the error: its traceback would keep this reference alive.
            raise self._references.copy_of(error)

    # -- proxies -----------------------------------------------------------------------------------------

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: ``rref.rpc_sync().method(x)`` calls the method on the owner and waits."""
        return RRefProxy(self, "rpc_sync", timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: ``rref.rpc_async().method(x)`` calls the method on the owner and returns a Future."""
        return RRefProxy(self, "rpc_async", timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: ``rref.remote().method(x)`` calls the method on the owner and returns an RRef to the result."""
        return RRefProxy(self, "remote", timeout)

    # -- Python ------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RRef):
            return NotImplemented
        return self._handle.rref_id == other._handle.rref_id

    def __hash__(self) -> int:
        return hash(self._handle.rref_id)

    def __repr__(self) -> str:
        if self._handle.fork_id is None:
            return f"OwnerRRef({self._handle.rref_id})"
        return f"UserRRef(RRefId = {self._handle.rref_id}, ForkId = {self._handle.fork_id})"

    def __reduce__(self) -> Any:
        raise RRefError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    def _reduce(self) -> tuple[Any, ...]:
        """Return the pickling function and arguments of this RRef, and add a fork to the message that is being packed.

        A call to the owner needs no fork: the caller keeps the RRef until the answer arrives, so the owner has opened the call
        by then. If the call times out before the owner opens it, the owner may have released the value.

        Raises:
            RRefError: no message is being packed, or the reference has failed.
        """
        message = codec.current_encoding()
        if isinstance(message, LocalReferences):
            return message.hold(self)
        if not isinstance(message, MessageContext):
            return self.__reduce__()  # type: ignore[no-any-return]
        self._check()
        handle, to = self._handle, message.peer.key
        if message.held is not None and handle.owner == to:
            message.held = (*message.held, self)
            return _rebuild_own, (*handle.rref_id, self._calls)
        fork: ForkData = self._references.table.fork(handle, to)
        if message.sent is None:
            message.sent = []
        message.sent.append(fork)
        return _rebuild, (len(message.sent) - 1, self._calls)

    def __copy__(self) -> RRef[T]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RRef[T]:
        raise RRefError("an RRef is a reference: deepcopy would not copy its value; use to_here() for a copy")


def lend(rref_id: RRefId) -> RRef[Any] | None:
    """Return one more RRef to the value of this worker that has this id; None if the value has been released."""
    references = runtime()
    handle = references.table.handle_if_held(rref_id)
    return None if handle is None else references.wrapped(handle)


def failure(rref: RRef[Any]) -> BaseException | None:
    """Return the error of a failed RRef, otherwise None. All callers get the same exception object."""
    return rref._references.table.failure(rref._handle)


def promised(rref: RRef[Any]) -> Future[Any] | None:
    """Return the pending future whose value this RRef will have; None if the RRef waits for no future."""
    return rref._references.promised.get(rref._handle.rref_id)


def with_calls(rref: RRef[T], calls: MethodCalls | None) -> RRef[T]:
    """Let ``calls`` make the method calls of an RRef, here and on the workers that the RRef is sent to."""
    rref._calls = calls
    return rref


codec.register(RRef, RRef._reduce)

_made: type[RRef[Any]] = RRef


def set_class(cls: type[RRef[Any]]) -> None:
    """Set the class of the RRefs that calls return and receive, in groups that are joined from now on.

    Higher packages call this function. The class is a subclass of :class:`RRef` that adds attributes, but no state that is sent.
    """
    global _made
    codec.register(cls, cls._reduce)
    _made = cls


def new_references(agent: Agent, default_timeout: Callable[[], float]) -> References:
    """Return the references of a new agent."""
    return References(agent, default_timeout, wrap=_made._wrap, make=_create)


# Python and its libraries look up these names on any object to decide how to treat it: a proxy does not have them.
# Other special methods (`__len__`, `__getitem__`) are methods of the value.
_PROBED: Final = (
    # prefixes of these names, which belong to: arrays; functions; pickling; copying; descriptors and classes
    *("__array", "__torch", "__cuda_", "__dlpack", "__dataframe"),
    *("__wrapped__", "__signature__", "__text_signature__", "__name__", "__qualname__", "__module__"),
    *("__getstate__", "__setstate__", "__getnewargs", "__getinitargs__", "__reduce"),
    *("__copy__", "__deepcopy__", "__replace__"),
    *("__get__", "__set__", "__set_name__", "__delete__", "__del__", "__slots__", "__dict__", "__weakref__"),
)


class RRefProxy:
    """Its attributes are the methods of an RRef's value; calling one calls the method on the owner.

    Only the owner knows which methods the value has, so a missing method raises AttributeError only when it is called.
    A method of a proxy may itself be sent as a function to call.
    """

    __slots__ = ("_rref", "_style", "_timeout")

    def __init__(self, rref: RRef[Any], style: Style, timeout: float) -> None:
        self._rref = rref
        self._style = style
        self._timeout = timeout
        if timeout != UNSET_RPC_TIMEOUT:
            check_timeout(timeout)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_PROBED) and name.endswith("__"):
            raise AttributeError(name)
        return _Method(self._rref, self._style, self._timeout, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the value itself."""
        return _Method(self._rref, self._style, self._timeout, "__call__")(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self._style} proxy of {self._rref!r}>"


class _Method:
    """One method of a proxy. It can be sent, with its RRef."""

    __slots__ = ("_name", "_rref", "_style", "_timeout")

    def __init__(self, rref: RRef[Any], style: Style, timeout: float, name: str) -> None:
        self._rref = rref
        self._style = style
        self._timeout = timeout
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _Method, (self._rref, self._style, self._timeout, self._name)

    def __repr__(self) -> str:
        return f"RRef.{self._style}().{self._name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._rref._call_method(self._style, self._name, args, kwargs, self._timeout)


def call_method(rref: RRef[Any], name: str, args: tuple[Any, ...], seconds: float) -> Future[Any]:
    """Call a method of an RRef's value, as ``rref.rpc_async(seconds).name(*args)`` does; for internal callers."""
    future: Future[Any] = rref._call_method("rpc_async", name, args, {}, seconds)
    return future


def call_with_value(
    rref: RRef[Any],
    function: Callable[..., Any],
    *args: Any,
    label: str,
    future: Future[Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call ``function(value, *args)`` on the owner of an RRef.

    Args:
        label: the name of the call in errors.
        timeout: seconds; 0: no time-out; default: ``get_rpc_timeout()``.
        future: gets the result. Without a future, this function waits and returns the result.

    Raises:
        RpcError: the call got no answer, or was not sent.
        Exception: the error of the creation of the value, or of the function.
    """
    return rref._call_owner(_with_value, (function, args), _timeout(timeout), label, future)


def value_here(rref: RRef[Any]) -> Any:
    """Return the value if it is on this worker and no profiler, test or hooks observe calls; otherwise None.

    It also returns None if a method call would be refused; the caller then makes this call, which raises the reason.
    """
    references, execution = rref._references, CURRENT.get()
    agent = references.agent
    if agent.closed_down or (execution is not None and execution.cancelled):
        return None
    if agent.hooks.active or is_profiled():
        return None
    known = references.table.known_outcome(rref._handle.rref_id) if rref.is_owner() else None
    return None if known is None else known.value


@uninterruptible
def run_here(rref: RRef[Any], method: Callable[..., object], args: tuple[Any, ...]) -> Exception | None:
    """Call a method of the value of :func:`value_here`; return its exception in the form that other workers receive.

    Raises:
        BaseException: a signal handler raised it while the method waited.
    """
    try:
        method(*args)
    except Exception as error:
        if is_of_handler(error):
            raise
        cut_frames(error, __file__)
        return _as_others_get_it(rref._references, error)  # type: ignore[return-value]
    return None


def _invoke_kept(
    _kept: RRef[Any],
    named: tuple[int, int, str],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """As :func:`_invoke`; the RRef is sent along, because the caller may release it before the call has ended."""
    return _invoke(named, name, args, kwargs)
