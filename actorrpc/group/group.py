"""How this process joins a group, waits for the others at its end, and leaves.

Joining binds the sockets, agrees on the key and the table of workers, and makes the agent: through torch's store
(:func:`join`). In a cluster, the key and a :class:`MemberDirectory` are given to :func:`enter`.

Leaving a fixed group gracefully is a barrier: every worker calls the first living worker (by name), which answers when all have
arrived. Until then, each worker continues to serve calls. A worker that dies counts as arrived; if the first worker dies, the
others call the next worker. A failed connection does not count as a death: workers that disagree about which members live would
call different first workers.

A worker learns of another worker's end from a connection to that worker: :meth:`Reachability.connect_all` makes the missing
connections, in pool threads, concurrently. A member is *out of reach* while it is suspect, or while connections to it fail
although there is no proof that it is dead. If a member was out of reach for ``PATIENCE_S``, the other members do not call it as
the first worker, until it can be reached again. If all missing members were out of reach for so long, the barrier stops waiting
for these members. Operations on the dicts of :class:`Reachability` are atomic, without a lock.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from actorrpc import _time
from actorrpc._exceptions import undo_on_error
from actorrpc.agent import hooks
from actorrpc.agent.agent import Agent
from actorrpc.agent.context import current_worker
from actorrpc.agent.executor import Deferred
from actorrpc.agent.peers import Peer, state_of
from actorrpc.config import Settings, host_and_port, ports_of
from actorrpc.errors import (
    ConfigError,
    DeadlockError,
    LimitError,
    PeerDiedError,
    ProtocolError,
    RpcError,
    RpcTimeoutError,
    UnknownWorkerError,
)
from actorrpc.flight_recorder import OWN
from actorrpc.futures import Future
from actorrpc.group.dynamic import DynamicRendezvous
from actorrpc.group.fixed import FixedRendezvous
from actorrpc.group.gpus import visible_gpus
from actorrpc.group.rendezvous import Membership, check_device_maps
from actorrpc.serialization.by_value import note_main
from actorrpc.transport.stream import CLOSED
from actorrpc.wire import keys
from actorrpc.wire.identity import WorkerRecord, host_identity, main_identity, new_incarnation
from actorrpc.wire.keys import Key

__all__ = [
    "DIAL_S",
    "PATIENCE_S",
    "CollectiveWait",
    "Group",
    "MemberDirectory",
    "Reachability",
    "close_abandoned",
    "enter",
    "is_loopback",
    "join",
]

_log = logging.getLogger("actorrpc.group")
_AGAIN_S: Final = 0.1
_LOOK_S: Final = 1.0  # how often a worker that waits at shutdown checks the other workers
# How long threads in user code may take to end at shutdown. With the other waits, a shutdown takes less than 1 s after Ctrl-C,
# and less than 2 s with graceful=False.
_LET_END_S: Final = 0.75
_PARTING_S: Final = 5.0  # how long sending GOODBYE to all peers may take at a graceful shutdown
# If a thread handles an exception while it waits for so many seconds, it logs the exception: Python shows it only after the wait.
_SILENT_S: Final = 2.0


class _Barrier:
    """The workers that have called ``shutdown()``, as far as this worker knows. ``_lock`` guards all attributes and is a leaf.

    A shutdown has the stages 0 and 1. A worker goes to stage 1 after an answer that all workers had reached stage 0; the worker
    that gave the answer may have ended since. Therefore a worker that has reached a stage counts as arrived at earlier stages.

    Args:
        members: the names of the awaited workers.
    """

    def __init__(self, members: frozenset[str]) -> None:
        self._members = members
        self._lock = threading.Lock()
        self._reached: dict[int, set[str]] = {}
        self._waiting: dict[int, list[Future[None]]] = {}
        self._gone: set[str] = set()

    def arrive(self, stage: int, name: str) -> Future[None]:
        """Record that a worker has reached a stage; the returned future completes when all workers have reached it."""
        future: Future[None] = Future()
        future.label = "the arrival of every worker at shutdown"
        with self._lock:
            self._waiting.setdefault(stage, []).append(future)
        self.reached(stage, name)
        return future

    def reached(self, stage: int, name: str) -> None:
        """Record that a worker has reached a stage. Unlike :meth:`arrive`, this method returns no future to wait for."""
        with self._lock:
            self._reached.setdefault(stage, set()).add(name)
        self._look()

    def gone(self, name: str) -> None:
        """Record that a worker has ended, so that the others do not wait for this worker."""
        with self._lock:
            self._gone.add(name)
        self._look()

    def missing(self, stage: int) -> list[str]:
        """Return the names of the workers that have not reached the stage and are not known to have ended, sorted."""
        with self._lock:
            return sorted(self._lacking(stage))

    def _lacking(self, stage: int) -> Set[str]:
        """Return the result of :meth:`missing` as a set. Called under the lock."""
        here = {name for at, names in self._reached.items() if at >= stage for name in names}
        return self._members - self._gone - here

    def _may_be_all(self, stage: int) -> bool:
        """Say whether enough workers have arrived or ended; if not, :meth:`_lacking` is not needed. Called under the lock."""
        reached = sum(len(names) for at, names in self._reached.items() if at >= stage)
        return reached + len(self._gone) >= len(self._members)

    def _look(self) -> None:
        ready: list[Future[None]] = []
        with self._lock:
            for stage, waiting in self._waiting.items():
                if waiting and self._may_be_all(stage) and not self._lacking(stage):
                    ready.extend(waiting)
                    waiting.clear()
        for future in ready:
            future.try_complete(None)


@dataclass(slots=True, eq=False)
class CollectiveWait:
    """A wait of this worker until other members have entered the same round of a collective operation.

    Attributes:
        round: the name of the round in messages, which is the same on every worker that enters the round.
        members: the workers that take part; empty: every member of the group.
        begun: when the wait began, as ``_time.now()``.
        thread: the id of the waiting thread.
    """

    round: str
    members: Set[str]
    begun: float
    thread: int

    def includes(self, name: str) -> bool:
        """Say whether a worker takes part in this round."""
        return not self.members or name in self.members


class MemberDirectory(Membership):
    """The workers of a cluster by name and rank. Thread-safe, because single operations on ``records`` are atomic.

    Attributes:
        records: the workers that are known in this process, each under its name and under its rank.
    """

    def __init__(self) -> None:
        self.records: dict[str | int, WorkerRecord] = {}

    def add(self, record: WorkerRecord) -> None:
        """Add a worker, and remove a former worker of the same name."""
        former = self.records.get(record.name)
        if former is not None:
            self.remove(former)
        self.records[record.name] = self.records[record.rank] = record

    def remove(self, record: WorkerRecord) -> None:
        """Remove a worker."""
        self.records.pop(record.name, None)
        self.records.pop(record.rank, None)

    def resolve(self, to: str | int) -> WorkerRecord | None:
        """Return the record of a worker by name or rank; None if there is none."""
        return self.records.get(to)

    def members(self) -> list[WorkerRecord]:
        """Return the records of all workers, by rank."""
        found = [each for key, each in self.records.copy().items() if isinstance(key, str)]
        return sorted(found, key=lambda each: each.rank)


class Group:
    """This worker's membership in one group."""

    def __init__(
        self,
        agent: Agent,
        membership: Membership,
        members: frozenset[str] | None,
        doors: _Doors,
        start: Callable[[], None],
    ) -> None:
        self.agent = agent
        self._doors = doors
        self._start = start
        self._together = False
        self.membership = membership
        self.is_fixed = members is not None
        self._everyone = members or frozenset()
        self._in_order = sorted(self._everyone)
        self.barrier = _Barrier(self._everyone)
        self.reach = Reachability(agent)
        self.waits: list[CollectiveWait] = []  # changed by single, atomic steps
        self._logged = 0  # the id() of the last exception that waiting() has logged
        agent.on_peer_end.append(self._ended)

    def _ended(self, peer: Peer) -> None:
        self.reach.forget(peer)
        # Workers of a dynamic group do not wait for each other at shutdown, and no worker waits for visitors.
        if self.is_fixed and not peer.record.is_visitor:
            self.barrier.gone(peer.name)

    def start(self) -> None:
        """Begin to serve calls. The caller must have installed all handlers before, because calls may be waiting already."""
        self._start()

    # -- collective waits ----------------------------------------------------------------------------

    @contextmanager
    def waiting(self, round: str, members: Set[str] = frozenset()) -> Iterator[Callable[[], None]]:
        """Record a wait in :attr:`waits` while the ``with`` block runs.

        Yields a function that the waiting loop calls about once a second. After 2 s, the function logs the exception that the
        waiting thread handles, once: a ``shutdown()`` in a ``finally`` delays its traceback until all workers have arrived.
        """
        error = sys.exception()
        wait = CollectiveWait(round, members, _time.now(), threading.get_ident())
        self.waits.append(wait)

        def look() -> None:
            if error is not None and id(error) != self._logged and _time.now() - wait.begun >= _SILENT_S:
                self._logged = id(error)
                _log.error(
                    "worker %r waits for other workers in %s, while it handles this exception:",
                    self.agent.name,
                    round,
                    exc_info=error,
                )

        try:
            yield look
        finally:
            self.waits.remove(wait)

    # -- the end -----------------------------------------------------------------------------------

    def wait_for_all(self, stage: int, timeout: float) -> None:
        """Wait until all workers of a fixed group that live and can be reached are at this stage. Return at once in other groups.

        Raises:
            RpcTimeoutError: some workers have not reached the stage within ``timeout`` seconds (0: no limit).
        """
        hooks.reach("shutdown.let_go" if stage else "shutdown.called")
        if not self.is_fixed:
            self._together = True
            return
        until = _time.now() + timeout if timeout else float("inf")
        # Recorded here as well, because the other workers call this worker after all members before it (by name) have ended.
        self.barrier.reached(stage, self.agent.name)
        with self.waiting(f"shutdown (stage {stage})") as look:
            while True:
                peer = self._first_alive()
                if peer.is_self:
                    self.watch_all()
                future = self._report_stage(peer, stage, until)
                if self._await_answer(future, peer, stage, until, look):
                    hooks.reach("shutdown.settled" if stage else "shutdown.together")
                    self._together = True
                    return
                if _time.now() >= until:
                    missing = ", ".join(self.barrier.missing(stage)) if peer.is_self else "some"
                    raise RpcTimeoutError(
                        f"shutdown of {self.agent.name!r}: not every worker called shutdown within {timeout} s (missing: "
                        f"{missing}); this worker is shut down all the same, and ends the calls that others make to it",
                        worker=peer.name,
                    )

    def _first_alive(self) -> Peer:
        """Return the first member, by name, that is alive and was not given up; this worker, if no member before it is."""
        # All known peers are checked, so that PATIENCE_S begins now for all peers out of reach, not for one after the other.
        # No Peer objects are made for the other members, of which there may be thousands.
        known = [peer for peer in self.agent.peers() if peer.name in self._everyone]
        lost = {peer.name for peer in known if peer.state == "alive" and self.reach.is_given_up(peer)}
        for name in self._in_order:
            if name not in lost and (peer := self.agent.peer(name)).state == "alive":
                return peer
        return self.agent.self_peer

    def _report_stage(self, peer: Peer, stage: int, until: float) -> Future[None] | None:
        """Tell a member, after connecting to it, that this worker has reached a stage of the shutdown.

        Returns:
            a future that completes when all members have reached the stage; None if the member cannot be reached.
        """
        agent = self.agent
        future: Future[None] = Future()
        try:
            if not peer.is_self:
                agent.connector.connect(peer, min(until, _time.now() + DIAL_S), "shutdown")
            agent.call(peer, _on_arrival, (stage, agent.name), {}, 0.0, future=future, label=f"{OWN}shutdown")
        except (PeerDiedError, RpcTimeoutError, ProtocolError, LimitError) as error:
            # The error does not prove that the member is dead. The caller checks the member's state next.
            self.reach.failed(peer, error)
            self.watch_all()  # other members may be out of reach as well: connect to all members at once
            _time.sleep(_AGAIN_S)
            return None
        return future

    def _await_answer(
        self, future: Future[None] | None, peer: Peer, stage: int, until: float, look: Callable[[], None]
    ) -> bool:
        """Wait for the answer of the member ``peer``; return False if none came: the caller calls a member again, or times out.

        About once a second, this method calls ``look`` (from :meth:`waiting`). If ``peer`` is this worker, it also gives up
        missing members that were out of reach for too long. It then checks whether ``peer`` is still the first living member.
        """
        while future is not None:
            look()
            try:
                future.wait(min(_LOOK_S, max(0.0, until - _time.now())))
                return True
            except PeerDiedError:
                return False
            except DeadlockError:
                # All threads of the peer are blocked, perhaps for a short time only: pause before the caller calls again.
                _time.sleep(_AGAIN_S)
                return False
            except RpcTimeoutError:
                if not future.done():
                    # Only this wait has timed out. (A future that is done has failed because the call itself timed out.)
                    if peer.is_self:
                        self._review(stage)
                    if _time.now() >= until or self._first_alive() is not peer:
                        future.cancel()
                        return False
                elif future.exception() is not None:
                    raise
        return False

    def _review(self, stage: int) -> None:
        """Stop waiting for the missing members if all of them have been out of reach for ``PATIENCE_S``."""
        missing = [self.agent.peer(name) for name in self.barrier.missing(stage)]
        self.reach.connect_all(missing)
        given_up = [self.reach.is_given_up(peer) for peer in missing if peer.state == "alive"]
        if missing and all(given_up):
            for peer in missing:
                if peer.state == "alive":
                    _log.warning(
                        "shutdown does not wait for %r any longer: %s", peer.name, self.reach.why(peer)
                    )
                self.barrier.gone(peer.name)

    def watch_all(self) -> None:
        """Begin to connect to every worker of the group, so that this worker notices when a worker ends. Returns at once.

        Raises:
            RpcError: the members of the group are not known (only in dynamic groups).
        """
        names = self._in_order or [record.name for record in self.agent.members()]
        peers: list[Peer] = []
        for name in names:
            try:
                peers.append(self.agent.peer(name))
            except (UnknownWorkerError, PeerDiedError):  # the worker has left meanwhile
                continue
        for peer in peers:
            if peer.state != "alive":
                self.barrier.gone(peer.name)
        self.reach.connect_all(peers)

    def close(self) -> None:
        """Leave the group, and close the agent and its sockets."""
        try:
            hooks.reach("shutdown.closing")
        finally:
            self._close()
        hooks.reach("shutdown.closed")

    def _close(self) -> None:
        try:
            self.membership.leave()
        except RpcError as error:
            _log.info("the store through which the workers met has ended: %s", error)
        if self._together:  # otherwise the shutdown is forced, and has no time to wait
            self.agent.close(_LET_END_S, max(_LET_END_S, min(_PARTING_S, self.agent.leave_by - _time.now())))
        else:
            self.agent.close(_LET_END_S)
        self._doors.close()
        self.membership.close()


