"""A simulated group of RRef tables in one thread: random programs over a network that reorders, repeats and loses messages.

Each worker consists of an :class:`RRefTable` and the handles that its simulated user code holds. A :class:`World` plays a
random program: creations (local, remote, failing, timed out), RRefs in arguments, results and values, drops, fetches,
messages that cannot be sent or decoded, deaths and restarts. Messages between two workers wait in a queue. A random queue
(and, without ``fifo``, a random message of it) moves next. Control messages are repeated, and sent again if lost. Calls arrive
at most once, or never if a worker dies.

The world keeps its own list of the holders of each value, and raises :class:`Violation` if a value is freed that a worker still
holds, if a fetch through a live handle does not return the value or never ends, if a function starts before its RRefs are
confirmed, or if an entry is left after all handles were dropped. Handles sent by a worker that died before the owner knew them
may fail, but must neither hang nor leak.

The seed determines everything: ``World(Script.of(seed)).play()`` repeats a program.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from actorrpc.errors import PeerDiedError, RpcTimeoutError
from actorrpc.rpc.refcount import messages as msg
from actorrpc.rpc.refcount.protocol import Effects, Handle, Outcome, RRefTable
from actorrpc.wire.identity import WorkerKey

__all__ = ["Script", "Violation", "World", "play"]


class Violation(AssertionError):
    """The protocol broke a promise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The kind of program and network to play."""

    seed: int
    workers: int = 3
    steps: int = 60
    fifo: bool = True
    twice: bool = False  # every control message is handled twice in succession
    repeats: float = 0.0  # the probability that a control message arrives again later
    losses: float = 0.0
    deaths: int = 0
    tombstones: int = 10_000
    eager: float = 0.0  # the probability that an RRef is dropped as soon as it was sent
    slow: bool = False  # half of the connections are much slower than the others
    wire: bool = False  # messages are packed into bytes
    shutdown: bool = False  # end with delete_all_users and close, not with drops

    @classmethod
    def of(cls, seed: int) -> Script:
        """Draw a script from a seed."""
        rng = random.Random(seed)
        return cls(
            seed=seed,
            workers=rng.randint(2, 5),
            steps=rng.choice((20, 50, 100, 200)),
            fifo=rng.random() < 0.4,
            twice=rng.random() < 0.3,
            repeats=rng.choice((0.0, 0.0, 0.2, 0.5)),
            losses=rng.choice((0.0, 0.0, 0.2, 0.5)),
            deaths=rng.choice((0, 0, 0, 1, 3)),
            tombstones=rng.choice((10_000, 10_000, 3)),
            eager=rng.choice((0.0, 0.3, 0.8)),
            slow=rng.random() < 0.5,
            wire=rng.random() < 0.2,
            shutdown=rng.random() < 0.2,
        )


@dataclass(eq=False, slots=True)
class Token:
    """The world's record of a live handle, or of a fork in flight."""

    rref_id: msg.RRefId
    holder: WorkerKey
    parent: Token | None
    confirmed: bool = False
    tainted: bool = False  # sent by a worker that died before the owner knew the fork: it may fail
    fork_id: msg.ForkId | None = None


@dataclass(eq=False, slots=True)
class Ref:
    """Stands for an RRef object."""

    worker: Worker
    handle: Handle
    token: Token
    uses: int = 0
    dropped: bool = False

    def drop(self) -> None:
        self.dropped = True
        if self.uses == 0 and self.worker.alive:
            self.worker.world.end(self.token)
            self.worker.table.drop_later(self.handle)


class Value:
    """A user's object: must not be compared, hashed or printed; its finaliser drops RRefs."""

    __slots__ = ("__weakref__", "held", "owner", "rref_id")

    def __init__(self, owner: Worker, rref_id: msg.RRefId, held: list[Ref]) -> None:
        self.owner = owner
        self.rref_id = rref_id
        self.held = held

    def __del__(self) -> None:
        self.owner.world.freed(self)

    def _forbidden(self, *_: object) -> Any:
        raise AssertionError("the protocol used a value")

    __eq__ = __hash__ = __repr__ = __bool__ = __len__ = _forbidden


