"""The debugger: ``breakpoint()`` stops a call, and ``actorrpc debug`` controls it over the group's connections.

``prompt.py`` is a pdb that reads and writes through a debug session. ``session.py`` is the session of one stopped call, with its
input, its output and its front end. ``debugger.py`` manages the sessions of a worker, answers front ends, and makes running
threads enter the debugger. The front end is in ``actorrpc.cli.debug``. This module has what a front end and a worker share: the
notices, which are plain values packed by msgpack.

A request has a number ``id``, the operation ``do``, and for most operations the number of a ``session``. The worker sends
one answer, with the same ``id`` and, if the request failed, an ``error``. The worker sends events, without an ``id``, to the
front end that is attached to a session: the output of the session, and its new ``state``.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack

from actorrpc.errors import ProtocolError

__all__ = ["EVENT", "HELD", "OVER", "PUT_OFF", "REQUEST", "RUNS", "pack", "unpack"]

REQUEST: Final = "debug"
EVENT: Final = "debugged"
PUT_OFF: Final = "put off"  # the notice that moves the deadline of a held call at its caller

# States of a session.
HELD: Final = "held"
RUNS: Final = "runs"
OVER: Final = "over"

_MOST: Final = 1 << 20


def pack(value: dict[str, Any]) -> bytes:
    """Pack a notice."""
    packed: bytes = msgpack.packb(value, unicode_errors="replace")
    return packed


def unpack(body: bytes) -> dict[str, Any]:
    """Unpack a notice.

    Raises:
        ProtocolError: the bytes are not a notice.
    """
    try:
        if len(body) > _MOST:
            raise ValueError("too long")
        found = msgpack.unpackb(body, unicode_errors="replace")
        if not isinstance(found, dict):
            raise ValueError("not a map")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a notice of the debugger cannot be read: {error}") from error
    return found
