"""The functions of ``torch.distributed.rpc``: joining a group, calling, leaving, and the states of the group's workers.

One agent per process. All functions are thread-safe; ``init_rpc`` and ``shutdown`` are meant for one thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from actorrpc import _time
from actorrpc._exceptions import is_of_handler, say
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import CURRENT, Call, Execution
from actorrpc.agent.context import (
    Worker,
    current_worker,
    here,
    on_fork,
    set_worker,
    workers_here,
)
from actorrpc.agent.peers import Listener, Peer, state_of
from actorrpc.errors import ConfigError, NotInitializedError, RpcError, WrongTypeError
from actorrpc.futures import INTERRUPTED, Future, forked, interruption_point, mute
from actorrpc.group import group as groups
from actorrpc.group.group import Group
from actorrpc.group.launchers import fill_in
from actorrpc.group.store import open_store
from actorrpc.rpc import rref as rrefs
from actorrpc.rpc.options import (
    UNSET_RPC_TIMEOUT,
    RpcBackendOptions,
    check_backend,
    check_timeout,
    options_of,
)
from actorrpc.rpc.refcount.runtime import References
from actorrpc.rpc.rref import RRef
from actorrpc.transport.signals import checkpoint, defer_during, uninterruptible
from actorrpc.transport.stream import CLOSED
from actorrpc.transport.tls import Tls
from actorrpc.validation import integer
from actorrpc.wire.identity import WorkerInfo, WorkerRecord, addresses_of_hosts

__all__ = [
    "WorkerState",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_available",
    "is_initialized",
    "on_member_change",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "workers",
]

T = TypeVar("T")

_log = logging.getLogger("actorrpc")
_JOIN_TIMEOUT = 300.0  # how long workers wait for each other at the rendezvous, in seconds
_LATE_S = 0.5
# How long a graceful shutdown waits until the calls that this worker executes are answered.
_ANSWERING_S = 5.0
_SETTLE_S = 30.0  # how long shutdown waits for the last references after every live worker has called it


#: Higher packages add functions. Each function is called with a new worker before the worker serves its first call, and returns
#: a function ``end(graceful)``. When the worker ends, the returned functions are called in reverse order; if Ctrl-C interrupts
#: ``end(True)``, ``end(False)`` is called too.
on_start: list[Callable[[Worker], Callable[[bool], None]]] = []


_before = 0.0  # the interpreter's switch interval in seconds before the worker changed it; 0: no worker has changed it
# Guards joining and leaving. A joining thread holds the lock while it waits for other workers; a leaving thread does not.
_lock = threading.Lock()


def _require() -> Worker:
    worker = current_worker()
    if worker is None or not worker.in_force:
        raise NotInitializedError(
            "RPC has not been initialized in this process. Call actorrpc.init() or init_rpc() first; a fork (os.fork(), or "
            "multiprocessing's start method 'fork') does not inherit its parent's group, and must call it itself."
        )
    return worker


def is_available() -> bool:
    """Say whether RPC can be used in this build: always True."""
    return True


def is_initialized() -> bool:
    """Say whether RPC is initialised in this process."""
    worker = current_worker()
    return worker is not None and worker.in_force


def init_rpc(
    name: str | None = None,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Join a group of workers and start this worker; return when all workers of a fixed group have joined.

    Args:
        name: letters, digits, ``_``, ``-`` and ``:``; default, under a launcher (torchrun, srun, mpirun), "worker" and rank.
        backend: accepted for compatibility with torch (a :class:`BackendType`); actorrpc has one agent.
        rank: this worker's number, from 0; default from the environment (``RANK``) or the URL.
        world_size: the number of workers; ``None`` makes, or joins, a group that workers may join and leave
            at any time, unless the environment (``WORLD_SIZE``) or the URL gives a number.
        rpc_backend_options: a :class:`RpcBackendOptions`, or torch's own options object.

    Raises:
        ConfigError: an argument cannot be used.
        RendezvousError: the workers did not find each other.
        AuthenticationError: this worker has no key, or another key than the other workers.
        RuntimeError: RPC is initialised already.
    """
    name, rank, world_size, options = fill_in(name, rank, world_size, options_of(rpc_backend_options))
    rank, world_size = integer("rank", rank), integer("world_size", world_size, none=True)
    if world_size == -1:
        world_size = None
    if world_size is not None and (world_size < 1 or rank >= world_size):
        raise ConfigError(
            f"rank {rank} and world_size {world_size} do not go together: ranks are 0..world_size-1"
        )
    check_backend(backend)
    join(name, rank, world_size, options)


