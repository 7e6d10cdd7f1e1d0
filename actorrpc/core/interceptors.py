"""Interceptors and recorders: what rides along with calls without the agent knowing of it.

Traces, profiling and the like put fields into the headers of calls and answers, and wrap executions. A recorder takes note
of the tensors in messages: distributed autograd. Where there is none, a call carries no header and pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from actorrpc.core.calls import Execution
    from actorrpc.core.peer import Peer

__all__ = [
    "RECEIPT",
    "RIDERS",
    "TAG",
    "Bystander",
    "Interceptor",
    "NoRecorder",
    "Recorder",
    "answer_header",
    "intercepted",
    "recorded",
    "riding",
]

TAG: Final = "ag"
"""The field of a header in which a recorder's tag travels."""

RECEIPT: Final = "rref"
"""The field of an answer's header that says which references of the call have arrived, and the notice that says so."""


class Interceptor(Protocol):
    """Something that rides along with calls. Methods run on the thread of the call; what they raise ends it."""

    def request_header(self, header: dict[str, Any], peer: Peer) -> None:
        """Put fields into the header of a call that is about to be packed."""

    def reply_header(self, header: dict[str, Any], execution: Execution) -> None:
        """Put fields into the header of an answer that is about to be packed."""

    def wrap(
        self,
        execution: Execution,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[[], Any],
    ) -> Callable[[], Any]:
        """Return what to run in place of ``call``; ``execution.header`` has the fields that came along."""

    def reply_received(self, header: dict[str, Any], peer: Peer, value: Any) -> Any:
        """See, and maybe replace, a value that has come back."""


class Bystander:
    """An interceptor that leaves everything as it is: the base of those that see to one or two things."""

    def request_header(self, header: dict[str, Any], peer: Peer) -> None:
        """Do nothing."""

    def reply_header(self, header: dict[str, Any], execution: Execution) -> None:
        """Do nothing."""

    def wrap(
        self,
        execution: Execution,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[[], Any],
    ) -> Callable[[], Any]:
        """Return ``call``."""
        return call

    def reply_received(self, header: dict[str, Any], peer: Peer, value: Any) -> Any:
        """Return the value."""
        return value


#: Interceptors that take part only in the calls that have their field in the header: others pay nothing for them. They wrap
#: executions, and what they return is sent.
RIDERS: Final[dict[str, Interceptor]] = {}


class Recorder(Protocol):
    """Takes note of the tensors in messages, to follow them from worker to worker. One per agent. Thread-safe."""

    @property
    def live(self) -> bool:
        """Whether there is something to record; otherwise it is asked about tensors that require grad only."""

    def sent(self, tensors: Sequence[Any], peer: Peer | None, context: int | None = None) -> Any:
        """See the plain tensors of what has been packed, on the thread that packs it.

        Args:
            peer: to whom the message goes; None for something that is kept, to be opened later anywhere.
            context: what it belongs to; by default what the calling code does.

        Returns:
            What is to travel along (anything that msgpack can pack), or None.
        """

    def arrived(self, tag: Any, tensors: list[Any], peer: Peer | None) -> None:
        """See the plain tensors of what has been opened, in the order in which they were packed.

        Args:
            tag: what :meth:`sent` has returned there, as it came over the wire.
            peer: who has sent it; None for something that was kept.

        Raises:
            ProtocolError: the tag makes no sense.
        """

    def forwarded(self, tag: Any, peer: Peer) -> None:
        """Hear that something kept goes to a worker."""


class NoRecorder:
    """The recorder where nobody wants to know."""

    live = False

    def sent(self, tensors: Sequence[Any], peer: Peer | None, context: int | None = None) -> Any:
        """Do nothing."""

    def arrived(self, tag: Any, tensors: list[Any], peer: Peer | None) -> None:
        """Do nothing."""

    def forwarded(self, tag: Any, peer: Peer) -> None:
        """Do nothing."""


def recorded(
    recorder: Recorder, header: dict[str, Any] | None, tensors: Sequence[Any], peer: Peer
) -> dict[str, Any] | None:
    """Return the header of a message that has been packed, with the recorder's tag where it gives one."""
    tag = recorder.sent(tensors, peer)
    if tag is not None:
        header = {} if header is None else header
        header[TAG] = tag
    return header


def riding(interceptors: Sequence[Interceptor], header: dict[str, Any]) -> Sequence[Interceptor]:
    """Return who wraps the execution of a call with this header: its riders are the outermost."""
    return [*(rider for name, rider in RIDERS.items() if name in header), *interceptors]


def answer_header(interceptors: Sequence[Interceptor], execution: Execution) -> dict[str, Any]:
    """Return the header of an answer, as the interceptors fill it."""
    header: dict[str, Any] = {}
    for interceptor in interceptors:
        interceptor.reply_header(header, execution)
    return header


def intercepted(
    interceptors: Sequence[Interceptor],
    execution: Execution,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Callable[[], Any]:
    """Return what to run in place of ``function(*args, **kwargs)``: the first interceptor is the outermost."""
    call: Callable[[], Any] = lambda: function(*args, **kwargs)  # noqa: E731
    for interceptor in reversed(interceptors):
        call = interceptor.wrap(execution, function, args, kwargs, call)
    return call
