"""Backward passes in profiles, as torch shows them: the pass, and what it does with the gradients of messages.

The pass is ``torch::distributed::autograd::backward``, on the thread that has called it. Gradients that have come for a
message that was sent from here are ``...SendRpcBackward``, those that go to whoever sent a message are
``...RecvRpcBackward``, on whichever thread. Only the part of the worker whose profile it is can be seen.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Final

from actorrpc.autograd.messages import Gradient
from actorrpc.autograd.participant import Participant
from actorrpc.autograd.passes import Pass
from actorrpc.autograd.wiring import participant
from actorrpc.rpc.fork_messages import WorkerKey
from actorrpc.rpc.profiling import Collector, Row, collector, modern, profiled

__all__ = ["profiled_pass"]

_NAME: Final = "torch::distributed::autograd::"
_lock = threading.Lock()  # guards _wanted; nothing is called under it
_wanted: Final[dict[int, list[Collector]]] = {}  # by the number of the context


@contextlib.contextmanager
def profiled_pass(context_id: int) -> Iterator[None]:
    """Show the pass that runs in the block in this thread's profile, if there is one."""
    if not (modern._is_profiler_enabled or profiled()):
        yield
        return
    found = collector()
    worker = participant()
    try:
        if found is not None:
            _watch(worker, context_id, found)
        with modern.record_function(f"{_NAME}backward"):
            yield
    finally:
        if found is not None:
            _forget(worker, context_id, found)


def _watch(worker: Participant, context_id: int, found: Collector) -> None:
    with _lock:
        _wanted.setdefault(context_id, []).append(found)
        worker.watch = partial(_work, worker.me.rank)


def _forget(worker: Participant, context_id: int, found: Collector) -> None:
    with _lock:
        _wanted[context_id].remove(found)
        if not _wanted[context_id]:
            del _wanted[context_id]
        if not _wanted:
            worker.watch = None


def _work(node: int, part: Pass, index: int) -> Iterator[tuple[WorkerKey, Gradient]]:
    """Work off a stratum on the worker of rank ``node``, and note what there was."""
    began = time.time_ns()
    complete = part.work(index)
    for _ in part.messages(index):
        _note(node, part, "SendRpcBackward", began)
    for each in complete:
        began = time.time_ns()
        yield each  # it is on its way when the next one is wanted
        _note(node, part, "RecvRpcBackward", began)


def _note(node: int, part: Pass, name: str, began: int) -> None:
    ended = time.time_ns()
    for found in list(_wanted.get(part.context.id, ())):
        start, end = began - found.began, ended - found.began
        thread = threading.get_ident()
        found.rows.append(Row(_NAME + name, node, start, end, thread, is_remote=False))
