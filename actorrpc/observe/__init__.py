"""Looking into a group: how each worker is, what its actors do, who waits for whom, and where its threads stand.

:func:`actorrpc.state` asks all workers at once and returns a :class:`GroupState`; ``python -m actorrpc status`` and its other
commands do the same from outside. Every process answers from the thread that reads its connections: behind no mailbox, and
without running code of users. One that does not answer is named, with the reason.
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
)
from actorrpc.observe.tracing.torch_profiles import keep_profile
from actorrpc.observe.tracing.trace import TraceSummary

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
    "keep_profile",
]
