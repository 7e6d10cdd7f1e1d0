"""An actor whose groups run beside each other."""

import asyncio
import threading

import ray


@ray.remote(concurrency_groups={"io": 2, "compute": 1})
class Both:
    @ray.method(concurrency_group="io")
    async def read(self):
        await asyncio.sleep(0)
        return "read"

    @ray.method(concurrency_group="compute")
    async def compute(self, value):
        return value * 2

    async def other(self):
        return "other"


@ray.remote(max_concurrency=3)
class Barrier:
    def __init__(self):
        self.barrier = threading.Barrier(3)

    def meet(self):
        return self.barrier.wait(60) >= 0


ray.init()
both = Both.remote()
print(ray.get([both.read.remote(), both.compute.remote(2), both.other.remote()]))
print(ray.get(both.other.options(concurrency_group="io").remote()))
barrier = Barrier.remote()
print(ray.get([barrier.meet.remote() for _ in range(3)]))