def _on_arrival(stage: int, name: str) -> Any:
    """Answer when all members have reached the stage. Members call this function on the first living member."""
    worker = current_worker()
    if worker is None or worker.group is None:
        return None
    return Deferred(worker.group.barrier.arrive(stage, name))


# -- joining ---------------------------------------------------------------------------------------


def _listen_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    with undo_on_error(sock.close):
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(512)
    return sock


def _listen_tcp(host: str, port: int | str) -> socket.socket:
    problem = OSError()
    for number in ports_of(port):
        try:
            return _listen_at(host, number)
        except OSError as error:
            problem = error
            if error.errno != errno.EADDRINUSE:
                break
    if isinstance(port, str) and problem.errno == errno.EADDRINUSE:
        raise ConfigError(
            f"cannot listen on {host!r}: no port of the range {port} is free. Each worker of a host needs a port of its own: "
            "choose a larger range (ACTORRPC_PORT or port=)"
        ) from problem
    raise ConfigError(
        f"cannot listen on {host!r} port {port}: {problem}. Choose another port or address: in listen=, or with port= "
        "and bind= (ACTORRPC_PORT, ACTORRPC_BIND)"
    ) from problem


def _listen_at(host: str, port: int) -> socket.socket:
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
    with undo_on_error(sock.close):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(512)
    return sock


