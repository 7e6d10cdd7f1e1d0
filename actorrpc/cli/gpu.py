"""The checks of ``actorrpc doctor --gpu``: what two processes of this host need to send CUDA tensors from device to device.

Unlike the other modules of this package, this module imports torch. Run as ``python -m actorrpc.cli.gpu``, it is the second
process, which opens blocks of the first process.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from actorrpc.cli.text import amount
from actorrpc.config import Settings
from actorrpc.errors import ConfigError
from actorrpc.observe.findings import fault, note
from actorrpc.observe.model import Finding
from actorrpc.transport.cuda_memory import cuda_memory
from actorrpc.transport.device_memory import DeviceBlock, DeviceMemory

__all__ = ["answer", "check_memory", "checks", "main"]

_SIZE: Final = 64 << 20  # bytes of the block that is opened, and of each copy that is measured
_COPIES: Final = 20
_LIMIT_S: Final = 60.0  # for the second process, which imports torch and opens all devices
_COMMAND: Final = (sys.executable, "-m", "actorrpc.cli.gpu")
_OPTIONS: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# (device, UUID, handle) of a block
_Request = tuple[str, str, list[Any]]


def checks() -> list[Finding]:
    """Check CUDA, the devices, the allocator, a second process, and the setting. Takes some seconds, and at most two minutes."""
    memory = cuda_memory()
    if memory is None:
        lack = "was built without CUDA" if torch.version.cuda is None else "cannot share memory of a device"
        what = f"this torch ({torch.__version__}) {lack}; nothing else was checked"
        return [fault("cuda", what, "install torch with CUDA: https://pytorch.org/get-started/locally")]
    if not torch.cuda.is_available():
        return [
            fault(
                "cuda",
                f"torch {torch.__version__} with CUDA {torch.version.cuda} sees no device; {_visible()}",
                "check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES; a container needs docker run --gpus all",
            )
        ]
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return [
            fault(
                "cuda",
                f"CUDA cannot be used: {_line(error)}; {_visible()}",
                "check the driver with nvidia-smi",
            )
        ]
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    found = [note("cuda", f"torch {torch.__version__} with CUDA {torch.version.cuda}; {_visible()}")]
    return [*found, *map(_device, devices), *check_memory(memory, devices), _setting()]


def _visible() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "CUDA_VISIBLE_DEVICES is not set" if value is None else f"CUDA_VISIBLE_DEVICES={value!r}"


def _device(device: torch.device) -> Finding:
    try:
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        return fault(
            "device",
            f"{device} cannot be used: {_line(error)}",
            "nvidia-smi shows which processes use the device",
        )
    return note(
        "device",
        f"{device}: {properties.name}, {amount(free)} free of {amount(total)}, UUID GPU-{properties.uuid}",
    )


def _setting() -> Finding:
    try:
        settings = Settings.from_environment()
    except ConfigError as error:
        return fault("device lane", str(error), "correct the variable, or unset it")
    off = [
        name
        for name, is_off in (("lane=0", not settings.lane), ("data_only=1", settings.data_only))
        if is_off
    ]
    most = settings.device_lane_bytes
    if most and not off:
        return note(
            "device lane",
            f"CUDA tensors are sent from device to device; a process uses at most {amount(most)} of each device for each peer",
        )
    why = " and ".join([*([] if most else ["device_lane_bytes=0"]), *off])
    remedy = (
        "" if most else f". ACTORRPC_DEVICE_LANE_BYTES={256 << 20} in all processes sets device_lane_bytes"
    )
    return note("device lane", f"with {why}, CUDA tensors are sent through host memory{remedy}")


# -- the second process ------------------------------------------------------------------------------------------


def _in_second_process(requests: Sequence[_Request]) -> list[dict[str, Any]]:
    """Let a second process read blocks.

    Raises:
        OSError: the process cannot be started, has failed or has not answered in time.
        ValueError: the answer of the process cannot be read.
    """
    try:
        done = subprocess.run(
            _COMMAND, input=pickle.dumps(requests), capture_output=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"the process has not answered within {_LIMIT_S:.0f} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise OSError(f"the process has ended with status {done.returncode}: {''.join(said)}")
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def check_memory(
    memory: DeviceMemory,
    devices: Iterable[torch.device],
    read: Callable[[Sequence[_Request]], list[dict[str, Any]]] = _in_second_process,
) -> list[Finding]:
    """Check that another process can open memory of devices, and measure copies.

    Args:
        read: passes (device, UUID, handle) of each block to another process, and returns its answers.
    """
    made: list[tuple[torch.device, DeviceBlock]] = []
    failed: list[str] = []
    try:
        for device in devices:
            try:
                block = memory.allocate(device, _SIZE)
                made.append((device, block))
                memory.fill(block, [0], [_pattern(device)])
            except (MemoryError, RuntimeError) as error:
                failed.append(f"{device}: {_line(error)}")
        options = [f"{name}={os.environ[name]!r}" for name in _OPTIONS if name in os.environ]
        what = f"options of torch's allocator: {', '.join(options) or 'none'}"
        found = [note("allocator", what)]
        if failed:
            found = [
                fault(
                    "allocator",
                    f"this process cannot allocate memory that other processes can open: {'; '.join(failed)}; {what}",
                    "free memory of the device, or change the options that the text names",
                )
            ]
        try:
            requests = [(str(device), memory.uuid(device), block.handle) for device, block in made]
            answers = read(requests) if requests else []
        except (OSError, ValueError) as error:
            answers = [{"error": str(error)}] * len(made)
        for (device, _), each in zip(made, answers, strict=True):
            found.append(_opened(device, each))
    finally:
        for _, block in made:
            block.close()
    return found


def _opened(device: torch.device, told: dict[str, Any]) -> Finding:
    if error := told["error"]:
        return fault(
            "other process",
            f"a second process cannot read memory of {device}: {error}",
            "the driver or a sandbox (seccomp) may forbid that processes share memory of GPUs: run doctor outside of the "
            "container to compare. Until then, CUDA tensors are sent through host memory",
        )
    source = _pattern(device)
    target = torch.empty_like(source)
    rate = _rate(device, lambda: target.copy_(source))
    return note(
        "other process",
        f"a second process reads the right bytes of {device} at {told['gb_per_s']:.0f} GB/s; a copy within the device has "
        f"{rate:.0f} GB/s",
    )


def answer(memory: DeviceMemory, request: _Request) -> dict[str, Any]:
    """Open a block, and read and measure it."""
    device, uuid, handle = request
    try:
        block = memory.open(uuid, handle)
        try:
            (tensor,) = memory.read(block, [0], [_SIZE], [device])
            rate = _rate(torch.device(device), lambda: memory.read(block, [0], [_SIZE], [device]))
        finally:
            block.close()
        is_right = torch.equal(tensor, _pattern(torch.device(device)))
    except (OSError, MemoryError, RuntimeError) as error:
        return {"error": _line(error)}
    return {"error": "" if is_right else "the bytes are wrong", "gb_per_s": rate}


def _pattern(device: torch.device) -> torch.Tensor:
    return torch.arange(251, dtype=torch.uint8, device=device).repeat(_SIZE // 251 + 1)[:_SIZE]


def _rate(device: torch.device, copy: Callable[[], Any]) -> float:
    """Return the GB/s of a copy of :data:`_SIZE` bytes."""
    settle = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    copy()
    settle(device)
    begun = time.perf_counter()
    for _ in range(_COPIES):
        copy()
    settle(device)
    return _SIZE * _COPIES / (time.perf_counter() - begun) / 1e9


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def main() -> None:
    """Read the blocks that standard input names; write the answers to standard output."""
    torch.cuda.init()
    memory = cuda_memory()
    assert memory is not None
    json.dump([answer(memory, each) for each in pickle.load(sys.stdin.buffer)], sys.stdout)


if __name__ == "__main__":
    main()
