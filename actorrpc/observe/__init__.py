"""The state of a group: its workers, their actors, the calls that wait for each other, and the stacks of threads.

:func:`actorrpc.state` queries all workers at once and returns a :class:`GroupState`. ``python -m actorrpc status`` and its other
commands do the same from a process outside the group. Each worker answers on the thread that reads its connections, so that a
full mailbox does not delay the answer, and runs no code of users for it. Workers that do not answer are listed with the reason.
"""

from __future__ import annotations

from actorrpc.observe.model import (
    BrokenDeadlock,
    Finding,
    GroupState,
    HeldCall,
    MailboxState,
    ObservedActor,
    ObservedCall,
    ObservedConnection,
    ObservedContext,
    ObservedHolder,
    ObservedSegment,
    ObservedStream,
    ObservedWait,
    ObservedWorker,
    OutgoingCall,
    StackFrame,
    ThreadStack,
    WorkerDeath,
)
from actorrpc.observe.torch_profiles import keep_profile
from actorrpc.observe.trace import TraceSummary

__all__ = [
    "BrokenDeadlock",
    "Finding",
    "GroupState",
    "HeldCall",
    "MailboxState",
    "ObservedActor",
    "ObservedCall",
    "ObservedConnection",
    "ObservedContext",
    "ObservedHolder",
    "ObservedSegment",
    "ObservedStream",
    "ObservedWait",
    "ObservedWorker",
    "OutgoingCall",
    "StackFrame",
    "ThreadStack",
    "TraceSummary",
    "WorkerDeath",
    "keep_profile",
]
