"""How an actor ends itself from within."""

from __future__ import annotations

__all__ = ["ActorExit", "exit_text"]


class ActorExit(BaseException):
    """Raised by ``exit_actor()`` in a method: the resident catches it and ends the actor without a restart.

    Not an Exception, so that the ``except Exception`` of a method lets it pass.
    """


def exit_text(exit: SystemExit) -> str:
    """Say that an actor has ended because of ``sys.exit()``: unlike with ``exit_actor()``, it may be made again."""
    code = exit.code
    return f"sys.exit({'' if code is None else repr(code)[:80]}) was called in it"