def is_loopback(host: str) -> bool:
    """Say whether an address can only be reached from this host. A name is resolved."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        pass
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in found)


class _Doors:
    """The listening sockets of a worker and their addresses."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []
        self.unix_path: str | None = None
        self.tcp: tuple[tuple[str, int], ...] = ()
        _opened.append(self)

    def open(self, settings: Settings, own: str | None, has_key: bool) -> None:
        """Bind the sockets that the settings allow, for this host's address ``own``.

        Raises:
            ConfigError: TCP beyond this host was requested without a key, or the address cannot be bound.
        """
        if settings.transport != "tcp":
            # The path is set before the file exists, so that close() also removes the file if Ctrl-C interrupts the next line.
            self.unix_path = keys.socket_path(keys.runtime_directory())
            self.sockets.append(_listen_unix(self.unix_path))
        host = settings.bind or own
        if settings.transport == "unix" or (host is None and settings.transport != "tcp"):
            return
        host = host or "127.0.0.1"
        if not is_loopback(host) and not has_key and not settings.insecure:
            if settings.bind is None and settings.transport == "auto":
                return  # on one host, Unix sockets are enough, and other users cannot connect to them
            raise ConfigError(
                f"this worker would listen on {host!r}, where others can reach it, without a key. Give every worker the same key "
                f"(ACTORRPC_KEY, ACTORRPC_KEY_FILE or key=), or set insecure=True if the network is yours alone"
            )
        if is_loopback(host) and settings.transport != "tcp" and settings.bind is None:
            return
        if not has_key and settings.insecure:  # warn for loopback, too: other users of this host can reach it
            who, how = "every process", "not encrypted"
            if settings.tls_cert:
                who, how = "every process with a certificate of the CA", "encrypted"
            elif settings.tls:
                how = "encrypted, but not authenticated"
            _log.warning(
                "listening on %s WITHOUT a key: %s that reaches this port can run code as this user; connections are %s",
                host,
                who,
                how,
            )
        sock = _listen_tcp(host, settings.port)
        self.sockets.append(sock)
        bound = sock.getsockname()
        shown, port = host_and_port(settings.advertise) if settings.advertise else (None, None)
        if shown is None:
            shown = own if bound[0] in ("0.0.0.0", "::") and own else bound[0]
        if len(bound) == 4 and bound[3] and "%" not in shown and shown.startswith("fe80"):
            shown = f"{shown}%{socket.if_indextoname(bound[3])}"
        self.tcp = ((shown, port or bound[1]),)

    def close(self) -> None:
        """Close the sockets, and remove the file of the Unix socket."""
        for sock in self.sockets:
            sock.close()
        if self.unix_path is not None:
            keys.remove_file(self.unix_path)
        if self in _opened:
            _opened.remove(self)

    def record(self, name: str, rank: int, host: str, main: str) -> WorkerRecord:
        """Return the record of a new run of this process, which listens on these sockets."""
        return WorkerRecord(
            name=name,
            rank=rank,
            incarnation=new_incarnation(),
            host=host,
            unix_path=self.unix_path,
            tcp=self.tcp,
            pid=os.getpid(),
            main=main,
            gpus=tuple(visible_gpus(torch.cuda.device_count())),
            hostname=socket.gethostname(),
        )


