"""``torch.distributed.rpc._testing``: it replaces torch's module when imported, and maps torch's message types to ours."""

from __future__ import annotations

import operator
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actorrpc.compat.rpc._testing import _TYPES, FaultyTensorPipeRpcBackendOptions
from actorrpc.errors import ConfigError
from actorrpc.testing import Fault
from actorrpc.testing.message_types import MESSAGES, Message
from tests.output import check


@torch.jit.script
def scripted(t):  # type: ignore[no-untyped-def]
    return t + t


def first(
    options: FaultyTensorPipeRpcBackendOptions, type: str, called: Any, rref: Any = None
) -> Fault | None:
    """Return the first fault that matches a message of this type."""
    peer: Any = SimpleNamespace(name="worker1", record=SimpleNamespace(rank=1))
    faults = options._faults()
    return next((fault for fault in faults if fault.takes(Message(type, peer, called, (b"",), rref))), None)


@pytest.mark.slow
def test_importing_torchs_faulty_agent_gives_ours_under_the_drop_in() -> None:
    """In a separate process, because importing it registers a backend permanently."""
    code = """
import sys
from actorrpc import compat
compat.install()
import torch.distributed.rpc as rpc
assert not rpc.backend_registry.backend_registered("FAULTY_TENSORPIPE")
import torch.distributed.rpc._testing
import actorrpc.compat.rpc._testing as ours
from torch.distributed.rpc._testing import FaultyTensorPipeRpcBackendOptions, faulty_agent_backend_registry as registry
import torch.distributed.rpc._testing.faulty_agent_backend_registry as same
assert rpc._testing is sys.modules["torch.distributed.rpc._testing"] is ours
assert registry is same is ours.faulty_agent_backend_registry
assert ours.__spec__.name == ours.__name__ == "actorrpc.compat.rpc._testing"
backend = rpc.backend_registry.BackendType["FAULTY_TENSORPIPE"]
options = rpc.backend_registry.construct_rpc_backend_options(
    backend, num_worker_threads=8, num_fail_sends=3, messages_to_fail=["RREF_USER_DELETE"], messages_to_delay={"SCRIPT_CALL": 1}
)
assert isinstance(options, FaultyTensorPipeRpcBackendOptions)
assert (options.num_fail_sends, options.messages_to_fail) == (3, ["RREF_USER_DELETE"])
compat.uninstall()
assert "torch.distributed.rpc._testing" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check(done.stderr)


def test_every_message_type_of_torch_maps_to_a_message_type_of_actorrpc() -> None:
    assert {kind for kind, _ in _TYPES.values()} <= set(MESSAGES)
    for given in ({"messages_to_fail": ["NO_SUCH"]}, {"messages_to_delay": {"NO_SUCH": 1.0}}):
        with pytest.raises(ConfigError, match=r"NO_SUCH.*RREF_FORK_REQUEST"):
            FaultyTensorPipeRpcBackendOptions(**given)  # type: ignore[arg-type]


def test_script_and_python_message_types_match_their_functions_only() -> None:
    for type, name in (("call", "CALL"), ("remote", "REMOTE_CALL")):
        script = FaultyTensorPipeRpcBackendOptions(messages_to_fail=[f"SCRIPT_{name}"], num_fail_sends=1)
        python = FaultyTensorPipeRpcBackendOptions(messages_to_delay={f"PYTHON_{name}": 1.0})
        for called, options in (
            (torch.add, script),
            (scripted, script),
            (operator.add, python),
            ("m", python),
        ):
            assert first(options, type, called) is not None
            assert first(python if options is script else script, type, called) is None
