"""Remote modules on other workers and as arguments. One script runs over torch's RemoteModule as well, for comparison."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch import nn

from actorrpc import rpc
from actorrpc.errors import PeerDiedError, RpcError
from actorrpc.nn import RemoteModule
from tests.announced import OUTSIDE_OF_A_CONTEXT, TORCH_RPC
from tests.nn import things
from tests.nn.things import Echo, Hybrid
from tests.ranks import rpc_group, run_group, unused_path

# -- one script for both implementations -----------------------------------------------------------------------------


def run_forward(remote: Any, args: tuple[Any, ...]) -> Any:
    return remote.forward(*args)


def run_forward_async(remote: Any, args: tuple[Any, ...]) -> Any:
    return remote.forward_async(*args).wait()


def is_training(rref: Any) -> bool:
    mode: bool = rref.local_value().training
    return mode


def _outcome(action: Callable[[], Any]) -> tuple[str, Any]:
    try:
        value = action()
    except Exception as error:
        return "error", ([each.__name__ for each in type(error).__mro__], str(error))
    return "value", value


def _script(module: Any, remote_class: Any) -> dict[str, tuple[str, Any]]:
    """Return the outcomes of operations on remote modules, by name, on worker 0."""
    place, tensor = "worker1/cpu", torch.ones(1)
    found: dict[str, tuple[str, Any]] = {}
    args = (tensor, 2, "3")

    def note(name: str, action: Callable[[], Any]) -> None:
        found[name] = _outcome(action)

    remote = remote_class(place, Echo, (1,), {"second": 2})
    by_rank = remote_class("rank:1/cpu", Echo, args=(1,))
    bare = remote_class("worker1", Echo, (1,))
    note("forward", lambda: remote.forward(*args))
    note("forward by name", lambda: remote.forward(tensor, 2, word="3"))
    note("forward async", lambda: remote.forward_async(*args).wait())
    note("called", lambda: remote(*args))
    note("by rank", lambda: by_rank.forward(*args))
    note("no device", lambda: bare.forward(*args))
    note("device", lambda: (remote.device, by_rank.device, bare.device))
    note("too few", lambda: remote.forward_async(tensor).wait())
    note("parameters", lambda: [rref.to_here().tolist() for rref in remote.remote_parameters()])
    note("own parameters", lambda: len(remote.remote_parameters(recurse=False)))
    note("owner", lambda: remote.remote_parameters()[0].owner().name)
    note("rref", lambda: remote.get_module_rref() == remote.module_rref)
    note("module", lambda: type(remote.get_module_rref().to_here()).__name__)
    note("method", lambda: remote.module_rref.rpc_sync().sum())
    note("train", lambda: remote.train() and module.rpc_sync("worker1", is_training, (remote.module_rref,)))
    note("eval", lambda: remote.eval() and module.rpc_sync("worker1", is_training, (remote.module_rref,)))
    note("bad module", lambda: remote_class(place, things.NotAModule, (1,)).forward())
    note("bad arguments", lambda: remote_class(place, Echo, (1, 2, 3)).forward(*args))
    note("constructor raises", lambda: remote_class(place, things.Picky).forward())
    for name in (
        "nobody/cpu",
        "worker1/foo",
        "worker1/cpu2",
        "worker1/",
        "worker1/cpu/cpu",
        "/",
        "/cpu",
        3.5,
    ):
        note(f"place {name}", lambda: remote_class(name, Echo, (1,)).forward(*args))  # noqa: B023
    for to in ("worker1", "worker2"):
        note(f"sent to {to}", lambda: module.rpc_sync(to, run_forward, (remote, args)))  # noqa: B023
        note(f"sent to {to}, async", lambda: module.rpc_sync(to, run_forward_async, (remote, args)))  # noqa: B023
    note("pickled", lambda: torch.save(remote, os.devnull))
    other = module.rpc_sync(
        "worker2", remote_class.init_from_module_rref, ("worker2", remote.get_module_rref())
    )
    note("from a reference", lambda: other.forward(*args))
    for name, wrong in {
        "register_buffer": ("b", tensor),
        "register_parameter": ("p", nn.Parameter(tensor)),
        "add_module": ("m", None),
        "parameters": (),
        "buffers": (),
        "named_buffers": (),
        "children": (),
        "named_children": (),
        "modules": (),
        "named_modules": (),
        "share_memory": (),
        "register_backward_hook": (print,),
    }.items():
        note(f"no {name}", lambda: getattr(remote, name)(*wrong))  # noqa: B023
    return found


def _over_ours(rank: int, world_size: int) -> dict[str, tuple[str, Any]]:
    return {} if rank else _script(rpc, RemoteModule)


def _over_torch(rank: int, world_size: int, path: str) -> dict[str, tuple[str, Any]]:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    given = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", num_worker_threads=4)
    torch_rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=given)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing it uses TorchScript, which is deprecated
            from torch.distributed.nn import RemoteModule as TorchsRemoteModule
        return {} if rank else _script(torch_rpc, TorchsRemoteModule)
    finally:
        torch_rpc.shutdown()


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.prints(*TORCH_RPC)
def test_remote_modules_give_the_same_results_as_torchs() -> None:
    ours = rpc_group(_over_ours, 3)[0]
    path = unused_path("nn")
    theirs = run_group(_over_torch, 3, path, leak_wait=None, timeout=240)[
        0
    ]  # torch's agent is not checked for leaks
    assert list(ours) == list(theirs)
    problems = []
    for name, (kind, value) in theirs.items():
        our_kind, our_value = ours[name]
        if kind == our_kind == "error":
            # Our error has torch's type. Our text contains the beginning of torch's, or torch's contains ours.
            text = value[1].split(".")[0].split(": ")[0]
            said = text in our_value[1] or our_value[1] in value[1] or name in _WORDED_BETTER
            right = value[0][0] in our_value[0] and said
        else:
            right = (kind, value) == (our_kind, our_value)
        if not right:
            problems.append(f"{name}: {our_kind} {our_value}, torch: {kind} {value}")
    assert not problems, "\n".join(problems)


# Torch's text describes an internal detail, or says less.
_WORDED_BETTER = {"place nobody/cpu", "too few", "bad arguments", "constructor raises", "pickled"}


# -- features beyond torch -------------------------------------------------------------------------------------------


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
        list(remote._forward_hooks) != [],
        type(remote).__name__,
    )


def give_back(remote: RemoteModule) -> RemoteModule:
    return remote


def make_there(place: str) -> RemoteModule:
    return RemoteModule(place, nn.Linear, (3, 2))


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
        difference, training, names, owners, back, text, hooks, kind = rpc.rpc_sync(to, use_all, (remote,))
        assert torch.allclose(difference, torch.ones(1, 2))
        assert (training, back, hooks, kind) == (False, True, True, "RemoteModule")
        assert names == ["bias", "weight"]
        assert owners == ["worker1", "worker1"]
        assert text == "RemoteModule(Linear on worker1/cpu)"
    remote.added = 1  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="``added`` of RemoteModule is ignored during RPC pickling"):
        assert not rpc.rpc_sync("worker2", hasattr, (remote, "added"))
    del remote.added
    again = rpc.rpc_sync("worker2", give_back, (remote,))
    assert again.module_rref == remote.module_rref
    there = rpc.rpc_sync("worker2", make_there, ("worker0",))
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


def _state_goes(rank: int, world_size: int) -> None:
    if rank:
        return
    parts = [RemoteModule(f"worker{n}", things.normed, (4,)) for n in (1, 2)]
    model = nn.Sequential(nn.Linear(4, 4), *parts)
    x = torch.randn(16, 4)
    model(x)
    model.eval()
    local = nn.Sequential(nn.Linear(4, 4), things.normed(4), things.normed(4))
    local.load_state_dict(model.state_dict())
    local.eval()
    assert torch.equal(local(x), model(x))
    with torch.no_grad():
        for each in local.parameters():
            each.mul_(2)
    model.load_state_dict(local.state_dict())
    assert torch.equal(local(x), model(x))


@pytest.mark.prints(OUTSIDE_OF_A_CONTEXT)
def test_a_model_across_workers_has_one_state_dict_to_save_and_load() -> None:
    rpc_group(_state_goes, 3)


def _owner_dies(rank: int, world_size: int) -> None:
    if rank:
        return
    remote = RemoteModule("worker1", nn.Linear, (2, 2))
    remote(torch.ones(1, 2))
    (weight, _) = remote.remote_parameters()
    with pytest.raises(PeerDiedError):
        rpc.rpc_sync("worker1", os._exit, (9,))
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
