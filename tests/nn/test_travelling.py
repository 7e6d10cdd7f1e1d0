"""Remote modules on other workers and as arguments."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import nn

from actorrpc import rpc
from actorrpc.errors import PeerDiedError, RpcError
from actorrpc.nn import RemoteModule
from tests.announced import OUTSIDE_OF_A_CONTEXT
from tests.nn import things
from tests.nn.things import Hybrid
from tests.ranks import rpc_group


def run_forward(remote: Any, args: tuple[Any, ...]) -> Any:
    return remote.forward(*args)


def use_all(remote: RemoteModule) -> tuple[Any, ...]:
    """Use a received remote module in all ways."""
    remote.register_forward_hook(lambda _module, _args, output: output + 1)
    x = torch.ones(1, 3)
    called = remote(x).detach()
    return (
        called - remote.forward(x).detach(),
        remote.training,
        sorted(remote.state_dict()),
        [rref.owner_name() for rref in remote.remote_parameters()],
        remote.train().training,
        str(remote),
        type(remote).__name__,
    )


def give_back(remote: RemoteModule) -> RemoteModule:
    return remote


class Labelled(RemoteModule):
    """A user's subclass of RemoteModule."""

    def twice(self, x: Any) -> Any:
        return self(x) * 2


def _sends(rank: int, world_size: int) -> None:
    if rank:
        return
    remote = RemoteModule("worker1", nn.Linear, (3, 2))
    remote.eval()
    remote.register_forward_hook(lambda _module, _args, output: output + 100)  # not sent
    for to in ("worker1", "worker2"):
        remote.eval()
        difference, training, names, owners, back, text, kind = rpc.rpc_sync(to, use_all, (remote,))
        assert torch.allclose(difference, torch.ones(1, 2))
        assert (training, back, kind) == (False, True, "RemoteModule")
        assert names == ["bias", "weight"]
        assert owners == ["worker1", "worker1"]
        assert text == "RemoteModule(Linear on worker1/cpu)"
    remote.added = 1  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="``added`` of RemoteModule is ignored during RPC pickling"):
        assert not rpc.rpc_sync("worker2", hasattr, (remote, "added"))
    del remote.added
    again = rpc.rpc_sync("worker2", give_back, (remote,))
    assert again.module_rref == remote.module_rref
    there = rpc.rpc_sync("worker2", RemoteModule, ("worker0", nn.Linear, (3, 2)))
    assert there.on == "worker0"
    assert there(torch.ones(1, 3)).shape == (1, 2)
    labelled = rpc.rpc_sync("worker2", give_back, (Labelled("worker1", nn.Linear, (3, 2)),))
    assert type(labelled) is Labelled
    assert labelled.twice(torch.ones(1, 3)).shape == (1, 2)
    # A model with remote parts can be sent as well.
    hybrid = Hybrid(RemoteModule("worker1", things.build_linear, (3,)))
    x = torch.randn(2, 3)
    assert torch.equal(rpc.rpc_sync("worker2", run_forward, (hybrid, (x,))), hybrid(x))
    rref = rpc.remote("worker2", Hybrid, (hybrid.remote,))
    assert rref.rpc_sync().forward(x).shape == (2, 3)
    outer = RemoteModule("worker2", Hybrid, (hybrid.remote,))
    assert {"local.weight", "remote.weight"} < set(outer.state_dict())
    outer.load_state_dict(hybrid.state_dict())
    assert torch.equal(outer(x), hybrid(x))
    assert outer.double()(x.double()).dtype is torch.float64
    assert hybrid.remote.state_dict()["weight"].dtype is torch.float64


@pytest.mark.prints(OUTSIDE_OF_A_CONTEXT)
def test_remote_modules_can_be_sent_to_other_workers() -> None:
    rpc_group(_sends, 3)


def _owner_dies(rank: int, world_size: int) -> None:
    if rank:
        return
    remote = RemoteModule("worker1", nn.Linear, (2, 2))
    remote(torch.ones(1, 2))
    (weight, _) = remote.remote_parameters()
    with pytest.raises(PeerDiedError):
        rpc.rpc_sync("worker1", signal.raise_signal, (signal.SIGKILL,))
    for use in (
        lambda: remote(torch.ones(1, 2)),
        lambda: remote.forward_async(torch.ones(1, 2)).wait(),
        remote.state_dict,
        remote.remote_parameters,
        remote.train,
        weight.to_here,
    ):
        with pytest.raises(RpcError, match="worker1"):
            use()
    rpc.shutdown(graceful=False)


def test_a_remote_module_of_a_dead_worker_raises_on_every_use() -> None:
    rpc_group(_owner_dies, 2, may_die=[1])
