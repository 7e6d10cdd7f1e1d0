"""Distributed pipeline parallelism: the halves of a residual network on two workers, fed with micro-batches."""

import json
import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

NUM_CLASSES = 4
BATCH_SIZE = 12
IMAGE = 8


class Bottleneck(nn.Module):
    def __init__(self, inplanes, planes):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, 2 * planes, 1, bias=False)
        self.downsample = nn.Conv2d(inplanes, 2 * planes, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.conv3(self.relu(self.bn2(self.conv2(out))))
        return self.relu(out + self.downsample(x))


class ResNetBase(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self._lock = threading.Lock()
        torch.manual_seed(seed)

    def parameter_rrefs(self):
        return [RRef(p) for p in self.parameters()]


class ResNetShard1(ResNetBase):
    def __init__(self, device, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.device = device
        self.seq = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), Bottleneck(4, 4)).to(device)

    def forward(self, x_rref):
        x = x_rref.to_here().to(self.device)
        with self._lock:
            out = self.seq(x)
        return out.cpu()


class ResNetShard2(ResNetBase):
    def __init__(self, device, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.device = device
        self.seq = nn.Sequential(Bottleneck(8, 4), nn.AdaptiveAvgPool2d((1, 1))).to(device)
        self.fc = nn.Linear(8, NUM_CLASSES).to(device)

    def forward(self, x_rref):
        x = x_rref.to_here().to(self.device)
        with self._lock:
            out = self.fc(torch.flatten(self.seq(x), 1))
        return out.cpu()


class DistResNet(nn.Module):
    def __init__(self, split_size, workers, *args, **kwargs):
        super().__init__()
        self.split_size = split_size
        self.p1_rref = rpc.remote(workers[0], ResNetShard1, args=("cpu", 21, *args), kwargs=kwargs)
        self.p2_rref = rpc.remote(workers[1], ResNetShard2, args=("cpu", 22, *args), kwargs=kwargs)

    def forward(self, xs):
        out_futures = []
        for x in iter(xs.split(self.split_size, dim=0)):
            x_rref = RRef(x)
            y_rref = self.p1_rref.remote().forward(x_rref)
            z_fut = self.p2_rref.rpc_async().forward(y_rref)
            out_futures.append(z_fut)
        return torch.cat(torch.futures.wait_all(out_futures))

    def parameter_rrefs(self):
        remote_params = []
        remote_params.extend(self.p1_rref.remote().parameter_rrefs().to_here())
        remote_params.extend(self.p2_rref.remote().parameter_rrefs().to_here())
        return remote_params


def run_master(split_size):
    model = DistResNet(split_size, ["worker1", "worker2"])
    loss_fn = nn.MSELoss()
    opt = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.05)
    dice = torch.Generator().manual_seed(3)
    labels = torch.arange(BATCH_SIZE).remainder(NUM_CLASSES)
    one_hot = nn.functional.one_hot(labels, NUM_CLASSES).float()
    inputs = torch.randn(BATCH_SIZE, 3, IMAGE, IMAGE, generator=dice) + labels.view(-1, 1, 1, 1)
    for step in range(5):
        with dist_autograd.context() as context_id:
            outputs = model(inputs)
            loss = loss_fn(outputs, one_hot)
            dist_autograd.backward(context_id, [loss])
            opt.step(context_id)
        print(json.dumps({"split_size": split_size, "step": step, "loss": loss.item()}))


def run_worker(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=256, rpc_timeout=300)
    if rank == 0:
        rpc.init_rpc("master", rank=rank, world_size=world_size, rpc_backend_options=options)
        for split_size in [12, 4]:
            run_master(split_size)
    else:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(3,), nprocs=3, join=True)
