"""The question that every process of a group answers, and the answer: two notices with plain values, packed by msgpack.

A question names the parts that are wanted (:data:`PARTS`) and, for those that come in pages, where to begin. An answer has
at most one page of each, and says under ``"next"`` where the next one begins. Records can be
asked for from their end: -100 are the last 100. Nothing of either is ever unpickled. No I/O.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack

from actorrpc.errors import ProtocolError

__all__ = [
    "ACT",
    "ACTED",
    "ACTING",
    "ANSWER",
    "ASK",
    "PARTS",
    "is_acting",
    "merge",
    "pack",
    "patience",
    "unpack",
]

ASK: Final = "observe"
ANSWER: Final = "observed"
#: the request of one who acts (:mod:`actorrpc.observe.actions`): ``{"id", "do", "whom"}``; answer: ``{"id", "problem"}``
ACT: Final = "act"
ACTED: Final = "acted"
#: how the names of visitors begin that act
ACTING: Final = "acting-visitor-"

#: ``process``: the process and its connections; ``actors``: those that live there; ``supervised``: the table of those that it
#: looks after; ``holders``: who refers to the values that it owns; ``threads``: stacks; ``members``: the records of the
#: group's workers, as far as it knows them without asking;
#: ``logs``: what the processes that it has started have printed; ``resources``: what the cluster has, where it is its driver;
#: ``records``: what its flight recorder has, what is under way (with the first page), and what its clock says;
#: ``profiles``: those of torch that it keeps; ``metrics``: sums over its calls
PARTS: Final = frozenset(
    {
        *("process", "actors", "supervised", "holders", "threads", "members", "logs", "resources", "records"),
        *("profiles", "metrics"),
    }
)

PAGED: Final = ("actors", "supervised", "holders", "threads", "logs", "records", "profiles")
_MOST: Final = 4 << 20
_SHORT_S: Final = 1.0


def is_acting(name: str) -> bool:
    """Say whether a visitor of this name has said that it acts."""
    return name.startswith(ACTING)


def patience(timeout: float) -> float:
    """Return for how many seconds one may send nothing who is given ``timeout`` seconds: a call in C may hold it."""
    return min(timeout, max(_SHORT_S, timeout / 5))


def pack(value: dict[str, Any]) -> bytes:
    """Pack a question or an answer."""
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
        found = msgpack.unpackb(body, strict_map_key=False, unicode_errors="replace")
        if not isinstance(found, dict) or type(found.get("id")) is not int:
            raise ValueError("not a map with a number")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"a question about this worker, or its answer, cannot be read: {error}"
        ) from error
    return found


def merge(pages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answers to the questions for one page after the other as one."""
    whole = dict(pages[0])
    for page in pages[1:]:
        for part in PAGED:
            if isinstance(page.get(part), list) and isinstance(whole.get(part), list):
                whole[part] = [*whole[part], *page[part]]
        whole["next"] = page.get("next")
    return whole
