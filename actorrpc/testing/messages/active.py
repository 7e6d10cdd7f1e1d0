"""The faults that are in force in this process: the registry between the code that starts faults and the agent's FaultFilter.

Also checks the arguments of faults and kill points that name workers and functions.
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
        # The caller of an actor's method only has the method's name, so a function is matched by its name as well.
        found += [each] if isinstance(each, str) else [names[-1], f":{names[0]}"]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionOptions:
    """Options that faults and kill points have in common."""

    to: Any = option(None, _workers)
    function: Any = option(None, _functions)
    on: str | None = option(None, partial(text, none=True, right="the name of a worker, or a pattern"))

    def __post_init__(self) -> None:
        check_fields(self)

    def mean(self, message: Message) -> bool:
        """Say whether the options select this message."""
        peer = message.peer
        if self.to is not None and not any(
            worker == str(peer.record.rank) or fnmatchcase(peer.name, worker) for worker in self.to
        ):
            return False
        return self.function is None or any(
            fnmatchcase(name, pattern) for pattern in self.function for name in names_of(message.called)
        )


class Injection:
    """A fault or a kill point. Thread-safe.

    It can be started again after it has ended. It can be pickled, without its counters, to be sent to a new process.

    Args:
        call: the name of the function that makes it, and its positional arguments.
        given: its keyword arguments.
        options: the same keyword arguments, checked.
    """

    def __init__(self, call: tuple[str, ...], given: dict[str, Any], options: InjectionOptions) -> None:
        self._call = call
        default = {each.name: each.default for each in fields(options)}
        self._given = {name: value for name, value in given.items() if value != default[name]}
        self._on = options.on
        # Guards _started and the counters of subclasses; a leaf.
        self._lock = threading.Lock()
        self._started = False

    def start(self) -> Self:
        """Bring the fault into force on this worker. Before ``init_rpc``, it takes effect when the worker has joined.

        Raises:
            RuntimeError: it is in force already, or the process is an in-process cluster.
        """
        if here.worker is None and workers_here():
            raise RuntimeError(
                f"{self!r} needs a worker with its own process: this one is an InProcessCluster, which has cut(), reset(), "
                "stop() and kill() of its own"
            )
        with self._lock:
            if self._started:
                raise RuntimeError(f"{self!r} has been started already")
            self._started = True
        self._enforce()
        return self

    def stop(self) -> None:
        """End the fault. Its delayed messages are sent now, in order. Idempotent."""
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
        """Whether it was started, and has ended neither by :meth:`stop` nor with its agent."""
        return self._started

    def is_for(self, worker: str) -> bool:
        """Say whether it applies to the worker of this name."""
        return self._on is None or fnmatchcase(worker, self._on)

    def ended(self) -> None:
        """Note that it has ended."""
        with self._lock:
            self._started = False

    def _enforce(self) -> None:
        """Bring it into force now, or when this process joins a group."""
        with _lock:
            if _fault_filter is None:
                _early.append(self)
            else:
                _fault_filter.add(self)

    def __repr__(self) -> str:
        name, *arguments = self._call
        given = [f"{key}={value!r}" for key, value in self._given.items()]
        return f"{name}({', '.join([*map(repr, arguments), *given])})"


# Guards the three below. The locks of the FaultFilter and of faults are taken while it is held.
_lock = threading.Lock()
_fault_filter: FaultFilter | None = None
_worker = ""  # the name of this process's worker, also after its agent has ended: kill points are still reached then
_early: list[Injection] = []  # faults that were started before there was an agent


def begin(fault_filter: FaultFilter | None) -> None:
    """Register the FaultFilter of this process's agent, or None; it gets the faults that were started before."""
    global _fault_filter, _worker
    with _lock:
        _fault_filter = fault_filter
        if fault_filter is not None:
            _worker = fault_filter.worker
            early, _early[:] = _early[:], []
            for fault in early:
                fault_filter.add(fault)


def worker() -> str:
    """Return the name of the worker that this process is, or was last; empty if it never was a worker."""
    return _worker


def _forget() -> None:
    """Replace the locks in a forked child: another thread of the parent may have held them."""
    global _fault_filter, _lock, _worker
    _lock = threading.Lock()
    _fault_filter = None
    _worker = ""
    _early.clear()


os.register_at_fork(after_in_child=_forget)
