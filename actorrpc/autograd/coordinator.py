"""A backward pass as seen from where it begins: discovery, plan, the parts of others, the verdict.

It is written as steps between which somebody waits: the thread that called ``backward`` reads the answers itself, which is
fastest; a simulator goes on when they have come.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd.graph import GradientEdge

from actorrpc._exception_text import is_of_handler
from actorrpc.autograd.errors import blame, late, released, timed_out
from actorrpc.autograd.graph import ReachableGraph
from actorrpc.autograd.local_pass import LocalPass, Terms
from actorrpc.autograd.messages import Contribution, Discover, Gradient, Message, Run, Settle, Sink, Stratum
from actorrpc.autograd.planner import ROOTS, Send, make_plan
from actorrpc.errors import ProtocolError, RpcTimeoutError
from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerKey

if TYPE_CHECKING:
    from actorrpc.autograd.participant import Participant

__all__ = ["Coordinator"]


class Coordinator:
    """One pass that begins here. Used by one thread at a time.

    Args:
        participant: this worker.
        part: this worker's part of it, in its context's table.
        terms: what was asked for.
        edges: of the roots.
        gradients: of the roots.
    """

    def __init__(
        self,
        participant: Participant,
        part: LocalPass,
        terms: Terms,
        edges: tuple[GradientEdge, ...],
        gradients: list[torch.Tensor | None],
    ) -> None:
        self._participant = participant
        self._part = part
        self._context = part.context
        self._terms = terms
        self._edges = edges
        self._gradients = gradients
        self._me = participant.me
        self._asked: dict[WorkerKey, Future[Any]] = {}
        self._known: dict[Send, Sequence[Sink]] = {}  # where the messages that take part lead to

    def run(self) -> Future[None]:
        """Go through the steps as answers come; return a future of the end."""
        result: Future[None] = Future()
        result.label = f"a backward pass of {self._context}"
        steps = self._steps()

        def go(_: object = None) -> None:
            try:
                futures = next(steps)
            except StopIteration:
                result.set_result(None)
            except BaseException as error:
                self._give_up(error)
                result.set_exception(error)
                if is_of_handler(error):
                    raise
            else:
                _settled(futures).add_done_callback(go)

        go()
        return result

    def wait(self) -> None:
        """Go through the steps, and wait between them on this thread.

        Raises:
            Exception: what ended the pass, or interrupted the wait. It has no effect then, anywhere.
        """
        transport = self._participant.transport
        outer = transport.attend(self._part)
        try:
            for futures in self._steps():
                # Waiting for one alone reads its answer, and the gradients that come before it, without the help of another
                # thread. What is raised there is looked at later; only what interrupts the wait is raised here.
                (futures[0] if len(futures) == 1 else _settled(futures)).exception()
                transport.work_off()
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            transport.leave(outer)

    def _steps(self) -> Generator[list[Future[Any]], None, None]:
        """Run the pass; yields what is to be waited for: until all are complete, or one has failed."""
        part, participant, me, context = self._part, self._participant, self._me, self._context
        reach = part.root(self._edges)
        plan: Mapping[WorkerKey, Sequence[Stratum]]
        if reach.receipts:
            yield from self._discover(reach)
            plan = make_plan(me, self._known)
        else:
            plan = {me: [Stratum({ROOTS: (Contribution(me, 0),)})]}
        part.begin(self._terms, plan[me])
        direct: dict[WorkerKey, list[Gradient]] = {}
        with context.lock:
            part.arrive(me, 0, ROOTS, self._gradients)
        participant.advance(part, direct)
        if part.error is not None:
            raise part.error
        runs: dict[WorkerKey, Message] = {}
        for worker, strata in plan.items():
            if worker != me:
                runs[worker] = self._run(strata, direct.get(worker, ()))
        direct.clear()
        with context.lock:
            part.told = set(runs)
        self._ask(runs)
        runs.clear()
        if not part.finished:
            participant.advance(part)
        if self._asked:
            yield from self._answers()
            for worker, future in self._asked.items():
                self._value(worker, future)
        # Other threads may be working off the part of this worker.
        with context.lock:
            own = None if part.finished or part.error is not None else participant.answer_of(part)
        if own is not None:
            yield [own]
        if part.error is not None:
            raise part.error
        if not part.finished:
            raise ProtocolError(
                f"a backward pass of {self._context} came to no end on the worker where it began, though all others are done; no "
                f"gradients were changed. This is a fault of actorrpc"
            )
        if not participant.decide(part, True):
            raise part.error or released(context)
        if self._terms.accumulate == "grad":  # .grad is looked at as soon as this is over
            yield from self._settle()
        if not (self._terms.retain_graph or self._terms.create_graph):
            for send in self._known:  # a worker that is asked again says that the graph is gone
                context.sinks.pop(send, None)

    def _settle(self) -> Generator[list[Future[Any]], None, None]:
        """Wait until all have acted on the verdict. What goes wrong now changes it no more, and is not raised."""
        try:
            self._ask({worker: Settle(self._context.id, self._part.id) for worker in self._part.told})
        except RpcTimeoutError:
            return
        for future in self._asked.values():
            if not future.done():
                yield [future]
            future.acknowledge()

    def _give_up(self, error: BaseException) -> None:
        part = self._part
        with self._context.lock:
            if part.error is None:
                part.error = error
        self._participant.decide(part, False)
        for future in self._asked.values():
            future.cancel()
            future.acknowledge()

    def _run(self, strata: Sequence[Stratum], gradients: Sequence[Gradient]) -> Run:
        terms = self._terms
        return Run(
            self._context.id,
            self._part.id,
            strata,
            terms.retain_graph,
            terms.create_graph,
            terms.accumulate,
            0.0 if terms.deadline is None else terms.left(),
            gradients,
        )

    def _discover(self, reach: ReachableGraph) -> Generator[list[Future[Any]], None, None]:
        """Find out where messages lead to, from the roots on; others are asked for what is not known here."""
        context, participant, known = self._context, self._participant, self._known
        sinks: Sequence[Sink] = participant.sinks_of(context, reach)
        known[self._me, ROOTS] = sinks
        wanted: list[Send] = []
        while True:
            for worker, message, _ in sinks:
                wanted.append((worker, message))
            asks: dict[WorkerKey, set[int]] = {}
            while wanted:
                send = wanted.pop()
                if send in known:
                    continue
                worker, message = send
                found = context.sinks.get(send)
                if found is None:
                    if worker != self._me:
                        asks.setdefault(worker, set()).add(message)
                        continue
                    found = participant.sinks(context, message)
                known[send] = found
                for each in found:
                    wanted.append((each.worker, each.message))
            if not asks:
                return
            self._ask({worker: Discover(context.id, sorted(messages)) for worker, messages in asks.items()})
            yield from self._answers()
            sinks = []
            for worker, future in self._asked.items():
                for message, given in self._value(worker, future).items():
                    found = [Sink(WorkerKey(*each[0]), each[1], each[2]) for each in given]
                    known[worker, message] = context.sinks[worker, message] = found
                    sinks += found

    # -- asking --------------------------------------------------------------------------------------------------

    def _ask(self, messages: Mapping[WorkerKey, Message]) -> None:
        ask, terms = self._participant.transport.ask, self._terms
        left = 0.0 if terms.deadline is None else terms.left()
        self._asked = {}
        for worker, message in messages.items():
            self._asked[worker] = ask(worker, message, left)
        with self._context.lock:
            self._part.awaited = self._asked.values()

    def _answers(self) -> Generator[list[Future[Any]], None, None]:
        if self._part.error is None:  # from now on, one of this worker's part cancels what was asked
            yield list(self._asked.values())
        if self._part.error is not None:
            raise self._part.error

    def _value(self, worker: WorkerKey, future: Future[Any]) -> Any:
        """Return what a worker has answered.

        Raises:
            Exception: what it answered with, or why there is no answer.
        """
        if not future.done():
            # Another one has failed; that one's error counts.
            for other, each in self._asked.items():
                if each.done() and (error := each.exception()) is not None:
                    self._raise(other, error)
        error = future.exception()
        if error is not None:
            self._raise(worker, error)
        return future.value()

    def _raise(self, worker: WorkerKey, error: BaseException) -> NoReturn:
        name = self._participant.transport.name
        if timed_out(error):
            names = [
                name(other)
                for other, each in sorted(self._asked.items())
                if not each.done() or timed_out(each.exception())
            ]
            raise late(repr(self._context), self._terms.timeout, names) from None
        raise blame(error, worker, name(worker))


def _settled(futures: Sequence[Future[Any]]) -> Future[None]:
    """Return a future that completes when all of these are complete, or one has failed."""
    result: Future[None] = Future()
    result.label = "a backward pass"
    left = [None] * len(futures)

    def one(done: Future[Any]) -> None:
        done.acknowledge()
        left.pop()
        if not left or done.exception() is not None:
            result.try_complete(None)

    for future in futures:
        future.add_done_callback(one)
    return result
