"""Kill points: named moments at which the worker of this process dies, stops, sleeps or fails on purpose.

    with kill_at("autograd_gradient.sent", nth=2, action="exit"):
        train()                                   # this process exits after it has sent its second gradient

The name of a point consists of a type of message and a stage (``"call.sending"``), or is one of
:data:`actorrpc.agent.hooks.POINTS`. :data:`POINTS` lists all points. Import this module before the worker joins its group.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, Literal, Self

from actorrpc.agent import hooks
from actorrpc.agent.calls import Execution
from actorrpc.agent.context import Worker
from actorrpc.agent.peers import Peer
from actorrpc.autograd import transport
from actorrpc.rpc import api
from actorrpc.testing.faults import FaultOptions
from actorrpc.testing.message_types import (
    ANSWER,
    MESSAGES,
    NOTICES,
    Message,
    described,
    type_of_notice,
    type_of_request,
)
from actorrpc.transport.connection import Connection
from actorrpc.transport.stream import OPEN

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


class KillPoint:
    """A kill point, made by :func:`kill_at`. Thread-safe.

    Attributes:
        points: the names of the points at which it acts.
        count: how often its points were reached.
    """

    def __init__(self, points: frozenset[str], act: Callable[[str], None], nth: int, function: Any) -> None:
        self.points = points
        self.count = 0
        self._act = act
        self._nth = nth
        self._options = FaultOptions(function=function)
        self._lock = threading.Lock()

    def start(self) -> Self:
        """Bring it into force in this process."""
        global _in_force
        with _lock:
            _in_force = (*_in_force, self)
            hooks.watch(_reach_of_worker)
            hooks.add_hooks(_HOOKS)
        return self

    def stop(self) -> None:
        """End it. Idempotent."""
        global _in_force
        with _lock:
            _in_force = tuple(each for each in _in_force if each is not self)
            if not _in_force:
                hooks.watch(None)
                hooks.remove_hooks(_HOOKS)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def reach(self, point: str, message: Message | None) -> None:
        """Count that a point was reached, and act if it is the ``nth`` time."""
        selected = self._options.function is None if message is None else self._options.select(message)
        if point not in self.points or not selected:
            return
        with self._lock:
            self.count += 1
            if self.count != self._nth:
                return
        self._act(point)


def kill_at(
    point: str,
    *,
    action: Literal["exit", "kill", "stop", "raise", "sleep"] = "exit",
    nth: int = 1,
    code: int = 1,
    seconds: float = 1.0,
    function: Any = None,
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
        function: only messages that call, or answer, these functions; see :func:`actorrpc.testing.drop`. The request that makes
            an actor calls ``"Class()"``.
    """
    points = frozenset(name for name in POINTS if fnmatchcase(name, point))
    assert points, f"there is no point {point!r}; there are: {', '.join(POINTS)}"

    def act(reached: str) -> None:
        if action == "exit":
            os._exit(code)
        elif action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            # Signal this thread. If the process got the signal, another thread might handle it, and this one would run on.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        elif action == "sleep":
            time.sleep(seconds)
        else:
            raise KillPointError(f"kill_at({point!r}) raises at {reached}")

    return KillPoint(points, act, nth, function)


# Guards changes of _in_force; a leaf. Kill points act without it.
_lock = threading.Lock()
_in_force: tuple[KillPoint, ...] = ()


def _reach(stage: str, message: Message | None) -> None:
    if message is not None:
        for kill in _in_force:
            kill.reach(f"{message.type}.{stage}", message)


def _reach_of_worker(point: str, _worker: str) -> None:
    for kill in _in_force:
        kill.reach(point, None)


class _Hooks(hooks.CallHooks):
    """Reaches the points of messages."""

    def on_start(self, execution: Execution, function: Any, args: tuple[Any, ...]) -> None:
        type, called, _ = type_of_request(function, args, None, "")
        execution.notes[self] = Message(type, execution.peer, called)
        _reach("starting", self._executed(execution))

    def on_end(self, execution: Execution, error: BaseException | None) -> None:
        if error is None:
            _reach("finished", self._executed(execution))

    def _executed(self, execution: Execution) -> Message | None:
        message: Message | None = execution.notes.get(self)
        if message is None or execution.actor is None:
            return message
        return Message("actor_call", message.peer, message.called)

    def before_send(self, sent: hooks.OutgoingMessage) -> None:
        _reach("sending", described(sent, self))

    def after_send(self, sent: hooks.OutgoingMessage) -> None:
        message = described(sent, self)
        if message is not None and any(f"{message.type}.sent" in kill.points for kill in _in_force):
            _hand_over(sent.conn or (sent.peer.conn if sent.call is None else sent.call.conn))
            _reach("sent", message)


_HOOKS: Final = _Hooks()


def _hand_over(conn: Connection | None) -> None:
    """Wait until the kernel has accepted all data that was written to a connection, or the connection is lost."""
    while conn is not None and conn.state is OPEN:
        conn.flush(True)
        if conn.writer.is_drained(wait=True):
            return


def _watch_notices(worker: Worker) -> Callable[[bool], None]:
    """Have the points around the handlers of notices reached on a worker that starts."""
    handlers = worker.agent.on_notice
    for name in (hooks.RECEIPT, transport.NOTICE):
        if name in handlers:
            handlers[name] = partial(_handle, name, handlers[name])
    return lambda graceful: None


def _handle(name: str, handler: Callable[[Peer, bytes], None], peer: Peer, body: bytes) -> None:
    type = type_of_notice(name, body)
    message = None if type is None else Message(type, peer, None)
    _reach("arrived", message)
    handler(peer, body)
    _reach("handled", message)


api.on_start.append(_watch_notices)
