"""Raises the soft limit of file descriptors when a worker needs many.

A connection needs two descriptors, and the usual soft limit is 1 024: a worker to which 600 workers connect would exceed the
limit. The limit is checked when an agent starts and with each new connection, and raised before it is reached. Near the hard
limit, some descriptors are reserved for existing connections, and new connections are refused until others have been closed.
Thread-safe without a lock, because the limit only grows.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
from typing import Final

__all__ = ["SHORT", "SPARE", "explain", "has_room", "make_room", "missing", "say_why"]

_log = logging.getLogger("actorrpc.links")
_AHEAD: Final = 256  # the limit is raised if fewer descriptors are free; fewer are opened between two checks
SHORT: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
"""The error numbers of a lack of descriptors or memory, which may be temporary."""
SPARE: Final = 16
"""Descriptors that are reserved for existing connections: for their shared memory, and for resuming over another socket."""


def make_room(fd: int) -> bool:
    """If a new descriptor is near the soft limit, double the limit, at most to the hard limit.

    Returns:
        Whether at least ``_AHEAD`` more descriptors can be opened; if not, call :func:`has_room` before opening another.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft
    while 0 < wanted < fd + _AHEAD:  # RLIM_INFINITY is negative
        wanted *= 2
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if wanted == soft:
        return soft == resource.RLIM_INFINITY or soft >= fd + _AHEAD
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        _log.warning(
            "%d files and connections are open, the limit is %d and cannot be raised (%s): start with a higher one (ulimit -n), "
            "or connections will fail",
            fd,
            soft,
            error,
        )
        return False
    return wanted >= fd + _AHEAD


def has_room(count: int) -> bool:
    """Return whether ``count`` more descriptors can be opened and :data:`SPARE` remain. Slow: counts all descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return soft == resource.RLIM_INFINITY or len(os.listdir("/proc/self/fd")) - 1 + count + SPARE <= soft
    except OSError:  # no descriptor is free for listing the directory
        return False


def say_why(error: OSError) -> str:
    """Return why this worker has no descriptor for a connection, as a short text for the worker that is refused."""
    if error.errno == errno.EMFILE:
        return f"it may open no more descriptors (RLIMIT_NOFILE, ulimit -n: {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    if error.errno == errno.ENFILE:
        return "no process of its host may open more descriptors (sysctl fs.file-max)"
    return f"its system has nothing left for another connection ({error.strerror})"


def missing() -> str:
    """Return the reason why a descriptor that was sent to this process could not be received."""
    try:
        os.close(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        return explain(error)
    return "there was no descriptor left for it"


def explain(error: OSError) -> str:
    """Return a text about a lack of descriptors, with advice; for other errors, return the error's own text."""
    if error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"this process may open no more descriptors (RLIMIT_NOFILE: soft {soft}, hard {hard}). Start it with a higher hard "
            "limit: ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of Docker"
        )
    if error.errno == errno.ENFILE:
        return (
            "no process of this host may open more descriptors: raise the system's limit (sysctl fs.file-max)"
        )
    return str(error)