class Worker:
    """One incarnation of a worker."""

    def __init__(self, world: World, key: WorkerKey, table: RRefTable) -> None:
        self.world = world
        self.key = key
        self.table = table
        self.alive = True
        self.refs: list[Ref] = []
        self.running: list[Callable[[], None]] = []  # functions that have started and not finished
        self.waiting: dict[int, Any] = {}  # functions that wait for their arguments
        self.fetches: dict[int, tuple[Ref, WorkerKey]] = {}
        self.creations: dict[int, Ref] = {}

    def run(self, effects: Effects) -> None:
        for to, message in effects.messages:
            self.world.send(
                self.key, to, Control(msg.pack_message(message) if self.world.script.wire else message)
            )
        for callback in effects.callbacks:
            callback()


@dataclass(slots=True)
class Control:
    message: msg.Message | bytes
    again: bool = True


@dataclass(slots=True)
class Call:
    """A call or a reply; carries forks."""

    act: Callable[[Worker, list[Ref]], None]
    forks: list[msg.ForkData] | bytes = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    first: Callable[[Worker], None] | None = None  # called before the arguments are used
    waits: bool = True
    refusable: bool = False


@dataclass(slots=True)
class Death:
    worker: WorkerKey


class World:
    """One program. ``table`` creates the tables; a broken table must raise Violation."""

    def __init__(self, script: Script, table: Callable[..., RRefTable] = RRefTable) -> None:
        self.script = script
        self.rng = random.Random(script.seed ^ 0x5EED)
        self.make_table = table
        self.workers: dict[WorkerKey, Worker] = {}
        self.lives = itertools.count()
        self.calls = itertools.count()
        self.queues: dict[tuple[WorkerKey, WorkerKey], list[Any]] = {}
        self.live: dict[msg.RRefId, set[Token]] = {}
        self.values: dict[int, weakref.ref[Value]] = {}
        self.owners: dict[msg.RRefId, WorkerKey] = {}
        self.failing: set[msg.RRefId] = set()  # creations whose function raises
        self.late: set[msg.RRefId] = set()  # creations that timed out at their creator
        self.violations: list[str] = []
        self.quiet = False
        self.quiet_shutdown = False
        self.deaths = script.deaths
        self.waiters: dict[int, Callable[[Outcome], None]] = {}
        self.counters = {"shared": 0, "fetched": 0, "failed": 0, "freed": 0, "delivered": 0, "deaths": 0}
        for rank in range(script.workers):
            self.join(rank)

    # -- the group -------------------------------------------------------------------------------

    def join(self, rank: int) -> None:
        key = WorkerKey(rank, f"life{next(self.lives)}")
        dead = [worker.key for worker in self.workers.values() if not worker.alive]
        table = self.make_table(key, tombstones=self.script.tombstones)
        self.workers[key] = Worker(self, key, table)
        for gone in dead:
            self.send(gone, key, Death(gone))

    def living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive]

    def kill(self, worker: Worker) -> None:
        self.deaths -= 1
        self.counters["deaths"] += 1
        worker.alive = False
        for tokens in self.live.values():
            tokens.difference_update([token for token in tokens if token.holder == worker.key])
        changed = True
        while changed:
            changed = False
            for tokens in self.live.values():
                for token in tokens:
                    parent = token.parent
                    if token.confirmed or token.tainted or parent is None:
                        continue
                    if parent.holder == worker.key or (parent.tainted and not parent.confirmed):
                        token.tainted = changed = True
        for (source, _), queue in self.queues.items():
            if source == worker.key and self.rng.random() < 0.5:
                for item in queue:
                    self.lose(item)
                queue.clear()
        for other in self.living():
            self.send(worker.key, other.key, Death(worker.key))
        worker.refs.clear()
        worker.running.clear()
        worker.waiting.clear()
        worker.fetches.clear()
        worker.creations.clear()
        worker.table = None  # type: ignore[assignment]
        if self.rng.random() < 0.6:
            self.join(worker.key.rank)

    # -- the network -----------------------------------------------------------------------------

    def send(self, source: WorkerKey, to: WorkerKey, item: Any) -> None:
        self.queues.setdefault((source, to), []).append(item)

    def lose(self, item: Any) -> None:
        if isinstance(item, Call):
            for token in item.tokens:
                self.end(token)

    def deliver(self) -> bool:
        rng = self.rng
        full = [pair for pair, queue in self.queues.items() if queue]
        if not full:
            return False
        pair = full[int(rng.random() * len(full))]
        source, to = pair
        if self.script.slow and (source.rank + 3 * to.rank + self.script.seed) % 2 and rng.random() < 0.9:
            return True
        queue = self.queues[pair]
        index = 0 if self.script.fifo else int(rng.random() * len(queue))
        item = queue[index]
        worker = self.workers[to]
        if isinstance(item, Control) and not self.quiet:
            if rng.random() < self.script.losses:
                if not self.script.fifo:  # lost, and sent again later
                    queue.append(queue.pop(index))
                return True
            if item.again and rng.random() < self.script.repeats:
                queue.append(Control(item.message, again=rng.random() < 0.5))
        del queue[index]
        self.counters["delivered"] += 1
        if not worker.alive:
            self.lose(item)
        elif isinstance(item, Control):
            data = item.message
            for _ in range(1 + self.script.twice):
                message = msg.unpack_message(data) if isinstance(data, bytes) else data
                worker.run(worker.table.handle(source, message))
        elif isinstance(item, Death):
            self.handle_death(worker, item.worker)
        else:
            self.arrive(worker, source, item)
        return True

    def handle_death(self, worker: Worker, dead: WorkerKey) -> None:
        error = PeerDiedError(f"worker {dead.rank} died")
        for _ in range(1 + self.script.twice):
            worker.run(worker.table.worker_died(dead, error))
        for number, ref in list(worker.creations.items()):
            if ref.handle.owner == dead:
                del worker.creations[number]
                worker.run(worker.table.creation_failed(ref.handle, error))
        for number, (_, owner) in list(worker.fetches.items()):
            if owner == dead:
                self.fetched(worker, number, error)

    def arrive(self, worker: Worker, source: WorkerKey, call: Call) -> None:
        if call.first is not None:
            call.first(worker)
        forks = msg.unpack_forks(call.forks) if isinstance(call.forks, bytes) else call.forks
        if call.refusable and self.rng.random() < 0.05:
            for token in call.tokens:
                self.end(token)
            worker.run(worker.table.refuse(forks, source))
            return
        received = worker.table.receive(forks, source)
        refs = [
            Ref(worker, handle, token) for handle, token in zip(received.handles, call.tokens, strict=True)
        ]
        number = next(self.calls)
        worker.waiting[number] = refs

        def confirmed() -> None:
            worker.waiting.pop(number, None)
            for ref in refs:
                self.check_confirmed(worker, ref)
            if call.waits:
                call.act(worker, refs)

        pending = received.pending
        worker.run(received.effects)
        if not pending.when_done(confirmed):
            confirmed()
        if not call.waits:
            call.act(worker, refs)

    def check_confirmed(self, worker: Worker, ref: Ref) -> None:
        if ref.dropped:
            return
        if not worker.table.is_confirmed(ref.handle):
            if worker.table.failure(ref.handle) is None and not self.quiet:
                self.violations.append(f"{ref.handle} used on {worker.key} before the owner knew it")
            elif not ref.token.tainted and self.workers[ref.handle.owner].alive:
                self.violations.append(f"{ref.handle} failed on {worker.key}, though no worker died")
            return
        owner = self.workers[ref.handle.owner]
        if ref.handle.fork_id is not None and owner.alive:
            if ref.handle.fork_id not in (owner.table.holders(ref.handle.rref_id) or ()):
                if not ref.token.tainted:
                    self.violations.append(f"{ref.handle} confirmed on {worker.key}, but not on its owner")
                return
        if (
            ref.handle.fork_id is not None or not ref.token.tainted
        ):  # a tainted RRef on its owner may have no value
            ref.token.confirmed = True

    # -- holders of values -----------------------------------------------------------------------

    def token(self, rref_id: msg.RRefId, holder: WorkerKey, parent: Token | None) -> Token:
        token = Token(rref_id, holder, parent)
        if not self.workers[holder].alive:
            return token  # the fork cannot arrive
        if parent is not None:
            token.tainted = parent.tainted and not parent.confirmed
        self.live.setdefault(rref_id, set()).add(token)
        return token

    def end(self, token: Token) -> None:
        self.live.get(token.rref_id, set()).discard(token)

    def freed(self, value: Value) -> None:
        self.values.pop(id(value), None)
        self.counters["freed"] += 1
        # The creator of a late value has an error already.
        spare = value.rref_id in self.late and value.rref_id.creator == value.owner.key
        if value.owner.alive and not self.quiet_shutdown and not spare:
            for token in self.live.get(value.rref_id, ()):
                if not token.tainted:
                    self.violations.append(f"{value.rref_id} was freed while {token.holder} holds it")
        for ref in value.held:
            ref.drop()

    def value(self, owner: Worker, rref_id: msg.RRefId, held: list[Ref]) -> Value:
        value = Value(owner, rref_id, held)
        self.values[id(value)] = weakref.ref(value)
        return value

    # -- simulated user code ---------------------------------------------------------------------

    def pick(self, worker: Worker) -> Ref | None:
        return self.rng.choice(worker.refs) if worker.refs else None

    def fork(self, worker: Worker, to: WorkerKey, most: int = 3) -> tuple[list[msg.ForkData], list[Token]]:
        forks: list[msg.ForkData] = []
        tokens: list[Token] = []
        for _ in range(self.rng.randint(0, most)):
            ref = self.pick(worker)
            if ref is None or worker.table.failure(ref.handle) is not None:
                continue
            data = worker.table.fork(ref.handle, to)
            token = self.token(data.rref_id, to, ref.token)
            token.fork_id = data.fork_id
            forks.append(data)
            tokens.append(token)
            if self.rng.random() < self.script.eager:
                self.drop(worker, ref)
            self.counters["shared"] += 1
        return forks, tokens

    def call(
        self, worker: Worker, to: WorkerKey, act: Callable[[Worker, list[Ref]], None], **kw: Any
    ) -> None:
        forks, tokens = self.fork(worker, to)
        if "first" not in kw and self.rng.random() < 0.05:  # as if pickling the call had failed
            for token in tokens:
                self.end(token)
            worker.run(worker.table.rollback(forks))
            return
        packed = msg.pack_forks(forks) if self.script.wire else forks
        self.send(worker.key, to, Call(act, packed, tokens, **kw))
        if self.rng.random() < self.script.eager:
            worker.run(worker.table.collect())

    def keep(self, worker: Worker, refs: list[Ref]) -> None:
        for ref in refs:
            worker.refs.append(ref)
            if self.quiet or self.rng.random() < 0.4:
                self.drop(worker, ref)

    def drop(self, worker: Worker, ref: Ref) -> None:
        if ref in worker.refs:  # it may have been moved into a value
            worker.refs.remove(ref)
            ref.drop()

    def step(self) -> None:
        rng = self.rng
        workers = self.living()
        worker = workers[int(rng.random() * len(workers))]
        dice = rng.random()
        if dice < 0.45:
            self.deliver()
        elif dice < 0.55:
            worker.run(worker.table.collect())
        elif dice < 0.59:
            if worker.running:
                worker.running.pop(rng.randrange(len(worker.running)))()
        elif dice < 0.69:
            self.create(worker, rng.choice(workers))
        elif dice < 0.71:
            self.create_here(worker)
        elif dice < 0.83:
            self.call(worker, rng.choice(workers).key, self.function, refusable=True)
        elif dice < 0.90:
            ref = self.pick(worker)
            if ref is not None:
                self.drop(worker, ref)
        elif dice < 0.985 or not self.deaths:
            ref = self.pick(worker)
            if ref is not None:
                self.fetch(worker, ref)
            if worker.fetches and rng.random() < 0.1:
                self.give_up(worker, rng.choice(list(worker.fetches)))
        elif len(workers) > 1:
            self.kill(worker)

    def function(self, worker: Worker, refs: list[Ref]) -> None:
        """The body of an ordinary call: keeps, sends or returns its RRefs."""
        caller = refs[0].token.parent.holder if refs and refs[0].token.parent else None
        worker.refs += refs
        if not self.quiet:
            if self.rng.random() < 0.3:
                self.call(worker, self.rng.choice(self.living()).key, self.function, refusable=True)
            if caller is not None and self.rng.random() < 0.5:
                self.call(worker, caller, self.keep, waits=self.rng.random() < 0.5, refusable=True)
        for ref in refs:
            if self.quiet or self.rng.random() < 0.6:
                self.drop(worker, ref)

    def create_here(self, worker: Worker) -> None:
        held = self.take_some(worker)
        handle = worker.table.create_owner(value := self.value(worker, None, held))  # type: ignore[arg-type]
        value.rref_id = handle.rref_id
        self.owners[handle.rref_id] = worker.key
        worker.refs.append(Ref(worker, handle, self.token(handle.rref_id, worker.key, None)))

    def take_some(self, worker: Worker) -> list[Ref]:
        """Move a handle into a value, for RRefs of RRefs and cycles of RRefs."""
        ref = self.pick(worker)
        if ref is None or self.rng.random() < 0.6:
            return []
        worker.refs.remove(ref)
        return [ref]

    def create(self, worker: Worker, owner: Worker) -> None:
        handle = worker.table.create_user(owner.key)
        rref_id = handle.rref_id
        self.owners[rref_id] = owner.key
        ref = Ref(worker, handle, self.token(rref_id, worker.key, None))
        worker.refs.append(ref)
        number = next(self.calls)
        worker.creations[number] = ref
        wanted = [True]
        if self.rng.random() < 0.15:
            self.failing.add(rref_id)

        def first(at: Worker) -> None:
            if handle.fork_id is not None:
                for _ in range(1 + self.script.twice):
                    wanted[0] = at.table.creation_arrived(rref_id, handle.fork_id, worker.key)

        def act(at: Worker, refs: list[Ref]) -> None:
            at.refs += refs

            def ended() -> None:
                if rref_id in self.failing:
                    at.run(at.table.set_error(rref_id, ZeroDivisionError()))
                else:
                    at.run(at.table.set_value(rref_id, self.value(at, rref_id, self.take_some(at))))
                    at.run(at.table.set_value(rref_id, None))  # too late: only the first counts
                self.send(at.key, worker.key, Call(answered))

            if wanted[0]:
                if self.rng.random() < 0.5 and not self.quiet:
                    at.running.append(ended)
                else:
                    ended()
            for kept in refs:
                if self.quiet or self.rng.random() < 0.6:
                    self.drop(at, kept)

        def answered(at: Worker, _: list[Ref]) -> None:
            known = at.creations.pop(number, None)
            if known is not None or self.rng.random() < 0.5:
                for _ in range(1 + self.script.twice):
                    at.run(at.table.confirmed(handle))
                if known is not None:
                    self.check_confirmed(at, ref)

        self.call(worker, owner.key, act, first=first)
        if self.rng.random() < 0.1 and self.script.tombstones > 1000:
            worker.creations.pop(number, None)
            self.late.add(rref_id)
            worker.run(worker.table.creation_failed(handle, RpcTimeoutError("creation timed out")))

    def fetch(self, worker: Worker, ref: Ref) -> None:
        number = next(self.calls)
        rref_id = ref.handle.rref_id
        worker.fetches[number] = (ref, ref.handle.owner)
        ref.uses += 1
        failure = worker.table.failure(ref.handle)
        if failure is not None:
            self.fetched(worker, number, failure)
            return
        asker = worker

        def act(at: Worker, _none: list[Ref]) -> None:
            def waiter(outcome: Outcome) -> None:
                value = outcome.value
                answer = value.rref_id if isinstance(value, Value) else outcome.error
                self.send(at.key, asker.key, Call(lambda to, _none: self.fetched(to, number, answer)))

            if number not in asker.fetches:
                return  # arrived after its deadline
            self.waiters[number] = waiter
            now = at.table.fetch(rref_id, waiter)
            if now is not None:
                waiter(now)

        if ref.handle.owner == worker.key:
            act(worker, [])
        else:
            self.send(worker.key, ref.handle.owner, Call(act))

    def give_up(self, worker: Worker, number: int) -> None:
        """Let a fetch time out on both sides."""
        ref, owner = worker.fetches.pop(number)
        waiter = self.waiters.pop(number, None)
        if waiter is not None and self.workers[owner].alive:
            at = self.workers[owner]
            at.run(at.table.cancel_fetch(ref.handle.rref_id, waiter))
        ref.uses -= 1
        if ref.dropped:
            ref.drop()

    def fetched(self, worker: Worker, number: int, answer: msg.RRefId | BaseException | None) -> None:
        if number not in worker.fetches:
            return
        ref, owner = worker.fetches.pop(number)
        self.waiters.pop(number, None)
        rref_id = ref.handle.rref_id
        excused = (
            ref.token.tainted
            or not self.workers[owner].alive
            or not self.workers[rref_id.creator].alive
            or worker.table.failure(ref.handle) is not None
        )
        raised = isinstance(answer, ZeroDivisionError) and rref_id in self.failing
        if raised or (isinstance(answer, RpcTimeoutError) and rref_id in self.late):
            self.counters["failed"] += 1
        elif answer == rref_id and rref_id not in self.failing:
            self.counters["fetched"] += 1
        elif not isinstance(answer, BaseException) or not excused:
            self.violations.append(f"fetch of {ref.handle} on {worker.key} gave {answer!r}")
        ref.uses -= 1
        if ref.dropped:
            ref.drop()

    # -- the play --------------------------------------------------------------------------------

    def check(self) -> None:
        if self.violations:
            raise Violation(f"{self.script}: " + "; ".join(self.violations[:3]))

    def play(self) -> World:
        for _ in range(self.script.steps):
            self.step()
            self.check()
        self.quiet = True
        if self.script.shutdown:
            self.leave()
        else:
            self.drain()
        self.check()
        self.check_empty()
        return self

    def settle(self) -> None:
        """Deliver all messages, and finish all running functions."""
        busy = True
        while busy:
            busy = False
            while self.deliver():
                busy = True
                self.check()
            for worker in self.living():
                while worker.running:
                    worker.running.pop()()
                    busy = True
                effects = worker.table.collect()
                busy = busy or bool(effects)
                worker.run(effects)
                del effects  # values are freed here, and drop the RRefs that they held
                busy = busy or worker.table.pending_counts().drops > 0

    def drain_fetches(self) -> None:
        self.settle()
        for worker in self.living():
            for number, (ref, _) in list(worker.fetches.items()):
                if ref.token.tainted:  # its value may never have been created
                    self.give_up(worker, number)

    def drain(self) -> None:
        self.drain_fetches()
        for _ in range(1000):
            refs = [(worker, ref) for worker in self.living() for ref in worker.refs]
            for worker, ref in refs:
                self.drop(worker, ref)
            for known in list(self.values.values()):
                value = known()
                if value is not None:
                    held, value.held = value.held, []
                    for ref in held:
                        ref.drop()
                del value
            del refs
            drops = any(worker.table.pending_counts().drops for worker in self.living())
            self.settle()
            if not drops:
                break

    def leave(self) -> None:
        """Shut the group down: all workers drop all RRefs; then no entry may be left."""
        self.drain_fetches()
        self.quiet_shutdown = True
        for worker in self.living():
            worker.run(worker.table.delete_all_users())
        self.settle()
        for worker in self.living():
            if worker.table.leaks() or not worker.table.pending_counts().idle:
                self.violations.append(f"{worker.key} leaks {worker.table.leaks()}")
        for worker in self.living():
            worker.run(worker.table.close())
            worker.refs.clear()

    def check_empty(self) -> None:
        left: list[str] = []
        for worker in self.living():
            table = worker.table
            if worker.waiting or worker.fetches:
                left.append(f"{worker.key} still waits: {worker.waiting} {worker.fetches}")
            if any(table.debug_info().values()) or any(table.pending_counts()) or table.leaks():
                left.append(f"{worker.key}: {table.debug_info()} {table.leaks()}")
        if self.values:
            left.append(f"{len(self.values)} values are still there")
        if left:
            raise Violation(f"{self.script}: " + "; ".join(left[:3]))


def play(seed: int, table: Callable[..., RRefTable] = RRefTable, **changes: Any) -> World:
    """Play the program of a seed; ``changes`` replace fields of its script.

    Raises:
        Violation: a promise of the protocol was broken.
    """
    return World(replace(Script.of(seed), **changes), table).play()
