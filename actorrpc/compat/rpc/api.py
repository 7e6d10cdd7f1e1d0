"""``torch.distributed.rpc.api``: its functions, and the private names that users and torch's tests import.

Users and tests may assign other functions to names of this module, such as ``_wait_all_workers`` and ``_broadcast_to_followers``.
Therefore the functions of this module look each other up by name at each call; on other workers, ``_by_name`` does.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from actorrpc import _time
from actorrpc.compat.rpc.agent import TensorPipeAgent
from actorrpc.compat.rpc.constants import (
    DEFAULT_RPC_TIMEOUT_SEC,
    DEFAULT_SHUTDOWN_TIMEOUT,
    UNSET_RPC_TIMEOUT,
)
from actorrpc.compat.rpc.internal import PythonUDF, _internal_rpc_pickler, deserialize
from actorrpc.compat.rpc.options import TensorPipeRpcBackendOptions
from actorrpc.compat.rpc.references import RRef
from actorrpc.compat.translate import Future, check_script_call, reword
from actorrpc.errors import (
    BackpressureError,
    DeadlockError,
    NotInitializedError,
    PeerDiedError,
    RpcTimeoutError,
    RRefError,
    ShutdownError,
    UnknownWorkerError,
)
from actorrpc.rpc import api as core
from actorrpc.transport.stream import CLOSED
from actorrpc.wire.identity import WorkerInfo

__all__ = [
    "AllGatherStates",
    "RRef",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

_F = TypeVar("_F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)
_WITHDRAWAL_S = 10.0  # how long the leader may take to answer a withdrawal
_LOOK_S = 0.2  # a worker that waits for others checks at this interval whether they are alive
_QUERY_S: Final = 5.0  # how long a worker may take to answer a query about rounds
_ASKED: Final = 5  # how many missing workers are queried, at most, whether they wait for this worker
_LEAST_PATIENCE_S: Final = 10.0  # the least value of _Round.patience

_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler

PyRRef = RRef

_agent: Any = None


# -- the agent ------------------------------------------------------------------------------------------


def _is_current_rpc_agent_set() -> bool:
    return core.is_initialized() or (_agent is not None and not isinstance(_agent, TensorPipeAgent))


def _get_current_rpc_agent() -> Any:
    """Return the agent.

    Raises:
        RuntimeError: RPC is not initialised.
    """
    global _agent
    if not _is_current_rpc_agent_set():
        raise NotInitializedError(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
        )
    if core.is_initialized() and (_agent is None or _agent.agent is not core.group().agent):
        _agent = TensorPipeAgent(core.group().agent, TensorPipeRpcBackendOptions())
    return _agent


def _set_and_start_rpc_agent(agent: Any) -> None:
    """Make ``agent``, which a user's backend has returned, the current agent. Despite its name, this function starts nothing."""
    global _agent
    _agent = agent


def _reset_current_rpc_agent() -> None:
    global _agent
    _agent = None


def _init_rpc_states(agent: Any) -> None:
    """Record the names of the agent's workers; make it the current agent if the process has none."""
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


def _require_initialized(function: _F) -> _F:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _is_current_rpc_agent_set():
            raise NotInitializedError(
                "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."
            )
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


# -- calling --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Within the block, calls of all threads send their function and arguments with this pickler."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def _run_packed(data: bytes, tensors: list[torch.Tensor]) -> Any:
    """Unpickle a function and its arguments, which a user's pickler serialized, and call it; runs on the called worker."""
    udf = deserialize(data, tensors)
    if isinstance(udf, AttributeError):
        raise udf
    return udf.func(*udf.args, **udf.kwargs)


