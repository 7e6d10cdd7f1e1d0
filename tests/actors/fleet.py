"""A simulated group of workers in one thread: real routes and supervisors, with fake network, actors and processes.

Everything that would run on a thread is a task of the world. The seed determines which task runs next and which
connection delivers next. Messages of a connection keep their order, deaths may be noticed at any time, and time
passes only when no task is left.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from actorrpc.actors.client.route import Route, Routes
from actorrpc.actors.host.mailbox import Entry, Mailbox
from actorrpc.actors.spec.actor_spec import DeathReport, HostedActorGoneError
from actorrpc.actors.spec.class_info import ClassInfo
from actorrpc.actors.spec.options import ActorOptions, CallOptions
from actorrpc.actors.supervision import supervisor as supervisors
from actorrpc.actors.supervision.names import Names
from actorrpc.actors.supervision.supervisor import Supervisor
from actorrpc.agent import calls
from actorrpc.agent.calls import CURRENT, INFINITE
from actorrpc.agent.context import Worker as WorkerInForce
from actorrpc.agent.context import set_worker
from actorrpc.agent.executor import Deferred
from actorrpc.agent.hooks import HookSet, Recorder
from actorrpc.config import Settings
from actorrpc.errors import CancelledError, PeerDiedError, RpcTimeoutError, UnknownWorkerError
from actorrpc.futures import Future, Progress
from actorrpc.serialization import codec, exceptions
from actorrpc.transport.buffers import BufferPool
from actorrpc.wire.identity import WorkerInfo, WorkerKey, WorkerRecord, new_incarnation
from tests.actors.entries import Call
from tests.agent.virtual_clock import VirtualClock

__all__ = ["Counter", "FakeRRef", "Resident", "Worker", "World"]


class Counter:
    """The class of all simulated actors, which are never instances of it."""

    def step(self, number: int = 0) -> int:
        return number

    def other(self, number: int = 0) -> int:
        return number


INFO = ClassInfo.of(Counter)


def raised_there(error: BaseException, worker: str, *, executed: bool = True) -> BaseException:
    """Return an error as it arrives from another worker."""
    data = exceptions.dump(error, worker=worker, dumps=codec.dumps, executed=executed)
    return exceptions.load(data, loads=codec.loads)


class FakeRRef:
    """An RRef without a protocol behind it."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class Clock(VirtualClock):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def call_soon(self, run: Callable[[], Any]) -> None:
        self._world.tasks.append((None, run))

    @property
    def idle(self) -> bool:
        return not any(timer.run is not None for _, _, timer in self._heap)


class FakePeer:
    """A worker as another worker sees it."""

    def __init__(self, owner: Worker, target: Worker) -> None:
        self.owner = owner
        self.target = target
        self.record = target.record
        self.rank = target.record.rank
        self.key = target.key
        self.name = target.record.name
        self.info = target.record.info
        self.is_self = owner is target
        self.conn = None
        self.state = "alive"
        self.cause = self.out_of_reach = ""
        self.pending: dict[int, FakeCall] = {}
        self.out: deque[Callable[[], None]] = deque()

    def died(self, what: str, *, maybe_executed: bool) -> PeerDiedError:
        return PeerDiedError(f"{what}: {self.name} died", maybe_executed=maybe_executed, worker=self.name)

    def check_alive(self, what: str) -> None:
        if self.state != "alive" or self.out_of_reach:
            raise self.died(what, maybe_executed=False)


class FakeCall(Progress):
    """A call in flight, which is the source of its future."""

    def __init__(self, peer: FakePeer, id: int, label: str, future: Future[Any]) -> None:
        self.peer, self.id, self.label, self.future = peer, id, label, future
        self.sent = False
        self.withdrawn = False
        self.done = False
        self.deadline = float("inf")

    def __str__(self) -> str:
        return f"the call of {self.label} on {self.peer.name!r}"

    def fail(self, error: BaseException) -> None:
        future = self.future
        future.try_fail(error, self.peer.owner.agent.submit)
        self.done = True

    def cancel(self, stop: bool = True) -> bool:
        if self.peer.pending.pop(self.id, None) is None:
            return False
        self.withdrawn = not self.sent
        self.fail(CancelledError(f"{self} was cancelled", maybe_executed=self.sent))
        return True

    def expire(self) -> None:
        if self.peer.pending.pop(self.id, None) is not None:
            self.withdrawn = not self.sent
            self.fail(RpcTimeoutError(f"{self} timed out", maybe_executed=self.sent))


