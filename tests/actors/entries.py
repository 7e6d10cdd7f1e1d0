"""Mailbox entries for tests."""

from __future__ import annotations

from typing import Any

from actorrpc.actors.host.mailbox import Entry

__all__ = ["Call"]


class Call(Entry):
    """A mailbox entry with a given caller, payload and fields."""

    caller: object = None  # type: ignore[assignment]

    def __init__(self, caller: object, payload: Any = None, **fields: Any) -> None:
        self.caller = caller
        self.payload = payload
        self.__dict__.update(fields)
