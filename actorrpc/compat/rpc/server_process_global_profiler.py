"""``torch.distributed.rpc.server_process_global_profiler``: profiling what this process executes for others."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.autograd.profiler_legacy import profile
from torch.autograd.profiler_util import EventList, FunctionEvent

from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import Execution
from actorrpc.agent.context import Worker
from actorrpc.agent.hooks import Interceptor
from actorrpc.rpc import api
from actorrpc.rpc.profiling import ProfilerSettings, intercept, observe

__all__: list[str] = []

_lock = threading.Lock()  # guards what follows; above that of rpc.profiling
_entered: tuple[_server_process_global_profile, ...] = ()
_agent: Agent | None = None


class _server_process_global_profile(profile):
    """Records, while it is entered, what the calls do that this process executes, on whichever threads.

    May be entered in a call from another worker and left in a later one; several at a time record the same. Takes the
    arguments of ``torch.autograd.profiler_legacy.profile`` and has its methods. Operators that a profile of the
    program's own sees (one that is entered in the function that is called) are in that one only.

    Attributes:
        process_global_function_events: after the end, a list of the events of each call, in the order in which the calls ended.
        function_events: the events of all calls.
    """

    function_events: EventList | None

    def __enter__(self) -> Any:
        """Begin.

        Raises:
            RuntimeError: it has been entered before.
        """
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("autograd profiler traces are not reentrant")
        self.entered = True
        self.process_global_function_events: list[list[FunctionEvent]] = []
        _change(lambda entered: (*entered, self))
        return self

    def __exit__(self, *_: object) -> bool:
        """End; the events can be looked at now. Calls that are under way are not among them."""
        if not self.enabled:
            return False
        _change(lambda entered: tuple(each for each in entered if each is not self))
        events = itertools.chain.from_iterable(self.process_global_function_events)
        self.function_events = EventList(
            events, profile_memory=self.profile_memory, with_flops=self.with_flops
        )
        self.function_events._build_tree()
        return False

    def _settings(self) -> ProfilerSettings:
        return ProfilerSettings(
            self.record_shapes, self.profile_memory, self.with_stack, self.with_flops, self.with_modules
        )


class _Observer(Interceptor):
    """Profiles executions while a profile is entered. An interceptor."""

    def wrap(
        self,
        execution: Execution,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[[], Any],
    ) -> Callable[[], Any]:
        """Return a function that runs the call, and gives its events to the profiles that are entered at both times."""
        entered = _entered
        if not entered:
            return call
        merged = ProfilerSettings(*map(any, zip(*(each._settings() for each in entered), strict=True)))
        return lambda: observe(call, merged, partial(_hand_out, entered))


_observer = _Observer()


def _hand_out(to: tuple[_server_process_global_profile, ...], events: list[FunctionEvent]) -> None:
    for each in to:
        if each in _entered:
            each.process_global_function_events.append([_own(event) for event in events])


def _own(event: FunctionEvent) -> FunctionEvent:
    """Return a copy for one profile alone: each puts its events into a tree of its own."""
    found = copy.copy(event)
    found.cpu_children = list(event.cpu_children)
    found.kernels = list(event.kernels)
    return found


def _change(how: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
    global _entered
    with _lock:
        _entered = how(_entered)
        if _agent is not None:
            intercept(_agent, _observer, bool(_entered))


def _started(worker: Worker) -> Callable[[bool], None]:
    global _agent
    _agent = worker.agent
    _change(lambda entered: entered)

    def end(_graceful: bool) -> None:
        global _agent
        _agent = None

    return end


api.on_start.append(_started)
