"""``torch.distributed.rpc.server_process_global_profiler``: profiles the calls that this process executes for other workers."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch.autograd.profiler_legacy import profile
from torch.autograd.profiler_util import EventList, FunctionEvent

from actorrpc.agent.calls import Execution
from actorrpc.agent.hooks import CallHooks, add_hooks, remove_hooks
from actorrpc.rpc.profiling import Observation, ProfilerSettings

__all__: list[str] = []

_lock = threading.Lock()  # guards _entered; a thread that holds it may take the lock of agent.hooks
_entered: tuple[_server_process_global_profile, ...] = ()


class _server_process_global_profile(profile):
    """Within its ``with`` block, records the operators of the calls that this process executes, on all threads.

    It may be entered in one call from another worker and left in a later call. Several such profiles at a time record the same
    events. It has the arguments and methods of ``torch.autograd.profiler_legacy.profile``. If the called function enters another
    profile of torch, only that profile records the function's operators.

    Attributes:
        process_global_function_events: after the end, a list of the events of each call, in the order in which the calls ended.
        function_events: the events of all calls.
    """

    function_events: EventList | None

    def __enter__(self) -> Any:
        """Begin to record.

        Raises:
            RuntimeError: this profile has been entered before.
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
        """Stop recording, and make the events of all calls that have ended available."""
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


class _Observer(CallHooks):
    """Profiles each execution that begins while profiles are entered; then adds the events to the profiles still entered."""

    def on_start(
        self, execution: Execution, function: Any, args: tuple[Any, ...]
    ) -> AbstractContextManager[Any] | None:
        entered = _entered
        if not entered:
            return None
        merged = ProfilerSettings(*map(any, zip(*(each._settings() for each in entered), strict=True)))
        return Observation(merged, partial(_hand_out, entered))


_observer = _Observer()


def _hand_out(to: tuple[_server_process_global_profile, ...], events: list[FunctionEvent]) -> None:
    for each in to:
        if each in _entered:
            each.process_global_function_events.append([_own(event) for event in events])


def _own(event: FunctionEvent) -> FunctionEvent:
    """Return a copy of an event for one profile, because each profile builds its own tree of events."""
    found = copy.copy(event)
    found.cpu_children = list(event.cpu_children)
    found.kernels = list(event.kernels)
    return found


def _change(how: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
    global _entered
    with _lock:
        before, _entered = _entered, how(_entered)
        if bool(before) != bool(_entered):
            (add_hooks if _entered else remove_hooks)(_observer)
