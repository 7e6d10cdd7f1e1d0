"""The functions of ``torch.distributed.rpc``: joining a group, calling, and leaving; and who is in the group, and how they are.

One agent per process. All functions are thread-safe; ``init_rpc`` and ``shutdown`` are meant for one thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from actorrpc import _time
from actorrpc._exception_text import is_of_handler, say
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import CURRENT, Execution
from actorrpc.agent.context import (
    Worker,
    current_worker,
    here,
    on_fork,
    process_worker,
    set_worker,
    workers_here,
)
from actorrpc.agent.peers import Listener, Peer, state_of
from actorrpc.config import Settings
from actorrpc.errors import ConfigError, NotInitializedError, RpcError, WrongTypeError
from actorrpc.futures import INTERRUPTED, Future, forked, hush, interruption_point
from actorrpc.group import group as groups
from actorrpc.group.group import Group
from actorrpc.group.launchers import fill_in
from actorrpc.group.rendezvous import open_store
from actorrpc.rpc import rref as rrefs
from actorrpc.rpc.options import (
    UNSET_RPC_TIMEOUT,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    check_backend,
    check_timeout,
    options_of,
)
from actorrpc.rpc.refcount.runtime import References
from actorrpc.rpc.rref import RRef
from actorrpc.serialization import torchscript
from actorrpc.transport.connection_state import CLOSED
from actorrpc.transport.signals import checkpoint, put_off_during, uninterruptible
from actorrpc.transport.tls import Tls
from actorrpc.validation import integer
from actorrpc.wire.identity import WorkerInfo, WorkerRecord

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

torchscript.register()

_log = logging.getLogger("actorrpc")
_JOIN_TIMEOUT = 300.0  # how long workers wait for each other at the rendezvous, in seconds
_LATE_S = 0.5
_ANSWERING_S = (
    5.0  # how long a graceful shutdown waits for the functions that are being executed here to be answered
)
_SETTLE_S = 30.0  # how long shutdown waits for the last references, once every live worker has come to it


#: Called with a new worker before the first call is served; what each returns is called at the
#: end, the last one first, with whether the end is a graceful one (and again, with False, if Ctrl-C comes in a
#: graceful one). For the floors above.
on_start: list[Callable[[Worker], Callable[[bool], None]]] = []


_before = 0.0
# Guards joining and leaving; never held while waiting for other workers.
_lock = threading.Lock()


def _require() -> Worker:
    worker = current_worker()
    if worker is None or not worker.in_force:
        raise NotInitializedError(
            "RPC has not been initialized in this process. Call actorrpc.init() or init_rpc() first; a fork (os.fork(), or "
            "multiprocessing's start method 'fork') has nothing of its parent's, and needs a call of its own."
        )
    return worker


def is_available() -> bool:
    """Say whether RPC can be used in this build: always."""
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
    """Join a group of workers and start this one; returns when all of a fixed group are there.

    Args:
        name: letters, digits, ``_``, ``-`` and ``:``; default, under a launcher (torchrun, srun, mpirun), "worker" and rank.
        backend: accepted for torch's sake (a :class:`BackendType`); there is one agent here.
        rank: this worker's number, from 0; default from the environment (``RANK``) or the URL.
        world_size: the number of workers; ``None`` makes, or joins, a group that workers may join and leave
            at any time, unless the environment (``WORLD_SIZE``) or the URL says a number.
        rpc_backend_options: a :class:`RpcBackendOptions`; torch's own options object is understood, too.

    Raises:
        ConfigError: an argument makes no sense.
        RendezvousError: the workers did not find each other.
        AuthenticationError: this worker has no key, or not that of the others.
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
    """Join a group with arguments that are in order, as :func:`init_rpc` does.

    Args:
        store: the store in which the workers of a fixed group meet; by default the one that the options name.

    Raises:
        ConfigError, RendezvousError, AuthenticationError, RuntimeError: as :func:`init_rpc`.
    """

    def make() -> Group:
        settings = Settings.from_environment(**options._extra)
        Tls.load(settings)  # what is wrong with the certificates is said before anything is sent
        if store is None:
            found, own_rank, size = open_store(options.init_method, rank, world_size, _JOIN_TIMEOUT)
        else:
            found, own_rank, size = store, rank, world_size
        devices: tuple[str, ...] = ()
        maps: tuple[tuple[str, str, str], ...] = ()
        if isinstance(options, TensorPipeRpcBackendOptions):
            devices = tuple(map(str, options.devices))
            maps = tuple(
                (to, str(here), str(there))
                for to, each in options.device_maps.items()
                for here, there in each.items()
            )
        return groups.join(
            name,
            own_rank,
            size,
            found,
            settings=settings,
            key=options._key,
            timeout=_JOIN_TIMEOUT,
            devices=devices,
            maps=maps,
        )

    install(make, options.rpc_timeout, "a worker of an init_rpc group", ready=options._ready)


