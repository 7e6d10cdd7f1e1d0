"""The notices by which a worker is queried: a question and its answer, plain values packed by msgpack. No I/O.

A question names the requested parts and, for parts that are sent in pages, where the page begins. An answer has at most one page
of each part, and its key ``"next"`` gives the begin of the following pages. For records, a negative begin counts from the end:
-100 requests the last 100. The parts ("it" is the queried worker):

* ``process``: the process and its connections. ``actors``: the actors that it hosts. ``supervised``: the table of the actors that
  it supervises. ``holders``: which workers have references to the values that it owns. ``threads``: stacks.
* ``members``: the records of the group's workers that it can list without querying other workers.
* ``logs``: the output of the processes that it has started.
* ``records``: the records of its flight recorder, unfinished calls (with the first page), and the time on its clock.
* ``profiles``: the torch profiles that it keeps. ``metrics``: sums over its calls.

A question ``{"id", "do", "whom"}`` requests an action (:mod:`actorrpc.observe.actions`); its answer is ``{"id", "problem"}``.
Pickle is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgpack

from actorrpc.errors import ProtocolError

__all__ = [
    "ACTING",
    "ANSWER",
    "ASK",
    "all_pages",
    "is_acting",
    "pack",
    "patience",
    "unpack",
]

ASK: Final = "observe"
ANSWER: Final = "observed"
#: the prefix of the names of visitors that may request actions
ACTING: Final = "acting-visitor-"

PAGED: Final = ("actors", "supervised", "holders", "threads", "logs", "records", "profiles")
_MOST: Final = 4 << 20
_SHORT_S: Final = 1.0
_PAGES: Final = 200


def is_acting(name: str) -> bool:
    """Return whether a visitor with this name may request actions."""
    return name.startswith(ACTING)


def patience(timeout: float) -> float:
    """Return for how many seconds of a time-out a worker may send nothing before its query ends.

    A call in C may hold the worker's GIL for a while, so this is at least one second (or the time-out, if that is shorter).
    """
    return min(timeout, max(_SHORT_S, timeout / 5))


def pack(value: dict[str, Any]) -> bytes:
    """Pack a question or an answer."""
    packed: bytes = msgpack.packb(value, unicode_errors="replace")
    return packed


def unpack(body: bytes) -> dict[str, Any]:
    """Unpack a question or an answer.

    Raises:
        ProtocolError: the bytes are no question and no answer.
    """
    try:
        if len(body) > _MOST:
            raise ValueError("too long")
        found = msgpack.unpackb(body, strict_map_key=False, unicode_errors="replace")
        if not isinstance(found, dict) or type(found.get("id")) is not int:
            raise ValueError("not a map with a number")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"a question about this worker, or its answer, cannot be read: {error}"
        ) from error
    return found


def all_pages(
    query: Callable[[list[str], dict[str, int]], dict[str, Any]],
    parts: list[str],
    begin: dict[str, int] | None,
) -> dict[str, Any]:
    """Request page after page (at most ``_PAGES``), and return one answer with the rows of all pages.

    Args:
        query: sends a question for the given parts, from the given begins on, and returns the answer.
        begin: by part: where the first page begins.
    """
    whole: dict[str, Any] = {}
    wanted, at = parts, begin or {}
    for _ in range(_PAGES):
        page = query(wanted, at)
        for part in PAGED:
            if isinstance(page.get(part), list) and isinstance(whole.get(part), list):
                page[part] = [*whole[part], *page[part]]
        whole |= page
        following = page.get("next")
        rows = following.items() if isinstance(following, dict) else ()
        at = {part: place for part, place in rows if part in parts and type(place) is int}
        if not at:
            break
        wanted = list(at)
    return whole
