"""Simulates a group of participants in one thread: random programs and their backward passes over a faulty network.

Each worker is a :class:`Participant` with the recorder that real messages use. Requests and notices are kept in one list, from
which a random generator draws the next message to arrive. A :class:`Fault` hits one message: it is dropped (a request then
ends by its time-out, which comes when no message is left; a notice is sent again), arrives twice, or arrives last; or its
target dies, the origin dies, or the context is released just before it arrives.

A :class:`World` executes a program step by step, and ``backward`` runs a pass to its end. With any fault, a pass must end with
the gradients of local autograd, or with an error and unchanged gradients.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import cloudpickle
from torch import Tensor

from actorrpc.autograd import graph
from actorrpc.autograd.contexts import Contexts
from actorrpc.autograd.coordinator import Coordinator, settled
from actorrpc.autograd.messages import Gradient, Message, Notice, Run
from actorrpc.autograd.participant import Participant
from actorrpc.autograd.recorder import GraphRecorder
from actorrpc.errors import PeerDiedError, RpcTimeoutError
from actorrpc.futures import Future
from actorrpc.serialization import exceptions
from actorrpc.wire.identity import WorkerKey
from tests.autograd import programs

__all__ = ["KINDS", "TYPES", "Fault", "Network", "Worker", "World", "run"]

#: Kinds of faults.
KINDS = ("drop", "duplicate", "delay", "kill target", "kill origin", "release")
#: Types of messages that faults hit; "Answer" is the answer to any of the other types.
TYPES = ("Discover", "Run", "Gradient", "Answer", "Verdict")

_TIMEOUT = 1000.0  # never elapses: the simulator times out a request when no message is left


_M = TypeVar("_M", Run, Gradient)


@dataclass(slots=True)
class Fault:
    """A fault of the ``nth`` message of a type, counted from 0."""

    kind: str
    type: str
    nth: int = 0
    hit: bool = False


def run(coordinator: Coordinator) -> Future[None]:
    """Run the steps of a pass as answers arrive; return a future of its end."""
    result: Future[None] = Future()
    steps = coordinator.steps()

    def advance(_: object = None) -> None:
        try:
            futures = next(steps)
        except StopIteration:
            result.set_result(None)
        except BaseException as error:
            coordinator.give_up(error)
            result.set_exception(error)
        else:
            settled(futures).add_done_callback(advance)

    advance()
    return result


@dataclass(slots=True, eq=False)
class Envelope:
    """A message in transit; ``arrive`` delivers it to ``to``."""

    type: str
    sender: WorkerKey
    to: WorkerKey
    arrive: Callable[[], None]
    request: Future[Any] | None = None
    last: bool = False


class Worker:
    """A worker: its contexts, recorder and participant, and its connection to the network."""

    def __init__(self, network: Network, key: WorkerKey) -> None:
        self.network = network
        self.me = key
        self.contexts = Contexts(key)
        self.recorder = GraphRecorder(self.contexts)
        self.participant = Participant(self.contexts, self)
        self.peer: Any = SimpleNamespace(key=key)
        self.alive = True
        self.requests: dict[Future[Any], WorkerKey] = {}

    def request(self, to: WorkerKey, message: Message, timeout: float) -> Future[Any]:
        future: Future[Any] = Future()
        future.label = f"{type(message).__name__} to {to.rank}"
        self.network.request(self, to, message, timeout, future)
        return future

    def cast(self, to: WorkerKey, message: Gradient) -> None:
        self.network.cast(self, to, message)

    def notify(self, to: WorkerKey, notice: Notice) -> None:
        self.network.notify(self, to, notice)

    def name(self, worker: WorkerKey) -> str:
        return f"worker{worker.rank}"

    def begin_wait(self, part: Any) -> None:
        """Do nothing: the simulator delivers messages, not a reading thread."""

    def run_casts(self) -> None:
        """Do nothing: no thread reads, so no gradient is queued."""

    def end_wait(self, outer: Any) -> None:
        """Do nothing: no thread reads."""

    def noted(self, kind: str, begun: float, context: int) -> None:
        pass

    def waits_for_another(self, part: Any) -> bool:
        return False

    def later(self, run: Callable[[], object]) -> None:
        raise AssertionError("no thread waits here")


def with_gradients(message: _M, gradients: Any) -> _M:
    """Return a copy of a message with other gradients."""
    return message._replace(gradients=gradients)


class Network:
    """Delivers messages between workers in a random order, given by the seed."""

    def __init__(self, seed: int, workers: int, fault: Fault | None = None) -> None:
        self.rng = random.Random(seed ^ 0xFA17)
        self.fault = fault
        self.keys = [WorkerKey(rank, f"life{rank}") for rank in range(workers)]
        self.workers = {key: Worker(self, key) for key in self.keys}
        self.revisits = 0  # strata after a worker's first
        self.mails: list[Envelope] = []
        self.counts: Counter[str] = Counter()
        self.release: Callable[[], None] = lambda: None
        self.faultless = False

    def worker(self, rank: int) -> Worker:
        return self.workers[self.keys[rank]]

    def forget(self) -> None:
        """Clear what workers know of the reach of messages, so that passes have to discover it."""
        for worker in self.workers.values():
            for context in worker.contexts.all():
                context.sinks.clear()

    # -- what workers send -----------------------------------------------------------------------------------------

    def request(
        self, sender: Worker, to: WorkerKey, message: Message, timeout: float, future: Future[Any]
    ) -> None:
        worker = self.workers[to]
        if not worker.alive:
            future.set_exception(PeerDiedError(f"worker{to.rank} is dead", worker=f"worker{to.rank}"))
            return
        if timeout:
            sender.requests[future] = to
        packed = self.pack(message, sender)
        if isinstance(message, Run):
            self.revisits += len(message.strata) - 1

        calls = 0

        def arrive() -> None:
            nonlocal calls
            calls += 1
            first = calls == 1  # the sender accepts only the first answer

            def answered(done: Future[Any]) -> None:
                error = done.exception()
                self.reply(worker, sender, future, None if error else done.value(), error, first)

            try:
                answer = worker.participant.handle(sender.me, self.unpack(packed, worker, sender))
            except BaseException as error:
                self.reply(worker, sender, future, None, error, first)
                return
            if isinstance(answer, Future):
                answer.add_done_callback(answered)
            else:
                self.reply(worker, sender, future, answer, None, first)

        self.mails.append(Envelope(type(message).__name__, sender.me, to, arrive, future))

    def cast(self, sender: Worker, to: WorkerKey, message: Gradient) -> None:
        worker = self.workers[to]
        if not worker.alive:
            raise PeerDiedError(f"worker{to.rank} is dead", worker=f"worker{to.rank}")
        packed = self.pack(message, sender)

        def arrive() -> None:
            with contextlib.suppress(Exception):  # a real worker logs the error
                worker.participant.handle(sender.me, self.unpack(packed, worker, sender))

        self.mails.append(Envelope(type(message).__name__, sender.me, to, arrive))

    def notify(self, sender: Worker, to: WorkerKey, notice: Notice) -> None:
        worker = self.workers[to]

        def arrive() -> None:
            worker.participant.on_notice(sender.me, notice)

        self.mails.append(Envelope(type(notice).__name__, sender.me, to, arrive))

    def reply(
        self,
        sender: Worker,
        to: Worker,
        future: Future[Any],
        value: Any,
        error: BaseException | None,
        taken: bool,
    ) -> None:
        if not sender.alive or not taken:
            return
        if error is not None:
            name = f"worker{sender.me.rank}"
            data = exceptions.dump(error, worker=name, dumps=cloudpickle.dumps)
            error = exceptions.load(data, loads=pickle.loads)
        else:
            value = pickle.loads(pickle.dumps(value))

        def arrive() -> None:
            to.requests.pop(future, None)
            if future.claim():
                future.conclude(value, error)

        self.mails.append(Envelope("Answer", sender.me, to.me, arrive))

    def pack(self, message: Message, sender: Worker) -> Any:
        """Split a message into bytes and tensors, and record the tensors like those of calls."""
        tensors: list[Tensor] = []
        gradients = (message,) if isinstance(message, Gradient) else ()
        if isinstance(message, Run):
            gradients = tuple(message.gradients)
        for each in gradients:
            tensors += [tensor for tensor in each.gradients if tensor is not None]
        holes = [with_gradients(each, tuple(g is not None for g in each.gradients)) for each in gradients]
        bare = with_gradients(message, holes) if isinstance(message, Run) else (holes or [message])[0]
        tag = sender.recorder.sent(tensors, sender.peer, context=message.context)
        return pickle.dumps(bare), programs.copies(tensors, connected=False), tag

    def unpack(self, packed: Any, worker: Worker, sender: Worker) -> Any:
        data, tensors, tag = packed
        tensors = [each.clone() for each in tensors]
        message = pickle.loads(data)
        if tag is not None:
            worker.recorder.received(tag, tensors, sender.peer)
        left = iter(tensors)

        def fill(gradient: Gradient) -> Gradient:
            return with_gradients(gradient, [next(left) if g else None for g in gradient.gradients])

        if isinstance(message, Gradient):
            return fill(message)
        if isinstance(message, Run):
            return with_gradients(message, [fill(each) for each in message.gradients])
        return message

    # -- delivery and faults ----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Deliver a message or time out a request; return whether there was any."""
        ready = [mail for mail in self.mails if not mail.last] or self.mails
        if not ready:
            return self.time_out()
        mail = self.rng.choice(ready)
        number, self.counts[mail.type] = (
            self.counts[mail.type],
            self.counts[mail.type] + (not mail.last),
        )
        fault = self.fault
        if (
            fault is not None
            and not fault.hit
            and not self.faultless
            and (mail.type, number) == (fault.type, fault.nth)
        ):
            fault.hit = True
            if self.hit(fault.kind, mail):
                return True
        if mail in self.mails:  # the fault may have killed its target
            self.mails.remove(mail)
            mail.arrive()
        return True

    def hit(self, kind: str, mail: Envelope) -> bool:
        """Apply a fault; return True if the message must not arrive now."""
        if kind == "delay":
            mail.last = True
            return True
        if kind == "drop":
            if mail.request is None and mail.type != "Answer":
                mail.last = True  # notices are repeated until they are received
            else:
                self.mails.remove(mail)
            return True
        if kind == "duplicate":
            mail.arrive()
        elif kind == "kill target":
            self.kill(mail.to)
        elif kind == "kill origin":
            self.kill(self.keys[0])
        else:
            self.release()
        return False

    def kill(self, key: WorkerKey) -> None:
        """Kill a worker: half of its messages still arrive, and the others are notified later."""
        worker = self.workers[key]
        if not worker.alive:
            return
        worker.alive = False
        self.mails = [
            mail for mail in self.mails if mail.to != key and (mail.sender != key or self.rng.random() < 0.5)
        ]
        for other in self.workers.values():
            if other.alive:
                self.mails.append(
                    Envelope("Death", key, other.me, lambda other=other: self.notify_death(other, key))
                )  # type: ignore[misc]

    def notify_death(self, worker: Worker, key: WorkerKey) -> None:
        died = PeerDiedError(f"worker{key.rank} is dead", worker=f"worker{key.rank}")
        for future, to in list(worker.requests.items()):
            if to == key:
                del worker.requests[future]
                future.try_fail(died)
        worker.participant.worker_died(key)

    def time_out(self) -> bool:
        """Time out a random request; return False if there is none."""
        late = []
        for worker in self.workers.values():
            for future in list(worker.requests):
                if future.done():
                    del worker.requests[future]
                elif worker.alive:
                    late.append((worker, future))
        if not late:
            return False
        worker, future = self.rng.choice(late)
        del worker.requests[future]
        future.try_fail(RpcTimeoutError(f"{future.label}: no answer"))
        return True

    def settle(self, until: Callable[[], bool] = lambda: False) -> None:
        """Deliver messages until ``until`` is true or none is left."""
        while not until() and self.step():
            pass


