"""Patterns of expected output that tests of several folders announce with ``@pytest.mark.prints`` (tests/output.py)."""

from __future__ import annotations

from typing import Final

__all__ = [
    "BETWEEN_STEPS",
    "LAST_WORDS",
    "ODD_TENSORS",
    "OUTSIDE_OF_A_CONTEXT",
    "PROFILER",
    "TORCHSCRIPT",
    "TORCH_RPC",
]

# torch.distributed.rpc prints a line and a traceback for each remote function that raises.
TORCH_RPC: Final = (
    r"DeprecationWarning: `TorchScript` support for functional optimizers is deprecated",
    r"UserWarning: You are using a Backend <class 'torch\..*ProcessGroupGloo'> as a ProcessGroup",
    r"On WorkerInfo\(id=\d+, name=\w+\):$",
    r"^\w+\(.*Traceback .*/torch/distributed/rpc/internal\.py\", line \d+, in _run_function",
)
# torch's profiler prints the first line whenever it starts or stops. If torch was built with CUDA and the host has no GPU, the
# profiler also prints the second line, when it first stops in a process.
PROFILER: Final = r"^USDT:.* profiler_(start|stop)$|^ERROR:.* gpuGetDeviceCount failed with code \d+$"
# torch 2.14 and later warn once in each process.
TORCHSCRIPT: Final = r"FutureWarning: `torch\.jit\.\w+` is (deprecated|not supported)"
OUTSIDE_OF_A_CONTEXT: Final = (
    r"a tensor that requires grad was sent outside of a distributed autograd context.*\(Logged once\.\)$"
)
# Actors print this before they die in tests of deaths.
LAST_WORDS: Final = r"^the last words( \[repeated \d+x across processes\])?$"
# torch warns once in each process about tensors of rare kinds.
ODD_TENSORS: Final = (
    "UserWarning: Sparse invariant checks are implicitly disabled",
    "UserWarning: Sparse CSR tensor support is in beta state",
    "UserWarning: .*quantized tensor creation functions.* are deprecated",
    "UserWarning: ComplexHalf support is experimental",
    "UserWarning: The PyTorch API of nested tensors is in prototype stage",
    "UserWarning: TypedStorage is deprecated",
)
# Python prints this for an unbound socket if Ctrl-C arrives after its creation and before the caller has stored it.
BETWEEN_STEPS: Final = (
    r"ResourceWarning: unclosed <socket\.socket fd=\d+, family=\d+, type=1, proto=0"
    r"(, laddr=\('(0\.0\.0\.0|::)', 0.*)?>"
)
