"""A parameter server with synchronous and asynchronous workers."""

import numpy as np
import ray


@ray.remote
class ParameterServer:
    def __init__(self, size):
        self.weights = np.zeros(size)

    def apply(self, *gradients):
        self.weights -= 0.5 * np.sum(gradients, axis=0)
        return self.weights

    def get(self):
        return self.weights


@ray.remote
class DataWorker:
    def __init__(self, target):
        self.target = target

    def gradient(self, weights):
        return weights - self.target


ray.init()
target = np.arange(4.0)
server = ParameterServer.remote(4)
workers = [DataWorker.remote(target) for _ in range(2)]
weights = server.get.remote()
for _ in range(3):
    weights = server.apply.remote(*[worker.gradient.remote(weights) for worker in workers])
print(ray.get(weights).tolist())

pending = {worker.gradient.remote(weights): worker for worker in workers}
for _ in range(6):
    [ready], _ = ray.wait(list(pending))
    worker = pending.pop(ready)
    weights = server.apply.remote(ready)
    pending[worker.gradient.remote(weights)] = worker
print(np.round(ray.get(server.get.remote())).tolist())
