"""The types of messages between workers, under the names that faults use."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from actorrpc.agent.hooks import RECEIPT, CallHooks, OutgoingMessage
from actorrpc.autograd import transport
from actorrpc.autograd.messages import Verdict
from actorrpc.errors import ConfigError, WrongTypeError
from actorrpc.rpc import rref
from actorrpc.rpc.refcount.messages import ChildAccept, ForkAck, ForkRequest, UserDelete, unpack_message
from actorrpc.wire import frames

if TYPE_CHECKING:
    from actorrpc.agent.calls import MailHeader
    from actorrpc.agent.peers import Peer

__all__ = [
    "ANSWER",
    "CONTROL",
    "MESSAGES",
    "NOTICES",
    "Message",
    "described",
    "names_of",
    "type_of_notice",
    "type_of_request",
    "types_named",
]

ANSWER: Final = "answer"
CONTROL: Final = "group_control"

MESSAGES: Final[Mapping[str, str]] = {
    "call": "a call with rpc_sync or rpc_async, or through a proxy of an RRef or a RemoteModule",
    "remote": "a call with remote(), which makes a value on another worker",
    "to_here": "to_here(): the request for an RRef's value",
    "actor_call": "a call of an actor's method",
    ANSWER: "the answer to a request of any type but group_control: a value or an error",
    "actor_control": "requests to create, find, watch and end actors, and to fetch the items of their streams",
    "rref_fork": "a worker tells the owner of a value that the worker has a new RRef to the value",
    "rref_fork_ack": "the owner's answer to rref_fork",
    "rref_accept": "a worker confirms to the sender of an RRef that it has received the RRef; usually part of an answer",
    "rref_delete": "a worker tells the owner of a value that RRefs to the value no longer exist",
    "autograd_backward": "the requests of a backward pass to other workers, except for gradients",
    "autograd_gradient": "the gradients for the tensors of one message, in a backward pass",
    "autograd_verdict": "the end of a backward pass: whether its gradients are kept",
    "autograd_release": "the end of an autograd context",
    CONTROL: "messages by which workers shut down together, and by which a driver runs its cluster; includes the answers",
}
"""All types of messages, with descriptions. Acknowledgements and heartbeats do not count as messages."""

NOTICES: Final = frozenset(
    {"rref_fork", "rref_fork_ack", "rref_accept", "rref_delete", "autograd_verdict", "autograd_release"}
)
"""Messages without an answer."""

_NOTICES: Final[Mapping[type, str]] = {
    ForkRequest: "rref_fork",
    ForkAck: "rref_fork_ack",
    ChildAccept: "rref_accept",
    UserDelete: "rref_delete",
}
# Types of requests that this package itself makes, by prefixes of the function's module; the first match counts.
_OWN: Final = (
    ("actorrpc.actors.", "actor_control"),
    ("actorrpc.autograd.", "autograd_backward"),
    ("actorrpc.cluster.", CONTROL),
    ("actorrpc.group.group", CONTROL),
    ("actorrpc.compat.rpc.api", CONTROL),
)
# This function belongs to one of the modules above, but calls a user's function.
_PACKED: Final = "_run_packed"


class Message:
    """A message that is about to be sent, as faults see it.

    Attributes:
        type: one of :data:`MESSAGES`.
        peer: its receiver.
        called: the function, or its name, that the message calls or answers; None for other messages.
        subject: the id of the value for messages about an RRef; else None.
    """

    __slots__ = ("_parts", "called", "peer", "subject", "type")

    def __init__(
        self, type: str, peer: Peer, called: Any, parts: Sequence[bytes] = (), subject: Any = None
    ) -> None:
        self.type = type
        self.peer = peer
        self.called = called
        self.subject = subject
        self._parts = parts

    def key(self) -> bytes:
        """Return a key that is equal when the same message is sent again, and differs for other messages."""
        digest = hashlib.blake2b(f"{self.type}\0{self.peer.name}\0".encode(), digest_size=16)
        for part in self._parts:
            digest.update(part)
        return digest.digest()


def types_named(patterns: Iterable[str]) -> frozenset[str]:
    """Return the types that names and patterns (``rref_*``) select.

    Raises:
        ConfigError: there is no such type, or the list is empty.
    """
    found: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise WrongTypeError(f"a type of message is named by a str, not by {pattern!r}")
        named = [name for name in MESSAGES if fnmatchcase(name, pattern)]
        if not named:
            raise ConfigError(
                f"there is no type of message {pattern!r}; there are: {', '.join(MESSAGES)} (and patterns, as 'rref_*')"
            )
        found.update(named)
    if not found:
        raise ConfigError(f"name at least one type of message; there are: {', '.join(MESSAGES)}")
    return frozenset(found)


def described(sent: OutgoingMessage, by: CallHooks) -> Message | None:
    """Describe a message that an agent is about to send, as faults see it; None for a notice that has no type.

    Args:
        by: the :class:`FaultFilter` that calls this function. Its ``on_start()`` has stored a description of each request that
            runs in ``execution.notes[by]``, from which the description of the answer is made.
    """
    if sent.kind == frames.NOTICE:
        assert isinstance(sent.encoded, bytes)
        notice = type_of_notice(sent.name, sent.encoded)
        return None if notice is None else Message(notice, sent.peer, None, (sent.encoded,))
    parts = _contents(sent.encoded)
    if sent.is_answer:
        answered: Message | None = None if sent.execution is None else sent.execution.notes.get(by)
        if answered is None:
            return Message(ANSWER, sent.peer, None, parts)
        return Message(CONTROL if answered.type == CONTROL else ANSWER, sent.peer, answered.called, parts)
    type, called, subject = type_of_request(sent.function, sent.args, sent.mail, sent.name)
    parts = parts if sent.mail is None else [sent.mail.packed, *parts]
    return Message(type, sent.peer, called, parts, subject)


def _contents(encoded: Any) -> list[bytes]:
    if isinstance(encoded, bytes):
        return [encoded]
    # Equal messages must have equal keys. Of two equal messages without spans, one may be an ``Encoded``, the other bytes.
    if not encoded.spans:
        return [encoded.body]
    return [encoded.body, repr([span.nbytes for span in encoded.spans]).encode()]


def type_of_request(
    function: Any, args: tuple[Any, ...], mail: MailHeader | None, label: str
) -> tuple[str, Any, Any]:
    """Return the type of a call, the function that it calls, and, if the call uses an RRef, the id of the RRef's value."""
    if mail is not None:
        return ("actor_call", label, None) if "method" in mail.header else ("actor_control", label, None)
    module = getattr(function, "__module__", None)
    if not isinstance(module, str) or not module.startswith("actorrpc."):
        return "call", function, None
    if function is rref._create:
        called = args[3][2] if args[2] is rref._invoke_kept else args[2]
        return "remote", called, args[0]
    if function is rref._fetch:
        return "to_here", None, args[0]
    if function is rref._invoke or function is rref._with_value:
        return "call", args[1], args[0]
    if function is rref._backward:
        return "autograd_backward", None, args[0]
    if function is transport.serve:
        is_gradient = args[0] == transport._GRADIENT
        return "autograd_gradient" if is_gradient else "autograd_backward", None, None
    if getattr(function, "__name__", None) != _PACKED:
        for beginning, name in _OWN:
            if module.startswith(beginning):
                return name, None, None
    return "call", function, None


def type_of_notice(name: str, body: bytes) -> str | None:
    """Return the type of a notice; None if it has no type."""
    if name == RECEIPT:
        return _NOTICES[type(unpack_message(body))]
    if name == transport.NOTICE:
        return "autograd_verdict" if type(transport.unpack_notice(body)) is Verdict else "autograd_release"
    return None


def names_of(called: Any) -> tuple[str, ...]:
    """Return the names that select a function: with and without its class, and with its module.

    The last name selects exactly this function; it begins with a colon if the module is unknown. Empty if ``called`` has no name.
    """
    while isinstance(called, partial):
        called = called.func
    if isinstance(called, str):
        return called, called.rpartition(".")[2], f":{called}"
    full = (
        called.name if isinstance(called, torch.jit.ScriptFunction) else getattr(called, "__qualname__", None)
    )
    if not isinstance(full, str):
        return ()
    module = getattr(called, "__module__", None)
    return full, full.rpartition(".")[2], f"{module}.{full}" if isinstance(module, str) else f":{full}"
