"""``torch.distributed.rpc._testing``: the agent that loses and delays messages, its options, and its backend.

Importing this module registers the backend, and so replaces ``BackendType``. Therefore only tests of this agent import it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.distributed_c10d import Store

from actorrpc.agent.context import Worker
from actorrpc.compat.rpc import api, backend_registry
from actorrpc.compat.rpc.agent import TensorPipeAgent, TensorPipeRpcBackendOptions
from actorrpc.compat.translate import is_builtin
from actorrpc.errors import ConfigError
from actorrpc.rpc.refcount.tables import Recent
from actorrpc.testing import Fault
from actorrpc.testing.message_types import Message

__all__ = [
    "FaultyTensorPipeAgent",
    "FaultyTensorPipeRpcBackendOptions",
    "faulty_agent_backend_registry",
    "is_available",
]

# torch's type -> (actorrpc's message type; True: only calls of script functions and operators, False: only others, None: all).
_TYPES: Final[Mapping[str, tuple[str, bool | None]]] = {
    "RREF_FORK_REQUEST": ("rref_fork", None),
    "RREF_CHILD_ACCEPT": ("rref_accept", None),
    "RREF_USER_DELETE": ("rref_delete", None),
    "CLEANUP_AUTOGRAD_CONTEXT_REQ": ("autograd_release", None),
    "PYTHON_CALL": ("call", False),
    "SCRIPT_CALL": ("call", True),
    "PYTHON_REMOTE_CALL": ("remote", False),
    "SCRIPT_REMOTE_CALL": ("remote", True),
    "PYTHON_RREF_FETCH_CALL": ("to_here", False),
    "SCRIPT_RREF_FETCH_CALL": ("to_here", True),
}
_REMEMBERED: Final = 10_000


class _Scripts:
    """Recognises calls of script functions and torch's operators ("scripts"), and RRefs to their results. Thread-safe.

    RRefs that another worker has created are not recognised as results of scripts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the table; a leaf
        self._rrefs: Recent[Any, None] = Recent(_REMEMBERED)

    def note(self, message: Message) -> bool:
        """Record the RRef of a message that calls a script. Always return False, so that the fault affects no message."""
        if _is_script(message.called):
            with self._lock:
                self._rrefs.put(message.subject, None)
        return False

    def runs(self, message: Message) -> bool:
        """Say whether a message calls a script, or requests the value of an RRef to the result of a script."""
        if message.type == "to_here":
            return message.subject in self._rrefs
        return _is_script(message.called)

    def runs_not(self, message: Message) -> bool:
        """Say the opposite of :meth:`runs`."""
        return not self.runs(message)


def _is_script(called: Any) -> bool:
    return isinstance(called, torch.jit.ScriptFunction) or (
        not isinstance(called, str) and is_builtin(called)
    )


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Options of the agent that loses and delays messages.

    Args:
        messages_to_fail: torch's names of the message types whose first tries fail.
        messages_to_delay: torch's name of a message type -> the delay of its messages in seconds.
        num_fail_sends: how many tries of each message fail.

    Other keywords: see ``TensorPipeRpcBackendOptions``.

    Raises:
        ConfigError: a value cannot be used, or torch has no message type of this name.
    """

    def __init__(
        self,
        *,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
        **given: Any,
    ) -> None:
        super().__init__(**given)
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends
        self._faults()  # raises if the options are not valid

    def _faults(self) -> list[Fault]:
        for name in (*self.messages_to_fail, *self.messages_to_delay):
            if name not in _TYPES:
                raise ConfigError(f"No such message type: {name!r}; there are: {', '.join(_TYPES)}")
        scripts = _Scripts()
        which = {None: None, True: scripts.runs, False: scripts.runs_not}
        found = [Fault("delay", ["remote"], when=scripts.note)]
        for name in self.messages_to_fail:
            kind, script = _TYPES[name]
            found.append(Fault("drop", [kind], times=self.num_fail_sends, at_once=True, when=which[script]))
        for name, seconds in self.messages_to_delay.items():
            kind, script = _TYPES[name]
            # In torch, a request has no deadline: the called worker runs a call however late the call arrives.
            found.append(Fault("delay", [kind], seconds=seconds, when=which[script], bounded=False))
        return found

    def ready(self, _worker: Worker) -> None:
        for fault in self._faults():
            fault.start()


class FaultyTensorPipeAgent(TensorPipeAgent):
    """The current agent of this process, with faults."""


def is_available() -> bool:
    """Say whether there is a faulty agent in this build: always."""
    return True


def _make_agent(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> FaultyTensorPipeAgent:
    if not isinstance(store, Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. {rpc_backend_options}"
        )
    made = backend_registry._make_agent(store, name, rank, world_size, rpc_backend_options)
    agent = FaultyTensorPipeAgent(made.agent, rpc_backend_options)
    api._set_and_start_rpc_agent(agent)
    return agent


backend_registry.register_backend("FAULTY_TENSORPIPE", FaultyTensorPipeRpcBackendOptions, _make_agent)
# In torch, a module of this name, which registers the backend. It can be imported because this module has a path.
faulty_agent_backend_registry = sys.modules[__name__]
__path__: list[str] = []
