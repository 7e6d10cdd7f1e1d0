"""Implementing a parameter server: each role is a process of its own, started with its rank.

python parameter_server.py --world-size 3
"""

import argparse
import json
import os
from threading import Lock

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.fc1 = nn.Linear(4 * 3 * 3, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method, rref, *args, **kwargs):
    args = [method, rref, *args]
    return rpc.rpc_sync(rref.owner(), call_method, args=args, kwargs=kwargs)


class ParameterServer(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Net()

    def forward(self, inp):
        return self.model(inp)

    def get_dist_gradients(self, cid):
        grads = dist_autograd.get_gradients(cid)
        return {k.cpu(): v.cpu() for k, v in grads.items()}

    def get_param_rrefs(self):
        return [rpc.RRef(param) for param in self.model.parameters()]


param_server = None
global_lock = Lock()


def get_parameter_server():
    global param_server
    with global_lock:
        if not param_server:
            param_server = ParameterServer()
        return param_server


class TrainerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.param_server_rref = rpc.remote("parameter_server", get_parameter_server)

    def get_global_param_rrefs(self):
        return remote_method(ParameterServer.get_param_rrefs, self.param_server_rref)

    def forward(self, x):
        return remote_method(ParameterServer.forward, self.param_server_rref, x)


def digits(seed, count):
    """Eight by eight pictures of four strokes, with noise."""
    dice = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=dice)
    pictures = 0.3 * torch.randn(count, 1, 8, 8, generator=dice)
    for picture, label in zip(pictures[:, 0], labels.tolist(), strict=True):
        if label == 0:
            picture[:, 3:5] += 1
        elif label == 1:
            picture[3:5] += 1
        elif label == 2:
            picture += torch.eye(8)
        else:
            picture += torch.eye(8).flip(0)
    return pictures, labels


def run_training_loop(rank, steps):
    net = TrainerNet()
    opt = DistributedOptimizer(optim.SGD, net.get_global_param_rrefs(), lr=0.1)
    losses = []
    for step in range(steps):
        data, target = digits(1000 * rank + step, 32)
        with dist_autograd.context() as cid:
            output = net(data)
            loss = F.nll_loss(output, target)
            dist_autograd.backward(cid, [loss])
            assert remote_method(ParameterServer.get_dist_gradients, net.param_server_rref, cid) != {}
            opt.step(cid)
        losses.append(loss.item())
    data, target = digits(7, 200)
    correct = (net(data).argmax(1) == target).sum().item()
    print(
        json.dumps({"rank": rank, "losses": losses[:5], "last": losses[-1], "accuracy": correct / 200}),
        flush=True,
    )


def run_parameter_server(rank, world_size):
    rpc.init_rpc(name="parameter_server", rank=rank, world_size=world_size)
    rpc.shutdown()


def run_worker(rank, world_size, steps, rpc_timeout):
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=rpc_timeout)
    rpc.init_rpc(f"trainer_{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    run_training_loop(rank, steps)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rpc-timeout", type=float, default=0)  # seconds; 0: none
    args = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.set_start_method("spawn")
    processes = [mp.Process(target=run_parameter_server, args=(0, args.world_size))]
    processes += [
        mp.Process(target=run_worker, args=(rank, args.world_size, args.steps, args.rpc_timeout))
        for rank in range(1, args.world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    raise SystemExit(max(process.exitcode != 0 for process in processes))
