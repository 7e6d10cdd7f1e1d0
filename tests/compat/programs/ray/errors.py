"""Errors of tasks and actors, caught in Ray's ways."""

import ray
import ray.exceptions
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError


class Refused(Exception):
    def __init__(self, reason, code):
        super().__init__(reason)
        self.code = code


@ray.remote
def refuses():
    raise Refused("not today", 7)


@ray.remote
def passes_on():
    return ray.get(refuses.remote())


@ray.remote
class Broken:
    def __init__(self):
        raise RuntimeError("cannot be made")

    def method(self):
        pass


@ray.remote
class Slow:
    async def sleep(self):
        import asyncio

        await asyncio.sleep(100)


ray.init()
for function in (refuses, passes_on):
    try:
        ray.get(function.remote())
    except Refused as error:
        print(type(error).__name__, error.code, isinstance(error, RayTaskError), type(error.cause).__name__)
try:
    ray.get(Broken.remote().method.remote())
except RayActorError as error:
    print("cannot be made" in str(error))
try:
    ray.get(Slow.remote().sleep.remote(), timeout=0.05)
except GetTimeoutError as error:
    print(isinstance(error, TimeoutError), isinstance(error, RayError))
try:
    ray.put(ray.put(1))
except TypeError:
    print("a reference")
