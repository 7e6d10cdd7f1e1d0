"""Descriptors: a worker in contact with many needs more of them than most systems allow a process at first.

A connection takes two, and the usual soft limit is 1 024, however much the hard one allows: the worker that all others ask at
the end of a group of 600 would be out of them. So the soft limit is raised ahead of need, where an agent starts and with each
connection; workers that stay far from it leave it alone. Where the hard limit is near, some are held back for the connections
that are there: nobody else is accepted until others have gone. Any thread; no lock: the limit only grows.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
from typing import Final

__all__ = ["SHORT", "SPARE", "explain", "has_room", "make_room", "missing", "say_why"]

_log = logging.getLogger("actorrpc.links")
_AHEAD: Final = 256  # numbers that are kept free above the newest: more than come at once between two looks
SHORT: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
"""The error numbers of a system that has nothing left for another descriptor: they pass."""
SPARE: Final = 16
"""How many descriptors are left to connections that are there: for shared memory, and to come back over another socket."""


def make_room(fd: int) -> bool:
    """Raise the soft limit of this process's descriptors if ``fd``, which is new, is near it: twofold, or to the hard limit.

    Returns:
        Whether there is room for many more now; otherwise each further one is to be asked for with :func:`has_room`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft
    while 0 < wanted < fd + _AHEAD:  # none at all is a negative number
        wanted *= 2
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if wanted == soft:
        return soft == resource.RLIM_INFINITY or soft >= fd + _AHEAD
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # what happens then, happened before
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
    """Say whether so many descriptors, and the spare ones, can still be opened. Looks at all: for near the limit only."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return soft == resource.RLIM_INFINITY or len(os.listdir("/proc/self/fd")) - 1 + count + SPARE <= soft
    except OSError:  # not even one more, to look with
        return False


def say_why(error: OSError) -> str:
    """Say in few words, to another worker, why this one has no descriptor for it."""
    if error.errno == errno.EMFILE:
        return f"it may open no more descriptors (RLIMIT_NOFILE, ulimit -n: {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    if error.errno == errno.ENFILE:
        return "no process of its host may open more descriptors (sysctl fs.file-max)"
    return f"its system has nothing left for another connection ({error.strerror})"


def missing() -> str:
    """Say why a descriptor that was sent to this process has found no place in it."""
    try:
        os.close(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        return explain(error)
    return "there was no descriptor left for it"


def explain(error: OSError) -> str:
    """Say in words why no descriptor could be had, and what to do; of other errors, what they say themselves."""
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