def join(name: str, rank: int, world_size: int | None, options: RpcBackendOptions, store: Any = None) -> None:
    """Join a group as :func:`init_rpc` does, with arguments that have been checked.

    Args:
        store: the store in which the workers of a fixed group meet; by default, ``options.init_method`` names it.

    Raises:
        ConfigError, RendezvousError, AuthenticationError, RuntimeError: as :func:`init_rpc`.
    """

    def make() -> Group:
        settings = options.settings()
        Tls.load(settings)  # raises errors of the certificates before this worker sends anything
        if store is None:
            found, own_rank, size = open_store(options.init_method, rank, world_size, _JOIN_TIMEOUT)
        else:
            found, own_rank, size = store, rank, world_size
        devices, maps = options.placements()
        return groups.join(
            name,
            own_rank,
            size,
            found,
            settings=settings,
            key=options.key,
            timeout=_JOIN_TIMEOUT,
            devices=devices,
            maps=maps,
        )

    install(make, options.rpc_timeout, "a worker of an init_rpc group", ready=options.ready)


def install(
    make: Callable[[], Group],
    timeout: float,
    what: str,
    *,
    namespace: str = "",
    ready: Callable[[Worker], None] | None = None,
    stop: Callable[[bool, float], None] | None = None,
) -> None:
    """Make this process a worker of a group, start the higher packages, and serve calls. For the modules that make groups.

    Args:
        make: joins the group.
        timeout: the default time-out of calls, in seconds; 0 means none.
        what: names this process in messages: "a worker of ...".
        namespace: the default namespace of actors.
        ready: called with the worker before the first call is served.
        stop: called as ``stop(graceful, seconds)`` before the agent is closed. It may take ``seconds``; with 0, it chooses its
            own limit.

    Raises:
        RuntimeError: RPC is initialised already.
        Exception: ``make``, ``ready`` or a higher package raised it. This process is then not a worker.
    """
    with _lock:
        if is_initialized():
            raise RuntimeError(f"RPC is already initialized: this process is {_require().what}")

        # Signal handlers run only in waits: a handler that raised between two steps of _enter() would leave threads and sockets.
        defer_during(partial(_enter, make, timeout, what, namespace, ready, stop))


def _enter(
    make: Callable[[], Group],
    timeout: float,
    what: str,
    namespace: str,
    ready: Callable[[Worker], None] | None,
    stop: Callable[[bool, float], None] | None,
) -> None:
    group: Group | None = None
    worker: Worker | None = None
    try:
        group = make()
        worker = worker_of(group, timeout, what, namespace)
        worker.stop = stop
        _set_switch_interval(group.agent.settings.switch_interval)
        set_worker(worker)
        worker.in_force = True
        for start in on_start:
            worker.shutdown_hooks.append(start(worker))
        if ready is not None:
            ready(worker)
        group.start()
        checkpoint()  # a deferred signal handler may raise here; then this process is not a worker
    except BaseException:
        if worker is not None:
            close(worker)
            set_worker(None)
        elif group is not None:
            group.close()
        groups.close_abandoned()
        raise


def worker_of(group: Group, timeout: float, what: str, namespace: str = "") -> Worker:
    """Return the Worker of a group, without making it the worker of this process. Arguments: see :func:`install`."""
    worker = Worker(group.agent, timeout, what, namespace)
    worker.group = group
    worker.references = rrefs.new_references(group.agent, lambda: worker.timeout)
    return worker