def install(
    make: Callable[[], Group],
    timeout: float,
    what: str,
    *,
    namespace: str = "",
    ready: Callable[[Worker], None] | None = None,
    stop: Callable[[bool, float], None] | None = None,
) -> None:
    """Put a group in force in this process, start the floors above, and serve calls. For those who found groups.

    Args:
        make: joins the group.
        timeout: the default time-out of calls, in seconds; 0 means none.
        what: what this process is then, in words for messages.
        namespace: where actors that say none look for names.
        ready: called with the worker when all is in place, before the first call is served.
        stop: called at the end, before the agent is closed, with whether that is a graceful one and how many
            seconds are left for it (0: as many as it thinks right).

    Raises:
        RuntimeError: RPC is initialised already.
        Exception: what ``make``, ``ready`` or the floors above raise; nothing is in force then.
    """
    with _lock:
        if is_initialized():
            raise RuntimeError(f"RPC is already initialized: this process is {_require().what}")

        @uninterruptible
        def enter() -> None:
            global _before
            group: Group | None = None
            worker: Worker | None = None
            try:
                group = make()
                worker = worker_of(group, timeout, what, namespace)
                settings = group.agent.settings
                if settings.switch_interval is None:
                    # A worker that is busy in Python would answer after several of the interpreter's 5 ms turns.
                    if sys.getswitchinterval() == 0.005:
                        sys.setswitchinterval(0.0005)
                        _before = 0.005
                else:
                    _before = sys.getswitchinterval()
                    sys.setswitchinterval(settings.switch_interval)
                set_worker(worker)
                worker.in_force = True
                worker.stop = stop
                for start in on_start:
                    worker.ends.append(start(worker))
                if ready is not None:
                    ready(worker)
                group.start()
                checkpoint()  # what was put off, and nothing is in force then
            except BaseException:
                if worker is not None:
                    close(worker)
                    set_worker(None)
                elif group is not None:
                    group.close()
                groups.close_forsaken()
                raise

        # A handler that raises between the making of something and its keeping would leave it behind; where there is something
        # to wait for, checkpoints are.
        put_off_during(enter)


def worker_of(group: Group, timeout: float, what: str, namespace: str = "") -> Worker:
    """Return the worker that a group has been joined for; the arguments are those of :func:`install`. Nothing is in force."""
    worker = Worker(group.agent, timeout, what, namespace)
    worker.group = group
    worker.references = rrefs.new_references(group.agent, lambda: worker.timeout)
    return worker


def _end(worker: Worker, graceful: bool) -> None:
    """Tell the floors above that it is over; once, and again only where a signal handler has cut a graceful end short."""
    while worker.ends:
        end = worker.ends[
            -1
        ]  # it stays until it is done: what a handler raises may come between any two lines
        try:
            end(graceful)
        except BaseException as error:
            if not isinstance(error, Exception) or is_of_handler(error):
                if not graceful:
                    worker.ends.remove(end)
                raise
            _log.exception(
                "a part of worker %r raised at its end; the others end all the same", worker.agent.name
            )
        worker.ends.remove(end)


