"""A backward pass on the worker where it begins: discovery, plan, requests to the other workers, and the verdict.

The plan says which messages take part, and in what order each worker processes their gradients. On the sender of a message, the
message's gradients lead to receipts of earlier messages, so messages form a graph without cycles. A message's *level* is the
length of the longest path from the roots to the message. The messages of one worker and one level form a *stratum*, which is
processed in one call of the engine. Gradients always lead to messages of a higher level, so a stratum never waits for itself,
however often gradients return to a worker.

:meth:`Coordinator.steps` is a generator that yields the futures for which the pass has to wait. The thread that called
``backward`` waits for these futures, and reads the answers itself, which is fastest. The simulator of the tests resumes the
generator when the answers have arrived.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch.autograd.graph import GradientEdge

from actorrpc.autograd.contexts import released
from actorrpc.autograd.graph import ReachableGraph
from actorrpc.autograd.local_pass import LocalPass, Terms
from actorrpc.autograd.messages import (
    ROOTS,
    Contribution,
    Discover,
    Gradient,
    Message,
    Run,
    Settle,
    Sink,
    Stratum,
    make,
)
from actorrpc.errors import PeerDiedError, ProtocolError, RemoteError, RpcError, RpcTimeoutError
from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerKey

if TYPE_CHECKING:
    from actorrpc.autograd.participant import Participant

__all__ = ["Coordinator", "blame", "make_plan", "settled"]

#: A message: its sender, and the sender's number of the message.
Send = tuple[WorkerKey, int]


def _levels(answers: Mapping[Send, Sequence[Sink]]) -> dict[Send, int]:
    """Return the level of each message: 0 if no other message leads to it.

    Args:
        answers: message -> the receipts to which its gradients lead.

    Raises:
        RpcError: a receipt belongs to a message that is not in ``answers``, or messages lead to each other in a circle.
    """
    following: dict[Send, dict[Send, None]] = {}
    before = dict.fromkeys(answers, 0)
    for send, sinks in answers.items():
        sends = following[send] = {}
        for worker, message, _ in sinks:
            each = worker, message
            if each in sends:
                continue
            if each not in before:
                raise RpcError(f"{_name(send)} leads to {_name(each)}, about which no answer says anything")
            sends[each] = None
            before[each] += 1
    found: dict[Send, int] = {}
    ready: list[Send] = []
    for send, count in before.items():
        if not count:
            found[send] = 0
            ready.append(send)
    left = len(before)
    while ready:
        send = ready.pop()
        left -= 1
        below = found[send] + 1
        for each in following[send]:
            if found.get(each, 0) < below:
                found[each] = below
            before[each] -= 1
            if before[each] == 0:
                ready.append(each)
    if left:
        some = ", ".join(_name(each) for each in sorted(send for send, count in before.items() if count)[:5])
        raise RpcError(f"messages wait for each other's gradients in a circle: {some}")
    return found


def make_plan(origin: WorkerKey, answers: Mapping[Send, Sequence[Sink]]) -> dict[WorkerKey, list[Stratum]]:
    """Return the strata of each worker that takes part, in the order in which the worker runs them.

    The plan does not depend on the order of the answers: contributions are added up in the order of the senders' ranks
    and of their receipts.

    Args:
        origin: the worker of the roots; its first stratum is the roots.
        answers: message that takes part -> the receipts to which its gradients lead; the roots are ``(origin, ROOTS)``.

    Raises:
        RpcError: the answers contradict each other.
    """
    contributions: dict[Send, set[Contribution]] = {(origin, ROOTS): {Contribution(origin, 0)}}
    seen: dict[Contribution, Send] = {}
    for (worker, _), sinks in answers.items():
        for to, message, receipt in sinks:
            send, contribution = (to, message), make(Contribution, (worker, receipt))
            if seen.setdefault(contribution, send) != send:
                raise RpcError(
                    f"two answers name different messages for receipt {receipt} of worker {worker.rank}: {_name(send)} and "
                    f"{_name(seen[contribution])}"
                )
            contributions.setdefault(send, set()).add(contribution)
    order: list[tuple[WorkerKey, int, int]] = []
    for (worker, message), level in _levels(answers).items():
        order.append((worker, level, message))
    plan: dict[WorkerKey, list[Stratum]] = {}
    last: tuple[WorkerKey, int] | None = None
    for worker, level, message in sorted(order):
        if (worker, message) not in contributions:
            raise RpcError(f"nothing leads to {_name((worker, message))}, although an answer names it")
        if last != (worker, level):
            last = worker, level
            plan.setdefault(worker, []).append(make(Stratum, ({},)))
        plan[worker][-1].messages[message] = tuple(sorted(contributions[worker, message]))
    return plan


def _name(send: Send) -> str:
    worker, message = send
    return "the roots" if message == ROOTS else f"message {message} of worker {worker.rank}"


class Coordinator:
    """One pass that begins on this worker. Used by one thread at a time.

    Args:
        participant: this worker's Participant.
        part: this worker's part of the pass, which is in the context's table already.
        terms: the options of the pass.
        edges: the edges of the roots.
        gradients: the gradients of the roots.
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
        self._requests: dict[WorkerKey, Future[Any]] = {}
        # Message that takes part -> the receipts to which its gradients lead.
        self._known: dict[Send, Sequence[Sink]] = {}

    def wait(self) -> None:
        """Run the pass, and wait on this thread for the futures that :meth:`steps` yields.

        Raises:
            Exception: the pass has failed, or a signal handler interrupted the wait. The pass has no
                effect on any worker, unless the handler interrupted the wait after the decision to commit.
        """
        transport = self._participant.transport
        outer = transport.begin_wait(self._part)
        try:
            for futures in self.steps():
                # If there is only one future, this thread reads its answer, and the gradients that arrive before, from the
                # connection. An error in an answer is raised by steps(); only an interruption of the wait is raised here.
                (futures[0] if len(futures) == 1 else settled(futures)).exception()
                transport.run_casts()
        except BaseException as error:
            self.give_up(error)
            raise
        finally:
            transport.end_wait(outer)

    def steps(self) -> Generator[list[Future[Any]], None, None]:
        """Run the pass. Yields futures; the caller resumes the generator when all of them are complete, or one has failed."""
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
            part.notified = set(runs)
        self._request(runs)
        runs.clear()
        if not part.finished:
            participant.advance(part)
        if self._requests:
            yield from self._answers()
            for worker, future in self._requests.items():
                self._value(worker, future)
        # Other threads may still run strata of this worker's part: wait for the end of the part.
        with context.lock:
            own = None if part.finished or part.error is not None else participant.answer_of(part)
        if own is not None:
            yield [own]
        if part.error is not None:
            raise part.error
        if not part.finished:
            raise ProtocolError(
                f"a backward pass of {self._context} did not end on the worker where it began, although all others are done; no "
                f"gradients were changed. This is a fault of actorrpc"
            )
        if not participant.decide(part, True):
            raise part.error or released(context)
        # The caller of backward() then reads .grad, perhaps on other workers.
        if self._terms.accumulate == "grad":
            yield from self._settle()
        if not (self._terms.retain_graph or self._terms.create_graph):
            # The graphs are freed. Forget the sinks, so that a further pass queries the workers and gets their errors.
            for send in self._known:
                context.sinks.pop(send, None)

    def _settle(self) -> Generator[list[Future[Any]], None, None]:
        """Wait until all workers have acted on the verdict. Errors cannot change the verdict, and are not raised."""
        try:
            self._request({worker: Settle(self._context.id, self._part.id) for worker in self._part.notified})
        except RpcTimeoutError:
            return
        for future in self._requests.values():
            if not future.done():
                yield [future]
            future.acknowledge()

    def give_up(self, error: BaseException) -> None:
        """End the pass with an error. The pass then has no effect on any worker, unless its verdict was decided before."""
        part = self._part
        with self._context.lock:
            if part.error is None:
                part.error = error
        self._participant.decide(part, False)
        for future in self._requests.values():
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
            0.0 if terms.deadline is None else terms.remaining(),
            gradients,
        )

    def _discover(self, reach: ReachableGraph) -> Generator[list[Future[Any]], None, None]:
        """Find the messages that take part, beginning at the roots, and the receipts to which their gradients lead.

        Yields the futures of queries to other workers about messages whose receipts this worker does not know.
        """
        context, participant, known = self._context, self._participant, self._known
        sinks: Sequence[Sink] = participant.sinks_of(context, reach)
        known[self._me, ROOTS] = sinks
        wanted: list[Send] = []
        while True:
            for worker, message, _ in sinks:
                wanted.append((worker, message))
            requests: dict[WorkerKey, set[int]] = {}
            while wanted:
                send = wanted.pop()
                if send in known:
                    continue
                worker, message = send
                found = context.sinks.get(send)
                if found is None:
                    if worker != self._me:
                        requests.setdefault(worker, set()).add(message)
                        continue
                    found = participant.sinks(context, message)
                known[send] = found
                for each in found:
                    wanted.append((each.worker, each.message))
            if not requests:
                return
            self._request(
                {worker: Discover(context.id, sorted(messages)) for worker, messages in requests.items()}
            )
            yield from self._answers()
            sinks = []
            for worker, future in self._requests.items():
                for message, given in self._value(worker, future).items():
                    found = [Sink(WorkerKey(*each[0]), each[1], each[2]) for each in given]
                    known[worker, message] = context.sinks[worker, message] = found
                    sinks += found

    # -- asking --------------------------------------------------------------------------------------------------

    def _request(self, messages: Mapping[WorkerKey, Message]) -> None:
        request, terms = self._participant.transport.request, self._terms
        left = 0.0 if terms.deadline is None else terms.remaining()
        self._requests = {}
        for worker, message in messages.items():
            self._requests[worker] = request(worker, message, left)
        with self._context.lock:
            self._part.awaited = self._requests.values()

    def _answers(self) -> Generator[list[Future[Any]], None, None]:
        if self._part.error is None:  # if this worker's part fails during the wait, fail() cancels the calls
            yield list(self._requests.values())
        if self._part.error is not None:
            raise self._part.error

    def _value(self, worker: WorkerKey, future: Future[Any]) -> Any:
        """Return the answer of a worker.

        Raises:
            Exception: the worker's answer is an error, the worker died or timed out, or the call to another worker has failed.
        """
        if not future.done():
            # The wait ended before this call, so the call to another worker has failed: raise that error.
            for other, each in self._requests.items():
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
                for other, each in sorted(self._requests.items())
                if not each.done() or timed_out(each.exception())
            ]
            raise late(repr(self._context), self._terms.timeout, names) from None
        raise blame(error, worker, name(worker))