def _run_shutdown_hooks(worker: Worker, graceful: bool) -> None:
    """Call each shutdown hook of the higher packages once; :func:`close` calls a hook again that a signal handler interrupts."""
    while worker.shutdown_hooks:
        hook = worker.shutdown_hooks[-1]
        if not graceful:
            worker.shutdown_hooks.pop()
        try:
            hook(graceful)
        except Exception as error:
            if is_of_handler(error):
                raise
            _log.exception(
                "a shutdown hook of worker %r has raised; the other hooks run all the same", worker.agent.name
            )
        if graceful:
            # Removed after its call: if a signal handler raises in the hook, close() runs the hook again, with graceful=False.
            worker.shutdown_hooks.remove(hook)


@uninterruptible
def close(worker: Worker) -> None:
    """End all parts of a worker that still run, without waiting for other workers. Takes some seconds at most.

    The caller ensures that no other thread closes the worker at the same time.
    """
    worker.in_force = False
    _restore_switch_interval()
    try:
        _run_shutdown_hooks(worker, False)
        stop, worker.stop = worker.stop, None
        if stop is not None:
            stop(False, 0.0)
    finally:
        worker.references.carry_out(worker.references.table.close())
        worker.group.close()
        mute(False)


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leave the group, or end the embedded cluster, and stop this worker. Does nothing if this process is in neither.

    Args:
        graceful: serve calls until every live worker of a fixed group has called ``shutdown``, then release
            all RRefs. In the embedded cluster: let actors and processes end by themselves. If False, end at
            once: unanswered calls fail with ShutdownError.
        timeout: seconds in total. 0 waits without limit until all live workers of the group have called ``shutdown``, and then
            for at most a minute; in the embedded cluster, for 5 s, after which the remaining processes are killed.

    Raises:
        RpcTimeoutError: other workers did not call ``shutdown`` in time. This worker is shut down nevertheless.
    """
    leaks = leave(graceful, timeout)
    if leaks:
        _log.warning("Leaking RRef: %d values are still referenced: %s", len(leaks), leaks[:5])


def leave(
    graceful: bool = True, timeout: float = 0, *, let_go: Callable[[], None] | None = None
) -> Sequence[object]:
    """Do what :func:`shutdown` does, and return the references that other workers still hold at a graceful end.

    Args:
        let_go: called when no worker executes calls any more; by default :func:`let_go_of_all`, which releases all RRefs.

    Raises:
        RpcTimeoutError: as :func:`shutdown`.
        Exception: ``let_go`` raised it. This worker is shut down nevertheless.
    """
    worker = current_worker()
    if worker is None or not worker.in_force:
        return ()
    if os.getpid() != worker.agent.record.pid:
        set_worker(None)
        return ()
    seconds = check_timeout(timeout)
    until = worker.agent.leave_by = _time.now() + seconds if seconds else float("inf")
    try:
        return _end_together(worker, until, let_go or let_go_of_all) if graceful else ()
    finally:
        with _lock:
            if worker.in_force:
                close(worker)
                set_worker(None)
        checkpoint()  # runs the handlers that were deferred meanwhile, which may raise (Ctrl-C)


def _set_switch_interval(wanted: float | None) -> None:
    """Set how long a thread may keep the interpreter, in seconds.

    By default 0.5 ms, unless the program has changed Python's default of 5 ms. An answer takes several switches of threads, so it
    would be slow on a worker whose other threads run Python code.
    """
    global _before
    present = sys.getswitchinterval()
    if wanted is not None or present == 0.005:
        _before = present
        sys.setswitchinterval(0.0005 if wanted is None else wanted)


def _restore_switch_interval() -> None:
    global _before
    if _before:
        sys.setswitchinterval(_before)
        _before = 0.0


def let_go_of_all() -> None:
    """Release every RRef that this worker holds."""
    references = _require().references
    references.carry_out(references.table.delete_all_users())


def _end_together(worker: Worker, until: float, let_go: Callable[[], None]) -> Sequence[object]:
    def left() -> float:
        return 0.0 if until == float("inf") else max(0.001, until - _time.now())

    group, references = worker.group, worker.references
    group.wait_for_all(0, left())
    _answer_all(worker, min(until, _time.now() + _ANSWERING_S))
    # From here on, no worker executes calls of users.
    _run_shutdown_hooks(worker, True)
    stop, worker.stop = worker.stop, None
    if stop is not None:
        stop(True, left())
        return ()  # all other workers have ended
    let_go()
    # At most half of _SETTLE_S, so that the other workers, which wait for this worker in wait_for_all(1), do not time out.
    references.settle(min(until, _time.now() + _SETTLE_S / 2))
    group.wait_for_all(1, min(left() or _SETTLE_S, _SETTLE_S))
    # A value may have been created here in the meantime; the message that deletes it has been sent, but may not have been read.
    references.settle(min(until, _time.now() + _LATE_S))
    leaks: Sequence[object] = references.table.leaks()
    return leaks


def _answer_all(worker: Worker, until: float) -> None:
    """Wait until the calls that this worker executes are answered, except for the call that runs this function.

    These calls may include a call by which another worker made this worker leave the group.
    """
    pause = 0.0005
    while _time.now() < until and _executes(worker):
        _time.sleep(pause)
        pause = min(2 * pause, 0.02)


def _executes(worker: Worker) -> bool:
    mine = CURRENT.get()
    return any(
        type(each) is Execution and each is not mine and not (each.deferred or each.cancelled)
        for peer in worker.agent.peers()
        if peer.state == "alive"
        for each in list(peer.running.values())
    )


def is_executing() -> bool:
    """Say whether this worker executes a call, not counting the call that runs this function."""
    return _executes(_require())


@atexit.register
def _at_exit() -> None:
    """End the worker of a program that exits without shutdown, without waiting for other workers."""
    worker = here.worker
    if worker is not None and worker.in_force and os.getpid() == worker.agent.record.pid:
        # The lock is not taken: a daemon thread that holds the lock never runs again.
        close(worker)


def _after_fork(worker: Worker) -> None:
    """In a forked child: drop the state of the parent's threads and connections."""
    forked()
    worker.agent.abandon()