@uninterruptible
def close(worker: Worker) -> None:
    """End everything of a worker at once, what has been ended already excepted. Takes some seconds at most.

    The calling thread acts for the worker, and has seen to it that no other one closes it.
    """
    worker.in_force = False
    _restore()
    try:
        _end(worker, False)
        stop, worker.stop = worker.stop, None
        if stop is not None:
            stop(False, 0.0)
    finally:
        worker.references.carry_out(worker.references.table.close())
        worker.group.close()
        hush(False)


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leave the group, or end the embedded cluster, and stop this worker. Does nothing where neither is in force.

    Args:
        graceful: serve calls until every live worker of a fixed group has called ``shutdown``, then let go of
            all RRefs. In the embedded cluster: let actors and processes end by themselves. Otherwise end at
            once: calls under way fail with ShutdownError.
        timeout: seconds for all of it. 0 waits for live workers of a group as long as they work, and for at most
            30 s more; in the embedded cluster, for 5 s. What has not ended by then is ended by force.

    Raises:
        RpcTimeoutError: others did not come in time. This worker is shut down all the same.
    """
    leaks = leave(graceful, timeout)
    if leaks:
        _log.warning("Leaking RRef: %d values are still referenced: %s", len(leaks), leaks[:5])


def leave(
    graceful: bool = True, timeout: float = 0, *, let_go: Callable[[], None] | None = None
) -> Sequence[object]:
    """Do what :func:`shutdown` does and return the references that are left at a graceful end.

    Args:
        let_go: called when nobody works any more; what lets go of all RRefs by default (:func:`let_go_of_all`).

    Raises:
        RpcTimeoutError: as :func:`shutdown`.
        Exception: what ``let_go`` raised. This worker is shut down all the same.
    """
    worker = current_worker()
    if worker is None or not worker.in_force:
        return ()
    if os.getpid() != worker.agent.pid:
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
        checkpoint()  # Ctrl-C that came meanwhile


def _restore() -> None:
    global _before
    if _before:
        sys.setswitchinterval(_before)
        _before = 0.0


def let_go_of_all() -> None:
    """Let go of every RRef that this worker holds."""
    references = _require().references
    references.carry_out(references.table.delete_all_users())


def _end_together(worker: Worker, until: float, let_go: Callable[[], None]) -> Sequence[object]:
    def left() -> float:
        return 0.0 if until == float("inf") else max(0.001, until - _time.now())

    group, references = worker.group, worker.references
    group.wait_for_all(0, left())
    _answer_all(worker, min(until, _time.now() + _ANSWERING_S))
    # Nobody works any more.
    _end(worker, True)
    stop, worker.stop = worker.stop, None
    if stop is not None:
        stop(True, left())
        return ()  # all others have ended: there is nobody to settle anything with
    # Let go of every reference, and see that the owners know.
    let_go()
    # Half of the time, so that others who wait for this worker do not give up on it.
    references.settle(min(until, _time.now() + _SETTLE_S / 2))
    group.wait_for_all(1, min(left() or _SETTLE_S, _SETTLE_S))
    # A value may have been made here in the meantime: that it is not wanted has been sent, but may not be read yet.
    references.settle(min(until, _time.now() + _LATE_S))
    leaks: Sequence[object] = references.table.leaks()
    return leaks


def _answer_all(worker: Worker, until: float) -> None:
    """Wait until the functions that are being executed here, and that somebody waits for, are answered.

    But for the one that calls this. The function that has told this worker to leave may just be about to return.
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
    """Say whether this worker executes a function for another one, not counting the call that asks."""
    return _executes(_require())


@atexit.register
def _at_exit() -> None:
    """End what a program that exits without shutdown has left: quickly, and without waiting for anybody."""
    worker = process_worker()
    if worker is not None and worker.in_force and os.getpid() == worker.agent.pid:
        # Without the lock: the thread that holds it may be a thread that never comes back.
        close(worker)


def _after_fork(worker: Worker) -> None:
    """In a child: let go of everything that belongs to the parent."""
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
    """Return what a call is made with, checked: the agent, the peer, the arguments and the time-out in seconds."""
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
        to: the worker's name, rank or WorkerInfo; this one, too.
        func: any callable: importable functions and classes go by name, others (lambdas, closures) by value.
        args, kwargs: its arguments; tensors arrive as they are at this moment.
        timeout: seconds; default that of the group; 0 means none. A call made from inside a call also ends
            with that one.

    Raises:
        RpcTimeoutError, PeerDiedError, BackpressureError: the call did not end; ``maybe_executed`` says
            whether it may have run.
        SerializationError, LimitError: it was not sent.
        RemoteError: what the function raised, which is an instance of its own class, too.
        UnknownWorkerError: there is no such worker.
    """
    agent, peer, args, kwargs, seconds = _prepare(to, func, args, kwargs, timeout)
    return agent.ask(peer, func, args, kwargs, seconds)  # type: ignore[no-any-return]


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[T]:
    """Call a function on a worker and return a Future of its result at once.

    Calls that are made one after the other may leave together, at latest 0.2 ms later or when anybody waits.
    The arguments are taken as they are when this returns: tensors may be changed after that. Large tensors
    that do not go through shared memory are on their way when this returns. Arguments and errors as for
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
    """Do what :func:`rpc_async` does, with a future that the caller has made. For the floors above."""
    agent, peer, args, kwargs, seconds = _prepare(to, func, args, kwargs, timeout)
    agent.call(peer, func, args, kwargs, seconds, future)


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[T]:
    """Call a function on a worker, keep its result there, and return an RRef to it at once.

    What the call raises is raised at every use of the RRef. Arguments as for :func:`rpc_sync`.
    """
    agent, peer, args, kwargs, seconds = _prepare(to, func, args, kwargs, timeout)
    label = getattr(func, "__qualname__", None) or repr(func)
    conn = peer.conn
    if (conn is None or conn.state is CLOSED) and not peer.is_self:
        # Here, where Ctrl-C can come: it cannot while the reference is being made.
        agent.connector.connect(peer, _time.now() + (seconds or _JOIN_TIMEOUT), label)
    references = _require().references
    rref: RRef[T] = references.create(peer, func, args, kwargs, seconds, label)
    return rref


