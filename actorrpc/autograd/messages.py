"""What workers tell each other in a backward pass. No I/O, no state.

Messages are named tuples because these are pickled in C: one of them crosses for each message of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerKey

#: Makes a named tuple of a tuple: its class goes through a function in Python.
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

#: The gradients of one message: one for each of its tensors that require grad; None where there is none. The worker that works
#: them off takes them out of the list: what a message still refers to, the engine would copy before it becomes a ``.grad``.
Gradients = list["torch.Tensor | None"]


class Contribution(NamedTuple):
    """Who sends a gradient for a message: a worker, and the number of the receipt there. A message has one for each
    receipt of it that takes part in the pass."""

    worker: WorkerKey
    receipt: int


class Sink(NamedTuple):
    """A receipt that can be reached from somewhere: the message that it is of, and its own number."""

    worker: WorkerKey
    message: int
    receipt: int


class Discover(NamedTuple):
    """Asks which receipts can be reached from messages of the asked worker. Answer: ``{message: [Sink, ...]}``."""

    context: int
    messages: Sequence[int]


class Stratum(NamedTuple):
    """Messages of one worker whose gradients are worked off in one call of the engine: all of one level.

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
    gradients: Sequence[Gradient]  # what the origin has for this worker already


class Gradient(NamedTuple):
    """Brings the gradient of one message, from one of its receipts. It is posted: what becomes of it is heard in the answer
    to :class:`Run`.
    """

    context: int
    pass_id: int
    message: int
    receipt: int
    gradients: Gradients
    create_graph: bool = False  # the gradients have a history: they are recorded as tensors of any call are


class Settle(NamedTuple):
    """Asks to be answered when the verdict on a pass, which goes before it, has been acted upon."""

    context: int
    pass_id: int


class Verdict(NamedTuple):
    """Says that a pass has succeeded everywhere, so that its gradients count; or that it has failed, and they do not."""

    context: int
    pass_id: int
    commit: bool


class Release(NamedTuple):
    """Says that a context is over."""

    context: int


Message = Discover | Run | Gradient | Settle
Notice = Verdict | Release


class Transport(Protocol):
    """How messages go to other workers, and to this one."""

    me: WorkerKey

    def ask(self, to: WorkerKey, message: Message, timeout: float) -> Future[Any]:
        """Send a message and return a future of the answer. Never raises, never waits.

        Args:
            timeout: seconds; 0 means no bound but the life of the worker.
        """

    def post(self, to: WorkerKey, message: Gradient) -> None:
        """Send a gradient that needs no answer. Never waits for the other worker.

        Raises:
            Exception: it cannot be sent, or the worker is dead.
        """

    def tell(self, to: WorkerKey, notice: Notice) -> None:
        """Send a notice that needs no answer, as often as it takes. Never raises, never waits.

        What nobody is in a hurry for (that a pass has succeeded, that a context is over) may wait for a moment, to go along
        with something else.
        """

    def name(self, worker: WorkerKey) -> str:
        """Return what errors call a worker."""

    def visited(self, begun: float, context: int) -> None:
        """Write down that this thread has worked off a stratum of a context, or its leaves, from ``begun`` until now."""

    def attend(self, part: Any) -> Any:
        """Have gradients that this thread reads while it waits for this part of a pass worked off by itself.

        Returns what :meth:`leave` is given.
        """

    def work_off(self) -> None:
        """Work off what has been read and is left.

        Raises:
            Exception: what a signal handler has raised.
        """

    def leave(self, outer: Any) -> None:
        """End what :meth:`attend` began."""

    def attends_another(self, part: Any) -> bool:
        """Say whether this thread waits for another part of a pass than this one."""

    def later(self, run: Callable[[], object]) -> None:
        """Run ``run()`` on another thread."""