_opened: list[_Doors] = []


def close_abandoned() -> None:
    """Close the sockets and files of groups whose creation was interrupted by Ctrl-C: no caller has these groups."""
    while _opened:
        _opened.pop().close()


def join(
    name: str,
    rank: int,
    world_size: int | None,
    store: Any,
    *,
    settings: Settings,
    key: Key | None,
    timeout: float,
    devices: tuple[str, ...] = (),
    maps: tuple[tuple[str, str, str], ...] = (),
) -> Group:
    """Join the group that meets at ``store``; the caller has to call :meth:`Group.start`.

    In a fixed group, the other ranks return from this function when rank 0 calls :meth:`Group.start`.

    Args:
        devices: the devices that the options allow; empty: all devices.
        maps: ``(worker, device here, device there)``, as in :class:`WorkerRecord`.

    Raises:
        RendezvousError, AuthenticationError, ConfigError: joining has failed. All sockets, files and threads were closed.
    """
    keys.sweep()
    own_key = key if key is not None else keys.find_key()
    rendezvous: FixedRendezvous | DynamicRendezvous
    if world_size is None:
        rendezvous = DynamicRendezvous(store, timeout=timeout)
    else:
        rendezvous = FixedRendezvous(store, size=world_size, timeout=timeout)
        if rank == 0:  # all others connect to rank 0 at once
            settings = replace(settings, max_unauthenticated=max(settings.max_unauthenticated, world_size))
    doors = _Doors()
    with undo_on_error(doors.close, rendezvous.close):
        doors.open(settings, rendezvous.own_address(), own_key is not None)
        note_main()
        record = replace(
            doors.record(name, rank, host_identity(), main_identity()),
            devices=devices,
            device_maps=maps,
            data_only=settings.data_only,
        )
        hooks.reach("join.listening", name)
        if isinstance(rendezvous, FixedRendezvous):
            key = rendezvous.enter(record, own_key, settings)
        else:
            record, key = rendezvous.enter(record, own_key, settings)
            if maps or devices:
                check_device_maps([record], rendezvous.resolve, fixed=False)
        agent = Agent(
            record, settings=settings, key=key, resolve=rendezvous.resolve, members=rendezvous.members
        )
        with undo_on_error(agent.close):
            start: Callable[[], None] = partial(agent.start, doors.sockets)
            members: frozenset[str] | None = None
            if isinstance(rendezvous, FixedRendezvous):
                if rank == 0:
                    start = rendezvous.publish
                    rendezvous.gather(agent, doors.sockets)
                members = frozenset(each.name for each in rendezvous.members())
            hooks.reach("join.met", name)
    return Group(agent, rendezvous, members, doors, start)


