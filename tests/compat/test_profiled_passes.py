"""Distributed backward passes in torch's profiles: the pass, and the handling of gradients of messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.distributed.autograd

from actorrpc.autograd.api import participant
from tests.announced import PROFILER
from tests.compat.test_profiling import KINDS, events_of, joined, profile
from tests.ranks import run_group

pytestmark = pytest.mark.prints(PROFILER)

_NAME = "torch::distributed::autograd::"


def _pass(rank: int, size: int, path: str, kind: str) -> None:
    with joined(rank, size, path) as rpc:
        if rank:
            return
        autograd = torch.distributed.autograd
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", torch.mul, (x, 3.0)).sum()
            with profile(kind) as found:
                autograd.backward(context_id, [loss])
            assert autograd.get_gradients(context_id)[x].tolist() == [3.0, 3.0]
            with profile(kind) as failed, pytest.raises(RuntimeError):
                autograd.backward(context_id, [loss])  # the graph was freed
        events: dict[str, list[Any]] = {}
        for event in events_of(found):
            events.setdefault(event.name, []).append(event)
        [whole] = events[f"{_NAME}backward"]
        for name in ("SendRpcBackward", "RecvRpcBackward"):
            [part] = events[f"{_NAME}{name}"]
            assert (part.is_remote, part.node_id) == (False, 0)
            assert (
                whole.time_range.start <= part.time_range.start <= part.time_range.end <= whole.time_range.end
            )
        assert f"{_NAME}backward" in [event.name for event in events_of(failed)]
        assert participant().watch is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_pass_and_its_parts_are_ranges_in_the_profile(kind: str, tmp_path: Path) -> None:
    run_group(_pass, 2, str(tmp_path / "store"), kind)
