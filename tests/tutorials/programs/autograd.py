"""Distributed autograd and the distributed optimizer, as their pages show them. For torchrun, with two processes."""

import json
import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import optim
from torch.distributed.optim import DistributedOptimizer

weights = {}


def my_add(t1, t2):
    return torch.add(t1, t2)


def scaled_by_weight(x):
    """A parameter of this worker takes part in what another computes."""
    if "scale" not in weights:
        weights["scale"] = torch.full((3, 3), 0.5, requires_grad=True)
    return weights["scale"] * x


def weight_gradient(context_id):
    return dist_autograd.get_gradients(context_id)[weights["scale"]]


def gradients_of_leaves():
    with dist_autograd.context() as context_id:
        t1 = torch.arange(9.0).view(3, 3).requires_grad_()
        t2 = torch.full((3, 3), 2.0, requires_grad=True)
        t3 = rpc.rpc_sync("worker1", my_add, args=(t1, t2))
        t4 = torch.full((3, 3), 3.0, requires_grad=True)
        t5 = torch.mul(t3, t4)
        loss = t5.sum()
        dist_autograd.backward(context_id, [loss])
        grads = dist_autograd.get_gradients(context_id)
        found = {name: grads[leaf].tolist() for name, leaf in [("t1", t1), ("t2", t2), ("t4", t4)]}
        return {"loss": loss.item(), **found, "in_grad": t1.grad is not None}


def gradient_of_a_remote_weight():
    x = torch.ones(3, 3, requires_grad=True)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", scaled_by_weight, args=(x,))
        back = rpc.rpc_sync("worker1", scaled_by_weight, args=(y * 2,))
        dist_autograd.backward(context_id, [back.sum()], retain_graph=True)
        dist_autograd.backward(context_id, [back.sum()])
        remote = rpc.rpc_sync("worker1", weight_gradient, args=(context_id,))
        return {
            "x": dist_autograd.get_gradients(context_id)[x][0].tolist(),
            "weight": remote[0].tolist(),
        }


def one_step():
    with dist_autograd.context() as context_id:
        rref1 = rpc.remote("worker1", torch.add, args=(torch.ones(2, requires_grad=True), 3))
        rref2 = rpc.remote("worker1", torch.add, args=(torch.ones(2, requires_grad=True), 1))
        loss = rref1.to_here() + rref2.to_here()
        dist_autograd.backward(context_id, [loss.sum()])
        return loss.tolist()


def random_parameters(seed):
    torch.manual_seed(seed)
    return torch.randn(4, requires_grad=True)


def optimized(optimizer_class, **settings):
    rrefs = [rpc.remote(f"worker{rank}", random_parameters, args=(rank,)) for rank in [0, 1]]
    optimizer = DistributedOptimizer(optimizer_class, rrefs, **settings)
    losses = []
    for _ in range(4):
        with dist_autograd.context() as context_id:
            here, there = rrefs[0].to_here(), rrefs[1].to_here()
            loss = ((here - there) ** 2).sum() + there.abs().sum()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
            losses.append(loss.item())
    return {optimizer_class.__name__: losses}


def refused():
    """What the pages say cannot be done, and how it says so."""
    found = {}
    try:
        dist_autograd.get_gradients(12345)
    except RuntimeError as error:
        found["no such context"] = "12345" in str(error)
    with dist_autograd.context() as context_id:
        try:
            dist_autograd.backward(context_id, [torch.ones(2, requires_grad=True) * 2])
        except RuntimeError as error:
            found["not a scalar"] = "not a scalar" in str(error)
    return found


rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
if rank == 0:
    for section in (
        gradients_of_leaves(),
        gradient_of_a_remote_weight(),
        one_step(),
        optimized(optim.SGD, lr=0.1),
        optimized(optim.SGD, lr=0.1, momentum=0.9),
        optimized(optim.Adam, lr=0.1),
        optimized(optim.Adagrad, lr=0.1),
        optimized(optim.RMSprop, lr=0.01),
        refused(),
    ):
        print(json.dumps({"found": section}), flush=True)
rpc.shutdown()
