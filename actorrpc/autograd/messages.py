"""The messages that workers send each other in a backward pass. No I/O, no state.

In this package, a *message* of the forward pass is a request or answer with tensors that require grad, and a *receipt* is the
record of such a message on its receiver. The classes below are named tuples, because these are pickled in C: one of them is sent
for each message of the forward pass.
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

#: The gradients of one message: one for each of its tensors that require grad, or None. The receiver moves them out of the
#: list, because the engine copies a gradient that is referred to elsewhere before it becomes a ``.grad``.
Gradients = list["torch.Tensor | None"]


class Contribution(NamedTuple):
    """The source of one gradient of a message: the worker that received the message, and the number of its receipt. A message
    has one contribution for each receipt that takes part in the pass."""

    worker: WorkerKey
    receipt: int


class Sink(NamedTuple):
    """A receipt at which gradients end: the sender of the received message, the message's number, and the receipt's number."""

    worker: WorkerKey
    message: int
    receipt: int


class Discover(NamedTuple):
    """Query: to which receipts lead the gradients of messages that the receiver has sent? Answer: ``{message: [Sink, ...]}``."""

    context: int
    messages: Sequence[int]


class Stratum(NamedTuple):
    """Messages of one worker and one level (see ``planner.py``), whose gradients are processed in one call of the engine.

    Attributes:
        messages: message -> the contributions that it waits for, in the order in which they are added up.
    """

    messages: dict[int, tuple[Contribution, ...]]


class Run(NamedTuple):
    """Gives a worker its part of a pass. Answered when the part is done, or with the error that ended it."""

    context: int
    pass_id: int
    strata: Sequence[Stratum]
    retain_graph: bool
    create_graph: bool
    accumulate: str  # "context" or "grad"
    timeout: float  # seconds that are left of the pass; 0: no bound
    gradients: Sequence[Gradient]  # complete gradients of the origin for this worker


class Gradient(NamedTuple):
    """The gradient of one message, from one of its receipts. Has no answer: errors are in the answer to :class:`Run`."""

    context: int
    pass_id: int
    message: int
    receipt: int
    gradients: Gradients
    create_graph: bool = False  # the gradients have a history: they are recorded as tensors of any call are


class Settle(NamedTuple):
    """Asks a worker to answer when it has acted on the verdict, which was sent before."""

    context: int
    pass_id: int


class Verdict(NamedTuple):
    """Says whether a pass has succeeded on all workers, so that each adds its gradients."""

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
        """Send a message and return a future of the answer. Never raises, never waits.

        Args:
            timeout: seconds; 0: wait until the worker answers or dies.
        """

    def cast(self, to: WorkerKey, message: Gradient) -> None:
        """Send a gradient that needs no answer. Never waits for the other worker.

        Raises:
            Exception: it cannot be sent, or the worker is dead.
        """

    def notify(self, to: WorkerKey, notice: Notice) -> None:
        """Send a notice that needs no answer; repeat it until it is sent. Never raises, never waits.

        A notice that is not urgent (a pass has succeeded, a context has been released) may be delayed, to be sent with
        another message.
        """

    def name(self, worker: WorkerKey) -> str:
        """Return the name of a worker for error messages."""

    def noted(self, kind: str, begun: float, context: int) -> None:
        """Record what this thread has done for a context from ``begun`` until now.

        Args:
            kind: ``"backward"`` for a whole pass, ``"visit"`` for a stratum or the leaves of this worker.
        """

    def begin_wait(self, part: Any) -> Any:
        """Let this thread process the gradients that it reads while it waits for this part of a pass.

        Returns the argument for :meth:`end_wait`.
        """

    def run_casts(self) -> None:
        """Process the gradients that this thread has read and not processed yet.

        Raises:
            Exception: a signal handler raised it.
        """

    def end_wait(self, outer: Any) -> None:
        """Undo :meth:`begin_wait`; gradients that were read and not processed are passed to other threads."""

    def waits_for_another(self, part: Any) -> bool:
        """Say whether this thread waits for another part of a pass than this one."""

    def later(self, run: Callable[[], object]) -> None:
        """Run ``run()`` on another thread."""
