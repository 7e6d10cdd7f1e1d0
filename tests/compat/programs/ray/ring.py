"""A token that goes round a ring of actors, and large arrays that are shared."""

import numpy as np
import ray


@ray.remote
class Member:
    def set_next(self, following):
        self.following = following

    async def token(self, hops, path):
        path = [*path, hops]
        if hops == 0:
            return path
        return await self.following.token.remote(hops - 1, path)


@ray.remote
def mean(array):
    return float(array.mean())


ray.init()
members = [Member.remote() for _ in range(3)]
for index, member in enumerate(members):
    ray.get(member.set_next.remote(members[(index + 1) % 3]))
print(ray.get(members[0].token.remote(7, [])))
array = ray.put(np.ones((500, 500)))
print(ray.get([mean.remote(array) for _ in range(4)]))
