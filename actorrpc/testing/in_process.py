"""An in-process cluster: several workers in one process, each with its own threads, and a clock that the test controls.

    with testing.InProcessCluster(3) as cluster:
        call = cluster["worker0"].rpc_async("worker1", answer, timeout=60.0)
        cluster.cut("worker0", "worker1")        # no bytes pass between the two from now on
        cluster.clock.advance(60.0)              # a minute, within a few real milliseconds
        with pytest.raises(actorrpc.RpcTimeoutError):
            call.wait()

Each worker has its own agent, threads, connections and RRefs, as if it ran on its own host: the workers are connected by TCP
over the loopback interface, through relays that inject faults. They do not use shared memory. Each thread acts for one worker:
a function that is called on a worker sees that worker as its own (``rpc.get_worker_info()``). The test's main thread, and
threads that the test or a called function starts, act for the first worker. To act for another worker, use
``with cluster["worker1"]: ...`` or the methods of ``cluster["worker1"]``.

Unless ``autojump`` is on, no time-out passes while the test's own thread waits. Therefore make a call that has a time-out with
``rpc_async``, advance the clock, then read the outcome. A call that first has to connect to a worker which is cut off blocks.

Supported: calls, RRefs, cancellation, time-outs, states of workers, actors, distributed autograd, ``shutdown``. Not supported:
actors in processes of their own, and the faults of :func:`drop` and :func:`delay`, which act on a process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, TypeVar

from actorrpc._exceptions import say
from actorrpc.actors import startup as actors
from actorrpc.agent.context import Worker, add_several, begin_acting, end_acting, end_several
from actorrpc.agent.peers import Peer
from actorrpc.autograd import startup as autograd
from actorrpc.config import Settings
from actorrpc.debugger import startup as debugger
from actorrpc.errors import ConfigError, UnknownWorkerError, WrongTypeError
from actorrpc.futures import Future, mute
from actorrpc.group import group as groups
from actorrpc.observe import startup as observe
from actorrpc.rpc import api, spans
from actorrpc.rpc.options import DEFAULT_RPC_TIMEOUT_SEC, UNSET_RPC_TIMEOUT, check_timeout
from actorrpc.rpc.rref import RRef
from actorrpc.testing.relays import Relays
from actorrpc.testing.virtual_time import VirtualTime
from actorrpc.validation import choice
from actorrpc.wire.identity import WorkerInfo, check_name, host_identity
from actorrpc.wire.keys import Key

__all__ = ["ClusterWorker", "InProcessCluster"]

T = TypeVar("T")

#: Options that the cluster sets itself: workers share no memory, time may stand still, and relays use one address family.
_FIXED: Final = {"transport": "tcp", "bind": "127.0.0.1", "spin_us": 0, "lane": False, "insecure": False}
_MOST: Final = 64


class ClusterWorker:
    """One worker of an :class:`InProcessCluster`. Thread-safe.

    In a ``with worker:`` block, the thread acts for this worker: all functions of ``actorrpc`` and ``actorrpc.rpc`` use the
    worker. The methods do the same for one call.

    Attributes:
        name, rank: the name and rank of this worker.
    """

    def __init__(self, cluster: InProcessCluster, name: str, rank: int) -> None:
        self.name = name
        self.rank = rank
        self._cluster = cluster
        self._worker: Worker | None = None

    @property
    def info(self) -> WorkerInfo:
        """The worker's name and rank, as other workers see them."""
        return WorkerInfo(self.name, self.rank)

    def __enter__(self) -> ClusterWorker:
        self._cluster._check()
        assert self._worker is not None
        begin_acting(self._worker)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._worker is not None
        end_acting(self._worker)

    def __repr__(self) -> str:
        return f"<worker {self.name!r} of an InProcessCluster>"

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function in this thread, which acts for this worker during the call."""
        with self:
            return function(*args, **kwargs)

    def rpc_sync(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., T],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> T:
        """Call :func:`actorrpc.rpc.rpc_sync` as this worker."""
        with self:
            return api.rpc_sync(to, func, args, kwargs, timeout)

    def rpc_async(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., T],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Future[T]:
        """Call :func:`actorrpc.rpc.rpc_async` as this worker."""
        with self:
            return api.rpc_async(to, func, args, kwargs, timeout)

    def remote(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., T],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> RRef[T]:
        """Call :func:`actorrpc.rpc.remote` as this worker."""
        with self:
            return api.remote(to, func, args, kwargs, timeout)

    def workers(self) -> list[api.WorkerState]:
        """Call :func:`actorrpc.workers` as this worker."""
        with self:
            return api.workers()

    def on_member_change(self, callback: Callable[[WorkerInfo, str, str, str], None]) -> Callable[[], None]:
        """Call :func:`actorrpc.on_member_change` as this worker."""
        with self:
            return api.on_member_change(callback)


#: The cluster that is open in this process.
_open: InProcessCluster | None = None


class InProcessCluster:
    """Several workers in this process; used as a context manager. Its methods are thread-safe.

    Args:
        workers: the number of workers (named ``worker0``, ``worker1``, ...), or their names.
        clock: ``"virtual"``: time stands still until :attr:`clock` advances it; ``"real"``: the workers use the real time.
        autojump: advance virtual time automatically to the next deadline when all threads wait, at least one for a deadline.
        rpc_timeout: the default time-out of calls, in seconds; 0 means no time-out.
        settings: options of the workers, as for ``RpcBackendOptions`` (``heartbeat=1.0``, ``session_grace=5.0``, ...).

    Raises:
        ConfigError, WrongTypeError: an argument cannot be used.
    """

    def __init__(
        self,
        workers: int | Sequence[str] = 2,
        *,
        clock: Literal["virtual", "real"] = "virtual",
        autojump: bool = False,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        **settings: Any,
    ) -> None:
        choice("clock", clock, of=("virtual", "real"))
        if autojump and clock == "real":
            raise ConfigError("the real time does not jump: autojump is for a virtual clock")
        fixed = _FIXED.keys() & settings.keys()
        if fixed:
            raise ConfigError(f"an in-process cluster decides on {', '.join(sorted(fixed))} itself")
        try:
            self._settings = Settings.from_environment(**settings, **_FIXED)
        except TypeError:
            raise ConfigError(f"there are unknown options among {', '.join(settings)}") from None
        self._settings = replace(self._settings, port=0, advertise=None)
        self._timeout = check_timeout(rpc_timeout)
        self._clock = VirtualTime(autojump=autojump) if clock == "virtual" else None
        self.workers = tuple(ClusterWorker(self, name, rank) for rank, name in enumerate(_names(workers)))
        self._by_name = {worker.name: worker for worker in self.workers}
        self._members = groups.MemberDirectory()
        self._relays: Relays | None = None
        self._stack = contextlib.ExitStack()
        self._state = "new"  # -> open -> closed

    # -- start and end --------------------------------------------------------------------------------------

    def __enter__(self) -> InProcessCluster:
        """Start all workers.

        Raises:
            RuntimeError: the cluster was started before, or this process is a worker, or has another cluster or virtual clock.
        """
        if self._state != "new":
            raise RuntimeError("an InProcessCluster can be started once")
        if api.is_initialized():
            raise RuntimeError(f"no in-process cluster can be started here: this process is {api.what()}")
        with contextlib.ExitStack() as stack:
            if self._clock is not None:
                stack.enter_context(self._clock)
            stack.callback(mute, False)
            stack.callback(end_several)
            global _open
            _open = self
            relays = self._relays = Relays()
            stack.callback(relays.close)
            stack.callback(self._closed)
            self._state = "open"
            key = Key(secrets.token_bytes(32))
            for worker in self.workers:
                self._make(worker, key, stack)
            if self._clock is not None:
                stack.callback(self._clock.flow)
            for worker in self.workers:
                with worker:
                    api.group().start()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all workers; waiting calls fail with ShutdownError. Restores the real time. Idempotent."""
        if self._state == "open":
            self._stack.close()
        self._state = "closed"

    def _abandon(self) -> None:
        """Discard the parent's relays and workers in a forked child, where the workers have no threads."""
        self._state = "closed"
        self._stack = contextlib.ExitStack()
        mute(False)

    def _make(self, worker: ClusterWorker, key: Key, stack: contextlib.ExitStack) -> None:
        # Separate host identities: on one host, an agent would not declare a silent peer dead, because its process runs.
        host = host_identity()[:16] + secrets.token_hex(8)
        group = groups.enter(
            worker.name, worker.rank, self._members, settings=self._settings, key=key, host=host
        )
        agent = group.agent
        self._members.add(agent.record)
        agent.connector.addresses = partial(self._addresses, worker.name)  # type: ignore[method-assign]
        made = worker._worker = api.worker_of(
            group, self._timeout, f"{worker.name!r} of an in-process cluster"
        )
        add_several(made)
        stack.callback(self._close_worker, made)
        made.in_force = True
        with worker:
            starts = (spans.start, autograd.start, actors.start, debugger.start, observe.start)
            made.shutdown_hooks += [start(made) for start in starts]

    @staticmethod
    def _close_worker(worker: Worker) -> None:
        if worker.in_force:
            begin_acting(worker)
            try:
                api.close(worker)
            finally:
                end_acting(worker)

    def _check(self) -> Relays:
        """Return the relays of the open cluster.

        Raises:
            RuntimeError: the cluster is not open.
        """
        if self._state != "open" or self._relays is None:
            raise RuntimeError(f"this InProcessCluster is {self._state}: use it in its with block")
        return self._relays

    # -- workers and clock ----------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> ClusterWorker:
        worker = self._by_name.get(name)
        if worker is None:
            names = ", ".join(self._by_name)
            raise UnknownWorkerError(
                f"there is no worker {say(name, repr)} in this cluster; there are: {names}"
            )
        return worker

    def __iter__(self) -> Iterator[ClusterWorker]:
        return iter(self.workers)

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def clock(self) -> VirtualTime:
        """The virtual clock of this cluster.

        Raises:
            RuntimeError: the cluster uses the real time.
        """
        if self._clock is None:
            raise RuntimeError('this cluster uses the real time: make it with clock="virtual"')
        return self._clock

    # -- faults ----------------------------------------------------------------------------------------

    def cut(self, one: str, other: str) -> None:
        """Hold back all bytes between two workers, in both directions, until :meth:`heal`. Nothing is closed or lost."""
        relays, pair = self._between(one, other)
        relays.cut(pair)

    def heal(self, one: str, other: str) -> None:
        """Deliver the bytes that :meth:`cut` held back, and relay again. Does nothing if the two were not cut apart."""
        relays, pair = self._between(one, other)
        relays.heal(pair)

    def reset(self, one: str, other: str) -> int:
        """Break the connections between two workers; return their number. The workers reconnect, unless they are cut apart."""
        relays, pair = self._between(one, other)
        return relays.reset(pair)

    def stop(self, name: str) -> None:
        """Cut a worker off from all other workers. It keeps running, but looks to them like a stopped process."""
        for other in self._others(name):
            self.cut(name, other)

    def resume(self, name: str) -> None:
        """Undo :meth:`stop`."""
        for other in self._others(name):
            self.heal(name, other)

    def kill(self, name: str) -> None:
        """Close a worker's agent at once: its connections break, its address refuses connections, and its calls end.

        Threads cannot be killed: functions that run on this worker continue, but their answers are not sent.
        """
        self._check().kill(self[name].name)
        worker = self[name]
        with worker:
            api.group().agent.close(timeout=0.2)

    def _between(self, one: str, other: str) -> tuple[Relays, frozenset[str]]:
        relays, pair = self._check(), frozenset((self[one].name, self[other].name))
        if len(pair) == 1:
            raise ConfigError(f"{one!r} was named twice: name two different workers")
        return relays, pair

    def _others(self, name: str) -> list[str]:
        self._check()
        return [worker.name for worker in self.workers if worker is not self[name]]

    def _addresses(self, dialler: str, peer: Peer) -> list[tuple[int, Any]]:
        """Return the address at which a worker connects to a peer: the address of their relay, which the first call creates."""
        if self._state != "open":
            return []
        return [(socket.AF_INET, self._check().address(dialler, peer.name, peer.record.tcp[0]))]

    def _closed(self) -> None:
        self._state = "closed"
        global _open
        _open = None


def _names(workers: Any) -> list[str]:
    right = f"a cluster in one process has 1 to {_MOST} workers, not"
    if isinstance(workers, int) and not isinstance(workers, bool):
        if not 1 <= workers <= _MOST:  # before names are made
            raise ConfigError(f"{right} {say(workers)}")
        names = [f"worker{rank}" for rank in range(workers)]
    elif isinstance(workers, Sequence) and not isinstance(workers, str):
        names = [check_name(name) for name in workers]
    else:
        raise WrongTypeError(f"workers must be a number, or a list of names, not {say(workers, repr)}")
    if not 1 <= len(names) <= _MOST:
        raise ConfigError(f"{right} {len(names)}")
    if len(set(names)) < len(names):
        raise ConfigError(f"the workers of a cluster must have different names, not {', '.join(names)}")
    return names


def _after_fork() -> None:
    global _open
    if _open is not None and _open._state == "open":
        _open._abandon()
    _open = None


os.register_at_fork(after_in_child=_after_fork)
