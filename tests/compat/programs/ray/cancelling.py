"""Cancels a call that waits and a call that runs."""

import asyncio
import time

import ray
from ray.exceptions import RayTaskError, TaskCancelledError


@ray.remote
def sleeps():
    while True:
        time.sleep(0.01)


@ray.remote
def waits_for(refs):
    return ray.get(refs[0])


@ray.remote
class Sleeper:
    async def sleep(self):
        await asyncio.sleep(1000)

    async def ping(self):
        return "pong"


ray.init(num_cpus=2)
first = sleeps.remote()
second = waits_for.remote([first])
print(len(ray.wait([second], timeout=0.2)[0]))
ray.cancel(first)
for ref in (first, second):
    try:
        ray.get(ref)
    except (RayTaskError, TaskCancelledError):
        print("cancelled")
sleeper = Sleeper.remote()
ref = sleeper.sleep.remote()
ray.cancel(ref)
try:
    ray.get(ref)
except TaskCancelledError:
    print("cancelled", ray.get(sleeper.ping.remote()))
