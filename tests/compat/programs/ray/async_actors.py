"""An async actor that holds many callers, and coroutines that await."""

import asyncio

import ray


@ray.remote
class Signal:
    def __init__(self):
        self.ready = asyncio.Event()

    async def send(self):
        self.ready.set()

    async def wait(self, number):
        await self.ready.wait()
        return number


async def main(signal):
    waiting = [signal.wait.remote(number) for number in range(20)]
    try:
        await asyncio.wait_for(asyncio.ensure_future(waiting[0]), timeout=0.05)
    except TimeoutError:
        print("late")
    await signal.send.remote()
    return sum(await asyncio.gather(*waiting))


ray.init()
print(asyncio.run(main(Signal.remote())))