def settled(futures: Sequence[Future[Any]]) -> Future[None]:
    """Return a future that completes when all ``futures`` are complete, or one of them has failed."""
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


_NOTE: Final = "had in a backward pass"


def loss(worker: WorkerKey, name: str) -> PeerDiedError:
    """Return the error of a backward pass that has lost a worker."""
    return PeerDiedError(
        f"worker {name} (rank {worker.rank}) was lost during a backward pass that needed it: no gradients were changed anywhere",
        worker=name,
    )


def blame(error: BaseException, worker: WorkerKey, name: str) -> BaseException:
    """Add the name of a worker to an error in the worker's answer; return the error.

    An error that the worker raised gets torch's prefix "Error on Node", if its message can be changed, and a note that names the
    worker. A PeerDiedError is the cause of an error that names the worker. Other errors are unchanged, as are errors that came
    through several workers, which have the name of the worker that raised them.
    """
    if not isinstance(error, RemoteError):
        if type(error) is PeerDiedError and not str(error).startswith("worker "):
            lost = loss(worker, name)
            lost.__cause__ = error
            return lost
        return error
    if any(note.endswith(_NOTE) for note in getattr(error, "__notes__", ())):
        return error
    args = error.args
    prefix = f"Error on Node {worker.rank}: "
    try:
        if args and isinstance(args[0], str) and str(error) == args[0]:
            error.args = (prefix + args[0], *args[1:])
            prefix = ""
    except Exception:
        pass  # the user's class does not allow changes of an error's args, or its __str__ raises
    error.add_note(f"{prefix}raised in the part that worker {name} {_NOTE}")
    return error


def timed_out(error: BaseException | None) -> bool:
    """Return whether a call timed out on this worker; False if the error is the answer of a worker on which a call timed out."""
    return isinstance(error, RpcTimeoutError) and not isinstance(error, RemoteError)


def late(context: str, timeout: float, names: Sequence[str]) -> RpcTimeoutError:
    """Return the error for a pass that timed out, with the names of the workers that have not answered."""
    return RpcTimeoutError(
        f"the backward pass of {context} did not end within {timeout:g} s: no answer from {', '.join(names)}. No gradients "
        f"were changed",
        maybe_executed=True,
        worker=names[0] if len(names) == 1 else None,
    )
