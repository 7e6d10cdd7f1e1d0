"""The rows of docs/migration/from-torch-rpc.md that no test elsewhere is marked with."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import actorrpc
from actorrpc import _time, rpc
from actorrpc.nn import RemoteModule
from actorrpc.optim import DistributedOptimizer
from actorrpc.testing import InProcessCluster
from tests.migration.rows import row
from tests.ports import free_port

_gate = threading.Event()


def hold() -> str:
    _gate.wait(30)
    return "through"


@row("rpc.init_rpc(name", "from-torch-rpc")
def test_init_rpc_reads_the_variables_of_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    rpc.init_rpc()
    assert [(each.id, each.name) for each in rpc.get_worker_infos()] == [(0, "worker0")]
    rpc.shutdown()


@pytest.mark.usefixtures("near")
@row("DistributedOptimizer(SGD", "from-torch-rpc")
def test_the_optimizer_accepts_references_modules_actors_and_groups() -> None:
    parameters = [rpc.remote("worker1", torch.ones, (3,), {"requires_grad": True})]
    remote = RemoteModule("worker1/cpu", nn.Linear, (2, 1))
    actor = actorrpc.remote(nn.Linear).remote(2, 1)
    group = actorrpc.spawn(2, nn.Linear, 2, 1)
    with_options = [{"params": [remote], "lr": 1.0}]
    accepted = (
        parameters,
        remote.remote_parameters(),
        [remote],
        [actor],
        [nn.Linear(2, 1)],
        group,
        with_options,
    )
    for taken in accepted:
        DistributedOptimizer(torch.optim.SGD, taken, lr=0.1)


@row("idle workers poll", "from-torch-rpc")
def test_idle_workers_wake_for_heartbeats_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with InProcessCluster(2, heartbeat=60.0) as cluster:
        rpc.rpc_sync("worker1", max, (1, 2))
        cluster.clock.advance(60.0)
        woken: list[float] = []
        doze = _time.doze

        def counted(lock: threading.Lock, until: float, idle: bool = False) -> bool:
            woken.append(until)
            return doze(lock, until, idle)

        monkeypatch.setattr(_time, "doze", counted)
        cluster.clock.advance(3600.0)
        monkeypatch.undo()
    assert 10 < len(woken) < 1000  # 60 heartbeats of each worker; polling once a second would be 7200


@row("rpc_timeout=0, as in the tutorials", "from-torch-rpc")
def test_an_rpc_timeout_of_0_means_no_time_out() -> None:
    with InProcessCluster(2, rpc_timeout=0, heartbeat=60.0) as cluster:
        held = rpc.rpc_async("worker1", hold)
        cluster.clock.advance(3600.0)
        assert not held.done()
        _gate.set()
        assert held.wait() == "through"