class FakeAgent:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.world = worker.world
        self.record = worker.record
        self.name = worker.record.name
        self.clock = worker.world.clock
        self.buffers = BufferPool(0)
        self.on_peer_end: list[Callable[[Any], None]] = []
        self.closed_down = False
        self.recorder = Recorder()
        self.flight_recorder = None
        self.hooks = HookSet()
        self.next_chain = itertools.count(1).__next__
        self.settings = Settings()
        self.peers: dict[int, FakePeer] = {}

    def check_process(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def members(self) -> list[WorkerRecord]:
        return [each.record for each in self.world.workers if not each.forgotten]

    @property
    def self_peer(self) -> FakePeer:
        return self.peer(self.record.rank)

    def submit(self, task: Callable[[], Any]) -> None:
        self.world.tasks.append((self.worker, task))

    def peer(self, to: Any) -> FakePeer:
        for each in self.world.workers:
            if to in (each.record.rank, each.record.name, each.record.info):
                peer = self.peers.get(each.record.rank)
                if peer is None:
                    peer = self.peers[each.record.rank] = FakePeer(self.worker, each)
                    if each.dead:
                        peer.state = "dead"
                return peer
        raise UnknownWorkerError(f"there is no worker {to!r}")

    def call(
        self,
        peer: FakePeer,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        future: Future[Any] | None = None,
        keep: Any = None,
        label: str | None = None,
        mail: Any = None,
    ) -> FakeCall:
        world = self.world
        if self.worker.dead:
            raise Dead
        peer.check_alive(f"cannot call {label}")
        own = future if future is not None else Future()
        call = FakeCall(peer, next(world.ids), label or str(function), own)
        call.keep = (keep, function)
        own.source = call
        own.label = call
        peer.pending[call.id] = call
        if timeout:
            self.clock.after(timeout, partial(self.submit, call.expire))
        peer.out.append(partial(self._deliver, peer, call, function, args, kwargs, mail))
        return call

    def send(self, call: calls.Call, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert not call.awaits, "no simulated call has arguments that are still to come"
        timeout = 0.0 if call.deadline == INFINITE else call.deadline - call.made
        to: Any = call.peer
        self.call(to, function, args, kwargs, timeout, call.future, call.keep, call.label, call.mail)

    def call_sync(self, *call: Any, **options: Any) -> Any:
        future: Future[Any] = Future()
        self.call(*call, future=future, **options)
        return self.world.run_until(future)

    def _deliver(
        self, peer: FakePeer, call: FakeCall, function: Any, args: Any, kwargs: Any, mail: Any
    ) -> None:
        there = peer.target
        if call.withdrawn:
            return
        call.sent = True
        if there.dead:
            return
        back = there.agent.peer(self.record.rank)

        def answer(value: Any, error: BaseException | None, executed: bool = True) -> None:
            if there.dead:
                return
            if error is not None:
                error = raised_there(error, there.record.name, executed=executed)
            back.out.append(partial(self._answered, peer, call, value, error))

        if mail is not None:
            there.deliver(self.worker, mail.header, args, kwargs, answer, call.id)
        else:
            self.world.tasks.append((there, partial(self._execute, back, function, args, kwargs, answer)))

    @staticmethod
    def _execute(back: FakePeer, function: Any, args: Any, kwargs: Any, answer: Any) -> None:
        token = CURRENT.set(SimpleNamespace(peer=back, deadline=float("inf"), cancelled=False, nested=[]))  # type: ignore[arg-type]
        try:
            value = function(*args, **kwargs)
        except Exception as error:
            answer(None, error)
            return
        finally:
            CURRENT.reset(token)
        if type(value) is Deferred:

            def ready(done: Any) -> None:
                done.acknowledge()
                answer(done.value_or_none, done.error)

            value.future.add_done_callback(ready)
        else:
            answer(value, None)

    def _answered(self, peer: FakePeer, call: FakeCall, value: Any, error: BaseException | None) -> None:
        if self.worker.dead or peer.pending.pop(call.id, None) is None:
            return
        if call.future.claim():
            call.future.conclude(value, error, self.submit)
        call.done = True
        for worker in self.world.workers:  # arguments of other calls may wait for it
            for hosted in worker.actors_here.values():
                self.world.tasks.append((worker, hosted.work))

    def peer_ended(self, peer: FakePeer) -> None:
        if peer.state != "alive":
            return
        peer.state, peer.cause = "dead", "its end of the connection closed"
        while peer.pending:
            _, call = peer.pending.popitem()
            call.fail(peer.died(str(call), maybe_executed=call.sent))
        for tell in list(self.on_peer_end):
            tell(peer)


class Dead(BaseException):
    """Ends a task of a dead worker."""


class Resident:
    """An actor that logs its calls."""

    def __init__(self, worker: Worker, spec: Any) -> None:
        self.worker = worker
        self.spec = spec
        self.mailbox = Mailbox()
        self.queue = self.mailbox.queues[""]
        self.ended = False

    @property
    def waiting(self) -> list[Entry]:
        """The waiting calls."""
        return self.queue.entries()

    def enqueue(self, caller: Worker, header: dict[str, Any], args: Any, answer: Any, id: int) -> None:
        """Put a call into the mailbox."""
        entry = Call(
            caller,
            (caller, header, args, answer),
            place=header.get("place", id),
            again="place" in header,
            ready=self.worker.world.is_there(args),
        )
        self.mailbox.put(entry, self.queue)

    def work(self) -> None:
        if self.ended or self.worker.dead:
            return
        world = self.worker.world
        for each in self.waiting:
            if not each.ready and world.is_there(each.payload[2]):
                self.mailbox.ready(each)
                world.tasks.append((self.worker, self.work))
        entry, _ = self.mailbox.dequeue(self.queue)
        if entry is None:
            return
        caller, header, args, answer = entry.payload
        self.mailbox.done(self.queue)
        world.log.append((self.spec.actor_id, self.spec.epoch, caller.record.name, args[0] if args else None))
        outcome = world.behaviour(self, header, args)
        if isinstance(outcome, BaseException):
            answer(None, outcome)
        else:
            answer(outcome, None)

    def end(self) -> None:
        if not self.ended:
            self.worker.world.ended(self)
        self.ended = True
        self.worker.actors_here.pop(self.spec.instance_id, None)
        for entry in self.mailbox.close()[0]:
            _, _, _, answer = entry.payload
            answer(None, HostedActorGoneError(self.spec.instance_id, "ended"), False)


class Worker:
    """A simulated process."""

    def __init__(self, world: World, name: str, rank: int) -> None:
        self.world = world
        self.record = WorkerRecord(name=name, rank=rank, incarnation=new_incarnation(), host="h")
        self.key = WorkerKey(rank, self.record.incarnation)
        self.dead = False
        self.forgotten = False
        self.actors_here: dict[int, Resident] = {}
        self.making: dict[int, Any] = {}  # actors under construction, and how to answer
        self.agent = FakeAgent(self)
        self.runtime: Any = SimpleNamespace(
            agent=self.agent,
            references=SimpleNamespace(me=self.key, default_timeout=lambda: 60.0, collect=lambda: None),
            spawner=world.spawner,
            registry=self,
        )
        self.in_force = WorkerInForce(self.agent)
        self.in_force.actors = self.runtime
        self.runtime.names = Names(self.runtime)
        self.runtime.routes = Routes(self.runtime)
        self.runtime.supervisor = Supervisor(self.runtime, lambda: world.jitter, remembered=world.remembered)

    def deliver(
        self, caller: Worker, header: dict[str, Any], args: Any, kwargs: Any, answer: Any, id: int
    ) -> None:
        if header.get("creates"):
            (spec,) = args
            self.making[spec.instance_id] = answer
            self.world.tasks.append((self, partial(self._construct, spec, answer)))
            return
        hosted = self.actors_here.get(header["mailbox"])
        if hosted is None:
            gone = HostedActorGoneError(header["mailbox"])
            self.world.tasks.append((self, partial(answer, None, gone, False)))
            return
        hosted.enqueue(caller, header, args, answer, id)
        self.world.tasks.append((self, hosted.work))

    def _construct(self, spec: Any, answer: Any) -> None:
        if self.making.pop(spec.instance_id, None) is None:
            return  # ended during construction
        failure = self.world.constructor(spec)
        if failure is not None:
            answer(None, failure)
            return
        self.actors_here[spec.instance_id] = Resident(self, spec)
        answer(1000 + self.record.rank, None)

    def get(self, instance_id: int) -> Any:
        """Like ActorRegistry.get, for ``registry.stop``."""
        hosted = self.actors_here.get(instance_id)
        if hosted is None:
            return (
                SimpleNamespace(stop=partial(self._give_up, instance_id))
                if instance_id in self.making
                else None
            )

        def stop(how: str, why: str) -> Future[None]:
            over: Future[None] = Future()

            def step() -> None:
                if how == "drain" and hosted.waiting and not hosted.ended:
                    hosted.work()
                    self.world.tasks.append((self, step))
                    return
                hosted.end()
                over.set_result(None)

            step()
            return over

        return SimpleNamespace(stop=stop)

    def _give_up(self, instance_id: int, how: str, why: str) -> Future[None]:
        """End an actor under construction."""
        over: Future[None] = Future()
        self.making.pop(instance_id)(None, HostedActorGoneError(instance_id, why), False)
        over.set_result(None)
        return over

    def die(self) -> None:
        """End at once; the other workers notice it later."""
        if self.dead:
            return
        for hosted in self.actors_here.values():
            self.world.ended(hosted)
        self.dead = True
        for peer in self.agent.peers.values():
            # Any number of the messages that were sent may still arrive.
            keep = self.world.random.randint(0, len(peer.out))
            while len(peer.out) > keep:
                peer.out.pop()
        for other in self.world.workers:
            if other is not self:
                seen = other.agent.peers.get(self.record.rank)
                if seen is not None:
                    self.world.tasks.append((other, partial(self._notice_death, other, seen)))
        done = self.world.reports.pop(self.record.name, None)
        if done is not None:
            done.set_result(DeathReport(worker=self.record.name, pid=7, signal=9, stderr=("last words",)))

    def _notice_death(self, other: Worker, seen: FakePeer) -> None:
        back = self.agent.peers.get(other.record.rank)
        if back is not None and back.out:  # messages are delivered first
            self.world.tasks.append((other, partial(self._notice_death, other, seen)))
            return
        other.agent.peer_ended(seen)


class Spawner:
    """Starts simulated workers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.released: list[str] = []
        self.refuse = False

    def spawn(self, spec: Any) -> Future[WorkerInfo]:
        future: Future[WorkerInfo] = Future()

        def start() -> None:
            if self.refuse:
                future.set_exception(OSError("no more processes"))
                return
            worker = self.world.add(f"{spec.label}-{len(self.world.workers)}")
            self.world.reports[worker.record.name] = Future()
            future.set_result(worker.record.info)

        self.world.tasks.append((None, start))
        return future

    def _of(self, name: str) -> Worker:
        return next(each for each in self.world.workers if each.record.name == name)

    def release(self, name: str) -> None:
        self.released.append(name)
        self._of(name).forgotten = True

    def kill(self, name: str) -> None:
        self._of(name).die()

    def owns(self, name: str) -> bool:
        return "-" in name

    def report(self, name: str) -> Future[DeathReport]:
        future = self.world.reports.get(name)
        if future is None:
            future = Future()
            future.set_result(DeathReport(worker=name, pid=7, signal=9, stderr=("last words",)))
        return future


class World:
    """The simulated group.

    Attributes:
        log: ``(actor_id, epoch, caller, first argument)`` of each executed call, in order.
        behaviour: returns the result of a method, or the exception that it raises.
        is_there: returns whether the arguments of a call are ready.
        constructor: returns the exception that a constructor raises, or None.
        ended: is called with each actor that ends, or whose worker dies.
        remembered: of how many dead actors each supervisor keeps the record.
        jitter: the number from 0 to 1 that back-off draws.
    """

    def __init__(
        self, monkeypatch: Any, seed: int, workers: int = 3, spawner: bool = False, remembered: int = 10_000
    ) -> None:
        self.random = random.Random(seed)
        self.jitter = 0.0
        self.remembered = remembered
        self.ids = itertools.count(1)
        self.tasks: list[tuple[Worker | None, Callable[[], Any]]] = []
        self.clock = Clock(self)
        self.log: list[tuple[int, int, str, Any]] = []
        self.reports: dict[str, Future[DeathReport]] = {}
        self.is_there: Callable[[Any], bool] = lambda args: True
        self.behaviour: Callable[[Resident, dict[str, Any], Any], Any] = lambda hosted, header, args: args[0]
        self.constructor: Callable[[Any], BaseException | None] = lambda spec: None
        self.ended: Callable[[Resident], object] = lambda hosted: None
        self.workers: list[Worker] = []
        self.spawner = Spawner(self) if spawner else None
        monkeypatch.setattr(supervisors, "RRef", FakeRRef)
        self.current: Worker | None = None
        for number in range(workers):
            self.add(f"w{number}")

    def add(self, name: str) -> Worker:
        worker = Worker(self, name, len(self.workers))
        self.workers.append(worker)
        return worker

    # -- actions of users -------------------------------------------------------------------------------

    def on(self, worker: Worker) -> None:
        """Make this worker the current one."""
        self.current = worker
        set_worker(worker.in_force)

    def create(self, worker: Worker, /, **options: Any) -> Route:
        self.on(worker)
        descriptor = worker.runtime.supervisor.create(Counter, INFO, ActorOptions().merged(**options), (), {})
        return worker.runtime.routes.of(descriptor)

    def call(
        self, worker: Worker, route: Route, *args: Any, method: str = "step", **options: Any
    ) -> Future[Any]:
        self.on(worker)
        given = CALL if not options else CallOptions().merged(**options)
        return route.call(INFO.methods[method], given, args, {}, refs=True)

    # -- time --------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one task or deliver one message; return False if there is none."""
        links = [
            (worker, peer) for worker in self.workers for peer in worker.agent.peers.values() if peer.out
        ]
        total = len(self.tasks) + len(links)
        if not total:
            return False
        choice = self.random.randrange(total)
        if choice < len(self.tasks):
            worker, task = self.tasks.pop(choice)
            if worker is not None and worker.dead:
                return True
            self._run(worker, task)
        else:
            worker, peer = links[choice - len(self.tasks)]
            self._run(peer.target, peer.out.popleft())
        return True

    def _run(self, worker: Worker | None, task: Callable[[], Any]) -> None:
        before = self.current
        if worker is not None:
            self.on(worker)
        try:
            task()
        except Dead:
            pass
        finally:
            if before is not None:
                self.on(before)

    def settle(self, seconds: float = 60.0) -> None:
        """Run everything that happens within a number of seconds."""
        until = self.clock.now() + seconds
        while True:
            while self.step():
                pass
            if self.clock.now() >= until or self.clock.idle:
                return
            self.clock.advance(0.05)

    def run_until(self, future: Future[Any]) -> Any:
        for _ in range(100_000):
            if future.done():
                return future.wait()
            if not self.step():
                self.clock.advance(0.05)
        raise AssertionError(f"{future} never ends")


CALL = CallOptions()
