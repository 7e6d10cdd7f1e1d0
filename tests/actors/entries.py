"""Entries of mailboxes, as tests make them."""

from __future__ import annotations

from typing import Any

from actorrpc.actors.host.mailbox import Entry

__all__ = ["Call"]


class Call(Entry):
    """A call in a mailbox, which is told who called, what runs it, and in which fields it differs."""

    caller: object = None  # type: ignore[assignment]

    def __init__(self, caller: object, payload: Any = None, **fields: Any) -> None:
        self.caller = caller
        self.payload = payload
        for name, value in fields.items():
            setattr(self, name, value)
