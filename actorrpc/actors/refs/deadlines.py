"""How long a thread waits for a future: until the time-out of the wait, or the deadline of the call that the thread executes."""

from __future__ import annotations

from typing import Any, Final

from actorrpc import _time
from actorrpc._exceptions import say
from actorrpc.agent.calls import CURRENT
from actorrpc.errors import RpcTimeoutError
from actorrpc.futures import Future
from actorrpc.validation import wait_limit

__all__ = ["INFINITE", "bound_of", "deadline_of", "is_over", "late", "time_is_over", "time_left", "wait_for"]

INFINITE: Final = float("inf")


def deadline_of(timeout: float | None) -> float:
    """Return the time, as of ``_time.now()``, at which a wait must end: its time-out or the deadline of this thread's call.

    Raises:
        WrongTypeError, ConfigError: ``timeout`` is not a number of seconds, or negative.
    """
    until = INFINITE if timeout is None else _time.now() + wait_limit(timeout)
    execution = CURRENT.get()
    return until if execution is None else min(until, execution.deadline)


def time_left(until: float) -> float | None:
    """Return the seconds until a deadline; None if there is no bound."""
    return None if until == INFINITE else max(0.0, until - _time.now())


def is_over(until: float, timeout: float | None) -> bool:
    """Return whether a wait must end now. If it has no time-out, the deadline of this thread's call ends it.

    ``actorrpc debug`` may have extended that deadline.

    Args:
        until, timeout: as for :func:`wait_for`.
    """
    return until <= _time.now() and (timeout is not None or deadline_of(None) <= _time.now())


def time_is_over() -> bool:
    """Return whether the call that this thread executes has reached its deadline.

    Callers then do not log failures of awaited calls.
    """
    execution = CURRENT.get()
    return execution is not None and execution.deadline <= _time.now()


def bound_of(timeout: float | None) -> str:
    """Return the text that names the bound of a wait in errors.

    Args:
        timeout: the time-out of the wait in seconds; None: the wait had only the deadline of the call of this thread.
    """
    return "the time limit of the call that waits for it" if timeout is None else f"{say(timeout)} s"


def late(what: str, timeout: float | None) -> RpcTimeoutError:
    """Return the error of a wait that has timed out."""
    return RpcTimeoutError(
        f"{what} was not complete within {bound_of(timeout)}; it is still running: get() it again, or cancel() it"
    )


def wait_for(future: Future[Any], until: float, timeout: float | None) -> Any:
    """Wait for a future until the deadline ``until``, and return its value.

    Args:
        timeout: the time-out of the wait, in seconds, from which ``until`` was made; None if it had none.

    Raises:
        RpcTimeoutError: the future was not complete at the deadline.
        Exception: the error of the future.
    """
    try:
        while not future.completed and until != INFINITE:
            try:
                return future.wait(max(0.0, until - _time.now()))
            except RpcTimeoutError:
                if future.completed:
                    break
                if is_over(until, timeout):
                    if time_is_over():
                        future.cover()
                    raise late(f"{future.label}", timeout) from None
                until = deadline_of(None)  # `actorrpc debug` has extended the deadline of the waiting call
        return future.wait()
    finally:
        del future  # the traceback of an error refers to this frame: see wait.get()
