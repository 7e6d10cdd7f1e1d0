"""Squares by a pool of actors."""

import ray
from ray.util import ActorPool


@ray.remote
class Worker:
    def square(self, value):
        return value * value


ray.init(num_cpus=2)
pool = ActorPool([Worker.remote() for _ in range(3)])
print(list(pool.map(lambda actor, value: actor.square.remote(value), range(8))))
pool.submit(lambda actor, value: actor.square.remote(value), 9)
print(pool.has_next(), pool.get_next(), pool.has_next())
