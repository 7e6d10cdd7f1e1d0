"""_server_process_global_profile: profiles of the calls that a process executes, started and ended remotely."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from actorrpc.rpc import api
from tests.compat.test_profiling import fail, joined
from tests.ranks import run_group

_barrier = threading.Barrier(3)


def together(x: torch.Tensor) -> str:
    """Run on three threads at the same time."""
    _barrier.wait(20)
    torch.neg(x)
    return threading.current_thread().name


def names(found: Any) -> list[list[str]]:
    events = found.local_value().process_global_function_events
    return [[event.name for event in each if "aten" in event.name] for each in events]


def is_observed() -> bool:
    return api.group().agent.hooks.active


def _calls(rank: int, size: int, path: str) -> None:
    with joined(rank, size, path) as rpc:
        if rank:
            return
        x = torch.ones(2)
        kind = rpc._server_process_global_profile
        outer, inner, off = (
            rpc.remote("worker1", kind, kwargs={"enabled": on}) for on in (True, True, False)
        )
        for each in (outer, inner, off):
            each.rpc_sync().__enter__()
            rpc.rpc_sync("worker1", torch.neg, (x,))
        threads = {call.wait() for call in [rpc.rpc_async("worker1", together, (x,)) for _ in range(3)]}
        assert len(threads) == 3
        with pytest.raises(RuntimeError, match="no"):
            rpc.rpc_sync("worker1", fail, (x,))
        inner.rpc_sync().__exit__(None, None, None)
        rpc.rpc_sync("worker1", torch.abs, (x,))
        off.rpc_sync().__exit__(None, None, None)
        outer.rpc_sync().__exit__(None, None, None)
        rpc.rpc_sync("worker1", torch.sign, (x,))
        inside, outside = (rpc.rpc_sync("worker1", names, (each,)) for each in (inner, outer))
        assert [each for each in inside if each] == [["aten::neg"]] * 6
        assert [each[0] for each in outside if each] == ["aten::neg"] * 7 + ["aten::abs"]
        assert "aten::abs" in outer.rpc_sync().key_averages().table()
        assert not rpc.rpc_sync("worker1", is_observed)
        with pytest.raises(RuntimeError, match="not reentrant"):
            outer.rpc_sync().__enter__()


def test_server_profiles_contain_all_calls_that_the_process_executes(tmp_path: Path) -> None:
    run_group(_calls, 2, str(tmp_path / "store"))
