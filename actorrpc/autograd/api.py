"""The functions of ``torch.distributed.autograd``, with further options; and the start of distributed autograd in a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal

import torch

from actorrpc.agent.context import Worker, current_worker
from actorrpc.agent.hooks import Recorder
from actorrpc.agent.peers import Peer
from actorrpc.autograd import recorder
from actorrpc.autograd.contexts import Contexts
from actorrpc.autograd.messages import Verdict
from actorrpc.autograd.participant import Participant
from actorrpc.autograd.transport import NOTICE, AgentTransport, unpack_notice
from actorrpc.errors import NotInitializedError
from actorrpc.rpc import api
from actorrpc.rpc.options import UNSET_RPC_TIMEOUT, check_timeout
from actorrpc.transport.signals import uninterruptible

__all__ = ["backward", "context", "contexts", "get_gradients", "participant", "start"]

_LOOKS: Final = 4  # how many times contexts are checked in the time after which an unused context is released


@uninterruptible
class context:
    """A distributed forward and backward pass: ``with context() as context_id``.

    Calls that are made in the block, and calls that these calls make on other workers, are recorded: tensors that require grad
    stay connected with their history on the worker that sent them, so that :func:`backward` can send gradients back to that
    worker. Calls of actors, ObjectRefs, streams and RRefs are recorded as well. At the end of the block all workers discard the
    context, with its graphs and gradients.

    A context belongs to the thread, or asyncio task, that entered it; other threads and tasks may have contexts of their own at
    the same time. A call from another worker runs in the context of its caller.

    Raises:
        NotInitializedError: RPC is not initialised in this process.
        RuntimeError: the block is inside of another ``with context()`` block, or of a call that belongs to a context.
    """

    _id: int | None = None
    _token: Any = None

    def __enter__(self) -> int:
        part = participant()
        outer = recorder.current_context()
        if outer is not None:
            raise RuntimeError(
                f"Already have an autograd context id for this thread: {outer}. Contexts cannot be nested: leave that context "
                f"first, or use its id"
            )
        self._id = part.contexts.create().id
        self._token = recorder.enter(self._id)
        return self._id

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        id, token, self._id, self._token = self._id, self._token, None, None
        if id is None:
            return
        recorder.restore(token)
        worker = current_worker()
        if worker is not None and worker.autograd is not None:
            worker.autograd.release(id)


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    *,
    gradient: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    accumulate: Literal["context", "grad"] = "context",
    mode: Literal["smart", "fast"] = "smart",
    timeout: float = UNSET_RPC_TIMEOUT,
    create_graph: bool = False,
) -> None:
    """Run the backward pass of a distributed forward pass, on all workers that took part in it; returns at its end.

    Each worker adds the gradients of its leaves to the context, where :func:`get_gradients` and DistributedOptimizer find the
    gradients. Hooks of every kind run on the worker of the tensor; hooks of leaves run once, on the whole gradient. A pass
    changes gradients on all workers or on none: after an error the gradients in the context are unchanged, and the pass may be
    repeated (if the first try had ``retain_graph=True``).

    If the roots do not depend on the results of a call, the call does not take part in the pass. Thread-safe; passes of
    different contexts run at the same time.

    Args:
        context_id: the id from ``with context() as context_id``.
        roots: the tensors to differentiate, on this worker, with one element each unless ``gradient`` is given.
        retain_graph: keep the graphs on all workers for another backward pass in this context.
        gradient: for each root its gradient, a tensor of the root's shape; by default a tensor of ones.
        accumulate: ``"context"``: add gradients to the context. ``"grad"``: to ``.grad``, as a local ``backward()`` does.
        mode: ``"smart"`` or ``"fast"``, the names of torch's design notes. The two modes run the same pass, which begins with
            a search for the messages that take part.
        timeout: seconds; 0, the default: no time-out, but the death of a worker ends the pass.
        create_graph: record the pass itself, for gradients of gradients (experimental).

    Raises:
        RuntimeError: there is no such context; a root does not require grad, has no history, or more than one element;
            the graph was freed by an earlier pass.
        TypeError, ValueError: an argument is not valid.
        RpcTimeoutError: the pass took longer than ``timeout``.
        PeerDiedError: a worker that took part has died.
        RemoteError: a node or hook on another worker raised an exception. The error is an instance of its class, too.
    """
    participant().backward(
        context_id,
        roots,
        retain_graph=retain_graph,
        gradients=gradient,
        accumulate=accumulate,
        mode=mode,
        timeout=0.0 if timeout == UNSET_RPC_TIMEOUT else check_timeout(timeout),
        create_graph=create_graph,
    )


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients that backward passes have added to a context for the leaves of this worker: leaf -> gradient.

    Tensors as keys are compared by identity. If this worker has done its part of a pass, the function waits for the pass's end.

    Raises:
        RuntimeError: this worker does not know the context.
        RpcTimeoutError: the pass did not end within the time-out of the RPC group.
    """
    return dict(participant().gradients(context_id, api.get_rpc_timeout()).values())


def contexts() -> Contexts:
    """Return the autograd contexts of this worker.

    Raises:
        NotInitializedError: RPC is not initialised in this process.
    """
    return participant().contexts


def participant() -> Participant:
    """Return this worker's Participant in backward passes.

    Raises:
        NotInitializedError: RPC is not initialised in this process.
    """
    worker = current_worker()
    found: Participant | None = None if worker is None else worker.autograd
    if found is None:
        raise NotInitializedError(
            "distributed autograd needs RPC: call init_rpc() in every worker, or actorrpc.init(), first"
        )
    return found


def start(worker: Worker) -> Callable[[bool], None]:
    """Start distributed autograd of a worker; return the function that ends it at shutdown."""
    agent, references = worker.agent, worker.references
    made = Contexts(references.me)
    part = Participant(made, AgentTransport(agent, references))
    lease = agent.settings.context_ttl
    over = False

    def noticed(peer: Peer, body: bytes) -> None:
        notice = unpack_notice(body)
        if isinstance(notice, Verdict) and part.may_wait(notice):
            agent.submit(partial(part.on_notice, peer.key, notice))
        else:
            part.on_notice(peer.key, notice)

    def peer_ended(peer: Peer) -> None:
        part.worker_died(peer.key)

    def look() -> None:
        part.expire(lease)
        look_later()

    def look_later() -> None:
        if not over:
            agent.clock.after(lease / _LOOKS, partial(agent.submit, look))

    def shut_down(_graceful: bool) -> None:
        nonlocal over
        over = True
        worker.autograd = None
        agent.recorder = Recorder()
        for context in made.all():
            part.release(context.id)

    agent.on_notice[NOTICE] = noticed
    agent.inbox.prompt.add(NOTICE)
    agent.on_peer_end.append(peer_ended)
    agent.recorder = recorder.GraphRecorder(made)
    worker.autograd = part
    look_later()
    return shut_down


api.on_start.append(start)