on_fork.append(_after_fork)


def _before_fork() -> None:
    for worker in workers_here():
        if worker.in_force:
            worker.agent.scheduler.before_fork()


def _after_fork_in_parent() -> None:
    for worker in workers_here():
        if worker.in_force:
            worker.agent.scheduler.after_fork_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)


# -- calling ------------------------------------------------------------------------------------------


def _prepare(
    to: Any, func: Any, args: Any, kwargs: Any, timeout: Any
) -> tuple[Agent, Peer, tuple[Any, ...], dict[str, Any], float]:
    """Check the arguments of a call; return the agent, the peer, the arguments and the time-out in seconds."""
    if INTERRUPTED:
        interruption_point()
    worker = here.worker or current_worker()
    if worker is None or not worker.in_force:
        worker = _require()
    if not callable(func):
        raise TypeError("function should be callable.")
    if args is None:
        args = ()
    elif type(args) is not tuple:
        if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
            raise TypeError(f"args must be a tuple of arguments, not {type(args).__name__}: write args=(x,)")
        args = tuple(args)
    if kwargs is None:
        kwargs = {}
    else:
        if type(kwargs) is not dict:
            if not isinstance(kwargs, Mapping):
                raise TypeError(f"kwargs must be a dict, not {type(kwargs).__name__}")
            kwargs = dict(kwargs)
        for key in kwargs:
            if not isinstance(key, str):
                raise TypeError(f"kwargs must have names for keys, not {say(key, repr)}")
    agent = worker.agent
    peer = agent.peer_table.known.get(to) if type(to) is str else None
    if peer is None or peer.state != "alive":
        peer = agent.peer(to)
    return (
        agent,
        peer,
        args,
        kwargs,
        worker.timeout if timeout == UNSET_RPC_TIMEOUT else check_timeout(timeout),
    )


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> T:
    """Call a function on a worker and return its result.

    Args:
        to: the worker's name, rank or WorkerInfo; it may be this worker.
        func: any callable: importable functions and classes are sent as names, others (lambdas, closures) by value.
        args, kwargs: its arguments; tensors are sent with their contents at the time of this call.
        timeout: seconds; default :func:`get_rpc_timeout`; 0 means none. A call that is made within another call also ends at the
            deadline of the other call.

    Raises:
        RpcTimeoutError, PeerDiedError, BackpressureError: the call got no answer; ``maybe_executed`` says
            whether it may have run.
        SerializationError, LimitError: the call was not sent.
        RemoteError: the function raised; the error is an instance of the function's exception class, too.
        UnknownWorkerError: there is no such worker.
    """
    agent, peer, args, kwargs, seconds = _prepare(to, func, args, kwargs, timeout)
    return agent.call_sync(peer, func, args, kwargs, seconds)  # type: ignore[no-any-return]


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[T]:
    """Call a function on a worker and return a Future of its result at once.

    Consecutive calls may be sent together, at the latest after 0.2 ms or when a thread waits for one of them.
    The arguments are copied before this function returns, so tensors may be changed after that. Large tensors
    that are not sent through shared memory have been sent when this function returns. Arguments and errors as for
    :func:`rpc_sync`.
    """
    future: Future[T] = Future()
    send(future, to, func, args, kwargs, timeout)
    return future