def enter(
    name: str,
    rank: int,
    directory: MemberDirectory,
    *,
    settings: Settings,
    key: Key,
    host: str | None = None,
    serves: bool = False,
) -> Group:
    """Enter the group of a cluster, whose members ``directory`` lists.

    This function opens the sockets and makes the agent. The caller registers the worker and calls :meth:`Group.start`.

    Args:
        host: the identity of this host; by default its real identity.
        serves: this process does not run its script to the end. Objects that the script defines further down are missing in its
            main module, so functions of the main module are not sent to this worker by name.

    Raises:
        ConfigError: no socket can be made.
    """
    doors = _Doors()
    with undo_on_error(doors.close):
        doors.open(settings, None, True)
        note_main(one_script=False)
        made = doors.record(name, rank, host or host_identity(), "" if serves else main_identity())
        record = replace(made, device_maps=None)
        agent = Agent(
            record, settings=settings, key=key, resolve=directory.resolve, members=directory.members
        )
    return Group(agent, directory, None, doors, partial(agent.start, doors.sockets))


DIAL_S: Final = 2.0
"""How long one attempt to connect may take, in seconds: as long as a forced shutdown may take."""

PATIENCE_S: Final = 10.0
"""How long a member may be out of reach, in seconds, before the others stop waiting for it."""


