"""Training over connections that are cut repeatedly gives bitwise the same results as over a quiet network."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorrpc.autograd as dist_autograd
from actorrpc import rpc
from actorrpc.optim import DistributedOptimizer
from tests.harness.proxy import Disturbance, FaultProxy
from tests.ranks import run_group

NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"
STEPS = 500 if NIGHTLY else 25
STRIKES = 1000 if NIGHTLY else 30
# Most bytes before a cut. A TLS record of up to 16 KiB arrives whole or not at all, after up to 4 KB of handshake.
_LONGEST = 60_000


class Part(nn.Module):
    """Half of a model, on another worker."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


def _forward(part: Any, x: Tensor) -> Tensor:
    result: Tensor = part.local_value()(x)
    return result


def _weights(part: Any) -> list[Tensor]:
    return [each.detach() for each in part.local_value().parameters()]


def _parameters(part: Any) -> list[Any]:
    return [rpc.RRef(each) for each in part.local_value().parameters()]


def _train() -> tuple[list[float], list[Tensor]]:
    parts = [rpc.remote(f"worker{rank}", Part, (rank,)) for rank in (1, 2)]
    owned = [rpc.rpc_sync(part.owner(), _parameters, (part,)) for part in parts]
    optimizer = DistributedOptimizer(torch.optim.Adam, [each for some in owned for each in some], lr=0.01)
    losses = []
    dice = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        x = torch.randn(16, 32, generator=dice)
        with dist_autograd.context() as context:
            y = x
            for part in parts:
                y = rpc.rpc_sync(part.owner(), _forward, (part, y))
            loss = (y - x).square().mean()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    return losses, [each for part in parts for each in rpc.rpc_sync(part.owner(), _weights, (part,))]


def _main(
    rank: int, world_size: int, store: str, disturbances: list[Disturbance]
) -> tuple[list[float], list[Tensor], int]:
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        proxy = FaultProxy(disturbances=disturbances, seed=rank)
        stack.enter_context(proxy)
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", **proxy.options)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
        result = _train() if rank == 0 else ([], [])
        rpc.shutdown()
        return (*result, proxy.struck.total())


@pytest.mark.slow
@pytest.mark.limit(900 if NIGHTLY else 100)
def test_training_over_cut_connections_gives_bitwise_equal_results(tmp_path: Any) -> None:
    quiet, disturbed = (
        run_group(_main, 3, str(tmp_path / name), given, timeout=800 if NIGHTLY else 90)
        for name, given in (
            ("quiet", []),
            (
                "disturbed",
                [
                    Disturbance("cut", after=(500, _LONGEST), part=0.5),
                    Disturbance("reset", after=(500, _LONGEST), part=0.5),
                    Disturbance("half_close", after=(500, _LONGEST + 10_000), part=0.5),
                ],
            ),
        )
    )
    assert sum(struck for _, _, struck in quiet) == 0
    assert sum(struck for _, _, struck in disturbed) >= STRIKES
    assert disturbed[0][0] == quiet[0][0]
    assert all(map(torch.equal, disturbed[0][1], quiet[0][1]))


def _count(number: int) -> int:
    _counted.append(number)
    return number


def _counts() -> list[int]:
    return _counted


_counted: list[int] = []


def _outages(rank: int, world_size: int, store: str, times: int, quiet_s: float, outage_s: float) -> int:
    made = 0
    with contextlib.ExitStack() as stack:
        proxy = FaultProxy(seed=rank)
        stack.enter_context(proxy)
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", **proxy.options)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
        over = threading.Event()

        def disturb() -> None:
            for number in range(times):
                if over.wait(quiet_s):
                    return
                if number % 2:
                    proxy.stall()
                else:
                    proxy.stall()
                    proxy.reset()
                over.wait(outage_s)
                proxy.resume()
            over.set()

        thread = threading.Thread(target=disturb)
        if rank:
            thread.start()
            over.wait()
        else:
            rpc.rpc_sync("worker1", _count, (-1,))
            thread.start()
            while not over.is_set():
                futures = [rpc.rpc_async("worker1", _count, (made + each,), timeout=60) for each in range(20)]
                assert [future.wait() for future in futures] == list(range(made, made + 20))
                made += 20
            assert sorted(rpc.rpc_sync("worker1", _counts)) == [-1, *range(made)]
        thread.join()
        rpc.shutdown()
    return made


@pytest.mark.slow
@pytest.mark.limit(500)
def test_outages_lose_no_result(tmp_path: Any) -> None:
    """Nightly: 5 s outage in every 20 s, for 5 minutes. Otherwise: tenths of a second."""
    times, quiet_s, outage_s = (15, 15.0, 5.0) if NIGHTLY else (4, 0.3, 0.5)
    made, _ = run_group(_outages, 2, str(tmp_path / "store"), times, quiet_s, outage_s, timeout=480)
    assert made >= 20
