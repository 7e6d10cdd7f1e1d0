"""Which faults are in force in this process: the place where those who start them and the agent's fault_filter find each other.

Here is also which workers and functions the arguments of faults and kill points mean.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from actorrpc.agent.context import here, workers_here
from actorrpc.errors import WrongTypeError
from actorrpc.testing.messages.types import names_of
from actorrpc.validation import check_fields, option, text
from actorrpc.wire.identity import WorkerInfo

if TYPE_CHECKING:
    from actorrpc.testing.messages.fault_filter import FaultFilter
    from actorrpc.testing.messages.types import Message

__all__ = ["Injection", "InjectionOptions", "begin", "worker"]


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple, set, frozenset)) else [given]


def _workers(_name: str, given: Any) -> list[str] | None:
    """Check the names, patterns and ranks by which workers are named."""
    if given is None:
        return None
    found = []
    for each in _several(given):
        name = each.name if isinstance(each, WorkerInfo) else each
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            raise WrongTypeError(f"a worker is named by a str, an int rank or a WorkerInfo, not by {each!r}")
        found.append(str(name))
    return found


def _functions(_name: str, given: Any) -> list[str] | None:
    """Check the names and patterns by which functions are named."""
    if given is None:
        return None
    found = []
    for each in _several(given):
        names = names_of(each)
        if not names:
            raise WrongTypeError(f"a function is named by itself or by a str, not by {each!r}")
        # Of an actor's method only the name is known where it is called.
        found += [each] if isinstance(each, str) else [names[-1], f":{names[0]}"]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionOptions:
    """What may be said of faults and of kill points."""

    to: Any = option(None, _workers)
    function: Any = option(None, _functions)
    on: str | None = option(None, partial(text, none=True, right="the name of a worker, or a pattern"))

    def __post_init__(self) -> None:
        check_fields(self)

    def mean(self, message: Message) -> bool:
        """Say whether a message is among those that it concerns."""
        peer = message.peer
        if self.to is not None and not any(
            worker == str(peer.record.rank) or fnmatchcase(peer.name, worker) for worker in self.to
        ):
            return False
        return self.function is None or any(
            fnmatchcase(name, pattern) for pattern in self.function for name in names_of(message.called)
        )


class Injection:
    """What goes wrong on purpose: a fault or a kill point. Thread-safe.

    It can be started again; and it can be pickled, without its counters, to be given to a process that is started.

    Args:
        call: the function that makes it, and what that gets by position.
        given: what it gets by name.
        options: the same, checked.
    """

    def __init__(self, call: tuple[str, ...], given: dict[str, Any], options: InjectionOptions) -> None:
        self._call = call
        default = {each.name: each.default for each in fields(options)}
        self._given = {name: value for name, value in given.items() if value != default[name]}
        self._on = options.on
        # Guards this and the counters; a leaf.
        self._lock = threading.Lock()
        self._started = False

    def start(self) -> Self:
        """Bring it into force on this worker; before ``init_rpc``, it is in force as soon as the worker has joined.

        Raises:
            RuntimeError: it is in force already, or the process is an in-process cluster, whose workers share it.
        """
        if here.worker is None and workers_here():
            raise RuntimeError(
                f"{self!r} is for a worker that has its process: this one is an InProcessCluster, which has cut(), reset(), "
                "stop() and kill() of its own"
            )
        with self._lock:
            if self._started:
                raise RuntimeError(f"{self!r} has been started already")
            self._started = True
        self._enforce()
        return self

    def stop(self) -> None:
        """Take it out of force. Messages that it holds up leave now, in order. Idempotent."""
        with _lock:
            if self in _early:
                _early.remove(self)
            fault_filter = _fault_filter
        if fault_filter is not None:
            fault_filter.remove(self)
        self.ended()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def active(self) -> bool:
        """Whether it has been started, and neither stopped nor ended with its agent."""
        return self._started

    def is_for(self, worker: str) -> bool:
        """Say whether it has any effect on this worker."""
        return self._on is None or fnmatchcase(worker, self._on)

    def ended(self) -> None:
        """Note that it is in force no more."""
        with self._lock:
            self._started = False

    def _enforce(self) -> None:
        """Bring it into force: now, or when this process joins a group."""
        with _lock:
            if _fault_filter is None:
                _early.append(self)
            else:
                _fault_filter.add(self)

    def __repr__(self) -> str:
        name, *arguments = self._call
        given = [f"{key}={value!r}" for key, value in self._given.items()]
        return f"{name}({', '.join([*map(repr, arguments), *given])})"


# Guards the two below. The fault_filter's and the faults' own locks are taken under it.
_lock = threading.Lock()
_fault_filter: FaultFilter | None = None
_worker = ""  # who this process is, or was last: points come even after the end of its agent
_early: list[Injection] = []  # started before there was an agent


def begin(fault_filter: FaultFilter | None) -> None:
    """Name the fault_filter of the agent that is in force in this process; it gets the faults that wait for one."""
    global _fault_filter, _worker
    with _lock:
        _fault_filter = fault_filter
        if fault_filter is not None:
            _worker = fault_filter.worker
            early, _early[:] = _early[:], []
            for fault in early:
                fault_filter.add(fault)


def worker() -> str:
    """Return the name of the worker that this process is, or was last; empty where it has been none."""
    return _worker


def _forget() -> None:
    """In a forked child: another thread may have held the lock."""
    global _fault_filter, _lock, _worker
    _lock = threading.Lock()
    _fault_filter = None
    _worker = ""
    _early.clear()


os.register_at_fork(after_in_child=_forget)
