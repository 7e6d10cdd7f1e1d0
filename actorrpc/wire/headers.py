"""The header of a message: fields that can be read without unpickling the body. No I/O, no locks.

On the wire, a header is a msgpack map of the fields that are set, in the ``extra`` bytes of a frame. Most messages have no
header.
"""

from __future__ import annotations

from typing import Any, Final, TypedDict

import msgpack

from actorrpc.errors import ProtocolError

__all__ = ["Header", "pack_header", "unpack_header"]


class Header(TypedDict, total=False):
    """The fields of a header. A peer may send any values, so code that reads a field checks its value."""

    # -- any message

    sizes: list[int]  # the sizes of the message's buffers, in bytes
    stream: int  # the number of the stream of chunks that carries the buffers
    # The numbers of the segment of shared memory that contains the buffers, and of its loan (shared_memory.Lender).
    placement: tuple[int, int] | list[int]
    # The numbers of the object segments that the message uses; until the message is sent, the segments themselves.
    objects: list[Any]
    references: Any  # the packed RRefs of the message (rpc.refcount.messages.pack_forks)
    tag: Any  # what the recorder of autograd (hooks.Recorder) has returned for the message's tensors
    profile: list[Any]  # of a profiled call: number and name of its range, the profiler's settings
    trace: bytes  # of a call in a sampled trace: 16 bytes trace id, 8 bytes id of the caller's span, 1 byte flags

    # -- notices

    notice: str  # the name of its handler

    # -- requests

    # The ids of the nested actor calls that led to the request, the outermost first; the innermost is the frame's ``chain``.
    path: tuple[int, ...] | list[int]
    mailbox: int  # the number of the mailbox that receives the request
    creates: bool  # the request creates the actor of the mailbox
    method: str
    group: str  # the concurrency group, if the caller has chosen another than the method's
    priority: int
    window: int  # the most items that a streamed result buffers; 0: only its bytes are limited
    num_returns: int  # if it is not 1
    rref: bytes  # with num_returns 0: the packed ids of the RRef whose value is the result (rpc.refcount.runtime)
    keep: bool  # a large result stays on the worker that computed it until it is fetched
    unordered: bool  # the request need not wait for earlier requests of the same caller
    place: int  # of a repeated request: the id of the first attempt, which gives its place in the order
    unresolved: bool  # the receiver has to fetch arguments before it can run the request


_TEXT: Final = frozenset({str})
pack_header: Final = msgpack.packb


def unpack_header(extra: bytes) -> Header:
    """Return the header of a frame.

    Raises:
        ProtocolError: ``extra`` is not a msgpack map with text keys.
    """
    try:
        header = msgpack.unpackb(extra)
    except Exception as error:
        raise ProtocolError(f"the header of a message cannot be read: {error!r}") from error
    if type(header) is not dict or not _TEXT.issuperset(map(type, header)):
        raise ProtocolError("the header of a message is not a map with text keys")
    return header  # type: ignore[return-value]
