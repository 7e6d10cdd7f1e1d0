"""A worker's side of backward passes: it answers queries of discovery, runs its part, and receives the verdict.

Thread-safe. The engine runs on the calling thread, under ``Context.engine``; no code that could wait, and no user code, runs
under ``Context.lock``. To send a message does not wait for its answer, which arrives in a future.

The roots of a pass are checked before any message is sent; the errors have torch's texts.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from actorrpc import _time
from actorrpc.autograd.contexts import Context, Contexts, released
from actorrpc.autograd.coordinator import Coordinator, blame, loss
from actorrpc.autograd.graph import ReachableGraph
from actorrpc.autograd.local_pass import FINISH, LocalPass, Terms, reach_of
from actorrpc.autograd.messages import (
    Discover,
    Gradient,
    Gradients,
    Message,
    Notice,
    Release,
    Run,
    Settle,
    Sink,
    Transport,
    Verdict,
    make,
)
from actorrpc.errors import RpcError, RpcTimeoutError
from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerKey

__all__ = ["Participant", "check_roots"]

_Given = torch.Tensor | Sequence[torch.Tensor | None] | None


def check_roots(
    roots: Sequence[torch.Tensor], gradients: _Given
) -> tuple[tuple[GradientEdge, ...], Gradients]:
    """Return the edges of the roots and the gradient of each.

    Args:
        gradients: a gradient for each root. None for a root, or for all: the gradient is 1, and the root is one real number.

    Raises:
        TypeError: the roots, or the gradients, are not sequences of tensors.
        ValueError: there are not as many gradients as roots.
        RuntimeError: there are no roots; a root does not require grad, has more than one element without a gradient, or has
            no history; a gradient does not fit its root.
    """
    if not isinstance(roots, (list, tuple)):
        raise TypeError(
            f"backward(): incompatible function arguments: roots must be a list of tensors, not {type(roots).__name__}"
        )
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    given = (None,) * len(roots) if gradients is None else _sequence(gradients, len(roots))
    edges: list[GradientEdge] = []
    found: Gradients = []
    for index, (root, gradient) in enumerate(zip(roots, given, strict=True)):
        if not isinstance(root, torch.Tensor):
            raise TypeError(
                f"backward(): incompatible function arguments: roots must be tensors, but roots[{index}] is of type "
                f"{type(root).__name__}"
            )
        if not root.requires_grad:
            raise RuntimeError(f"requires_grad not set on root (roots[{index}])")
        if gradient is None and root.numel() != 1:
            raise RuntimeError(
                f"roots[{index}] is not a scalar, all roots need to be scalar (or have a gradient given)"
            )
        if root.grad_fn is None:
            raise RuntimeError(f"roots[{index}] does not have a valid gradient function.")
        edges.append(make(GradientEdge, (root.grad_fn, root.output_nr, None)))
        found.append(_ones(root) if gradient is None else _fitting(gradient, root, index))
    return tuple(edges), found


def _sequence(gradients: _Given, count: int) -> Sequence[Any]:
    if isinstance(gradients, torch.Tensor):
        gradients = (gradients,)
    if not isinstance(gradients, (list, tuple)):
        raise TypeError(f"gradient must be a tensor or a sequence of tensors, not {type(gradients).__name__}")
    if len(gradients) != count:
        raise ValueError(f"gradient must have one entry for each of the {count} roots, not {len(gradients)}")
    return gradients


def _ones(root: torch.Tensor) -> torch.Tensor:
    if not root.is_floating_point():
        raise RuntimeError(
            f"grad can be implicitly created only for real scalar outputs but got {root.dtype}"
        )
    return torch.ones_like(root, memory_format=torch.preserve_format)


def _fitting(gradient: Any, root: torch.Tensor, index: int) -> torch.Tensor:
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"gradient[{index}] must be a tensor or None, not {type(gradient).__name__}")
    if gradient.shape != root.shape:
        raise RuntimeError(
            f"Mismatch in shape: gradient[{index}] has a shape of {tuple(gradient.shape)} and roots[{index}] has a shape of "
            f"{tuple(root.shape)}."
        )
    if gradient.is_complex() != root.is_complex():
        raise RuntimeError(
            f"gradient[{index}] has dtype {gradient.dtype}, but roots[{index}] {root.dtype}: both must be complex, or neither"
        )
    return gradient


_log = logging.getLogger("actorrpc.autograd")


class Participant:
    """One worker's side of all backward passes. Thread-safe.

    Args:
        contexts: the contexts of this worker.
        transport: sends messages to the other workers.

    Attributes:
        watch: a function of a profiler that runs the strata in place of ``LocalPass.work``; None without a profiler.
    """

    def __init__(self, contexts: Contexts, transport: Transport) -> None:
        self.contexts = contexts
        self.transport = transport
        self.watch: Callable[[LocalPass, int], Iterable[tuple[WorkerKey, Gradient]]] | None = None
        self.me = contexts.me
        # The random bits keep a restarted worker from using the number of a pass of its earlier incarnation.
        first = int.from_bytes(os.urandom(3), "big") << 20
        self._ids = itertools.count((self.me.rank & 0xFFFF) << 48 | first)

    # -- what users call -----------------------------------------------------------------------------------------

    def backward(self, context_id: int, roots: Sequence[torch.Tensor], **options: Any) -> None:
        """Run a backward pass that begins on this worker; return when it has succeeded on all workers. Ctrl-C ends the pass.

        Args:
            options: as of :meth:`begin`.

        Raises:
            Exception: see ``api.backward``.
        """
        begun = _time.now()
        self.begin(context_id, roots, **options).wait()
        self.transport.noted("backward", begun, context_id)

    def begin(
        self,
        context_id: int,
        roots: Sequence[torch.Tensor],
        *,
        retain_graph: bool = False,
        gradients: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        accumulate: str = "context",
        mode: str = "smart",
        timeout: float = 0.0,
        create_graph: bool = False,
    ) -> Coordinator:
        """Return a backward pass that has sent no message yet. See ``api.backward``.

        Raises:
            TypeError: an argument is of a wrong type.
            ValueError: ``mode`` or ``accumulate`` has an unknown value, or there are not as many gradients as roots.
            RuntimeError: the roots cannot be differentiated, or there is no such context.
        """
        context = self.contexts.get(context_id)
        if mode not in ("smart", "fast"):
            raise ValueError(f'mode must be "smart" or "fast", not {mode!r}')
        if accumulate not in ("context", "grad"):
            raise ValueError(f'accumulate must be "context" or "grad", not {accumulate!r}')
        edges, given = check_roots(roots, gradients)
        terms = Terms(bool(retain_graph), bool(create_graph), accumulate, timeout)
        part = LocalPass(context, next(self._ids), self.me)
        part.begun = True
        with context.lock:
            if context.released:
                raise released(context)
            context.passes[part.id] = part
        return Coordinator(self, part, terms, edges, given)

    def gradients(self, context_id: int, timeout: float) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the results of passes in a context for the leaves of this worker: the leaf's ``id()`` -> leaf and gradient.

        If this worker has done its part of a pass, the function waits for the verdict on the pass.

        Args:
            timeout: seconds; 0 for no bound.

        Raises:
            RpcError: this worker does not know the context.
            RpcTimeoutError: the verdict on a pass did not arrive in time.
        """
        context = self.contexts.live.get(context_id) or self.contexts.get(context_id)
        deadline = _time.now() + timeout if timeout else None
        while True:
            with context.lock:
                for pending in context.passes.values():
                    if pending.finished:
                        break
                else:
                    return context.gradients.copy()
                decided = self._verdict_on(pending)
            try:
                decided.wait(None if deadline is None else max(0.0, deadline - _time.now()))
            except RpcTimeoutError:
                raise RpcTimeoutError(
                    f"a backward pass of {context} is done on worker {self.transport.name(self.me)}, but worker "
                    f"{pending.id >> 48}, where it began, has not sent its outcome within {timeout} s"
                ) from None

    # -- messages ------------------------------------------------------------------------------------------------

    def handle(self, sender: WorkerKey, message: Message) -> Any:
        """Act on a message; return the answer, or a future of it. A message may arrive late, or twice.

        Raises:
            Exception: this worker's part of the pass has failed; the exception is the answer.
        """
        context = self.contexts.live.get(message.context)
        if context is None:
            if isinstance(message, Gradient) and self.contexts.is_over(message.context):
                return None  # this worker has released the context; another message tells the sender
            context = self.contexts.get(message.context)
        context.touched = _time.now()
        if context.maker is None and sender.rank == context.origin:
            context.maker = sender
        if isinstance(message, Gradient):
            return self._receive_gradient(context, sender, message)
        if isinstance(message, Run):
            return self._run(context, sender, message)
        if isinstance(message, Settle):
            with context.lock:
                settling = context.passes.get(message.pass_id)
                return None if settling is None else self._verdict_on(settling)
        assert isinstance(message, Discover)
        return {each: self.sinks(context, each) for each in message.messages}

    @staticmethod
    def _verdict_on(part: LocalPass) -> Future[None]:
        """Return the future that is completed after the verdict. Needs the context's lock."""
        if part.decided is None:
            part.decided = Future()
        return part.decided

    def sinks(self, context: Context, message: int) -> list[Sink]:
        """Return the receipts to which the gradients of a sent message lead.

        Raises:
            RpcError: this worker did not send the message, or the context was released.
            RuntimeError: the message's graph was freed, or leads into another context.
        """
        return self.sinks_of(context, reach_of(context, message))

    def sinks_of(self, context: Context, reach: ReachableGraph) -> list[Sink]:
        """Return the receipts that a walk of the graph has reached.

        Raises:
            RpcError: the context was released.
        """
        found = []
        for node in reach.receipts:
            receipt = context.receipts.get(node)
            if receipt is None:
                raise released(context)
            found.append(receipt.sink)
        return found

    def _join(self, context: Context, id: int, origin: WorkerKey | None) -> LocalPass | None:
        """Return this worker's part of a pass, made now if it is new; None if the pass has ended. Needs the context's lock."""
        part = context.passes.get(id)
        if part is None:
            if context.released:
                raise released(context)
            if id in context.ended:
                return None
            part = context.passes[id] = LocalPass(context, id, origin)
        if origin is not None:
            part.origin = origin
        return None if part.over else part

    def _receive_gradient(self, context: Context, sender: WorkerKey, message: Gradient) -> None:
        with context.lock:
            part = None if context.released else self._join(context, message.pass_id, None)
            if part is None:
                return
            part.arrive(sender, message.receipt, message.message, message.gradients)
        # advance() raises nothing: the worker that waits for the part gets the error, not the sender of this gradient.
        if self.transport.waits_for_another(part):
            # Run the part on another thread, because hooks in the part may wait for locks that this thread holds.
            self.transport.later(partial(self.advance, part))
        else:
            self.advance(part)

    def _run(self, context: Context, sender: WorkerKey, message: Run) -> Any:
        with context.lock:
            part = self._join(context, message.pass_id, sender)
            if part is None:
                raise RpcError(
                    f"the backward pass of {context} was given up before worker {self.transport.name(self.me)} began it; no "
                    f"gradients were changed"
                )
            first, part.begun = not part.begun, True
        if first:
            terms = Terms(message.retain_graph, message.create_graph, message.accumulate, message.timeout)
            try:
                part.begin(terms, message.strata)
                with context.lock:
                    for each in message.gradients:
                        part.arrive(sender, each.receipt, each.message, each.gradients)
            except BaseException as error:
                self.fail(part, error)
            self.advance(part)
        with context.lock:
            if part.error is not None:
                raise part.error
            if part.finished or part.over:
                return None
            return self.answer_of(part)

    def answer_of(self, part: LocalPass) -> Future[None]:
        """Return the future that is completed when the part ends. Needs the context's lock."""
        if part.answer is None:
            part.answer = Future()
            part.answer.label = part  # converted to text only if the label is shown
        return part.answer

    def may_wait(self, verdict: Verdict) -> bool:
        """Return whether acting on a verdict may wait for other users of the ``.grad`` of leaves."""
        if not verdict.commit:
            return False
        context = self.contexts.live.get(verdict.context)
        part = None if context is None else context.passes.get(verdict.pass_id)
        return part is not None and part.terms is not None and part.terms.accumulate == "grad"

    def on_notice(self, sender: WorkerKey, notice: Notice) -> None:
        """Act on a notice. A notice may arrive late, or twice."""
        if isinstance(notice, Release):
            self._release(
                notice.context,
                sender,
                RpcError(f"autograd context {notice.context} was released where it began"),
            )
            return
        context = self.contexts.live.get(notice.context)
        if context is None:
            return
        with context.lock:
            part = context.passes.get(notice.pass_id)
            if part is None:
                context.ended.put(notice.pass_id, None)  # gradients of the pass may still arrive
                return
        try:
            self.decide(part, notice.commit)
        except Exception:
            _log.exception(
                "gradients of a backward pass of %s could not be stored: the gradients of this worker are lost",
                context,
            )

    # -- the part ------------------------------------------------------------------------------------------------

    def advance(self, part: LocalPass, direct: dict[WorkerKey, list[Gradient]] | None = None) -> None:
        """Run the ready strata, and finish the leaves, unless another thread does so; never raises.

        Args:
            direct: run only one stratum, and put the gradients for other workers into this dict instead of sending them.
        """
        lock = part.context.lock
        with lock:
            index = part.claim()
        while index is not None:
            done = False
            begun = _time.now()
            try:
                if index == FINISH:
                    part.finish()
                else:
                    for to, gradient in self.watch(part, index) if self.watch else part.work(index):
                        if to == self.me:
                            with lock:
                                part.arrive(to, gradient.receipt, gradient.message, gradient.gradients)
                        elif direct is not None:
                            direct.setdefault(to, []).append(gradient)
                        else:
                            self._send(part, to, gradient)
                self.transport.noted("visit", begun, part.context.id)
                done = True
            except BaseException as error:
                self.fail(part, error)
            with lock:
                part.release(index, done)
                index = None if direct is not None or part.finished else part.claim()
        if part.answer is not None:
            self._settle(part)

    def _send(self, part: LocalPass, to: WorkerKey, gradient: Gradient) -> None:
        terms = part.terms
        assert terms is not None
        if terms.deadline is not None:
            terms.remaining()  # raises when no time is left
        with part.context.lock:
            if part.over or part.error is not None:
                return
        try:
            self.transport.cast(to, gradient)
        except Exception as error:
            blamed = blame(error, to, self.transport.name(to))
            raise blamed from blamed.__cause__

    def _settle(self, part: LocalPass) -> None:
        """Complete the answer to the worker that waits for this part, if the part is finished."""
        with part.context.lock:
            answer = part.answer
            if answer is None or part.error is not None or not part.finished:
                return
            part.answer = None
        _complete(answer)

    # -- its end -------------------------------------------------------------------------------------------------

    def fail(self, part: LocalPass, error: BaseException) -> None:
        """End a part with an error, which is the answer to the worker that waits for the part. The verdict arrives later."""
        with part.context.lock:
            if part.over or part.error is not None:
                return
            part.error = error
            answer, part.answer = part.answer, None
            awaited = list(part.awaited)
        for each in awaited:
            each.cancel()
        if answer is not None:
            _complete(answer, error)

    def decide(self, part: LocalPass, commit: bool) -> bool:
        """End a pass on this worker. If it began on this worker, send the verdict to the others. Only the first call has effects.

        Returns whether the results were added to the context or ``.grad``: False if the part has failed or has ended before.
        """
        context = part.context
        with context.lock:
            if part.over:
                return False
            part.over = True
            counts = commit and part.finished and part.error is None
            notified = part.notified
        reserved = ExitStack()
        try:
            grads = None
            try:
                # Before the verdict is sent: a signal handler may interrupt the wait for other users of ``.grad``.
                reservation = part.reserve() if counts else None
                if reservation is not None:
                    grads = reserved.enter_context(reservation)
            except BaseException:
                counts = False
                raise
            finally:
                for worker in sorted(notified):
                    self.transport.notify(worker, Verdict(context.id, part.id, counts))
            if counts:
                part.commit(grads)
        finally:
            reserved.close()
            with context.lock:
                context.passes.pop(part.id, None)
                context.ended.put(part.id, None)
                part.drop()
                answer, part.answer = part.answer, None
            if answer is not None:
                _complete(
                    answer, RpcError(f"a backward pass of {context} was given up; no gradients were changed")
                )
            if part.decided is not None:
                _complete(part.decided)
        return counts

    def release(self, context_id: int) -> None:
        """End a context on this worker and on all workers that have it; passes that are under way fail. Idempotent."""
        self._release(
            context_id,
            None,
            RpcError(f"autograd context {context_id} was released while a backward pass was under way in it"),
        )

    def _release(
        self, context_id: int, sender: WorkerKey | None, error: BaseException, notify: bool = True
    ) -> None:
        context = self.contexts.release(context_id)
        if context is None:
            return
        with context.lock:
            parts = list(context.passes.values())
            peers = context.peers.copy()
        for part in parts:
            peers |= part.notified
            self.fail(part, error)
            self.decide(part, False)
        with context.lock:
            for table in (context.sends, context.receipts, context.reaches, context.sinks, context.gradients):
                table.clear()
        if notify:
            for peer in sorted(peers - {self.me, sender}):
                self.transport.notify(peer, Release(context_id))

    def worker_died(self, key: WorkerKey) -> None:
        """End the passes that need a dead worker, and the contexts that the dead worker made."""
        name = self.transport.name(key)
        error = loss(key, name)
        for context in self.contexts.all():
            with context.lock:
                context.peers.discard(key)
                parts = list(context.passes.values())
            for part in parts:
                self._fail_without(part, key, error)
            # The context may have been made by a later incarnation of the worker, which has the same rank: check the maker.
            if context.origin == key.rank and context.maker in (None, key) and key.rank != self.me.rank:
                self._release(context.id, key, error)

    def _fail_without(self, part: LocalPass, key: WorkerKey, error: BaseException) -> None:
        with part.context.lock:
            if part.origin == self.me:
                concerned, orphaned = key in part.notified, False
            else:
                orphaned = part.origin == key if part.origin else part.id >> 48 == key.rank
                concerned = orphaned or part.waits_for(key)
        if concerned:
            self.fail(part, error)
        if orphaned:
            self.decide(part, False)

    def expire(self, older_than: float) -> None:
        """Release contexts of other workers that were not used for ``older_than`` seconds and have no pass under way."""
        before = _time.now() - older_than
        for context in self.contexts.all():
            if context.touched < before and context.origin != self.me.rank and not context.passes:
                error = RpcError(f"{context} was not used on this worker for {older_than} s, and released")
                self._release(context.id, None, error, notify=False)


def _complete(future: Future[None], error: BaseException | None = None) -> None:
    if future.claim():
        future.conclude(None, error)
        future.acknowledge()  # the origin gets the error in an answer, so this worker does not log it
