"""The header of a message: what is said of it where it can be read without unpickling its body. No I/O, no locks.

On the wire it is a msgpack map of the fields that are there, in a frame's ``extra`` bytes. Most messages have none.
"""

from __future__ import annotations

from typing import Any, Final, TypedDict

import msgpack

from actorrpc.errors import ProtocolError

__all__ = ["Header", "pack_header", "unpack_header"]


class Header(TypedDict, total=False):
    """The fields of a header. Those who read one check the values that they use: a peer may send anything."""

    # Any message
    sizes: list[int]  # of its buffers, in bytes
    stream: int  # the number under which its buffers come in chunks
    placement: (
        tuple[int, int] | list[int]
    )  # its buffers are in shared memory: segment, loan (shared_memory.Lender)
    objects: list[Any]  # the numbers of the segments of shared memory that it names; before it is sent, those
    references: Any  # the references that it carries, as the protocol of reference counts packs them
    tag: Any  # the recorder's, of the tensors that it carries (hooks.Recorder)
    profile: list[Any]  # of a call: the profiled call's number and name, and the settings of what collects
    trace: bytes  # of a call that belongs to a trace which is sampled: 16 bytes of its id, 8 of the caller's span's, 1 of flags

    # Notices
    notice: str  # the name of its handler

    # Requests
    path: tuple[int, ...] | list[int]  # the mailbox executions that it descends from, the outermost first
    mailbox: int  # the number of the mailbox that it is for
    creates: bool  # it makes what the mailbox is of
    method: str
    group: str  # the concurrency group, where it is not the method's own
    priority: int
    window: int  # the result is a stream, of so many buffered items at most; 0: bounded by bytes only
    num_returns: int  # where it is not 1
    rref: bytes  # with num_returns 0: names the RRef whose value the result becomes, as the reference counts pack that
    keep: bool  # a large result stays where it was made until it is fetched
    unordered: bool  # it need not wait for earlier requests of the same caller
    place: int  # the id of the same request when it was first made: it takes that one's place in the order
    unresolved: bool  # arguments are still to be fetched by the receiver


_TEXT: Final = frozenset({str})
pack_header: Final = msgpack.packb


def unpack_header(extra: bytes) -> Header:
    """Return the header of a frame.

    Raises:
        ProtocolError: it is not a msgpack map with text keys.
    """
    try:
        header = msgpack.unpackb(extra)
    except Exception as error:
        raise ProtocolError(f"the header of a message cannot be read: {error!r}") from error
    if type(header) is not dict or not _TEXT.issuperset(map(type, header)):
        raise ProtocolError("the header of a message is not a map with text keys")
    return header  # type: ignore[return-value]
