"""The messages that workers send each other in a backward pass. No I/O, no state.

In this package, a *message* of the forward pass is a request or answer with tensors that require grad, and a *receipt* is the
record of such a message on its receiver. The classes below are named tuples, because :data:`make`
(``tuple.__new__``) makes a named tuple without running Python code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerKey

#: ``make(cls, fields)`` makes a named tuple; a call of ``cls`` would run a function in Python.
make: Final = tuple.__new__

__all__ = [
    "ROOTS",
    "Contribution",
    "Discover",
    "Gradient",
    "Gradients",
    "Message",
    "Notice",
    "Release",
    "Run",
    "Settle",
    "Sink",
    "Stratum",
    "Transport",
    "Verdict",
    "make",
]

#: The number that stands for the roots in place of a message. No message has this number.
ROOTS: Final = 0

#: For each tensor of a message that requires grad its gradient, or None. The receiver empties this list, because the engine makes
#: a gradient ``.grad`` without a copy only if no other code refers to the gradient.
Gradients = list["torch.Tensor | None"]


class Contribution(NamedTuple):
    """The source of gradients of a message: a worker that received the message, and the worker's number of the receipt. A message
    has one contribution for each receipt of it that takes part in the pass."""

    worker: WorkerKey
    receipt: int


class Sink(NamedTuple):
    """A receipt at which gradients end: the sender of the received message, the message's number, and the receipt's number."""

    worker: WorkerKey
    message: int
    receipt: int


class Discover(NamedTuple):
    """Query to the sender of messages: to which receipts do their gradients lead? Answer: ``{message: [Sink, ...]}``."""

    context: int
    messages: Sequence[int]


class Stratum(NamedTuple):
    """Messages of one worker and one level (see ``coordinator.py``), whose gradients are processed in one call of the engine.

    Attributes:
        messages: message -> the contributions for which it waits, in the order in which they are added up.
    """

    messages: dict[int, tuple[Contribution, ...]]


class Run(NamedTuple):
    """Asks a worker to run its part of a pass. Answered when the part is done, or with the error that ended the part."""

    context: int
    pass_id: int
    strata: Sequence[Stratum]
    retain_graph: bool
    create_graph: bool
    accumulate: str  # "context" or "grad"
    timeout: float  # seconds until the deadline of the pass; 0: no deadline
    # The first gradients for this worker, which the sender has computed already.
    gradients: Sequence[Gradient]


class Gradient(NamedTuple):
    """The gradients of one message, from one of its receipts. It has no answer: errors are in the answer to :class:`Run`."""

    context: int
    pass_id: int
    message: int
    receipt: int
    gradients: Gradients
    create_graph: bool = False  # the gradients have a history, and are recorded like tensors of other calls


class Settle(NamedTuple):
    """Asks a worker to answer when the worker has acted on the verdict, which was sent before this message."""

    context: int
    pass_id: int


class Verdict(NamedTuple):
    """Tells a worker whether a pass has succeeded on all workers. If so, the worker adds the gradients of its leaves."""

    context: int
    pass_id: int
    commit: bool


class Release(NamedTuple):
    """Says that a context has been released."""

    context: int


Message = Discover | Run | Gradient | Settle
Notice = Verdict | Release


class Transport(Protocol):
    """Sends messages to other workers, and to this worker."""

    me: WorkerKey

    def request(self, to: WorkerKey, message: Message, timeout: float) -> Future[Any]:
        """Send a message and return a future of the answer. Does not raise errors of sending, and does not wait.

        Args:
            timeout: seconds; 0: wait until the worker answers or dies.
        """

    def cast(self, to: WorkerKey, message: Gradient) -> None:
        """Send a gradient that needs no answer. Never waits for the other worker.

        Raises:
            Exception: the message cannot be sent, or the worker is dead.
        """

    def notify(self, to: WorkerKey, notice: Notice) -> None:
        """Send a notice that needs no answer, and retry for a limited time while the worker is alive. Never raises or waits.

        A notice that is not urgent (a pass has succeeded, a context has been released) may be delayed until another message
        is sent to the worker.
        """

    def name(self, worker: WorkerKey) -> str:
        """Return the name of a worker for error messages."""

    def noted(self, kind: str, begun: float, context: int) -> None:
        """Record work of this thread for a context, from ``begun`` until now, in the flight recorder.

        Args:
            kind: ``"backward"`` for a whole pass; ``"visit"`` for a stratum, or for finishing the leaves of this worker.
        """

    def begin_wait(self, part: Any) -> Any:
        """From now on, collect the gradients that this thread reads while it waits for ``part``, for :meth:`run_casts`.

        Returns the argument for :meth:`end_wait`.
        """

    def run_casts(self) -> None:
        """Process the gradients that this thread has read and not processed yet.

        Raises:
            Exception: a signal handler raised it.
        """

    def end_wait(self, outer: Any) -> None:
        """Undo :meth:`begin_wait`; pass the collected gradients that were not processed to other threads."""

    def waits_for_another(self, part: Any) -> bool:
        """Return whether this thread waits, after :meth:`begin_wait`, for a part other than ``part``."""

    def later(self, run: Callable[[], object]) -> None:
        """Run ``run()`` on another thread."""