# -- looking --------------------------------------------------------------------------------------------


def get_worker_info(worker_name: str | WorkerInfo | None = None) -> WorkerInfo:
    """Return the WorkerInfo of a worker, by name; of this one by default.

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
    """Return the namespace in which actors of this process look for names, unless they are told another one."""
    return _require().namespace


def before_the_end(end: Callable[[bool], None]) -> None:
    """Have ``end`` called first at the end, with whether that is a graceful one. For the floors above."""
    _require().ends.append(end)


def what() -> str | None:
    """Say in words what this process is, if RPC is initialised in it."""
    return _require().what if is_initialized() else None


def get_rpc_timeout() -> float:
    """Return the default time-out of calls of this worker, in seconds; 0 means none."""
    return _require().timeout


def set_rpc_timeout(timeout: float) -> None:
    """Set the default time-out of calls of this worker, in seconds; 0 means none. Calls under way keep theirs.

    Raises:
        ConfigError: it is not a number of seconds >= 0.
    """
    _require().timeout = check_timeout(timeout)


def group() -> Group:
    """Return this worker's membership in the group. For the floors above.

    Raises:
        NotInitializedError: RPC is not initialised in this process.
    """
    found: Group = _require().group
    return found


def references() -> References:
    """Return the RRefs of this worker. For the floors above.

    Raises:
        NotInitializedError: RPC is not initialised in this process.
    """
    found: References = _require().references
    return found


_members_log = logging.getLogger("actorrpc.members")


@dataclass(frozen=True, slots=True)
class WorkerState:
    """How one worker is, as far as this one knows.

    Attributes:
        name: its name in the group.
        rank: its number in the group.
        state: ``"alive"``; ``"suspect"``: connected, but silent for two heartbeats; ``"dead"``: its process ended, or
            it was silent for too long; ``"left"``: it shut down. The last two are final.
        last_seen: seconds since anything was heard of it; 0 for this worker itself, None where there has been no contact.
        host: the machine it runs on: the name of this one, or the address that it can be reached at.
        pid: its process there.
    """

    name: str
    rank: int
    state: str
    last_seen: float | None
    host: str
    pid: int


def workers() -> list[WorkerState]:
    """Return how every worker of the group is, this one included, by rank. Thread-safe.

    Workers that have ended are listed, too, if there was contact with them: the last 128 that did. Of workers that there has
    been no contact with, nothing is known but that they joined. Where workers may join at any time, the store or the driver
    is asked who is there; where that fails, those are listed that this worker knows.

    Raises:
        NotInitializedError: RPC is not initialised in this process.
    """
    agent = group().agent
    try:
        records = agent.members()
    except RpcError as error:
        _members_log.info("nobody says who is in the group: %s", error)
        records = []
    members = [peer for peer in agent.peers() if not peer.record.is_visitor]
    known = {peer.record.incarnation: peer for peer in (agent.self_peer, *members)}
    rows = {row.incarnation: row for row in [*(peer.record for peer in known.values()), *records]}
    now = _time.now()
    states = [_state_of(agent, row, known.get(row.incarnation), now) for row in rows.values()]
    return sorted(states, key=lambda state: (state.rank, state.name, state.state))


def _state_of(agent: Agent, record: WorkerRecord, peer: Peer | None, now: float) -> WorkerState:
    seen: float | None = None
    if peer is not None and peer.is_self:
        seen = 0.0
    elif peer is not None:
        conn = peer.conn
        heard = peer.failure_detector.heard if conn is None else max(conn.heard, peer.failure_detector.heard)
        seen = max(0.0, now - heard) if heard > 0 else None
    if record.host == agent.record.host:
        host = socket.gethostname()
    else:
        host = record.tcp[0][0] if record.tcp else record.host[:8]
    return WorkerState(
        name=record.name,
        rank=record.rank,
        state="alive" if peer is None else state_of(peer),
        last_seen=seen,
        host=host,
        pid=record.pid,
    )


def on_member_change(callback: Listener) -> Callable[[], None]:
    """Have ``callback(worker, old, new, reason)`` called whenever the state of another worker changes.

    ``worker`` is a :class:`WorkerInfo`; ``old`` and ``new`` are states as in :class:`WorkerState`; ``reason`` says why in
    words. Each change is told once, in order, on a thread of the pool and with no lock held; the callback may make calls,
    but the next change is told only when it has returned. What it raises is logged. It is not called for joining, nor once
    this worker has shut down.

    So that all ends are noticed, this worker connects to all others that are there (in the background). A worker that
    joins later is watched from the first contact with it.

    Returns:
        What ends it: a function without arguments, which may be called more than once and on any thread.

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
        _members_log.info("only workers that there is contact with are watched: %s", error)
