"""How objects get into memory that the processes of a host share, and how messages say where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from actorrpc import _time
from actorrpc.actors.refs.deadlines import deadline_of
from actorrpc.agent.peers import MessageContext
from actorrpc.errors import ProtocolError
from actorrpc.flight_recorder import COPIED_BYTES
from actorrpc.serialization import codec
from actorrpc.transport import buffers as memory
from actorrpc.transport.object_store import Allocation, Segment, StoredRange

if TYPE_CHECKING:
    from actorrpc.agent.agent import Agent

__all__ = ["located", "received", "store"]


def store(agent: Agent, spans: Sequence[Any], label: str, site: str) -> Allocation | None:
    """Copy memory into a segment that all processes of the host can map; return None if the system has no shared memory.

    Raises:
        ObjectStoreFullError: shared memory has no room, and no room became free in time.
    """
    offsets, nbytes = memory.layout([span.nbytes for span in spans])
    until = min(deadline_of(None), _time.now() + agent.settings.object_wait)
    room = agent.objects.allocate(nbytes, label=label, site=site, until=until)
    if room is None:
        return None
    begun = _time.now()
    for span, offset in zip(spans, offsets, strict=True):
        memory.copy(room.address + offset, span)
    agent.scheduler.keep_objects()
    if agent.flight_recorder is not None and nbytes >= COPIED_BYTES:
        agent.flight_recorder.noted(begun, "copy", f"of {nbytes} bytes into {label}, in shared memory")
    return room


def located(stored: StoredRange, context: MessageContext) -> tuple[int, int, int]:
    """Return the location of an object for a message to a worker that shares memory with this worker (wire format)."""
    return context.place_of(stored.segment), stored.offset, stored.nbytes


def received(index: int, offset: int, nbytes: int) -> StoredRange:
    """Return the range of shared memory that a message names. Call it while the message is decoded.

    Args:
        index: the position of the segment in the list of segments that came with the message.
        offset, nbytes: the position and the size of the object in that segment, in bytes.

    Raises:
        ProtocolError: the location is not valid, or the segment was not received.
        LimitError: this process has no free file descriptor for the segment.
    """
    context = codec.current_decoding()
    if (
        not isinstance(context, MessageContext)
        or not context.objects
        or not 0 <= index < len(context.objects)
    ):
        raise ProtocolError("a value refers to an object in shared memory that its message does not contain")
    segment = context.objects[index]
    if not isinstance(segment, Segment):
        raise segment
    return segment.range(offset, nbytes)
