"""Streams of a task and of an actor, and dynamic ones."""

import asyncio

import ray


@ray.remote
def chunks(count):
    for number in range(count):
        yield [number] * 2


@ray.remote
class Reader:
    async def lines(self, count):
        for number in range(count):
            await asyncio.sleep(0)
            yield f"line {number}"


@ray.remote(num_returns="dynamic")
def split(text):
    yield from text.split()


@ray.remote
def count(refs):
    return sum(len(ray.get(ref)) for ref in refs)


async def read(reader):
    return [await ref async for ref in reader.lines.remote(2)]


ray.init()
print([ray.get(ref) for ref in chunks.remote(3)])
print(asyncio.run(read(Reader.remote())))
words = split.remote("one two three")
print(ray.get(count.remote(words)), [ray.get(ref) for ref in ray.get(words)])
first, second = chunks.options(num_returns=2).remote(2)
print(ray.get(first), ray.get(second))