class World:
    """Executes a program on the workers of a network, up to its roots."""

    def __init__(self, program: programs.Program, network: Network, *, forget: bool = False) -> None:
        self.program = program
        self.network = network
        self.origin = network.worker(0)
        self.context = self.origin.contexts.create().id
        for worker in network.workers.values():
            # Each worker joins the context by a message from the origin.
            worker.recorder.received(
                self.origin.recorder.sent((), worker.peer, self.context), [], self.origin.peer
            )
        network.release = lambda: self.origin.participant.release(self.context)
        self.passes: list[Future[None]] = []
        self.values: list[dict[int, Tensor]] = [{} for _ in range(program.workers)]
        self.leaves: dict[int, tuple[programs.Leaf, Tensor]] = {}
        self.kept: dict[int, tuple[int, list[Tensor], Any]] = {}
        for leaf in program.leaves:
            made = programs.make_leaf(leaf)
            self.values[leaf.worker][leaf.name] = made
            self.leaves[leaf.name] = leaf, made
        for step in program.steps:
            self.do(step)
        self.roots = [programs.make_root(names, self.values[0]) for names in program.roots]
        if forget:
            network.forget()

    def do(self, step: programs.Step) -> None:
        values = self.values[step.worker]
        worker = self.network.worker(step.worker)
        if isinstance(step, (programs.Compute, programs.InPlace)):
            programs.perform(step, values)
        elif isinstance(step, programs.Send):
            tensors = [values[name] for name in step.values]
            to = self.network.worker(step.to)
            tag = worker.recorder.sent(_distinct(tensors), to.peer, context=self.context)
            self.arrive(to, step.outs, tensors, tag, worker)
        elif isinstance(step, programs.Keep):
            tensors = [values[name] for name in step.values]
            tag = worker.recorder.sent(_distinct(tensors), None, context=self.context)
            self.kept[step.message] = step.worker, programs.copies(tensors, connected=False), tag
        else:
            assert isinstance(step, programs.Open)
            keeper, tensors, tag = self.kept[step.message]
            if tag is not None:
                self.network.worker(keeper).recorder.forwarded(tag, worker.peer)
            self.arrive(worker, step.outs, tensors, tag, self.network.worker(keeper))

    def arrive(
        self, to: Worker, outs: tuple[int, ...], tensors: list[Tensor], tag: Any, sender: Worker
    ) -> None:
        arrived = programs.copies(tensors, connected=False)
        if tag is not None:
            to.recorder.received(tag, _distinct(arrived), sender.peer)
        for name, each in zip(outs, arrived, strict=True):
            self.values[to.me.rank][name] = each

    # -- passes ----------------------------------------------------------------------------------------------------

    def start(self, **options: Any) -> Future[None]:
        options.setdefault("timeout", _TIMEOUT)
        return run(self.origin.participant.begin(self.context, self.roots, **options))

    def backward(self, **options: Any) -> None:
        """Run a pass to its end.

        Raises:
            Exception: the error of the pass.
        """
        future = self.start(**options)
        self.passes.append(future)
        self.network.settle(lambda: future.done() or not self.origin.alive)
        if self.origin.alive:
            assert future.done(), "the pass has not ended"
            future.value()

    def failure(self, **options: Any) -> BaseException | None:
        """Run a pass to its end; return its error, or None."""
        try:
            self.backward(**options)
        except Exception as error:
            return error
        return None

    def gradients(self) -> dict[int, Tensor]:
        """Deliver all messages; return the gradients in the context on all workers, by names of leaves."""
        self.network.settle()
        found = {}
        for name, (leaf, tensor) in self.leaves.items():
            worker = self.network.worker(leaf.worker)
            context = worker.contexts.live.get(self.context)
            if worker.alive and context is not None and id(tensor) in context.gradients:
                found[name] = context.gradients[id(tensor)][1]
        return found

    def check_quiet(self) -> None:
        """Check that contexts have no passes and no gradient is borrowed."""
        for worker in self.network.workers.values():
            for context in worker.contexts.all() if worker.alive else ():
                assert not context.passes, f"{worker.me}: {context.passes}"
        self._check_not_borrowed()

    def leave(self) -> None:
        """Release the context, and check that nothing is left of it."""
        if self.origin.alive:
            self.origin.participant.release(self.context)
        self.network.settle()
        for future in self.passes:
            future.acknowledge()  # the error was not retrieved if the origin died
        for worker in self.network.workers.values():
            if worker.alive:
                assert len(worker.contexts.live) == 0, f"{worker.me} keeps {worker.contexts.all()}"
                assert not worker.requests
        self._check_not_borrowed()

    def _check_not_borrowed(self) -> None:
        with graph.Borrowed([leaf for _, leaf in self.leaves.values()], 0.0):
            pass


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(each): each for each in tensors}.values())
