"""How an actor ends itself from within."""

from __future__ import annotations

__all__ = ["ActorExit"]


class ActorExit(BaseException):
    """Raised by ``exit_actor()`` in a method: the resident catches it and ends the actor without a restart.

    Not an Exception, so that the ``except Exception`` of a method lets it pass.
    """
