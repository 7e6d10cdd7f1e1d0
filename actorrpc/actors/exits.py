"""How an actor ends itself from within."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from actorrpc.core.exception_text import say

__all__ = ["ActorExit", "exit_text"]

_code_of: Final[Callable[[SystemExit], Any]] = SystemExit.__dict__[
    "code"
].__get__  # a user's class may hide it


class ActorExit(BaseException):
    """Raised by ``exit_actor()`` in a method: the resident catches it and ends the actor without a restart.

    Not an Exception, so that the ``except Exception`` of a method lets it pass.
    """


def exit_text(exit: SystemExit) -> str:
    """Say that an actor has ended because of ``sys.exit()``: unlike with ``exit_actor()``, it may be made again."""
    code = _code_of(exit)
    return f"sys.exit({'' if code is None else say(code, repr)[:80]}) was called in it"