def send(
    future: Future[Any],
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> None:
    """Do what :func:`rpc_async` does, and complete the caller's own future. For higher packages."""
    agent, peer, args, kwargs, seconds = _prepare(to, func, args, kwargs, timeout)
    agent.send(Call(agent, peer, func, seconds, future), func, args, kwargs)


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[T]:
    """Call a function on a worker, keep its result there, and return an RRef to it at once.

    If the call fails, every use of the RRef raises the error of the call. Arguments as for :func:`rpc_sync`.
    """
    agent, peer, args, kwargs, seconds = _prepare(to, func, args, kwargs, timeout)
    label = getattr(func, "__qualname__", None) or repr(func)
    conn = peer.conn
    if (conn is None or conn.state is CLOSED) and not peer.is_self:
        # Connect here, where Ctrl-C can interrupt the wait: creating the reference is uninterruptible.
        agent.connector.connect(peer, _time.now() + (seconds or _JOIN_TIMEOUT), label)
    references = _require().references
    rref: RRef[T] = references.create(peer, func, args, kwargs, seconds, label)
    return rref


# -- the workers of the group --------------------------------------------------------------------------------------------


def get_worker_info(worker_name: str | WorkerInfo | None = None) -> WorkerInfo:
    """Return the WorkerInfo of a worker, by name; by default of this worker.

    Raises:
        UnknownWorkerError: there is no such worker.
    """
    worker = _require()
    if worker_name is None:
        return worker.agent.record.info
    return worker.agent.peer(worker_name).record.info


def get_worker_infos() -> list[WorkerInfo]:
    """Return the WorkerInfo of every worker of the group, by rank."""
    return sorted((WorkerInfo(r.name, r.rank) for r in _require().agent.members()), key=lambda info: info.id)


def namespace() -> str:
    """Return the default namespace of actors of this process."""
    return _require().namespace


def add_shutdown_hook(hook: Callable[[bool], None]) -> None:
    """Call ``hook(graceful)`` first when this worker ends. For higher packages."""
    _require().shutdown_hooks.append(hook)


def what(*, wait: bool = False) -> str | None:
    """Return a description of this process for messages ("a worker of ..."); None if RPC is not initialised.

    Args:
        wait: if another thread is joining a group, wait until it has finished.
    """
    if wait and is_initialized():
        with _lock:
            pass
    return _require().what if is_initialized() else None


def get_rpc_timeout() -> float:
    """Return the default time-out of calls of this worker, in seconds; 0 means none."""
    return _require().timeout


def set_rpc_timeout(timeout: float) -> None:
    """Set the default time-out of later calls of this worker, in seconds; 0 means none.

    Raises:
        ConfigError: ``timeout`` is not a number of seconds >= 0.
    """
    _require().timeout = check_timeout(timeout)


def group() -> Group:
    """Return this worker's membership in the group. For higher packages.

    Raises:
        NotInitializedError: RPC is not initialised in this process.
    """
    found: Group = _require().group
    return found


def references() -> References:
    """Return the RRefs of this worker. For higher packages.

    Raises:
        NotInitializedError: RPC is not initialised in this process.
    """
    found: References = _require().references
    return found


_members_log = logging.getLogger("actorrpc.members")


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The state of one worker, as far as the calling worker knows it.

    Attributes:
        name: the worker's name in the group.
        rank: the worker's number in the group.
        state: ``"alive"``; ``"suspect"``: connected, but silent for two heartbeats; ``"dead"``: its process ended, or
            it was silent for too long; ``"left"``: it shut down. ``"dead"`` and ``"left"`` are final.
        last_seen: seconds since the worker's last message; 0 for the calling worker, None if there has been no contact.
        host: the name of the host on which the worker runs.
        pid: the worker's process id.
        address: the address at which other hosts reach the host; empty if no known worker of the host listens on TCP.
    """

    name: str
    rank: int
    state: str
    last_seen: float | None
    host: str
    pid: int
    address: str = ""


def workers() -> list[WorkerState]:
    """Return the state of every worker of the group, this one included, by rank. Thread-safe.

    The list includes the last 128 ended workers that this worker had contact with. A worker without contact is listed
    as alive. If workers may join at any time, this function asks the store or the driver for the members; without an answer, the
    list has only the workers that this worker knows.

    Raises:
        NotInitializedError: RPC is not initialised in this process.
    """
    agent = group().agent
    try:
        records = agent.members()
    except RpcError as error:
        _members_log.info("the members of the group are not known: %s", error)
        records = []
    members = [peer for peer in agent.peers() if not peer.record.is_visitor]
    known = {peer.record.incarnation: peer for peer in (agent.self_peer, *members)}
    rows = {row.incarnation: row for row in [*(peer.record for peer in known.values()), *records]}
    now, addresses = _time.now(), addresses_of_hosts(rows.values())
    states = [
        _state_of(row, known.get(row.incarnation), now, addresses.get(row.host, "")) for row in rows.values()
    ]
    return sorted(states, key=lambda state: (state.rank, state.name, state.state))


def _state_of(record: WorkerRecord, peer: Peer | None, now: float, address: str) -> WorkerState:
    seen: float | None = None
    if peer is not None and peer.is_self:
        seen = 0.0
    elif peer is not None:
        conn = peer.conn
        last_received = (
            peer.failure_detector.last_received
            if conn is None
            else max(conn.last_received, peer.failure_detector.last_received)
        )
        seen = max(0.0, now - last_received) if last_received > 0 else None
    return WorkerState(
        name=record.name,
        rank=record.rank,
        state="alive" if peer is None else state_of(peer),
        last_seen=seen,
        host=record.hostname,
        pid=record.pid,
        address=address,
    )


def on_member_change(callback: Listener) -> Callable[[], None]:
    """Call ``callback(worker, old, new, reason)`` whenever the state of another worker changes.

    ``worker`` is a :class:`WorkerInfo`; ``old`` and ``new`` are states as in :class:`WorkerState`; ``reason`` is a text that says
    why. The callback runs once for each change, in order, on a thread of the pool and without locks. It may make calls,
    but the next change waits until it has returned. Its exceptions are logged. It is not called for joining, nor after
    this worker has shut down.

    This worker connects to all other workers (in the background), and so notices when a worker ends. A worker that joins later is
    watched from the first contact with it.

    Returns:
        A function without arguments that removes the callback. It may be called more than once, and on any thread.

    Raises:
        NotInitializedError: RPC is not initialised in this process.
        WrongTypeError: ``callback`` cannot be called.
    """
    joined = group()
    if not callable(callback):
        raise WrongTypeError(f"callback must be callable with four arguments, not {say(callback, repr)}")
    remove = joined.agent.scheduler.changes.listen(callback)
    joined.agent.submit(lambda: _watch(joined))
    return remove


def _watch(group: Group) -> None:
    try:
        group.watch_all()
    except RpcError as error:
        _members_log.info("only workers with contact to this worker are watched: %s", error)
