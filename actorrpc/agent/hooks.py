"""What sees calls and messages pass without the agent knowing of it. An agent without hooks pays a look at one name for each.

:class:`Interceptor` puts fields into the headers of calls and answers, and wraps executions: traces, profiling. A
:class:`Recorder` notes the tensors in messages: distributed autograd. A :class:`MessageFilter` sees every message before it
leaves, and may keep it: tests lose and hold up messages on purpose (``actorrpc.testing``). *Points* are named moments in the
life of a worker that are not messages, at which tests have it die, stop or fail; none of them is on the path of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from actorrpc.agent.calls import Call, Execution
    from actorrpc.agent.mail import MailHeader
    from actorrpc.agent.peers import MessageContext, Peer
    from actorrpc.serialization.codec import Encoded
    from actorrpc.wire.headers import Header

__all__ = [
    "POINTS",
    "RECEIPT",
    "RIDERS",
    "Interceptor",
    "MessageFilter",
    "MessageReferences",
    "Recorder",
    "answer_header",
    "intercepted",
    "reach",
    "recorded",
    "riding",
    "watch",
]

RECEIPT: Final = "receipt"
"""The notice of the protocol of reference counts: which references have arrived, and which are gone."""


class Interceptor:
    """Rides along with calls; by itself, it changes nothing. Methods run on the thread of the call; what they raise ends it."""

    def request_header(self, header: Header, peer: Peer) -> None:
        """Put fields into the header of a call that is about to be packed."""

    def reply_header(self, header: Header, execution: Execution) -> None:
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
        return call

    def reply_received(self, header: Header, peer: Peer, value: Any) -> Any:
        """Return the value of a reply, or a replacement."""
        return value


#: Interceptors that take part only in the calls that have their field in the header: others pay nothing for them. They wrap
#: executions, and what they return is sent.
RIDERS: Final[dict[str, Interceptor]] = {}


class Recorder:
    """Records the tensors in messages, to follow them from worker to worker; this one does not. One per agent. Thread-safe.

    Attributes:
        live: what messages could belong to; while that is empty, it is asked about tensors that require grad only.
    """

    live: Collection[object] = ()

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
            peer: its sender; None for something that was kept.

        Raises:
            ProtocolError: the tag makes no sense.
        """

    def forwarded(self, tag: Any, peer: Peer) -> None:
        """Hear that something kept goes to a worker."""


class MessageReferences:
    """Counts the references in messages. One per agent; thread-safe. This base class serves agents without references."""

    def pack(self, sent: list[Any]) -> bytes:
        """Return what the header says of the references in a message that has been packed."""
        return b""

    def roll_back(self, context: MessageContext) -> None:
        """Take back the references of a message that is not sent."""

    def arrived(self, context: MessageContext, packed: bytes) -> None:
        """Take up the references of a message that is about to be opened."""

    def refuse(self, peer: Peer, packed: bytes) -> None:
        """Give back the references of a message that will not be opened."""

    def confirm(self, received: list[Any], execution: Execution) -> None:
        """Have a call that is executed wait until the owners know of the references that it has received."""


def recorded(
    recorder: Recorder, header: Header | None, encoded: Encoded | bytes, peer: Peer
) -> Header | None:
    """Return the header of a message that has been packed, with the recorder's tag where it gives one."""
    tag = recorder.sent(() if isinstance(encoded, bytes) else encoded.tensors, peer)
    if tag is not None:
        header = {} if header is None else header
        header["tag"] = tag
    return header


def riding(interceptors: Sequence[Interceptor], header: Header) -> Sequence[Interceptor]:
    """Return what wraps the execution of a call with this header: its riders are the outermost."""
    return [*(rider for name, rider in RIDERS.items() if name in header), *interceptors]


def answer_header(interceptors: Sequence[Interceptor], execution: Execution) -> Header:
    """Return the header of an answer, as the interceptors fill it."""
    header: Header = {}
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


class MessageFilter(Protocol):
    """Decides of messages that are packed and about to leave. Called on the thread that sends; thread-safe.

    Where a method returns False the gate has taken the message over: it sends it later, or ends the call that waits for it.
    """

    def request(
        self,
        call: Call,
        function: Any,
        args: tuple[Any, ...],
        encoded: Encoded | bytes,
        header: Header | None,
        mail: MailHeader | None,
        message: MessageContext,
    ) -> bool:
        """Say whether a call leaves now. It is in no table yet."""

    def post(
        self,
        peer: Peer,
        function: Any,
        args: tuple[Any, ...],
        encoded: Encoded | bytes,
        header: Header | None,
        chain: int,
        message: MessageContext,
    ) -> bool:
        """Say whether a post leaves now.

        Raises:
            RpcError: it will not arrive.
        """

    def answer(
        self,
        conn: Any,
        kind: int,
        id: int,
        encoded: Encoded | bytes,
        header: Header | None,
        execution: Execution | None,
        message: MessageContext | None,
    ) -> bool:
        """Say whether the answer to a call leaves now. ``conn`` is None for one of this worker to itself."""

    def notice(self, peer: Peer, name: str, body: bytes) -> bool:
        """Send a notice, or keep it; return what :meth:`Agent.notify` is to return."""


POINTS: Final[Mapping[str, str]] = {
    "join.listening": "a worker has opened its sockets and is about to meet the others",
    "join.met": "a worker knows the others, and they know it; it serves no call yet",
    "shutdown.called": "a worker of a fixed group is about to wait until all have called shutdown",
    "shutdown.together": "all have called it: nobody works any more",
    "shutdown.let_go": "a worker has let go of its references, and is about to wait until all have",
    "shutdown.settled": "all have let go of theirs",
    "shutdown.closing": "a worker is about to close its connections, at any kind of end",
    "shutdown.closed": "it has closed them, and is to be forgotten by the others",
    "actor.making": "an actor's worker is about to run its constructor, for the first time or again",
    "actor.restoring": "the constructor of a restarted actor has run; restore() comes next",
    "actor.made": "an actor is made, but nobody knows yet",
    "actor.checkpointing": "an actor is about to be asked for its checkpoint, before its answer leaves",
    "actor.checkpointed": "the supervisor has the checkpoint; the answer has not been sent yet",
    "actor.ending": "an actor has ended; on_stop() comes next",
}
"""Every point that is no message's, and when it is reached."""

_watcher: Callable[[str, str], None] | None = None


def watch(watcher: Callable[[str, str], None] | None) -> None:
    """Have ``watcher(point, worker)`` called at every point from now on; None: nobody. It may raise."""
    global _watcher
    _watcher = watcher


def reach(point: str, worker: str = "") -> None:
    """Be at a point. ``worker``: the one that is, where the process has no agent yet."""
    if _watcher is not None:
        _watcher(point, worker)
