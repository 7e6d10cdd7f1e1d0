"""Kill points: named moments at which a worker dies, stops, sleeps or fails on purpose.

    with testing.kill_at("autograd_gradient.sent", nth=2, action="exit"):
        train()                                   # this process exits after it has sent its second gradient

The name of a point consists of a type of message and a stage (``"call.sending"``), or is one of
:data:`actorrpc.agent.hooks.POINTS`. :data:`POINTS` lists all points. To set kill points in other processes, set their
environment: ``ACTORRPC_FAULT="kill call.sent nth=3 on=worker1"``.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, Literal, NoReturn

from actorrpc.agent import hooks
from actorrpc.errors import ConfigError, WrongTypeError
from actorrpc.testing.messages import active
from actorrpc.testing.messages.types import ANSWER, MESSAGES, NOTICES, Message
from actorrpc.validation import choice, integer, number, option

__all__ = ["POINTS", "KillPoint", "KillPointError", "kill_at"]

_REQUEST_STAGES: Final = {
    "sending": "before it is sent",
    "sent": "after it was handed to the kernel",
    "starting": "before it is executed, on the worker that received it",
    "finished": "after it was executed there, before the answer is sent",
}
_NOTICE_STAGES: Final = {
    "sending": _REQUEST_STAGES["sending"],
    "sent": _REQUEST_STAGES["sent"],
    "arrived": "before the worker that received it acts on it",
    "handled": "after that worker has acted on it",
}
_ANSWER_STAGES: Final = {stage: _REQUEST_STAGES[stage] for stage in ("sending", "sent")}


def _stages(type: str) -> Mapping[str, str]:
    if type in NOTICES:
        return _NOTICE_STAGES
    return _ANSWER_STAGES if type == ANSWER else _REQUEST_STAGES


POINTS: Final[Mapping[str, str]] = {
    **{
        f"{type}.{stage}": f"{what}: {when}"
        for type, what in MESSAGES.items()
        for stage, when in _stages(type).items()
    },
    **hooks.POINTS,
}
"""All points; the values say when each is reached."""


class KillPointError(RuntimeError):
    """Raised at a kill point whose action is ``"raise"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillOptions(active.InjectionOptions):
    """Options of kill points: see :func:`kill_at`."""

    action: str = option("exit", partial(choice, of=("exit", "kill", "stop", "raise", "sleep")))
    nth: int = option(1, partial(integer, least=1))
    code: int = option(1, integer)
    seconds: float = option(1.0, partial(number, unit="seconds"))


class KillPoint(active.Injection):
    """A kill point, made by :func:`kill_at`. Thread-safe.

    Args:
        given: fields of :class:`KillOptions`.

    Attributes:
        points: the names of the points at which it acts.
        action: what it does.
    """

    def __init__(self, point: str, **given: Any) -> None:
        self.points = _points_named(point)
        self._options = KillOptions(**given)
        super().__init__(("kill_at", point), given, self._options)
        self.action = self._options.action
        self._count = 0

    def _enforce(self) -> None:
        if not self.points.isdisjoint(hooks.POINTS):
            _stand(self, True)
        if self.points - hooks.POINTS.keys():
            super()._enforce()

    @property
    def count(self) -> int:
        """How often its points were reached."""
        with self._lock:
            return self._count

    # -- for the fault_filter ------------------------------------------------------------------------------

    def ended(self) -> None:
        """Note that it has ended."""
        _stand(self, False)
        super().ended()

    def wants(self, *stages: str) -> bool:
        """Say whether it acts at any of these stages of a message."""
        return any(point.partition(".")[2] in stages for point in self.points - hooks.POINTS.keys())

    def reach(self, point: str, message: Message | None = None) -> None:
        """Count that a point was reached, and act if it is the ``nth`` time.

        Raises:
            KillPointError: the action is ``"raise"``.
        """
        if point not in self.points:
            return
        options = self._options
        if message is None:
            if options.to is not None or options.function is not None:
                return
        elif not options.mean(message):
            return
        with self._lock:
            self._count += 1
            if self._count != options.nth:
                return
        self._act(point)

    def _act(self, point: str) -> None:
        if self.action == "exit":
            os._exit(self._options.code)
        elif self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "stop":
            # Signal this thread. If the process got the signal, another thread might handle it, and this one would run on.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        elif self.action == "sleep":
            time.sleep(self._options.seconds)
        else:
            self._fail(point)

    def _fail(self, point: str) -> NoReturn:
        raise KillPointError(f"{self!r} raises at {point}")

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self._call[1], **self._given), ()


def kill_at(
    point: str,
    *,
    action: Literal["exit", "kill", "stop", "raise", "sleep"] = "exit",
    nth: int = 1,
    code: int = 1,
    seconds: float = 1.0,
    to: Any = None,
    function: Any = None,
    on: str | None = None,
) -> KillPoint:
    """Return a kill point of this process. Start it with :meth:`KillPoint.start` or as a ``with`` block.

    Args:
        point: a name from :data:`POINTS`, or a pattern (``"rref_*"``), which selects all points that match, counted together.
        action: ``"exit"``: the process exits at once, without cleaning up (``os._exit``); ``"kill"``: it dies by SIGKILL;
            ``"stop"``: it is stopped (SIGSTOP) until it gets SIGCONT; ``"sleep"``: the thread sleeps;
            ``"raise"``: :class:`KillPointError` is raised there.
        nth: act when the point is reached for the nth time, only that time. Counts from 1.
        code: the exit status for ``"exit"``.
        seconds: how long ``"sleep"`` sleeps.
        to: only messages to, or from, these workers: a name, a pattern, a rank or a WorkerInfo, or a list of them.
        function: only messages that call, or answer, these functions; see :func:`drop`. The request that makes an actor calls
            ``"Class()"``.
        on: only on workers with this name or pattern.

    Raises:
        ConfigError: an argument cannot be used; for an unknown point, the message lists all points.
    """
    return KillPoint(
        point, action=action, nth=nth, code=code, seconds=seconds, to=to, function=function, on=on
    )


def _points_named(pattern: Any) -> frozenset[str]:
    if not isinstance(pattern, str):
        raise WrongTypeError(f"a point is named by a str, not by {pattern!r}")
    found = frozenset(name for name in POINTS if fnmatchcase(name, pattern))
    if not found:
        raise ConfigError(f"there is no point {pattern!r}; there are: {', '.join(POINTS)}")
    return found


# -- points that do not belong to a message ---------------------------------------------------------------


# Guards changes of _standing; a leaf. Kill points act without it.
_lock = threading.Lock()
_standing: tuple[KillPoint, ...] = ()


def _stand(kill: KillPoint, stands: bool) -> None:
    """Add or remove a kill point for the points that do not belong to a message."""
    global _standing
    with _lock:
        _standing = (*(each for each in _standing if each is not kill), *([kill] if stands else []))
        hooks.watch(_reached if _standing else None)


def _reached(point: str, worker: str) -> None:
    for kill in _standing:
        if kill.is_for(worker or active.worker()):
            kill.reach(point)


def _forget() -> None:
    """Replace the lock in a forked child: another thread of the parent may have held it."""
    global _lock, _standing
    _lock = threading.Lock()
    _standing = ()
    hooks.watch(None)


os.register_at_fork(after_in_child=_forget)
