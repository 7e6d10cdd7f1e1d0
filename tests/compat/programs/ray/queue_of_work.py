"""Producers and consumers around a queue."""

import ray
from ray.util.queue import Empty, Full, Queue


@ray.remote
def produce(queue, start, count):
    for number in range(start, start + count):
        queue.put(number)


@ray.remote
def consume(queue, count):
    return [queue.get(timeout=60) for _ in range(count)]


ray.init(num_cpus=4)
queue = Queue(maxsize=5)
producers = [produce.remote(queue, 10 * index, 10) for index in range(2)]
consumers = [consume.remote(queue, 10) for _ in range(2)]
print(sorted(number for part in ray.get(consumers) for number in part) == list(range(20)), ray.get(producers))
try:
    queue.get_nowait()
except Empty:
    print("empty")
queue.put_nowait_batch(list(range(5)))
try:
    queue.put("more", timeout=0.01)
except Full:
    print("full", queue.qsize())
queue.shutdown()