class Reachability:
    """Records which members can be reached, and connects to members. Thread-safe."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._failed: dict[str, str] = {}
        self._since: dict[str, float] = {}
        self._dialling: dict[str, None] = {}

    def failed(self, peer: Peer, error: RpcError) -> None:
        """Record that connecting to a peer has failed."""
        if peer.state == "alive":
            self._failed[peer.name] = peer.out_of_reach or str(error)

    def forget(self, peer: Peer) -> None:
        """Remove an ended peer."""
        self._failed.pop(peer.name, None)
        self._since.pop(peer.name, None)

    def connect_all(self, peers: Iterable[Peer]) -> None:
        """Begin to connect to those peers that have no connection. Returns at once."""
        for peer in peers:
            self._connect(peer)

    def _connect(self, peer: Peer) -> None:
        conn = peer.conn
        if peer.is_self or peer.state != "alive" or (conn is not None and conn.state is not CLOSED):
            return
        if peer.name not in self._dialling:
            self._dialling[peer.name] = None
            self._agent.submit(partial(self._dial, peer))

    def _dial(self, peer: Peer) -> None:
        try:
            self._agent.connector.connect(peer, _time.now() + DIAL_S, "shutdown")
        except (RpcError, OSError) as error:
            self.failed(peer, error if isinstance(error, RpcError) else RpcError(str(error)))
        finally:
            self._dialling.pop(peer.name, None)

    def is_given_up(self, peer: Peer) -> bool:
        """Say whether a peer has been out of reach for ``PATIENCE_S``; if it is out of reach, try to connect again.

        A waiting thread calls this method repeatedly: the time runs from the first call that finds the peer out of reach.
        """
        conn = peer.conn
        if conn is not None and conn.state is not CLOSED:
            self._failed.pop(peer.name, None)
        if peer.is_self or not (peer.name in self._failed or state_of(peer) == "suspect"):
            self._since.pop(peer.name, None)
            return False
        self._connect(peer)
        now = time.monotonic()
        return now - self._since.setdefault(peer.name, now) >= PATIENCE_S

    def why(self, peer: Peer) -> str:
        """Describe the problem of a peer that is out of reach."""
        return self._failed.get(peer.name) or f"it is {state_of(peer)}"
