"""The notices between a front end and the worker whose calls it debugs: plain values, packed by msgpack. No I/O.

A request has a number ``id``, the operation ``do``, and mostly the number of a ``session``. It is answered once, by the same
``id``: with ``error``, where it could not be done. Of the session that a front end is attached to it hears events, without an
``id``: text that was written, and the new ``state``.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack

from actorrpc.errors import ProtocolError

__all__ = ["EVENT", "HELD", "OVER", "PUT_OFF", "REQUEST", "RUNS", "pack", "unpack"]

REQUEST: Final = "debug"
EVENT: Final = "debugged"
PUT_OFF: Final = "put off"  # a caller is told that its call is held: its deadline moves

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
    """Unpack one.

    Raises:
        ProtocolError: it is none.
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