def _packed(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    if isinstance(function, torch.jit.ScriptFunction):
        check_script_call(function, args or ())
    if _default_pickler is _internal_rpc_pickler or not callable(function):
        return function, args, kwargs
    udf = PythonUDF(function, args or (), kwargs or {})
    return _run_packed, tuple(_default_pickler.serialize(udf)), None


_thread_local_var = threading.local()


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """At the end of the block, wait for all calls that this thread made in it with ``rpc_async``."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


def _checked(to: Any) -> Any:
    if isinstance(to, (str, int, WorkerInfo)):
        return to
    raise ValueError(f"Cannot get WorkerInfo from name {to}")


@_require_initialized
def rpc_sync(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    """As :func:`actorrpc.rpc_sync`."""
    try:
        return core.rpc_sync(_checked(to), *_packed(func, args, kwargs), timeout)
    except Exception as error:
        reword(error, func)
        raise


@_require_initialized
def rpc_async(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    """As :func:`actorrpc.rpc_async`."""
    future: Any = Future()
    future.function = func
    try:
        core.send(future, _checked(to), *_packed(func, args, kwargs), timeout)
    except (BackpressureError, PeerDiedError, RpcTimeoutError, ShutdownError) as error:
        # As in torch, ``wait()`` raises the error, not ``rpc_async()``.
        future.try_fail(error.with_traceback(None))
    except UnknownWorkerError as error:
        reword(error)
        raise
    collected = getattr(_thread_local_var, "future_list", None)
    if collected is not None:
        collected.append(future)
    return future


def _connect(to: Any) -> None:
    """Connect to a worker before a call, because torch's timeout of calls does not include the time for connecting."""
    agent = core.group().agent
    peer = agent.peer(_checked(to))
    conn = peer.conn
    if (conn is None or conn.state is CLOSED) and not peer.is_self and peer.state == "alive":
        agent.connector.connect(peer, float("inf"), "remote")


@_require_initialized
def remote(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    """As :func:`actorrpc.rpc.remote`."""
    try:
        _connect(to)
        return core.remote(_checked(to), *_packed(func, args, kwargs), timeout)
    except UnknownWorkerError as error:
        reword(error)
        raise


@_require_initialized
def get_worker_info(worker_name: Any = None) -> WorkerInfo:
    """Return the WorkerInfo of a worker, by default of this worker."""
    return _get_current_rpc_agent().get_worker_info(worker_name)  # type: ignore[no-any-return]


def _rref_typeof_on_owner(rref: Any, blocking: bool = True) -> Any:
    """Return the class of an RRef's value. Called by RPC on the worker that owns the value."""
    return rref._get_type(blocking=blocking)


# -- all workers together -------------------------------------------------------------------------------


class AllGatherStates:
    """The state of one round on this worker. In a round, each worker of a set sends an object, its part, to a leader.

    Attributes:
        gathered_objects: name of a worker -> the part that the worker has sent.
        withdrawn: the workers that could not send their part in time.
        dead: the workers that died before they sent their part, according to the leader.
        proceed_signal: set when the round is complete.
    """

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.withdrawn: set[str] = set()
        self.dead: set[str] = set()
        self.proceed_signal = threading.Event()


_ALL_WORKER_NAMES: set[str] = set()
_all_gather_dict_lock = threading.RLock()  # guards the two dictionaries below
_all_gather_sequence_id: dict[str, int] = {}
_all_gather_sequence_id_to_states: collections.defaultdict[str, AllGatherStates] = collections.defaultdict(
    AllGatherStates
)


def _gather_to_leader(
    sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None
) -> None:
    """Add the part ``obj`` of a worker to a round. The worker calls this function on the leader by RPC."""
    with _all_gather_dict_lock:
        names = worker_names or _ALL_WORKER_NAMES
        if worker_name not in names:
            raise AssertionError(f"{worker_name} is not expected by leader.")
        states = _all_gather_sequence_id_to_states[sequence_id]
        if worker_name in states.gathered_objects:
            raise AssertionError(f"{worker_name} reported intent sequence id {sequence_id} twice. ")
        states.gathered_objects[worker_name] = obj
        if names == set(states.gathered_objects):
            states.proceed_signal.set()


def _withdraw(sequence_id: str, worker_name: str) -> None:
    """Record that a worker will not send its part of a round. The worker calls this function on the leader by RPC."""
    with _all_gather_dict_lock:
        _all_gather_sequence_id_to_states[sequence_id].withdrawn.add(worker_name)


def _name_dead(sequence_id: str, names: set[str]) -> None:
    """Record that workers died before they sent their parts. The leader calls this function on each follower by RPC.

    A follower may have no connection to a dead worker, and then cannot detect the death itself.
    """
    with _all_gather_dict_lock:
        _all_gather_sequence_id_to_states[sequence_id].dead.update(names)


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    """Complete a round with the parts of all workers. The leader calls this function on each follower by RPC."""
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    if states.proceed_signal.is_set():
        raise AssertionError(f"Termination signal sequence id {sequence_id} got set twice.")
    states.gathered_objects = objects_map
    states.proceed_signal.set()


def _by_name(name: str, *args: Any) -> Any:
    """Call a function of this module, or the replacement that a user or test has assigned to its name."""
    return globals()[name](*args)


def _is_dead(name: str) -> bool:
    return bool(core.group().agent.peer(name).state != "alive")


@dataclass(frozen=True, slots=True)
class _Round:
    """One round of a collective operation; see :class:`AllGatherStates`.

    Attributes:
        title: names the round in messages, and is the same on all workers that enter it.
        bound: seconds that a worker waits for the others; 0: until the round is complete, the workers that could complete it
            have died, or a deadlock is found.
        patience: seconds between two checks for a deadlock in a wait without a bound. A wait of another worker counts as part of
            a deadlock only when it has lasted at least so long.
    """

    title: str
    names: frozenset[str]
    me: str
    bound: float
    patience: float

    @property
    def leader(self) -> str:
        return min(self.names)

    @property
    def is_leader(self) -> bool:
        return self.me == self.leader


def _await_signal(round: _Round, states: AllGatherStates) -> None:
    """Wait until the round is complete or has timed out, or each worker that could complete it has died or withdrawn.

    Raises:
        DeadlockError: the round has no bound, and a missing worker has waited ``round.patience`` s for this worker in another
            round.
    """
    begun = _time.now()
    until = begun + round.bound if round.bound else float("inf")
    search_at = begun + round.patience
    others = round.names - {round.me} if round.is_leader else {round.leader}
    members = frozenset() if round.names == _ALL_WORKER_NAMES else round.names
    with core.group().waiting(round.title, members) as look:
        while not states.proceed_signal.wait(max(0.0, min(_LOOK_S, until - _time.now()))):
            if _time.now() >= until:
                return
            come = states.withdrawn.union(states.gathered_objects)
            if all(name in come or _is_dead(name) for name in others):
                return
            look()
            if not round.bound and _time.now() >= search_at:
                search_at = _time.now() + round.patience
                # While this worker executes a call, that call may still enter the round in which the missing workers wait.
                if not core.is_executing() and (circle := _circle(round, _missing(round, states), begun)):
                    raise circle


def _came(title: str) -> list[str]:
    """Return the workers whose part of the round ``title`` has arrived. Called on the round's leader, also by RPC."""
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states.get(title)
        return [] if states is None else list(states.gathered_objects)


def _waits_for(name: str) -> list[tuple[str, float]]:
    """Return the rounds in which this worker waits for the worker ``name``, and the seconds since each wait began."""
    return [
        (wait.round, _time.now() - wait.begun) for wait in list(core.group().waits) if wait.includes(name)
    ]


def _missing(round: _Round, states: AllGatherStates) -> list[str]:
    """Return the workers that have not entered a round, as the leader says; only the leader if it does not answer."""
    come: Collection[str] = states.gathered_objects
    if not round.is_leader and not come:
        try:
            come = core.rpc_sync(round.leader, _by_name, ("_came", round.title), timeout=_QUERY_S)
        except RuntimeError:
            come = ()  # no answer: the leader itself is missing
    return sorted(round.names.difference(come)) if come else [round.leader]


def _circle(round: _Round, missing: Iterable[str], begun: float) -> DeadlockError | None:
    """Query the missing workers; if one of them waits for this worker in another round, return an error that names both waits.

    If ``round`` has no bound, a wait of a missing worker that began less than ``round.patience`` s ago is ignored, because it may
    still end by itself.

    Args:
        begun: the time at which this worker's wait began.
    """
    mine = {wait.round for wait in list(core.group().waits)}
    for name in [each for each in missing if each != round.me and not _is_dead(each)][:_ASKED]:
        try:
            theirs = core.rpc_sync(name, _by_name, ("_waits_for", round.me), timeout=_QUERY_S)
        except RuntimeError:
            continue
        for other, since in theirs:
            if other not in mine and (round.bound or since >= round.patience):
                return DeadlockError(
                    f"worker {round.me!r} has waited in {round.title} for worker {name!r} for {_time.now() - begun:.0f} s, and "
                    f"{name!r} has waited in {other} for {round.me!r} for {since:.0f} s: neither can go on. One of them has "
                    f"left out a call that the other has made, most often because it raised an exception before",
                    worker=name,
                )
    return None


@_require_initialized
def _all_gather(
    obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Wait until every worker has called this function; return the ``obj`` of each worker by the worker's name.

    Args:
        worker_names: the workers that take part; by default all workers of the group.
        timeout: seconds to wait for the others, the RPC time-out by default; 0: no limit.

    Raises:
        PeerDiedError: a worker died before it called this.
        DeadlockError: a missing worker waits for this worker in another round.
        RpcTimeoutError: not all workers have called this in time.
        RuntimeError: this worker leads the round, and could not send the result to another worker.
    """
    return _gather("_all_gather", obj, worker_names, timeout)


def _gather(what: str, obj: Any, worker_names: Iterable[str] | None, timeout: float) -> dict[str, Any]:
    """Run one round of the operation ``what``; see :func:`_all_gather`.

    Each operation and set of workers has its own count of rounds, so a worker in ``shutdown()`` does not complete a barrier.
    """
    names = frozenset(worker_names or _ALL_WORKER_NAMES)
    call_timeout = core.get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
    with _all_gather_dict_lock:
        whose = f"all {len(names)} workers" if names == _ALL_WORKER_NAMES else ", ".join(sorted(names))
        joined = f"{what} of {whose}"
        number = _all_gather_sequence_id.get(joined, 0)
        _all_gather_sequence_id[joined] = number + 1
    round = _Round(
        f"{joined} (round {number + 1})",
        names,
        _get_current_rpc_agent().get_worker_info().name,
        call_timeout,
        max(core.get_rpc_timeout() or DEFAULT_RPC_TIMEOUT_SEC, _LEAST_PATIENCE_S),
    )
    begun = _time.now()
    try:
        if round.is_leader:
            _gather_to_leader(round.title, round.me, obj, set(names))
            core.group().watch_all()
        else:
            _bring(round, obj, call_timeout)
        with _all_gather_dict_lock:
            states = _all_gather_sequence_id_to_states[round.title]
        _await_signal(round, states)
        if round.is_leader:
            _broadcast(round.title, states.gathered_objects, names - {round.me}, call_timeout)
        elif not states.proceed_signal.is_set() and _is_dead(round.leader):
            raise _died(round, [round.leader])
        if names <= set(states.gathered_objects):
            return states.gathered_objects
        missing = _missing(round, states)
        dead = [name for name in missing if name in states.dead or _is_dead(name)]
        if dead:
            raise _died(round, dead)
        why = f"worker {round.me!r} has waited for them in {round.title}; rpc_timeout gives a round more time"
        if round.me in missing:
            why = f"the others had given up {round.title} when worker {round.me!r} entered it"
        raise _circle(round, missing, begun) or RpcTimeoutError(
            f"Followers {missing} timed out in _all_gather after {call_timeout:.2f} seconds: {why}",
            worker=missing[0],
        )
    finally:
        with _all_gather_dict_lock:
            _all_gather_sequence_id_to_states.pop(round.title, None)


def _died(round: _Round, names: list[str]) -> PeerDiedError:
    return PeerDiedError(
        f"{round.title} cannot be completed, as {', '.join(names)} died before",
        maybe_executed=True,
        worker=names[0],
    )


def _bring(round: _Round, obj: Any, timeout: float) -> None:
    leader = round.leader
    arguments = ("_gather_to_leader", round.title, round.me, obj, set(round.names))
    try:
        core.rpc_sync(leader, _by_name, arguments, timeout=timeout)
    except PeerDiedError as error:
        raise _died(round, [leader]) from error
    except RpcTimeoutError as error:
        # The leader ignores the withdrawal if the part of this worker has arrived in spite of the time-out.
        try:
            core.rpc_sync(leader, _by_name, ("_withdraw", round.title, round.me), timeout=_WITHDRAWAL_S)
        except RuntimeError as failure:
            logger.warning("could not tell %s that this worker has left the round: %s", leader, failure)
        reword(error)
        raise


def _broadcast(sequence_id: str, objects: dict[str, Any], followers: frozenset[str], timeout: float) -> None:
    dead = {name for name in followers if _is_dead(name)}
    alive = sorted(followers - dead)
    if dead.difference(objects):
        for call in [
            core.rpc_async(
                name, _by_name, ("_name_dead", sequence_id, dead.difference(objects)), timeout=timeout
            )
            for name in alive
        ]:
            call.exception()  # ignore an error here: the call to the same worker below fails, too, and is reported
    calls = {
        name: core.rpc_async(
            name, _by_name, ("_broadcast_to_followers", sequence_id, objects), timeout=timeout
        )
        for name in alive
    }
    errors: list[tuple[str, BaseException]] = []
    for name, call in calls.items():
        try:
            call.wait()
        except RuntimeError as error:
            errors.append((name, error))
    if errors:
        raise RuntimeError(
            f"Followers {[name for name, _ in errors]} timed out in _all_gather after {timeout:.2f} seconds. "
            f"The first exception is {errors[0][1]}"
        )


@_require_initialized
def _barrier(worker_names: Iterable[str]) -> None:
    """Wait until all of these workers have called this function.

    Raises:
        PeerDiedError: a worker died before all had called this; the error names the worker and the barrier.
        DeadlockError: a missing worker waits for this worker in another round.
        RpcTimeoutError: not all workers have called this within the RPC time-out.
    """
    _gather("_barrier", None, worker_names, UNSET_RPC_TIMEOUT)


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until every live worker has called this function or ``shutdown()``.

    If a worker has died, a warning is logged. If the round's leader has died, the other workers return without waiting for each
    other.

    Args:
        timeout: seconds; 0: no limit.

    Raises:
        DeadlockError: a worker that has not called this waits for this worker in another round.
        RpcTimeoutError: not all workers have called this in time.
        RuntimeError: this worker leads the round, and could not send the result to another worker.
    """
    try:
        _gather("_wait_all_workers (shutdown)", None, None, timeout)
    except PeerDiedError as error:
        logger.warning("%s; the others go on", error)  # shutdown() then waits for the live workers
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


def _delete_all_user_and_unforked_owner_rrefs(_timeout: Any = None) -> None:
    """Release every RRef that this worker holds. ``_timeout``, which torch's function has, is ignored."""
    core.let_go_of_all()


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the group, as :func:`actorrpc.shutdown` does.

    Raises:
        RuntimeError: RPC is not initialised; or ``_ignore_rref_leak`` is False, and values of this worker are still referenced.
    """
    try:
        if graceful and core.is_initialized():
            if core.group().is_fixed:
                _wait_all_workers(timeout)
            left = core.leave(True, timeout, let_go=lambda: _delete_all_user_and_unforked_owner_rrefs())
            if left and not _ignore_rref_leak:
                raise RRefError(f"Leaking RRef: {len(left)} values are still referenced: {left[:5]}")
    finally:
        core.leave(False)
        _reset_current_rpc_agent()
        with _all_gather_dict_lock:
            _all_gather_sequence_id.clear()
            _all_gather_sequence_id_to_states.clear()
