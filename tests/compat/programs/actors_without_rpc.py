"""A program of actors. Prints whether its process and the actor's process have torch's RPC, and a gradient in each of them."""

import importlib

import torch

import actorrpc
import actorrpc.autograd as dist_autograd


def torch_rpc():
    """Say whether torch's RPC is available, or why its module cannot be imported."""
    try:
        return str(importlib.import_module("torch.distributed.rpc").is_available())
    except ModuleNotFoundError as error:
        return str(error)


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return self.factor * x

    def found(self, context):
        return torch_rpc(), dist_autograd.get_gradients(context)[self.factor].item()


if __name__ == "__main__":
    print(torch_rpc())
    with actorrpc.init():
        scale = actorrpc.remote(Scale).remote()
        x = torch.tensor(2.0, requires_grad=True)
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [scale(x)])
            print(dist_autograd.get_gradients(context)[x].item())
            print(*actorrpc.get(scale.found.remote(context)))
